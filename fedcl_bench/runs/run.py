"""A finished run, as its record tells it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Callable

import pandas as pd


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run.

    Attributes:
        meta: the content of ``run.json``.
        path: the folder it was read from.
        load: reads one of the frames ``users``, ``rounds`` and ``analysis``; called once for each that is asked for.
    """

    meta: dict[str, Any]
    path: Path
    load: Callable[[str], pd.DataFrame]

    @property
    def seed(self) -> int:
        return self.meta["seed"]

    @property
    def hash(self) -> str:
        return self.meta["hash"]

    @cached_property
    def users(self) -> pd.DataFrame:
        """Per-user scores: trained_block, tested_block, user, metric, value."""
        return self.load("users")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round: step, round, participants, loss, valid, bytes_up, bytes_down, train_seconds,
        evaluate_seconds."""
        return self.load("rounds")

    @cached_property
    def analysis(self) -> pd.DataFrame:
        """What was measured besides the metrics: block, kind, id, value; no rows if nothing was."""
        return self.load("analysis")
