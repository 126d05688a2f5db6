"""RecBole's sequential recommenders as modules of domains: batches in RecBole's fields, and tables of the items' rows.

The loss is the model's own ``calculate_loss``, and scores are those of its ``full_sort_predict``.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ..plugin.silo import DomainData, DomainModule, Histories
from .domain_facts import DomainFacts
from .domain_models import Stub, prepared
from .models import ITEM, LENGTH, NEGATIVE, SEQUENCE, USER, Config, seeded_generators
from .parameters import Parameter

MASKED = "MASK_INDEX"  # of BERT4Rec's transform: positions in a history, 0 where there are fewer
_GROUPS = 6  # of histories of similar lengths in a batch
PRETRAIN = "pretrain"  # S3Rec's first stage
_HASHED = 40  # bits of a history's hash; the target's number stands before them
_AT_ONCE = 1 << 16  # histories that are hashed together


class _Rows(nn.Module):
    """A RecBole table of items, made of the items' rows and the special ones: padding in front, a mask behind."""

    def __init__(self, p: Parameter):
        super().__init__()
        self.axis, self.behind = p.axis, p.behind

    def forward(self, items: Tensor, special: Tensor) -> Tensor:
        return torch.cat([special[:1], items, special[1:]]).movedim(0, self.axis)

    def right_inverse(self, table: Tensor) -> tuple[Tensor, Tensor]:
        rows = table.movedim(self.axis, 0)
        end = len(rows) - self.behind
        return rows[1:end].clone(), torch.cat([rows[:1], rows[end:]])


class SameTarget:
    """FEARec's second view of a sample: another sample of the domain with the same target.

    RecBole draws such samples until one has another history, which never ends where all have the same. Here one of
    those that differ is drawn at once, each as likely, and RecBole's loss is handed the drawn ones in its order. They
    come from ``histories`` as ``DomainData`` has them, of each of which the last ``width`` items are read.
    """

    def __init__(self, histories: tuple[Tensor, Tensor], width: int):
        self.items, bounds = histories
        self.width = width
        index = torch.arange(len(self.items), device=bounds.device)
        self.first = bounds[:-1].repeat_interleave(bounds.diff())
        samples = index[index > self.first]
        generator = torch.Generator().manual_seed(0)
        self.factors = torch.randint(1 << 62, (width,), generator=generator).to(bounds.device) | 1
        keys = torch.cat([self._keys(self.histories(part)[0], self.items[part]) for part in samples.split(_AT_ONCE)])
        self.keys, order = keys.sort()
        self.samples = samples[order]

    def histories(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """RecBole's ids of what comes before the interactions ``samples``, (n, width), and how many these are, (n,)."""
        lengths = (samples - self.first[samples]).clamp(max=self.width)
        column = torch.arange(self.width, device=samples.device)
        index = (samples - lengths)[:, None] + column
        return (self.items[index.clamp(max=len(self.items) - 1)] + 1) * (column < lengths[:, None]), lengths

    def _keys(self, histories: Tensor, targets: Tensor) -> Tensor:
        hashed = (histories * self.factors[:histories.shape[1]]).sum(1) >> (63 - _HASHED)
        return (targets << _HASHED) | (hashed & ((1 << _HASHED) - 1))

    def draw(self, histories: Tensor, targets: Tensor) -> Tensor:
        """For each of B samples of RecBole's ids (B, L) and targets (B,), among those of the domain, an interaction
        with the same target and another history, or with the same history where there is no other: (B,)."""
        keys = self._keys(histories, targets)
        first, end = torch.searchsorted(self.keys, torch.stack([targets, targets + 1]) << _HASHED)
        same, same_end = torch.searchsorted(self.keys, keys), torch.searchsorted(self.keys, keys, right=True)
        others = (end - first) - (same_end - same)
        chosen = first + (torch.rand(len(targets), device=targets.device) * others).long().clamp(max=others - 1)
        chosen = torch.where(chosen >= same, chosen + same_end - same, chosen)
        return self.samples[torch.where(others > 0, chosen, same)]


def hand_over(model: nn.Module, histories: Tensor, lengths: Tensor) -> None:
    """Let RecBole's FEARec find these histories, of RecBole's ids (B, L), as the other samples, one after the other."""
    numbers = itertools.count()

    class InTurn:
        def __getitem__(self, target: int) -> list[int]:
            return [next(numbers)]

    model.same_item_index = InTurn()
    model.dataset = SimpleNamespace(inter_feat={SEQUENCE: histories.cpu(), LENGTH: lengths.cpu()})


@dataclass(frozen=True)
class Design:
    """What is known of a model with certain settings."""

    parameters: tuple[Parameter, ...]  # RecBole's, as they follow items or not
    facts: DomainFacts
    negatives: bool = False  # the loss reads a negative item per sample

    @property
    def divides(self) -> bool:
        """Whether the loss of a batch may be made of those of its parts."""
        return self.facts.divides and not self.negatives


class RecBoleModule(DomainModule):
    """RecBole's model of a domain, of what ``prepared`` returns.

    A parameter with a row per item and special rows is two parameters: ``original0`` has the items' rows, and
    ``original1`` the special ones, which like all others are of equal shape in all domains.
    """

    def __init__(self, model: nn.Module, config: Config, transform: Callable | None, data: DomainData, design: Design):
        super().__init__()
        self.model, self.design, self.n_items = model, design, data.n_items
        self.transform, self.stub = transform, Stub(data, config["MAX_ITEM_LIST_LENGTH"])
        self.same_target = SameTarget(data.histories, config["MAX_ITEM_LIST_LENGTH"]) if config["contrast"] else None
        self.fixed_length = design.facts.fixed_length
        rows = []
        for p in design.parameters:
            if p.follows == "items":
                where, _, leaf = p.name.rpartition(".")
                parametrize.register_parametrization(model.get_submodule(where), leaf, _Rows(p))
                rows.append(f"model.{where}.parametrizations.{leaf}.original0".replace("..", "."))
        self.rows = tuple(rows)

    def _set_stage(self) -> None:
        """Let S3Rec's loss be that of the stage."""
        from recbole.model.loss import BPRLoss

        of_finetuning = {"CE": nn.CrossEntropyLoss, "BPR": BPRLoss}[self.model.loss_type]
        pretrains = self.stage == PRETRAIN
        self.model.train_stage = PRETRAIN if pretrains else "finetune"
        self.model.loss_fct = nn.BCEWithLogitsLoss(reduction="none") if pretrains else of_finetuning()

    def loss(self, batch, targets):
        """RecBole's loss, of histories of similar lengths together where that is the same."""
        groups = of_similar_lengths(batch.lengths) if self.design.divides and self.stage != PRETRAIN else []
        if len(groups) < 2:
            return self._loss_of(batch, targets)
        with self._called():
            return sum(self._loss_of(_part(batch, group), targets[group]) * (len(group) / len(targets))
                       for group in groups)

    def _loss_of(self, batch: Histories, targets: Tensor) -> Tensor:
        fields = {**self._fields(batch), ITEM: targets + 1}
        if self.design.negatives:  # any item but the target, as with RecBole's sampler for repeatable recommendation
            negative = torch.randint(self.n_items - 1, targets.shape, device=targets.device)
            fields[NEGATIVE] = negative + (negative >= targets) + 1
        if hasattr(self.model, "train_stage"):
            self._set_stage()
        draws = self.design.facts.draws or self.stage == PRETRAIN
        # Whatever the model draws from Python's or NumPy's generator is decided by PyTorch's.
        seeded = seeded_generators(int(torch.randint(1 << 32, ()))) if draws else contextlib.nullcontext()
        with self._called(), seeded:
            interaction = self.interaction(fields)
            if self.transform is not None:
                interaction = self.transform(self.stub, interaction)
                if not (interaction[MASKED] > 0).any():  # RecBole counts no first position, and divides by 0
                    return 0.0 * sum(value.sum() for value in self.parameters())
            if hasattr(self.model, "same_item_index"):  # FEARec's, which without a contrast reads none
                others = fields[SEQUENCE], batch.lengths
                if self.same_target is not None:
                    others = self.same_target.histories(self.same_target.draw(fields[SEQUENCE], targets))
                hand_over(self.model, *others)
            loss = self.model.calculate_loss(interaction)
        return (sum(loss) if isinstance(loss, tuple) else loss).reshape(())

    def scores(self, batch):
        """What RecBole's ``full_sort_predict`` returns of the domain's items, (B, items)."""
        with self._called():
            scores = self.model.full_sort_predict(self.interaction(self._fields(batch)))
        return scores.view(len(batch.lengths), -1)[:, 1:1 + self.n_items]

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Tables are put together once, and what RecBole makes on the way has the parameters' precision."""
        double = next(self.parameters()).dtype == torch.float64
        with parametrize.cached(), _in_double() if double else contextlib.nullcontext():
            yield

    def interaction(self, fields: dict[str, Tensor]):
        """RecBole's batch."""
        from recbole.data.interaction import Interaction

        return Interaction(fields)

    def _fields(self, batch: Histories) -> dict[str, Tensor]:
        """RecBole's fields of histories: ids from 1, 0 at padding."""
        return {USER: batch.users + 1, SEQUENCE: batch.items + 1, LENGTH: batch.lengths}


def of_similar_lengths(lengths: Tensor) -> list[Tensor]:
    """The samples of a batch in groups of similar lengths, if that spares a fifth of all positions; else one group."""
    groups = lengths.argsort(stable=True).chunk(_GROUPS)
    positions = sum(len(group) * int(lengths[group[-1]]) for group in groups)
    everything = torch.arange(len(lengths), device=lengths.device)
    return list(groups) if positions < 0.8 * len(lengths) * int(lengths.max()) else [everything]


def _part(batch: Histories, chosen: Tensor) -> Histories:
    """Some samples, as long as the longest of them."""
    lengths = batch.lengths[chosen]
    return Histories(batch.items[chosen, :int(lengths.max())], lengths, batch.users[chosen])


class _Wide(TorchFunctionMode):
    """Makes complex numbers in double precision that are asked for in single."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = {torch.cfloat: torch.cdouble}
        return func(*args, **{name: wide.get(value, value) if isinstance(value, torch.dtype) else value
                              for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def _in_double() -> Iterator[None]:
    """New tensors of RecBole's code have double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def module_of(name: str, values: Mapping[str, Any], width: int, data: DomainData, design: Design) -> RecBoleModule:
    """A domain's module. Arguments and errors as for ``prepared``."""
    device = data.histories[0].device
    model, config, transform = prepared(name, values, width, data, str(device))
    return RecBoleModule(model, config, transform, data, design).to(device)
