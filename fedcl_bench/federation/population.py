"""What concerns all clients of a run, wherever they are: who takes part, sums and means over them."""

from __future__ import annotations

from typing import Callable

from torch import Tensor

from ..data.stream import Step
from ..draws import Tables
from ..evaluation.ranking import UserScores
from .attendance import Attendance


class Population:
    """All clients of a run, which are here. ``workers/shards.py`` has those that are spread over workers.

    Attributes:
        sum: adds up tables over all clients, given the sums over the clients here; None: they are all of them. May
            reuse the memory of what it is given.
    """

    sum: Callable[[Tables], Tables] | None = None

    def participants(self, step: Step, attendance: Attendance, seed: int, round_: int) -> tuple[Tensor, int, int]:
        """Ids, ascending, of the clients here whose updates arrive in a round; how many do in all; how many fail."""
        users, dropped = attendance.of(step, seed, round_)
        return users, len(users), dropped

    def mean(self, here: UserScores, metric: str) -> float:
        """The mean of a metric over all users, given those of the users here."""
        return here.mean(metric)
