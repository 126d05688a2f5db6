"""Calling a RecBole model with the parameters of its clients: all of a chunk at once, or one after the other.

The model is a module of one user. What differs between clients is handed to it call by call: parameters through
``torch.func.functional_call``, the user's own history through the attributes that hold it, random numbers through
``Keyed``. ``torch.func.vmap`` over that function is training many clients at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..draws import Tables
from .keyed_random import Keyed
from .models import INVERSE, ITEM, LABEL, LENGTH, NEGATIVE, SEQUENCE, USER
from .parameters import Parameter

HISTORY = "history"
# Numbers that scoring makes on the way, over all clients scored at once.
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Facts:
    """What calling a model has shown.

    Attributes:
        samples: what one sample of its loss is: a ``point`` (item, label), a ``pair`` (item, negative), a ``group``
            (item, all its negatives), a ``target`` (sequence, next item), a ``target pair`` (with a negative), or
            the ``user`` as a whole.
        reversed: it reads sequences with the latest item last.
        history: (module, attribute) pairs that hold the user's history, and what of it: ids, values or lengths.
        counters: (module, attribute) pairs that count the calls of the loss, and where they begin.
        score: the method that scores all items, ``full_sort_predict`` or ``predict``.
        log: its scores are probabilities that sum to 1.
        loss_alone, score_alone: why the loss, or scoring, is called for one client at a time; empty: it is not.
        loss_elements: numbers that the loss makes on the way per sample, and per sample and item.
        score_elements: numbers that scoring makes on the way, and per item.
    """

    samples: str
    reversed: bool = False
    history: Mapping[tuple[str, str], str] = field(default_factory=dict)
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    score: str = "full_sort_predict"
    log: bool = False
    loss_alone: str = ""
    score_alone: str = ""
    loss_elements: tuple[int, int] = (1, 0)
    score_elements: tuple[int, int] = (1, 0)

    @property
    def sequential(self) -> bool:
        return self.samples.startswith("target")

    @property
    def remembers(self) -> bool:
        """Whether scoring needs the client's own items."""
        return self.sequential or bool(self.history)


class Host(nn.Module):
    """Gives ``functional_call`` any method of a model to call."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.before = [(module, {name: value for name, value in vars(module).items() if not name.startswith("_")})
                       for module in model.modules()]

    def forward(self, method: str, interaction):
        return getattr(self.model, method)(interaction)

    def changed(self) -> dict[tuple[str, str], tuple]:
        """Attributes set since ``restore``, by module and name: (before, now)."""
        names = {module: name for name, module in self.model.named_modules()}
        return {(names[module], name): (before.get(name), value) for module, before in self.before
                for name, value in vars(module).items()
                if not name.startswith("_") and name != "training" and before.get(name) is not value}

    def restore(self) -> None:
        """Every attribute as it was when the model was built: a call keeps nothing for the next."""
        for module, values in self.before:
            for name in [name for name in vars(module) if not name.startswith("_") and name not in values]:
                delattr(module, name)
            vars(module).update(values)


def padded_sequences(items: Tensor, first: Tensor, length: Tensor, width: int, reversed: bool) -> Tensor:
    """Parts of lists as RecBole's sequences, padded with 0 at the end (or, reversed, in front).

    Args:
        items: RecBole's ids, (C, P); first, length: where each part begins and how long it is, (C, n).

    Returns:
        (C, n, width).
    """
    position = torch.arange(width, device=items.device)
    if reversed:
        position = position - width + length[:, :, None]
    inside = (position >= 0) & (position < length[:, :, None])
    index = (first[:, :, None] + position).clamp(0, items.shape[1] - 1)
    return items.gather(1, index.flatten(1)).view(index.shape) * inside


def training_fields(samples: str, reversed: bool, positives: Tensor, negatives: Tensor, chosen: Tensor, width: int,
                    dtype: torch.dtype) -> dict[str, Tensor]:
    """RecBole's fields of one local batch of C clients.

    Args:
        positives, negatives: item ids, (C, P) and (C, P k), those of the first positive first.
        chosen: numbers of the samples in the batch, (C, b).
        width: of sequences.

    Returns:
        Each (C, b, ...), or (C, b k) for groups, in RecBole's order: all positives, once for each of their negatives.
    """
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
    """Calls one model for many clients.

    Args:
        build: the model of one user for a number of items, of negatives per positive, and a device.
        parameters: its parameters.
        width: of sequences.
    """

    def __init__(self, build: Callable[[int, int, str], nn.Module], parameters: Sequence[Parameter], facts: Facts,
                 width: int):
        self.build, self.parameters, self.facts, self.width = build, parameters, facts, width
        self._mine = threading.local()  # a call changes the module, so every thread has its own

    def host(self, n_items: int, negatives: int, device: torch.device) -> Host:
        hosts = vars(self._mine)
        key = f"{n_items} {negatives} {device}"
        if key not in hosts:
            hosts[key] = Host(self.build(n_items, negatives, str(device)))
        return hosts[key]

    def batch(self, fields: Tables):
        """RecBole's batch."""
        from recbole.data.interaction import Interaction

        return Interaction(fields)

    def call(self, host: Host, method: str, tables: Tables, history: Tensor | None, fields: dict[str, Tensor],
              key: Tensor, done: int) -> tuple[Tensor, Keyed]:
        """One client's call: everything without the dimension of clients."""
        dtype = next(iter(tables.values())).dtype
        values = {f"model.{p.name}": p.assemble(tables) for p in self.parameters}
        host.restore()
        host.train(method == "calculate_loss")
        modules = dict(host.model.named_modules())
        if self.facts.history:
            ids = torch.stack([torch.zeros_like(history), history])
            real = (ids > 0).to(dtype)
            held = {"ids": ids, "values": real, "lengths": real.long().sum(1).clamp(min=1)}
            for (module, name), what in self.facts.history.items():
                setattr(modules[module], name, held[what])
        for (module, name), start in self.facts.counters.items():
            setattr(modules[module], name, start + done)
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

    def loss(self, tables: Tables, history: Tensor | None, fields: dict[str, Tensor], keys: Tensor, done: int,
             n_items: int, negatives: int) -> Tensor:
        """The model's ``calculate_loss`` for C clients: shape (C,).

        Args:
            tables: the clients' parameters, each (C, ...).
            history: RecBole's ids of the clients' own items, (C, H), 0 for none; or None.
            fields: of the batch, each (C, b, ...).
            keys: of the clients' random numbers, (C,).
            done: local batches that the clients have done in the block.
        """
        host = self.host(n_items, negatives, keys.device)

        def client_loss(tables: Tables, fields: Tables, of_client: Tables) -> Tensor:
            loss, _ = self.call(host, "calculate_loss", tables, of_client.get(HISTORY), fields, of_client["key"], done)
            return (sum(loss) if isinstance(loss, tuple) else loss).sum()

        of_client = {"key": keys} if history is None else {"key": keys, HISTORY: history}
        return self._over_clients(client_loss, self.facts.loss_alone, len(keys), tables, fields, of_client)

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
        alone, per_item = self.facts.score_elements
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
