"""The standing of every printed number: what became of it when the paper's runs were made again.

One rule decides a cell, on the pages of a paper and on the page over all papers. What it needs to know of a paper
beside its tables is in ``FACTS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from fedcl_bench.experiments import papers
from fedcl_bench.experiments.papers import Key, PaperTable, fcucr
from fedcl_bench.reports.cells import SECONDS, Cell
from fedcl_bench.reports.selection import Source
from fedcl_bench.reports.tables import blocks_behind
from fedcl_bench.records.store import user_scores
from fedcl_bench.stats.significance import LEVEL, compare_paired, detectable

PAPERS = {name: papers.get(name) for name in papers.PAPERS}


@dataclass(frozen=True)
class Reading:
    """One way in which a paper's runs were made again, and where their records were published.

    Attributes:
        title: what is special about it, in words.
        folder: of its records, in ``results/published``; empty for statistics of data, which need no runs.
        tables: the numbers of those that it has runs of.
        tuned: the folder of its tuned settings below ``results/tuned``, which empty text names itself; None for the
            plugins' and datasets' defaults.
        settings: what all of its runs were set to, as on a command line.
    """

    title: str
    folder: str
    tables: tuple[int, ...]
    tuned: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Known:
    """What is known of why numbers come out otherwise than printed. Only what was found, or is not in the paper.

    Attributes:
        text: part of a sentence.
        tables, datasets, backbones, rows: of the cells that it is about; empty for any.
    """

    text: str
    tables: tuple[int, ...] = ()
    datasets: tuple[str, ...] = ()
    backbones: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def holds(self, table: int, key: Key) -> bool:
        """Whether it is about a cell."""
        about = ((self.tables, table), (self.datasets, key.dataset), (self.backbones, key.backbone),
                 (self.rows, key.row))
        return all(not names or name in names for names, name in about)


@dataclass(frozen=True)
class Contrast:
    """A setting whose values are shown side by side on a paper's page, because the numbers hang on it.

    Attributes:
        setting, values: its name, and each value with what it means.
        backbones, rows, metrics: of the runs shown; rows as in ``PaperTable``. The first row is what the others are
            tested against, on the first metric.
        text: paragraphs above the numbers.
    """

    title: str
    setting: str
    values: tuple[tuple[str, str], ...]
    backbones: tuple[str, ...]
    rows: tuple[str, ...]
    metrics: tuple[str, ...]
    text: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What the pages tell of a paper beside its tables.

    Attributes:
        printed_runs: how many runs a printed number is the mean of; 1 where the paper does not say.
        readings: the first that has a number of a cell decides its standing.
        known: why numbers come out otherwise.
        lead: the columns whose mean is the paper's number by which it compares its methods; not ``Lead.column`` where
            it prints wrong means. about_lead: what is compared, in sentences.
        without_data: dataset to why no run on it was published.
        same_line: row to the row that stands for the same printed line.
        bases: table to the row that its other rows are compared with in what the paper claims; FT where none is named.
        claims: the tables whose differences are claims.
        repeats: table to the rows in which it prints again what an earlier table has.
        notes: on data, above the tables of its pages.
        contrasts: sections of its pages.
    """

    printed_runs: int
    readings: tuple[Reading, ...]
    known: tuple[Known, ...]
    lead: tuple[str, ...]
    about_lead: str
    without_data: Mapping[str, str] = field(default_factory=dict)
    same_line: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[int, str] = field(default_factory=dict)
    claims: tuple[int, ...] = ()
    repeats: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    contrasts: tuple[Contrast, ...] = ()


_METRICS = ("hit@10", "ndcg@10", "all:hit@10", "all:ndcg@10")
_STARTS = (("per_client", "every client has its own random start (the released code)"),
           ("server", "all clients start from the server's (Algorithm 1 of the paper)"))
_CONTRASTS = (Contrast(
    "What the start of φ does", "init", _STARTS,
    tuple(fcucr.BACKBONES), (fcucr.OURS, "without=tasd", "without=iupr", "without=both", fcucr.BASELINE), _METRICS,
    ("The released code lets every client draw its own start of the representation module φ, the item table included, "
     "and the server's start is never sent out; Algorithm 1 of the paper sends it. The mean of N independent starts is "
     "√N times smaller than each of them (XING, 877 clients: 29.6 times). So with starts of their own the first "
     "average leaves an item row that no client has touched √N times smaller than it would be after a common start, "
     "and the item's score, an inner product with the row, shrinks alike. In rows that clients trained on, what the "
     "training added to the average stands out against the small remainder. Matrices of φ shrink in the same way; "
     "biases and layer normalisations start equal at all clients.",
     "Sampled items are drawn alike from all items, most of which few clients train on (XING has 2.9 training "
     "interactions per item). Among 100 of them it can then be enough to tell items that were trained on much from "
     "items that were not, which needs no knowledge of the user. A list of all items contains every item that was "
     "trained on, and among those this tells nothing apart. So each line is shown with both starts and with both "
     "rankings; what differs between the starts, all else being equal, is owed to the start.",
     "p: two-sided paired t-test over users of FCUCR against the line, HR@10, each user averaged over the seeds both "
     "have.")), Contrast(
    "What the start does to backbones of whole sessions", "init", _STARTS, tuple(fcucr.WHOLE_SESSIONS),
    (fcucr.BCE, fcucr.BASELINE), _METRICS,
    ("DMI-GNN, HearInt and MiaSRec score by the direction of an item's row and not by its length. What is said above "
     "of rows that no client has touched does not hold for them: such a row scores as high as its direction says.",
     "p: as above, of the line with one negative against cross-entropy over all items.")))

_START = ("init", "server")
FACTS = {
    "f3crec": Facts(
        1, (
            Reading("the data", "", (1,)),
            Reading("released settings", "f3crec-released", (3, 4, 5, 6, 7, 8)),
            Reading("settings tuned on validation", "f3crec", (2, 3, 4, 5, 6, 7), tuned=""),
            Reading("the same with private parameters carried over", "f3crec-carried", (2,), tuned="carried",
                    settings=(("reset_private", "false"),)),
            Reading("released settings and split file", "f3crec-authors-split", (2,),
                    settings=(("split_file", "splits/ml-100k.f3crec_authors.tsv"),))),
        (Known("the code of RLP2 and SPP was never released, so ours are re-implementations from the description",
               rows=("rlp2", "spp")),),
        ("D1", "D2", "D3"), "N@20, mean over D1-D3. Paper: the mean of its printed D1-D3. p: two-sided paired t-test "
        "over users, each averaged over D1-D3 and the seeds both have.",
        {"hetrec2011-ml": "no published run on HetRec2011: its file was not on the machine"},
        bases={3: "f3crec", 6: "f3crec", 8: "f3crec"}, claims=(2, 3, 6, 8),
        repeats={3: ("ft", "f3crec"), 6: ("ft", "f3crec"), 8: ("f3crec",)},
        notes=("Last.FM 2K: the file with times was rebuilt from the days in the publisher's other file; 3,531 rows, "
               "all in the last block, have a made-up time of day.",)),
    "fcucr": Facts(
        5, (
            Reading("the data", "", (1,)),
            Reading("the released code's choices", "fcucr", (2, 3, 4, 5), settings=(("patience", 0),)),
            Reading("the same with a common start", "fcucr", (2, 3), settings=(("patience", 0), _START)),
            Reading("settings tuned on validation", "fcucr-tuned", (2,), "fcucr", (("patience", 5),)),
            Reading("settings tuned with a common start", "fcucr-tuned-server", (2,), "fcucr-server",
                    (("patience", 5), _START))),
        (Known("the paper counts before items are left out that nobody trains on; the authors' file has no trace of "
               "these", tables=(1,), datasets=("xing",)),
         Known("the paper prints no settings of this baseline, so ours may be others", tables=(2,),
               backbones=tuple(fcucr.STATIC)),
         Known("the paper does not say with which loss it trained this baseline; ours has one negative", tables=(2,),
               backbones=tuple(fcucr.WHOLE_SESSIONS), rows=(fcucr.BCE,))),
        ("value",), "HR@10. p: two-sided paired t-test over users, each averaged over the seeds both have. All lines "
        "of a dataset are ranked together.",
        {name: f"no published run on {fcucr.DATASETS[name]}: the paper does not say which of its users and sessions it "
               f"keeps" for name in ("retailrocket", "lastfm-1k", "tmall")},
        {fcucr.BCE: fcucr.BASELINE}, bases={3: fcucr.OURS, 4: fcucr.OURS, 5: fcucr.OURS}, claims=(2, 3),
        repeats=dict.fromkeys((3, 4, 5), (fcucr.OURS,)), contrasts=_CONTRASTS),
    "ffmsr": Facts(  # a pilot's numbers stand beside none of the paper's, so its cells are open
        1, (
            Reading("the data", "", (2,)),
            Reading("a pilot of 2,000 users of each domain", "ffmsr-pilot", (3, 4, 5, 6, 7), settings=(
                ("pilot_users", 2000), ("pilot_core", 2), ("dim", 64), ("max_length", 20), ("lr", 0.003),
                ("rounds", 20), ("patience", 5)))),
        (Known("the released code chooses the tested round by the test; ours by the validation", tables=(3, 4, 6, 7)),
         Known("the shipped files are cut at histories of 51 interactions", tables=(2,),
               rows=("interactions", "average_length")),
         Known("the paper's 684,837 interactions and mean length of 7.84 belong to 87,346 users, as in the shipped "
               "file", tables=(2,), datasets=("amazon-office+amazon-arts",), rows=("users",))),
        ("D0", "D1"), "R@10, mean of the two domains. p: two-sided paired t-test over the users of both, each averaged "
        "over the seeds both have. All lines of a dataset are ranked together."),
}


# The rule

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
        detectable: the difference that the test would have found with probability .8 (``stats.significance``).
        printed: the paper's difference; in a cell of changes in percent, that change.
    """

    difference: float
    p: float
    users: int
    detectable: float
    printed: float


@dataclass(frozen=True)
class Claim:
    """A difference that a paper prints between a row and another, and ours: a row less its base, paired.

    Attributes:
        base: the row that it is compared with.
        printed: the paper's difference; rounding: the most that the rounding of its two numbers makes.
        by_user: differences of users, each averaged over the cell's blocks and the seeds that both have; by_seed: of
            seeds, each averaged over users.
    """

    base: str
    printed: float
    rounding: float
    by_user: Interval
    by_seed: Interval


@dataclass(frozen=True)
class Judged:
    """A cell with its standing, and its comparison with FT where there is one.

    Attributes:
        base_kind: the standing that the number of the row that it is compared with would have in its place; empty where
            there is none.
        claim: the difference that it claims.
    """

    cell: Cell
    standing: Standing
    against: Against | None = None
    base_kind: str = ""
    claim: Claim | None = None


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


# Claims

CLAIM_REPRODUCED, SMALLER, ABSENT, OPPOSITE, UNCLEAR = CLAIMS = (
    "reproduced", "smaller", "absent", "opposite", "cannot tell")


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a mean difference, of Student's t.

    Attributes:
        n: how many units there are; p: of the two-sided paired t-test; detectable: see ``Against``.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float
    detectable: float

    @classmethod
    def of(cls, differences: NDArray[Any]) -> "Interval":
        """Of the differences of at least two units."""
        n, deviation = len(differences), float(np.std(differences, ddof=1))
        mean, half = float(np.mean(differences)), float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * deviation / n ** 0.5
        test = compare_paired(differences, np.zeros(n), draws=1)
        return cls(mean, mean - half, mean + half, n, test.p, detectable(deviation, n))


def claim_standing(printed: float, rounding: float, found: Interval) -> str:
    """One of ``CLAIMS``: what an interval of ours says of a printed difference."""
    sign = 1.0 if printed >= 0.0 else -1.0
    low, high = sorted((sign * found.low, sign * found.high))
    reached = high >= abs(printed) - rounding
    if low <= 0.0 <= high:
        return UNCLEAR if reached and low <= abs(printed) + rounding else ABSENT
    if high < 0.0:
        return OPPOSITE
    return CLAIM_REPRODUCED if reached else SMALLER


def counted(paper: str, table: PaperTable, judged: Judged) -> bool:
    """Whether a printed number is counted: once if tables repeat it, and not if it is no number."""
    cell = judged.cell
    return cell.printed.value is not None and cell.key.row not in FACTS[paper].repeats.get(table.number, ())


def printed_lead(paper: str, table: PaperTable, key: Key) -> float | None:
    """The paper's number of a row by which its methods are compared."""
    values = [PAPERS[paper].printed()[table.number][key._replace(column=column)].value for column in FACTS[paper].lead]
    return None if None in values else sum(values) / len(values)


def _printed_difference(paper: str, table: PaperTable, cell: Cell) -> float | None:
    """By how much the paper's number is above FT's; None where it prints none, or the cell is FT's."""
    baseline = PAPERS[paper].BASELINE
    if cell.key.row == baseline or cell.printed is None or cell.printed.value is None:
        return None
    if cell.key.column == "change":
        return cell.printed.value if table.change_of == baseline else None
    base = PAPERS[paper].printed()[table.number].get(cell.key._replace(row=baseline))
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


def _of_pilot(paper: str, table: PaperTable, cells: Iterable[Cell], users: int) -> dict[Key, Judged]:
    """Every printed number of a table of which pilots were run: all are open, and have no number of ours beside."""
    run = f"run as a pilot alone, of {users:,} users of each domain, whose numbers do not compare"
    judged = {}
    for cell in cells:
        if number := PAPERS[paper].printed()[table.number].get(cell.key):
            reason = cell.missing or run
            open_cell = Cell(cell.key, number.decimals, printed=number, missing=reason)
            judged[cell.key] = Judged(open_cell, Standing(OPEN, reason))
    return judged


def judge(paper: str, table: PaperTable, cells: Iterable[Cell], source: Source) -> dict[Key, Judged]:
    """The standing of every cell in which the paper prints something.

    Args:
        cells: of ``table``, as ``tables.build`` made them of ``source``.
    """
    if users := source.pilot_users:
        return _of_pilot(paper, table, cells, users)
    facts, by_key = FACTS[paper], {cell.key: cell for cell in cells}
    there = {run.head["dataset"] for run in source.runs}
    runs = {run.hash: run for run in source.runs}
    as_ft = {cell.key[:3] for cell in by_key.values() if cell.is_reference}

    @cache
    def scores(metric: str, blocks: tuple[int, ...], records: tuple[str, ...]) -> pd.Series:
        return user_scores([runs[name] for name in records], metric, blocks)
    judged = {}
    for key, cell in by_key.items():
        printed, against = _printed_difference(paper, table, cell), None
        column = "avg" if key.column == "change" else key.column
        base = by_key.get(key._replace(row=PAPERS[paper].BASELINE, column=column))
        blocks = blocks_behind(key, runs[cell.records[0]].head["blocks"]) if cell.records else ()
        if printed is not None and base and blocks:
            against = _against(cell, base, printed, partial(scores, key.metric, blocks))
        reason = IN_EFFECT if key[:3] in as_ft else "; ".join(
            known.text for known in facts.known if known.holds(table.number, key))
        no_data = "" if key.dataset in there else facts.without_data.get(key.dataset, "")
        if decided := standing(cell, facts.printed_runs, against, reason, no_data):
            other = by_key.get(key._replace(row=facts.bases.get(table.number, PAPERS[paper].BASELINE)))
            judged[key] = Judged(cell, decided, against, _base_kind(cell, other, facts.printed_runs))
            if blocks and _claims(paper, table, key) and other and other.mean is not None:
                claim = _claim(paper, table, cell, other, partial(scores, key.metric, blocks))
                judged[key] = replace(judged[key], claim=claim)
    return judged


def _base_kind(cell: Cell, other: Cell | None, printed_runs: int) -> str:
    """The standing of another row's number in a cell's place; empty for a row beside itself, for changes and where one
    of them has no number."""
    if other is None or other.key == cell.key or None in (cell.mean, other.mean) or cell.key.column == "change":
        return ""
    there = standing(replace(other, printed=cell.printed, decimals=cell.decimals), printed_runs)
    return there.kind if there else ""


def _claims(paper: str, table: PaperTable, key: Key) -> bool:
    """Whether a cell has the number by which a table's rows are compared, and is not the row itself that they are
    compared with, nor FT in an ablation."""
    facts, baseline = FACTS[paper], PAPERS[paper].BASELINE
    column = "avg" if "avg" in table.columns else "value"
    return (table.number in facts.claims and (key.metric, key.column) == (table.metrics[0], column)
            and key.row not in (facts.bases.get(table.number, baseline), baseline))


def _claim(paper: str, table: PaperTable, cell: Cell, other: Cell,
           scores: Callable[[tuple[str, ...]], pd.Series]) -> Claim | None:
    """What a cell claims of another; None if the paper prints one of them not, or they have fewer than ``MIN_SEEDS``
    seeds in common. ``scores``: as of ``_against``."""
    if table.lead:
        numbers = [printed_lead(paper, table, each.key) for each in (cell, other)]
    else:
        numbers = [each.printed and each.printed.value for each in (cell, other)]
    first, second = (dict(zip(each.seeds, each.records)) for each in (cell, other))
    common = sorted(first.keys() & second.keys())
    if None in numbers or len(common) < MIN_SEEDS:
        return None
    by_seed = pd.DataFrame({seed: scores((first[seed],)) - scores((second[seed],)) for seed in common}).dropna()
    return Claim(other.key.row, numbers[0] - numbers[1], 10.0 ** -cell.decimals,
                 Interval.of(by_seed.mean(axis=1).to_numpy()), Interval.of(by_seed.mean().to_numpy()))


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
