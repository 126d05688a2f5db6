"""One round of local training for many clients at once.

Clients are a batch dimension. In a round a client changes only the item rows it looks up, so each client gets its own
copy of just those rows; the rows of C clients are stacked to (C, slots, d). They are disjoint, so the gradient of the
summed losses is every client's own gradient, for any number of local batches and epochs. An item that a client draws
twice must be one row: its *canonical* slot is the first one that holds it, and the others are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from . import draws
from .backbone import Backbone, Tables
from .method import DrawKey, Method
from .optim import OPTIMISERS
from .settings import setting
from .stream import Ragged

# Elements of stacked item rows per chunk: about the size of a core's cache, measured fastest on two machines' worth of
# shapes by benchmarks/engine.py. No result depends on it.
CHUNK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class LocalSettings:
    """What a client does in a round (F3CRec, section 5.1 and its released code)."""

    optimiser: str = setting("sgd", "local optimiser, fresh in every round", choices=tuple(OPTIMISERS))
    batch_size: int = setting(512, "samples per local batch", low=1)
    local_epochs: int = setting(1, "passes over a client's samples per round", low=1)
    negatives: int = setting(4, "negatives per positive, with replacement, drawn once per round", low=1)


@dataclass(frozen=True)
class Chunk:
    """Clients trained together; all take the same number of local batches.

    Attributes:
        users: int64 ids, shape (C,).
        positives: training items, shape (C, P), short lists padded with their first item.
        count: true number of positives, shape (C,).
        batches: local batches per epoch.
    """

    users: Tensor
    positives: Tensor
    count: Tensor
    batches: int


def make_chunks(train: Ragged, users: Tensor, settings: LocalSettings, row_width: int,
                chunk_elements: int = CHUNK_ELEMENTS) -> list[Chunk]:
    """Group clients of similar size so that padding stays small and memory bounded.

    Args:
        train: training items per user.
        users: the round's participants; each has at least one training item.
        row_width: numbers per item row over all public tables.
        chunk_elements: target size of a chunk's stacked rows; a single client may exceed it.
    """
    per_positive = 1 + settings.negatives
    count, order = torch.sort(train.lengths[users], descending=True, stable=True)
    batches = -(-count * per_positive // settings.batch_size)
    sizes, users = count.cpu(), users[order]
    chunks, start = [], 0
    while start < len(users):
        largest = int(sizes[start])
        limit = start + max(1, chunk_elements // (largest * per_positive * row_width))
        # Descending sizes: stop before clients with less than 3/4 of the largest, or with fewer batches.
        smallest = max(-(-3 * largest // 4), ((int(batches[start]) - 1) * settings.batch_size) // per_positive + 1)
        end = min(limit, int(torch.searchsorted(-sizes, -smallest, right=True)))
        members = users[start:end]
        row, item = train.select(members)
        n = count[start:end]
        column = torch.arange(len(row), device=row.device) - (torch.cumsum(n, 0) - n)[row]
        positives = train.values[train.indptr[members]][:, None].repeat(1, largest)
        positives[row, column] = item
        chunks.append(Chunk(members, positives, n, int(batches[start])))
        start = end
    return chunks


def draw_negatives(chunk: Chunk, per_positive: int, n_items: int, seed: int, step: int, round_: int) -> Tensor:
    """Negatives of one round: uniform with replacement over all items but the client's training items of this step.

    Returns:
        int64 of shape (C, P * per_positive); client c's own are the first ``per_positive * count[c]``.
    """
    keys = draws.client_keys(draws.key(seed, "negatives", step, round_), chunk.users)
    slot = torch.arange(chunk.positives.shape[1] * per_positive, device=keys.device)
    positive = torch.zeros(len(keys), n_items, dtype=torch.bool, device=keys.device)
    positive.scatter_(1, chunk.positives, True)
    items = draws.integers(draws.bits(keys[:, None], slot), n_items)
    own = slot < chunk.count[:, None] * per_positive
    client, slot = (positive.gather(1, items) & own).nonzero(as_tuple=True)
    attempt = 0
    while len(client):
        attempt += 1
        again = draws.integers(draws.bits(keys[client], slot + (attempt << 40)), n_items)
        items[client, slot] = again
        rejected = positive[client, again]
        client, slot = client[rejected], slot[rejected]
    return items


@dataclass(frozen=True)
class View:
    """The samples of one local batch as the backbone sees them."""

    rows: Tables
    labels: Tensor
    weights: Tensor


class LocalBatch:
    """What a method sees of C clients in one local batch.

    Attributes:
        users: ids, shape (C,).
        private: the clients' private parameters, each (C, ...), differentiable.
        draw: key of the method's own random numbers.
    """

    def __init__(self, trainer: "ChunkTrainer", view: View, scores: Tensor, draw: DrawKey):
        self._trainer, self._view, self._scores = trainer, view, scores
        self.users, self.private, self.draw = trainer.chunk.users, trainer.private, draw

    def replay_scores(self) -> Tensor:
        """Logits of the method's ``replayed_items``, shape (C, n), differentiable."""
        trainer = self._trainer
        if self._view.rows is trainer.rows:  # the batch's scores already cover every slot
            return self._scores.gather(1, trainer.replay)
        return trainer.backbone.score(trainer.private, trainer.gather(trainer.replay))

    @torch.no_grad()
    def all_scores(self) -> Tensor:
        """Logits of all items under each client's current local model, shape (C, items), not differentiable."""
        trainer = self._trainer
        scores = trainer.backbone.score_all(trainer.private, trainer.public)
        if self.draw.batch > 0:  # before the first update every client's rows are the server's
            own = trainer.backbone.score(trainer.private, trainer.rows)
            scores.scatter_(1, trainer.items, own.gather(1, trainer.canonical))
        return scores


class ChunkTrainer:
    """Local training of one chunk: touched rows, private parameters and the samples over them."""

    def __init__(self, chunk: Chunk, public: Tables, private: Tables, backbone: Backbone, method: Method,
                 settings: LocalSettings, seed: int, step: int, round_: int):
        self.chunk, self.public, self.backbone, self.method, self.settings = chunk, public, backbone, method, settings
        self.seed, self.step, self.round = seed, step, round_
        n_items = len(next(iter(public.values())))
        negatives = draw_negatives(chunk, settings.negatives, n_items, seed, step, round_)
        width = chunk.positives.shape[1]
        slot = torch.arange(width * (1 + settings.negatives), device=negatives.device)
        is_positive = slot < width
        count = chunk.count[:, None]
        self.valid = torch.where(is_positive, slot, (slot - width) // settings.negatives) < count
        # Number of each sample in its client's own list: positives, then negatives, whatever the padding.
        self.own_index = torch.where(is_positive, slot, slot - width + count)
        self.samples = chunk.count * (1 + settings.negatives)
        padding = chunk.positives[:, :1]
        negatives = torch.where(self.valid[:, width:], negatives, padding)
        replayed = method.replayed_items(chunk.users)
        self.items = torch.cat([chunk.positives, negatives] + ([replayed] if replayed is not None else []), dim=1)
        self.canonical = self._canonical(n_items)
        self.replay = self.canonical[:, len(slot):]
        self.labels = (torch.arange(self.items.shape[1], device=slot.device) < width)
        flat = self.items.reshape(-1)
        self.rows = {name: table.index_select(0, flat).view(*self.items.shape, *table.shape[1:])
                     for name, table in public.items()}
        self.private = {name: table.index_select(0, chunk.users) for name, table in private.items()}

    def _canonical(self, n_items: int) -> Tensor:
        """For every slot the first slot of the same client with the same item, shape (C, slots)."""
        slot = torch.arange(self.items.shape[1], device=self.items.device).expand_as(self.items)
        first = torch.empty(len(self.items), n_items, dtype=torch.int64, device=self.items.device)
        first.scatter_reduce_(1, self.items, slot, "amin", include_self=False)
        return first.gather(1, self.items)

    def gather(self, slots: Tensor) -> Tables:
        """Rows at ``slots`` (shape (C, n)) of every client, each (C, n, ...)."""
        clients, width = self.items.shape
        flat = (slots + torch.arange(clients, device=slots.device)[:, None] * width).reshape(-1)
        return {name: rows.flatten(0, 1).index_select(0, flat).view(*slots.shape, *rows.shape[2:])
                for name, rows in self.rows.items()}

    def _views(self) -> Iterator[View]:
        """The local batches of all epochs, in order; each is built when the rows of the one before are updated."""
        size = self.settings.batch_size
        if self.chunk.batches == 1:
            # One batch holds every sample, so instead of gathering a row per sample, weigh every row by how often
            # it was drawn. The loss is the same sum in another order.
            weights = torch.zeros(self.items.shape, dtype=next(iter(self.rows.values())).dtype,
                                  device=self.items.device)
            share = self.valid / self.samples[:, None].to(weights.dtype)
            weights.scatter_add_(1, self.canonical[:, :self.valid.shape[1]], share)
            labels = self.labels.to(weights.dtype).expand_as(weights)
            for _ in range(self.settings.local_epochs):
                yield View(self.rows, labels, weights)
            return
        for epoch in range(self.settings.local_epochs):
            keys = draws.client_keys(draws.key(self.seed, "shuffle", self.step, self.round, epoch), self.chunk.users)
            order = draws.sort_keys(draws.bits(keys[:, None], self.own_index))
            order = order.masked_fill_(~self.valid, torch.iinfo(torch.int64).max).argsort(1)
            for batch in range(self.chunk.batches):
                slots = order[:, batch * size:(batch + 1) * size]
                left = (self.samples - batch * size).clamp(max=size)[:, None]
                rows = self.gather(self.canonical.gather(1, slots))
                dtype = next(iter(rows.values())).dtype
                weights = (torch.arange(slots.shape[1], device=slots.device) < left).to(dtype) / left
                yield View(rows, self.labels[slots].to(dtype), weights)

    def train(self) -> Tensor:
        """Run all local batches; leaves the result in ``rows`` and ``private``.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        optimiser = OPTIMISERS[self.settings.optimiser](self.backbone.learning_rates(len(next(iter(self.public.values())))))
        parameters = {**self.private, **self.rows}
        penalties = {name: self.method.row_penalty(name) for name in self.rows}
        first_copy = self.canonical == torch.arange(self.items.shape[1], device=self.items.device)
        total = torch.zeros(len(self.chunk.users), dtype=torch.float64, device=self.items.device)
        for tensor in parameters.values():
            tensor.requires_grad_()
        number = 0
        for view in self._views():
            scores = self.backbone.score(self.private, view.rows)
            loss = self.backbone.loss(scores, view.labels, view.weights)
            draw = DrawKey(self.seed, self.step, self.round, number)
            added = self.method.local_loss(LocalBatch(self, view, scores, draw))
            if added is not None:
                loss = loss + added
            for name, penalty in penalties.items():
                if penalty is not None:
                    loss = loss + (penalty(self.rows[name], self.items) * first_copy).sum(1)
            gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
            optimiser.step(parameters, dict(zip(parameters, gradients)))
            total += loss.detach()
            number += 1
        for tensor in parameters.values():
            tensor.requires_grad_(False)
        return total / number


def untouched(public: Tables, method: Method, backbone: Backbone, settings: LocalSettings, batches: int) -> Tables:
    """Where a penalty that acts on every row takes the rows that a client does not touch.

    Such a row sees only the penalty's gradient, so after the same number of local batches it is the same at every
    client: trained here once, by the local optimiser, for the whole table.
    """
    penalties = {name: method.row_penalty(name) for name in public}
    moved = {name: public[name].clone()[None] for name, penalty in penalties.items() if penalty is not None}
    n_items = len(next(iter(public.values())))
    items = torch.arange(n_items, device=next(iter(public.values())).device)[None]
    optimiser = OPTIMISERS[settings.optimiser](backbone.learning_rates(n_items))
    for _ in range(batches * settings.local_epochs):
        for table in moved.values():
            table.requires_grad_()
        loss = sum(penalties[name](table, items).sum() for name, table in moved.items())
        gradients = torch.autograd.grad(loss, list(moved.values()))
        optimiser.step(moved, dict(zip(moved, gradients)))
        for table in moved.values():
            table.requires_grad_(False)
    return {name: table[0] for name, table in moved.items()}


def train_round(chunks: list[Chunk], public: Tables, private: Tables, backbone: Backbone, method: Method,
                settings: LocalSettings, seed: int, step: int, round_: int) -> tuple[Tables, Tables, float]:
    """Local training of all participants and the unweighted mean of their public tables.

    Args:
        chunks: the participants.
        public, private: tables at the start of the round; not modified.

    Returns:
        (mean of the participants' public tables, private tables after the round, mean local loss).
    """
    participants = sum(len(chunk.users) for chunk in chunks)
    change = {name: torch.zeros_like(table) for name, table in public.items()}
    private = {name: table.clone() for name, table in private.items()}
    penalised = any(method.row_penalty(name) is not None for name in public)
    shadows: dict[int, Tables] = {}
    loss = torch.zeros((), dtype=torch.float64, device=chunks[0].users.device)
    for chunk in chunks:
        trainer = ChunkTrainer(chunk, public, private, backbone, method, settings, seed, step, round_)
        loss += trainer.train().sum()
        items = trainer.items.reshape(-1)
        if penalised and chunk.batches not in shadows:
            shadows[chunk.batches] = untouched(public, method, backbone, settings, chunk.batches)
        for name, rows in trainer.rows.items():
            start = public[name]
            if penalised and name in shadows[chunk.batches]:
                start = shadows[chunk.batches][name]
                change[name] += (start - public[name]) * len(chunk.users)
            moved = rows.flatten(0, 1).sub_(start.index_select(0, items))
            if start is not public[name]:  # only a client's own copies differ from the untouched rows
                first = trainer.canonical == torch.arange(trainer.items.shape[1], device=items.device)
                moved *= first.reshape(-1, *[1] * (moved.dim() - 1))
            change[name].index_add_(0, items, moved)
        for name, values in trainer.private.items():
            private[name].index_copy_(0, chunk.users, values)
    mean = {name: table + change[name] / participants for name, table in public.items()}
    return mean, private, float(loss) / participants
