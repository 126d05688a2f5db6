"""Domains' PyTorch modules: their parameters as parts of a run's, their samples, and epochs of them.

PyTorch's own generator is seeded before a module is made and before each batch, so that a run that goes on from a
checkpoint draws what it would have drawn.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import rng
from ..plugin import checks
from ..data.stream import Prefixes, Sessions
from ..plugin.silo import DomainModule, Histories, ModuleBackbone
from ..rng import DrawKey, Tables
from ..core.errors import PluginError, UserError
from ..plugin.state import Snapshot
from ..plugin.local_settings import LocalSettings
from .mini_batches import MiniBatches, Point


@contextmanager
def seeded(seed: int, purpose: str, *counters: int, device: torch.device) -> Iterator[None]:
    """Within the block, PyTorch's generators draw what is named so (see ``draws.key``); outside, as if it were not."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(rng.key(seed, purpose, *counters) >> 1)
        yield


def carried(module: DomainModule) -> Tables:
    """Its parameters and persistent buffers by name: what a run carries from round to round. One that has several names
    counts under the first."""
    first = {id(value): name for name, value in reversed(module.state_dict(keep_vars=True).items())}
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if first[id(value)] == name}


def exported(module: DomainModule) -> Snapshot:
    """A copy of them, those with item rows apart."""
    copies = {name: value.detach().clone() for name, value in carried(module).items()}
    return Snapshot({name: copies[name] for name in module.rows}, {},
                    {name: value for name, value in copies.items() if name not in module.rows})


@torch.no_grad()
def load(module: DomainModule, part: Snapshot | Tables) -> None:
    """Write values over its parameters and buffers of the same names.

    Raises:
        UserError: for a name or shape that is not the module's.
    """
    given, own = part.public | part.dense if isinstance(part, Snapshot) else part, carried(module)
    for name, value in given.items():
        if name not in own or own[name].shape != value.shape:
            ours = f"one of shape {tuple(own[name].shape)}" if name in own else "none of that name"
            raise UserError(f"parameter '{name}' of shape {tuple(value.shape)}: the module has {ours}.\n"
                            f"Delete the run's checkpoint if the plugin has changed.")
        own[name].copy_(value)


def check(backbone: ModuleBackbone, module: DomainModule, n_items: int) -> None:
    """Raise PluginError unless the module's parameters are as it says."""
    tables = carried(module)
    for name in module.rows:
        if name not in tables or not tables[name].dim() or len(tables[name]) != n_items:
            what = f"of shape {tuple(tables[name].shape)}" if name in tables else "which does not exist"
            raise PluginError(f"backbone '{backbone.name}': rows names '{name}', {what};\n"
                              f"expected a parameter or persistent buffer of shape ({n_items}, ...) = (items, ...).")
    if not any(value.requires_grad for value in tables.values()):
        raise PluginError(f"backbone '{backbone.name}': its module has no parameter to train.")


def tie(modules: Sequence[DomainModule]) -> None:
    """Let the modules of pooled domains have one copy of what has no item rows."""
    first = modules[0]
    for other in modules[1:]:
        for name, value in first.state_dict(keep_vars=True).items():  # under all of its names
            if name not in first.rows:
                path, _, leaf = name.rpartition(".")
                owner = other.get_submodule(path)
                (owner._parameters if isinstance(value, nn.Parameter) else owner._buffers)[leaf] = value


def histories(samples: Sessions | Prefixes, chosen: Tensor, length: int, fixed: bool) -> tuple[Histories, Tensor]:
    """Some samples without their last items, and those.

    Args:
        length: most items of a history.
        fixed: padded to that, also where all are shorter.
    """
    sessions = samples.sessions if isinstance(samples, Prefixes) else samples
    items, _, real = samples.tail(chosen, length + 1)
    lengths = real[:, :-1].sum(1)
    columns = torch.arange(length if fixed else int(lengths.max()), device=items.device)
    at = (columns + length - lengths[:, None]).clamp(max=length - 1)
    inputs = items.gather(1, at).where(columns < lengths[:, None], -1)
    number = chosen
    if isinstance(samples, Prefixes):
        number = torch.searchsorted(sessions.start, samples.first[chosen], right=True) - 1
    users = torch.searchsorted(sessions.of_user, number, right=True) - 1
    return Histories(inputs, lengths, users), items[:, -1]


class ModuleEpoch(MiniBatches):
    """One pass over the samples of a domain's module, or of those of pooled domains, which it trains in place.

    Args:
        modules: with the parameters at the point.
        trained: beginnings of the names that are trained; empty: all.
        point: where it goes on from; in the state of pooled domains each table's rows follow one another.
        draw: key of the epoch.
    """

    def __init__(self, backbone: ModuleBackbone, settings: LocalSettings, modules: Sequence[DomainModule],
                 trained: tuple[str, ...], point: Point, draw: DrawKey):
        self.backbone, self.modules, self._before = backbone, modules, point.state
        self._samples: Sequence[Prefixes] = ()
        parameters: Tables = {}
        for number, module in enumerate(modules):
            for name, value in module.named_parameters():
                value.requires_grad_(name.startswith(trained) if trained else True)
                if value.requires_grad and (number == 0 or name in module.rows):
                    parameters[_of(number, name)] = value
        if not parameters:
            raise PluginError(f"backbone '{backbone.name}': none of its parameters begins with "
                              f"{' or '.join(map(repr, trained))}, which the stage trains.")
        self.moves_all = len(modules) > 1  # as one table of all domains' items would
        for value in parameters.values():
            value.grad = torch.zeros_like(value) if self.moves_all else None
        rates = dict.fromkeys(parameters, backbone.settings.lr)
        super().__init__(settings, parameters, rates, replace(point, state=self._divided(point.state)), draw)

    def _divided(self, state: Tables) -> Tables:
        """A state by the names of all modules' parameters."""
        if len(self.modules) == 1:
            return state
        divided = {}
        for key, values in state.items():
            part, _, name = key.partition(" of ")
            if name not in self.modules[0].rows:
                divided[key] = values
                continue
            sizes = [len(carried(module)[name]) for module in self.modules]
            pieces = [values] * len(sizes) if part == "step" else values.split(sizes)
            divided |= {f"{part} of {_of(number, name)}": piece for number, piece in enumerate(pieces)}
        return divided

    def state(self) -> Tables:
        """What the optimiser remembers, also of parameters that this stage does not train."""
        now = super().state()
        if len(self.modules) > 1:
            rows = self.modules[0].rows
            for key in [key for key in now if key.partition(" of ")[2] in rows]:
                part, _, name = key.partition(" of ")
                pieces = [now[key], *(now.pop(f"{part} of {_of(number, name)}")
                                      for number in range(1, len(self.modules)))]
                now[key] = pieces[0] if part == "step" else torch.cat(pieces)
        return {**self._before, **now}

    def batches(self, samples: Sequence[Prefixes]) -> Iterator[float]:
        """Train on each module's samples in random order; yields after each batch the share that is done."""
        self._samples = samples
        for module in self.modules:
            module.train()
        return self.passed([len(each.end) for each in samples], samples[0].end.device)

    def batch_loss(self, pieces, draw):
        with seeded(draw.seed, "module", draw.step, draw.round, draw.batch, device=self._samples[0].end.device):
            if len(self.modules) == 1:
                loss = self.modules[0].loss(*self._histories(0, pieces[0][0]))
            else:
                modules = [self.modules[number] for number in pieces]
                batches, targets = zip(*(self._histories(number, chosen) for number, (chosen, _) in pieces.items()))
                loss = self.backbone.joint_loss(modules, batches, targets)
        checks.check_tensor(self.backbone, "loss", loss, (), "a scalar: the mean loss of a batch")
        checks.require_gradient(self.backbone, loss)
        return loss

    def _histories(self, number: int, chosen: Tensor) -> tuple[Histories, Tensor]:
        module, length = self.modules[number], self.backbone.settings.max_length
        return histories(self._samples[number], chosen, length, module.fixed_length)


def _of(number: int, name: str) -> str:
    """A parameter of a module by its number; tables of the first have their own names."""
    return f"{number}: {name}" if number else name
