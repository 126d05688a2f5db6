"""What validation says of a round: whether it is the best so far, and whether training ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Iterable, Iterator, Mapping

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


def judged_again(f: Federation, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Validation, Progress]]:
    """What validation said of each of a step's rounds, given their rows of the curve; and what ``judge`` asks for after
    it: the rounds, the best value, the rounds since, and whether the step has ended."""
    standing = Progress()
    for row in rows:
        valid = judge(f, standing, None if math.isnan(row["valid"]) else row["valid"])
        standing = replace(standing, round=standing.round + 1, trained=valid.last, stale=valid.stale,
                           best_value=valid.value if valid.better else standing.best_value)
        yield valid, standing
