"""Training of a silo: one pass over all its samples in mini-batches with one optimiser.

A silo is one domain, all domains whose samples are pooled, or the one client that holds all sessions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Iterator, Sequence

import torch
from torch import Tensor

from .. import rng
from ..core.errors import PluginError
from ..plugin import checks
from ..plugin.backbone import Backbone
from ..plugin.local_settings import LocalSettings
from ..plugin.state import Snapshot
from ..rng import DrawKey, Tables
from .optimisers import BETA1
from .silo_modules import Domain, histories, seeded
from .silo_samples import SequentialModule

_STATE = ("step", "exp_avg", "exp_avg_sq")  # what PyTorch's Adam keeps of a parameter


@dataclass(frozen=True)
class Point:
    """Where in an epoch its training is."""

    state: Tables = field(default_factory=dict)  # of the optimiser; empty before the first epoch
    batches: int = 0  # so many have been trained on
    loss: float = 0.0  # sum over their samples
    seconds: float = 0.0  # that they took


class Epoch:
    """One pass over the samples of a silo's domains, whose modules it trains in place. ``domains``: of the silo, whose
    modules hold the parameters at the point; those of pooled domains are tied; ``trained``: beginnings of the names
    that are trained; empty: all; ``point``: where it goes on from; ``draw``: key of the epoch: order of the samples and
    dropout. ``loss``: mean over the samples of the epoch, once it has ended; ``seconds``: that it took so far."""

    def __init__(self, backbone: Backbone, settings: LocalSettings, domains: Sequence[Domain],
                 trained: tuple[str, ...], point: Point, draw: DrawKey):
        self.backbone, self.settings, self.domains, self.draw = backbone, settings, domains, draw
        self.sequential = isinstance(domains[0].module, SequentialModule)
        self.parameters = self._trained(trained)
        self._zeroed: list[Tensor] = []  # of pooled domains rows without a gradient move on by their moments
        if len(domains) > 1:
            self._zeroed = self._whole_tables() if self.sequential else list(self.parameters.values())
        for value in self._zeroed if not self.sequential else ():
            value.grad = torch.zeros_like(value)
        self.optimiser = self._optimiser()
        self._batches, self.seconds, self.loss = point.batches, point.seconds, 0.0
        self._total = torch.tensor(point.loss, dtype=torch.float64)
        for name, value in self.parameters.items():
            kept = {part: table.clone() for part, table in
                    ((part, point.state.get(f"{part} of {name}")) for part in _STATE) if table is not None}
            if kept:
                self.optimiser.state[value] = kept

    def _trained(self, beginnings: tuple[str, ...]) -> Tables:
        """The parameters that are trained, by their names in the run; what pooled domains share, by the first's."""
        parameters: Tables = {}
        for number, domain in enumerate(self.domains):
            for name, value in domain.module.named_parameters():
                value.requires_grad_(name.startswith(beginnings) if beginnings else True)
                value.grad = None
                if value.requires_grad and (number == 0 or name in domain.module.rows):
                    parameters[domain.prefix + name] = value
        if not parameters:
            raise PluginError(f"backbone '{self.backbone.name}': none of its parameters begins with "
                              f"{' or '.join(map(repr, beginnings))}, which the stage trains.")
        return parameters

    def _whole_tables(self) -> list[Tensor]:
        """Let pooled domains' tables be parts of whole ones, which the optimiser then knows by the first's names."""
        modules, tables = [domain.module for domain in self.domains], []
        for name in modules[0].rows:
            parts = [module.get(name) for module in modules]
            whole = torch.cat([part.detach() for part in parts]).requires_grad_()
            whole.grad = torch.zeros_like(whole)
            sizes = [len(part) for part in parts]
            for part, rows, gradient in zip(parts, whole.data.split(sizes), whole.grad.split(sizes)):
                part.data, part.grad = rows, gradient
            for domain in self.domains:
                del self.parameters[domain.prefix + name]
            self.parameters[self.domains[0].prefix + name] = whole
            tables.append(whole)
        return tables

    def _optimiser(self) -> torch.optim.Optimizer:
        of_backbone = self.backbone.learning_rates(sum(domain.step.n_items for domain in self.domains), self.draw.round)
        rates = {domain.prefix + name: of_backbone[name if self.sequential else "all"] for domain in self.domains
                 for name, _ in domain.module.named_parameters()}
        s, lr_factor = self.settings, 1.0
        if s.lr_step:
            lr_factor = s.lr_decay ** (self.draw.round // s.lr_step)
        groups = [{"params": [value], "lr": rates[name] * lr_factor} for name, value in self.parameters.items()]
        if s.optimiser == "adam":
            return torch.optim.Adam(groups, betas=(BETA1, s.adam_beta2), eps=s.adam_eps,
                                    weight_decay=s.weight_decay, fused=True)
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

    def batches(self, before: Snapshot) -> Iterator[float]:
        """Train on all samples in random order, from the point on; yields after each batch the share that is done.
        ``before``: the run's parameters before the epoch."""
        sizes, device = [len(domain.samples.end) for domain in self.domains], self.domains[0].samples.end.device
        for domain in self.domains:
            domain.module.train()
            if self.sequential:
                domain.module.derived = self.backbone.derive(domain.part(before).public, self.draw)
        seconds, count, began = self.seconds, sum(sizes), time.perf_counter()
        index = torch.arange(count, device=device)
        key = rng.client_keys(rng.key(self.draw.seed, "order of samples", self.draw.round), index[:1])
        order = rng.sort_keys(rng.bits(key, index)).argsort()
        self._total = self._total.to(device)
        for chosen in order.split(self.settings.batch_size)[self._batches:]:
            draw = DrawKey(self.draw.seed, self.draw.step, self.draw.round, self._batches)
            loss = self._loss(_by_set(chosen, sizes), draw)
            for value in self.parameters.values():
                value.grad = value.grad.zero_() if any(value is each for each in self._zeroed) else None
            loss.backward()
            self.optimiser.step()
            self._total += loss.detach().double() * len(chosen)
            self._batches += 1
            self.seconds = seconds + time.perf_counter() - began
            yield min(1.0, self._batches * self.settings.batch_size / count)
        self.loss = float(self._total) / count
        self.seconds = seconds + time.perf_counter() - began

    def _loss(self, pieces: dict[int, tuple[Tensor, Tensor]], draw: DrawKey) -> Tensor:
        """Mean loss of a batch, a scalar. ``pieces``: by the place of a domain: (its samples that are in the batch,
        their numbers in the batch), in the same order."""
        if self.sequential:
            loss = torch.cat([self.domains[number].module.losses(self.domains[number].samples, *piece, draw)
                              for number, piece in pieces.items()]).mean()
        else:
            with seeded(draw.seed, "module", draw.step, draw.round, draw.batch, device=self._total.device):
                loss = self._loss_of_modules(pieces)
            checks.check_tensor(self.backbone, "loss", loss, (), "a scalar: the mean loss of a batch")
        checks.require_gradient(self.backbone, loss)
        return loss

    def _loss_of_modules(self, pieces: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        length, modules, batches = self.backbone.settings.max_length, [], []
        for number, (chosen, _) in pieces.items():
            domain = self.domains[number]
            modules.append(domain.module)
            batches.append(histories(domain.samples, chosen, length, domain.module.fixed_length))
        if len(self.domains) == 1:
            return modules[0].loss(*batches[0])
        return self.backbone.joint_loss(modules, *zip(*batches))


def _by_set(chosen: Tensor, sizes: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """The samples of a batch by the place of their domain (see ``Epoch._loss``), of which each has so many."""
    if len(sizes) == 1:
        return {0: (chosen, torch.arange(len(chosen), device=chosen.device))}
    pieces, first = {}, 0
    for number, size in enumerate(sizes):
        numbers = ((chosen >= first) & (chosen < first + size)).nonzero().flatten()
        if len(numbers):
            pieces[number] = chosen[numbers] - first, numbers
        first += size
    return pieces
