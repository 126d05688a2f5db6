"""Local training without copies of item rows, for backbones whose logits are inner products (``Backbone.factors``).

The gradient of a logit v . q_i + b with respect to q_i is v, so under SGD a client's rows are the server's plus
multiples of the vectors it has had: after K updates row i is q_i + sum_k a_ki v_k. A client thus holds K numbers per
item instead of d. This is the mathematics of ``list_trainer.py``, summed in another order.

With compiled kernels, a local batch whose only loss is the usual one is one call (``ops.inner_batch``), which reads
the rows of its samples in the server's table. Where a method asks for other logits, those of all slots are made; and
where clients have many samples among few items, slots are all items, and these logits are one matrix product with the
table, plus sum_k a_ki (v_k . v).

A method's pull w/2 |q_i - t_i|^2 (``Method.pull``) takes q_i a share r = lr w of the way to t_i in every update. So
q_i becomes (1 - r) q_i + r t_i for all clients, and what a client added before is multiplied by 1 - r. Along a basis B
(``Method.row_basis``) updates are multiples of v B'B.

Where nothing else has a say in it, the whole round of a chunk's clients is one call (``FusedTrainer``): for logits that
are inner products of item rows and a private parameter itself, plus a private constant or none, trained by SGD on the
usual loss (FedMF, PFedRec). What a method adds to training needs the local batches one by one; ``FactoredTrainer`` has
them, and the numbers are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from .. import rng
from ..kernels import ops
from ..plugin import checks
from ..plugin.history import History
from ..plugin.method import Method, Pull
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from ..core.tuning import SIZES
from .chunk_trainer import Slots, pulls_of, row_bases
from .list_trainer import BatchScoring, BatchView, ListTrainer
from .sampling import Chunk
from .strategies import FusedLayout, Training, fused_layout


@dataclass(frozen=True)
class Outer:
    """What C clients added to their copies of an item table: the sum of outer products of ``steps`` and ``vectors``."""

    table: Tensor  # what the server sent, (items, d)
    # The items that they have steps for, (C, slots), each at most once with a step; None: all of them, in order.
    items: Tensor | None
    steps: Tensor  # of each update, (C, slots, updates)
    vectors: Tensor  # of each update, (C, updates, d)
    held: Tensor | None = None  # in how many slots, the first, a client has steps that are not 0, (C,), if known
    few: bool = False  # updates have steps for the samples of a local batch only

    def __getitem__(self, part: slice | Tensor) -> "Outer":
        """Of some clients."""
        return replace(self, items=None if self.items is None else self.items[part], steps=self.steps[part],
                       vectors=self.vectors[part], held=None if self.held is None else self.held[part])

    def __len__(self) -> int:
        return len(self.steps)

    def first(self, updates: int) -> "Outer":
        """Of the first updates only."""
        return replace(self, steps=self.steps[:, :, :updates], vectors=self.vectors[:, :updates])

    def scaled(self, factors: Tensor) -> "Outer":
        """Each client's times its factor, (C,)."""
        return replace(self, vectors=self.vectors * factors.to(self.vectors)[:, None, None])

    def add_to(self, total: Tensor) -> None:
        """Add the sum over clients to a table of shape (items, d)."""
        if self.items is not None or (self.few and ops.serve(total)):
            ops.add_outer(total, self.items, self.held, self.steps.contiguous(), self.vectors)
            return
        total.addmm_(self.steps.transpose(0, 1).flatten(1), self.vectors.flatten(0, 1))

    def rows(self) -> Tensor:
        """Of each client, (C, slots, d)."""
        return self.steps @ self.vectors


def _logits(vectors: Tensor, constants: Tensor | None, outer: Outer) -> Tensor:
    """vectors @ table.T + constants + sum_k steps_k (past_k . vectors) of each slot, (C, slots)."""
    if outer.items is not None:
        logits = ops.row_products(outer.table, outer.items, vectors, constants)
    elif constants is None:
        logits = vectors @ outer.table.T
    else:
        logits = torch.addmm(constants, vectors, outer.table.T)
    for step, past in zip(outer.steps.unbind(2), outer.vectors.unbind(1)):
        logits.addcmul_(step, (past * vectors).sum(1, keepdim=True))
    return logits


def _to_vectors(gradient: Tensor, outer: Outer) -> Tensor:
    """The gradient of the vectors, (C, d), given that of the logits."""
    result = gradient @ outer.table if outer.items is None else ops.row_sums(outer.table, outer.items, gradient)
    for step, past in zip(outer.steps.unbind(2), outer.vectors.unbind(1)):
        result.addcmul_((gradient * step).sum(1, keepdim=True), past)
    return result


class _Logits(torch.autograd.Function):
    """``_logits``, whose gradient with respect to ``moved``, which stands for what the client will have added to each
    logit's row, is that of the logits themselves."""

    @staticmethod
    def forward(ctx, vectors: Tensor, constants: Tensor | None, moved: Tensor, outer: Outer) -> Tensor:
        ctx.outer = outer
        return _logits(vectors, constants, outer)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        to_vectors = _to_vectors(gradient, ctx.outer) if ctx.needs_input_grad[0] else None
        to_constants = gradient.sum(1, keepdim=True) if ctx.needs_input_grad[1] else None
        return to_vectors, to_constants, gradient if ctx.needs_input_grad[2] else None, None


class FactoredTrainer(ListTrainer):
    """``ListTrainer`` whose item rows are not held; ``rows`` has one number per client and slot in their place, whose
    gradient is the logit's. ``moved`` holds an ``Outer`` for the table."""

    def _own_copies(self) -> Tables:
        (self.name, table), = self.model.public.items()
        slots, updates = self.slots.items, self.batches * self.settings.local_epochs
        self.fused = ops.serve(table) and self.backbone.usual_loss
        self.outer = Outer(table, None if self.whole else slots.contiguous(), table.new_empty(*slots.shape, updates),
                           table.new_empty(len(slots), updates, table.shape[1]), few=self.fused)
        self.covering |= self.fused  # rows are read where they are
        self.done = 0  # updates so far
        return {self.name: table.new_zeros(()).expand(self.slots.items.shape)}

    def _begun(self) -> Tables:
        return dict(self.model.dense)

    def _factors(self, clients: Tables) -> tuple[Tensor, Tensor | None]:
        """The backbone's factors of the logits; ``vectors`` are their values before the next update."""
        vectors, constants = self.backbone.factors({**self.client_context, **clients})
        table, number = self.outer.table, len(self.users)
        shape = (number, table.shape[1])
        checks.check_tensor(self.backbone, "factors", vectors, shape, "(C, d): a vector per client")
        if constants is not None:
            checks.check_tensor(self.backbone, "factors", constants, (number, 1), "(C, 1): a constant per client")
        self.vectors = vectors.detach().to(table).clone(memory_format=torch.contiguous_format)
        return vectors, constants

    def _score(self, clients: Tables, rows: Tables) -> Tensor:
        return self._logits_of(*self._factors(clients))

    def _logits_of(self, vectors: Tensor, constants: Tensor | None) -> Tensor:
        return _Logits.apply(vectors, constants, self.rows[self.name], self.outer.first(self.done))

    def _gradients(self, view: BatchScoring, parameters: Tables, number: int) -> tuple[Tensor, Sequence[Tensor | None]]:
        if not self.fused:
            return super()._gradients(view, parameters, number)
        vectors, constants = self._factors(self.clients)
        term = None
        if self.method.adds_scores():
            batch = BatchView(self, view, replace(self.draw, batch=number),
                              lambda: self._logits_of(vectors, constants),
                              lambda scores: self.backbone.loss(scores, self._labels, view.weights))
            term = self._plus_method(None, batch)
        self.idle_are_still = term is None and self.settings.tolerance == 0.0
        if term is not None:
            self.outer = replace(self.outer, few=False)
            loss = batch.loss + term
            return loss, torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
        needed = vectors.requires_grad, constants is not None and constants.requires_grad, self.name in parameters
        outer, members = self.outer, view.members
        loss, to_vectors, to_constants = ops.inner_batch(
            ops.MovedRows(outer.table, outer.items, outer.steps, outer.vectors, self.done), self.vectors,
            None if constants is None else constants.detach().to(self.vectors).contiguous(),
            ops.InnerSamples(members.order, members.start, members.end, members.share, self.slots.positive), needed)
        names = [name for name in parameters if name != self.name]
        gradients = dict(zip(names, self._through(vectors, constants, to_vectors, to_constants,
                                                  [parameters[name] for name in names])))
        if self.name in parameters:
            gradients[self.name] = self.outer.steps[:, :, self.done]
        return loss, [gradients[name] for name in parameters]

    def _through(self, vectors: Tensor, constants: Tensor | None, to_vectors: Tensor | None,
                 to_constants: Tensor | None, parameters: list[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of the parameters that factors are made of, given the factors'."""
        factors = [factor for factor in (vectors, constants) if factor is not None and factor.requires_grad]
        if not parameters:
            return []
        if not factors:
            checks.require_gradient(self.backbone, vectors)
        if len(parameters) == 1 and vectors is parameters[0]:  # needs no graph
            return [to_vectors]
        # As a sum: given gradients of what is not one number, PyTorch first imports some 500 modules.
        through = sum((factor * gradient).sum() for factor, gradient in
                      zip(factors, (g for g in (to_vectors, to_constants) if g is not None), strict=True))
        return torch.autograd.grad(through, parameters, allow_unused=True)

    def _move(self, name: str, value: Tensor | None, update: Tensor) -> None:
        if name != self.name:
            super()._move(name, value, update)
            return
        if self.row_pull is not None:
            self._pull_rows(self.row_pull)
        step = self.outer.steps[:, :, self.done]
        if update.data_ptr() != step.data_ptr():  # or it has been written in its place
            step.copy_(update)
        if self.basis is None:
            self.outer.vectors[:, self.done] = self.vectors
        else:
            self.along.append(self.vectors @ self.basis.T)
            self.outer.vectors[:, self.done] = self.along[-1] @ self.basis
        self.done += 1
        self.moved[name] = update  # tells whether anything moved, until the round ends

    def _pull_rows(self, pull: Pull) -> None:
        """The step of all rows towards what they are kept near; the update that follows counts from there."""
        share, outer = self.rate * pull.weight, self.outer
        kept: Tensor | float = 1.0 - share
        if pull.to is not None:
            known, table = len(pull.to), outer.table.clone()
            table[:known].lerp_(pull.to, share)
            self.outer = replace(outer, table=table)
            if known < self.n_items:
                known_slots = (self.slots.items < known)[:, :, None]
                kept = table.new_ones(known_slots.shape).masked_fill_(known_slots, kept)
        outer.steps[:, :, :self.done] *= kept

    def added_to(self, name: str) -> Tensor:
        return self.outer.first(self.done).rows() if name == self.name else super().added_to(name)

    def _local_batch(self, view: BatchScoring, rates: Mapping[str, float], taking: Tensor | None, batch: int) -> Tensor:
        self.rate = rates[self.name]
        return super()._local_batch(view, rates, taking, batch)

    def _finish(self) -> None:
        super()._finish()
        if self.basis is not None:
            steps = self.outer.first(self.done).steps
            self.coordinates[self.name] = steps @ torch.stack(self.along, 1) if self.along else steps.new_zeros(
                *self.slots.items.shape, len(self.basis))

    def train(self) -> Tensor:
        self.row_pull = self.pulls.pop(self.name, None)
        self.basis = row_bases(self.method, {self.name: self.outer.table[None]}, self.draw).get(self.name)
        self.along: list[Tensor] = []  # the vectors' coordinates along the basis, of each update
        loss = super().train()
        self.moved[self.name] = self.outer.first(self.done)
        return loss


class HistoryTrainer(FactoredTrainer):
    """``ListTrainer`` of a ``HistoryBackbone``, of whose first layers a client reads the rows of its own items only.
    Slots are the clients' positives, and ``rows`` has a number per client and item in place of those of the last layer,
    whose gradient is the logit's."""

    all_rows = fused = False

    def _layout(self, samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> Slots:
        return Slots.touched(samples[:, :positives], positives, None, n_items)

    def _own_copies(self) -> Tables:
        self.name, self.done = self.backbone.output, 0
        table, updates, count = self.model.public[self.name], self.settings.local_epochs, len(self.users)
        self.outer = Outer(table, None, table.new_empty(count, self.n_items, updates),
                           table.new_empty(count, updates, table.shape[1]))
        return {name: table.new_zeros(()).expand(count, self.n_items) if name == self.name else rows[self.slots.items]
                for name, rows in self.model.public.items()}

    def _own_loss(self, view: BatchScoring, draw: DrawKey) -> Tensor:
        items = self.slots.items
        history = History(self.users, items, self.slots.first_copy, draw)
        tables = {**self.clients, **self.rows}

        def pool(name: str, factors: Tensor) -> Tensor:
            return torch.bmm(factors.unsqueeze(1), tables[name]).squeeze(1)

        vectors, term = self.backbone.represent(self.clients, pool, history)
        checks.check_tensor(self.backbone, "represent", vectors, self.outer.vectors[:, 0].shape,
                            "(C, d): a vector per client")
        self.vectors = vectors.detach()
        return self.backbone.loss_of(self._logits_of(vectors, None), history, term)


class Plan(NamedTuple):
    """What a round trains, as the kernel is told, and the names of its parameters."""

    layout: FusedLayout
    task: ops.InnerTask


def plan_of(training: Training, model: Snapshot, key: DrawKey, batches: int) -> Plan | None:
    """What a round trains; None if it would take too much memory, if somebody asks which rows that a pull moves a
    client did not look up, or if a replay memory ranks items that a pull moves. ``key``: of the round; ``batches``:
    local batches per epoch, of the client with most."""
    method, settings, epochs = training.method, training.settings, range(training.settings.local_epochs)
    if method.penalises_rows and training.protection.clip > 0.0:
        return None
    layout = fused_layout(training.backbone, training.method, model, settings)
    usual = training.backbone.settings.lr
    rates = [training.rates(model, key.round, batch) for batch in range(batches * len(epochs))]
    constants = None if layout.constant is None else model.private[layout.constant].contiguous()
    pulled = _pulls(method, model, layout, [rate.get(layout.item, usual) for rate in rates])
    if pulled is None:
        return None
    tables, pulls = pulled
    lists = _lists(method, tables[0], [rng.key(key.seed, "replay", key.step, key.round, update)
                                       for update in range(len(rates) * len(layout.turns))])
    if lists.columns is not None and len(tables) > 1:
        return None
    return Plan(layout, ops.InnerTask(
        tables, model.private[layout.vector].contiguous(), constants,
        settings.negatives, settings.distinct, rng.key(key.seed, "negatives", key.step, key.round),
        [rng.key(key.seed, "shuffle", key.step, key.round, epoch) for epoch in epochs], settings.batch_size,
        layout.turns,
        [-rate.get(name, usual) for rate in rates for name in (layout.vector, layout.constant, layout.item)],
        pulls, lists))


def _lists(method: Method, table: Tensor, keys: Sequence[int]) -> ops.InnerLists:
    """What the method's clients distil. ``keys``: by which a replay memory draws in each update."""
    soft = method.soft_targets()
    if soft is None:
        return ops.InnerLists()
    weights, chosen, columns = soft.weights, soft.chosen, None
    if not isinstance(weights, Tensor):
        weights = table.new_full((len(soft.items),), weights)
    if soft.eps is not None:
        columns = torch.nn.functional.pad(table.T, (0, -len(table) % ops.BLOCK)).contiguous()
    return ops.InnerLists(soft.items.contiguous(), soft.targets.to(table).contiguous(), weights.to(table).contiguous(),
                          None if chosen is None else chosen.contiguous(), soft.reduction == "mean", soft.eps or 0.0,
                          keys, columns)


def _pulls(method: Method, model: Snapshot, layout: FusedLayout, rates: Sequence[float]
           ) -> tuple[Tensor, ops.InnerPulls] | None:
    """The item table in each local batch, one for all unless a pull moves it, and the method's pulls; None where these
    are too many tables, or of different users. ``rates``: learning rates of item rows in each local batch."""
    table, names = model.public[layout.item].contiguous(), (layout.vector, layout.constant)
    private = pulls_of(method, {name: model.private[name] for name in names if name is not None}, private=True)
    near = [private[name].to.flatten(1).contiguous() if name in private else None for name in names]
    weights = tuple(private[name].weight if name in private else 0.0 for name in names)
    pull = pulls_of(method, {layout.item: table}).get(layout.item)
    moves = pull is not None and pull.to is not None
    if len({len(each) for each in near if each is not None}) > 1 or (
            moves and table.numel() * len(rates) > SIZES.pulled_tables):
        return None
    shares = [] if pull is None else [rate * pull.weight for rate in rates]
    known, tables = len(pull.to) if moves else len(table), table.expand(len(rates) if moves else 1, -1, -1).contiguous()
    for before, after, share in zip(tables, tables[1:], shares):
        torch.lerp(before[:known], pull.to, share, out=after[:known])
    return tables, ops.InnerPulls([1.0 - share for share in shares], known, *near, weights)


class FusedTrainer:
    """Local training of one chunk; arguments and attributes as of ``ChunkTrainer``. ``watched``: whether somebody looks
    at the samples: ``slots`` has no more than the items otherwise."""

    all_rows = False

    def __init__(self, chunk: Chunk, model: Snapshot, training: Training, draw: DrawKey, plan: Plan, watched: bool):
        self.chunk, self.model, self.draw, self.plan = chunk, model, draw, plan
        self.backbone, self.users, self.watched = training.backbone, chunk.users, watched
        self.moved: dict[str, Tensor | Outer] = {}
        self.replaced: Tables = {}
        self.uploads: Tables = {}
        self.declared = training.method.uploads(training.backbone, draw.round)
        self.summed: dict[str, tuple[int, ...]] = {}
        self.added: dict[str, tuple[Tensor, None]] = {}

    def train(self) -> Tensor:
        """Run all local batches: fills ``slots`` and ``moved``. Returns each client's loss averaged over its local
        batches, shape (C,)."""
        layout, key, private = self.plan.layout, self.draw, self.model.private
        chunk, others = self.chunk, self.chunk.others
        done = ops.inner_round(self.plan.task, ops.InnerClients(
            chunk.users, chunk.positives, chunk.count, rng.names(chunk.users), others.count, others.gaps,
            chunk.batches), self.watched)
        self.slots = Slots(done.items)
        if self.watched:
            first = torch.arange(done.items.shape[1]) < done.held[:, None]
            self.slots = Slots(done.items, done.positive, done.sample, done.replayed, first)
        for name, moved in zip((layout.vector, layout.constant), done.moved):
            if moved is not None:
                self.moved[name] = moved.view(-1, *private[name].shape[1:])
        self.moved[layout.item] = Outer(self.model.public[layout.item], done.items, done.steps, done.vectors, done.held)
        if key.step == key.round == 0:
            before = (private[name].index_select(0, self.users) for name in self.moved if name in private)
            checks.check_moved(self.backbone, "score", [*done.moved, done.steps], before, self.users)
        return done.loss
