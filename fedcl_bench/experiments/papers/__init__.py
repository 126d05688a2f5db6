"""Papers whose tables can be filled and rebuilt: what runs each table needs, and the numbers it prints."""

from __future__ import annotations

import csv
import importlib
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterable, Iterator, NamedTuple

from ...core.errors import UserError, require_known, unknown
from ...runs.specs import RunSpec

OUT_OF_MEMORY = "OOM"
_KEY_FIELDS = ("table", "dataset", "backbone", "row", "metric")


class Key(NamedTuple):
    """Where a number stands in a table."""

    dataset: str
    backbone: str
    row: str  # a method, an ablation or noise as ``setting=value``, or a statistic
    metric: str
    # A block, ``avg``, ``change`` (percent), a group of users or items, or ``value``, the only number of a run without
    # blocks; in tables of no paper ``mean``, over the blocks but block 0 (block 0 if there is no other), or ``block0``.
    column: str


@dataclass(frozen=True)
class Printed:
    """What the paper prints in a cell."""

    text: str  # as printed, without its star
    star: bool = False  # whether a star stands beside it

    @property
    def value(self) -> float | None:
        """The number, or None for a method that ran out of memory."""
        return None if self.text == OUT_OF_MEMORY else float(self.text)

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])


@dataclass(frozen=True)
class Lead:
    """By which number the paper's own method is compared with its baselines, to earn a star."""

    # Of the number by which the best of a backbone's baselines is found.
    metric: str
    column: str
    name_p: bool = False  # whether the p-values are written below the table


@dataclass(frozen=True)
class PaperTable:
    """One table: what it compares and how it is laid out."""

    number: int
    title: str
    # Names; the table's cells are their product.
    datasets: tuple[str, ...]
    backbones: tuple[str, ...]
    rows: tuple[str, ...]
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    # Which of dataset, backbone, row, metric and column run down and which run across. Backbones are panels if they are
    # in neither.
    stub: tuple[str, ...]
    across: tuple[str, ...]
    # The run of a (row, backbone, dataset), or None for a table that needs no runs.
    row_spec: Callable[[str, str, str], RunSpec] | None
    # ``max`` or ``min``: which end is best among the rows (and backbones, unless they are panels); None: they are not
    # ranked.
    best: str | None = None
    # By what the paper's own method gets a star where it beats the best baseline; None: there are no stars.
    lead: Lead | None = None
    only: tuple[tuple[str, str], ...] = ()  # the (backbone, row) pairs there are, if not every row is on every backbone
    change_of: str | None = None  # the row that ``change`` is relative to
    notes: tuple[str, ...] = ()  # sentences below the table
    added: tuple[str, ...] = ()  # rows of methods that the paper does not have (see ``adding``)
    apart: bool = False  # rows are compared with each other on every backbone alone, though backbones are no panels
    # The row that every other one is tested against, with Holm's correction; None: no such tests.
    baseline: str | None = None

    @property
    def panels(self) -> bool:
        """Whether every backbone is a panel of its own, whose rows are compared with each other alone."""
        return "backbone" not in (*self.stub, *self.across)

    def keys(self) -> Iterator[Key]:
        for values in product(self.datasets, self.backbones, self.rows, self.metrics, self.columns):
            key = Key(*values)
            if self.only and (key.backbone, key.row) not in self.only:
                continue
            if not (key.column == "change" and key.row == self.change_of):
                yield key

    def run_names(self) -> list[tuple[str, str, str]]:
        """The (row, backbone, dataset) that there are, as ``row_spec`` takes them."""
        return list(dict.fromkeys((key.row, key.backbone, key.dataset) for key in self.keys()))

    def adding(self, methods: tuple[str, ...], beside: str) -> PaperTable:
        """This table with rows of other methods, on the backbones that the row ``beside`` is on."""
        def row_spec(row: str, backbone: str, dataset: str) -> RunSpec:
            return RunSpec(row, backbone, dataset) if row in methods else self.row_spec(row, backbone, dataset)
        only = tuple((backbone, method) for backbone, row in self.only if row == beside for method in methods)
        return replace(self, rows=(*self.rows, *methods), only=(*self.only, *only), row_spec=row_spec, added=methods)

    def specs(self) -> list[RunSpec]:
        return [] if self.row_spec is None else [self.row_spec(*name) for name in self.run_names()]


@cache
def read_printed(paper: str) -> dict[int, dict[Key, Printed]]:
    """The printed numbers of a paper: table number to cell to what it prints. Its CSV file here has one line per
    (table, dataset, backbone, row, metric) and one column per column of the tables; a cell is empty where the table has
    none, and a ``*`` behind a number is the printed star."""
    result: dict[int, dict[Key, Printed]] = {}
    with open(Path(__file__).with_name(f"{paper}.csv"), newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            for column, text in line.items():
                if column not in _KEY_FIELDS and text:
                    key = Key(line["dataset"], line["backbone"], line["row"], line["metric"], column)
                    result.setdefault(int(line["table"]), {})[key] = Printed(text.rstrip("*"), text.endswith("*"))
    return result


PAPERS = ("f3crec", "fcucr", "ffmsr")


def get(paper: str) -> ModuleType:
    """A paper's definitions, imported when they are asked for; raises UserError for an unknown one."""
    require_known("paper", [paper], PAPERS)
    return importlib.import_module(f"{__name__}.{paper}")


def label(name: str) -> str:
    """A method, backbone, dataset or metric as the papers call it; as it is if none of them knows it."""
    return next((labels[name] for labels in (get(paper).LABELS for paper in PAPERS) if name in labels), name)


def select(paper: str, tables: Iterable[int]) -> list[PaperTable]:
    """Tables of a paper by number. Raises UserError for an unknown paper or table."""
    known, left_out = get(paper).TABLES, get(paper).LEFT_OUT
    for number in (tables := list(tables)):
        if number in left_out:
            raise UserError(f"table {number} of {paper}: {left_out[number]}")
        if number not in known:
            raise unknown(f"table of {paper}", str(number), map(str, known))
    return [known[number] for number in dict.fromkeys(tables)]


def specs(paper: str, tables: Iterable[int] = (), figures: Iterable[str | int] = (),
          datasets: Iterable[str] | None = None, backbones: Iterable[str] | None = None,
          methods: Iterable[str] | None = None) -> list[RunSpec]:
    """Every run that tables and figures of a paper need, each once, of these datasets, backbones and methods; None: of
    all. Raises UserError for an unknown paper, table or figure, or a name that the tables or the figures lack."""
    makers, aliases = get(paper).FIGURES, get(paper).FIGURE_ALIASES
    needed = {"tables": [spec for table in select(paper, tables) for spec in table.specs()], "figures": []}
    for figure in map(str, figures):
        name = aliases.get(figure, figure)
        if name not in makers:
            raise unknown(f"figure of {paper}", figure, [*makers, *aliases])
        needed["figures"] += makers[name]()
    chosen = {kind: list(names) for kind, names in (("dataset", datasets), ("backbone", backbones), ("method", methods))
              if names is not None}
    for (what, of_these), (kind, names) in product(needed.items(), chosen.items()):
        if of_these:
            require_known(f"{kind} of these {what} of {paper}", names, {getattr(spec, kind) for spec in of_these})
    return [spec for spec in dict.fromkeys(chain(*needed.values()))
            if all(getattr(spec, kind) in names for kind, names in chosen.items())]
