"""Runs that cannot go on: a loss, a parameter or a score is not finite."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Iterator

import torch

from ..rng import DrawKey
from ..core.errors import RunFailed
from ..plugin.state import Snapshot
from .parts import Federation


@contextmanager
def locate_errors(f: Federation, key: DrawKey) -> Iterator[None]:
    """Put block or domain, and round before what a failure in the ranking says."""
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"{f.stream.name_of(key.step)}, round {key.round + 1}: {error}") from None


def require_finite(loss: float, model: Snapshot, f: Federation, n_items: int, key: DrawKey) -> None:
    """Raise RunFailed if the loss or any parameter is not finite."""
    extremes = (torch.stack(torch.aminmax(table)) for table in model.tables() if table.numel())  # nan if one is nan
    if not (math.isfinite(loss) and all(bool(torch.isfinite(ends).all()) for ends in extremes)):
        backbone = f.backbone_in(key.step)
        name, lr = "lr" if backbone is f.backbone else "lr_later", backbone.settings.lr
        rates = ", ".join(f"{part} {rate:g}" for part, rate in backbone.learning_rates(n_items, key.round).items())
        others = _raised(backbone.settings, f.method.settings, f.server, f.local)
        less = f", or less of what is above its default: {others}" if others else ""
        raise RunFailed(f"training diverged in {f.stream.name_of(key.step)}, round {key.round + 1}: the loss "
                        f"({loss:g}) or a parameter is not finite.\n{name}={lr:g} (learning rates: {rates}); try a "
                        f"smaller one with --set {name}={lr / 10:g}{less}.")


def _raised(*parts: Any) -> str:
    """The settings besides lr whose numbers are above their defaults: each of them may be why a run diverges."""
    return ", ".join(f"{field.name}={getattr(part, field.name):g}" for part in parts for field in fields(part)
                     if isinstance(field.default, float) and field.name not in ("lr", "lr_later")
                     and getattr(part, field.name) > field.default)


def largest(model: Snapshot) -> float:
    """The largest absolute value of any parameter; 0 if there is none."""
    return max((float(torch.stack(torch.aminmax(table)).abs().max()) for table in model.tables() if table.numel()),
               default=0.0)
