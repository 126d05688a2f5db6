"""Calling a RecBole model with the parameters of its clients: all of a chunk at once, or one after the other.

The model is a module of one user. What differs between clients is handed to it call by call: parameters through
``torch.func.functional_call``, the user's own history through the attributes that hold it, random numbers through
``Keyed``. ``torch.func.vmap`` over that function is training many clients at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from ..rng import Tables
from .client_facts import Facts
from .keyed_random import Keyed
from .models import INVERSE, ITEM, LABEL, LENGTH, NEGATIVE, SEQUENCE, USER, interaction, tried
from .parameters import Parameter

HISTORY = "history"
# Numbers that scoring makes on the way, over all clients scored at once.
_AT_ONCE = 1 << 23


class Host(nn.Module):
    """Gives ``functional_call`` any method of a model to call."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.before = [(module, {name: value for name, value in vars(module).items() if not name.startswith("_")})
                       for module in model.modules()]

    def forward(self, method: str, interaction):
        return getattr(self.model, method)(interaction)

    def restore(self) -> None:
        """Every attribute as it was when the model was built: a call keeps nothing for the next."""
        for module, values in self.before:
            for name in [name for name in vars(module) if not name.startswith("_") and name not in values]:
                delattr(module, name)
            vars(module).update(values)


def padded_sequences(items: Tensor, first: Tensor, length: Tensor, width: int, reversed: bool) -> Tensor:
    """Parts of lists of RecBole's ids (C, P), each of which begins at ``first`` and is ``length`` long, both (C, n), as
    RecBole's sequences, padded with 0 at the end (or, reversed, in front): (C, n, width)."""
    position = torch.arange(width, device=items.device)
    if reversed:
        position = position - width + length[:, :, None]
    inside = (position >= 0) & (position < length[:, :, None])
    index = (first[:, :, None] + position).clamp(0, items.shape[1] - 1)
    return items.gather(1, index.flatten(1)).view(index.shape) * inside


class BatchSamples(NamedTuple):
    """The samples of one local batch of C clients."""

    # Item ids, (C, P) and (C, P k), those of the first positive first
    positives: Tensor
    negatives: Tensor
    chosen: Tensor  # numbers of the samples in the batch, (C, b)


def training_fields(samples: str, reversed: bool, batch: BatchSamples, width: int, dtype: torch.dtype
                    ) -> dict[str, Tensor]:
    """RecBole's fields of one local batch: each (C, b, ...), or (C, b k) for groups, in RecBole's order: all positives,
    once for each of their negatives. ``width``: that of sequences."""
    positives, negatives, chosen = batch
    clients, count = positives.shape
    per_positive = negatives.shape[1] // count
    item, negative = positives + 1, negatives + 1
    if samples == "point":
        fields = {ITEM: torch.cat([item, negative], 1).gather(1, chosen), LABEL: (chosen < count).to(dtype)}
    elif samples == "pair":
        fields = {ITEM: item.gather(1, chosen // per_positive), NEGATIVE: negative.gather(1, chosen)}
    elif samples == "group":
        of_item = chosen[:, None] * per_positive + torch.arange(per_positive, device=chosen.device)[:, None]
        fields = {ITEM: item.gather(1, chosen).repeat(1, per_positive),
                  NEGATIVE: negative.gather(1, of_item.flatten(1))}
    elif samples == "user":
        fields = {}
    else:
        target = (chosen if samples == "target" else chosen // per_positive) + 1
        length = target.clamp(max=width)
        sequence = padded_sequences(item, target - length, length, width, reversed)
        fields = {ITEM: item.gather(1, target), SEQUENCE: sequence, INVERSE: sequence, LENGTH: length}
        if samples == "target pair":
            fields[NEGATIVE] = negative.gather(1, target * per_positive + chosen % per_positive)
    return {USER: torch.ones_like(fields.get(ITEM, chosen)), **fields}


class Caller:
    """Calls one model, made by ``models.build``, for many clients. Sequences have the ``width``; ``score_elements`` are
    the numbers that scoring makes on the way, a part that is fixed and one per item."""

    def __init__(self, build: Callable[..., nn.Module], parameters: Sequence[Parameter], facts: Facts,
                 width: int, score_elements: tuple[int, int] = (1, 0)):
        self.build, self.parameters, self.facts, self.width = build, parameters, facts, width
        self.score_elements = score_elements
        self._mine = threading.local()  # a call changes the module, so every thread has its own

    def host(self, n_items: int, negatives: int, device: torch.device) -> Host:
        hosts = vars(self._mine)
        key = f"{n_items} {negatives} {device}"
        if key not in hosts:
            hosts[key] = Host(self.build(1, n_items, negatives, device=str(device)))
        return hosts[key]

    def batch(self, fields: Tables):
        """RecBole's batch."""
        return interaction(fields)

    def call(self, host: Host, method: str, tables: Tables, history: Tensor | None, fields: dict[str, Tensor],
              key: Tensor, done: int) -> tuple[Tensor, Keyed]:
        """One client's call: everything without the dimension of clients."""
        dtype = next(iter(tables.values())).dtype
        values = {f"model.{p.name}": p.assemble(tables) for p in self.parameters}
        host.restore()
        host.train(method == "calculate_loss")
        if self.facts.history:
            ids = torch.stack([torch.zeros_like(history), history])
            real = (ids > 0).to(dtype)
            held = {"ids": ids, "values": real, "lengths": real.long().sum(1).clamp(min=1)}
            for name, what in self.facts.history.items():
                setattr(host.model, name, held[what])
        for name in self.facts.counters:
            setattr(host.model, name, getattr(host.model, name) + done)
        mode = Keyed(key, dtype)
        with mode:
            return torch.func.functional_call(host, values, (method, self.batch(fields))), mode

    def _over_clients(self, of_client: Callable[..., Tensor], alone: str, clients: int, *arguments: Tables) -> Tensor:
        """``of_client`` on every client; arguments have clients first, and what is expanded is the same for all."""
        same = [{name: value[0] for name, value in part.items() if _is_same(value)} for part in arguments]
        differing = [{name: value for name, value in part.items() if not _is_same(value)} for part in arguments]

        def call(*tables):
            return of_client(*({**common, **table} for common, table in zip(same, tables)))

        if not alone:
            return torch.func.vmap(call)(*differing)
        # Unbound once, so that the gradient is put together once.
        apart = [{name: value.unbind(0) for name, value in part.items()} for part in differing]
        return torch.stack([call(*({name: values[c] for name, values in part.items()} for part in apart))
                            for c in range(clients)])

    def loss(self, tables: Tables, batch: BatchSamples, keys: Tensor, done: int, n_items: int, dtype: torch.dtype
             ) -> Tensor:
        """The model's ``calculate_loss`` of one local batch for C clients: shape (C,).

        Args:
            tables: the clients' parameters, each (C, ...).
            keys: of the clients' random numbers, (C,).
            done: local batches that the clients have done in the block.
        """
        positives, negatives, _ = batch
        facts, host = self.facts, self.host(n_items, negatives.shape[1] // positives.shape[1], keys.device)
        fields = training_fields(facts.samples, facts.reversed, batch, self.width, dtype)

        def client_loss(tables: Tables, fields: Tables, of_client: Tables) -> Tensor:
            loss, _ = self.call(host, "calculate_loss", tables, of_client.get(HISTORY), fields, of_client["key"], done)
            return (sum(loss) if isinstance(loss, tuple) else loss).sum()

        of_client = {"key": keys, HISTORY: positives + 1} if facts.history else {"key": keys}
        return self._over_clients(client_loss, facts.loss_alone, len(keys), tables, fields, of_client)

    def scores(self, tables: Tables, history: Tensor | None, n_items: int) -> Tensor:
        """Logits of all items for C clients, without dropout: shape (C, items).

        A client without own items has the scores that the model gives an empty history, 0 where those are no numbers.
        """
        first = next(iter(tables.values()))
        if len(first) == 0:
            return first.new_zeros(0, n_items)
        if history is None:
            return self._scores(tables, None, n_items)
        if int(history.max()) > n_items:  # a teacher that knows fewer items
            history = history * (history <= n_items)
            history = history.gather(1, (history == 0).long().argsort(dim=1, stable=True))
        length = (history > 0).sum(1)
        if self.facts.sequential:
            return self._scores(tables, history, n_items)
        # Clients with equally many items together, so that nothing is padded: some models count padding.
        sizes = length.unique().tolist()
        if len(sizes) == 1:
            return self._scores(tables, history[:, :max(1, sizes[0])], n_items)
        groups = [(length == n).nonzero().flatten() for n in sizes]
        parts = [self._scores(_rows(tables, group), history[group, :max(1, n)], n_items)
                 for n, group in zip(sizes, groups)]
        return torch.cat(parts)[torch.cat(groups).argsort()]

    def _scores(self, tables: Tables, history: Tensor | None, n_items: int) -> Tensor:
        clients = len(next(iter(tables.values())))
        alone, per_item = self.score_elements
        size = max(1, _AT_ONCE // (alone + per_item * n_items))
        if clients > size:
            pieces = torch.arange(clients, device=next(iter(tables.values())).device).split(size)
            return torch.cat([self._scores(_rows(tables, piece), None if history is None else history[piece],
                                           n_items) for piece in pieces])
        device = next(iter(tables.values())).device
        host = self.host(n_items, 1, device)
        items = torch.arange(1, n_items + 1, device=device)
        every = self.facts.score == "predict"
        of_client = {"key": torch.zeros(clients, dtype=torch.int64, device=device)}
        if history is not None:
            of_client[HISTORY] = history
        if self.facts.sequential:
            length = (history > 0).sum(1, keepdim=True)
            of_client[SEQUENCE] = padded_sequences(history, torch.zeros_like(length), length, self.width,
                                                   self.facts.reversed)[:, 0]
            of_client[LENGTH] = length.clamp(min=1)[:, 0]

        def client_scores(tables: Tables, of_client: Tables) -> Tensor:
            fields = {USER: torch.ones_like(items if every else items[:1])}
            if every:
                fields[ITEM] = items
            if self.facts.sequential:
                fields[SEQUENCE] = fields[INVERSE] = of_client[SEQUENCE].expand(len(fields[USER]), -1)
                fields[LENGTH] = of_client[LENGTH].expand(len(fields[USER]))
            scores, mode = self.call(host, self.facts.score, tables, of_client.get(HISTORY), fields,
                                     of_client["key"], 0)
            scores = mode.logits(scores).reshape(-1)
            if not every:
                scores = scores[1:n_items + 1]
            if self.facts.log:
                scores = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
            if history is not None:
                scores = torch.where((of_client[HISTORY] > 0).any(), scores, scores.nan_to_num(0.0))
            return scores

        return self._over_clients(client_scores, self.facts.score_alone, clients, tables, of_client).contiguous()


def _is_same(value: Tensor) -> bool:
    return len(value) > 1 and value.stride(0) == 0


def _rows(tables: Tables, clients: Tensor) -> Tables:
    """Some clients' parameters; what is the same for all stays expanded."""
    return {name: value[:1].expand(len(clients), *value.shape[1:]) if _is_same(value) else value[clients]
            for name, value in tables.items()}


class TrialClients:
    """Made-up clients of a model with so many items: parameters, items and random numbers. Arguments as for ``Caller``.
    """

    CLIENTS, POSITIVES, PER_POSITIVE, ITEMS = 3, 4, 2, 23

    def __init__(self, build: Callable[..., nn.Module], parameters: Sequence[Parameter], width: int,
                 items: int = ITEMS):
        generator = torch.Generator().manual_seed(0)
        self.build, self.parameters, self.width, self.items = build, parameters, width, items
        shapes = {}
        for p in parameters:
            shapes[p.name] = (items, *p.row) if p.follows == "items" else p.row
            if p.follows == "items":
                shapes |= {p.padding: p.row, p.rows_behind: (p.behind, *p.row)}
        self.tables = {name: 0.1 * torch.randn(self.CLIENTS, *shape, generator=generator, dtype=torch.float64)
                       for name, shape in shapes.items()}
        order = torch.stack([torch.randperm(items, generator=generator) for _ in range(self.CLIENTS)])
        self.positives = order[:, :self.POSITIVES]
        self.negatives = order[:, self.POSITIVES:self.POSITIVES * (1 + self.PER_POSITIVE)]
        self.keys = torch.arange(self.CLIENTS)

    def caller(self, facts: Facts, kind: type[Caller] = Caller) -> Caller:
        return kind(self.build, self.parameters, facts, self.width)

    def loss(self, caller: Caller, tables: Tables, chosen: Tensor) -> Tensor:
        """Every client's loss of the samples ``chosen``, (clients, samples)."""
        batch = BatchSamples(self.positives, self.negatives, chosen)
        return caller.loss(tables, batch, self.keys, 0, self.items, torch.float64)

    def scores(self, caller: Caller) -> Tensor:
        """Every client's scores of all items; histories of sequences are padded, as they are in runs."""
        history = None
        if caller.facts.sequential:
            history = nn.functional.pad(self.positives + 1, (0, max(0, self.width - self.POSITIVES)))[:, :self.width]
        elif caller.facts.history:
            history = self.positives + 1
        return caller.scores(self.tables, history, self.items)


@dataclass(frozen=True)
class Elements:
    """Numbers that a model makes on the way: by its loss per sample, and by scoring one client; each is a part that is
    fixed and one per item."""

    loss: tuple[int, int]
    score: tuple[int, int]

    @staticmethod
    def measure(build: Callable[..., nn.Module], parameters: Sequence[Parameter], facts: Facts,
                width: int) -> "Elements":
        """Count them in calls of one client at a time, with few items and with twice as many; raises Refused if a call
        fails, as with hyper-parameters that do not fit together."""
        counts: list[int] = []

        class Counting(Caller):
            def call(self, *arguments):
                result, mode = super().call(*arguments)
                counts.append(mode.elements)
                return result, mode

        def most(what: str, call: Callable[[], Tensor]) -> int:
            counts.clear()
            tried(f"{what} fails on one client", call)
            return max(counts)

        loss, score = [], []
        samples = 1 if facts.samples == "user" else TrialClients.POSITIVES - 1
        for items in (TrialClients.ITEMS, 2 * TrialClients.ITEMS):
            trial = TrialClients(build, parameters, width, items)
            caller = trial.caller(replace(facts, loss_alone="trial", score_alone="trial"), Counting)
            chosen = torch.arange(samples).expand(TrialClients.CLIENTS, -1)
            loss.append(-(-most("its loss", lambda: trial.loss(caller, trial.tables, chosen)) // samples))
            score.append(most(facts.score, lambda: trial.scores(caller)))
        return Elements(_line(*loss), _line(*score))


def _line(few: int, twice: int) -> tuple[int, int]:
    """A fixed part and one per item, from the numbers with few items and with twice as many."""
    slope = -(-(twice - few) // TrialClients.ITEMS)
    return max(1, few - slope * TrialClients.ITEMS), slope
