"""The standing of every printed number: what became of it when the paper's runs were made again.

One rule decides a cell, on the pages of a paper and on the page over all papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from scipy import stats

from ..experiments.papers import Key, PaperTable, Printed, get
from ..records.store import user_scores
from ..stats.power import detectable
from ..stats.significance import LEVEL, compare_paired
from .tables import SECONDS, Cell, Source, blocks_behind, pilot_users

CONFIDENCE = 0.95
MIN_SEEDS = 3
# How near a number inside the interval must be: a share of the paper's, or points for changes in percent. Beyond that
# the interval is too wide to speak of a reproduction.
NEAR, NEAR_POINTS = 0.1, 5.0
SAME, SAME_METRIC = 0.005, "ndcg@20"  # a number of this metric that is so near is reproduced, whatever the interval

REPRODUCED, DIRECTION, DIFFERS, OPEN, NO_DATA = (
    "reproduced", "direction reproduced", "not reproduced", "open", "data not available")
MARKS = {REPRODUCED: "✓", DIRECTION: "↗", DIFFERS: "✗", OPEN: "○", NO_DATA: "∅"}
WIDE = "inside the interval of our seeds, which is too wide to tell"
IN_EFFECT = "with the settings that the search chose the method is FT in effect"


@dataclass(frozen=True)
class Standing:
    """What became of one printed number.

    Attributes:
        kind: of ``MARKS``.
        reason: why it is open or has no data, or what is known of why it is not reproduced; may be empty then.
    """

    kind: str
    reason: str = ""


@dataclass(frozen=True)
class Against:
    """A cell's runs against FT's: a two-sided paired t-test over users, each averaged over the cell's blocks and the
    seeds that both have.

    Attributes:
        difference, p, users: ours; the cell's runs less FT's.
        detectable: the difference that the test would have found with probability .8 (``stats.power``).
        printed: the paper's difference; in a cell of changes in percent, that change.
    """

    difference: float
    p: float
    users: int
    detectable: float
    printed: float


@dataclass(frozen=True)
class Judged:
    """A cell with its standing, and its comparison with FT where there is one."""

    cell: Cell
    standing: Standing
    against: Against | None = None


def half_width(std: float, seeds: int, printed_runs: int = 1) -> float:
    """Half the width of the interval in which the mean of m more runs lies with 95 % probability, if runs with other
    seeds are normal: t(.975, n - 1) s sqrt(1/m + 1/n)."""
    return (float(stats.t.ppf(0.5 + CONFIDENCE / 2, seeds - 1)) * std
            * math.sqrt(1.0 / printed_runs + 1.0 / seeds))


def standing(cell: Cell, printed_runs: int = 1, against: Against | None = None, known: str = "",
             no_data: str = "") -> Standing | None:
    """The standing of a cell; None if the paper prints nothing there.

    Args:
        printed_runs: how many runs the printed number is the mean of.
        known: what is known of why it is not reproduced, if it is not.
        no_data: why there is no data, if there is none.
    """
    if cell.printed is None:
        return None
    if cell.mean is None and no_data:
        return Standing(NO_DATA, no_data)
    if cell.printed.value is None:
        return Standing(OPEN, "the paper's run went out of memory")
    if cell.mean is None:
        return Standing(OPEN, cell.missing)
    if cell.key.metric == SECONDS:
        return Standing(OPEN, "seconds depend on the machine")
    if cell.seeds and len(cell.seeds) < MIN_SEEDS:
        return Standing(OPEN, f"fewer than {MIN_SEEDS} seeds")
    rounding = 0.5 * 10.0 ** -cell.decimals * (1.0 + 1e-9)  # the paper's
    allowed = rounding + (half_width(cell.std, len(cell.seeds), printed_runs) if cell.seeds else 0.0)
    distance = abs(cell.mean - cell.printed.value)
    change = cell.key.column == "change"
    near = NEAR_POINTS if change else NEAR * abs(cell.printed.value)
    same = SAME if cell.key.metric == SAME_METRIC and not change else 0.0
    if distance <= min(allowed, near) or distance <= same:
        return Standing(REPRODUCED)
    if against is not None and against.p < LEVEL and against.difference * against.printed > 0.0:
        return Standing(DIRECTION)
    return Standing(OPEN, WIDE) if distance <= allowed else Standing(DIFFERS, cell.contradiction or known)


def printed_lead(paper: ModuleType, table: PaperTable, key: Key) -> float | None:
    """The paper's number of a row by which its methods are compared, from the columns that ``Lead.printed`` names."""
    values = [paper.printed()[table.number][key._replace(column=column)].value for column in table.lead.printed]
    return None if None in values else sum(values) / len(values)


def _printed_difference(paper: ModuleType, table: PaperTable, cell: Cell) -> float | None:
    """By how much the paper's number is above FT's; None where it prints none, or the cell is FT's."""
    if cell.key.row == paper.BASELINE or cell.printed is None or cell.printed.value is None:
        return None
    if cell.key.column == "change":
        return cell.printed.value if table.change_of == paper.BASELINE else None
    base = paper.printed()[table.number].get(cell.key._replace(row=paper.BASELINE))
    return cell.printed.value - base.value if base and base.value is not None else None


def _against(cell: Cell, base: Cell, printed: float, scores: Callable[[tuple[str, ...]], pd.Series]) -> Against | None:
    """The test of a cell's runs against FT's; None if they have too little in common.

    Args:
        base: the cell of FT. scores: takes the hashes of runs, and averages the cell's metric over its blocks and them
            as ``user_scores`` does.
    """
    common = {*cell.seeds} & {*base.seeds}
    if not common:
        return None
    first, second = (scores(tuple(name for name, seed in zip(of.records, of.seeds) if seed in common))
                     for of in (cell, base))
    users = first.index.intersection(second.index)
    if len(users) < 2:
        return None
    a, b = first[users].to_numpy(), second[users].to_numpy()
    test = compare_paired(a, b, draws=1)  # the t-test alone
    return Against(test.difference, test.p, test.n, detectable(float(np.std(a - b, ddof=1)), test.n), printed)


def _of_pilot(printed: Mapping[Key, Printed], cells: Iterable[Cell], users: int) -> dict[Key, Judged]:
    """Every printed number of a table of which pilots were run: all are open, and have no number of ours beside."""
    run = f"run as a pilot alone, of {users:,} users of each domain, whose numbers do not compare"
    judged = {}
    for cell in cells:
        if number := printed.get(cell.key):
            reason = cell.missing or run
            open_cell = Cell(cell.key, number.decimals, printed=number, missing=reason)
            judged[cell.key] = Judged(open_cell, Standing(OPEN, reason))
    return judged


def judge(paper: str, table: PaperTable, cells: Iterable[Cell], source: Source) -> dict[Key, Judged]:
    """The standing of every cell in which the paper prints something.

    Args:
        cells: of ``table``, as ``tables.build`` made them of ``source``.
    """
    if users := pilot_users(source):
        return _of_pilot(get(paper).printed()[table.number], cells, users)
    definitions, by_key = get(paper), {cell.key: cell for cell in cells}
    there = {run.head["dataset"] for run in source.runs}
    runs = {run.hash: run for run in source.runs}
    as_ft = {cell.key[:3] for cell in by_key.values() if cell.is_reference}

    @cache
    def scores(metric: str, blocks: tuple[int, ...], records: tuple[str, ...]) -> pd.Series:
        return user_scores([runs[name] for name in records], metric, blocks)
    judged = {}
    for key, cell in by_key.items():
        printed, against = _printed_difference(definitions, table, cell), None
        column = "avg" if key.column == "change" else key.column
        base = by_key.get(key._replace(row=definitions.BASELINE, column=column))
        head = runs[cell.records[0]].head if cell.records else {}
        blocks = blocks_behind(key, head["blocks"]) if head else ()
        if printed is not None and base and blocks:
            against = _against(cell, base, printed, partial(scores, key.metric, blocks))
        reason = IN_EFFECT if key[:3] in as_ft else "; ".join(
            known.text for known in definitions.KNOWN if known.holds(table.number, key))
        no_data = "" if key.dataset in there else definitions.WITHOUT_DATA.get(key.dataset, "")
        if decided := standing(cell, definitions.PRINTED_RUNS, against, reason, no_data):
            judged[key] = Judged(cell, decided, against)
    return judged


def rules(printed_runs: str) -> list[str]:
    """What the marks mean, as lines of Markdown.

    Args:
        printed_runs: of how many runs a printed number is the mean, in words.
    """
    return [
        f"- {MARKS[REPRODUCED]} **reproduced**: the printed number lies where the mean of r more runs of ours would "
        f"lie with {CONFIDENCE:.0%} probability, and near ours; r is how many runs are behind it ({printed_runs}). The "
        f"first means |paper - m| ≤ t(.975, n-1) s √(1/r + 1/n), with m and s the mean and standard deviation of our "
        f"n seeds, plus half a unit of the paper's last decimal. The second means |paper - m| ≤ {NEAR:.0%} of the "
        f"paper's number, or {NEAR_POINTS:g} points for changes in percent. N@20 is also reproduced within "
        f"{f'{SAME:g}'[1:]} of ours. Statistics of data have no seeds: equal at the printed decimals.",
        f"- {MARKS[DIRECTION]} **direction reproduced**: the number is not, but its row differs from FT in the "
        f"printed direction, p < {f'{LEVEL:g}'[1:]}. The test is the two-sided paired t-test over users, each averaged "
        f"over the cell's blocks and the seeds that both have. It is not corrected for the number of cells. Only "
        f"tables that have FT have directions.",
        f"- {MARKS[DIFFERS]} **not reproduced**: none of these, and outside the interval. What is known of the reason "
        f"is said. Only the spread between training seeds counts; the split of the data is the same for all. One "
        f"number in twenty would miss its interval by chance.",
        f"- {MARKS[OPEN]} **open**: inside the interval but not near, so that our seeds vary too much to tell; or "
        f"nothing to compare: no record, fewer than {MIN_SEEDS} seeds, seconds of another machine.",
        f"- {MARKS[NO_DATA]} **data not available**: no published run on the dataset.",
    ]
