"""What concerns all clients of a run, wherever they are: who takes part, sums and means over them.

Here they are all in one place. ``shards.py`` has the same questions answered for clients spread over workers.
"""

from __future__ import annotations

from torch import Tensor

from ..data.stream import Step
from ..draws import Tables
from ..evaluation.ranking import UserScores
from .server import participants


class Together:
    """All clients of a run are here.

    Attributes:
        everybody: so they are, and there is nothing to ask anybody else.
    """

    everybody = True

    def participants(self, step: Step, ratio: float, seed: int, round_: int) -> tuple[Tensor, int]:
        """Ids, ascending, of the clients here that take part in a round, and how many do in all."""
        users = participants(step, ratio, seed, round_)
        return users, len(users)

    def sum(self, here: Tables) -> Tables:
        """Sums over all clients, given those over the clients here. May reuse their memory."""
        return here

    def mean(self, here: UserScores, metric: str) -> float:
        """The mean of a metric over all users, given those of the users here."""
        return here.mean(metric)
