"""A page to look at: one HTML file with everything in it, which loads nothing.

Figures are plotly's and tables DataTables', and both libraries are in the page. Tables can be read without scripts.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..evaluation.metrics import RATING_ERRORS, sign_of
from ..runs.registry import Registry
from ..runs.specs import Tuned
from ..records.store import Run, incremental, user_scores
from . import dashboard
from .comparison import Comparison
from .dashboard import GridCell, Number, TableRow
from .frame import mean_matrix, validation_curves
from .cells import DASH

# The page may run its own scripts and styles, and load nothing from anywhere.
POLICY = ("default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:; "
          "base-uri 'none'; form-action 'none'")
LIMIT = 5_000_000  # bytes of a page
EDGES = np.linspace(-1.0, 1.0, 42)  # of the histogram of users' differences; the middle range holds 0
_ACROSS = 4  # panels side by side
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
_HERE = Path(__file__).parent


# Figures: px is plotly.express, which takes seconds to import.


def _name(title: str) -> str:
    """A name as plotly takes it, which reads markup."""
    return escape(title, quote=False)


def _panels(figure: Any, height: int, heading: Callable[[str], str] = str) -> Any:
    """Panels in rows of ``height`` pixels; ``heading``: of the value that px has written as ``column=value``."""
    figure.for_each_annotation(lambda each: each.update(text=heading(each.text.partition("=")[2])))
    return figure.update_layout(height=height * -(-len(figure.layout.annotations) // _ACROSS) + 80)


def _points(px: Any, rows: Sequence[TableRow], x: str, y: str, colors: Mapping[str, str], log: bool = False) -> Any:
    """A point per row of the leaderboard: a colour per method, a symbol per dataset, backbone and stream."""
    frame = pd.DataFrame([{"row": i, "method": _name(str(row["method"])),
                           "tested on": _name(", ".join(str(row[name]) for name in ("dataset", "backbone", "stream"))),
                           **{name: number.value for name in (x, y) if isinstance(number := row.get(name), Number)}}
                          for i, row in enumerate(rows)], columns=["row", "method", "tested on", x, y]).dropna()
    figure = px.scatter(frame, x, y, color="method", symbol="tested on", log_x=log, height=500,
                        custom_data=["row", "method"], color_discrete_map=colors, render_mode="svg")
    for trace in figure.data:  # of one row each; of those with one name, the page's script puts one into the legend
        row, method = trace.customdata[0]
        trace.update(name=method, legendgroup=method, meta=int(row), marker_size=10)
    return figure.update_layout(legend_title_text="")


def _stages(meta: Mapping[str, Any], block: int, rounds: int) -> list[str]:
    names = [_name(name) for name, counts in meta.get("stages", {}).items() for _ in range(counts[block])] or ["train"]
    return (names + names[-1:] * rounds)[:rounds]


def _curves(px: Any, cell: GridCell, colors: Mapping[str, str]) -> Any:
    """The validation metric by round, a panel per block, and a kind of line per stage of methods with several."""
    frame = pd.concat(
        pd.DataFrame({"method": _name(variant.title), "block": block, "round": np.arange(len(curve.mean)) + 1,
                      cell.metric: curve.mean.astype("float32"),
                      "stage": _stages(variant.meta, block, len(curve.mean))})
        for variant in cell.variants for block, curve in enumerate(validation_curves(variant.runs)))
    staged = frame["stage"].nunique() > 1
    figure = px.line(frame, "round", cell.metric, color="method", facet_col="block", facet_col_wrap=_ACROSS,
                     line_dash="stage" if staged else None, color_discrete_map=colors, render_mode="svg",
                     markers=bool(staged or frame["round"].max() <= 10))
    return _panels(figure.update_xaxes(matches=None).update_yaxes(matches=None, showticklabels=True), 320,
                   "block {}".format)


def _matrices(px: Any, cell: GridCell) -> Any | None:
    if not incremental(cell.variants[0].runs[0])[0]:  # no step has a later one
        return None
    matrices = np.stack([mean_matrix(variant.runs, cell.metric) for variant in cell.variants])
    figure = px.imshow(matrices, facet_col=0, facet_col_wrap=_ACROSS, text_auto=".3f", aspect="auto",
                       color_continuous_scale="Cividis", labels={"x": "tested on block", "y": "trained up to block"})
    return _panels(figure.update_xaxes(dtick=1).update_yaxes(dtick=1), 260,
                   lambda i: _name(cell.variants[int(i)].title))


def _differences(px: Any, cell: GridCell, compared: Iterable[dashboard.Test],
                 colors: Mapping[str, str]) -> Any | None:
    """The share of users by their difference from the reference; None if nothing could be compared with it."""
    parts = []
    for test in compared:
        if isinstance(test.result, Comparison):
            mine, theirs = (user_scores([run for run in of.runs if run.seed in test.result.common], cell.metric)
                            for of in (test.variant, test.against))
            gain = sign_of(cell.metric) * (mine - theirs)
            counts = np.histogram(gain.dropna().clip(-1.0, 1.0), EDGES)[0]
            parts.append(pd.DataFrame({"method": _name(test.variant.title), "share of users": counts / counts.sum(),
                                       "difference per user": (EDGES[1:] + EDGES[:-1]) / 2})[counts > 0])
    if not parts:
        return None
    figure = px.bar(pd.concat(parts), "difference per user", "share of users", color="method", facet_col="method",
                    facet_col_wrap=_ACROSS, log_y=True, range_x=(-1.0, 1.0), color_discrete_map=colors,
                    range_y=(min(part["share of users"].min() for part in parts) / 2, 1.5))
    return _panels(figure.update_layout(showlegend=False).update_yaxes(tickformat="~%", dtick=1), 240)


# The page


def table(name: str, rows: Sequence[TableRow], columns: Iterable[str] = (), of: Sequence[int] | None = None,
          best: Iterable[str] = ()) -> str:
    """A table with a column per key of the rows, those of ``columns`` first. ``of``: the cell of each row, if they have
    several; ``best``: columns in which the largest number of each cell, or the smallest error, is in bold."""
    columns = list(dict.fromkeys([*columns, *(column for row in rows for column in row)]))
    cells = of or [0] * len(rows)
    bold = {(cell, column): (max if {*column.split()}.isdisjoint(RATING_ERRORS) else min)(
        (row[column] for row, mine in zip(rows, cells) if mine == cell and column in row), default=None)
        for cell in set(cells) for column in best}
    lines = []
    for i, (row, cell) in enumerate(zip(rows, cells)):
        tds = []
        for column in columns:
            value = row.get(column, DASH)
            if isinstance(value, Number):
                kind = "best dt-type-numeric" if value == bold.get((cell, column)) else "dt-type-numeric"
                tds.append(f'<td class="{kind}" data-order="{value.value!r}">{escape(value.text)}</td>')
            else:
                tds.append(f'<td data-order="">{value}</td>' if value == DASH else f"<td>{escape(value)}</td>")
        attributes = f' data-row="{i}" data-cell="{cell}"' if of else ""
        lines.append(f"<tr{attributes}>{''.join(tds)}</tr>")
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return "\n".join([f'<div class="box"><table id="{name}" class="compact nowrap">',
                      f"<thead><tr>{heads}</tr></thead><tbody>", *lines, "</tbody></table></div>"]) if rows else ""


@cache
def _packed(name: str, text: str) -> str:
    """An element with a text that the script unpacks; the same bytes on every machine with the same versions."""
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'


_ABOUT = {  # the sections of the page
    "Leaderboard": "Mean ± sample standard deviation over seeds of the metric on the block just trained, averaged over "
    "the blocks but block 0. Learning is the mean of R[t, t]; forgetting, bytes and seconds are of the whole run. "
    "Still improving: blocks whose last validated round was the best, over all seeds. Best of a "
    "dataset, backbone and stream in bold. What is filtered out here is not drawn below.",
    "Forgetting against learning": "Better lies below and to the right; of errors, to the left.",
    "Accuracy against bytes": "Sent and received in a whole run, all clients together.",
    "Accuracy against time": "Of a whole run; it depends on the machine.",
    "Tests": "Two-sided paired t-test over users, each averaged over blocks and the seeds in common. Positive: better "
    "than the method in the second column. p Holm is adjusted for all variants tested on the same items. p over seeds: "
    "each seed averaged over users, not adjusted; – where there is one seed. Methods are tested with equal settings, "
    "those by default or tuned counting as such.",
    "Differences per user": "Share of the users by their difference from the method that the tests compare with.",
    "Groups of users and items": "The metric of groups on the block just trained, averaged over the blocks but block 0 "
    "that have somebody of the group; a group that nobody is in is left out, and a user counts in every block. Groups "
    "of items have their recall.",
    "Curves over rounds": "Validation metric, errors below 0; mean over the seeds that still train.",
    "R[t, s]": "The metric on block s after block t, mean over seeds. Down a column: forgetting.",
    "Settings that differ": "Between the variants that were tested on the same items.",
    "How to rerun": "Settings that are today's defaults are left out.",
    "Environment": "Where the runs were made.",
    "Runs that failed": "They are in none of the numbers above."}


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def document(title: str, content: Iterable[str], script: str) -> str:
    """A page of some content, with DataTables in it; ``script``: what draws it, with what ``tables.js`` has."""
    from itables.utils import read_package_file

    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>", f"<style>{_text('page.css')}</style>",
        f'</head><body><h1>{escape(title)}</h1><p id="errors"></p>', *content,
        _packed("tables-js", read_package_file("html/dt_bundle.js")),
        _packed("tables-css", read_package_file("html/dt_bundle.css")),
        f"<script>{_text('tables.js')}{script}</script>", "</body></html>", ""])


def _section(parts: Mapping[str, str | None], cell: int | None = None) -> str:
    """Headings with what they are about; ``cell``: shown only if that cell is chosen."""
    content = "\n".join(f"<h2>{head}</h2>\n<p>{_ABOUT[head]}</p>\n{part or '<p>No record here has these numbers.</p>'}"
                        for head, part in parts.items())
    return f"<section{'' if cell is None else f' data-cell={cell}'}>\n{content}\n</section>"


def report(runs: Sequence[Run], registry: Registry, title: str, plugins: Sequence[Path] = (),
           failed: Sequence[Mapping[str, Any]] = (), tuned: Tuned | None = None) -> str:
    """The page of some records, one at least. ``registry`` and ``plugins``, folders of ``--plugins``, are for the
    commands to rerun; ``failed``: the content of ``run.json`` of runs that failed; ``tuned``: where the settings of
    methods are that may be tested, each tuned."""
    import plotly.express as px
    from plotly.offline import get_plotlyjs

    cells = dashboard.gather(runs, registry)
    rows, of = zip(*((row, i) for i, cell in enumerate(cells) for row in dashboard.leaderboard(cell)))
    metrics = sorted({name for run in runs for name in run.meta["metrics"]},
                     key=lambda name: (name not in {cell.metric for cell in cells}, name))
    averages = [{**row, "average": row[cells[i].metric]} for row, i in zip(rows, of)]
    names = dict.fromkeys(_name(variant.title) for cell in cells for variant in cell.variants)
    colors = dict(zip(names, [*_COLORS, *px.colors.qualitative.Dark24] * len(names)))
    figures: dict[str, str] = {}

    def drawn(name: str, figure: Any | None) -> str:
        if figure is None or not figure.data:
            return ""
        figures[name] = figure.update_layout(template="plotly_white", margin_t=40).to_json()
        return f'<div class="box"><div class="figure" id="{name}"></div></div>'
    sections = [_section({
        "Leaderboard": table("leaderboard", rows, ["method", "dataset", "backbone", "stream", *metrics], of, metrics),
        "Forgetting against learning": drawn("learning", _points(px, rows, "learning", "forgetting", colors)),
        "Accuracy against bytes": drawn("bytes", _points(px, averages, "MB", "average", colors, log=True)),
        "Accuracy against time": drawn("seconds", _points(px, averages, "seconds", "average", colors, log=True))})]
    for i, cell in enumerate(cells):
        compared = dashboard.compared(cell, registry, tuned)
        sections.append(_section({
            "Tests": table(f"tests-{i}", dashboard.tests(cell, compared)),
            "Differences per user": drawn(f"differences-{i}", _differences(px, cell, compared, colors)),
            "Groups of users and items": table(f"groups-{i}", groups := dashboard.groups(cell),
                                               best={name for row in groups for name in row if name != "method"}),
            "Curves over rounds": drawn(f"curves-{i}", _curves(px, cell, colors)),
            "R[t, s]": drawn(f"matrices-{i}", _matrices(px, cell)),
            "Settings that differ": table(f"settings-{i}", dashboard.differing_settings(cell)),
            "How to rerun": table(f"commands-{i}", [
                {"method": variant.title, "command": dashboard.rerun_command(registry, variant, plugins)}
                for variant in cell.variants])}, i))
    sections.append(_section({"Environment": table("environments", dashboard.environments(runs)),
                              "Runs that failed": table("failures", dashboard.failures(failed))}))
    options = "".join(f'<option value="{i}">{escape(cell.title)}</option>' for i, cell in enumerate(cells))
    drawings = ",".join(f"{json.dumps(name)}:{text}" for name, text in figures.items())
    return document(title, [
        sections[0], f'<label>shown below <select id="cell">{options}</select></label>', *sections[1:],
        _packed("plotly", get_plotlyjs()), _packed("figures", f"{{{drawings}}}")], _text("page.js"))
