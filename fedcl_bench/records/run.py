"""A finished run, as its record tells it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping

from ..core.errors import Corrupt

if TYPE_CHECKING:
    import pandas as pd


def refuse(error: Corrupt) -> None:
    """Raise what is wrong with a record."""
    raise error


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run.

    Attributes:
        head: names, seed, hash, settings, the number of blocks and the metrics' names: enough to choose runs by.
        path: the folder it was read from.
        open: reads and verifies the record; returns the content of ``run.json``.
        load: reads one of the frames ``users``, ``rounds`` and ``analysis``; called once for each that is asked for.
        left_out: told why, if the record is not what was written.
    """

    head: Mapping[str, Any]
    path: Path
    open: Callable[[], dict[str, Any]]
    load: Callable[[str], pd.DataFrame]
    left_out: Callable[[Corrupt], None] = refuse

    @property
    def seed(self) -> int:
        return int(self.head["seed"])

    @property
    def hash(self) -> str:
        return str(self.head["hash"])

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The content of ``run.json``; raises Corrupt unless all of the record is what was written."""
        return self.open()

    @cached_property
    def intact(self) -> bool:
        """Whether the record is what was written. If not, who asked for the runs is told."""
        try:
            return bool(self.meta)
        except Corrupt as error:
            self.left_out(error)
            return False

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
