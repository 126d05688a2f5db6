"""What a paper's table is, as data."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from ..specs import RunSpec

OUT_OF_MEMORY = "OOM"
_KEY_FIELDS = ("table", "dataset", "backbone", "row", "metric")


class Key(NamedTuple):
    """The place of a number in a table.

    ``row`` is a method, an ablation or noise as ``setting=value``, or a statistic; ``column`` a block, ``avg``,
    ``change`` (percent) or a group of users or items.
    """

    dataset: str
    backbone: str
    row: str
    metric: str
    column: str


@dataclass(frozen=True)
class Printed:
    """What the paper prints in a cell.

    Attributes:
        text: as printed, without its star.
        star: whether a star stands beside it.
    """

    text: str
    star: bool = False

    @property
    def value(self) -> float | None:
        """The number, or None for a method that ran out of memory."""
        return None if self.text == OUT_OF_MEMORY else float(self.text)

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])


@dataclass(frozen=True)
class PaperTable:
    """One table: what it compares and how it is laid out.

    Attributes:
        datasets, backbones, rows, metrics, columns: names; the table's cells are their product.
        stub, across: which of dataset, row, metric and column run down and which run across. Backbones are panels.
        row_spec: the run of a (row, backbone, dataset), or None for a table that needs no runs.
        best: ``max`` or ``min``: which end of the rows is best; None: they are not ranked.
        starred: whether the paper's own method gets a star where it beats the best baseline.
        change_of: the row that ``change`` is relative to.
        notes: sentences below the table.
    """

    number: int
    title: str
    datasets: tuple[str, ...]
    backbones: tuple[str, ...]
    rows: tuple[str, ...]
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    stub: tuple[str, ...]
    across: tuple[str, ...]
    row_spec: Callable[[str, str, str], RunSpec] | None
    best: str | None = None
    starred: bool = False
    change_of: str | None = None
    notes: tuple[str, ...] = ()

    def keys(self) -> Iterator[Key]:
        """All cells."""
        for values in product(self.datasets, self.backbones, self.rows, self.metrics, self.columns):
            key = Key(*values)
            if not (key.column == "change" and key.row == self.change_of):
                yield key

    def specs(self) -> list[RunSpec]:
        """All runs."""
        if self.row_spec is None:
            return []
        return [self.row_spec(row, backbone, dataset)
                for dataset, backbone, row in product(self.datasets, self.backbones, self.rows)]


def read_printed(path: Path) -> dict[int, dict[Key, Printed]]:
    """The printed numbers of a paper: table number to cell to what it prints.

    The file has one line per (table, dataset, backbone, row, metric) and one column per column of the tables; a cell is
    empty where the table has none, and a ``*`` behind a number is the printed star.
    """
    result: dict[int, dict[Key, Printed]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            for column, text in line.items():
                if column not in _KEY_FIELDS and text:
                    key = Key(line["dataset"], line["backbone"], line["row"], line["metric"], column)
                    result.setdefault(int(line["table"]), {})[key] = Printed(text.rstrip("*"), text.endswith("*"))
    return result
