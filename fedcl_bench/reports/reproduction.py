"""The reproduction page: every printed number of a paper beside ours, and whether they agree."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Iterable, Sequence

from scipy import stats

from ..experiments.papers import Contrast, Key, PaperTable, get
from ..names import for_markdown
from ..runs.run import Run
from ..runs.specs import seed_text
from .render import ours, printed
from .tables import (DAGGER, DASH, SECONDS, Cell, Source, Table, averaged, build, command, find, measure, p_text,
                     user_test)

CONFIDENCE = 0.95
MIN_SEEDS = 3
# How near a number inside the interval must be: a share of the paper's, or points for changes in percent. Beyond that
# the interval is too wide to speak of a reproduction.
NEAR, NEAR_POINTS = 0.1, 5.0
MARKS = {"reproduced": "✓", "inconclusive": "~", "higher": "▲", "lower": "▼", "unchecked": "?"}


@dataclass(frozen=True)
class Status:
    """What became of one printed number.

    Attributes:
        kind: ``reproduced``; ``inconclusive``: far, but inside our interval; ``higher`` or ``lower``: ours differs; or
            ``unchecked``.
        reason: why it cannot be checked.
    """

    kind: str
    reason: str = ""


def half_width(std: float, seeds: int, printed_runs: int = 1) -> float:
    """Half the width of the interval in which the mean of m more runs lies with 95 % probability, if runs with other
    seeds are normal: t(.975, n - 1) s sqrt(1/m + 1/n)."""
    return (float(stats.t.ppf(0.5 + CONFIDENCE / 2, seeds - 1)) * std
            * math.sqrt(1.0 / printed_runs + 1.0 / seeds))


def status(cell: Cell, printed_runs: int = 1) -> Status | None:
    """Whether a cell is reproduced; None if the paper prints nothing there.

    Args:
        printed_runs: how many runs the printed number is the mean of.
    """
    if cell.printed is None:
        return None
    if cell.printed.value is None:
        return Status("unchecked", "the paper's run went out of memory")
    if cell.contradiction:
        return Status("unchecked", cell.contradiction)
    if cell.mean is None:
        return Status("unchecked", cell.missing)
    if cell.key.metric == SECONDS:
        return Status("unchecked", "seconds depend on the machine")
    allowed = 0.5 * 10.0 ** -cell.decimals * (1.0 + 1e-9)  # the paper's rounding
    if cell.seeds:
        if len(cell.seeds) < MIN_SEEDS:
            return Status("unchecked", f"fewer than {MIN_SEEDS} seeds")
        allowed += half_width(cell.std, len(cell.seeds), printed_runs)
    difference = cell.mean - cell.printed.value
    if abs(difference) <= allowed:
        near = NEAR_POINTS if cell.key.column == "change" else NEAR * abs(cell.printed.value)
        return Status("reproduced" if abs(difference) <= near else "inconclusive")
    return Status("higher" if difference > 0 else "lower")


def _cell(cell: Cell | None, reasons: dict[str, int], printed_runs: int) -> str:
    """A cell in the form: mark, ours, (paper), difference, number of the reason."""
    judged = status(cell, printed_runs) if cell is not None else None
    if judged is None:
        return "" if cell is None or cell.mean is None else f"{ours(cell)} (not printed)"
    text = f"{MARKS[judged.kind]} {ours(cell)} ({printed(cell)})"
    if cell.mean is not None and cell.printed.value is not None:
        text += f" {cell.mean - cell.printed.value:+,.{cell.decimals}f}"
    if judged.reason:
        text += f" <sup>{reasons.setdefault(judged.reason, len(reasons) + 1)}</sup>"
    return text


def _counted(cells: Iterable[Cell], printed_runs: int) -> Counter:
    return Counter(judged.kind for cell in cells if (judged := status(cell, printed_runs)))


def _summary(tables: Sequence[Table], printed_runs: int) -> list[str]:
    lines = ["| table | numbers | reproduced | inconclusive | ours higher | ours lower | cannot be checked |",
             "|---|" + "--:|" * 6]
    for table in tables:
        counts = _counted(table.cells(), printed_runs)
        numbers = [sum(counts.values()), *(counts[kind] for kind in MARKS)]
        lines.append(f"| {table.number} {table.title} | {' | '.join(map(str, numbers))} |")
    return lines


def _leads(paper: str, table: PaperTable, built: Table, source: Source) -> list[str]:
    """Per dataset and backbone: does the paper's method lead the baseline, and do the methods rank alike?"""
    definitions = get(paper)
    ours_, base = definitions.OURS, definitions.BASELINE
    names = f"{definitions.LABELS[ours_]} - {definitions.LABELS[base]}"
    lines = [f"| dataset | backbone | {names}: ours | paper | p per user | users | seeds in which it leads | as in the "
             "paper | rank agreement |", "|---|---|--:|--:|--:|--:|--:|---|---|"]
    printed_, cells, lead = definitions.printed()[table.number], {cell.key: cell for cell in built.cells()}, table.lead
    pairs = dict.fromkeys((key.dataset, key.backbone) for key in cells)
    for dataset, backbone in pairs:
        if Key(dataset, backbone, ours_, lead.metric, lead.column) not in cells:
            continue

        def mean_of_paper(key: Key) -> float | None:
            values = [printed_[key._replace(column=column)].value for column in lead.printed]
            return None if None in values else sum(values) / len(values)
        compared = [key for key in cells if key.dataset == dataset and (key.backbone == backbone or not table.panels)
                    and (key.metric, key.column) == (lead.metric, lead.column)]
        theirs = {key: mean for key in compared if (mean := mean_of_paper(key)) is not None}
        mine = {key: cells[key].mean for key in theirs if cells[key].mean is not None}
        line_start = f"| {definitions.LABELS[dataset]} | {definitions.LABELS[backbone]} |"
        pair = [Key(dataset, backbone, row, lead.metric, lead.column) for row in (ours_, base)]
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
            lines.append(f"{line_start} {DASH} | {expected:+.4f} | | | | cannot be checked: {why} | {agreement} |")
            continue
        per_seed = [[measure(by_seed[seed], lead.metric, lead.column) for seed in common] for by_seed in runs]
        difference = (sum(per_seed[0]) - sum(per_seed[1])) / len(common)
        _, p, users = user_test(list(runs[0].values()), list(runs[1].values()), lead.metric)
        wins = sum(a > b for a, b in zip(*per_seed))
        same = "**yes**" if difference * expected > 0 else "**no**"
        lines.append(f"{line_start} {difference:+.4f} | {expected:+.4f} | {p_text(p)} | {users} | "
                     f"{wins} of {len(common)} | {same} | {agreement} |")
    return lines


def _section(paper: str, table: PaperTable, built: Table, source: Source) -> list[str]:
    """One table: a part per dataset and panel, with commands and records."""
    definitions = get(paper)

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
    parts: dict[tuple[str, str], list[Cell]] = {}
    for key, cell in cells.items():
        parts.setdefault((key.dataset, key.backbone if table.panels else ""), []).append(cell)
    for (dataset, backbone), here in parts.items():
        counts = _counted(here, definitions.PRINTED_RUNS)
        title = " on ".join(filter(None, map(label, (dataset, backbone)))) if table.row_spec else label(dataset)
        words = ", ".join(f"{counts[kind]} {MARKS[kind]}" for kind in MARKS if counts[kind])
        lines += [f"### {title}", "", f"{words}.", ""]
        reasons: dict[str, int] = {}
        lines += [f"| {' | '.join([*stubs, *heads])} |", "|" + "---|" * len([*stubs, *heads])]
        across = [{"metric": name} for name in table.metrics] if metrics_across else [
            {"column": name} for name in table.columns]
        present = {(cell.key.backbone, cell.key.row) for cell in here}
        for combination in product(table.backbones, table.rows, table.metrics[:1] if metrics_across else table.metrics):
            if combination[:2] not in present:
                continue
            first = Key(dataset, *combination, table.columns[0])
            shown = [_cell(cells.get(first._replace(**part)), reasons, definitions.PRINTED_RUNS) for part in across]
            stub = [name(first) + (DAGGER if first.row in built.daggers else ""),
                    *([label(first.metric)] if len(stubs) > 1 else [])]
            lines.append(f"| {' | '.join([*stub, *shown])} |")
        lines += ["", *(f"- <sup>{i}</sup> Cannot be checked: {for_markdown(reason)}."
                        for reason, i in reasons.items())]
        if table.row_spec:
            records = {name(cell.key): cell for cell in here if cell.records and cell.key.column != "change"}
            seeds = max((len(cell.seeds) for cell in here), default=0) or 5
            made_by = command(paper, table, source, seeds, [dataset], [backbone] if backbone else [])
            lines.append(f"- Command: `{made_by}`")
            lines += [f"- Records of {row} (seeds {seed_text(cell.seeds)}): "
                      f"{' '.join(name[:8] for name in cell.records)}" for row, cell in records.items()]
        lines.append("")
    return lines


def _of(runs: int) -> tuple[str, str, str]:
    """A printed number of so many runs, in the words and the formula of the page."""
    return ("one seed", "one more run", "1") if runs == 1 else (f"{runs} runs", f"the mean of {runs} more", f"1/{runs}")


def _contrast(definitions: ModuleType, contrast: Contrast, source: Source, datasets: Iterable[str] | None,
              backbones: Iterable[str] | None) -> list[str]:
    """The section that shows the values of a setting side by side; what has no record is named at its end."""
    label = definitions.LABELS.get
    metrics = [label(metric, metric) for metric in contrast.metrics]
    lines = [f"## {contrast.title}", "", *(line for text in contrast.text for line in (text, "")),
             *(f"- `{contrast.setting}={value}`: {meaning}" for value, meaning in contrast.values), ""]
    missing: dict[str, list[str]] = {}
    there = {run.head["dataset"] for run in source.runs}
    assignments = {name: value for name, value in source.assignments if name != contrast.setting}
    for dataset, backbone in product(definitions.DATASETS, contrast.backbones):
        if dataset not in (datasets or definitions.DATASETS) or backbone not in (backbones or contrast.backbones):
            continue
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
                      f"{label(contrast.rows[0])} minus it | p | seeds |",
                      "|---|---|" + "--:|" * len(metrics) + "--:|--:|---|", *shown, ""]
    lines += [f"- No record of {', '.join(rows)} on {where}." for where, rows in missing.items()]
    return [*lines, ""] if missing else lines


def _contrast_line(contrast: Contrast, value: str, name: str, runs: Sequence[Run], first: Sequence[Run]) -> str:
    """The numbers of one line, and the test of the contrast's first line against it."""
    cells = [averaged(Cell(Key(runs[0].meta["dataset"], runs[0].meta["backbone"], name, metric, "value"), 4), runs)
             for metric in contrast.metrics]
    difference, p, _ = user_test(first, runs, contrast.metrics[0]) if first != runs else (math.nan, math.nan, 0)
    tested = [DASH, DASH] if math.isnan(p) else [f"{difference:+.4f}", p_text(p)]
    seeds = seed_text(run.seed for run in runs)
    return f"| {value} | {name} | {' | '.join(map(ours, cells))} | {' | '.join(tested)} | {seeds} |"


def page(paper: str, tables: Sequence[PaperTable], source: Source, made_by: str, datasets: Iterable[str] | None = None,
         backbones: Iterable[str] | None = None) -> str:
    """The whole page as Markdown; the same records give the same bytes.

    Args:
        made_by: the command that makes this page.
        datasets, backbones: only these; None is all.

    Raises:
        UserError: as ``tables.build``.
    """
    definitions = get(paper)
    runs = definitions.PRINTED_RUNS
    built = [(table, rebuilt) for table in tables if (rebuilt := build(paper, table, source, datasets, backbones))]
    factors = ", ".join(f"{half_width(1.0, n, runs):.2f} s for n = {n}" for n in (3, 5, 10))
    used = {name for _, rebuilt in built for cell in rebuilt.cells() for name in cell.records}
    machines = Counter(f"{run.meta['environment']['processor']}, torch {run.meta['environment']['torch']}, Python "
                       f"{run.meta['environment']['python']}" for run in source.runs if run.hash in used)
    made_on = "; ".join(f"{count} on {name}" for name, count in sorted(machines.items()))
    lines = [
        f"# Reproduction of {definitions.TITLE}", "", f"Generated by `{made_by}`; not to be edited.", "",
        f"{len(used)} runs: {made_on}." if used else "No runs.", "",
        "Every printed number stands beside ours: mark, our mean ± sample standard deviation over seeds, (the "
        "paper's), difference ours - paper.", "",
        f"- {MARKS['reproduced']} **reproduced**: the paper's number, which is of {_of(runs)[0]}, lies where "
        f"{_of(runs)[1]} of ours would lie with {CONFIDENCE:.0%} probability, and near ours. The first means "
        f"|paper - m| ≤ t(.975, n-1) s √({_of(runs)[2]} + 1/n), with m and s the mean and standard deviation of our n "
        f"seeds, plus half a unit of the paper's last decimal; that is {factors}. The second means "
        f"|paper - m| ≤ {NEAR:.0%} of the paper's number, or {NEAR_POINTS:g} points for changes in percent. Table 1 "
        f"has no seeds: equal at the printed decimals.",
        f"- {MARKS['inconclusive']} **inconclusive**: inside the interval but not near. Our seeds vary too much to "
        f"tell.",
        f"- {MARKS['higher']} **differs**, ours is higher. {MARKS['lower']} **differs**, ours is lower. Only the "
        f"spread between training seeds counts; the split of the data is the same for all. One number in twenty "
        f"would miss its interval by chance.",
        f"- {MARKS['unchecked']} **cannot be checked**, with the reason: no record, no data, fewer than {MIN_SEEDS} "
        f"seeds, or the paper contradicts itself there.", "",
        "## Summary", "", *_summary([rebuilt for _, rebuilt in built], runs), ""]
    labels = definitions.LABELS
    for table, rebuilt in built:
        if table.lead:
            lines += [f"## Does {labels[definitions.OURS]} lead {labels[definitions.BASELINE]}?", "",
                      f"{table.lead.about} Rank agreement: Kendall's τ between the order of the methods here and in "
                      f"the paper.", "", *_leads(paper, table, rebuilt, source), ""]
    for contrast in definitions.CONTRASTS if source.tuned is None else ():  # settings are tuned under one of its values
        lines += _contrast(definitions, contrast, source, datasets, backbones)
    for table, rebuilt in built:
        lines += _section(paper, table, rebuilt, source)
    return "\n".join(lines).rstrip("\n") + "\n"
