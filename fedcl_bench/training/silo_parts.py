"""Domains as clients: what each holds, and which of a run's parameters are those of whom.

A run keeps all parameters in one snapshot: item tables with the rows of all domains, one after the other, and of every
dense parameter a copy per domain, (domains, ...). Nothing of a domain's items is ever in another one's part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Mapping, Sequence

import torch
from torch import Tensor

from .. import rng
from ..plugin.backbone import Backbone
from ..data.stream import Prefixes, Ragged, Sessions, Step
from ..plugin.silo import DomainData, DomainMethod, DomainModule, ModuleBackbone
from ..rng import Tables
from ..plugin.state import Snapshot
from ..plugin.sequential import SequentialBackbone
from . import silo_modules
from .silo_samples import SampleSet


@dataclass(frozen=True)
class Domain:
    """What a domain holds.

    Attributes:
        number: its place among all domains.
        step: its interactions, users and items numbered from 0.
        rows: those of its items in the item tables.
        users: the ids of its users among those of all domains.
        samples: every beginning of its training histories that ends in what it trains on.
        memory: what a sequential backbone remembers of these.
        module: of a backbone that makes one; it holds the parameters that were last loaded.
    """

    number: int
    step: Step
    rows: slice
    users: range
    samples: Prefixes
    memory: Tables = field(default_factory=dict)
    module: DomainModule | None = None

    @classmethod
    def of(cls, step: Step, backbone: Backbone) -> "Domain":
        """The domain that is a stream's step, without a module."""
        numbered = _numbered_from_zero(step)
        domain = cls(step.index, numbered, slice(step.old_items, step.n_items), range(step.old_users, step.n_users),
                     numbered.samples())
        if isinstance(backbone, SequentialBackbone):
            return replace(domain, memory=backbone.remember(as_one_client(numbered), {}))
        return domain

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

    def with_module(self, backbone: ModuleBackbone, method: DomainMethod, data: DomainData, seed: int) -> "Domain":
        """The same with an untrained module.

        Args:
            seed: of the run.
        """
        device = self.step.train.values.device
        with silo_modules.seeded(Silo.alone(self, seed).seed, "init", device=device):
            module = method.module(backbone, data).to(device)
        silo_modules.check(backbone, module, self.step.n_items)
        return replace(self, module=module)

    def model(self, whole: Snapshot) -> Snapshot:
        """Its part of all parameters."""
        return replace(Silo((self,), 0).model(whole), memory=self.memory)


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
    """One model that is trained by itself within a round, and the domains whose samples it is trained on.

    Attributes:
        domains: one, or all that are pooled, in their order.
        seed: of the order of its samples and its dropout.
    """

    domains: tuple[Domain, ...]
    seed: int

    @classmethod
    def alone(cls, domain: Domain, seed: int) -> "Silo":
        """A domain that trains a model of its own; its draws are no other domain's.

        Args:
            seed: of the run.
        """
        return cls((domain,), rng.key(seed, "domain", domain.number) >> 1)

    @property
    def parts(self) -> list[SampleSet]:
        """Its samples; each predicts its last item among those of its own domain."""
        if len(self.domains) == 1:
            return [SampleSet(self.domains[0].samples, memory=self.domains[0].memory)]
        return [SampleSet(domain.samples, domain.rows, domain.memory) for domain in self.domains]

    @property
    def rows(self) -> slice:
        """Those of its items in the item tables."""
        return slice(self.domains[0].rows.start, self.domains[-1].rows.stop)

    def model(self, whole: Snapshot) -> Snapshot:
        """Its part of all parameters; pooled domains have the same dense ones."""
        return Snapshot({name: table[self.rows] for name, table in whole.public.items()}, {},
                        {name: copies[self.domains[0].number] for name, copies in whole.dense.items()})

    def state(self, whole: Tables, model: Snapshot) -> Tables:
        """Its part of what all optimisers remember (see ``joined_states``)."""
        return {name: values[self.rows] if _has_rows(name, model) else values[self.domains[0].number]
                for name, values in whole.items()}

    def load(self, whole: Snapshot) -> list[DomainModule]:
        """The modules of its domains with their parts of all parameters; of pooled domains those without item rows are
        one."""
        for domain in self.domains:
            silo_modules.load(domain.module, Silo((domain,), 0).model(whole))
        loaded = [domain.module for domain in self.domains]
        silo_modules.tie(loaded)
        return loaded

    def exported(self) -> Snapshot:
        """Its part of all parameters, as its modules hold it."""
        parts = [silo_modules.exported(domain.module) for domain in self.domains]
        return Snapshot({name: torch.cat([part.public[name] for part in parts]) for name in parts[0].public}, {},
                        parts[0].dense)


def _has_rows(state: str, model: Snapshot) -> bool:
    """Whether what an optimiser remembers by this name has a row per item."""
    part, _, parameter = state.partition(" of ")
    return parameter in model.public and part != "step"


def _copied(silos: Sequence[Silo], values: Sequence[Tensor]) -> Tensor:
    """A value per silo as one per domain, (domains, ...)."""
    return torch.stack([value for silo, value in zip(silos, values) for _ in silo.domains])


def joined(silos: Sequence[Silo], models: Sequence[Snapshot]) -> Snapshot:
    """All parameters, given those of each silo; silos in the order of their domains."""
    first = models[0]
    return Snapshot({name: torch.cat([model.public[name] for model in models]) for name in first.public}, {},
                    {name: _copied(silos, [model.dense[name] for model in models]) for name in first.dense})


def joined_states(silos: Sequence[Silo], states: Sequence[Tables], model: Snapshot) -> Tables:
    """What all optimisers remember: of item tables the rows of all domains, of anything else a value per domain.

    Args:
        states: of each silo, as ``Epoch.state`` gives them.
        model: whose parameters they are of.
    """
    return {name: torch.cat([state[name] for state in states]) if _has_rows(name, model) else
            _copied(silos, [state[name] for state in states]) for name in states[0]}
