"""Domains as clients: what each holds, its PyTorch module, and which of a run's parameters are whose.

A run knows a domain's parameters by ``domain/parameter``. Nothing of a domain's items is ever in another one's part.
PyTorch's own generator is seeded before a module is made and before each batch, so that a run that goes on from a
checkpoint draws what it would have drawn.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import rng
from ..data.stream import Prefixes, Ragged, Sessions, Step, Stream
from ..plugin.silo import DomainData, DomainModule, Histories, ModuleBackbone
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


@dataclass(frozen=True)
class Domain:
    """What a domain, or the one client that holds all sessions, holds in a step of time."""

    number: int  # its place among all domains
    unit: int  # the same of the step's part of it, see ``Stream.units``
    prefix: str  # before the names of its parameters
    step: Step  # its interactions, users and items numbered from 0
    rows: slice  # its items among those of all domains
    users: range  # the ids of its users among those of all domains
    # What records know each of its test sessions by: the id of its user, or its number if there is one user.
    tested: Tensor
    samples: Prefixes  # every beginning of its training histories that ends in what it trains on
    seed: int  # of its draws when it is trained alone; they are no other domain's
    module: DomainModule | None = None  # it holds the parameters that were last loaded

    @classmethod
    def of(cls, stream: Stream, step: Step, number: int, seed: int) -> "Domain":
        """One of a stream's domains in a step, or the client of all sessions, without a module. ``seed``: of the run.
        """
        count, unit = step.sessions["test"].count, step.index * stream.per_step + number
        if not stream.domains:
            tested = torch.arange(int(count.sum()), device=count.device)
            return cls(number, unit, "", step, slice(step.n_items), range(step.n_users), tested, step.samples(), seed)
        part = stream.domains[number]
        users = torch.arange(part.users.start, part.users.stop, device=count.device)
        tested = users.repeat_interleave(count[part.users.start:part.users.stop])
        own = part.of(step)
        return cls(number, unit, f"{part.name}/", own, slice(part.items.start, part.items.stop), part.users, tested,
                   own.samples(), rng.key(seed, "domain", number) >> 1)

    def data(self, features: Tensor | None, known: Mapping[tuple[int, int], Tensor]) -> DomainData:
        """What it knows before it trains. ``features``: of its items, for backbones that need them; ``known``: users
        who are the same, as a stream has them."""
        train, device = self.step.train, self.step.train.values.device
        pairs = {other: users.to(device) for (one, other), users in known.items() if one == self.number}
        pairs |= {one: users.flip(1).to(device) for (one, other), users in known.items() if other == self.number}
        return DomainData(self.step.n_users, self.step.n_items, features, (train.values, train.indptr), known=pairs)

    def part(self, model: Snapshot) -> Snapshot:
        """Its part of all parameters, by the names of its module."""
        def own(tables: Tables) -> Tables:
            return {name.removeprefix(self.prefix): value for name, value in tables.items()
                    if name.startswith(self.prefix)}
        return Snapshot(own(model.public), {}, own(model.dense))

    @torch.no_grad()
    def load(self, model: Snapshot) -> DomainModule:
        """Its module with its part of all parameters. Raises UserError for a name or shape that is not the module's."""
        own = carried(self.module)
        for name, value in self.part(model).sent.items():
            if name not in own or own[name].shape != value.shape:
                ours = f"one of shape {tuple(own[name].shape)}" if name in own else "none of that name"
                raise UserError(f"parameter '{name}' of shape {tuple(value.shape)}: the module has {ours}.\n"
                                f"Delete the run's checkpoint if the plugin has changed.")
            own[name].copy_(value)
        return self.module


def as_one_client(step: Step) -> Step:
    """The same interactions, all of one user."""
    def lists(of_users: Ragged) -> Ragged:
        return Ragged(of_users.indptr[[0, -1]], of_users.values)

    sessions = {name: replace(split, of_user=split.of_user[[0, -1]]) for name, split in step.sessions.items()}
    return replace(step, n_users=1, train=lists(step.train), valid=lists(step.valid), test=lists(step.test),
                   sessions=sessions)


@dataclass(frozen=True)
class Silo:
    """What is trained by itself within a round: one domain, or all that are pooled, in their order."""

    domains: tuple[Domain, ...]
    seed: int  # of the order of its samples and its dropout

    def load(self, model: Snapshot) -> list[DomainModule]:
        """The modules of its domains with their parts of all parameters; of pooled domains those without item rows are
        one."""
        loaded = [domain.load(model) for domain in self.domains]
        tie(loaded)
        return loaded

    def exported(self) -> Snapshot:
        """A copy of its part of all parameters, as its modules hold it."""
        return merged(exported(domain.module, domain.prefix) for domain in self.domains)


def merged(models: Iterable[Snapshot]) -> Snapshot:
    """The parameters of all of them; of one name those of the last."""
    public: Tables = {}
    dense: Tables = {}
    for model in models:
        public |= model.public
        dense |= model.dense
    return Snapshot(public, {}, dense)
