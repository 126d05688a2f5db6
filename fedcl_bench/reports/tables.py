"""A paper's table, rebuilt from records alone: where a table's number is computed.

From top to bottom: ``measure`` takes from a run the number that a cell averages over seeds (``averaged``); then what
the table compares is tested, and ranked; ``build`` lays a paper's table out and has it ``filled``.
``selection.find`` finds every line's runs, ``notes.py`` says below a table what its numbers are, and ``render.py``
writes it down. Cells without a record stay empty and are named.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from ..core.errors import UserError
from ..core.text import JOIN
from ..evaluation.metrics import sign_of
from ..experiments.papers import Key, PaperTable, get
from ..records.store import Run, averaged_blocks, incremental, one_data, one_protocol, why_no_groups
from ..runs.metadata import NO_BACKBONE
from ..runs.specs import RunSpec, seed_text
from ..stats.significance import ALIKE, LEVEL, TooFew
from . import notes
from .cells import COSTS, DASH, SECONDS, UPLOAD, Cell, Filling, Line, Panel, Table
from .comparison import PairedTests, holm_adjusted, paired_tests
from .frame import by_block, common_seeds, split_group
from .selection import Source, find

SHARE = 0.2  # of the users or items in each group of Tables 4, 5 and 7
_STUB_HEADS = {"dataset": "dataset", "backbone": "backbone", "metric": "metric", "row": "", "column": ""}
REFERENCE = "ft"  # the method that does nothing; what cannot be told from it is marked
_SUMMARIES = ("avg", "mean", "value")  # the columns that are marked, where a table has one


class NotMeasured(Exception):
    """A run that exists cannot give a number; says why."""


# From a run to a number


def _analysis(run: Run, kind: str, block: int) -> pd.Series:
    """One kind of analysis of a block, by the id of a user or item."""
    rows = run.analysis[(run.analysis["kind"] == kind) & (run.analysis["block"] == block)]
    return rows.set_index("id")["value"]


def _extremes(order: pd.Series, what: str) -> dict[str, pd.Index]:
    """The ids of the lowest and of the highest fifth; ties by id."""
    size = int(SHARE * len(order))
    if size == 0:
        raise NotMeasured(f"{len(order)} {what} are too few for groups of 20 %")
    ranked = order.sort_index().sort_values(kind="stable").index
    return {"static": ranked[:size], "dynamic": ranked[-size:]}


def user_groups(run: Run) -> dict[str, pd.Index]:
    """Ids of the static and the dynamic users (Tables 4 and 5): the lowest and highest fifth by preference shift in
    block 1 among the users with a test item in block 0; raises NotMeasured if the record holds no shift, or of fewer
    than five users."""
    shift, users = _analysis(run, "user_shift", 1), run.users
    if shift.empty:
        raise NotMeasured("its record holds no preference shift")
    first = users.loc[(users["trained_block"] == 0) & (users["tested_block"] == 0), "user"].unique()
    return _extremes(shift[shift.index.isin(first)], "users with a preference shift")


def _group_scores(run: Run, group: str, trained: int) -> float:
    """Mean N@20 of a group's users on block 0 with the model after block ``trained``."""
    users = run.users
    keep = ((users["trained_block"] == trained) & (users["tested_block"] == 0) & (users["metric"] == "ndcg@20")
            & users["user"].isin(user_groups(run)[group]))
    return float(users.loc[keep, "value"].mean())


def _item_change(run: Run, group: str) -> float:
    """Mean change of rank of the static or dynamic fifth of the items by phi, averaged over blocks 1.. (Table 7)."""
    means = []
    for block in range(1, len(run.meta["rounds"])):
        phi, change = (_analysis(run, kind, block) for kind in ("item_phi", "item_rank_change"))
        if phi.empty or change.empty:
            raise NotMeasured(f"its record holds no item analysis of D{block}")
        means.append(float(change.loc[_extremes(phi, "items")[group]].mean()))
    if not means or not np.isfinite(means).all():
        raise NotMeasured("a block has no user who trained in the one before but not in it")
    return float(np.mean(means))


def _of_groups(run: Run, metric: str, column: str) -> float:
    """A number of static or dynamic users or items, or the difference of these."""
    if metric == "item_rank_change":
        if column == "diff":
            return _item_change(run, "dynamic") - _item_change(run, "static")
        return _item_change(run, column)
    after = _group_scores(run, column, 1)
    if metric != "degradation":
        return after
    before = _group_scores(run, column, 0)
    if before == 0.0:
        raise NotMeasured(f"its {column} users have N@20 = 0 before D1")
    return (before - after) / before


def blocks_behind(key: Key, count: int) -> tuple[int, ...]:
    """The blocks of a run with so many that a cell averages over; none where it is no mean over a test's users."""
    if key.metric in COSTS or key.column in ("static", "dynamic", "diff"):
        return ()
    if key.column == "mean":
        return averaged_blocks(key.dataset, count)
    if key.column in ("avg", "change"):
        return tuple(range(1, count))
    return (0,) if key.column == "value" else (int(key.column.removeprefix("block").removeprefix("D")),)


def measure(run: Run, key: Key) -> float:
    """The number of one run that a cell averages over seeds. Raises NotMeasured."""
    if key.metric == SECONDS:
        return float((run.rounds["train_seconds"] + run.rounds["evaluate_seconds"]).mean())
    if key.metric == UPLOAD:
        return float(np.mean(run.meta["bytes"]["up_per_client_round"])) / 2 ** 20
    if key.column in ("static", "dynamic", "diff"):
        return _of_groups(run, key.metric, key.column)
    (name, group), blocks = split_group(key.metric), by_block(run, key.metric)
    if group and "groups" not in run.meta:
        raise NotMeasured(f"its record has no groups, as {why_no_groups(run.head, '`run --rerun` makes it again')}")
    if blocks is None:
        raise NotMeasured(f"its record has no {name}" + f" of {group}" * bool(group))
    says = f"its record has {len(blocks)} blocks"
    if key.column == "value" and len(blocks) != 1:
        raise NotMeasured(f"{says}, the table is of runs without blocks")
    if key.column[0] in "Da" and len(blocks) != 4 and JOIN not in key.dataset:
        raise NotMeasured(f"{says}, the table is of D0-D3")
    chosen = blocks_behind(key, len(blocks))
    if chosen[-1] >= len(blocks):
        raise NotMeasured(says)
    values = [blocks[t] for t in chosen if blocks[t] is not None]
    if not values:
        raise NotMeasured(f"nobody is in {group}" + (", as the stream has a single step" if len(blocks) == 1 else
                                                     f" in block{'s' * (len(chosen) > 1)} {seed_text(chosen)}"))
    return float(np.mean(values))


# From runs to cells


def averaged(cell: Cell, runs: Sequence[Run], base: Sequence[Run] = (), base_name: str = "") -> Cell:
    """The cell, with the mean and deviation of runs, or with why there is none; ``base``: the runs that a ``change`` is
    relative to. It is that of the means over common seeds, so that it follows from the Avg cells; its deviation is that
    of the seeds' changes."""
    try:
        if cell.key.column != "change":
            values = [measure(run, cell.key) for run in runs]
            mean = float(np.mean(values))
        else:
            if not (pairs := common_seeds(runs, base)):
                raise NotMeasured(f"{base_name} has no record with a seed in common")
            key, runs = cell.key._replace(column="avg"), [run for run, _ in pairs]
            ours, theirs = ([measure(run, key) for run in of_row] for of_row in zip(*pairs))
            if min(theirs) == 0.0:
                raise NotMeasured(f"Avg of {base_name} is 0")
            mean = 100.0 * (float(np.mean(ours)) / float(np.mean(theirs)) - 1.0)
            values = [100.0 * (a / b - 1.0) for a, b in zip(ours, theirs)]
    except NotMeasured as error:
        cell.missing = str(error)
        return cell
    cell.mean, cell.std = mean, float(np.std(values, ddof=1)) if len(values) > 1 else None
    cell.seeds, cell.records = tuple(run.seed for run in runs), tuple(run.hash for run in runs)
    return cell


def tests_of(a: Sequence[Run], b: Sequence[Run], metric: str) -> PairedTests | None:
    with suppress(TooFew):
        return paired_tests(a, b, metric)
    return None


def _set_p(cell: Cell, tests: PairedTests) -> Cell:
    """The cell, with the p of its tests and whether what differs over users does so over seeds."""
    cell.p, cell.p_seeds = tests.users.p, tests.seeds.p if tests.seeds else None
    cell.holds = bool(tests.seeds and tests.seeds.p <= LEVEL and tests.seeds.difference * tests.users.difference > 0.0)
    return cell


def same_numbers(a: Sequence[Run], b: Sequence[Run], metrics: Iterable[str]) -> bool:
    """Whether none of these metrics that both recorded differs by ``ALIKE`` or more, on any block just trained but
    block 0 (if there are others) of any seed that both have. There must be such a seed and metric."""
    pairs = common_seeds(a, b)
    for mine, other in pairs:
        shared = mine.meta["metrics"].keys() & other.meta["metrics"].keys() & set(metrics)
        for blocks, others in ((by_block(mine, metric), by_block(other, metric)) for metric in shared):
            if len(blocks) != len(others) or max(abs(blocks[t] - others[t]) for t in incremental(mine)) >= ALIKE:
                return False
        if not shared:
            return False
    return bool(pairs)


def _count_users(filling: Filling) -> None:
    """Set how many users each cell's tests have. All runs of a dataset are tested alike, so one of them tells it."""
    runs = sorted((run for runs in filling.runs.values() for run in runs),
                  key=lambda run: not run.meta["tested"]["interactions"])
    counts = {run.meta["dataset"]: run.meta["tested"] for run in reversed(runs)}
    for key, cell in filling.cells.items():
        if cell.mean is None:
            continue
        if group := split_group(key.metric)[1]:
            users = next(blocks for run in runs if run.meta["dataset"] == key.dataset
                         and (blocks := by_block(run, f"users {group}")))
            cell.users = tuple(users[t] for t in blocks_behind(key, len(users)) if users[t])
        else:
            of_dataset = counts[key.dataset]
            blocks = blocks_behind(key, len(of_dataset["users"]))
            cell.users = tuple(of_dataset["users"][t] for t in blocks)
            cell.interactions = tuple(of_dataset["interactions"][t] for t in blocks if of_dataset["interactions"])


def _mark_reference(filling: Filling) -> None:
    """Mark the lines of other methods that are FT in effect: tuned settings may turn all off that a method does."""
    columns = set(filling.table.columns).intersection(_SUMMARIES) or {*filling.table.columns} - {"change"}
    methods = {place: runs[0].meta["method"] for place, runs in filling.runs.items() if runs}
    references: dict[tuple[str, str], list[Run]] = {}
    of_reference = [place for place, method in methods.items() if method == REFERENCE]
    for place in sorted(of_reference, key=lambda place: place[2] != REFERENCE):  # before lines with other settings
        references.setdefault(place[:2], filling.runs[place])
    source = replace(filling.source, assignments=filling.source.assignments or filling.common)
    for place in (place for place, method in methods.items() if method != REFERENCE and place[1] != NO_BACKBONE):
        dataset, backbone, _ = place
        if (dataset, backbone) not in references:
            references[dataset, backbone] = find(source, RunSpec(REFERENCE, backbone, dataset))[0]
        if same_numbers(filling.runs[place], references[dataset, backbone], filling.table.metrics):
            for key, cell in filling.cells.items():
                cell.is_reference |= key[:3] == place and key.column in columns and cell.mean is not None


def _test_lead(filling: Filling) -> Iterator[str]:
    """Set stars by the paper's rule: its own method against the best baseline on the backbone, each metric tested on
    its own. Yields the p where the table wants it, and which tests could not be made, or not against every baseline
    that the paper has a number for."""
    table, runs, label = filling.table, filling.runs, filling.label
    for dataset, backbone in product(table.datasets, table.backbones):
        baselines = {key.row: cell for key, cell in filling.cells.items() if key.row not in table.added
                     and (key[:2], key[3:]) == ((dataset, backbone), (table.lead.metric, table.lead.column))}
        if not (mine := baselines.pop(filling.ours, None)):
            continue
        means = {row: cell.mean for row, cell in baselines.items() if cell.mean is not None}
        own, tested = runs[mine.key[:3]], []
        for metric in table.metrics if own and means else ():
            best = runs[dataset, backbone, max(means, key=means.get)]
            if metric not in COSTS and (tests := tests_of(own, best, metric)):
                tested.append(cell := _set_p(filling.cells[mine.key._replace(metric=metric)], tests))
                cell.star = cell.p <= LEVEL and tests.users.difference > 0.0
        where = f"{label(backbone)}, {label(dataset)}"
        if table.lead.name_p and mine.p is not None:
            values = "; ".join(f"{label(cell.key.metric)} {notes.p_of(cell)}" for cell in tested)
            yield f"p over users / over seeds of {label(filling.ours)} on {where}: {values}."
        absent = [label(row) for row, cell in baselines.items()
                  if cell.mean is None and cell.printed and cell.printed.value is not None]
        if mine.mean is not None and mine.p is None and baselines:
            yield f"{where}: not tested; no baseline has a record, or the best shares no seed or too few users."
        elif mine.mean is not None and absent:
            yield f"{where}: tested against the best of the baselines with records (without {', '.join(absent)})."


def _test_across(filling: Filling) -> Iterator[str]:
    """Test the paper's best line of a dataset against those on backbones that its method is not on; yields the p."""
    label, lead = filling.label, filling.table.lead
    taken = {key.backbone for key in filling.cells if key.row == filling.ours}
    for dataset in filling.table.datasets:
        here = [cell for key, cell in filling.cells.items() if cell.mean is not None
                and (key.dataset, key.column) == (dataset, lead.column)]
        mine = [cell for cell in here if (cell.key.row, cell.key.metric) == (filling.ours, lead.metric)]
        if not mine:
            continue
        best = max(mine, key=lambda cell: cell.mean).key
        lines: dict[str, list[str]] = {}
        for cell in here:
            key = cell.key
            if key.backbone not in taken and key.metric not in COSTS and (
                    tests := tests_of(filling.runs[best[:3]], filling.runs[key[:3]], key.metric)):
                lines.setdefault(f"{label(key.row)} on {label(key.backbone)}", []).append(
                    f"{label(key.metric)} {notes.p_of(_set_p(cell, tests))}")
        if lines:
            each = "; ".join(f"{name}: {', '.join(values)}" for name, values in lines.items())
            yield (f"p over users / over seeds of {label(filling.ours)} on {label(best.backbone)}, its best line by "
                   f"{label(lead.metric)} on {label(dataset)}, against lines on other backbones, two-sided. {each}.")


def _test_baseline(filling: Filling) -> None:
    """Test every row against ``table.baseline``, per dataset, backbone and metric, and mark what differs over users.

    Holm's correction is over the rows that one metric is compared on, as those are read together.
    """
    table = filling.table
    for dataset, backbone, metric in product(table.datasets, table.backbones, table.metrics):
        base, cells, tests = filling.runs.get((dataset, backbone, table.baseline)), [], []
        for row in table.rows:
            cell, runs = (filling.cells.get(Key(dataset, backbone, row, metric, "mean")),
                          filling.runs.get((dataset, backbone, row)))
            if (row != table.baseline and cell and cell.mean is not None and base
                    and (found := tests_of(runs, base, metric))):
                cells.append(cell)
                tests.append(found)
        for cell, adjusted in zip(cells, holm_adjusted(tests)):
            _set_p(cell, adjusted)
            cell.star, cell.worse = (cell.p <= LEVEL and sign * adjusted.users.difference > 0.0 for sign in (1, -1))


def _rank(filling: Filling) -> None:
    table, groups = filling.table, {}
    for key, cell in filling.cells.items():
        if cell.mean is not None and key.column != "change" and key.metric not in COSTS:
            compared = key._replace(row="") if table.panels or table.apart else key._replace(row="", backbone="")
            groups.setdefault(compared, []).append(cell)
    for compared, group in groups.items():
        highest = (table.best == "max") == (sign_of(split_group(compared.metric)[0]) > 0)
        shown = sorted({round(cell.mean, cell.decimals) for cell in group}, reverse=highest)
        for cell in group if len(shown) > 1 else ():
            rank = shown.index(round(cell.mean, cell.decimals)) + 1
            cell.rank = rank if rank <= 2 else 0


def _fill_statistics(filling: Filling) -> None:
    for dataset in filling.table.datasets:
        here = [cell for key, cell in filling.cells.items() if key.dataset == dataset]
        try:
            statistics = filling.source.statistics(dataset)
        except UserError as error:
            for cell in here:
                cell.missing = str(error).splitlines()[0].rstrip(".")
            continue
        for cell in here:
            values, block = statistics[cell.key.row], filling.table.columns.index(cell.key.column)
            if block < len(values):
                cell.mean = float(values[block])
            else:
                cell.missing = f"the stream has {len(values)} blocks"


def _fill(filling: Filling, where: str) -> None:
    """Set the numbers of all cells, and their marks; ``where`` is the table's name in errors."""
    table, runs, reasons = filling.table, filling.runs, {}
    if table.row_spec is None:
        _fill_statistics(filling)
        return
    for place in dict.fromkeys(key[:3] for key in filling.cells):
        dataset, backbone, row = place
        runs[place], reasons[place] = find(filling.source, table.row_spec(row, backbone, dataset))
    used = [run for of_line in runs.values() for run in of_line]
    one_protocol(used, where)
    one_data(used)
    for key, cell in filling.cells.items():
        if runs[key[:3]]:
            base = runs.get((key.dataset, key.backbone, table.change_of), [])
            averaged(cell, runs[key[:3]], base, filling.label(table.change_of or ""))
        else:
            cell.missing = reasons[key[:3]]
    _count_users(filling)
    _mark_reference(filling)
    if table.lead:
        filling.tests += _test_lead(filling)
    if table.lead and not table.panels:
        filling.tests += _test_across(filling)
    if table.baseline:
        _test_baseline(filling)
    if table.best:
        _rank(filling)


# From cells to the table


def _panels(filling: Filling) -> tuple[tuple[Panel, ...], tuple[tuple[str, ...], ...]]:
    table, label = filling.table, filling.label
    names = {"dataset": table.datasets, "backbone": table.backbones, "row": table.rows, "metric": table.metrics,
             "column": table.columns}
    downs, acrosses = ([dict(zip(parts, values)) for values in product(*(names[part] for part in parts))]
                       for parts in (table.stub, table.across))
    panels = []
    for backbone in table.backbones if table.panels else ("",):
        whole = {**{part: values[0] for part, values in names.items()}, "backbone": backbone}
        lines = []
        for down in downs:
            shown = tuple(filling.cells.get(Key(**{**whole, **down, **across})) for across in acrosses)
            if any(shown):
                lines.append(Line(tuple(label(name) or DASH for name in down.values()), shown))
        panels.append(Panel(label(backbone), tuple(lines)))
    return tuple(panels), tuple(tuple(map(label, across.values())) for across in acrosses)


def build(paper: str, table: PaperTable, source: Source, datasets: Iterable[str] | None = None,
          backbones: Iterable[str] | None = None, add: Iterable[str] = ()) -> Table | None:
    """A table with our numbers and the paper's; None if no cell is of these datasets and backbones. ``add``: methods
    that the paper does not have, to be shown beside its own where methods are compared (``PaperTable.lead``). Raises
    UserError if records contradict each other: several of one seed, of different data, or of different protocols."""
    chosen = {"datasets": datasets, "backbones": backbones if table.row_spec else None}
    kept = {part: tuple(name for name in getattr(table, part) if name in {*names})
            for part, names in chosen.items() if names is not None}
    if not all(kept.values()):
        return None
    definitions, table = get(paper), replace(table, **kept)
    if add and table.lead:
        table = table.adding(tuple(add), definitions.OURS)
    contradictions = {key: text for (number, key), text in definitions.inconsistencies().items()
                      if number == table.number}
    filling = Filling(table, source, lambda name: definitions.label(table.number, name), definitions.OURS,
                      definitions.printed().get(table.number, {}), contradictions)
    return filled(filling, f"{definitions.TITLE}, Table {table.number}: {table.title}", paper)


def filled(filling: Filling, heading: str, paper: str = "",
           remake: Callable[[Sequence[RunSpec]], str] | None = None) -> Table:
    """A table with its numbers, under a heading; ``build`` and ``any_table.build_any`` are instances. ``remake``: the
    command that makes the runs of some specs; None: the one that names the paper's table. Errors as of ``build``."""
    table = filling.table
    _fill(filling, f"Table {table.number} of {paper}" if table.number else "tables")
    panels, columns = _panels(filling)
    return Table(paper, table.number, table.title, heading, tuple(_STUB_HEADS[part] for part in table.stub), columns,
                 panels, tuple(notes.notes(filling)), tuple(notes.tested(filling)), tuple(notes.footnotes(filling)),
                 tuple(notes.missing(filling, paper, remake)), filling.daggers)
