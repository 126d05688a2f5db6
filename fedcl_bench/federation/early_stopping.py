"""When training ends: by early stopping, or as a loss, a parameter or a score is not finite."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Iterable, Iterator, Mapping

import torch

from ..rng import DrawKey
from ..core.errors import RunFailed
from ..plugin.state import Snapshot
from .parts import Federation


class EarlyStopping:
    """Early stopping of what is validated as one: all clients of a step of time, or one domain."""

    def __init__(self, f: Federation):
        self._settings, self._decimals = f.server, f.evaluation.valid_decimals
        # The validation metric of the last round that was observed, rounded, nan if it was not validated; and the
        # highest so far. Of an error they are negative.
        self.value, self.best = math.nan, -math.inf
        self.rounds, self.rounds_without_improvement, self.ended = 0, 0, False

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


@contextmanager
def locate_errors(f: Federation, key: DrawKey) -> Iterator[None]:
    """Put block or domain, and round before what a failure in the ranking says."""
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"{f.stream.name_of(key.step)}, round {key.round + 1}: {error}") from None


def require_finite(loss: float, model: Snapshot, f: Federation, n_items: int, key: DrawKey) -> None:
    """Raise RunFailed if the loss is not finite, or any parameter, or its square, as in products to rank by."""
    extremes = (torch.stack(torch.aminmax(table)) for table in model.tables() if table.numel())  # nan if one is nan
    if not (math.isfinite(loss) and all(bool(torch.isfinite(ends.square()).all()) for ends in extremes)):
        raise RunFailed(f"training diverged in {f.stream.name_of(key.step)}, round {key.round + 1}: the loss "
                        f"({loss:g}) or the square of a parameter is not finite.\n{_remedies(f, n_items, key)}")


def _remedies(f: Federation, n_items: int, key: DrawKey) -> str:
    """What may have made training diverge, and the options that change it."""
    backbone, acts = f.backbone_in(key.step), f.cross_silo or key.step >= f.first_step
    name, lr = "lr" if backbone is f.backbone else "lr_later", backbone.settings.lr
    rates = backbone.learning_rates(n_items, key.round)
    said = ", ".join(f"{part} {rate:g}" for part, rate in rates.items())
    result = f"{name}={lr:g} (learning rates: {said}); try a smaller one with --set {name}={lr / 10:g}"
    if acts and (own := _numbers(f.method.settings)):
        result += f", or less of what the method '{f.method.name}' adds: {_listed(own)}"
    if raised := _numbers(backbone.settings, f.server, f.local, raised=True):
        result += f", or less of what is above its default: {_listed(raised)}"
    part = max(rates, key=rates.__getitem__, default="")
    adds = acts and (f.method.adds_scores() or f.method.penalises_rows)
    if adds and f.local.optimiser == "sgd" and rates[part] >= 10.0 * lr:
        result += (f".\nA step moves {part} by {rates[part]:g} times the gradient, so a penalty w/2 |x|^2 on it "
                   f"overshoots from w={2.0 / rates[part]:.2g} on")
    return f"{result}."


def _numbers(*parts: Any, raised: bool = False) -> dict[str, float]:
    """The settings besides lr that are positive numbers, or above their defaults."""
    return {field.name: value for part in parts for field in fields(part)
            if isinstance(value := getattr(part, field.name), float) and field.name not in ("lr", "lr_later")
            and value > (field.default if raised else 0.0)}


def _listed(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in numbers.items())


def largest(model: Snapshot) -> float:
    """The largest absolute value of any parameter; 0 if there is none."""
    return max((float(torch.stack(torch.aminmax(table)).abs().max()) for table in model.tables() if table.numel()),
               default=0.0)
