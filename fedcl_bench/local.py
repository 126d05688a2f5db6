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
from .parallel import in_order
from .settings import setting
from .stream import Ragged

# Elements of stacked item rows per chunk: large enough that a chunk's work outweighs calling its operations, small
# enough that memory stays bounded. No result depends on it.
CHUNK_ELEMENTS = 1 << 20
# Clients x items up to which the items that are no positives are listed (4 bytes each).
LISTED_OTHERS = 1 << 26
# Padding worth less than the fixed cost of one more chunk.
PADDING_ELEMENTS = 1 << 17
# Clients with at most this many local batches score all their rows in each batch instead of copying the batch's out.
_WEIGHTED_BATCHES = 4


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
        others: for drawing negatives, see ``Others``.
    """

    users: Tensor
    positives: Tensor
    count: Tensor
    batches: int
    others: "Others"


def make_chunks(train: Ragged, users: Tensor, settings: LocalSettings, n_items: int, row_width: int,
                chunk_elements: int = CHUNK_ELEMENTS) -> list[Chunk]:
    """Group clients of similar size so that padding stays small and memory bounded.

    Args:
        train: training items per user.
        users: the round's participants; each has at least one training item.
        n_items: items known in this step.
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
        # Sizes descend: stop before clients with fewer batches, and where padding would cost more than a new chunk.
        smallest = ((int(batches[start]) - 1) * settings.batch_size) // per_positive + 1
        end = min(limit, int(torch.searchsorted(-sizes, -smallest, right=True)))
        padding = torch.cumsum(largest - sizes[start:end], 0) * per_positive * row_width
        end = start + int(torch.searchsorted(padding, PADDING_ELEMENTS, right=True))
        members = users[start:end]
        row, item = train.select(members)
        n = count[start:end]
        column = torch.arange(len(row), device=row.device) - (torch.cumsum(n, 0) - n)[row]
        positives = train.values[train.indptr[members]][:, None].repeat(1, largest)
        positives[row, column] = item
        others = Others.of(positives, n_items, listed=len(users) * n_items <= LISTED_OTHERS)
        chunks.append(Chunk(members, positives, n, int(batches[start]), others))
        start = end
    return chunks


@dataclass(frozen=True)
class Others:
    """The items that are no positives of each client, in ascending order: what negatives are drawn from.

    Either listed, or, where the lists would take too much memory, counted: between the sorted positives.

    Attributes:
        count: how many there are, shape (C, 1).
        items, start: all lists end to end, and where each begins, shape (C, 1); or None.
        gaps: for the j-th of the client's distinct positives in ascending order, how many other items precede it,
            shape (C, P), padded with a number above all items; or None.
    """

    count: Tensor
    items: Tensor | None = None
    start: Tensor | None = None
    gaps: Tensor | None = None

    @staticmethod
    def of(positives: Tensor, n_items: int, listed: bool) -> "Others":
        """Of padded lists of positives, shape (C, P); an item may stand in a list several times."""
        if listed:
            other = torch.ones(len(positives), n_items, dtype=torch.bool, device=positives.device)
            other.scatter_(1, positives, False)
            count = other.sum(1, keepdim=True)
            return Others(count, other.nonzero()[:, 1].int(), count.cumsum(0) - count)
        above = torch.iinfo(torch.int64).max
        ascending = positives.sort(dim=1).values
        repeated = torch.zeros_like(ascending, dtype=torch.bool)
        repeated[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
        distinct = ascending.masked_fill(repeated, above).sort(dim=1).values
        rank = torch.arange(distinct.shape[1], device=positives.device)
        return Others(n_items - (~repeated).sum(1, keepdim=True),
                      gaps=torch.where(distinct < above, distinct - rank, above))

    def at(self, r: Tensor) -> Tensor:
        """The items at positions ``r`` (int64, shape (C, n)) of each client's list."""
        if self.gaps is None:
            return self.items[self.start + r].long()
        return r + torch.searchsorted(self.gaps, r, right=True)


def draw_negatives(chunk: Chunk, per_positive: int, seed: int, step: int, round_: int) -> Tensor:
    """Negatives of one round: uniform with replacement over all items but the client's training items of this step.

    Returns:
        int64 of shape (C, P * per_positive); client c's own are the first ``per_positive * count[c]``.
    """
    keys = draws.client_keys(draws.key(seed, "negatives", step, round_), chunk.users)[:, None]
    slot = torch.arange(chunk.positives.shape[1] * per_positive, device=keys.device)
    return chunk.others.at(draws.integers(draws.bits(keys, slot), chunk.others.count))


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

    def replay_scores(self, clients: Tensor) -> Tensor:
        """Logits of the method's ``replayed_items`` for some clients, differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, n).
        """
        trainer = self._trainer
        if self._covers_all_rows:
            return self._scores.gather(1, trainer.replay)[clients]
        return trainer.backbone.score(trainer.private, trainer.gather(trainer.replay))[clients]

    @torch.no_grad()
    def all_scores(self, clients: Tensor) -> Tensor:
        """Logits of all items under the current local models of some clients, not differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, items).
        """
        trainer = self._trainer
        private = {name: values[clients] for name, values in trainer.private.items()}
        scores = trainer.backbone.score_all(private, trainer.public)
        if self.draw.batch > 0:  # before the first update every client's rows are the server's
            own = (self._scores[clients] if self._covers_all_rows else
                   trainer.backbone.score(private, {name: rows[clients] for name, rows in trainer.rows.items()}))
            scores.scatter_(1, trainer.items[clients], own.gather(1, trainer.canonical[clients]))
        return scores

    @property
    def _covers_all_rows(self) -> bool:
        """Whether the batch's own scores already cover every slot."""
        return self._view.rows is self._trainer.rows


class ChunkTrainer:
    """Local training of one chunk: touched rows, private parameters and the samples over them."""

    def __init__(self, chunk: Chunk, public: Tables, private: Tables, backbone: Backbone, method: Method,
                 settings: LocalSettings, seed: int, step: int, round_: int):
        self.chunk, self.public, self.backbone, self.method, self.settings = chunk, public, backbone, method, settings
        self.seed, self.step, self.round = seed, step, round_
        n_items = len(next(iter(public.values())))
        width, device = chunk.positives.shape[1], chunk.positives.device
        positive = torch.arange(width, device=device)
        # The positive that each slot belongs to: the positives themselves, then their negatives.
        of_positive = torch.cat([positive, positive.repeat_interleave(settings.negatives)])
        self.valid = of_positive < chunk.count[:, None]
        self.samples = chunk.count * (1 + settings.negatives)
        negatives = draw_negatives(chunk, settings.negatives, seed, step, round_)
        negatives = torch.where(self.valid[:, width:], negatives, chunk.positives[:, :1])
        replayed = method.replayed_items(chunk.users)
        self.items = torch.cat([chunk.positives, negatives] + ([replayed] if replayed is not None else []), dim=1)
        self.canonical = self._canonical(n_items)
        self.replay = self.canonical[:, len(of_positive):]
        self.labels = torch.arange(self.items.shape[1], device=device) < width
        flat = self.items.reshape(-1)
        self.rows = {name: table.index_select(0, flat).view(*self.items.shape, *table.shape[1:])
                     for name, table in public.items()}
        self.private = {name: table.index_select(0, chunk.users) for name, table in private.items()}
        self.dtype = next(iter(self.rows.values())).dtype

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
        size, batches = self.settings.batch_size, self.chunk.batches
        samples = self.samples[:, None]
        if batches == 1:
            view = self._weighted(self.valid, samples)
            for _ in range(self.settings.local_epochs):
                yield view
            return
        for epoch in range(self.settings.local_epochs):
            order_key = self._shuffle(epoch)
            if batches <= _WEIGHTED_BATCHES:
                batch_of = torch.zeros_like(order_key)
                for batch in range(1, batches):
                    batch_of += order_key > order_key.kthvalue(batch * size, dim=1, keepdim=True).values
                for batch in range(batches):
                    yield self._weighted((batch_of == batch) & self.valid, (samples - batch * size).clamp(max=size))
                continue
            order = order_key.argsort(1)
            for batch in range(batches):
                slots = order[:, batch * size:(batch + 1) * size]
                left = (samples - batch * size).clamp(max=size)
                rows = self.gather(self.canonical.gather(1, slots))
                weights = (torch.arange(slots.shape[1], device=slots.device) < left).to(self.dtype) / left
                yield View(rows, self.labels[slots].to(self.dtype), weights)

    def _shuffle(self, epoch: int) -> Tensor:
        """Random keys whose order is each client's order of samples in an epoch; padding comes last."""
        keys = draws.client_keys(draws.key(self.seed, "shuffle", self.step, self.round, epoch), self.chunk.users)
        # Number of each sample in its client's own list, positives then negatives, whatever the padding.
        width = self.chunk.positives.shape[1]
        own = torch.arange(self.valid.shape[1], device=keys.device).expand_as(self.valid).clone()
        own[:, width:] += self.chunk.count[:, None] - width
        order_key = draws.sort_keys(draws.bits(keys[:, None], own))
        return order_key.masked_fill_(~self.valid, torch.iinfo(torch.int64).max)

    def _weighted(self, members: Tensor, size: Tensor) -> View:
        """A batch as a weighting of all the client's rows: the same sum in another order, without copying rows.

        Args:
            members: which samples are in the batch, shape (C, samples).
            size: how many they are, shape (C, 1).
        """
        weights = torch.zeros(self.items.shape, dtype=self.dtype, device=self.items.device)
        weights.scatter_add_(1, self.canonical[:, :members.shape[1]], members / size.to(self.dtype))
        return View(self.rows, self.labels.to(self.dtype).expand_as(weights), weights)

    def train(self) -> Tensor:
        """Run all local batches. Afterwards ``moved`` holds what they added to each slot's rows (0 where the slot is
        not canonical) and to the private parameters.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        n_items = len(next(iter(self.public.values())))
        optimiser = OPTIMISERS[self.settings.optimiser](self.backbone.learning_rates(n_items))
        parameters = {**self.private, **self.rows}
        penalties = {name: self.method.row_penalty(name) for name in self.rows}
        last = self.chunk.batches * self.settings.local_epochs - 1
        total = torch.zeros(len(self.chunk.users), dtype=torch.float64, device=self.items.device)
        for tensor in parameters.values():
            tensor.requires_grad_()
        for number, view in enumerate(self._views()):
            scores = self.backbone.score(self.private, view.rows)
            loss = self.backbone.loss(scores, view.labels, view.weights)
            draw = DrawKey(self.seed, self.step, self.round, number)
            added = self.method.local_loss(LocalBatch(self, view, scores, draw))
            if added is not None:
                loss = loss + added
            for name, penalty in penalties.items():
                if penalty is not None:
                    loss = loss + (penalty(self.rows[name], self.items) * self.first_copy).sum(1)
            gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
            total += loss.detach()
            updates = optimiser.updates(dict(zip(parameters, gradients)))
            with torch.no_grad():
                if number == 0:
                    self.moved = updates if last == 0 else {name: update.clone() for name, update in updates.items()}
                else:
                    for name, update in updates.items():
                        self.moved[name] += update
                if number < last:
                    for name, update in updates.items():
                        parameters[name] += update
        return total / (last + 1)

    @property
    def first_copy(self) -> Tensor:
        """Whether a slot is the canonical one of its item, shape (C, slots)."""
        return self.canonical == torch.arange(self.items.shape[1], device=self.items.device)


def _shift(public: Tables, method: Method, backbone: Backbone, settings: LocalSettings, batches: int) -> Tables:
    """How far a penalty that acts on every row takes the rows that a client does not touch.

    Such a row sees only the penalty's gradient, so after the same number of local batches it has moved alike at every
    client: trained here once, by the local optimiser, for the whole table.
    """
    penalties = {name: method.row_penalty(name) for name in public}
    tables = {name: public[name].clone()[None] for name, penalty in penalties.items() if penalty is not None}
    n_items = len(next(iter(public.values())))
    items = torch.arange(n_items, device=next(iter(public.values())).device)[None]
    optimiser = OPTIMISERS[settings.optimiser](backbone.learning_rates(n_items))
    for _ in range(batches * settings.local_epochs):
        for table in tables.values():
            table.requires_grad_()
        loss = sum(penalties[name](table, items).sum() for name, table in tables.items())
        gradients = torch.autograd.grad(loss, list(tables.values()))
        with torch.no_grad():
            for name, update in optimiser.updates(dict(zip(tables, gradients))).items():
                tables[name] += update
        for table in tables.values():
            table.requires_grad_(False)
    return {name: table[0] - public[name] for name, table in tables.items()}


def train_round(chunks: list[Chunk], public: Tables, private: Tables, backbone: Backbone, method: Method,
                settings: LocalSettings, seed: int, step: int, round_: int) -> tuple[Tables, Tables, float]:
    """Local training of all participants and the unweighted mean of their public tables.

    Chunks are trained on several threads and added up in their own order, so the numbers do not depend on how many.

    Args:
        chunks: the participants.
        public, private: tables at the start of the round; not modified.

    Returns:
        (mean of the participants' public tables, private tables after the round, mean local loss).
    """
    participants = sum(len(chunk.users) for chunk in chunks)
    penalised = any(method.row_penalty(name) is not None for name in public)
    shifts = {batches: _shift(public, method, backbone, settings, batches)
              for batches in {chunk.batches for chunk in chunks} if penalised}
    change = {name: torch.zeros_like(table) for name, table in public.items()}
    private_after = {name: table.clone() for name, table in private.items()}
    total = torch.zeros((), dtype=torch.float64, device=chunks[0].users.device)

    def train(chunk: Chunk) -> tuple[Tensor, Tables, Tensor]:
        trainer = ChunkTrainer(chunk, public, private, backbone, method, settings, seed, step, round_)
        loss = trainer.train().sum()
        moved = trainer.moved
        for name, shift in shifts.get(chunk.batches, {}).items():
            # Rows the client did not touch moved by `shift` too, alike for all; its own copies count from there.
            own = shift.index_select(0, trainer.items.reshape(-1)).view_as(moved[name])
            moved[name] = moved[name] - own * trainer.first_copy.view(*trainer.items.shape, *[1] * (own.dim() - 2))
        return trainer.items, moved, loss

    for chunk, (items, moved, loss) in zip(chunks, in_order(train, chunks, total.device)):
        total += loss
        for name, shift in shifts.get(chunk.batches, {}).items():
            change[name] += shift * len(chunk.users)
        for name, rows in moved.items():
            if name in public:
                change[name].index_add_(0, items.reshape(-1), rows.flatten(0, 1))
            else:
                private_after[name].index_add_(0, chunk.users, rows)
    mean = {name: table + change[name] / participants for name, table in public.items()}
    return mean, private_after, float(total) / participants
