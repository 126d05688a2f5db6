"""A table as data: its cells, its lines, and all that is known of it while it is being filled."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Mapping

from ..experiments.papers import Key, PaperTable, Printed
from ..records.store import Run
from ..runs.specs import RunSpec
from .selection import DAGGER, Source

SECONDS = "round_seconds"  # the metric of seconds per round
UPLOAD = "upload_mib"  # the metric of what a client sends in a round
COSTS = (SECONDS, UPLOAD)  # not per user, and not to be ranked
DASH = "–"  # where there is nothing to show

Place = tuple[str, str, str]  # dataset, backbone and row of a line, as a Key begins


@dataclass
class Cell:
    """One number of ours and the paper's."""

    key: Key
    decimals: int
    mean: float | None = None  # over seeds; None without a record
    std: float | None = None  # over seeds; None with fewer than two
    seeds: tuple[int, ...] = ()
    records: tuple[str, ...] = ()  # hashes of the runs behind it
    printed: Printed | None = None  # the paper's; None where it prints nothing
    contradiction: str = ""  # how the printed number contradicts another one of the paper
    mark: str = ""  # of the footnote that says so
    missing: str = ""  # why there is no number of ours
    star: bool = False  # significantly better: the paper's method than the best baseline, or a row than ``baseline``
    rank: int = 0  # 1 best, 2 second among the methods compared, else 0
    p: float | None = None  # over users, of a test where one was made; after Holm's correction against ``baseline``
    p_seeds: float | None = None  # of the same test over seeds; None for a single seed
    holds: bool = False  # whether the runs differ over seeds too, significantly and in the same direction
    # How many the tests of the blocks behind it have; empty where that is not counted.
    users: tuple[int, ...] = ()
    interactions: tuple[int, ...] = ()
    worse: bool = False  # significantly worse than ``baseline``
    is_reference: bool = False  # all metrics of its runs are FT's (see ``same_numbers``)


@dataclass(frozen=True)
class Line:
    """Stub labels and cells of one line; None where the table has no cell."""

    labels: tuple[str, ...]
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Panel:
    """All lines of one backbone, or of all where they are not compared apart."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    paper: str
    number: int  # of the paper's table; 0 in a table of no paper
    title: str
    heading: str  # what stands above it
    stub: tuple[str, ...]  # headings of the label columns
    # The labels of each number column, outermost first; LaTeX sets the outer ones above all their columns.
    columns: tuple[tuple[str, ...], ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()  # what the numbers mean
    tested: tuple[str, ...] = ()  # sentences on how many test users there are
    footnotes: tuple[tuple[str, str], ...] = ()  # (mark, text) of marked cells
    missing: tuple[str, ...] = ()  # one sentence per group of cells without a record
    daggers: frozenset[str] = frozenset()  # rows that are re-implementations

    @property
    def heads(self) -> tuple[str, ...]:
        """The headings of the number columns, each in one line."""
        return tuple(map(" ".join, self.columns))

    def cells(self) -> list[Cell]:
        return [cell for panel in self.panels for line in panel.lines for cell in line.cells if cell is not None]


def _decimals(key: Key, printed: Printed | None) -> int:
    if key.metric in COSTS or (key.column == "change" and (printed is None or printed.value is None)):
        return 2
    return printed.decimals if printed is not None and printed.value is not None else 4


@dataclass
class Filling:
    table: PaperTable
    source: Source
    names: Callable[[str], str]  # a row, backbone, dataset, metric or column to what it is called
    ours: str = ""  # the paper's own method; empty where there is none
    printed: Mapping[Key, Printed] = field(default_factory=dict)  # the paper's numbers
    contradictions: Mapping[Key, str] = field(default_factory=dict)  # cell to how its number contradicts another one
    common: tuple[tuple[str, Any], ...] = ()  # settings of all rows that the rows' specs have and the source has not
    cells: dict[Key, Cell] = field(init=False)  # all, in the order of the table's keys
    runs: dict[Place, list[Run]] = field(default_factory=dict)  # of every line
    tests: list[str] = field(default_factory=list)  # sentences on how cells were tested

    def __post_init__(self) -> None:
        # A pilot's numbers do not compare with the paper's.
        printed, contradictions = ({}, {}) if self.source.pilot_users else (self.printed, self.contradictions)
        self.cells = {key: Cell(key, _decimals(key, printed.get(key)), printed=printed.get(key),
                                contradiction=contradictions.get(key, "")) for key in self.table.keys()}
        for mark, cell in zip(string.ascii_letters, (cell for cell in self.cells.values() if cell.contradiction)):
            cell.mark = mark

    @cached_property
    def specs(self) -> dict[str, RunSpec]:
        """What each row stands for, somewhere; none in a table without runs."""
        return {name[0]: self.table.row_spec(*name) for name in (self.table.run_names() if self.table.row_spec else ())}

    @cached_property
    def daggers(self) -> frozenset[str]:
        return frozenset(name for name, spec in self.specs.items() if self.source.registry.reimplemented(spec.method))

    def label(self, name: str) -> str:
        return self.names(name) + DAGGER * (name in self.daggers)
