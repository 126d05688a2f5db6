"""Early stopping: which round's model is the best in validation, and when training ends."""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping

from .parts import Federation


class EarlyStopping:
    """Early stopping of what is validated as one: all clients of a step of time, or one domain.

    Attributes:
        rounds: that were observed.
        value: of the validation metric in the last of them, rounded; nan if it was not validated.
        best: the highest value so far; -1 before the first.
        rounds_without_improvement: since it.
        ended: whether training ends with the last round.
    """

    def __init__(self, f: Federation):
        self._settings, self._decimals = f.server, f.evaluation.valid_decimals
        self.rounds, self.value, self.best, self.rounds_without_improvement, self.ended = 0, math.nan, -1.0, 0, False

    @classmethod
    def replay(cls, f: Federation, rows: Iterable[Mapping[str, Any]]) -> "EarlyStopping":
        """As it is after some rounds, given their rows of the curve."""
        stop = cls(f)
        for row in rows:
            stop.observe(None if math.isnan(row["valid"]) else row["valid"])
        return stop

    @property
    def due(self) -> bool:
        """Whether the next round is validated: every ``evaluate_every`` rounds, and in the last."""
        number = self.rounds + 1
        return number >= self._settings.rounds or number % self._settings.evaluate_every == 0

    def observe(self, value: float | None) -> bool:
        """Take in a round's validation metric, None where it is not validated; says whether its model is, so far, the
        one to be tested."""
        s, done = self._settings, value is not None
        self.rounds, self.value = self.rounds + 1, round(value, self._decimals) if done else math.nan
        better, equal = self.value > self.best, self.value == self.best  # nan is neither
        self.rounds_without_improvement = 0 if better else self.rounds_without_improvement + 1
        self.best = self.value if better else self.best
        out_of_patience = done and 0 < s.patience <= self.rounds_without_improvement
        self.ended = self.rounds >= s.rounds or out_of_patience
        return better or equal and s.best_round == "latest" or done and s.tested_round == "last"
