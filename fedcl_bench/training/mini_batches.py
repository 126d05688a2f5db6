"""Training of a client that holds many users' samples: one pass over all of them in mini-batches with one optimiser."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Iterator, Mapping

import torch
from torch import Tensor

from .. import rng
from ..rng import DrawKey, Tables
from ..plugin.local_settings import LocalSettings
from .optimisers import BETA1, EPS

_STATE = ("step", "exp_avg", "exp_avg_sq")  # what PyTorch's Adam keeps of a parameter


@dataclass(frozen=True)
class Point:
    """Where in an epoch its training is.

    Attributes:
        state: of the optimiser; empty before the first epoch.
        batches: so many have been trained on.
        loss: sum over their samples.
        seconds: that they took.
    """

    state: Tables = field(default_factory=dict)
    batches: int = 0
    loss: float = 0.0
    seconds: float = 0.0


class MiniBatches:
    """One pass over all samples, which are of one or several sets, as of the domains whose samples are pooled.

    Subclasses say the loss of a batch.

    Args:
        parameters: leaves that are trained, by name, as they are at the point.
        rates: learning rate of each.
        point: where it goes on from.
        draw: key of the epoch: order of the samples and dropout.

    Attributes:
        loss: mean over the samples of the epoch, once it has ended.
        seconds: that it took so far.
        moves_all: parameters without a gradient in a batch move on by their moments.
    """

    moves_all = False

    def __init__(self, settings: LocalSettings, parameters: Tables, rates: Mapping[str, float], point: Point,
                 draw: DrawKey):
        self.settings, self.parameters, self.draw = settings, parameters, draw
        self.optimiser = self._optimiser(rates)
        state, self._batches, self.seconds = point.state, point.batches, point.seconds
        self._total = torch.tensor(point.loss, dtype=torch.float64)
        for name, value in parameters.items():
            kept = {part: table.clone() for part, table in ((part, state.get(f"{part} of {name}")) for part in _STATE)
                    if table is not None}
            if kept:
                self.optimiser.state[value] = kept
        self.loss = 0.0

    def _optimiser(self, rates: Mapping[str, float]) -> torch.optim.Optimizer:
        s, lr_factor = self.settings, 1.0
        if self.settings.lr_step:
            lr_factor = s.lr_decay ** (self.draw.round // s.lr_step)
        groups = [{"params": [value], "lr": rates[name] * lr_factor} for name, value in self.parameters.items()]
        if s.optimiser == "adam":
            return torch.optim.Adam(groups, betas=(BETA1, s.adam_beta2), eps=EPS, weight_decay=s.weight_decay,
                                    fused=True)
        return torch.optim.SGD(groups, lr=1.0, weight_decay=s.weight_decay, fused=True)

    def state(self) -> Tables:
        """What the optimiser remembers, for the next epoch; of what had no gradient yet, zeros."""
        state: Tables = {}
        for name, value in self.parameters.items() if self.settings.optimiser == "adam" else ():
            kept = self.optimiser.state.get(value) or {
                part: torch.zeros((), device=value.device) if part == "step" else torch.zeros_like(value.detach())
                for part in _STATE}
            state |= {f"{part} of {name}": kept[part] for part in _STATE}
        return state

    def point(self) -> Point:
        """Where its training is now."""
        return Point(self.state(), self._batches, float(self._total), self.seconds)

    def passed(self, sizes: list[int], device: torch.device) -> Iterator[float]:
        """Train on all samples in random order, from the point on; yields after each batch the share that is done.

        Args:
            sizes: how many samples each set has.
        """
        began, before, count = time.perf_counter(), self.seconds, sum(sizes)
        index = torch.arange(count, device=device)
        key = rng.client_keys(rng.key(self.draw.seed, "order of samples", self.draw.round), index[:1])
        order = rng.sort_keys(rng.bits(key, index)).argsort()
        self._total = self._total.to(device)
        for chosen in order.split(self.settings.batch_size)[self._batches:]:
            draw = DrawKey(self.draw.seed, self.draw.step, self.draw.round, self._batches)
            loss = self.batch_loss(_by_set(chosen, sizes), draw)
            self.optimiser.zero_grad(set_to_none=not self.moves_all)
            loss.backward()
            self.optimiser.step()
            self._total += loss.detach().double() * len(chosen)
            self._batches += 1
            self.seconds = before + time.perf_counter() - began
            yield min(1.0, self._batches * self.settings.batch_size / count)
        self.loss = float(self._total) / count
        self.seconds = before + time.perf_counter() - began

    def batch_loss(self, pieces: dict[int, tuple[Tensor, Tensor]], draw: DrawKey) -> Tensor:
        """Mean loss of a batch, a scalar.

        Args:
            pieces: by the number of a set: (its samples that are in the batch, their numbers in the batch), in the
                same order.
        """
        raise NotImplementedError


def _by_set(chosen: Tensor, sizes: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """The samples of a batch by their set (see ``batch_loss``)."""
    if len(sizes) == 1:
        return {0: (chosen, torch.arange(len(chosen), device=chosen.device))}
    pieces, first = {}, 0
    for number, size in enumerate(sizes):
        numbers = ((chosen >= first) & (chosen < first + size)).nonzero().flatten()
        if len(numbers):
            pieces[number] = chosen[numbers] - first, numbers
        first += size
    return pieces
