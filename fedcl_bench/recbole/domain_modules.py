"""RecBole's sequential recommenders as modules of a domain, which has the interactions of all its users.

A model is RecBole's own class. In place of a dataset it gets a stub that knows the numbers of users and items. Where it
looks up a categorical feature of an item, a linear layer with ReLU adapts the vector of the item's text (UniSRec's
baselines). S3Rec's attribute of an item is its own text, so that each item has another one. The loss is the model's own
``calculate_loss`` of batches in RecBole's fields, and scores are those of its ``full_sort_predict``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..plugin.silo import DomainData, DomainModule, Histories
from . import models
from .domain_facts import READS_TEXT, DomainFacts
from .models import ITEM, LENGTH, NEGATIVE, SEQUENCE, USER, Config, interaction, seeded_generators
from .parameters import Parameter

TEXT = "text"  # the field's name
PRETRAIN = "pretrain"  # S3Rec's first stage
MASKED = "MASK_INDEX"  # of BERT4Rec's transform: positions in a history, 0 where there are fewer
_SCORES = 1 << 24  # of attributes that are held at once
_GROUPS = 6  # of histories of similar lengths in a batch
_HASHED = 40  # bits of a history's hash; the target's number stands before them
_AT_ONCE = 1 << 16  # histories that are hashed together
# Hyper-parameters that models read and RecBole's files lack; FEARec has no contrast unless one is named.
_MORE: dict[str, dict[str, Any]] = {"FEARec": {"contrast": None, "tau": 1.0, "sim": "dot"}}
# Those that the stages of training and the texts decide.
_DECIDED = {"train_stage", "pre_model_path", "pretrain_epochs", "save_step", "item_attribute", "selected_features",
            "pooling_mode", "transform"}


def hyper_parameters(name: str) -> dict[str, Any]:
    """A model's own hyper-parameters and their default values: those of RecBole's file."""
    known = {**models.defaults(name), **_MORE.get(name, {})}
    return {key: value for key, value in known.items() if key not in _DECIDED}


def configuration(name: str, values: Mapping[str, Any], length: int, device: str = "cpu") -> Config:
    """A model's configuration. Arguments as for ``models.build``."""
    of_text = {"item_attribute": TEXT, "selected_features": [TEXT], "train_stage": PRETRAIN}
    return models.configuration(name, {**_MORE.get(name, {}), **values, **(of_text if name in READS_TEXT else {})},
                                length, device=device)


class Stub(models.ClientDataset):
    """What a model sees of its dataset: the numbers of users and items, and a field of items that stands for texts."""

    def __init__(self, data: DomainData, length: int):
        super().__init__(data.n_users, data.n_items, length)
        self.field2type = {TEXT: None}
        # FEARec makes an index of the samples by target while it is built, which ``SameTarget`` replaces.
        self.inter_feat = {ITEM: torch.zeros(0, dtype=torch.int64)}

    def num(self, field: str) -> int:
        return self.item_num + 1 if field == TEXT else super().num(field)

    def get_item_feature(self):
        return interaction({TEXT: torch.zeros(self.item_num, dtype=torch.int64)})


def prepared(name: str, values: Mapping[str, Any], width: int, data: DomainData,
             device: str = "cpu") -> tuple[nn.Module, Config, Callable | None]:
    """RecBole's model of a domain, its configuration, and what RecBole does with every training batch, if anything.
    Its start is decided by PyTorch's generator. Arguments and errors as for ``models.build``."""
    from recbole.data.transform import construct_transform

    config = configuration(name, values, width, device)
    transform = construct_transform(config) if config["transform"] else None  # it adds its fields' names to config
    cls = models.model_class(name)
    if name == "S3Rec":
        cls = type(name, (TextPretraining, cls), {})

    def made(config: Config, stub: Stub) -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()):  # FEARec prints its frequencies
            model = cls(config, stub)
        if name in READS_TEXT:
            _read_text(model, data)
        return model

    return models.built(made, config, Stub(data, width), int(torch.randint(1 << 62, ()))), config, transform


def _read_text(model: nn.Module, data: DomainData) -> None:
    """Put the items' texts in the place of RecBole's categorical features; their adapter starts as all its layers."""
    from recbole.model.init import xavier_normal_initialization

    text = of_ids(data.features)
    if hasattr(model, "feature_embed_layer"):
        part = model.feature_embed_layer = TextEmbedding(text, model.item_embedding.embedding_dim)
    else:
        part = model.feature_embedding = TextTable(text, model.hidden_size)
    part.apply(getattr(model, "_init_weights", xavier_normal_initialization))


def of_ids(features: Tensor) -> Tensor:
    """Vectors of texts (items, layers, d_W) by RecBole's ids, (items + 1, d_W): the last layer's, zeros for padding."""
    last = features[:, -1]
    return torch.cat([last.new_zeros(1, last.shape[1]), last])


class _Adapted(nn.Module):
    """Frozen vectors of texts, (ids, d_W), and what adapts them to a model's ``dim`` numbers."""

    def __init__(self, text: Tensor, dim: int):
        super().__init__()
        self.register_buffer("text", text, persistent=False)
        self.adapter = nn.Sequential(nn.Linear(text.shape[1], dim), nn.ReLU())


class TextEmbedding(_Adapted):
    """In place of RecBole's ``FeatureSeqEmbLayer``: one feature per item."""

    def forward(self, users: None, items: Tensor) -> tuple[dict[str, Tensor], dict[str, None]]:
        """Sparse and dense features of ids (B, L): (B, L, 1, dim), and none."""
        return {"item": self.adapter(self.text[items]).unsqueeze(-2)}, {"item": None}


class TextTable(_Adapted):
    """In place of S3Rec's table of attributes."""

    @property
    def weight(self) -> Tensor:
        """(ids, dim)."""
        return self.adapter(self.text)


class TextPretraining:
    """S3Rec's pre-training where every item has an attribute of its own; goes before RecBole's class.

    The losses are RecBole's. Scores of all attributes are made for real positions alone and some at a time: RecBole's
    lists of positions x attributes do not fit into memory.
    """

    def reconstruct_pretrain_data(self, item_seq: Tensor, item_seq_len: Tensor) -> tuple[Tensor, ...]:
        """As RecBole's, with the ids of the attributes, (B, L), in place of what is 1 at these."""
        attributes, self.n_features = self.n_features, 1
        try:
            _, *sequences = super().reconstruct_pretrain_data(item_seq, item_seq_len)
        finally:
            self.n_features = attributes
        return sequences[1], *sequences  # an item's attribute has its id

    def pretrain(self, attributes: Tensor, masked: Tensor, items: Tensor, negatives: Tensor,
                 *segments: Tensor) -> Tensor:
        """Weighted sum of the losses AAP, MIP, MAP and SP of a batch (Zhou et al., CIKM 2020)."""
        output, table = self.forward(masked), self.feature_embedding.weight
        hidden = masked == self.mask_token
        seen = (masked != 0) & ~hidden
        aap = attribute_loss(self.aap_norm(output[seen]), table, attributes[seen])
        map_ = attribute_loss(self.map_norm(output[hidden]), table, attributes[hidden])
        of_items, of_negatives = (self._masked_item_prediction(output[hidden], self.item_embedding(ids[hidden]))
                                  for ids in (items, negatives))
        context, positive, negative = (self.forward(segment)[:, -1] for segment in segments)
        of_segments = self._segment_prediction(context, positive) - self._segment_prediction(context, negative)
        return (self.aap_weight * aap + self.mip_weight * softplus(of_negatives - of_items).sum()
                + self.map_weight * map_ + self.sp_weight * softplus(-of_segments).sum())


def attribute_loss(vectors: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Sum of the binary cross-entropies of all attributes, whose vectors the ``table`` (m, dim) has, at n positions,
    each of which has its ``vectors`` (n, dim) and one attribute, ``labels`` (n,)."""
    def of_none(part: Tensor) -> Tensor:
        return softplus(part @ table.T).sum()

    size = max(1, _SCORES // len(table))
    total = -(vectors * table[labels]).sum()
    for part in vectors.split(size):
        total = total + checkpoint(of_none, part, use_reentrant=False, preserve_rng_state=False)
    return total


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
    """RecBole's model of a domain. Arguments and errors as for ``prepared``.

    A parameter with a row per item and special rows is two parameters: ``original0`` has the items' rows, and
    ``original1`` the special ones, which like all others are of equal shape in all domains.
    """

    def __init__(self, name: str, values: Mapping[str, Any], width: int, data: DomainData, design: Design):
        super().__init__()
        device = data.histories[0].device
        self.model, config, self.transform = prepared(name, values, width, data, str(device))
        self.design, self.n_items, self.stub = design, data.n_items, Stub(data, width)
        self.same_target = SameTarget(data.histories, width) if config["contrast"] else None
        self.fixed_length = design.facts.fixed_length
        rows = []
        for p in design.parameters:
            if p.follows == "items":
                where, _, leaf = p.name.rpartition(".")
                parametrize.register_parametrization(self.model.get_submodule(where), leaf, _Rows(p))
                rows.append(f"model.{where}.parametrizations.{leaf}.original0".replace("..", "."))
        self.rows = tuple(rows)
        self.to(device)

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
            batched = self.interaction(fields)
            if self.transform is not None:
                batched = self.transform(self.stub, batched)
                if not (batched[MASKED] > 0).any():  # RecBole counts no first position, and divides by 0
                    return 0.0 * sum(value.sum() for value in self.parameters())
            if hasattr(self.model, "same_item_index"):  # FEARec's, which without a contrast reads none
                others = fields[SEQUENCE], batch.lengths
                if self.same_target is not None:
                    others = self.same_target.histories(self.same_target.draw(fields[SEQUENCE], targets))
                hand_over(self.model, *others)
            loss = self.model.calculate_loss(batched)
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
        return interaction(fields)

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
