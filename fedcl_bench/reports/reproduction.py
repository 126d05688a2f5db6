"""The reproduction page: every printed number of a paper beside ours, with its standing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Iterable, Mapping, Sequence

from scipy import stats

from ..core.errors import UserError
from ..experiments.papers import Contrast, Key, PaperTable, get
from ..core.text import for_markdown
from ..records.run import Run
from ..runs.specs import seed_text
from .render import ours, printed
from .standing import MARKS, Judged, Standing, half_width, judge, printed_lead, rules
from .tables import (DAGGER, DASH, Cell, Source, Table, averaged, build, command, find, measure, p_text, pilot_users,
                     user_test)


@dataclass(frozen=True)
class Part:
    """A table of the paper, rebuilt, with the standings of its cells."""

    table: PaperTable
    built: Table
    judged: Mapping[Key, Judged]


def _cell(cell: Cell | None, judged: Mapping[Key, Judged], reasons: dict[Standing, int]) -> str:
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


def _summary(parts: Sequence[Part]) -> list[str]:
    lines = [f"| table | numbers | {' | '.join(MARKS)} |", "|---|" + "--:|" * (1 + len(MARKS))]
    for part in parts:
        counts = Counter(judged.standing.kind for judged in part.judged.values())
        numbers = [sum(counts.values()), *(counts[kind] for kind in MARKS)]
        lines.append(f"| {part.built.number} {part.built.title} | {' | '.join(map(str, numbers))} |")
    return lines


def _leads(paper: str, part: Part, source: Source) -> list[str]:
    """Per dataset and backbone that has both: does the paper's method lead the baseline, and do the methods rank
    alike? Empty if no backbone has both."""
    definitions = get(paper)
    ours_, base = definitions.OURS, definitions.BASELINE
    names = f"{definitions.LABELS[ours_]} - {definitions.LABELS[base]}"
    lines = [f"| dataset | backbone | {names}: ours | paper | p per user | users | seeds in which it leads | as in the "
             "paper | rank agreement |", "|---|---|--:|--:|--:|--:|--:|---|---|"]
    table, cells, lead = part.table, {cell.key: cell for cell in part.built.cells()}, part.table.lead
    pairs = dict.fromkeys((key.dataset, key.backbone) for key in cells)
    for dataset, backbone in pairs:
        pair = [Key(dataset, backbone, row, lead.metric, lead.column) for row in (ours_, base)]
        if not cells.keys() >= {*pair}:
            continue
        compared = [key for key in cells if key.dataset == dataset and (key.backbone == backbone or not table.panels)
                    and (key.metric, key.column) == (lead.metric, lead.column)]
        theirs = {key: mean for key in compared if (mean := printed_lead(definitions, table, key)) is not None}
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
            lines.append(f"{line_start} {DASH} | {expected:+.4f} | | | | cannot be checked: {why} | {agreement} |")
            continue
        per_seed = [[measure(by_seed[seed], lead.metric, lead.column) for seed in common] for by_seed in runs]
        difference = (sum(per_seed[0]) - sum(per_seed[1])) / len(common)
        _, p, users = user_test(list(runs[0].values()), list(runs[1].values()), lead.metric)
        wins = sum(a > b for a, b in zip(*per_seed))
        same = "**yes**" if difference * expected > 0 else "**no**"
        lines.append(f"{line_start} {difference:+.4f} | {expected:+.4f} | {p_text(p)} | {users} | "
                     f"{wins} of {len(common)} | {same} | {agreement} |")
    return lines[2:] and lines


def _section(paper: str, part: Part, source: Source) -> list[str]:
    """One table, dataset by dataset and panel by panel, with commands and records."""
    definitions, table, built = get(paper), part.table, part.built

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
            shown = [_cell(cells.get(first._replace(**names)), part.judged, reasons) for names in across]
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
        UserError: as ``tables.build``, and for pilots.
    """
    if pilot_users(source):
        raise UserError("pilot_users: found in --set, accepted: runs of all users, as only their numbers compare with "
                        "printed ones. `tables` shows those of a pilot.")
    definitions = get(paper)
    runs = definitions.PRINTED_RUNS
    parts = [Part(table, built, judge(paper, table, built.cells(), source)) for table in tables
             if (built := build(paper, table, source, datasets, backbones))]
    factors = ", ".join(f"{half_width(1.0, n, runs):.2f} s for n = {n}" for n in (3, 5, 10))
    used = {name for part in parts for cell in part.built.cells() for name in cell.records}
    machines = Counter(f"{run.meta['environment']['processor']}, torch {run.meta['environment']['torch']}, Python "
                       f"{run.meta['environment']['python']}" for run in source.runs if run.hash in used)
    made_on = "; ".join(f"{count} on {name}" for name, count in sorted(machines.items()))
    lines = [
        f"# Reproduction of {definitions.TITLE}", "", f"Generated by `{made_by}`; not to be edited.", "",
        f"{len(used)} runs: {made_on}." if used else "No runs.", "",
        "Every printed number stands beside ours: mark, our mean ± sample standard deviation over seeds, (the "
        "paper's), difference ours - paper.", "",
        *rules(f"here {runs}, so that the interval is {factors}"), "", "## Summary", "", *_summary(parts), ""]
    labels = definitions.LABELS
    for part in parts:
        if part.table.lead and (leads := _leads(paper, part, source)):
            lines += [f"## Does {labels[definitions.OURS]} lead {labels[definitions.BASELINE]}?", "",
                      f"{part.table.lead.about} Rank agreement: Kendall's τ between the order of the methods here and "
                      f"in the paper.", "", *leads, ""]
    for contrast in definitions.CONTRASTS if source.tuned is None else ():  # settings are tuned under one of its values
        lines += _contrast(definitions, contrast, source, datasets, backbones)
    for part in parts:
        lines += _section(paper, part, source)
    return "\n".join(lines).rstrip("\n") + "\n"
