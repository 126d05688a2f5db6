"""What validation says of a round: whether it is the best so far, and whether training ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .parts import Federation, Progress


@dataclass(frozen=True)
class Validation:
    """What validation says of a round.

    Attributes:
        value: of the metric, nan if the round is not validated.
        better, equal: than the best before; equal only where the latest of equals counts as the best.
        stale: rounds since a better one. last: the step ends with this round.
    """

    value: float
    better: bool
    equal: bool
    stale: int
    last: bool

    @property
    def done(self) -> bool:
        return not math.isnan(self.value)


def is_due(f: Federation, round_: int) -> bool:
    """Whether a round's model is validated: every ``evaluate_every`` rounds, and in the last."""
    return round_ + 1 >= f.server.rounds or (round_ + 1) % f.server.evaluate_every == 0


def judge(f: Federation, progress: Progress, value: float | None) -> Validation:
    """What a round's validation metric says; None: it is not validated."""
    out_of_rounds = progress.round + 1 >= f.server.rounds
    due, value = value is not None, math.nan if value is None else round(value, f.evaluation.valid_decimals)
    better = value > progress.best_value  # nan is neither better nor equal
    equal = value == progress.best_value and f.server.best_round == "latest"
    stale = 0 if better else progress.stale + 1
    return Validation(value, better, equal, stale, out_of_rounds or (due and 0 < f.server.patience <= stale))
