"""The whole round of a chunk's clients as one call of compiled kernels, where nothing else has a say in it.

So it is for backbones whose logits are inner products (see ``inner.py``) of item rows and a private parameter itself,
plus a private constant or none, trained by SGD on the usual loss: FedMF and PFedRec. What a method adds to training, a
loss of its own or a look at parameters before and after, needs the local batches one by one; ``InnerTrainer`` has them,
and the numbers are the same to the bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import contract, draws
from ..backbone import Backbone
from ..draws import DrawKey, Tables
from ..method import Method
from ..model import Snapshot
from ..ops import kernels
from ..sampling import Chunk, LocalSettings
from .base import Slots
from .factored import Outer, scores_samples_only


@dataclass(frozen=True)
class Plan:
    """What is trained, and when.

    Attributes:
        item, vector, constant: names of the item table, of the private parameter that item rows are multiplied with,
            and of what is added, or None.
        turns: of the groups of parameters that take their steps one after the other in a local batch, whether the
            private ones (1), item rows (2) or both (3) are in it.
        rates: by what gradients of vectors, constants and item rows are multiplied, one local batch after the other.
        negatives, shuffles: keys of the round's draws of negatives, and of the order of samples in each epoch.
    """

    item: str
    vector: str
    constant: str | None
    turns: list[int]
    rates: list[float]
    negatives: int
    shuffles: list[int]

    def task(self, model: Snapshot, settings: LocalSettings) -> kernels.InnerTask:
        """What the kernel is told of a round."""
        constants = None if self.constant is None else model.private[self.constant].contiguous()
        return kernels.InnerTask(
            model.public[self.item].contiguous(), model.private[self.vector].contiguous(), constants,
            settings.negatives, self.negatives, self.shuffles, settings.batch_size, self.turns, self.rates)


def is_one_call(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings) -> bool:
    """Whether clients that are trained without copies of item rows (``inner.is_inner``) are in one call."""
    return _layout_of(backbone, method, model, settings) is not None


def _layout_of(backbone: Backbone, method: Method, model: Snapshot,
               settings: LocalSettings) -> tuple[str, str | None, list[int]] | None:
    if (len(model.public) != 1 or not kernels.serve(table := next(iter(model.public.values())))
            or model.dense or model.served or model.memory or not scores_samples_only(backbone, method)
            or settings.tolerance > 0.0 or settings.negative_draw != "repeated" or backbone.pull(model.n_items) > 0.0
            or any(value.dtype != table.dtype for value in model.private.values())
            or any(getattr(type(method), hook) is not getattr(Method, hook)
                   for hook in ("begin_local", "end_local", "replayed_items", "uploads"))):
        return None
    return _layout(backbone, next(iter(model.public)), table.shape[1],
                   tuple((name, value.shape[1:]) for name, value in model.private.items()))


def plan_of(backbone: Backbone, method: Method, model: Snapshot, settings: LocalSettings, place: DrawKey,
            batches: int) -> Plan | None:
    """How to train clients in one call; None: they cannot be.

    Args:
        place: the round.
        batches: local batches per epoch, of the client with most.
    """
    found = _layout_of(backbone, method, model, settings)
    if found is None:
        return None
    (vector, constant, turns), item = found, next(iter(model.public))
    epochs, usual = range(settings.local_epochs), backbone.settings.lr
    rates = [backbone.learning_rates(model.n_items, place.round, batch) for batch in range(batches * len(epochs))]
    return Plan(
        item, vector, constant, turns, [-rate.get(name, usual) for rate in rates for name in (vector, constant, item)],
        draws.key(place.seed, "negatives", place.step, place.round),
        [draws.key(place.seed, "shuffle", place.step, place.round, epoch) for epoch in epochs])


@functools.lru_cache(maxsize=16)
def _layout(backbone: Backbone, item: str, dim: int,
            private: tuple[tuple[str, torch.Size], ...]) -> tuple[str, str | None, list[int]] | None:
    """The names of the private parameters that the factors of logits are, None for a constant there is not, and ``turns``
    of ``Plan``; None: the factors are made of parameters, there are other parameters, or private ones take turns.

    Args:
        item: the item table, of ``dim`` numbers per row.
        private: names and shapes of a client's parameters.
    """
    one = {name: torch.zeros(1, *shape, requires_grad=True) for name, shape in private}
    with torch.enable_grad():
        found = backbone.factors(one)
    if found is None or not one:
        return None
    names = [None if factor is None else _itself(factor, shape, one)
             for factor, shape in zip(found, ((1, dim), (1, 1)))]
    if any(name is None and factor is not None for name, factor in zip(names, found)) or set(one) != set(names) - {None}:
        return None
    turns = []
    for group in map(set, backbone.groups([*one, item])):
        if not group or group & set(one) not in (set(), set(one)):
            return None
        turns.append((1 if group & set(one) else 0) + (2 if item in group else 0))
    return *names, turns


def _itself(factor: Tensor, shape: tuple[int, ...], parameters: Tables) -> str | None:
    """The parameter that a factor is, its gradient too; None: it is made of parameters."""
    for name, value in parameters.items():
        if value.data_ptr() == factor.data_ptr() and factor.shape == shape and value.numel() == factor.numel() \
                and factor.requires_grad:
            slopes = torch.arange(1.0, 1.0 + factor.numel()).to(factor).view(shape)
            passed, = torch.autograd.grad((factor * slopes).sum(), value, allow_unused=True)
            return name if passed is not None and torch.equal(passed.view(shape), slopes) else None
    return None


def _clients(chunk: Chunk) -> kernels.InnerClients:
    names = draws.names(chunk.users)
    return chunk.for_kernels if names is chunk.users else replace(chunk.for_kernels, names=names)


class RoundTrainer:
    """Local training of one chunk; arguments and attributes as of ``trainer.ChunkTrainer``.

    Args:
        watched: whether somebody looks at the samples: ``slots`` has no more than the items otherwise.
    """

    def __init__(self, chunk: Chunk, model: Snapshot, backbone: Backbone, method: Method, settings: LocalSettings,
                 draw: DrawKey, plan: Plan, watched: bool):
        self.chunk, self.model, self.backbone, self.settings, self.draw, self.plan = (chunk, model, backbone, settings,
                                                                                      draw, plan)
        self.users, self.watched = chunk.users, watched
        self.moved: dict[str, Tensor | Outer] = {}
        self.replaced: Tables = {}
        self.uploads: Tables = {}
        self.declared = method.uploads(backbone, draw.round)

    def train(self) -> Tensor:
        """Run all local batches: fills ``slots`` and ``moved``.

        Returns:
            Each client's loss averaged over its local batches, shape (C,).
        """
        chunk, plan, place, table = self.chunk, self.plan, self.draw, self.model.public[self.plan.item]
        task, private = plan.task(self.model, self.settings), self.model.private
        done = kernels.inner_round(task, _clients(chunk), self.watched)
        self.slots = Slots(done.items)
        if self.watched:
            first = torch.arange(done.items.shape[1]) < done.held[:, None]
            self.slots = Slots(done.items, done.positive, done.sample, done.items[:, :0], first)
        for name, moved in zip((plan.vector, plan.constant), done.moved):
            if moved is not None:
                self.moved[name] = moved.view(-1, *private[name].shape[1:])
        self.moved[plan.item] = Outer(table, done.items, done.steps, done.vectors, done.held)
        if place.step == place.round == 0:
            own = (private[name].index_select(0, self.users) for name in self.moved if name in private)
            contract.check_moved(self.backbone, "score", [*done.moved, done.steps], own, self.users)
        return done.loss
