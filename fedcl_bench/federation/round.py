"""The local training of a round's participants, chunk by chunk on several threads."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from ..plugin import checks
from ..training.lazy_decay import LazyDecayTrainer
from ..training.chunk_trainer import ChunkTrainer
from ..training.factored import FactoredTrainer, FusedTrainer, HistoryTrainer, Outer, plan_of
from ..training.list_trainer import ListTrainer
from ..training.session_trainer import SessionChunk, SessionTrainer
from ..training.trained import Change, Trained, at_slots
from ..training.unseen_rows import shifts_of
from ..training.strategies import Strategy, Training
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot
from ..core.parallel import in_order
from ..training.sampling import Chunk, LaterChunk
from ..plugin.sequential import SequentialBackbone
from ..core.tuning import SIZES
from .malicious import Malicious
from .server import RoundSums, clip

AnyChunk = Chunk | LaterChunk | SessionChunk


class Work(NamedTuple):
    """Participants that train alike, and what they train on."""

    training: Training
    chunks: Sequence[AnyChunk]


def train_clients(work: Sequence[Work], model: Snapshot, key: DrawKey, weights: Tensor | None = None,
                  observe: Callable[[Trained], None] | None = None, malicious: Malicious | None = None) -> RoundSums:
    """What the local training of all participants adds up to, which does not depend on the number of threads.

    Args:
        work: of the participants; not empty, though its chunks may be.
        model: at the start of the round; not modified.
        weights: weight of every user in the mean, shape (users,); None: all alike.
        observe: called with every chunk's clients after their training.
    """
    training = work[0].training
    own_start = training.own_start and key.round == 0
    count = sum(len(chunk.users) for part in work for chunk in part.chunks)
    keeps = training.keeps or training.method.overrides("aggregate_updates")
    sums = RoundSums(model, count, weights, own_start, keeps, training.method.sums(training.backbone, model.n_items))
    for training, chunks in work:
        train = trainer_of(chunks, model, training, key, observe is not None)
        short = not chunks or _is_short(chunks, training)
        for trained in map(train, chunks) if short else in_order(train, chunks, chunks[0].users.device):
            if observe is not None:
                observe(trained)
            for honest in (trained,) if malicious is None else malicious.honest(trained):
                sums.add(honest)
    if malicious is not None:
        rates = work[0].training.backbone.learning_rates(model.n_items, key.round)
        for trained in malicious.uploads(model, key, rates, sums.losses):
            sums.add(trained)
    return sums


def _is_short(chunks: Sequence[AnyChunk], training: Training) -> bool:
    """Whether threads would only wait for each other: a method's own loss on little data is many short operations,
    which Python calls one at a time."""
    if (not training.method.adds_scores() or training.strategy is Strategy.FUSED
            or not all(isinstance(c, Chunk) and c.inner for c in chunks)):
        return False
    return sum(chunk.positives.numel() for chunk in chunks) * (1 + training.settings.negatives) < SIZES.short_round


def upload_first(work: Sequence[Work], model: Snapshot, key: DrawKey) -> Tables:
    """What participants upload before they train, each (N, ...) in ascending order of users; arguments as of
    ``train_clients``."""
    users, rows = [], []
    for training, chunks in work:
        derived = _derived(training, model, key)
        users += [chunk.users for chunk in chunks]
        rows += in_order(lambda chunk: SessionTrainer(chunk, model, training, key, derived).upload_first(), chunks,
                         next(model.tables()).device)
    if not rows:  # of a node without participants
        return {}
    order = torch.cat(users).argsort()
    return {name: torch.cat([uploads[name] for uploads in rows])[order] for name in rows[0]}


def _derived(training: Training, model: Snapshot, key: DrawKey) -> Tables:
    """What every client makes of what it received (see ``SequentialBackbone.derive``)."""
    backbone = training.backbone
    return backbone.derive(model.public, key) if isinstance(backbone, SequentialBackbone) else {}


def trainer_of(chunks: Sequence[AnyChunk], model: Snapshot, training: Training, key: DrawKey, watched: bool = True
               ) -> Callable[[AnyChunk], Trained]:
    """The function that trains the clients of one of a round's chunks; arguments as for ``train_clients``. ``watched``:
    whether somebody looks at their samples."""
    backbone, method, settings = training.backbone, training.method, training.settings
    derived, soft = _derived(training, model, key), method.soft_targets()
    if soft is not None:
        checks.check_soft_targets(method, soft, model, isinstance(backbone, SequentialBackbone), key.round)
    shifts = shifts_of([chunk.batches for chunk in chunks], model.public, method, backbone, settings, key) \
        if method.penalises_rows else {}
    fused = training.strategy is Strategy.FUSED and chunks
    plan = plan_of(training, model, key, max(chunk.batches for chunk in chunks)) if fused else None

    def trainer(chunk: Chunk | SessionChunk) -> ChunkTrainer:
        if plan is not None and chunk.inner and not chunk.dense:
            return FusedTrainer(chunk, model, training, key, plan, watched)
        if isinstance(chunk, SessionChunk):
            return SessionTrainer(chunk, model, training, key, derived)
        kinds = {Strategy.LAZY_DECAY: LazyDecayTrainer, Strategy.HISTORIES: HistoryTrainer}
        kind = FactoredTrainer if chunk.inner else kinds.get(training.strategy, ListTrainer)
        return kind(chunk, model, training, key)

    def train(chunk: AnyChunk) -> Trained:
        chunk = chunk.materialise() if isinstance(chunk, LaterChunk) else chunk
        work = trainer(chunk)
        loss = work.train()
        if not method.uploads_first:
            checks.check_sent(method, work.declared, work.uploads)
        checks.check_sent(method, work.summed, work.added, summed=True)
        return _result(work, loss, shifts.get(chunk.batches, {}), training)

    return train


def _result(work: ChunkTrainer, loss: Tensor, shift: Tables, training: Training) -> Trained:
    """What a trainer has made of its clients, clipped."""
    model, moved = work.model, work.moved
    for name, table in shift.items():
        # Rows the client did not touch moved by `shift` too, alike for all; its own copies count from there.
        if not isinstance(moved[name], Outer):  # which has no more than what they did themselves
            moved[name] = moved[name] - at_slots(table, work.slots)
    local = _local_tables(work, shift) if training.backbone.keeps_local_tables else {}
    decay = work.decay if isinstance(work, LazyDecayTrainer) else {}

    def changed(name: str) -> Change:
        rows = moved[name]
        if isinstance(rows, Outer):
            return Change(rows, rows.items, shift=shift.get(name))
        of_items = not work.all_rows and (name in model.public or name in training.personal)
        return Change(rows, work.slots.items if of_items else None, decay=decay.get(name), shift=shift.get(name))

    public = {name: changed(name) for name in model.sent}
    private = {name: changed(name) for name in model.private if name in moved}
    private |= {name: Change(values, replaces=True) for name, values in work.replaced.items()}
    if isinstance(work, LazyDecayTrainer):  # rows beyond those held may end anywhere between the server's two tables
        public |= {name: Change(table, replaces=True) for name, table in local.items()}
        private |= {name: Change(work.private[name], work.slots.items, replaces=True, decay=decay[name])
                    for name in work.personal}
    zero = next(iter(model.public.values())).new_zeros(())
    if work.summed:
        public = {name: Change(Outer(zero, None, *value) if isinstance(value, tuple) else value, items)
                  for name, (value, items) in work.added.items()}
    sums = {name: zero.expand(shape) for name, shape in work.summed.items()}
    return clip(Trained(work.users, work.slots, public, private, local, loss, work.uploads, sums), model,
                training.protection)


def _local_tables(work: ChunkTrainer, shifts: Tables) -> Tables:
    """Each client's own trained copy of the public tables, each (C, items, ...)."""
    if isinstance(work, LazyDecayTrainer):
        return work.kept
    if work.backbone.whole_tables:
        return {name: work.model.public[name] + work.moved[name] for name in work.rows}
    result = {}
    for name, table in work.model.public.items():
        moved = work.moved[name]
        rows, all_items = (moved.rows(), moved.items is None) if isinstance(moved, Outer) else (moved, False)
        start = table + shifts[name] if name in shifts else table
        if all_items:
            result[name] = rows + start
            continue
        copies = start.expand(len(work.users), *table.shape).clone()
        index = work.slots.items.view(*work.slots.items.shape, *[1] * (table.dim() - 1))
        result[name] = copies.scatter_add_(1, index.expand_as(rows), rows)
    return result
