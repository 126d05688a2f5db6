"""One round of local training for many clients at once.

Clients are a batch dimension. In a round a client changes only the item rows it looks up, so each client gets its own
copy of just those rows; the rows of C clients are stacked to (C, slots, d). They are disjoint, so the gradient of the
summed losses is every client's own gradient, for any number of local batches and epochs. An item that a client draws
twice must be one row: its *canonical* slot is the first one that holds it, and the others are never read.

Backbones whose loss concerns every row (``Backbone.whole_tables``) get all items as slots instead, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from . import draws
from .backbone import Backbone, Tables
from .method import DrawKey, Method
from .model import Snapshot
from .optim import OPTIMISERS
from .parallel import in_order
from .sampling import Chunk, LocalSettings, draw_negatives

# Clients with at most this many local batches score all their rows in each batch instead of copying the batch's out.
_WEIGHTED_BATCHES = 4


@dataclass(frozen=True)
class Slots:
    """Which item rows the clients of a chunk hold, and where their samples find them.

    Attributes:
        items: item of each slot, shape (C, slots).
        positive: whether a slot's item is a positive, bool of shape (slots,) or (C, slots).
        sample: canonical slot of each sample's item: positives, then negatives, shape (C, samples).
        replay: canonical slots of the method's replayed items, shape (C, n).
        first_copy: whether a slot is the canonical one of its item, shape (C, slots).
    """

    items: Tensor
    positive: Tensor
    sample: Tensor
    replay: Tensor
    first_copy: Tensor

    @staticmethod
    def touched(positives: Tensor, negatives: Tensor, replayed: Tensor | None, n_items: int) -> "Slots":
        """A slot for every sample and replayed item."""
        items = torch.cat([positives, negatives] + ([replayed] if replayed is not None else []), dim=1)
        slot = torch.arange(items.shape[1], device=items.device)
        first = torch.empty(len(items), n_items, dtype=torch.int64, device=items.device)
        first.scatter_reduce_(1, items, slot.expand_as(items), "amin", include_self=False)
        canonical = first.gather(1, items)
        samples = positives.shape[1] + negatives.shape[1]
        return Slots(items, slot < positives.shape[1], canonical[:, :samples], canonical[:, samples:],
                     canonical == slot)

    @staticmethod
    def whole(positives: Tensor, negatives: Tensor, replayed: Tensor | None, n_items: int) -> "Slots":
        """A slot for every item, in order."""
        items = torch.arange(n_items, device=positives.device).expand(len(positives), n_items)
        positive = torch.zeros(items.shape, dtype=torch.bool, device=items.device).scatter_(1, positives, True)
        return Slots(items, positive, torch.cat([positives, negatives], 1),
                     replayed if replayed is not None else items[:, :0], torch.ones_like(positive))


@dataclass(frozen=True)
class View:
    """One local batch: which rows it scores and what it makes of the scores.

    Attributes:
        slots: the slots scored, shape (C, n); None: all of them.
        labels, weights: of each score, shape (C, n), for pointwise losses.
        pairs: positions of (positive, negative) in the scores, each (C, m), for pairwise losses; ``weights`` is then
            (C, m).
    """

    slots: Tensor | None
    weights: Tensor
    labels: Tensor | None = None
    pairs: tuple[Tensor, Tensor] | None = None


class LocalBatch:
    """What a method sees of C clients in one local batch.

    Attributes:
        users: ids, shape (C,).
        private: the clients' private parameters, each (C, ...), differentiable.
        dense: their copies of public parameters without item rows, each (C, ...), differentiable.
        draw: key of the method's own random numbers.
    """

    def __init__(self, trainer: "ChunkTrainer", view: View, scores: Tensor, draw: DrawKey):
        self._trainer, self._view, self._scores = trainer, view, scores
        self.users, self.private, self.dense, self.draw = trainer.chunk.users, trainer.private, trainer.dense, draw

    def replay_scores(self, clients: Tensor) -> Tensor:
        """Logits of the method's ``replayed_items`` for some clients, differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, n).
        """
        trainer = self._trainer
        if self._view.slots is None:
            return self._scores.gather(1, trainer.slots.replay)[clients]
        return trainer.backbone.score(trainer.clients, trainer.gather(trainer.slots.replay))[clients]

    @torch.no_grad()
    def all_scores(self, clients: Tensor) -> Tensor:
        """Logits of all items under the current local models of some clients, not differentiable.

        Args:
            clients: positions in ``users``, shape (K,).

        Returns:
            Shape (K, items).
        """
        trainer = self._trainer
        covered = self._view.slots is None
        if trainer.backbone.whole_tables:
            return self._scores[clients].detach()
        own = {name: values[clients] for name, values in trainer.clients.items()}
        scores = trainer.backbone.score_all(own, trainer.public)
        if self.draw.batch > 0:  # before the first update every client's rows are the server's
            rows = (self._scores[clients] if covered else
                    trainer.backbone.score(own, {name: rows[clients] for name, rows in trainer.rows.items()}))
            # Every slot of an item gets its canonical slot's score, so that the order of writing does not matter.
            slots = torch.cat([trainer.slots.sample, trainer.slots.replay], 1)[clients]
            scores.scatter_(1, trainer.slots.items[clients], rows.gather(1, slots))
        return scores


class ChunkTrainer:
    """Local training of one chunk: item rows, other parameters and the samples over them."""

    def __init__(self, chunk: Chunk, model: Snapshot, backbone: Backbone, method: Method, settings: LocalSettings,
                 seed: int, step: int, round_: int):
        self.chunk, self.public, self.backbone, self.method, self.settings = (
            chunk, model.public, backbone, method, settings)
        self.seed, self.step, self.round, self.n_items = seed, step, round_, model.n_items
        width, device = chunk.positives.shape[1], chunk.positives.device
        positive = torch.arange(width, device=device)
        # The positive that each sample belongs to: the positives themselves, then their negatives.
        of_positive = torch.cat([positive, positive.repeat_interleave(settings.negatives)])
        self.valid = of_positive < chunk.count[:, None]
        negatives = draw_negatives(chunk, settings, seed, step, round_)
        negatives = torch.where(self.valid[:, width:], negatives, chunk.positives[:, :1])
        replayed = method.replayed_items(chunk.users, DrawKey(seed, step, round_))
        layout = Slots.whole if backbone.whole_tables else Slots.touched
        self.slots = layout(chunk.positives, negatives, replayed, self.n_items)
        if backbone.pairwise:  # a sample is a negative with its positive
            self.pairs = (self.slots.sample[:, of_positive[width:]], self.slots.sample[:, width:])
            self.valid = self.valid[:, width:]
        self.samples = self.valid.sum(1, keepdim=True)
        if backbone.whole_tables:
            self.rows = {name: table.expand(len(chunk.users), *table.shape).clone()
                         for name, table in model.public.items()}
        else:
            flat = self.slots.items.reshape(-1)
            self.rows = {name: table.index_select(0, flat).view(*self.slots.items.shape, *table.shape[1:])
                         for name, table in model.public.items()}
        self.private = {name: table.index_select(0, chunk.users) for name, table in model.private.items()}
        self.dense = {name: value.expand(len(chunk.users), *value.shape).clone() for name, value in model.dense.items()}
        self.clients = {**self.private, **self.dense}
        self.served = {name: table[chunk.users] for name, table in model.served.items()}
        self.dtype = next(iter(self.rows.values())).dtype

    def gather(self, slots: Tensor) -> Tables:
        """Rows at ``slots`` (shape (C, n)) of every client, each (C, n, ...)."""
        clients, width = self.slots.items.shape
        flat = (slots + torch.arange(clients, device=slots.device)[:, None] * width).reshape(-1)
        return {name: rows.flatten(0, 1).index_select(0, flat).view(*slots.shape, *rows.shape[2:])
                for name, rows in self.rows.items()}

    def _epoch(self, epoch: int) -> Iterator[View]:
        """The local batches of one epoch, in order."""
        size, batches = self.settings.batch_size, self.chunk.batches
        if batches == 1:
            yield self._covering(self.valid, self.samples)
            return
        order_key = self._shuffle(epoch)
        if batches <= _WEIGHTED_BATCHES or self.backbone.whole_tables:
            batch_of = torch.zeros_like(order_key)
            for batch in range(1, batches):
                batch_of += order_key > order_key.kthvalue(batch * size, dim=1, keepdim=True).values
            for batch in range(batches):
                yield self._covering((batch_of == batch) & self.valid, (self.samples - batch * size).clamp(max=size))
            return
        order = order_key.argsort(1)
        for batch in range(batches):
            some = order[:, batch * size:(batch + 1) * size]
            left = (self.samples - batch * size).clamp(max=size)
            weights = (torch.arange(some.shape[1], device=some.device) < left).to(self.dtype) / left
            if self.backbone.pairwise:
                n = torch.arange(some.shape[1], device=some.device).expand_as(some)
                slots = torch.cat([slots.gather(1, some) for slots in self.pairs], 1)
                yield View(slots, weights, pairs=(n, n + some.shape[1]))
            else:
                labels = (some < self.chunk.positives.shape[1]).to(self.dtype)
                yield View(self.slots.sample.gather(1, some), weights, labels)

    def _shuffle(self, epoch: int) -> Tensor:
        """Random keys whose order is each client's order of samples in an epoch; padding comes last."""
        keys = draws.client_keys(draws.key(self.seed, "shuffle", self.step, self.round, epoch), self.chunk.users)
        # Number of each sample in its client's own list, positives then negatives, whatever the padding.
        own = torch.arange(self.valid.shape[1], device=keys.device).expand_as(self.valid).clone()
        if not self.backbone.pairwise:
            width = self.chunk.positives.shape[1]
            own[:, width:] += self.chunk.count[:, None] - width
        order_key = draws.sort_keys(draws.bits(keys[:, None], own))
        return order_key.masked_fill_(~self.valid, torch.iinfo(torch.int64).max)

    def _covering(self, members: Tensor, size: Tensor) -> View:
        """A batch over all the client's rows: the same sum in another order, without copying rows.

        Args:
            members: which samples are in the batch, shape (C, samples).
            size: how many they are, shape (C, 1).
        """
        share = members / size.to(self.dtype)
        if self.backbone.pairwise:
            return View(None, share, pairs=self.pairs)
        weights = torch.zeros(self.slots.items.shape, dtype=self.dtype, device=self.slots.items.device)
        weights.scatter_add_(1, self.slots.sample, share)
        return View(None, weights, self.slots.positive.to(self.dtype).expand_as(weights))

    def _loss(self, view: View, number: int) -> Tensor:
        """Each client's loss on a local batch, shape (C,)."""
        rows = self.rows if view.slots is None else self.gather(view.slots)
        scores = self.backbone.score(self.clients, rows)
        if view.pairs is not None:
            loss = self.backbone.pair_loss(*(scores.gather(1, slots) for slots in view.pairs), view.weights)
        else:
            loss = self.backbone.loss(scores, view.labels, view.weights)
        draw = DrawKey(self.seed, self.step, self.round, number)
        for term in (self.backbone.regulariser(self.clients, rows, view.weights, self.served, self.round),
                     self.method.local_loss(LocalBatch(self, view, scores, draw))):
            if term is not None:
                loss = loss + term
        for name, penalty in self.penalties.items():
            loss = loss + (penalty(self.rows[name], self.slots.items) * self.slots.first_copy).sum(1)
        return loss

    def train(self) -> Tensor:
        """Run all local batches. Afterwards ``moved`` holds what they added to each slot's rows (0 where the slot is
        not canonical) and to the other parameters.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        parameters = {**self.clients, **self.rows}
        groups = self.backbone.groups(list(parameters))
        optimisers = [OPTIMISERS[self.settings.optimiser]() for _ in groups]
        self.penalties = row_penalties(self.method, self.rows)
        self.moved: Tables = {}
        last = self.chunk.batches * self.settings.local_epochs * len(groups) - 1
        total = torch.zeros(len(self.chunk.users), dtype=torch.float64, device=self.slots.items.device)
        batches = torch.zeros_like(total)
        going = torch.ones_like(total, dtype=torch.bool)  # clients that have not ended their round early
        before = torch.full_like(total, torch.inf)
        number = batch = 0
        for epoch in range(self.settings.local_epochs):
            epoch_loss = torch.zeros_like(total)
            for view in self._epoch(epoch):
                rates = self.backbone.learning_rates(self.n_items, self.round, batch)
                for turn, (group, optimiser) in enumerate(zip(groups, optimisers)):
                    some = {name: parameters[name] for name in group}
                    for tensor in some.values():
                        tensor.requires_grad_()
                    loss = self._loss(view, number)
                    gradients = torch.autograd.grad(loss.sum(), list(some.values()), allow_unused=True)
                    for tensor in some.values():
                        tensor.requires_grad_(False)
                    with torch.no_grad():
                        gradients = _writable({name: torch.zeros_like(some[name]) if gradient is None else gradient
                                               for name, gradient in zip(some, gradients)})
                        if self.backbone.weight_decay > 0.0:
                            for name, gradient in gradients.items():
                                gradient.add_(some[name], alpha=self.backbone.weight_decay)
                        updates = optimiser.updates(gradients, rates)
                        if self.settings.tolerance > 0.0:
                            for update in updates.values():
                                update *= going.view(-1, *[1] * (update.dim() - 1))
                        for name, update in updates.items():
                            if number < last:
                                parameters[name] += update
                            if name in self.moved:
                                self.moved[name] += update
                            else:
                                self.moved[name] = update
                    if turn == 0:
                        epoch_loss += loss.detach()
                    number += 1
                batch += 1
            total += epoch_loss * going
            batches += self.chunk.batches * going
            if self.settings.tolerance > 0.0:
                change = (before - epoch_loss).abs() / before.abs().clamp(min=1e-12)
                going &= ~(change < self.settings.tolerance)
                before = epoch_loss
        return total / batches


def _writable(gradients: Tables) -> Tables:
    """Gradients that may be overwritten one by one. Autograd may return one tensor for several parameters, as for the
    terms of a sum, or one number for a whole row."""
    result, taken = {}, set()
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage().data_ptr()
        shared = memory in taken or 0 in gradient.stride()
        result[name] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        taken.add(memory)
    return result


def row_penalties(method: Method, public: Tables) -> dict:
    """The method's penalties on all rows, by table."""
    found = {name: method.row_penalty(name) for name in public}
    return {name: penalty for name, penalty in found.items() if penalty is not None}


def _shift(public: Tables, method: Method, backbone: Backbone, settings: LocalSettings, batches: int,
           round_: int) -> Tables:
    """How far a penalty that acts on every row takes the rows that a client does not touch.

    Such a row sees only the penalty's gradient, so after the same number of local batches it has moved alike at every
    client: trained here once, by the local optimiser, for the whole table.
    """
    penalties = row_penalties(method, public)
    tables = {name: public[name].clone()[None] for name in penalties}
    n_items = len(next(iter(public.values())))
    items = torch.arange(n_items, device=next(iter(public.values())).device)[None]
    optimiser = OPTIMISERS[settings.optimiser]()
    for batch in range(batches * settings.local_epochs):
        for table in tables.values():
            table.requires_grad_()
        loss = sum(penalties[name](table, items).sum() for name, table in tables.items())
        gradients = torch.autograd.grad(loss, list(tables.values()))
        with torch.no_grad():
            rates = backbone.learning_rates(n_items, round_, batch)
            for name, update in optimiser.updates(_writable(dict(zip(tables, gradients))), rates).items():
                tables[name] += update
        for table in tables.values():
            table.requires_grad_(False)
    return {name: table[0] - public[name] for name, table in tables.items()}


def _local_tables(trainer: ChunkTrainer, shifts: Tables) -> Tables:
    """Each client's own trained copy of the public tables, each (C, items, ...)."""
    if trainer.backbone.whole_tables:
        return {name: trainer.public[name] + trainer.moved[name] for name in trainer.rows}
    result = {}
    for name, table in trainer.public.items():
        start = table + shifts[name] if name in shifts else table
        own = start.expand(len(trainer.chunk.users), *table.shape).clone()
        index = trainer.slots.items.view(*trainer.slots.items.shape, *[1] * (table.dim() - 1))
        result[name] = own.scatter_add_(1, index.expand_as(trainer.moved[name]), trainer.moved[name])
    return result


def train_round(chunks: list[Chunk], model: Snapshot, backbone: Backbone, method: Method, settings: LocalSettings,
                seed: int, step: int, round_: int, weights: Tensor | None = None) -> tuple[Snapshot, float]:
    """Local training of all participants and the mean of what they upload.

    Chunks are trained on several threads and added up in their own order, so the numbers do not depend on how many.

    Args:
        chunks: the participants.
        model: at the start of the round; not modified.
        weights: weight of every user in the mean, shape (users,); None: all alike.

    Returns:
        (public parameters averaged over the participants, private ones after the round, local tables if the backbone
        keeps them; mean local loss).
    """
    device = chunks[0].users.device
    participants = sum(len(chunk.users) for chunk in chunks)
    everybody = torch.cat([chunk.users for chunk in chunks])
    whole = participants if weights is None else weights[everybody].sum()
    shifts: dict[int, Tables] = {}
    if row_penalties(method, model.public) and not backbone.whole_tables:
        shifts = {batches: _shift(model.public, method, backbone, settings, batches, round_)
                  for batches in {chunk.batches for chunk in chunks}}
    change = {name: torch.zeros_like(table) for name, table in {**model.public, **model.dense}.items()}
    private = {name: table.clone() for name, table in model.private.items()}
    local = {name: table.clone() for name, table in model.local.items()}
    total = torch.zeros((), dtype=torch.float64, device=device)

    def train(chunk: Chunk) -> tuple[Tensor, Tables, Tables, Tensor]:
        trainer = ChunkTrainer(chunk, model, backbone, method, settings, seed, step, round_)
        loss = trainer.train().sum()
        moved, shift = trainer.moved, shifts.get(chunk.batches, {})
        for name, table in shift.items():
            # Rows the client did not touch moved by `shift` too, alike for all; its own copies count from there.
            own = table.index_select(0, trainer.slots.items.reshape(-1)).view_as(moved[name])
            moved[name] = moved[name] - own * trainer.slots.first_copy.view(*trainer.slots.items.shape,
                                                                             *[1] * (own.dim() - 2))
        kept = _local_tables(trainer, shift) if backbone.keeps_local_tables else {}
        if weights is not None:
            for name in change:
                moved[name] = moved[name] * weights[chunk.users].view(-1, *[1] * (moved[name].dim() - 1))
        return trainer.slots.items, moved, kept, loss

    for chunk, (items, moved, kept, loss) in zip(chunks, in_order(train, chunks, device)):
        total += loss
        share = len(chunk.users) if weights is None else weights[chunk.users].sum()
        for name, shift in shifts.get(chunk.batches, {}).items():
            change[name] += shift * share
        for name, rows in moved.items():
            if name in private:
                private[name].index_add_(0, chunk.users, rows)
            elif name in model.dense or backbone.whole_tables:
                change[name] += rows.sum(0)
            else:
                change[name].index_add_(0, items.reshape(-1), rows.flatten(0, 1))
        for name, tables in kept.items():
            local[name][chunk.users] = tables
    public, dense = ({name: table + change[name] / whole for name, table in kind.items()}
                     for kind in (model.public, model.dense))
    return Snapshot(public, private, dense, local, model.served), float(total) / participants
