"""The whole round of a chunk's clients as one call of compiled kernels, where nothing else has a say in it.

So it is for backbones whose logits are inner products (see ``factored.py``) of item rows and a private parameter
itself, plus a private constant or none, trained by SGD on the usual loss: FedMF and PFedRec. What a method adds to
training, a loss of its own or a look at parameters before and after, needs the local batches one by one;
``FactoredTrainer`` has them, and the numbers are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import rng
from ..plugin import checks
from ..rng import DrawKey, Tables
from ..plugin.state import Snapshot
from ..kernels import ops
from .sampling import Chunk
from ..plugin.local_settings import LocalSettings
from .chunk_trainer import Slots
from .factored import Outer
from .strategies import FusedLayout, Training, fused_layout


@dataclass(frozen=True)
class Plan:
    """What a round trains, and when.

    Attributes:
        rates: by what gradients of vectors, constants and item rows are multiplied, one local batch after the other.
        negatives, shuffles: keys of the round's draws of negatives, and of the order of samples in each epoch.
    """

    layout: FusedLayout
    rates: list[float]
    negatives: int
    shuffles: list[int]

    def task(self, model: Snapshot, settings: LocalSettings) -> ops.InnerTask:
        """What the kernel is told of a round."""
        constants = None if self.layout.constant is None else model.private[self.layout.constant].contiguous()
        return ops.InnerTask(
            model.public[self.layout.item].contiguous(), model.private[self.layout.vector].contiguous(), constants,
            settings.negatives, self.negatives, self.shuffles, settings.batch_size, self.layout.turns, self.rates)


def plan_of(training: Training, model: Snapshot, key: DrawKey, batches: int) -> Plan:
    """What a round trains.

    Args:
        key: of the round.
        batches: local batches per epoch, of the client with most.
    """
    settings = training.settings
    layout = fused_layout(training.backbone, training.method, model, settings)
    epochs, usual = range(settings.local_epochs), training.backbone.settings.lr
    rates = [training.rates(model, key.round, batch) for batch in range(batches * len(epochs))]
    return Plan(layout, [-rate.get(name, usual) for rate in rates
                         for name in (layout.vector, layout.constant, layout.item)],
                rng.key(key.seed, "negatives", key.step, key.round),
                [rng.key(key.seed, "shuffle", key.step, key.round, epoch) for epoch in epochs])


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
        self.backbone, self.settings = training.backbone, training.settings
        self.users, self.watched = chunk.users, watched
        self.moved: dict[str, Tensor | Outer] = {}
        self.replaced: Tables = {}
        self.uploads: Tables = {}
        self.declared = training.method.uploads(training.backbone, draw.round)

    def train(self) -> Tensor:
        """Run all local batches: fills ``slots`` and ``moved``.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        chunk, plan, key, table = self.chunk, self.plan, self.draw, self.model.public[self.plan.layout.item]
        task, private = plan.task(self.model, self.settings), self.model.private
        done = ops.inner_round(task, _clients(chunk), self.watched)
        self.slots = Slots(done.items)
        if self.watched:
            first = torch.arange(done.items.shape[1]) < done.held[:, None]
            self.slots = Slots(done.items, done.positive, done.sample, done.items[:, :0], first)
        for name, moved in zip((plan.layout.vector, plan.layout.constant), done.moved):
            if moved is not None:
                self.moved[name] = moved.view(-1, *private[name].shape[1:])
        self.moved[plan.layout.item] = Outer(table, done.items, done.steps, done.vectors, done.held)
        if key.step == key.round == 0:
            before = (private[name].index_select(0, self.users) for name in self.moved if name in private)
            checks.check_moved(self.backbone, "score", [*done.moved, done.steps], before, self.users)
        return done.loss
