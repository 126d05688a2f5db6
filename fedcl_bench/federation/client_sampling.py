"""Which clients a round reaches, and whose updates come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rng
from ..data.stream import Step

_DAY, _AWAKE = 24, 12  # rounds


class Participants(NamedTuple):
    """The clients of a round."""

    users: Tensor  # ids of those here whose update arrives, ascending
    count: int  # how many arrive in all
    dropped: int  # how many others were asked and failed after their training


@dataclass(frozen=True)
class Attendance:
    """Who takes part in a round, a function of seed, step and round alone; the fields are as the settings say."""

    ratio: float = 1.0  # of those who are available; at least one is asked (McMahan et al., AISTATS 2017, C)
    # ``day``: a round is an hour, and a client is there for 12 of 24, from an hour of its own on; ``activity``: with
    # probability rank / n.
    availability: str = "always"
    # The private parameters of a client that fails are lost too: the round goes on as if it had not been asked.
    dropout: float = 0.0
    # Of E local epochs a straggler does 1, ..., E - 1, each as likely. FedProx (Li et al., MLSys 2020, section 5.2)
    # draws from 1, ..., E: there some stragglers are not late.
    stragglers: float = 0.0
    known_only: bool = False  # nobody takes part in the rounds of the step that it is new in, but for the first step

    @property
    def complete(self) -> bool:
        """Whether the same clients take part in every round, all that can."""
        return self.ratio == 1.0 and self.availability == "always" and self.dropout == 0.0

    def able(self, step: Step) -> Tensor:
        """Ids of the clients with training data that take part in a step's rounds, ascending."""
        users = (step.train.lengths > 0).nonzero().flatten()
        return users[users < step.old_users] if self.known_only and step.index > 0 else users

    def of(self, step: Step, seed: int, round_: int) -> Participants:
        """The participants of a round among the clients with training data; at least one."""
        users = self.able(step)
        if self.complete:
            return Participants(users, len(users), 0)
        users = self._available(step, users, seed, round_)
        if self.ratio < 1.0:
            order = rng.sort_keys(_bits(users, seed, "participants", step.index, round_)).argsort()
            users = users[order[:max(1, round(self.ratio * len(users)))]].sort().values
        if self.dropout == 0.0:
            return Participants(users, len(users), 0)
        luck = _uniform(users, seed, "dropout", step.index, round_)
        arrived = users[luck >= luck.max().clamp(max=self.dropout)]  # where all would fail, the luckiest does not
        return Participants(arrived, len(arrived), len(users) - len(arrived))

    def punctual(self, local_epochs: int) -> bool:
        return self.stragglers == 0.0 or local_epochs == 1

    def epochs(self, users: Tensor, local_epochs: int, seed: int, step: int, round_: int) -> Tensor:
        """How many local epochs each participant does in a round, int64 of shape (len(users),)."""
        full = torch.full_like(users, local_epochs)
        if self.punctual(local_epochs):
            return full
        late = _uniform(users, seed, "stragglers", step, round_) < self.stragglers
        fewer = 1 + rng.integers(_bits(users, seed, "epochs of stragglers", step, round_), local_epochs - 1)
        return torch.where(late, fewer, full)

    def _available(self, step: Step, users: Tensor, seed: int, round_: int) -> Tensor:
        """Those of some clients that can be asked; all of them if none can."""
        if self.availability == "day":
            start = (_uniform(users, seed, "availability") * _DAY).floor()
            there = (round_ - start) % _DAY < _AWAKE
        elif self.availability == "activity":
            rank = step.train.lengths[users].argsort(stable=True).argsort() + 1
            there = _uniform(users, seed, "availability", step.index, round_) < rank / len(users)
        else:
            return users
        return users[there] if bool(there.any()) else users


def _bits(users: Tensor, seed: int, purpose: str, *counters: int) -> Tensor:
    return rng.bits(rng.client_keys(rng.key(seed, purpose, *counters), users), torch.zeros_like(users))


def _uniform(users: Tensor, seed: int, purpose: str, *counters: int) -> Tensor:
    """A number in (0, 1) for each client, float64."""
    return rng.uniform(_bits(users, seed, purpose, *counters))
