"""A table as data: its cells, its lines, and all that is known of it while it is being filled."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import cached_property
from typing import Callable, Mapping

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
    """One number of ours and the paper's.

    Attributes:
        mean, std: over seeds; mean is None without a record, std with fewer than two.
        seeds, records: of the runs behind it, and their hashes.
        printed: the paper's; None where it prints nothing.
        contradiction, mark: how the printed number contradicts another one of the paper, and its footnote's mark.
        missing: why there is no number of ours.
        star: significantly better: the paper's own method than the best baseline, or a row than ``baseline``.
        worse: significantly worse than ``baseline``.
        rank: 1 best, 2 second among the methods compared, else 0.
        p: over users, of the test behind a star, where it was made; after Holm's correction against ``baseline``.
        p_seeds: of the same test over seeds; None for a single seed.
        holds: whether the runs differ over seeds too, significantly and in the same direction.
        is_reference: all metrics of its runs are FT's (see ``same_numbers``).
        users, interactions: how many the tests of the blocks behind it have; empty where that is not counted.
    """

    key: Key
    decimals: int
    mean: float | None = None
    std: float | None = None
    seeds: tuple[int, ...] = ()
    records: tuple[str, ...] = ()
    printed: Printed | None = None
    contradiction: str = ""
    mark: str = ""
    missing: str = ""
    star: bool = False
    rank: int = 0
    p: float | None = None
    p_seeds: float | None = None
    holds: bool = False
    users: tuple[int, ...] = ()
    interactions: tuple[int, ...] = ()
    worse: bool = False
    is_reference: bool = False


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
    """A whole table.

    Attributes:
        number: of the paper's table; 0 in a table of no paper.
        heading: what stands above it.
        stub: headings of the label columns.
        columns: the labels of each number column, outermost first; LaTeX sets the outer ones above all their columns.
        notes: what the numbers mean; footnotes: (mark, text) of marked cells.
        tested: sentences on how many test users there are.
        missing: one sentence per group of cells without a record.
        daggers: rows that are re-implementations.
    """

    paper: str
    number: int
    title: str
    heading: str
    stub: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    footnotes: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    daggers: frozenset[str] = frozenset()

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
    """A table that is being filled.

    Attributes:
        names: a row, backbone, dataset, metric or column to what it is called.
        ours: the paper's own method; empty where there is none.
        printed: the paper's numbers; contradictions: cell to how its number contradicts another one.
        cells: all, in the order of the table's keys. runs: those of every line.
        tests: sentences on how cells were tested.
    """

    table: PaperTable
    source: Source
    names: Callable[[str], str]
    ours: str = ""
    printed: Mapping[Key, Printed] = field(default_factory=dict)
    contradictions: Mapping[Key, str] = field(default_factory=dict)
    cells: dict[Key, Cell] = field(init=False)
    runs: dict[Place, list[Run]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)

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
