"""A page to look at: one HTML file with everything in it, which loads nothing.

Tables are written here; ``page.js`` filters and sorts them and draws the figures. Every name comes from data or
plugins, so it is escaped in HTML, and in the JSON that the script reads.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from html import escape
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from ..evaluation.beyond import GROUPS
from ..runs.registry import Registry
from ..runs.run import Run
from . import gathered
from .gathered import Cell, Difference, GroupValue, Row, Variant
from .tables import p_text

# The page may run its own scripts and styles, and load nothing from anywhere.
POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
          "base-uri 'none'; form-action 'none'")
LIMIT = 5_000_000  # bytes of a page
_HERE = Path(__file__).parent


def json_text(value: Any) -> str:
    """JSON that may stand in a script element: without ``<``, so that no text in it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digits(value: float | None, digits: int = 5) -> float | None:
    """A number for a figure; None if there is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _script(kind: str, name: str, text: str) -> str:
    return f'<script type="{kind}" id="{name}">{text}</script>'


def library() -> str:
    """plotly.js, compressed, as base64; the same bytes on every machine with the same version."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


# Tables


def _td(text: str, value: float | str | None = "", kind: str = "") -> str:
    """A cell; ``value`` is the full number that sorting uses, None if there is none, and ``""`` for a text."""
    if value == "":
        return f"<td>{escape(text)}</td>"
    classes = escape(" ".join(filter(None, ["number", kind])))
    return f'<td class="{classes}" data-value="{_full(value)}">{escape(text)}</td>'


def _full(value: float | None) -> str:
    """The full number as JavaScript reads it."""
    return "" if value is None else repr(value).replace("inf", "Infinity")


def _table(name: str, heads: Iterable[tuple[str, bool]], rows: Iterable[str]) -> str:
    """A table with headings (text, whether numbers stand below) and rows that are HTML."""
    head = "".join(f'<th class="number">{escape(text)}</th>' if number else f"<th>{escape(text)}</th>"
                   for text, number in heads)
    return (f'<div class="wide"><table id="{escape(name)}"><thead><tr>{head}</tr></thead><tbody>\n'
            + "\n".join(rows) + "\n</tbody></table></div>")


def _leaderboard(cells: Sequence[Cell], rows: Mapping[Cell, Sequence[Row]]) -> str:
    metrics = sorted({name for of_cell in rows.values() for row in of_cell for name in row.metrics},
                     key=lambda name: (name not in {cell.metric for cell in cells}, name))
    heads = [("method", False), ("dataset", False), ("backbone", False), ("stream", False),
             *((name, True) for name in metrics), ("forgetting", True), ("MB sent", True), ("seconds", True),
             ("users", True), ("seeds", False)]
    lines = []
    for i, cell in enumerate(cells):
        best = {name: max(row.metrics[name][0] for row in rows[cell] if name in row.metrics) for name in metrics
                if any(name in row.metrics for row in rows[cell])}
        for row in sorted(rows[cell], key=lambda row: -row.metrics.get(cell.metric, (0.0, 0.0))[0]):
            lines.append(f'<tr data-cell="{i}">' + "".join([
                _td(row.variant.title), _td(cell.dataset), _td(cell.backbone), _td(cell.stream),
                *(_metric_td(row, name, best.get(name)) for name in metrics),
                _td("–" if row.forgetting is None else f"{row.forgetting:.4f}", row.forgetting),
                _td(f"{row.bytes / 1e6:,.1f}", row.bytes), _td(f"{row.seconds:,.1f}", row.seconds),
                _td(f"{row.users:,}", row.users), _td(row.variant.seeds)]) + "</tr>")
    return _table("leaderboard", heads, lines)


def _metric_td(row: Row, name: str, best: float | None) -> str:
    if name not in row.metrics:
        return _td("–", None)
    mean, deviation = row.metrics[name]
    text = f"{mean:.4f}" + (f" ± {deviation:.4f}" if len(row.variant.runs) > 1 else "")
    return _td(text, mean, "best" if mean == best else "")


def _tests(cells: Sequence[Cell], of_cell: Mapping[Cell, Sequence[Difference]]) -> str:
    heads = [("method", False), ("against", False), ("dataset", False), ("backbone", False), ("metric", False),
             ("difference", True), ("t", True), ("p", True), ("p Holm", True), ("d_z", True), ("users", True),
             ("seeds in common", False)]
    lines = [f'<tr data-cell="{i}" data-alone="yes">' + "".join(_test_cells(cell, difference)) + "</tr>"
             for i, cell in enumerate(cells) for difference in of_cell[cell]]
    return _table("tests", heads, lines)


def _test_cells(cell: Cell, difference: Difference) -> list[str]:
    names = [_td(difference.variant.title), _td(cell.reference.title), _td(cell.dataset), _td(cell.backbone),
             _td(cell.metric)]
    if difference.comparison is None:
        return [*names, f'<td colspan="7">not tested: {escape(difference.reason)}</td>']
    users = difference.comparison.users  # of reference - variant
    return [*names, _td(f"{-users.difference:+.4f}", -users.difference), _td(f"{-users.t:.2f}", -users.t),
            _td(p_text(users.p), users.p), _td(p_text(difference.p_holm), difference.p_holm),
            _td(f"{-users.effect:.3f}", -users.effect), _td(f"{users.n:,}", users.n),
            _td(", ".join(map(str, difference.comparison.seeds)))]


def _groups(cells: Sequence[Cell]) -> str:
    """A table per cell, a row per variant and a column per group; the best of a group in bold."""
    parts = []
    for i, cell in enumerate(cells):
        values = {variant.title: gathered.group_values(cell, variant) for variant in cell.variants}
        with_groups = {title: of_groups for title, of_groups in values.items() if of_groups}
        columns = {group: value for of_groups in with_groups.values() for group, value in of_groups.items()}
        best = {group: max(of_groups[group].mean for of_groups in with_groups.values() if group in of_groups)
                for group in columns}
        rows = [f"<tr>{_td(title)}{''.join(_group_td(of_groups.get(group), best[group]) for group in columns)}</tr>"
                for title, of_groups in with_groups.items()]
        heads = [("method", False), *((f"{group}: {value.metric} ({value.users:,} users)", True)
                                      for group, value in columns.items())]
        lacking = [title for title in values if title not in with_groups]
        note = f"<p>Records of an older version, without groups: {escape(', '.join(lacking))}.</p>" if lacking else ""
        absent = [group for group in GROUPS if columns and group not in columns]
        note += f"<p>Nobody is in {escape(', '.join(absent))}.</p>" if absent else ""
        parts.append(f'<div data-cell="{i}">{_table(f"groups-{i}", heads, rows) if columns else ""}{note}</div>')
    return "\n".join(parts)


def _group_td(value: GroupValue | None, best: float) -> str:
    if value is None:
        return _td("–", None)
    text = f"{value.mean:.4f}" + ("" if value.deviation is None else f" ± {value.deviation:.4f}")
    return _td(text, value.mean, "best" if value.mean == best else "")


def _settings(cells: Sequence[Cell]) -> str:
    parts = []
    for i, cell in enumerate(cells):
        differing = gathered.differing_settings(cell)
        rows = ["<tr>" + _td(variant.title) + "".join(
            _td("–" if values[j] is None else str(values[j])) for values in differing.values()) + "</tr>"
            for j, variant in enumerate(cell.variants)]
        content = (_table(f"settings-{i}", [("method", False), *((name, False) for name in differing)], rows)
                   if differing else "<p>All variants have the same settings.</p>")
        parts.append(f'<div data-cell="{i}">{content}</div>')
    return "\n".join(parts)


def _environments(runs: Sequence[Run]) -> str:
    several = gathered.environments(runs)
    names = list(dict.fromkeys(name for _, environment in several for name in environment))
    # What tells the rows apart comes first, as the last columns are out of sight.
    names.sort(key=lambda name: len({str(environment.get(name)) for _, environment in several}) == 1)
    rows = ["<tr>" + _td(str(number), number) + "".join(
        _td("–" if environment.get(name) is None else str(environment[name])) for name in names) + "</tr>"
        for number, environment in several]
    return _table("environments", [("runs", True), *((name, False) for name in names)], rows)


def _commands(cells: Sequence[Cell], registry: Registry, plugins: Sequence[Path]) -> str:
    rows = [f'<tr data-cell="{i}" data-alone="yes">{_td(variant.title)}<td><pre>'
            f"{escape(gathered.rerun_command(registry, variant, plugins))}</pre></td></tr>"
            for i, cell in enumerate(cells) for variant in cell.variants]
    return _table("commands", [("method", False), ("command", False)], rows)


# The data of the figures


def _variant_data(cell: Cell, variant: Variant, row: Row, difference: Difference | None) -> dict[str, Any]:
    score = row.metrics[cell.metric][0] if cell.metric in row.metrics else None
    return {"title": variant.title, "score": _digits(score),
            "learning": _digits(row.learning), "forgetting": _digits(row.forgetting), "bytes": _digits(row.bytes),
            "seconds": _digits(row.seconds),
            "curves": [[_digits(value, 4) for value in curve.mean] for curve in gathered.curves(variant)],
            "matrix": [[_digits(value) for value in line] for line in gathered.matrix(cell, variant)],
            "counts": list(difference.counts) if difference else []}


def page_data(cells: Sequence[Cell], rows: Mapping[Cell, Sequence[Row]],
              of_cell: Mapping[Cell, Sequence[Difference]]) -> dict[str, Any]:
    """What ``page.js`` draws: per cell its names and per variant its numbers, to 4 or 5 digits."""
    content = []
    for cell in cells:
        by_variant = {id(difference.variant): difference for difference in of_cell[cell]}
        content.append({"dataset": cell.dataset, "backbone": cell.backbone, "stream": cell.stream, "title": cell.title,
                        "metric": cell.metric, "reference": cell.reference.title,
                        "variants": [_variant_data(cell, row.variant, row, by_variant.get(id(row.variant)))
                                     for row in rows[cell]]})
    return {"edges": [round(float(edge), 6) for edge in gathered.EDGES], "cells": content}


# The page

_SECTIONS = (
    ("Leaderboard", "Mean ± sample standard deviation over seeds of the metric on the block just trained, averaged "
     "over the blocks but block 0. Best of a dataset, backbone and stream in bold. Click a heading to sort.",
     "{leaderboard}"),
    ("Tests", "Two-sided paired t-test over users, each averaged over blocks and the seeds in common. Positive: better "
     "than the method in the second column. p Holm is adjusted for all variants tested on the same items.", "{tests}"),
    ("Groups of users and items", "The metric of groups on the block just trained, mean ± sample standard deviation "
     "over seeds, averaged over the blocks but block 0 that have somebody of the group. Groups of items have their "
     "recall.", "{groups}"),
    ("Curves over rounds", "Validation metric, mean over the seeds that still train.", '<div id="curves"></div>'),
    ("R[t, s]", "The metric on block s after block t, mean over seeds. Down a column: forgetting.",
     '<div id="maps"></div>'),
    ("Forgetting against learning", "Better lies to the right and below. A symbol is a dataset, backbone and stream.",
     '<div id="learning"></div>'),
    ("Accuracy against bytes sent", "Of a whole run, all clients together.", '<div id="bytes"></div>'),
    ("Accuracy against time", "Of a whole run; it depends on the machine.", '<div id="seconds"></div>'),
    ("Differences per user", "Share of the users by their difference from the method that the tests compare with; "
     "positive: better.", '<div id="differences"></div>'),
    ("Settings that differ", "Between the variants that were tested on the same items.", "{settings}"),
    ("Environment", "Where the runs were made.", "{environments}"),
    ("How to rerun", "Settings that are today's defaults are left out.", "{commands}"),
)


def _body(title: str, parts: Mapping[str, str]) -> str:
    filters = "".join(f'<label>{name} <select id="filter-{name}"></select></label>'
                      for name in ("dataset", "backbone", "stream"))
    sections = "\n".join(f"<h2>{escape(head)}</h2>\n<p>{escape(text)}</p>\n"
                         + (parts[content[1:-1]] if content.startswith("{") else content)
                         for head, text, content in _SECTIONS)
    cell = '<label>shown below <select id="cell"></select></label>'
    return (f"<header><h1>{escape(title)}</h1>{filters}{cell}</header>\n"
            f'<main><p id="errors"></p>\n{sections}\n</main>')


def report(runs: Sequence[Run], registry: Registry, title: str, plugins: Sequence[Path] = ()) -> str:
    """The page of some records.

    Args:
        runs: any; at least one.
        registry: of the plugins that the commands to rerun are for.
        plugins: folders of ``--plugins``, for those commands.
    """
    cells = gathered.gather(runs, registry)
    rows = {cell: [gathered.leaderboard_row(cell, variant) for variant in cell.variants] for cell in cells}
    of_cell = {cell: gathered.differences(cell) for cell in cells}
    parts = {"leaderboard": _leaderboard(cells, rows), "tests": _tests(cells, of_cell), "groups": _groups(cells),
             "settings": _settings(cells), "environments": _environments(runs),
             "commands": _commands(cells, registry, plugins)}
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>", f"<style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head><body>", _body(title, parts),
        _script("application/json", "data", json_text(page_data(cells, rows, of_cell))),
        _script("text/plain", "library", library()),
        f"<script>{(_HERE / 'page.js').read_text(encoding='utf-8')}</script>", "</body></html>", ""])
