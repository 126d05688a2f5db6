"""Local training on lists of items: positives and sampled negatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .. import rng
from ..plugin import checks, views
from ..plugin.backbone import OwnBatch
from ..toolbox.distillation import ranks_of, soft_target_loss
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot, rows_of, with_trailing_dims
from ..core.errors import UserError
from ..kernels import ops
from .sampling import Chunk, draw_negatives
from ..core.tuning import SIZES
from .chunk_trainer import ChunkTrainer, Slots, TrainerView, row_bases, row_penalties, writable
from .optimisers import LocalOptimiser
from .strategies import Training


@dataclass(frozen=True)
class Members:
    """The samples, or pairs, of a local batch."""

    order: Tensor  # slots, or pairs, by local batch, (C, n); -1: none
    # The columns of this one
    start: int
    end: int
    share: Tensor  # what a sample counts in its client's mean, (C, 1)
    width: int  # how many slots, or pairs, a client has

    def weights(self) -> Tensor:
        """Of all slots, or pairs: the share for each time that they are in the batch, (C, width)."""
        slots = self.order[:, self.start:self.end]
        weights = self.share.new_zeros(len(slots), self.width)
        return weights.scatter_add_(1, slots.clamp(min=0), self.share * (slots >= 0))


@dataclass(frozen=True)
class BatchScoring:
    """One local batch: which rows it scores and what it makes of the scores."""

    slots: Tensor | None = None  # the slots scored, shape (C, n); None: all of them
    # Of each score, shape (C, n), for pointwise losses; None: whether the slots' items are positives.
    labels: Tensor | None = None
    # Positions of (positive, negative) in the scores, each (C, m), for pairwise losses
    pairs: tuple[Tensor, Tensor] | None = None
    members: Members | None = None  # its samples, if all slots are scored
    listed_weights: Tensor | None = None  # its samples' weights otherwise
    chosen: Tensor | None = None  # numbers of the samples, (C, b), for a backbone with a loss of its own

    @cached_property
    def weights(self) -> Tensor:
        """Of each score, (C, n), or of each pair, (C, m)."""
        return self.listed_weights if self.members is None else self.members.weights()


class BatchView(TrainerView, views.LocalBatch):
    """``views.LocalBatch`` of a trainer's clients."""

    def __init__(self, trainer: "ListTrainer", view: BatchScoring, draw: DrawKey, scores: Callable[[], Tensor],
                 loss: Callable[[Tensor], Tensor]):
        super().__init__(trainer, draw)
        self._view, self._score, self._loss = view, scores, loss

    @cached_property
    def scores(self) -> Tensor:
        with torch.enable_grad():  # whoever asks first
            return self._score()

    @cached_property
    def loss(self) -> Tensor:
        """Of the batch; ``_loss`` makes it of the scores."""
        with torch.enable_grad():
            return self._loss(self.scores)

    @cached_property
    def labels(self) -> Tensor:
        labels = self._trainer._labels if self._view.labels is None else self._view.labels
        if self._view.pairs is not None and self._view.slots is not None:  # positives are listed first
            labels = torch.ones_like(self._view.weights)
            labels = torch.cat([labels, torch.zeros_like(labels)], 1)
        return labels * self.mask

    @cached_property
    def weights(self) -> Tensor:
        view, weights = self._view, self._view.weights
        if view.chosen is not None:
            backbone = self._trainer.backbone
            raise UserError(f"the backbone '{backbone.name}' makes samples of its own, which have no labels, weights "
                            f"or mask that a method could see; use batch.loss or batch.replay_scores, or another "
                            f"backbone.")
        if view.pairs is not None:
            of_pairs, weights = weights, weights.new_zeros(self.scores.shape)
            for slots in view.pairs:
                weights.scatter_add_(1, slots, of_pairs)
        return weights

    @property
    def moved_items(self) -> Tensor:
        return self._trainer.seeing("moved_items").slots.items

    @property
    def items(self) -> Tensor:
        items = self._trainer.slots.items
        return items if self._view.slots is None else items.gather(1, self._view.slots)

    @property
    def rows(self) -> Tables:
        trainer = self._trainer.seeing("rows")
        with torch.enable_grad():
            return trainer.rows if self._view.slots is None else trainer.gather(self._view.slots)

    def replay_scores(self, clients: Tensor) -> Tensor:
        return self._scores_at(self._trainer.slots.replay[:, :self._trainer.replayed], clients)

    def listed_scores(self, clients: Tensor) -> Tensor:
        """Logits of soft targets, as ``replay_scores``."""
        return self._scores_at(self._trainer.slots.replay[:, self._trainer.replayed:], clients)

    def _scores_at(self, slots: Tensor, clients: Tensor) -> Tensor:
        trainer = self._trainer
        if self._view.slots is None:
            return self.scores.gather(1, slots)[clients]
        own = trainer.gather(slots, trainer.own_rows)
        return trainer.backbone.score({**trainer.with_context, **own}, trainer.gather(slots))[clients]

    @torch.no_grad()
    def all_scores(self, clients: Tensor) -> Tensor:
        trainer = self._trainer
        if trainer.whole:
            return self.scores[clients].detach()
        parameters = {name: values[clients] for name, values in trainer.with_context.items()}
        if (tables := trainer.tables_now(clients)) is not None:
            own = {name: tables.pop(name) for name in trainer.personal}
            return trainer.backbone.score({**parameters, **own}, tables)
        scores = trainer.backbone.score_all(parameters, trainer.model.public)
        if self.draw.batch > 0:  # before the first update every client's rows are the server's
            rows = (self.scores[clients] if self._view.slots is None else
                    trainer.backbone.score(parameters, {name: rows[clients] for name, rows in trainer.rows.items()}))
            # Every slot of an item gets its canonical slot's score, so that the order of writing does not matter.
            slots = torch.cat([trainer.slots.sample, trainer.slots.replay], 1)[clients]
            scores.scatter_(1, trainer.slots.items[clients], rows.gather(1, slots))
        return scores

    def ranks(self, clients: Tensor, items: Tensor) -> Tensor:
        at_once = max(1, SIZES.ranked_scores // self._trainer.n_items)
        return torch.cat([ranks_of(self.all_scores(part), listed)
                          for part, listed in zip(clients.split(at_once), items.split(at_once))])


class ListTrainer(ChunkTrainer):
    """Local training of one chunk on the samples of a round."""

    def __init__(self, chunk: Chunk, model: Snapshot, training: Training, draw: DrawKey):
        backbone, method, settings = training.backbone, training.method, training.settings
        self.chunk, self.backbone, self.training = chunk, backbone, training
        width, each = chunk.positives.shape[1], settings.negatives
        samples = chunk.positives.new_empty(len(chunk.users), width * (1 + each))
        samples[:, :width] = chunk.positives
        self.negatives = draw_negatives(chunk, settings, draw.seed, draw.step, draw.round, samples[:, width:])
        replayed = method.replayed_items(chunk.users, draw)
        if replayed is not None:
            checks.check_items(method, "replayed_items", replayed, len(chunk.users), model.n_items, draw.round)
        self.replayed = 0 if replayed is None else replayed.shape[1]
        self.soft = method.soft_targets()
        if self.soft is not None:  # of users without a list, some item
            listed = rows_of(self.soft.items, chunk.users)
            replayed = listed if replayed is None else torch.cat([replayed, listed], 1)
        self.whole = self.all_rows or chunk.dense  # slots are all items, in order
        slots = self._layout(samples, width, replayed, model.n_items)
        if backbone.pairwise:  # a sample is a negative with its positive
            of_positive = torch.arange(width, device=samples.device).repeat_interleave(each)
            self.pairs = (slots.sample[:, of_positive], slots.sample[:, width:])
        self.own_samples = backbone.own_samples(settings)
        if self.own_samples is not None:  # equally many for all
            self.samples = self.own_samples.of(chunk.count)[:, None]
        else:
            self.samples = (chunk.count * (each if backbone.pairwise else 1 + each))[:, None]
        self.own_batches = None  # of each client, (C,), where some may have fewer than the chunk
        if chunk.inner and chunk.batches > 1:
            self.own_batches = -(-self.samples.flatten() // settings.batch_size)
        self.covering = self.whole  # every local batch scores all rows held
        self.reads_end = method.overrides("end_local")  # looks at the trained parameters
        self.pull = backbone.pull(model.n_items)
        self.idle_are_still = False  # clients that sit out have no gradient
        super().__init__(chunk.users, slots, model, training, draw, chunk.batches)
        self.part_dense()

    def _layout(self, samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> Slots:
        return (Slots.whole if self.whole else Slots.touched)(samples, positives, replayed, n_items)

    @cached_property
    def valid(self) -> Tensor:
        """Which samples, or pairs, are a client's own and no padding: bool of shape (C, samples)."""
        if self.own_samples is not None:
            each = 1 if self.own_samples.as_set else int(self.samples[0])
            return torch.ones(len(self.users), each, dtype=torch.bool, device=self.users.device)
        positive = torch.arange(self.chunk.positives.shape[1], device=self.users.device)
        of_positive = positive.repeat_interleave(self.settings.negatives)
        if not self.backbone.pairwise:
            of_positive = torch.cat([positive, of_positive])
        return of_positive < self.chunk.count[:, None]

    def _epoch(self, epoch: int) -> Iterator[BatchScoring]:
        """The local batches of one epoch, in order."""
        size, batches = self.settings.batch_size, self.batches
        if self.own_samples is not None:
            order = self._shuffle(epoch).argsort(1) if batches > 1 else self.valid.cumsum(1) - 1
            for chosen in order.split(self.own_samples.per_batch, 1) if batches else ():
                weights = torch.full(chosen.shape, 1.0 / chosen.shape[1], dtype=self.dtype, device=chosen.device)
                yield BatchScoring(listed_weights=weights, chosen=chosen)
            return
        if not self.backbone.explicit:  # an item that is rated twice has two labels, so its samples are scored apart
            if batches == 1:
                yield self._only_batch
                return
            if batches <= SIZES.weighted_batches or self.covering:
                yield from self._covering(epoch)
                return
        order = self._shuffle(epoch).argsort(1)
        for batch in range(batches):
            batch_samples = order[:, batch * size:(batch + 1) * size]
            left = (self.samples - batch * size).clamp(max=size)
            weights = (torch.arange(batch_samples.shape[1], device=batch_samples.device) < left).to(self.dtype) / left
            if self.backbone.pairwise:
                n = torch.arange(batch_samples.shape[1], device=batch_samples.device).expand_as(batch_samples)
                slots = torch.cat([slots.gather(1, batch_samples) for slots in self.pairs], 1)
                yield BatchScoring(slots, pairs=(n, n + batch_samples.shape[1]), listed_weights=weights)
            else:
                labels = (self.chunk.ratings.gather(1, batch_samples) if self.backbone.explicit else
                          batch_samples < self.chunk.positives.shape[1]).to(self.dtype)
                yield BatchScoring(self.slots.sample.gather(1, batch_samples), labels, listed_weights=weights)

    def _shuffle_keys(self, epoch: int) -> Tensor:
        """Keys of the streams that shuffle each client's samples in an epoch, shape (C,)."""
        d = self.draw
        return rng.client_keys(rng.key(d.seed, "shuffle", d.step, d.round, epoch), self.users)

    def _shuffle(self, epoch: int) -> Tensor:
        """Random keys whose order is each client's order of samples in an epoch; padding comes last."""
        keys = self._shuffle_keys(epoch)
        # Number of each sample in its client's own list, positives then negatives, whatever the padding.
        number = torch.arange(self.valid.shape[1], device=keys.device).expand_as(self.valid).clone()
        if not self.backbone.pairwise:
            width = self.chunk.positives.shape[1]
            number[:, width:] += self.chunk.count[:, None] - width
        order_key = rng.sort_keys(rng.bits(keys[:, None], number))
        return order_key.masked_fill_(~self.valid, torch.iinfo(torch.int64).max)

    def _covering(self, epoch: int) -> Iterator[BatchScoring]:
        """Local batches over all the client's rows: the same sums in another order, without copying rows."""
        order, size = self._dealt(epoch), self.settings.batch_size
        width = self.slots.items.shape[1]
        if self.backbone.pairwise:
            width = self.negatives.shape[1]
        for batch, share in enumerate(self._shares):
            yield BatchScoring(pairs=self.pairs if self.backbone.pairwise else None,
                               members=Members(order, batch * size, (batch + 1) * size, share, width))

    def _dealt(self, epoch: int) -> Tensor:
        """The slots of each client's samples, or its pairs, by local batch, (C, n); -1: none."""
        size, count, drawn = self.settings.batch_size, self.chunk.count, self.chunk.count * self.settings.negatives
        head, slots = (0, None) if self.backbone.pairwise else (self.chunk.positives.shape[1], self.slots.sample)
        if ops.serve(self.users):
            return ops.group(self._shuffle_keys(epoch), head, count if head else None, drawn, slots,
                                 head + self.negatives.shape[1], size)
        columns = slots if slots is not None else torch.arange(self.valid.shape[1],
                                                               device=drawn.device).expand_as(self.valid)
        order = columns.masked_fill(~self.valid, -1)
        if self.batches == 1:
            return order
        rank = self._shuffle(epoch).argsort(1).argsort(1)
        batch = (rank // size).masked_fill_(~self.valid, self.batches)
        return order.gather(1, batch.argsort(dim=1, stable=True))

    @cached_property
    def _shares(self) -> Tensor:
        """Of each local batch, what a sample counts in its client's mean, (batches, C, 1)."""
        size = self.settings.batch_size
        before = torch.arange(0, self.batches * size, size, device=self.users.device)
        return (self.samples - before[:, None, None]).clamp(min=1, max=size).to(self.dtype).reciprocal()

    @cached_property
    def _only_batch(self) -> BatchScoring:
        """The local batch of clients that have one per epoch."""
        return next(self._covering(0))

    @cached_property
    def _labels(self) -> Tensor:
        """1 at slots of positives and 0 elsewhere, (C, slots)."""
        return self.slots.positive.to(self.dtype).expand_as(self.slots.items).contiguous()

    def _loss(self, view: BatchScoring, number: int) -> Tensor:
        """Each client's loss on a local batch, shape (C,)."""
        draw = replace(self.draw, batch=number)
        if self.own_samples is not None:  # scores are made only if the method asks for them
            loss, hook, own_term = self._own_loss(view, draw), "own_loss", None

            def scores() -> Tensor:
                return self.backbone.score(self.with_context, self.rows)
        else:
            made, loss, own_term = self._scored_loss(view)
            hook = "pair_loss" if view.pairs is not None else "loss"

            def scores() -> Tensor:
                return made
        loss = self._plus(None, loss, self.backbone, hook)
        own = self._plus(loss, own_term, self.backbone, "regulariser")
        own = self._plus_method(own, BatchView(self, view, draw, scores, lambda scores: own))
        return own + self._penalty() + self._distance()

    def _plus_method(self, loss: Tensor | None, batch: BatchView) -> Tensor | None:
        """A loss and what the method adds to it on a local batch."""
        loss = self._plus(loss, self.method.local_loss(batch), self.method, "local_loss")
        soft = None if self.soft is None else soft_target_loss(self.soft, batch, batch.listed_scores)
        return self._plus(loss, soft, self.method, "soft_targets")

    def _plus(self, loss: Tensor | None, term: Tensor | None, plugin: Any, hook: str) -> Tensor:
        """A loss and a term that a plugin's hook returned, if it did, (C,). Raises PluginError for another shape."""
        if term is None:
            return loss
        checks.check_tensor(plugin, hook, term, (len(self.users),), "(C,): one number per client")
        return term if loss is None else loss + term

    def _scored_loss(self, view: BatchScoring) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores, the loss on them, and the backbone's own term."""
        rows, clients = self.rows, self.clients
        if view.slots is not None:
            rows, clients = self.gather(view.slots), {**clients, **self.gather(view.slots, self.own_rows)}
        scores = self._score(clients, rows)
        checks.check_tensor(self.backbone, "score", scores, next(iter(rows.values())).shape[:2],
                              "(C, n): a logit per client and item row")
        if view.pairs is not None:
            loss = self.backbone.pair_loss(*(scores.gather(1, slots) for slots in view.pairs), view.weights)
        else:
            loss = self.backbone.loss(scores, self._labels if view.labels is None else view.labels, view.weights)
        return scores, loss, self.backbone.regulariser(clients, rows, view.weights, self.personalised, self.draw.round)

    @property
    def with_context(self) -> Tables:
        """Clients' parameters and what they remember (``Backbone.remember``)."""
        return {**self.client_context, **self.clients}

    def _score(self, clients: Tables, rows: Tables) -> Tensor:
        return self.backbone.score({**self.client_context, **clients}, rows)

    def _own_loss(self, view: BatchScoring, draw: DrawKey) -> Tensor:
        """The loss of a backbone that makes it itself."""
        done = draw.round * self.batches * self.training.epochs + draw.batch
        return self.backbone.own_loss(self.clients, self.rows, OwnBatch(
            self.users, self.chunk.positives, self.negatives, view.chosen, draw, done))

    def _move(self, name: str, value: Tensor | None, update: Tensor) -> None:
        """Add an update to a parameter, unless nothing reads it any more (None), and to what it has moved."""
        if value is not None:
            value += update
        if name in self.moved:
            self.moved[name] += update
        else:
            self.moved[name] = update

    def _local_batch(self, view: BatchScoring, rates: Mapping[str, float], taking: Tensor | None, batch: int) -> Tensor:
        """Train on one local batch: every group of parameters in turn. ``rates``: learning rates; ``taking``: which
        clients take part, bool of shape (C,); None: all; ``batch``: local batches done before. Returns each client's
        loss before it, shape (C,)."""
        parameters = {**self.clients, **self.rows}
        number = batch * len(self.groups)
        last = self.batches * self.settings.local_epochs * len(self.groups) - 1
        first_loss = None
        for number, (group, optimiser) in enumerate(zip(self.groups, self.optimisers), start=number):
            trained = {name: parameters[name] for name in group}
            for tensor in trained.values():
                tensor.requires_grad_()
            loss, gradients = self._gradients(view, trained, number)
            for tensor in trained.values():
                tensor.requires_grad_(False)
            with torch.no_grad():
                gradients = writable({name: torch.zeros_like(trained[name]) if gradient is None else gradient
                                      for name, gradient in zip(trained, gradients)})
                if self.backbone.weight_decay > 0.0:
                    for name, gradient in gradients.items():
                        gradient.add_(trained[name], alpha=self.backbone.weight_decay)
                self._pull(gradients, trained)
                gradients = self._with_pulls(gradients, trained)
                for name in gradients.keys() & self.correction.keys():
                    gradients[name].add_(self.correction[name])
                for name in gradients.keys() & self.bases.keys():
                    gradients[name] = gradients[name] @ self.bases[name].T
                updates = optimiser.updates(gradients, rates)
                if taking is not None and not self.idle_are_still:
                    for update in updates.values():
                        update *= taking.view(-1, *[1] * (update.dim() - 1))
                for name in updates.keys() & self.bases.keys():
                    self.coordinates[name] = self.coordinates.get(name, 0.0) + updates[name]
                    updates[name] = updates[name] @ self.bases[name]
                for name, update in updates.items():
                    self._move(name, parameters[name] if number < last or self.reads_end else None, update)
            first_loss = loss.detach() if first_loss is None else first_loss
        return first_loss

    def _gradients(self, view: BatchScoring, parameters: Tables, number: int) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Each client's loss on a local batch, (C,), and its gradients with respect to some parameters."""
        loss = self._loss(view, number)
        checks.require_gradient(self.backbone, loss)
        return loss, torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)

    def _correction(self) -> Tables:
        """What the method adds to gradients in each local batch; 0 where a slot is not canonical."""
        result = self.method.gradient_correction(TrainerView(self, self.draw), self.slots.items)
        checks.check_correction(self.method, result, {**self.rows, **self.dense})
        return {name: value * with_trailing_dims(self.slots.first_copy, value) if name in self.rows else value
                for name, value in result.items()}

    def tables_now(self, clients: Tensor | None = None) -> Tables | None:
        """Whole tables of items as clients have them now, where rows beyond those held move too (``lazy_decay.py``)."""
        return None

    def _pull(self, gradients: Tables, parameters: Tables) -> None:
        """Add the gradient of the pull towards the tables that the server made for the clients."""
        if self.pull > 0.0:
            for name in gradients.keys() & self.personalised.keys():
                gradients[name].add_(parameters[name], alpha=self.pull).sub_(self.personalised[name], alpha=self.pull)

    @torch.no_grad()
    def _distance(self) -> Tensor | float:
        """What the pull adds to each client's loss, shape (C,)."""
        if self.pull == 0.0:
            return 0.0
        return 0.5 * self.pull * sum(torch.linalg.vector_norm((self.rows[name] - served).flatten(1), dim=1).square()
                                     for name, served in self.personalised.items())

    def _finish(self) -> None:
        """After the last local batch: complete ``moved``."""
        for name, value in {**self.clients, **self.rows}.items():  # a client without a sample
            if name not in self.moved:
                self.moved[name] = torch.zeros_like(value)
        for name, basis in self.bases.items():
            if name not in self.coordinates:
                self.coordinates[name] = basis.new_zeros(*self.slots.items.shape, len(basis))

    def train(self) -> Tensor:
        """Run all local batches. Afterwards ``moved`` holds what they added to each slot's rows (0 where the slot is
        not canonical) and to the other parameters. Returns each client's loss averaged over its local batches, shape
        (C,)."""
        self.method.begin_local(TrainerView(self, self.draw))
        parameters = {**self.clients, **self.rows}
        self.groups = self.backbone.groups(list(parameters))
        by_sgd = self.model.sent if self.backbone.sends_gradients else ()
        self.optimisers = [LocalOptimiser(self.settings, by_sgd) for _ in self.groups]
        private_rates = dict.fromkeys(parameters, self.backbone.settings.lr)  # of what a method adds
        self.penalties = row_penalties(self.method, self.rows)
        self.bases = row_bases(self.method, self.rows, self.draw)
        self.correction = self._correction() if self.method.overrides("gradient_correction") else {}
        total = torch.zeros(len(self.users), dtype=torch.float64, device=self.slots.items.device)
        batches = torch.zeros_like(total)
        going = torch.ones_like(total, dtype=torch.bool)  # clients that have not ended their round early
        some_rest = self.settings.tolerance > 0.0 or self.own_batches is not None
        before = torch.full_like(total, torch.inf)
        batch = 0
        for epoch in range(self.settings.local_epochs):
            epoch_loss = torch.zeros_like(total)
            for position, view in enumerate(self._epoch(epoch)):
                taking = going if self.own_batches is None else going & (position < self.own_batches)
                rates = {**private_rates, **self.training.rates(self.model, self.draw.round, batch)}
                loss = self._local_batch(view, rates, taking if some_rest else None, batch)
                epoch_loss += loss * taking if some_rest else loss
                if self.reads_end:
                    self.step_sizes = {name: self.step_sizes.get(name, 0.0) + rate * taking.double()
                                       for name, rate in rates.items()}
                batch += 1
            total += epoch_loss * going
            batches += (self.batches if self.own_batches is None else self.own_batches) * going
            if self.settings.tolerance > 0.0:
                change = (before - epoch_loss).abs() / before.abs().clamp(min=1e-12)
                going &= ~(change < self.settings.tolerance)
                before = epoch_loss
        self._finish()
        if self.draw.step == self.draw.round == 0 and self.batches:
            checks.check_moved(self.backbone, "score", self.moved.values(), parameters.values(), self.users)
        local = TrainerView(self, self.draw)
        local.loss = total / batches.clamp(min=1)
        self.method.end_local(local)
        return local.loss
