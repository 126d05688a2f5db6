"""The whole round of a chunk's clients as one call of compiled kernels, where nothing else has a say in it.

So it is for backbones whose logits are inner products (see ``factored.py``) of item rows and a private parameter
itself, plus a private constant or none, trained by SGD on the usual loss: FedMF and PFedRec. What a method adds to
training, a loss of its own or a look at parameters before and after, needs the local batches one by one;
``FactoredTrainer`` has them, and the numbers are the same to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rng
from ..plugin import checks
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot
from ..kernels import ops
from .sampling import Chunk
from .chunk_trainer import Slots
from .factored import Outer
from .strategies import FusedLayout, Training, fused_layout


class Plan(NamedTuple):
    """What a round trains, as the kernel is told, and the names of its parameters."""

    layout: FusedLayout
    task: ops.InnerTask


def plan_of(training: Training, model: Snapshot, key: DrawKey, batches: int) -> Plan:
    """What a round trains.

    Args:
        key: of the round.
        batches: local batches per epoch, of the client with most.
    """
    settings, epochs = training.settings, range(training.settings.local_epochs)
    layout = fused_layout(training.backbone, training.method, model, settings)
    usual = training.backbone.settings.lr
    rates = [training.rates(model, key.round, batch) for batch in range(batches * len(epochs))]
    constants = None if layout.constant is None else model.private[layout.constant].contiguous()
    return Plan(layout, ops.InnerTask(
        model.public[layout.item].contiguous(), model.private[layout.vector].contiguous(), constants,
        settings.negatives, rng.key(key.seed, "negatives", key.step, key.round),
        [rng.key(key.seed, "shuffle", key.step, key.round, epoch) for epoch in epochs], settings.batch_size,
        layout.turns,
        [-rate.get(name, usual) for rate in rates for name in (layout.vector, layout.constant, layout.item)]))


def _clients(chunk: Chunk) -> ops.InnerClients:
    names = rng.names(chunk.users)
    return chunk.for_kernels if names is chunk.users else replace(chunk.for_kernels, names=names)


class FusedTrainer:
    """Local training of one chunk; arguments and attributes as of ``ChunkTrainer``.

    Args:
        watched: whether somebody looks at the samples: ``slots`` has no more than the items otherwise.
    """

    all_rows = False

    def __init__(self, chunk: Chunk, model: Snapshot, training: Training, draw: DrawKey, plan: Plan, watched: bool):
        self.chunk, self.model, self.draw, self.plan = chunk, model, draw, plan
        self.backbone, self.users, self.watched = training.backbone, chunk.users, watched
        self.moved: dict[str, Tensor | Outer] = {}
        self.replaced: Tables = {}
        self.uploads: Tables = {}
        self.declared = training.method.uploads(training.backbone, draw.round)

    def train(self) -> Tensor:
        """Run all local batches: fills ``slots`` and ``moved``.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        layout, key, private = self.plan.layout, self.draw, self.model.private
        done = ops.inner_round(self.plan.task, _clients(self.chunk), self.watched)
        self.slots = Slots(done.items)
        if self.watched:
            first = torch.arange(done.items.shape[1]) < done.held[:, None]
            self.slots = Slots(done.items, done.positive, done.sample, done.items[:, :0], first)
        for name, moved in zip((layout.vector, layout.constant), done.moved):
            if moved is not None:
                self.moved[name] = moved.view(-1, *private[name].shape[1:])
        self.moved[layout.item] = Outer(self.model.public[layout.item], done.items, done.steps, done.vectors, done.held)
        if key.step == key.round == 0:
            before = (private[name].index_select(0, self.users) for name in self.moved if name in private)
            checks.check_moved(self.backbone, "score", [*done.moved, done.steps], before, self.users)
        return done.loss
