"""Domains as clients: what each holds, and which of a run's parameters are whose.

A run knows a domain's parameters by ``domain/parameter``. Nothing of a domain's items is ever in another one's part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping

from torch import Tensor

from .. import rng
from ..data.stream import Prefixes, Ragged, Sessions, Step, Stream
from ..plugin.silo import DomainData, DomainModule
from ..plugin.state import Snapshot
from ..rng import Tables
from . import silo_modules


@dataclass(frozen=True)
class Domain:
    """What a domain, or the one client that holds all sessions, holds.

    Attributes:
        number: its place among all domains.
        prefix: before the names of its parameters.
        step: its interactions, users and items numbered from 0.
        rows: its items among those of all domains.
        users: the ids of its users among those of all domains.
        samples: every beginning of its training histories that ends in what it trains on.
        seed: of its draws when it is trained alone; they are no other domain's.
        module: it holds the parameters that were last loaded.
    """

    number: int
    prefix: str
    step: Step
    rows: slice
    users: range
    samples: Prefixes
    seed: int
    module: DomainModule | None = None

    @classmethod
    def of(cls, stream: Stream, step: Step, seed: int) -> "Domain":
        """The domain that is a stream's step, without a module.

        Args:
            seed: of the run.
        """
        numbered, prefix = _numbered_from_zero(step), ""
        if stream.domains:
            prefix, seed = f"{stream.domains[step.index]}/", rng.key(seed, "domain", step.index) >> 1
        return cls(step.index, prefix, numbered, slice(step.old_items, step.n_items),
                   range(step.old_users, step.n_users), numbered.samples(), seed)

    def data(self, features: Tensor | None, known: Mapping[tuple[int, int], Tensor]) -> DomainData:
        """What it knows before it trains.

        Args:
            features: of its items, for backbones that need them.
            known: users who are the same, as a stream has them.
        """
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


def _numbered_from_zero(step: Step) -> Step:
    """A domain's step without the users and items of the domains before it."""
    def lists(all_users: Ragged) -> Ragged:
        return Ragged(all_users.indptr[step.old_users:], all_users.values - step.old_items)

    sessions = {name: Sessions(split.of_user[step.old_users:], split.start, split.items - step.old_items, split.times)
                for name, split in step.sessions.items()}
    return Step(0, step.n_users - step.old_users, step.n_items - step.old_items, 0, 0, step.interactions,
                lists(step.train), lists(step.valid), lists(step.test), sessions)


def as_one_client(step: Step) -> Step:
    """The same interactions, all of one user."""
    def lists(of_users: Ragged) -> Ragged:
        return Ragged(of_users.indptr[[0, -1]], of_users.values)

    sessions = {name: replace(split, of_user=split.of_user[[0, -1]]) for name, split in step.sessions.items()}
    return replace(step, n_users=1, train=lists(step.train), valid=lists(step.valid), test=lists(step.test),
                   sessions=sessions)


@dataclass(frozen=True)
class Silo:
    """What is trained by itself within a round: one domain, or all that are pooled, in their order.

    Attributes:
        seed: of the order of its samples and its dropout.
    """

    domains: tuple[Domain, ...]
    seed: int

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
