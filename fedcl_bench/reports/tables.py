"""A paper's table, rebuilt from records alone, as data.

``build`` finds the runs of every row, takes the numbers from them, and sets the paper's beside them. Cells without a
record stay empty and are named in ``Table.missing``. ``render.py`` writes a table down.
"""

from __future__ import annotations

import math
import shlex
import string
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

import numpy as np

from ..data.source import dataset_name
from ..core.errors import UserError
from ..evaluation.metrics import is_share
from ..experiments.papers import Key, PaperTable, Printed, get
from ..experiments.tune import ALIKE
from ..runs.registry import Registry
from ..records.run import Run
from ..runs.specs import RunSpec, Tuned, Where, expected_inactive, expected_settings, seed_text
from ..records.store import (averaged_blocks, comparable, domains_of, incremental, one_data, one_protocol, tested,
                             user_scores)
from ..runs.matching import failure, matching
from ..stats.significance import FEW_USERS, compare_paired, holm, interval_of_mean
from .scores import group_average, group_blocks, split_group

DAGGER = "†"
SHARE = 0.2  # of the users or items in each group of Tables 4, 5 and 7
STAR_LEVEL = 0.05
SECONDS = "round_seconds"  # the metric of seconds per round
UPLOAD = "upload_mib"  # the metric of what a client sends in a round
_COSTS = (SECONDS, UPLOAD)  # not per user, and not to be ranked
DASH = "–"  # where there is nothing to show
_STUB_HEADS = {"dataset": "dataset", "backbone": "backbone", "metric": "metric", "row": "", "column": ""}
REFERENCE = "ft"  # the method that does nothing; what cannot be told from it is marked
_SUMMARIES = ("avg", "mean", "value")  # the columns that are marked, where a table has one
GRID_SEEDS = 5  # of the command for a missing cell when no other cell says how many there are


@dataclass(frozen=True)
class Cell:
    """One number of ours and the paper's.

    Attributes:
        mean, std: over seeds; mean is None without a record, std with fewer than two.
        seeds, records: of the runs behind it, and their hashes.
        printed: the paper's; None where it prints nothing.
        contradiction: how the printed number contradicts another one of the paper.
        missing: why there is no number of ours.
        star: significantly better: the paper's own method than the best baseline, or a row than ``baseline``.
        worse: significantly worse than ``baseline`` (tables of no paper).
        rank: 1 best, 2 second among the methods compared, else 0.
        p: of the test behind a star, where it was made; after Holm's correction against ``baseline``.
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
    missing: str = ""
    star: bool = False
    rank: int = 0
    p: float | None = None
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
        stub: headings of the label columns; heads: those of the number columns.
        notes: what the numbers mean; footnotes: (mark, text) of marked cells, see ``marks``.
        tested: sentences on how many test users there are.
        missing: one sentence per group of cells without a record.
        marks: cell to its footnote mark. daggers: rows that are re-implementations.
    """

    paper: str
    number: int
    title: str
    stub: tuple[str, ...]
    heads: tuple[str, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    tested: tuple[str, ...]
    footnotes: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    marks: Mapping[Key, str]
    daggers: frozenset[str]
    heading: str

    def cells(self) -> list[Cell]:
        """All cells, in reading order."""
        return [cell for panel in self.panels for line in panel.lines for cell in line.cells if cell is not None]


@dataclass(frozen=True)
class Source:
    """Where numbers come from.

    Attributes:
        runs: all finished runs there are.
        tuned: where tuned settings are, or None for the plugins' and datasets' defaults.
        assignments: settings that lie over those of every run of the table.
        statistics: dataset to its statistics (see ``datasets.statistics``), called for tables that need no runs;
            raises UserError if the data is not there.
        where: folders of the command's options.
        failed: the content of ``run.json`` of runs that failed.
    """

    runs: Sequence[Run]
    registry: Registry
    tuned: Tuned | None
    assignments: tuple[tuple[str, Any], ...]
    statistics: Callable[[str], Mapping[str, list]]
    where: Where = Where()
    failed: Sequence[Mapping[str, Any]] = ()

    def options(self) -> str:
        """The options that name these settings and folders on a command line."""
        words = list(self.tuned.words) if self.tuned is not None else []
        for name, value in self.assignments:
            words += ["--set", f"{name}={value}"]
        return shlex.join([*words, *self.where.words()])


class Definitions(Protocol):
    """What a table's rows and numbers are called, and what is printed in it: a paper's module, or that of no paper."""

    OURS: str
    LABELS: Mapping[str, str]

    def label(self, table: int, name: str) -> str: ...

    def printed(self) -> Mapping[int, Mapping[Key, Printed]]: ...

    def inconsistencies(self) -> Mapping[tuple[int, Key], str]: ...


class NotMeasured(Exception):
    """A run that exists cannot give a number; says why."""


def sample_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# From a run to a number.


def _extremes(ids: np.ndarray, order: np.ndarray, what: str) -> dict[str, np.ndarray]:
    """The lowest and the highest fifth of ``ids`` by ``order``; ties by id."""
    size = int(SHARE * len(ids))
    if size == 0:
        raise NotMeasured(f"{len(ids)} {what} are too few for groups of 20 %")
    ranked = ids[np.lexsort((ids, order))]
    return {"static": ranked[:size], "dynamic": ranked[-size:]}


def user_groups(run: Run) -> dict[str, np.ndarray]:
    """Ids of the static and the dynamic users (Tables 4 and 5): the lowest and highest fifth by preference shift in
    block 1 among the users with a test item in block 0.

    Raises:
        NotMeasured: if the record holds no shift, or of fewer than five users.
    """
    shift = run.analysis
    shift = shift[(shift["kind"] == "user_shift") & (shift["block"] == 1)]
    if not len(shift):
        raise NotMeasured("its record holds no preference shift")
    users = run.users
    tested = users.loc[(users["trained_block"] == 0) & (users["tested_block"] == 0), "user"].unique()
    shift = shift[shift["id"].isin(tested)]
    return _extremes(shift["id"].to_numpy(), shift["value"].to_numpy(), "users with a preference shift")


def _group_scores(run: Run, group: str, trained: int) -> float:
    """Mean N@20 of a group's users on block 0 with the model after block ``trained``."""
    users = run.users
    keep = ((users["trained_block"] == trained) & (users["tested_block"] == 0) & (users["metric"] == "ndcg@20")
            & users["user"].isin(user_groups(run)[group]))
    return float(users.loc[keep, "value"].mean())


def _degradation(run: Run, group: str) -> float:
    before = _group_scores(run, group, 0)
    if before == 0.0:
        raise NotMeasured(f"its {group} users have N@20 = 0 before D1")
    return (before - _group_scores(run, group, 1)) / before


def item_change(run: Run, group: str) -> float:
    """Mean change of rank of the static or dynamic fifth of the items by phi, averaged over blocks 1.. (Table 7).

    Raises:
        NotMeasured: if the record holds no item analysis.
    """
    analysis = run.analysis
    means = []
    for block in range(1, len(run.meta["rounds"])):
        here = analysis[analysis["block"] == block]
        phi = here[here["kind"] == "item_phi"]
        change = here[here["kind"] == "item_rank_change"].set_index("id")["value"]
        if not len(phi) or not len(change):
            raise NotMeasured(f"its record holds no item analysis of D{block}")
        ids = _extremes(phi["id"].to_numpy(), phi["value"].to_numpy(), "items")[group]
        means.append(float(change.loc[ids].mean()))
    if not means or not np.isfinite(means).all():
        raise NotMeasured("a block has no user who trained in the one before but not in it")
    return float(np.mean(means))


def measure(run: Run, metric: str, column: str) -> float:
    """The number of one run that a cell averages over seeds. Raises NotMeasured."""
    if metric == "item_rank_change":
        if column == "diff":
            return item_change(run, "dynamic") - item_change(run, "static")
        return item_change(run, column)
    if metric == "degradation":
        return _degradation(run, column)
    if column in ("static", "dynamic"):
        return _group_scores(run, column, 1)
    if metric == SECONDS:
        return float((run.rounds["train_seconds"] + run.rounds["evaluate_seconds"]).mean())
    if metric == UPLOAD:
        return float(np.mean(run.meta["bytes"]["up_per_client_round"])) / 2 ** 20
    if split_group(metric)[1]:
        return _of_group(run, metric, column)
    if metric not in run.meta["metrics"]:
        raise NotMeasured(f"its record has no {metric}")
    blocks = run.meta["metrics"][metric]["per_block"]
    if column == "mean":
        return float(np.mean([blocks[t] for t in incremental(run)]))
    if column.startswith("block"):
        if int(column[5:]) >= len(blocks):
            raise NotMeasured(f"its record has {len(blocks)} blocks")
        return blocks[int(column[5:])]
    if column == "value":
        if len(blocks) != 1:
            raise NotMeasured(f"its record has {len(blocks)} blocks, the table is of runs without blocks")
        return blocks[0]
    if len(blocks) != 4 and not domains_of(run.head):
        raise NotMeasured(f"its record has {len(blocks)} blocks, the table is of D0-D3")
    return float(np.mean(blocks[1:])) if column == "avg" else blocks[int(column[1:])]


def _of_group(run: Run, metric: str, column: str) -> float:
    """The number of a group of users or items, averaged over the blocks that have somebody of it. Raises
    NotMeasured."""
    name, group = split_group(metric)
    if "groups" not in run.meta:
        raise NotMeasured("its record has no groups; it is of an older version, `run --rerun` makes it again")
    blocks = group_blocks(run, name, group)
    if blocks is None:
        raise NotMeasured(f"its record has no {name} of {group}")
    chosen = incremental(run) if column == "mean" else (int(column.removeprefix("block")),)
    if chosen[-1] >= len(blocks):
        raise NotMeasured(f"its record has {len(blocks)} blocks")
    value = group_average(run, name, group, chosen)
    if value is None:
        raise NotMeasured(f"nobody is in {group}" + (", as the stream has a single step" if len(blocks) == 1 else
                                                     f" in block{'s' * (len(chosen) > 1)} {seed_text(chosen)}"))
    return value


# From a spec to its runs, or to the reason why there are none.


def _differences(wanted: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    return [f"{name} {recorded.get(name, 'absent')} instead of {wanted.get(name, 'absent')}"
            for name in sorted({*wanted, *recorded}) if recorded.get(name) != wanted.get(name)]


def find(source: Source, spec: RunSpec) -> tuple[list[Run], str]:
    """The runs of a spec, and why there are none: a plugin, tuned settings or a record is missing.

    Raises:
        UserError: for settings that do not exist, and records that contradict each other.
    """
    for kind, name in (("method", spec.method), ("backbone", spec.backbone)):
        if not source.registry.knows(kind, name):
            broken = source.registry.broken.get(name)
            return [], f"{kind} '{name}' " + (f"cannot be loaded ({broken})" if broken else "is not installed")
    if source.tuned is not None:
        path = source.tuned.file(spec.method, spec.backbone, spec.dataset)
        if not path.is_file():
            return [], f"not tuned (no {path})"
    spec = replace(spec, settings=(*spec.settings, *source.assignments))
    runs = matching(source.runs, source.registry, spec, source.tuned)
    if runs:
        return runs, ""
    if failed := failure(source.failed, source.registry, spec, source.tuned):
        return [], failed
    wanted = comparable(expected_settings(source.registry, spec, source.tuned))
    inactive = expected_inactive(source.registry, spec, source.tuned)
    others = [(_differences(wanted, comparable(run.head["settings"], inactive)), run) for run in source.runs
              if (run.head["method"], run.head["backbone"], run.head["dataset"])
              == (spec.method, spec.backbone, dataset_name(spec.dataset))]
    if not others:
        return [], "no record"
    differences, nearest = min(others, key=lambda pair: (len(pair[0]), pair[1].hash))
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    return [], (f"no record with these settings; the nearest, {nearest.hash[:12]}, has "
                f"{', '.join(differences[:4])}{more}")


# From runs to cells.


def _decimals(key: Key, printed: Printed | None) -> int:
    if key.metric in _COSTS:
        return 2
    if printed is not None and printed.value is not None:
        return printed.decimals
    return 2 if key.column == "change" else 4


def averaged(cell: Cell, runs: Sequence[Run]) -> Cell:
    """The cell with the mean and deviation of runs, or with why there is none."""
    try:
        values = [measure(run, cell.key.metric, cell.key.column) for run in runs]
    except NotMeasured as error:
        return replace(cell, missing=str(error))
    return replace(cell, mean=float(np.mean(values)), std=sample_deviation(values),
                   seeds=tuple(run.seed for run in runs), records=tuple(run.hash for run in runs))


def _paired(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Of each, the runs of the seeds that both have."""
    seeds = {run.seed for run in a} & {run.seed for run in b}
    return [run for run in a if run.seed in seeds], [run for run in b if run.seed in seeds]


def _changed(cell: Cell, runs: Sequence[Run], base: Sequence[Run], base_name: str) -> Cell:
    """Percent change of Avg: of the means over common seeds, so that it follows from the Avg cells; std: per seed."""
    runs, base = _paired(runs, base)
    if not runs:
        return replace(cell, missing=f"{base_name} has no record with a seed in common")
    try:
        ours, theirs = ([measure(run, cell.key.metric, "avg") for run in of_row] for of_row in (runs, base))
    except NotMeasured as error:
        return replace(cell, missing=str(error))
    if min(theirs) == 0.0:
        return replace(cell, missing=f"Avg of {base_name} is 0")
    return replace(cell, mean=100.0 * (float(np.mean(ours)) / float(np.mean(theirs)) - 1.0),
                   std=sample_deviation([100.0 * (a / b - 1.0) for a, b in zip(ours, theirs)]),
                   seeds=tuple(run.seed for run in runs), records=tuple(run.hash for run in runs))


def user_test(a: Sequence[Run], b: Sequence[Run], metric: str) -> tuple[float, float, int]:
    """Paired t-test over users of the seeds that both have.

    Returns:
        Mean difference a - b, two-sided p, number of users; p is nan with fewer than two.
    """
    a, b = _paired(a, b)
    if not a:
        return float("nan"), float("nan"), 0
    first, second = user_scores(a, metric), user_scores(b, metric)
    common = first.index.intersection(second.index)
    if len(common) < 2:
        return float("nan"), float("nan"), len(common)
    test = compare_paired(first[common], second[common], draws=1)  # the t-test alone
    return test.difference, test.p, test.n


def _leading(cells: Mapping[Key, Cell], table: PaperTable, dataset: str, backbone: str) -> dict[str, Cell]:
    """Row to the cell by which a backbone's methods, those of the paper, are compared (``PaperTable.lead``)."""
    keys = {row: Key(dataset, backbone, row, table.lead.metric, table.lead.column) for row in table.rows
            if row not in table.added}
    return {row: cells[key] for row, key in keys.items() if key in cells}


def _starred(cells: dict[Key, Cell], table: PaperTable, ours: str, runs: Mapping[tuple, list[Run]]) -> None:
    """Set stars by the paper's rule: against the best baseline on the backbone, each metric tested on its own."""
    for dataset, backbone in product(table.datasets, table.backbones):
        mine = runs.get((ours, backbone, dataset))
        baselines = {row: cell.mean for row, cell in _leading(cells, table, dataset, backbone).items()
                     if row != ours and cell.mean is not None}
        if not mine or not baselines:
            continue
        best = max(baselines, key=baselines.get)
        for metric in table.metrics:
            if metric in _COSTS:
                continue
            key = Key(dataset, backbone, ours, metric, table.lead.column)
            difference, p, _ = user_test(mine, runs[best, backbone, dataset], metric)
            if not math.isnan(p):
                cells[key] = replace(cells[key], p=p, star=p <= STAR_LEVEL and difference > 0.0)


def _best_backbone(cells: Mapping[Key, Cell], table: PaperTable, ours: str, dataset: str) -> str | None:
    """The backbone on which the paper's method is best; None if it has no record."""
    mine = [cell for key, cell in cells.items() if (key.dataset, key.row, key.metric, key.column)
            == (dataset, ours, table.lead.metric, table.lead.column) and cell.mean is not None]
    return max(mine, key=lambda cell: cell.mean).key.backbone if mine else None


def _on_other_backbones(cells: Mapping[Key, Cell], ours: str, dataset: str, column: str) -> list[Key]:
    """The cells with a number, but costs, in a column of lines on backbones that the paper's method is not on."""
    taken = {key.backbone for key in cells if key.row == ours}
    return [key for key, cell in cells.items() if key.dataset == dataset and key.backbone not in taken
            and key.column == column and key.metric not in _COSTS and cell.mean is not None]


def _tested_across(cells: dict[Key, Cell], table: PaperTable, ours: str, runs: Mapping[tuple, list[Run]]) -> None:
    """Test the paper's best line against those on backbones that its method is not on, each metric on its own."""
    for dataset in table.datasets:
        best = _best_backbone(cells, table, ours, dataset)
        for key in _on_other_backbones(cells, ours, dataset, table.lead.column) if best else ():
            _, p, _ = user_test(runs[ours, best, dataset], runs[key.row, key.backbone, dataset], key.metric)
            if not math.isnan(p):
                cells[key] = replace(cells[key], p=p)


def _notes_across(cells: Mapping[Key, Cell], table: PaperTable, ours: str, label: Callable[[str], str]) -> list[str]:
    """The p of the tests of ``_tested_across``."""
    notes = []
    for dataset in table.datasets:
        lines: dict[str, list[str]] = {}
        for key in _on_other_backbones(cells, ours, dataset, table.lead.column):
            if cells[key].p is not None:
                name = f"{label(key.row)} on {label(key.backbone)}"
                lines.setdefault(name, []).append(f"{label(key.metric)} {p_text(cells[key].p)}")
        if lines:
            best = _best_backbone(cells, table, ours, dataset)
            each = "; ".join(f"{name}: {', '.join(values)}" for name, values in lines.items())
            notes.append(f"p of {label(ours)} on {label(best)}, its best line by {label(table.lead.metric)} on "
                         f"{label(dataset)}, against lines on other backbones, two-sided. {each}.")
    return notes


def _ranked(cells: dict[Key, Cell], table: PaperTable) -> None:
    """Mark the best and the second of every comparison, by the numbers as they are shown."""
    groups: dict[Key, list[Cell]] = {}
    for key, cell in cells.items():
        if cell.mean is not None and key.column != "change" and key.metric not in _COSTS:
            compared = key._replace(row="") if table.panels or table.apart else key._replace(row="", backbone="")
            groups.setdefault(compared, []).append(cell)
    for group in groups.values():
        shown = sorted({round(cell.mean, cell.decimals) for cell in group}, reverse=table.best == "max")
        for cell in group if len(shown) > 1 else ():
            rank = shown.index(round(cell.mean, cell.decimals)) + 1
            cells[cell.key] = replace(cell, rank=rank if rank <= 2 else 0)


def _tested(cells: dict[Key, Cell], table: PaperTable, runs: Mapping[tuple, list[Run]]) -> None:
    """Test every row against ``table.baseline`` over users, per dataset, backbone and metric, and mark what differs.

    Holm's correction is over the rows that one metric is compared on, as those are read together.
    """
    for dataset, backbone, metric in product(table.datasets, table.backbones, table.metrics):
        tests: dict[Key, tuple[float, float]] = {}
        for row in table.rows:
            key = Key(dataset, backbone, row, metric, "mean")
            pair = [runs.get((name, backbone, dataset)) for name in (row, table.baseline)]
            if row == table.baseline or key not in cells or not all(pair):
                continue
            difference, p, _ = user_test(*pair, metric)
            if not math.isnan(p):
                tests[key] = difference, p
        for (key, (difference, _)), p in zip(tests.items(), holm([p for _, p in tests.values()]) if tests else ()):
            differs = p <= STAR_LEVEL
            cells[key] = replace(cells[key], p=p, star=differs and difference > 0.0, worse=differs and difference < 0.0)


def same_numbers(a: Sequence[Run], b: Sequence[Run], metrics: Iterable[str]) -> bool:
    """Whether none of these metrics that both recorded differs by ``ALIKE`` or more, on any block just trained but
    block 0 (if there are others) of any seed that both have. There must be such a seed and metric."""
    a, b = _paired(a, b)
    for mine, other in zip(sorted(a, key=lambda run: run.seed), sorted(b, key=lambda run: run.seed)):
        shared = mine.meta["metrics"].keys() & other.meta["metrics"].keys() & set(metrics)
        for metric in shared:
            blocks, others = (run.meta["metrics"][metric]["per_block"] for run in (mine, other))
            if len(blocks) != len(others) or max(abs(blocks[t] - others[t]) for t in incremental(mine)) >= ALIKE:
                return False
        if not shared:
            return False
    return bool(a)


def _mark_reference(cells: dict[Key, Cell], table: PaperTable, source: Source,
                    runs: Mapping[tuple[str, str, str], list[Run]]) -> None:
    """Mark the rows of other methods that are FT in effect: tuned settings may turn all off that a method does."""
    columns = set(table.columns).intersection(_SUMMARIES) or {*table.columns} - {"change"}
    references: dict[tuple[str, str], list[Run]] = {}
    methods = {name: of_row[0].meta["method"] for name, of_row in runs.items() if of_row}
    for name in [name for name, method in methods.items() if method == REFERENCE]:
        references.setdefault(name[1:], runs[name])
    for name in [name for name, method in methods.items() if method != REFERENCE]:
        _, backbone, dataset = name
        if (backbone, dataset) not in references:
            references[backbone, dataset] = find(source, RunSpec(REFERENCE, backbone, dataset))[0]
        if same_numbers(runs[name], references[backbone, dataset], table.metrics):
            for key in [key for key in cells if (key.row, key.backbone, key.dataset) == name and key.column in columns]:
                cells[key] = replace(cells[key], is_reference=cells[key].mean is not None)


def pilot_users(source: Source) -> int:
    """How many users of each domain the runs have that ``source`` asks for; 0 if they have all."""
    return int(dict(source.assignments).get("pilot_users", 0))


def _cells(paper: str, definitions: Definitions, table: PaperTable, source: Source) -> dict[Key, Cell]:
    """Every cell of a table. Those of a pilot are without the paper's numbers, as the two do not compare."""
    printed, contradictions = definitions.printed().get(table.number, {}), definitions.inconsistencies()
    if pilot_users(source):
        printed, contradictions = {}, {}
    cells = {key: Cell(key, _decimals(key, printed.get(key)), printed=printed.get(key),
                       contradiction=contradictions.get((table.number, key), "")) for key in table.keys()}
    if table.row_spec is None:
        return _of_statistics(cells, table, source)
    runs: dict[tuple[str, str, str], list[Run]] = {}
    reasons: dict[tuple[str, str, str], str] = {}
    for name in table.run_names():
        runs[name], reasons[name] = find(source, table.row_spec(*name))
    used = [run for of_row in runs.values() for run in of_row]
    one_protocol(used, f"Table {table.number} of {paper}" if table.number else "tables")
    one_data(used)
    for key, cell in cells.items():
        name = (key.row, key.backbone, key.dataset)
        if not runs[name]:
            cells[key] = replace(cell, missing=reasons[name])
        elif key.column == "change":
            base = (table.change_of, key.backbone, key.dataset)
            cells[key] = _changed(cell, runs[name], runs[base], definitions.LABELS[table.change_of])
        else:
            cells[key] = averaged(cell, runs[name])
    _count_users(cells, used)
    _mark_reference(cells, table, source, runs)
    if table.lead:
        _starred(cells, table, definitions.OURS, runs)
        if not table.panels:
            _tested_across(cells, table, definitions.OURS, runs)
    if table.baseline:
        _tested(cells, table, runs)
    if table.best:
        _ranked(cells, table)
    return cells


def _count_users(cells: dict[Key, Cell], runs: Iterable[Run]) -> None:
    """Set how many users each cell's tests have. All runs of a dataset are tested alike, so one of them tells it."""
    first: dict[str, Run] = {}
    for run in runs:
        kept = first.setdefault(run.meta["dataset"], run)
        if "tested" in run.meta and "tested" not in kept.meta:
            first[run.meta["dataset"]] = run
    counts = {dataset: tested(run) for dataset, run in first.items()}
    for key, cell in cells.items():
        group = split_group(key.metric)[1]
        if cell.mean is not None and group:
            cells[key] = replace(cell, users=_group_users(key, group, runs))
        elif cell.mean is not None and (blocks := blocks_behind(key, len(counts[key.dataset]["users"]))):
            users, interactions = (tuple(of_block[t] for t in blocks) if (of_block := counts[key.dataset][what]) else ()
                                   for what in ("users", "interactions"))
            cells[key] = replace(cell, users=users, interactions=interactions)


def _group_users(key: Key, group: str, runs: Iterable[Run]) -> tuple[int, ...]:
    """How many of a group each block has that a cell averages over, but for those with nobody."""
    users = next(users for run in runs if run.meta["dataset"] == key.dataset and (users := group_blocks(
        run, "users", group)))
    return tuple(users[t] for t in blocks_behind(key, len(users)) if users[t])


def blocks_behind(key: Key, count: int) -> tuple[int, ...]:
    """The blocks whose tests a cell averages over; none where it is no mean over all of a test's users."""
    if key.metric in (*_COSTS, "item_rank_change", "degradation") or key.column in ("static", "dynamic"):
        return ()
    if key.column == "value":
        return (0,)
    if key.column == "mean":
        return averaged_blocks(key.dataset, count)
    if key.column in ("avg", "change"):
        return tuple(range(1, count))
    return (int(key.column.removeprefix("block").removeprefix("D")),)


def _of_statistics(cells: dict[Key, Cell], table: PaperTable, source: Source) -> dict[Key, Cell]:
    """The cells of a table that needs no runs, with the datasets' statistics."""
    for dataset in table.datasets:
        try:
            statistics, reason = source.statistics(dataset), ""
        except UserError as error:
            statistics, reason = None, str(error).splitlines()[0].rstrip(".")
        for key in cells:
            if key.dataset == dataset and statistics is None:
                cells[key] = replace(cells[key], missing=reason)
            elif key.dataset == dataset:
                values = statistics[key.row]
                block = table.columns.index(key.column)
                cells[key] = (replace(cells[key], mean=float(values[block])) if block < len(values) else
                              replace(cells[key], missing=f"the stream has {len(values)} blocks"))
    return cells


# From cells to the table.


def _usual_seeds(cells: Iterable[Cell]) -> tuple[int, ...]:
    """The seeds that most cells have."""
    counts = Counter(cell.seeds for cell in cells if cell.seeds)
    return max(counts, key=lambda seeds: (counts[seeds], len(seeds), seeds)) if counts else ()


def _seed_notes(cells: Mapping[Key, Cell], where: Callable[[Key], str]) -> list[str]:
    """How many seeds there are, and which cells have others."""
    usual = _usual_seeds(cells.values())
    if not usual:
        return []
    number = "1 seed, so no deviation" if len(usual) == 1 else f"{len(usual)} seeds"
    notes = [f"{number} ({seed_text(usual)})."]
    others: dict[tuple[int, ...], list[str]] = {}
    for key, cell in cells.items():
        if cell.seeds and cell.seeds != usual:
            name = where(key) + (" (change)" if key.column == "change" else "")
            others.setdefault(cell.seeds, []).append(name)
    for seeds, names in others.items():
        notes.append(f"Other seeds ({seed_text(seeds)}): {'; '.join(dict.fromkeys(names))}.")
    return notes


def _interval_key(cell: Cell) -> tuple[bool, float]:
    """Whether the interval of a cell's mean can be told, and the mean: not of metrics that may lie beyond [0, 1], and
    not of users who were chosen for their values."""
    metric, group = split_group(cell.key.metric)
    return is_share(metric) and group != "worst-decile", cell.mean


def _tested_notes(cells: Mapping[Key, Cell], labels: _Labels) -> list[str]:
    """How many users the tests have, and how many interactions these are to find; what that means if they are few."""
    most: dict[tuple[str, str], dict[str, Cell]] = {}  # of the tests of a dataset, or of a group of its users
    for key, cell in cells.items():
        if cell.users and key.column != "change":
            here = most.setdefault((key.dataset, split_group(key.metric)[1]), {})
            if key.column not in here or _interval_key(cell) > _interval_key(here[key.column]):
                here[key.column] = cell
    notes = []
    for (dataset, group), columns in most.items():
        tests_of = labels.of(dataset) + (f", {group}" if group else "")
        if len(columns) > 1:  # those of the blocks are those of their average, and those of all domains of the mean
            each = tuple(n for column, cell in columns.items() if column != "mean" for n in cell.users)
            columns = {column: cell for column, cell in columns.items()
                       if column != "avg" and (column != "mean" or cell.users != each)}
        where = {column: labels.of(column) if column not in ("value", "mean") else "" for column in columns}
        for what in ("users", "interactions"):
            counts = {column: getattr(cell, what) for column, cell in columns.items() if getattr(cell, what)}
            texts = [", ".join(f"{n:,}" for n in numbers) + (f" ({where[column]})" if where[column] else "")
                     for column, numbers in counts.items()]
            if texts:
                notes.append(f"Test {what} of {tests_of}: {', '.join(texts)}.")
        for column, cell in columns.items():
            if (users := min(cell.users)) < FEW_USERS and _interval_key(cell)[0]:
                low, high = interval_of_mean(cell.mean, users)
                notes.append(f"Only {users} test user{'s' if users > 1 else ''}"
                             f"{' in ' * bool(where[column])}{where[column]}: the 95 % interval of "
                             f"{labels.cell(cell.key)} ({cell.mean:.4f}) is {low:.4f} to {high:.4f}.")
    return notes


def p_text(p: float) -> str:
    """A p-value in words."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _test_notes(cells: Mapping[Key, Cell], table: PaperTable, ours: str, label: Callable[[str], str]) -> list[str]:
    """The p of tests where the table wants them, and which tests could not be made, or not against every baseline that
    the paper has a number for."""
    notes = []
    for dataset, backbone in product(table.datasets, table.backbones):
        here = _leading(cells, table, dataset, backbone)
        if ours not in here:
            continue
        mine, where = here.pop(ours), f"{label(backbone)}, {label(dataset)}"
        if table.lead.name_p and mine.p is not None:
            tested = {metric: cells[mine.key._replace(metric=metric)].p for metric in table.metrics}
            values = "; ".join(f"{label(metric)} {p_text(p)}" for metric, p in tested.items() if p is not None)
            notes.append(f"p of {label(ours)} on {where}: {values}.")
        absent = [label(row) for row, cell in here.items()
                  if cell.mean is None and cell.printed and cell.printed.value is not None]
        if mine.mean is not None and mine.p is None and here:
            notes.append(f"{where}: not tested; no baseline has a record, or the best shares no seed or too few users.")
        elif mine.mean is not None and absent:
            notes.append(f"{where}: tested against the best of the baselines with records (without "
                         f"{', '.join(absent)}).")
    return notes


def command(paper: str, table: PaperTable, source: Source, seeds: int, datasets: Iterable[str] = (),
            backbones: Iterable[str] = (), methods: Iterable[str] = ()) -> str:
    """The command that makes the missing records of some cells: those of the paper, or those of added methods."""
    methods = list(dict.fromkeys(methods))
    names = [f"--{kind} {','.join(dict.fromkeys(chosen))}"
             for kind, chosen in (("datasets", datasets), ("backbones", backbones), ("methods", methods)) if chosen]
    runs = [] if set(methods) & set(table.added) else [f"--paper {paper} --table {table.number}"]
    return " ".join(["run_bench.py grid", *runs, *names, f"--seeds {seeds}", *filter(None, [source.options()])])


def _missing(cells: Mapping[Key, Cell], paper: str, table: PaperTable, source: Source,
             remake: Callable[[Sequence[RunSpec]], str] | None) -> list[str]:
    """Sentences that name every cell without a number of ours, one per dataset and reason."""
    groups: dict[tuple[str, str, str, bool], list[Key]] = {}
    for key, cell in cells.items():
        if cell.missing:
            groups.setdefault((key.dataset, key.backbone, cell.missing, key.row in table.added), []).append(key)
    alike: dict[tuple, list[str]] = {}  # backbones on which the same cells of a dataset are missing
    for (dataset, backbone, reason, _), keys in groups.items():
        rows, columns = (tuple(dict.fromkeys(getattr(key, part) for key in keys)) for part in ("row", "column"))
        whole = [key for key in cells if (key.dataset, key.backbone) == (dataset, backbone) and key.row in rows]
        alike.setdefault((dataset, reason, rows, columns if len(keys) < len(whole) else ()), []).append(backbone)
    seeds = len(_usual_seeds(cells.values())) or GRID_SEEDS
    sentences = []
    for (dataset, reason, rows, columns), backbones in alike.items():
        if table.row_spec is None:
            sentences.append(f"missing: statistics of {dataset}: {reason}.")
            continue
        part = f" ({', '.join(columns)})" if columns and len(table.columns) > 1 else ""
        specs = [table.row_spec(row, backbone, dataset) for backbone, row in product(backbones, rows)]
        methods = [spec.method for spec in specs]
        run = "."
        if reason.startswith("no record"):
            run = "; run: " + (remake(specs) if remake else
                               command(paper, table, source, seeds, [dataset], backbones, methods))
        lacking = " on ".join(filter(None, (", ".join(rows), ", ".join(backbones))))
        sentences.append(f"missing: {lacking}, {dataset}{part}: {reason}{run}")
    return sentences


def _limited(table: PaperTable, datasets: Iterable[str] | None, backbones: Iterable[str] | None) -> PaperTable | None:
    """A table of these datasets and backbones only; None if that leaves nothing."""
    kept = {"datasets": table.datasets, "backbones": table.backbones}
    for field, chosen in (("datasets", datasets), ("backbones", backbones if table.row_spec else None)):
        if chosen is not None:
            kept[field] = tuple(name for name in kept[field] if name in set(chosen))
    return replace(table, **kept) if all(kept.values()) else None


@dataclass(frozen=True)
class _Labels:
    """What a table calls things: as the paper does, with a dagger at re-implementations."""

    definitions: Definitions
    table: PaperTable
    daggers: frozenset[str]

    def of(self, name: str) -> str:
        """A row, backbone, dataset, metric or column."""
        return self.definitions.label(self.table.number, name) + (DAGGER if name in self.daggers else "")

    def cell(self, key: Key) -> str:
        """A cell but for its metric and column."""
        return f"{self.of(key.row)} on {self.of(key.backbone)}, {self.of(key.dataset)}"


def _footnotes(cells: Mapping[Key, Cell], labels: _Labels) -> tuple[dict[Key, str], list[tuple[str, str]]]:
    """The marks of cells whose printed number contradicts another one, and the footnotes."""
    marked = [key for key, cell in cells.items() if cell.contradiction]
    marks = dict(zip(marked, string.ascii_letters))
    footnotes = [(marks[key], f"{labels.cell(key)}, {', '.join(filter(None, map(labels.of, (key.metric, key.column))))}"
                              f": {cells[key].contradiction}.") for key in marked]
    if labels.daggers:
        footnotes.append((DAGGER, "Re-implementation from the description: its code was never released."))
    return marks, footnotes


def pilot_note(users: Iterable[int]) -> str:
    """What is said of a table of pilots with so many users."""
    return (f"Of pilots with {', '.join(f'{n:,}' for n in sorted(users))} users of each domain; comparable with no "
            f"numbers of all users.")


def _notes(cells: Mapping[Key, Cell], labels: _Labels, source: Source) -> list[str]:
    """What the numbers mean, which seeds they are of, and how they were tested."""
    table = labels.table
    notes = [*table.notes, *_seed_notes(cells, labels.cell)]
    if table.added:
        notes.append(f"Not in the paper: {', '.join(map(labels.of, table.added))}. `compare` tests them.")
    if users := pilot_users(source):
        notes.append(f"{pilot_note([users])} So the paper's are not shown.")
    if any(cell.is_reference for cell in cells.values()):
        notes.append(f"= FT: on every block and seed these metrics are less than {ALIKE:.4f} away from FT's, so with "
                     f"its settings the method is FT in effect.")
    if table.lead:
        notes += _test_notes(cells, table, labels.definitions.OURS, labels.of)
        notes += [] if table.panels else _notes_across(cells, table, labels.definitions.OURS, labels.of)
    return notes


def _panels(cells: Mapping[Key, Cell], labels: _Labels) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
    """The lines of every panel, and the headings of the number columns."""
    table = labels.table
    names = {"dataset": table.datasets, "backbone": table.backbones, "row": table.rows, "metric": table.metrics,
             "column": table.columns}
    downs, acrosses = ([dict(zip(parts, values)) for values in product(*(names[part] for part in parts))]
                       for parts in (table.stub, table.across))

    def lines(backbone: str) -> tuple[Line, ...]:
        whole = {"dataset": table.datasets[0], "backbone": backbone, "row": table.rows[0],
                 "metric": table.metrics[0], "column": table.columns[0]}
        result = []
        for down in downs:
            shown = tuple(cells.get(Key(**{**whole, **down, **across})) for across in acrosses)
            if any(shown):
                result.append(Line(tuple(labels.of(name) or DASH for name in down.values()), shown))
        return tuple(result)
    panels = tuple(Panel(labels.of(backbone), lines(backbone))
                   for backbone in (table.backbones if table.panels else ("",)))
    return panels, tuple(" ".join(map(labels.of, across.values())) for across in acrosses)


def build(paper: str, table: PaperTable, source: Source, datasets: Iterable[str] | None = None,
          backbones: Iterable[str] | None = None, add: Iterable[str] = ()) -> Table | None:
    """A table with our numbers and the paper's; None if no cell is of these datasets and backbones.

    Args:
        add: methods that the paper does not have, to be shown beside its own where methods are compared
            (``PaperTable.lead``).

    Raises:
        UserError: if records contradict each other: several of one seed, of different data, or of different protocols.
    """
    table = _limited(table, datasets, backbones)
    if table is None:
        return None
    definitions = get(paper)
    if add and table.lead:
        table = table.adding(tuple(add), definitions.OURS)
    return filled(paper, definitions, table, source, f"{definitions.TITLE}, Table {table.number}: {table.title}")


def filled(paper: str, definitions: Definitions, table: PaperTable, source: Source, heading: str,
           remake: Callable[[Sequence[RunSpec]], str] | None = None) -> Table:
    """A table with its numbers; ``build`` and ``any_table.build_any`` are instances.

    Args:
        heading: what stands above it.
        remake: the command that makes the runs of some specs; None: the one that names the paper's table.

    Raises:
        UserError: as ``build``.
    """
    cells = _cells(paper, definitions, table, source)
    daggers = frozenset(row for row, backbone, dataset in table.run_names()
                        if table.row_spec and source.registry.reimplemented(
                            table.row_spec(row, backbone, dataset).method))
    labels = _Labels(definitions, table, daggers)
    marks, footnotes = _footnotes(cells, labels)
    panels, heads = _panels(cells, labels)
    notes, counts = _notes(cells, labels, source), _tested_notes(cells, labels)
    return Table(paper, table.number, table.title, tuple(_STUB_HEADS[part] for part in table.stub), heads, panels,
                 tuple(notes), tuple(counts), tuple(footnotes), tuple(_missing(cells, paper, table, source, remake)),
                 marks, daggers, heading)
