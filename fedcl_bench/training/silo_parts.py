"""Domains as clients: what each holds, and which of a run's parameters are whose.

A run knows a domain's parameters by ``domain/parameter``. Nothing of a domain's items is ever in another one's part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping

import torch
from torch import Tensor

from .. import rng
from ..data.stream import Prefixes, Ragged, Step, Stream
from ..plugin.silo import DomainData, DomainModule
from ..plugin.state import Snapshot
from ..rng import Tables
from . import silo_modules


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

    def load(self, model: Snapshot) -> DomainModule:
        """Its module with its part of all parameters."""
        silo_modules.load(self.module, self.part(model))
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
        silo_modules.tie(loaded)
        return loaded

    def exported(self) -> Snapshot:
        """A copy of its part of all parameters, as its modules hold it."""
        return merged(silo_modules.exported(domain.module, domain.prefix) for domain in self.domains)


def merged(models: Iterable[Snapshot]) -> Snapshot:
    """The parameters of all of them; of one name those of the last."""
    public: Tables = {}
    dense: Tables = {}
    for model in models:
        public |= model.public
        dense |= model.dense
    return Snapshot(public, {}, dense)
