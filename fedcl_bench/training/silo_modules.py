"""Domains' PyTorch modules: their parameters as parts of a run's, and their samples.

PyTorch's own generator is seeded before a module is made and before each batch, so that a run that goes on from a
checkpoint draws what it would have drawn.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import rng
from ..data.stream import Prefixes, Sessions
from ..plugin.silo import DomainModule, Histories, ModuleBackbone
from ..rng import Tables
from ..core.errors import PluginError, UserError
from ..plugin.state import Snapshot


@contextmanager
def seeded(seed: int, purpose: str, *counters: int, device: torch.device) -> Iterator[None]:
    """Within the block, PyTorch's generators draw what is named so (see ``rng.key``); outside, as if it were not."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        number = rng.key(seed, purpose, *counters) >> 1
        torch.default_generator.manual_seed(number)  # torch.manual_seed keeps a stack for each accelerator not in use
        if device.type == "cuda":
            torch.cuda.manual_seed_all(number)
        yield


def carried(module: DomainModule) -> Tables:
    """Its parameters and persistent buffers by name: what a run carries from round to round. One that has several names
    counts under the first."""
    first = {id(value): name for name, value in reversed(module.state_dict(keep_vars=True).items())}
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if first[id(value)] == name}


def exported(module: DomainModule, prefix: str = "") -> Snapshot:
    """A copy of them, those with item rows apart; a run knows them by their names after a prefix."""
    copies = {name: value.detach().clone() for name, value in carried(module).items()}
    return Snapshot({prefix + name: copies[name] for name in module.rows}, {},
                    {prefix + name: value for name, value in copies.items() if name not in module.rows})


@torch.no_grad()
def load(module: DomainModule, part: Snapshot | Tables) -> None:
    """Write values over its parameters and buffers of the same names. Raises UserError for a name or shape that is not
    the module's."""
    given, own = part.public | part.dense if isinstance(part, Snapshot) else part, carried(module)
    for name, value in given.items():
        if name not in own or own[name].shape != value.shape:
            ours = f"one of shape {tuple(own[name].shape)}" if name in own else "none of that name"
            raise UserError(f"parameter '{name}' of shape {tuple(value.shape)}: the module has {ours}.\n"
                            f"Delete the run's checkpoint if the plugin has changed.")
        own[name].copy_(value)


def check(backbone: ModuleBackbone, module: DomainModule, n_items: int) -> None:
    """Raise PluginError unless the module's parameters are as it says."""
    if not isinstance(module, DomainModule):
        raise PluginError(f"backbone '{backbone.name}': module returned {type(module).__name__},\nexpected a "
                          f"DomainModule.")
    tables = carried(module)
    for name in module.rows:
        if name not in tables or not tables[name].dim() or len(tables[name]) != n_items:
            what = f"of shape {tuple(tables[name].shape)}" if name in tables else "which does not exist"
            raise PluginError(f"backbone '{backbone.name}': rows names '{name}', {what};\n"
                              f"expected a parameter or persistent buffer of shape ({n_items}, ...) = (items, ...).")
    if not any(value.requires_grad for value in tables.values()):
        raise PluginError(f"backbone '{backbone.name}': its module has no parameter to train.")


def check_alike(backbone: ModuleBackbone, modules: Sequence[DomainModule]) -> None:
    """Raise PluginError unless what is not in ``rows`` has the same names and shapes in all domains."""
    shapes = [{name: tuple(value.shape) for name, value in carried(module).items() if name not in module.rows}
              for module in modules]
    for first, other in zip(shapes, shapes[1:]):
        if wrong := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            found = " and ".join(str(each.get(wrong[0], "none")) for each in (first, other))
            raise PluginError(f"backbone '{backbone.name}': '{wrong[0]}' has shape {found} in two domains,\nexpected "
                              f"the same in all. Name in rows what has a row per item, and make what follows from the "
                              f"domain's data a buffer with persistent=False.")


def tie(modules: Sequence[DomainModule]) -> None:
    """Let the modules of pooled domains have one copy of what has no item rows."""
    first = modules[0]
    for other in modules[1:]:
        for name, value in first.state_dict(keep_vars=True).items():  # under all of its names
            if name not in first.rows:
                path, _, leaf = ("", "", name) if name in other._parameters else name.rpartition(".")
                owner = other.get_submodule(path)
                (owner._parameters if isinstance(value, nn.Parameter) else owner._buffers)[leaf] = value


def histories(samples: Sessions | Prefixes, chosen: Tensor, length: int, fixed: bool) -> tuple[Histories, Tensor]:
    """Some samples without their last items, and those. ``length``: most items of a history; ``fixed``: padded to that,
    also where all are shorter."""
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
