"""Write the pages of ``results/pages`` from the published records: which printed numbers were reproduced.

    python results/make_pages.py            all pages, and the figure and the numbers of the page over all papers
    python results/make_pages.py fcucr      the pages of one paper

A page per paper and way of running it sets every printed number beside ours, with its standing (``standing.py``).
``standing.md`` is over all papers, and ``README.md`` the index. Statistics of datasets that are not on the machine are
those of ``standing.csv`` as it was. The pages of ``results/leaderboard`` are written anew too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterable, Iterator, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from fedcl_bench.cli import left_out
from fedcl_bench.cli.commands.tables import statistics_of
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.files import write_atomically
from fedcl_bench.core.text import for_csv, for_markdown
from fedcl_bench.experiments.papers import Key, PaperTable
from fedcl_bench.leaderboard import board
from fedcl_bench.reports.cells import DASH, Cell, Table
from fedcl_bench.reports.draw import GREY, PAGE, save, styled
from fedcl_bench.reports.render import ours, printed
from fedcl_bench.reports.notes import command, p_text
from fedcl_bench.reports.selection import DAGGER, Source, find
from fedcl_bench.reports.comparison import PairedTests
from fedcl_bench.reports.tables import averaged, build, measure, tests_of
from fedcl_bench.runs.registry import discover
from fedcl_bench.runs.specs import Tuned, seed_text
from fedcl_bench.records.store import Run, load_runs
from fedcl_bench.stats.significance import LEVEL

sys.path.insert(0, str(Path(__file__).parent))
from standing import (ABSENT, CLAIM_REPRODUCED, CLAIMS, DIFFERS, DIRECTION, FACTS, MARKS, MIN_SEEDS,  # noqa: E402
                      NO_DATA, OPEN, OPPOSITE, PAPERS, REPRODUCED, SMALLER, UNCLEAR, Contrast, Judged, Reading,
                      Standing, claim_standing, counted, half_width, judge, printed_lead, rules)

ROOT = Path(__file__).parents[1]
FOLDER = Path("results/pages")
COMMAND = "results/make_pages.py"


LEVEL_TEXT = ("A level says little of a method: the last two columns count, of the rows that the paper compares with "
              "another (FT, or the whole method where parts are left out or noise is added), how many levels are "
              "reproduced by the row's own number, and how many by the number of that other row put in its place. "
              "Numbers that several tables repeat are counted once, and words not at all.")


# The page of one paper


@dataclass(frozen=True)
class Page:
    """A page of one paper: its name, and which part of which reading it shows; all tables, datasets, backbones where
    none are named."""

    name: str
    paper: str
    folder: str
    tables: tuple[int, ...] = ()
    datasets: tuple[str, ...] = ()
    backbones: tuple[str, ...] = ()

    @property
    def reading(self) -> Reading:
        """The first reading of its records."""
        return next(reading for reading in FACTS[self.paper].readings if reading.folder == self.folder)


PAGES = (
    Page("reproduction-carried.md", "f3crec", "f3crec-carried", (2,), ("ml-100k", "ml-latest-small", "lastfm-2k"),
         ("fedncf", "pfedrec")),
    Page("reproduction-fcucr-tuned-server.md", "fcucr", "fcucr-tuned-server", (2,), ("xing",)),
    Page("reproduction-fcucr-tuned.md", "fcucr", "fcucr-tuned", (2,), ("xing",)),
    Page("reproduction-fcucr.md", "fcucr", "fcucr"),
    Page("reproduction-released.md", "f3crec", "f3crec-released", (3, 4, 5, 6, 7, 8), ("ml-100k",)),
    Page("reproduction.md", "f3crec", "f3crec"),
)


@dataclass(frozen=True)
class Part:
    """A table of the paper, rebuilt, with the standings of its cells."""

    table: PaperTable
    built: Table
    judged: Mapping[Key, Judged]


def _cell_text(cell: Cell | None, judged: Mapping[Key, Judged], reasons: dict[Standing, int]) -> str:
    """A cell in the form: mark, ours, (paper), difference, number of the reason."""
    if cell is None or cell.key not in judged:
        return "" if cell is None or cell.mean is None else f"{ours(cell)} (not printed)"
    standing = judged[cell.key].standing
    text = f"{MARKS[standing.kind]} {ours(cell)} ({printed(cell)})"
    if cell.mean is not None and cell.printed.value is not None:
        text += f" {cell.mean - cell.printed.value:+,.{cell.decimals}f}"
    if standing.reason:
        text += f" <sup>{reasons.setdefault(standing, len(reasons) + 1)}</sup>"
    return text


def _summary(paper: str, parts: Sequence[Part]) -> list[str]:
    lines = [_row(["table", "numbers", *MARKS, *LEVELS]), "|---|" + "--:|" * (1 + len(MARKS) + len(LEVELS))]
    for part in parts:
        judged = [each for each in part.judged.values() if counted(paper, part.table, each)]
        lines.append(_row([f"{part.built.number} {part.built.title}", *_counts(judged)]))
    return lines


# Of rows other than the one that they are compared with: reproduced by their own numbers, and by that row's.
LEVELS = ("other rows ✓", "✓ by the base's number")


def _counts(judged: Iterable[Judged]) -> list[int]:
    """How many numbers there are, how many of each standing in the order of ``MARKS``, and those of ``LEVELS``."""
    judged = list(judged)
    kinds = Counter(each.standing.kind for each in judged)
    others = [each for each in judged if each.base_kind]
    return [sum(kinds.values()), *(kinds[kind] for kind in MARKS),
            sum(each.standing.kind == REPRODUCED for each in others),
            sum(each.base_kind == REPRODUCED for each in others)]


def _leads(paper: str, part: Part, source: Source) -> list[str]:
    """Per dataset and backbone that has both: does the paper's method lead the baseline, and do the methods rank
    alike? Empty if no backbone has both."""
    definitions = PAPERS[paper]
    ours_, base = definitions.OURS, definitions.BASELINE
    names = f"{definitions.LABELS[ours_]} - {definitions.LABELS[base]}"
    lines = [f"| dataset | backbone | {names}: ours | paper | p over users | over seeds | users | seeds in which it leads | as in the "
             "paper | rank agreement |", "|---|---|--:|--:|--:|--:|--:|--:|---|---|"]
    table, cells, lead = part.table, {cell.key: cell for cell in part.built.cells()}, part.table.lead
    pairs = dict.fromkeys((key.dataset, key.backbone) for key in cells)
    for dataset, backbone in pairs:
        pair = [Key(dataset, backbone, row, lead.metric, lead.column) for row in (ours_, base)]
        if not cells.keys() >= {*pair}:
            continue
        compared = [key for key in cells if key.dataset == dataset and (key.backbone == backbone or not table.panels)
                    and (key.metric, key.column) == (lead.metric, lead.column)]
        theirs = {key: mean for key in compared if (mean := printed_lead(paper, table, key)) is not None}
        mine = {key: cells[key].mean for key in theirs if cells[key].mean is not None}
        line_start = f"| {definitions.LABELS[dataset]} | {definitions.LABELS[backbone]} |"
        expected = theirs[pair[0]] - theirs[pair[1]]
        if len(mine) >= 3:
            tau = float(stats.kendalltau([mine[key] for key in mine], [theirs[key] for key in mine]).statistic)
            agreement = f"τ {tau:+.2f} ({len(mine)} methods)"
        else:
            agreement = DASH
        runs = [{run.seed: run for run in find(source, table.row_spec(key.row, backbone, dataset))[0]}
                for key in pair if key in mine]
        common = sorted(set(runs[0]) & set(runs[1])) if len(runs) == 2 else []
        if not common:
            why = "no seed in common" if len(runs) == 2 else "no record"
            lines.append(f"{line_start} {DASH} | {expected:+.4f} | | | | | cannot be checked: {why} | {agreement} |")
            continue
        per_seed = [[measure(by_seed[seed], key) for seed in common] for by_seed, key in zip(runs, pair)]
        difference = (sum(per_seed[0]) - sum(per_seed[1])) / len(common)
        tests = tests_of(list(runs[0].values()), list(runs[1].values()), lead.metric)
        wins = sum(a > b for a, b in zip(*per_seed))
        same = as_printed(difference, expected, tests.users.p)
        lines.append(f"{line_start} {difference:+.4f} | {expected:+.4f} | {' | '.join(_p_texts(tests))} | "
                     f"{tests.users.n} | {wins} of {len(common)} | {same} | {agreement} |")
    return lines[2:] and lines


def as_printed(difference: float, expected: float, p: float) -> str:
    """Whether a difference of ours, with its p, has the sign of a paper's."""
    if difference * expected <= 0.0:
        return "**no**"
    return "**yes**" if p <= LEVEL else "sign only, not significant"


def _p_texts(tests: PairedTests) -> list[str]:
    """p over users and over seeds."""
    return [p_text(test.p) if test else DASH for test in (tests.users, tests.seeds)]


def _section(paper: str, part: Part, source: Source) -> list[str]:
    """One table, dataset by dataset and panel by panel, with commands and records."""
    definitions, table, built = PAPERS[paper], part.table, part.built

    def label(name: str) -> str:
        return definitions.label(table.number, name)

    def name(key: Key) -> str:
        """A line's name: its row, and its backbone if the part has several."""
        return label(key.row) + (f" on {label(key.backbone)}" if key.backbone and not table.panels else "")
    cells = {cell.key: cell for cell in built.cells()}
    lines = [f"## Table {table.number}: {built.title}", "", *(f"- {for_markdown(note)}" for note in built.notes),
             *(f"- {mark} {for_markdown(text)}" for mark, text in built.footnotes if mark == DAGGER), ""]
    several = len(table.metrics) > 1
    metrics_across = several and table.columns == ("value",)
    heads = [label(metric) for metric in table.metrics] if metrics_across else [label(name) for name in table.columns]
    stubs = ["", *(["metric"] if several and not metrics_across else [])]
    panels: dict[tuple[str, str], list[Cell]] = {}
    for key, cell in cells.items():
        panels.setdefault((key.dataset, key.backbone if table.panels else ""), []).append(cell)
    for (dataset, backbone), here in panels.items():
        counts = Counter(part.judged[cell.key].standing.kind for cell in here if cell.key in part.judged)
        title = " on ".join(filter(None, map(label, (dataset, backbone)))) if table.row_spec else label(dataset)
        words = ", ".join(f"{counts[kind]} {MARKS[kind]}" for kind in MARKS if counts[kind])
        lines += [f"### {title}", "", f"{words}.", ""]
        reasons: dict[Standing, int] = {}
        lines += [f"| {' | '.join([*stubs, *heads])} |", "|" + "---|" * len([*stubs, *heads])]
        across = [{"metric": name} for name in table.metrics] if metrics_across else [
            {"column": name} for name in table.columns]
        present = {(cell.key.backbone, cell.key.row) for cell in here}
        for combination in product(table.backbones, table.rows, table.metrics[:1] if metrics_across else table.metrics):
            if combination[:2] not in present:
                continue
            first = Key(dataset, *combination, table.columns[0])
            shown = [_cell_text(cells.get(first._replace(**names)), part.judged, reasons) for names in across]
            stub = [name(first) + (DAGGER if first.row in built.daggers else ""),
                    *([label(first.metric)] if len(stubs) > 1 else [])]
            lines.append(f"| {' | '.join([*stub, *shown])} |")
        lines += ["", *(f"- <sup>{i}</sup> {standing.kind.capitalize()}: {for_markdown(standing.reason)}."
                        for standing, i in reasons.items())]
        if table.row_spec:
            records = {name(cell.key): cell for cell in here if cell.records and cell.key.column != "change"}
            seeds = max((len(cell.seeds) for cell in here), default=0) or 5
            made_by = command(paper, table, source, seeds, [dataset], [backbone] if backbone else [])
            lines.append(f"- Command: `{made_by}`")
            lines += [f"- Records of {row} (seeds {seed_text(cell.seeds)}): "
                      f"{' '.join(name[:8] for name in cell.records)}" for row, cell in records.items()]
        lines.append("")
    return lines


def _contrast(definitions: ModuleType, contrast: Contrast, source: Source,
              datasets: Iterable[str]) -> list[str]:
    """The section that shows the values of a setting side by side; what has no record is named at its end."""
    label = definitions.LABELS.get
    metrics = [label(metric, metric) for metric in contrast.metrics]
    lines = [f"## {contrast.title}", "", *(line for text in contrast.text for line in (text, "")),
             *(f"- `{contrast.setting}={value}`: {meaning}" for value, meaning in contrast.values), ""]
    missing: dict[str, list[str]] = {}
    there = {run.head["dataset"] for run in source.runs}
    assignments = {name: value for name, value in source.assignments if name != contrast.setting}
    for dataset, backbone in product(datasets, contrast.backbones):
        if dataset not in there:
            missing[label(dataset)] = ["any line"]
            continue
        shown = []
        for value, _ in contrast.values:
            chosen = replace(source, assignments=((contrast.setting, value), *assignments.items()))
            runs_of = {row: find(chosen, definitions.row_spec(row, backbone, dataset))[0] for row in contrast.rows}
            for row, runs in runs_of.items():
                if runs:
                    shown.append(_contrast_line(contrast, value, label(row, row), runs, runs_of[contrast.rows[0]]))
                else:
                    missing.setdefault(f"{label(backbone)}, {label(dataset)}, {contrast.setting}={value}", []).append(
                        label(row, row))
        if shown:
            lines += [f"### {label(backbone)}, {label(dataset)}", "",
                      f"| {contrast.setting} | | {' | '.join(metrics)} | {metrics[0]} of "
                      f"{label(contrast.rows[0])} minus it | p over users | over seeds | seeds |",
                      "|---|---|" + "--:|" * len(metrics) + "--:|--:|--:|---|", *shown, ""]
    lines += [f"- No record of {', '.join(rows)} on {where}." for where, rows in missing.items()]
    return [*lines, ""] if missing else lines


def _contrast_line(contrast: Contrast, value: str, name: str, runs: Sequence[Run], first: Sequence[Run]) -> str:
    """The numbers of one line, and the tests of the contrast's first line against it."""
    cells = [averaged(Cell(Key(runs[0].meta["dataset"], runs[0].meta["backbone"], name, metric, "value"), 4), runs)
             for metric in contrast.metrics]
    tests = tests_of(first, runs, contrast.metrics[0]) if first != runs else None
    tested = [f"{tests.users.difference:+.4f}", *_p_texts(tests)] if tests else [DASH] * 3
    seeds = seed_text(run.seed for run in runs)
    return f"| {value} | {name} | {' | '.join(map(ours, cells))} | {' | '.join(tested)} | {seeds} |"


def paper_page(page: Page, source: Source) -> str:
    """A page of one paper as Markdown; the same records give the same characters."""
    paper, definitions, facts = page.paper, PAPERS[page.paper], FACTS[page.paper]
    tables = [definitions.TABLES[number] for number in page.tables or definitions.TABLES]
    datasets, backbones = page.datasets or tuple(definitions.DATASETS), page.backbones or None
    parts = [Part(table, built, judge(paper, table, built.cells(), source)) for table in tables
             if (built := build(paper, table, source, datasets, backbones))]
    runs = facts.printed_runs
    factors = ", ".join(f"{half_width(1.0, n, runs):.2f} s for n = {n}" for n in (3, 5, 10))
    used = {name for part in parts for cell in part.built.cells() for name in cell.records}
    machines = Counter(f"{run.meta['environment']['processor']}, torch {run.meta['environment']['torch']}, Python "
                       f"{run.meta['environment']['python']}" for run in source.runs if run.hash in used)
    made_on = "; ".join(f"{count} on {name}" for name, count in sorted(machines.items()))
    lines = [
        f"# Reproduction of {definitions.TITLE}", "", f"Generated by `{COMMAND}`; not to be edited.", "",
        f"{len(used)} runs: {made_on}.", "",
        "Every printed number stands beside ours: mark, our mean ± sample standard deviation over seeds, (the "
        "paper's), difference ours - paper.", "", *(line for text in facts.notes for line in (text, "")),
        *rules(f"here {runs}, so that the interval is {factors}"), "",
        "## Summary", "", LEVEL_TEXT, "", *_summary(paper, parts), ""]
    labels = definitions.LABELS
    for part in parts:
        if part.table.lead and (leads := _leads(paper, part, source)):
            lines += [f"## Does {labels[definitions.OURS]} lead {labels[definitions.BASELINE]}?", "",
                      f"{facts.about_lead} As in the paper: the difference has the paper's sign, and p over users is at "
                      f"most {LEVEL:g}. Rank agreement: Kendall's τ between the order of the methods here and in the "
                      f"paper.", "", *leads, ""]
    for contrast in facts.contrasts if source.tuned is None else ():  # settings are tuned under one of its values
        lines += _contrast(definitions, contrast, source, datasets)
    for part in parts:
        lines += _section(paper, part, source)
    return "\n".join(lines).rstrip("\n") + "\n"


# The page over all papers


@dataclass(frozen=True)
class Entry:
    """A printed number with its standing in one reading.

    Attributes:
        key: its place in the paper's table; rows that stand for one printed line share it.
    """

    paper: str
    table: PaperTable
    key: Key
    reading: Reading
    judged: Judged

    @property
    def decides(self) -> bool:
        """Whether there is a number of enough seeds; statistics have none."""
        cell = self.judged.cell
        return cell.mean is not None and (not cell.seeds or len(cell.seeds) >= MIN_SEEDS)


Tables = dict[tuple[str, int], Table]  # paper and number to the table


def entries(source_of: Callable[[Reading], Source], papers: Iterable[str] = PAPERS) -> tuple[list[Entry], Tables]:
    """Every cell of the papers' tables in every reading, in the order of these, and the tables of each's first one."""
    result, tables = [], {}
    for paper in papers:
        for reading in FACTS[paper].readings:
            source = source_of(reading)
            for number in reading.tables:
                table = PAPERS[paper].TABLES[number]
                built = build(paper, table, source)
                tables.setdefault((paper, number), built)
                for key, judged in judge(paper, table, built.cells(), source).items():
                    result.append(Entry(paper, table, _line(paper, key), reading, judged))
    return result, tables


def _line(paper: str, key: Key) -> Key:
    return key._replace(row=FACTS[paper].same_line.get(key.row, key.row))


def deciding(everything: Iterable[Entry]) -> list[Entry]:
    """One entry per printed number: the first that decides, or the first of all; in the order of tables."""
    places: dict[tuple, list[Entry]] = {}
    for entry in everything:
        places.setdefault((entry.paper, entry.table.number, entry.key), []).append(entry)
    chosen = [next((entry for entry in candidates if entry.decides), candidates[0]) for candidates in places.values()
              if counted(candidates[0].paper, candidates[0].table, candidates[0].judged)]
    return sorted(chosen, key=lambda entry: (list(PAPERS).index(entry.paper), entry.table.number))


def _name(paper: str) -> str:
    return PAPERS[paper].LABELS[PAPERS[paper].OURS]


def overview(everything: Sequence[Entry]) -> str:
    """The page as Markdown; the same records give the same characters."""
    chosen = deciding(everything)
    runs = ", ".join(f"{_name(paper)} {facts.printed_runs}" for paper, facts in FACTS.items())
    lines = [
        "# Standing of every printed number", "", f"Generated by `{COMMAND}`; not to be edited.", "",
        f"The tables of {len(FACTS)} papers print {len(chosen):,} numbers. Each has one of five standings here. "
        f"[standing.csv](standing.csv) has them one by one: printed, ours, standing and reason.", "",
        "![A square per printed number, coloured by its standing](standing.svg)", "", *rules(runs), "",
        "## Claims", "", *_claims(everything), "", "## Counts", "", LEVEL_TEXT, "", *_counted(chosen), "",
        "## Which runs decide", "",
        f"A paper can be read in several ways. These were run. A number is judged by the first reading, in the order "
        f"below, that has at least {MIN_SEEDS} seeds of it. The best of several is not taken: that would favour "
        f"agreement. The counts are those of each reading alone, of the numbers that it has.", "",
        *_by_reading(everything), "", "## Reasons", "", *_reasons(chosen)]
    return "\n".join(lines) + "\n"


def _row(words: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, words))} |"


def _counted(chosen: Sequence[Entry]) -> Iterator[str]:
    yield _row(["paper", "table", "numbers", *(f"{mark} {kind}" for kind, mark in MARKS.items()), *LEVELS])
    yield "|---|---|" + "--:|" * (1 + len(MARKS) + len(LEVELS))
    for paper, definitions in PAPERS.items():
        of_paper = [entry for entry in chosen if entry.paper == paper]
        for number, table in definitions.TABLES.items():
            yield _row([_name(paper), f"{number} {table.title}",
                        *_counts(entry.judged for entry in of_paper if entry.table.number == number)])
        yield _row([f"**{_name(paper)}**", "all", *_counts(entry.judged for entry in of_paper)])
    yield _row(["**all**", "all", *_counts(entry.judged for entry in chosen)])


def _by_reading(everything: Sequence[Entry]) -> Iterator[str]:
    yield _row(["paper", "reading", "records", "tables", "numbers", *MARKS.values(), *LEVELS])
    yield "|---|---|---|---|" + "--:|" * (1 + len(MARKS) + len(LEVELS))
    for paper, facts in FACTS.items():
        for reading in facts.readings:
            here = deciding(entry for entry in everything if entry.reading is reading)
            folder = f"`{reading.folder}`" if reading.folder else DASH
            yield _row([_name(paper), reading.title, folder, seed_text(reading.tables),
                        *_counts(entry.judged for entry in here if entry.judged.cell.mean is not None)])


def _reason(entry: Entry) -> str:
    """Why a number has its standing, as the table of reasons counts it."""
    cell, standing = entry.judged.cell, entry.judged.standing
    if standing.kind == DIFFERS and not standing.reason:
        return "not known"
    if standing.reason and standing.reason == cell.contradiction:
        return "the paper prints another number that contradicts it"
    if standing.reason == cell.missing:  # without the names of records and files
        return standing.reason.partition(";")[0].partition(" (")[0]
    return standing.reason


def _reasons(chosen: Sequence[Entry]) -> Iterator[str]:
    count = Counter((entry.judged.standing.kind, _name(entry.paper), _reason(entry)) for entry in chosen)
    yield _row(["standing", "paper", "reason, as far as it is known", "numbers"])
    yield "|---|---|---|--:|"
    order = list(MARKS)
    for (kind, paper, reason), number in sorted(count.items(), key=lambda item: (
            order.index(item[0][0]), item[0][1], -item[1], item[0][2])):
        if reason:
            yield _row([kind, paper, for_markdown(reason), number])


def _claims(everything: Sequence[Entry]) -> Iterator[str]:
    """What becomes of the differences that papers print: the rule, counts, and every one of them."""
    chosen: dict[tuple, Entry] = {}  # by the first reading that has it
    for entry in everything:
        if entry.judged.claim:
            chosen.setdefault((entry.paper, entry.table.number, entry.key), entry)
    yield ("A claim is a difference that a paper prints or implies: a method less FT, a method without a part less the "
           "whole, with noise less without. It is compared with the 95 % interval (Student's t) of our paired "
           "difference, once over users, each averaged over blocks and seeds, and once over seeds, each averaged over "
           "users: the first says what other users would make of it, the second what other seeds would.")
    yield ""
    yield from (f"- **{name}**: {text}" for name, text in (
        (CLAIM_REPRODUCED, "the interval lies on the printed side of zero and reaches the printed difference;"),
        (SMALLER, "it lies on the printed side of zero and does not reach the printed difference;"),
        (ABSENT, "it holds zero and not the printed difference;"), (OPPOSITE, "it lies on the other side of zero;"),
        (UNCLEAR, "it holds both zero and the printed difference. The minimum detectable difference is what the "
                  "two-sided paired t-test at .05 finds with probability .8 (`fedcl_bench/stats/significance.py`).")))
    yield ""
    yield _row(["paper", "table", "claims", *(f"{name}, by {unit}" for unit in ("users", "seeds") for name in CLAIMS)])
    yield "|---|---|" + "--:|" * (1 + 2 * len(CLAIMS))
    for paper, definitions in PAPERS.items():
        for number in FACTS[paper].claims:
            here = [entry for entry in chosen.values() if (entry.paper, entry.table.number) == (paper, number)]
            kinds = [Counter(_claim_kinds(entry)[place] for entry in here) for place in (0, 1)]
            yield _row([_name(paper), f"{number} {definitions.TABLES[number].title}", len(here),
                        *(of_unit[name] for of_unit in kinds for name in CLAIMS)])
    yield ""
    yield _row(["paper, table", "dataset, backbone", "claim", "printed", "ours", "by users", "p", "detectable",
                "by seeds", "p", "seeds", "standing by users", "by seeds"])
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|---|"
    for entry in chosen.values():
        cell, claim, definitions = entry.judged.cell, entry.judged.claim, PAPERS[entry.paper]
        label = partial(definitions.label, entry.table.number)
        tested = [text for found in (claim.by_user, claim.by_seed) for text in (
            f"{found.low:+.4f} to {found.high:+.4f}", p_text(found.p),
            *([f"{found.detectable:.4f}"] if found is claim.by_user else []))]
        yield _row([f"{_name(entry.paper)} {entry.table.number}",
                    f"{label(cell.key.dataset)}, {label(cell.key.backbone)}",
                    f"{label(cell.key.row)} - {label(claim.base)}", f"{claim.printed:+.4f}",
                    f"{claim.by_user.mean:+.4f}", *tested, claim.by_seed.n, *_claim_kinds(entry)])


def _claim_kinds(entry: Entry) -> tuple[str, str]:
    """What becomes of an entry's claim by the interval over users, and over seeds."""
    claim = entry.judged.claim
    by_user, by_seed = (claim_standing(claim.printed, claim.rounding, found)
                        for found in (claim.by_user, claim.by_seed))
    return by_user, by_seed


def numbers(chosen: Iterable[Entry]) -> str:
    """One line of CSV per printed number; six decimals, and empty what there is not."""
    lines = []
    for entry in chosen:
        cell, standing, against = entry.judged.cell, entry.judged.standing, entry.judged.against
        reading = entry.reading.title if cell.mean is not None else ""
        tests = (against.difference, against.p, str(against.users), against.detectable, against.printed) \
            if against else [None] * 5
        claim = entry.judged.claim
        lines.append([entry.paper, entry.table.number, *entry.key, cell.printed.text, cell.mean, cell.std,
                      seed_text(cell.seeds), standing.kind, entry.judged.base_kind, for_csv(standing.reason), reading,
                      *tests, claim and claim.by_seed.p])
    return pd.DataFrame(lines, columns=[
        "paper", "table", "dataset", "backbone", "row", "metric", "column", "printed", "ours", "std", "seeds",
        "standing", "base_standing", "reason", "reading", "difference", "p", "users", "detectable",
        "printed_difference", "seed_p"]).to_csv(
            index=False, float_format="%.6f", lineterminator="\n")


# Its figure: a square per printed number, all papers side by side


@dataclass(frozen=True)
class Band:
    """The squares of one table, or of one of its panels.

    Attributes:
        columns: their labels.
        rows: label of a row to dataset to the kind of standing of every square; None where the table prints nothing.
    """

    title: str
    columns: list[str]
    rows: dict[str, dict[str, list[str | None]]]


UNIT = 0.1  # inches from square to square
_LETTER, _BOLD = 0.57, 0.66  # units a letter is wide, at most on average
# Colours of Okabe and Ito, which colour-blind readers can tell apart; the marks and the greys say the same without.
_COLORS = {REPRODUCED: "#0072B2", DIRECTION: "#56B4E9", DIFFERS: "#D55E00", OPEN: "#D0D0D0", NO_DATA: "#FFFFFF"}
_SIGNS = {DIRECTION: "^", DIFFERS: "x"}


def _bands(paper: str, tables: Tables, kinds: dict[tuple, str]) -> Iterator[Band]:
    """The bands of a paper; rows and columns without a printed number are left out, and what is drawn leaves
    ``kinds``, as several rows may stand for one printed line."""
    for number in PAPERS[paper].TABLES:
        built = tables[paper, number]
        for panel in built.panels:
            rows: dict[str, dict[str, list[str | None]]] = {}
            for line in panel.lines:
                dataset, *names = line.labels
                here = [cell and kinds.pop((paper, number, _line(paper, cell.key)), None) for cell in line.cells]
                if any(here):
                    rows.setdefault(" ".join(names), {})[dataset] = here
            every = [here for of_row in rows.values() for here in of_row.values()]
            kept = [i for i in range(len(built.heads)) if any(here[i] for here in every)]
            title = f"{number} {built.title}" + (f", {panel.title}" if len(built.panels) > 1 else "")
            if kept:
                yield Band(title, [built.heads[i] for i in kept], {
                    name: {dataset: [here[i] for i in kept] for dataset, here in of_row.items()}
                    for name, of_row in rows.items()})


@styled
def figure(chosen: Sequence[Entry], tables: Tables) -> Figure:
    """A square per printed number, with a legend below."""
    kinds = {(entry.paper, entry.table.number, entry.key): entry.judged.standing.kind for entry in chosen}
    places: dict[str, list[tuple[float, float]]] = {kind: [] for kind in MARKS}
    words: list[tuple[float, float, str, dict]] = []
    left, depth = 0.5, 0.0
    for paper in dict.fromkeys(entry.paper for entry in chosen):
        width, down = _place(paper, list(_bands(paper, tables, kinds)), left, places, words)
        left, depth = left + width + 2.0, max(depth, down + 3.5)
    inches = max(PAGE, (left - 1.5) * UNIT)
    drawn = Figure(figsize=(inches, depth * UNIT))
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, inches / UNIT), ylim=(depth, 0))
    axes.axis("off")
    for x, y, text, style in words:
        axes.text(x, y, text, **style)
    side, keys = 0.8 * UNIT * 72, []
    for kind, points in places.items():
        edge = GREY if kind == NO_DATA else _COLORS[kind]
        if points:
            axes.scatter(*zip(*points), s=side ** 2, marker="s", facecolor=_COLORS[kind], linewidths=0.4,
                         edgecolor=edge, gid=kind.replace(" ", "-"))
        if points and kind in _SIGNS:
            axes.scatter(*zip(*points), s=(0.5 * side) ** 2, marker=_SIGNS[kind], color="white", linewidths=0.7)
        keys.append(Line2D([], [], linestyle="", marker="s", markersize=side, color=_COLORS[kind], markeredgewidth=0.4,
                           markeredgecolor=edge, label=f"{len(points)} {kind}"))
    drawn.legend(handles=keys, loc="lower center", ncols=len(keys), handletextpad=0.2, columnspacing=1.5)
    return drawn


def _place(paper: str, bands: Sequence[Band], left: float, places: Mapping[str, list],
           words: list) -> tuple[float, float]:
    """Add the places of a paper's squares and words, in units from the top left; returns how wide and deep it is."""
    datasets = list(PAPERS[paper].DATASETS.values())
    stub = _LETTER * max(len(row) for band in bands for row in band.rows) + 0.8
    step = max(len(band.columns) for band in bands) + 0.7  # from dataset to dataset
    starts = {name: left + stub + i * step for i, name in enumerate(datasets)}
    words.append((left, 1.0, PAPERS[paper].TITLE, dict(fontsize=8.5, fontweight="bold", va="center")))
    y = 3.0 + 0.3 * max(map(len, datasets))
    words += [(start + 0.2, y, name, dict(rotation=35, rotation_mode="anchor", va="bottom"))
              for name, start in starts.items()]
    before: list[str] = []
    for band in bands:
        y += 1.5
        words.append((left, y, band.title, dict(fontweight="bold", va="center")))
        if band.columns != before and any(band.columns):
            first = min(starts[dataset] for of_row in band.rows.values() for dataset in of_row)
            y += 0.62 * max(map(len, band.columns)) + 0.4
            words += [(first + i + 0.5, y, name, dict(rotation=90, ha="center", va="bottom"))
                      for i, name in enumerate(band.columns)]
            y -= 0.5
        before, y = band.columns, y + 1.2
        for row, of_row in band.rows.items():
            words.append((left + stub - 0.3, y, row, dict(ha="right", va="center")))
            for dataset, kinds in of_row.items():
                for i, kind in enumerate(kinds):
                    if kind:
                        places[kind].append((starts[dataset] + i + 0.5, y))
            y += 1.0
    return max(stub + len(datasets) * step, _BOLD * max(len(band.title) for band in bands)), y


# The index, and the files


def index(folder: Path) -> str:
    """The index of a folder's pages as Markdown: what each is about, and the standings of its printed numbers."""
    lines = ["# Generated pages", "", f"Written by `python {COMMAND}` and `python tools/probe_recbole.py`, this index "
             "included; not to be", "edited.", "", "## Printed numbers beside ours", "",
             "A page has every number that a paper's tables print, our number beside it, and one of five marks for its "
             "standing. The", "page says how each is decided.", "",
             f"| page | paper | records | settings | changed | numbers | {' | '.join(MARKS.values())} | reproduced |",
             "|---|---|---|---|---|" + "--:|" * (len(MARKS) + 2)]
    for page in PAGES:
        text = (folder / page.name).read_text(encoding="utf-8")
        summary = text.partition(f"{LEVEL_TEXT}\n\n")[2].partition("\n\n")[0]
        rows = [[int(cell) for cell in row.strip("|").split("|")[2:2 + len(MARKS)]]
                for row in summary.splitlines()[2:]]
        counts = [sum(column) for column in zip(*rows)]
        changed = ", ".join(f"`{name}={value}`" for name, value in page.reading.settings)
        lines.append(_row([f"[{page.name.removesuffix('.md')}]({page.name})", PAPERS[page.paper].TITLE,
                           f"`{page.folder}`", "released" if page.reading.tuned is None else "tuned", changed or DASH,
                           sum(counts), *counts, f"{counts[0] / sum(counts):.0%}"]))
    legend = ", ".join(f"{mark} {kind}" for kind, mark in MARKS.items())
    (models,) = re.findall(r"^\d+ general and \d+ sequential models can be used: .*$",
                           (folder / "recbole-models.md").read_text(encoding="utf-8"), re.MULTILINE)
    return "\n".join([
        *lines, "", f"{legend}. Reproduced: ✓ among all numbers.", "",
        "[All papers on one page](standing.md): a square per number, reasons, and which differences could have been "
        "seen.", "", "## RecBole's models", "",
        f"[Which of RecBole's models can be backbones](recbole-models.md): {models}"]) + "\n"


def _statistics(folder: Path, settings: Mapping) -> Callable[[str], Mapping[str, list[float]]]:
    """Dataset to its statistics: of its files, or as ``standing.csv`` has them."""
    def of(dataset: str) -> Mapping[str, list[float]]:
        try:
            return statistics_of(dataset, None, settings)
        except UserError:
            kept = pd.read_csv(folder / "standing.csv", keep_default_na=False)
            kept = kept[(kept["dataset"] == dataset) & (kept["backbone"] == "") & (kept["ours"] != "")]
            if kept.empty:
                raise
            return {row: lines["ours"].astype(float).tolist() for row, lines in kept.groupby("row", sort=False)}
    return of


def source_of(reading: Reading) -> Source:
    """The published records of a reading, with its settings."""
    tuned = None
    if reading.tuned is not None:
        folder = Path("results/tuned") / reading.tuned
        tuned = Tuned((folder,), ("--tuned", str(folder)))
    runs = load_runs(Path("results/published") / reading.folder, left_out()) if reading.folder else []
    return Source(runs, discover(), tuned, reading.settings, _statistics(FOLDER, dict(reading.settings)))


def write(path: Path, text: str) -> None:
    """Write a page and say so."""
    write_atomically(path, text.encode())
    print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages; from the repository's folder."""
    parser = argparse.ArgumentParser(description="Write results/pages from the published records.")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"only the pages of these: {', '.join(PAPERS)}")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    for paper in args.papers:
        if paper not in PAPERS:
            parser.error(f"found '{paper}', accepted: {', '.join(PAPERS)}")
    for page in PAGES:
        if page.paper in (args.papers or PAPERS):
            write(args.out / page.name, paper_page(page, source_of(page.reading)))
    if not args.papers:
        everything, tables = entries(source_of)
        chosen = deciding(everything)
        write(args.out / "standing.csv", numbers(chosen))
        write(args.out / "standing.md", overview(everything))
        save(figure(chosen, tables), args.out / "standing.svg")
        print(args.out / "standing.svg")
    write(args.out / "README.md", index(args.out))
    if args.out == FOLDER:
        print(*board.write_pages(Path("results/leaderboard")), sep="\n")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
