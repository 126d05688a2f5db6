"""Figures for print, drawn from plain numbers.

Every function returns a matplotlib ``Figure`` 3.3 or 7 inches wide (one or two columns of a paper) with text of at
least 7 points. A method has one look in all figures: a colour of Okabe and Ito's palette, which colour-blind readers
can tell apart, and a marker and line style that say the same without colour. What has no record stays empty.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..core.files import write_atomically
from ..evaluation.metrics import RATING_ERRORS
from ..stats.significance import LEVEL, FriedmanComparison, Headroom
from .frame import Curve, Histogram, OverSeeds

COLUMN, PAGE = 3.3, 7.0  # inches
FORMATS = ("png", "pdf", "svg")
GREY = "#6E6E6E"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False, "axes.linewidth": 0.6, "lines.linewidth": 1.0,
    "lines.markersize": 4, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5,
    "ytick.major.size": 2.5, "axes.spines.top": False, "axes.spines.right": False, "figure.titlesize": 7.5,
    "figure.labelsize": 7, "legend.title_fontsize": 7.5, "errorbar.capsize": 2,
    "figure.constrained_layout.w_pad": 0.03, "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.wspace": 0.03, "figure.constrained_layout.hspace": 0.03,
    "savefig.dpi": 300, "pdf.fonttype": 42, "svg.hashsalt": "fedcl_bench",
    "text.parse_math": False,  # a dollar sign in somebody's title is a dollar sign
}
# Draws or saves with our style and matplotlib's own defaults, whatever the user's matplotlibrc says.
styled = style.context(STYLE, after_reset=True)


@dataclass(frozen=True)
class Look:
    label: str
    color: str = "#000000"
    marker: str = "o"
    line: str | tuple = "-"


_FIXED = {  # Okabe and Ito's colours
    "ft": ("#000000", "o", "-"), "reg": ("#56B4E9", "s", "--"), "kd": ("#009E73", "^", "-."),
    "rlp2": ("#E69F00", "v", ":"), "spp": ("#CC79A7", "D", (0, (3, 1, 1, 1, 1, 1))), "f3crec": ("#D55E00", "*", "-"),
}
# Of other methods: as dark on white as the strongest of those above (Tol's muted colours, but for the first).
_OTHERS = (("#0072B2", "P", (0, (5, 1))), ("#882255", "X", (0, (1, 1))), ("#117733", "<", (0, (4, 2, 1, 2))),
           ("#332288", ">", (0, (2, 2))), ("#8A5A00", "p", (0, (6, 2))), ("#AA4499", "h", (0, (1, 3))))
_MARKER = dict(markersize=5.5, markeredgecolor="white", markeredgewidth=0.5)
_OUTLINE = dict(linestyle="", markerfacecolor="none", markeredgecolor="black", markeredgewidth=0.9)
TANGLE = 3  # curves that one pair of axes shows without tangling; more get a panel each
ACROSS = 4  # panels with curves in a row


def looks(labels: Mapping[str, str]) -> dict[str, Look]:
    """The look of every method; ``labels``: all methods there are, not only those of a figure: name to what it is
    called. The methods of the F3CRec paper have looks of their own; the others take the remaining ones in the order of
    their names."""
    n, found = len(_OTHERS), dict(_FIXED)
    for i, name in enumerate(sorted(set(labels) - set(_FIXED))):  # each further round of colours has other markers
        color, _, line = _OTHERS[i % n]
        found[name] = color, _OTHERS[(i + i // n) % n][1], line
    return {name: Look(label, *found[name]) for name, label in labels.items()}


@styled
def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the path ends in; the same figure gives the same bytes. Raises OSError if the
    file cannot be written."""
    kind = path.suffix[1:]
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
                "svg": {"Date": None, "Creator": None}}[kind]
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=metadata)
    write_atomically(path, buffer.getvalue())


def _grid(rows: int, columns: int, height: float, width: float | None = None, **options) -> tuple[Figure, np.ndarray]:
    """A figure of rows x columns axes, one column of a paper wide if it has one axes across, else two."""
    figure = Figure(figsize=(width or (COLUMN if columns == 1 else PAGE), height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _key(label: str, **look) -> Line2D:
    return Line2D([], [], label=label, **look)


def _legend(figure: Figure, title: str, handles: Iterable[Line2D], missing: str | bool = "") -> None:
    """Title and legend above the panels; ``missing``: what has no record; or whether crosses stand for such."""
    letters = int(17 * figure.get_figwidth())  # in a line
    handles = list(handles)
    if missing:
        label = "no record" if missing is True else textwrap.fill(f"no record: {missing}", letters - 8)
        handles.append(_key(label, linestyle="", marker="x", color=GREY))
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    figure.legend(handles=handles, title=textwrap.fill(title, letters), loc="outside upper center",
                  ncols=max(1, min(len(handles), letters // (longest + 8))), handlelength=2.8, columnspacing=1.2)


@dataclass(frozen=True)
class FigurePanel:
    """Numbers of one kind, a line each from the top."""

    title: str
    axis: str  # what the numbers are
    ours: Mapping[str, OverSeeds | None]  # what a line is called to its mean over seeds; None where there is no record
    base: float | None = None  # what they are compared with, as an upright line; stems start there
    paper: Mapping[str, float] = field(default_factory=dict)  # what a paper prints, as far as it does
    # Write how far a number is from ``base`` beside it, and cut the axis before one far beyond the others.
    written: bool = False


@styled
def estimates(rows: Sequence[Sequence[FigurePanel]], look: Mapping[str, Look], title: str) -> Figure:
    """Means with a whisker of one standard deviation over seeds, and an outlined diamond where a paper's number is.
    Panels are in rows and columns, at most 3 across for print; rows may differ in length, panels of a row have the same
    lines. ``look``: of the lines that have one."""
    names = rows[0][0].ours
    step = 0.05 + 0.12 * max(len(_look(look, name).label.splitlines()) for name in names)
    figure, grid = _grid(len(rows), max(map(len, rows)), (step * len(names) + 0.5) * len(rows) + 0.5, sharey="row")
    for axes, panel in _panels(grid, rows):
        _draw_estimates(axes, panel, look)
    every = [panel for panels in rows for panel in panels]
    handles = [_key("the paper", **_OUTLINE, marker="D")] if any(panel.paper for panel in every) else []
    _legend(figure, title, handles, None in [value for panel in every for value in panel.ours.values()])
    return figure


def _look(look: Mapping[str, Look], name: str) -> Look:
    return look.get(name) or Look(name)


def _panels(grid: np.ndarray, rows: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, Any]]:
    for axes_row, panels in zip(grid, rows):
        yield from zip(axes_row, panels)
        for axes in axes_row[len(panels):]:
            axes.set_visible(False)


def _draw_estimates(axes, panel: FigurePanel, look: Mapping[str, Look]) -> None:
    reach = _reach(panel) if panel.written else np.inf
    for y, (name, value) in enumerate(panel.ours.items()):
        color, marker = _look(look, name).color, _look(look, name).marker
        if value is None:
            axes.plot(0.02, y, "x", color=GREY, transform=axes.get_yaxis_transform(), gid=f"missing:{name}")
        else:
            change = value.mean - (panel.base or 0.0)
            cut = abs(change) > reach
            end = value.mean - change + np.clip(change, -reach, reach)
            if panel.base is not None:
                axes.hlines(y, panel.base, end, color=color, linewidth=1.6, gid=f"stem:{name}")
            if not cut:
                axes.errorbar(end, y, xerr=value.deviation or None, fmt="none", ecolor="black", elinewidth=0.8)
                axes.plot(end, y, color=color, marker=marker, zorder=4, gid=f"ours:{name}")
            if panel.written:
                text = f"{change:+.4f}" if not cut else f"▸ {change:+.4f}" if change > 0.0 else f"{change:+.4f} ◂"
                side, beyond = (1 if change >= 0.0 else -1), 0.0 if cut else value.deviation
                axes.annotate(text, (end + side * beyond, y), (5 * side, 0), textcoords="offset points", va="center",
                              ha="left" if side > 0 else "right", gid=f"change:{name}")
        if name in panel.paper:
            axes.plot(panel.paper[name], y, **_OUTLINE, marker="D", zorder=5, gid=f"paper:{name}")
    if panel.written:
        axes.set_xlim(panel.base - 1.9 * reach, panel.base + 1.9 * reach)  # leaves room for numbers
    axes.axvline(panel.base or 0.0, color="black", linewidth=0.6, zorder=0, visible=panel.base is not None)
    low, high = axes.get_xlim()
    if panel.base and low < 0.0 < high:
        axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=":", zorder=0, gid="zero")
    axes.set(ylim=(len(panel.ours) - 0.5, -0.5), xlabel=panel.axis, title=panel.title)
    axes.set_yticks(range(len(panel.ours)), [_look(look, name).label for name in panel.ours])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#E0E0E0", linewidth=0.5)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _reach(panel: FigurePanel) -> float:
    """How far an axis goes from the base: to the largest change, or to that before those five times as large as the
    next, if they are fewer than the others."""
    changes = sorted(abs(value.mean - (panel.base or 0.0)) + value.deviation for value in panel.ours.values() if value)
    ascending = [change for change in changes if change > 0.0]
    for smaller, larger in zip(ascending[len(ascending) // 2:], ascending[len(ascending) // 2 + 1:]):
        if larger > 5.0 * smaller:
            return 1.4 * smaller
    return ascending[-1] if ascending else 1e-4


_SETTING_NAMES = {"eps": "ε", "lambda_kd": "λ_KD", "beta": "β", "neighbours": "k, prototypes retrieved",
                  "lambda_tasd": "λ of time-aware self-distillation",
                  "prototype_noise": "standard deviation of the noise on prototypes",
                  "upload_noise": "scale b of the Laplace noise on uploads", "clusters": "K, clusters of items",
                  "text_layers": "a, layers of the language model",
                  "federated_rounds": "t, rounds of the first stage"}


_CLAIM = {"color": GREY, "linestyle": "--", "linewidth": 0.9}


@dataclass(frozen=True)
class SettingPanel:
    """The metric over the values of one setting."""

    name: str
    points: Mapping[float, OverSeeds | None]  # value to the metric; None where there is no record
    chosen: float | None  # the value that all other runs use, if it is a number
    above: Mapping[float, str] = field(default_factory=dict)  # value to what a second axis above the panel shows there
    above_label: str = ""  # that axis' name
    claim: tuple[float, float] | None = None  # a level that a paper says is kept, and up to which value
    title: str = ""  # of what the numbers are, where panels differ in that; each then has an axis of its own


@styled
def sensitivity(panels: Sequence[SettingPanel], look: Look, metric: str, title: str, claim: str = "") -> Figure:
    """F3CRec's Figure 4, FCUCR's sensitivity and noise curves: the metric for each value of each setting.

    Mean and one standard deviation over seeds. The chosen value has a large marker; values without a record are grey
    crosses on the axis. ``claim`` is what a paper says of the panels' levels.
    """
    figure, grid = _grid(1, len(panels), 2.0 if len(panels) > 1 else 2.4,
                         sharey=not any(panel.title for panel in panels))
    for panel, axes in zip(panels, grid[0]):
        _draw_setting(axes, panel, look)
    grid[0, 0].set_ylabel(metric)
    claimed = [_key(claim, **_CLAIM)] if claim and any(panel.claim for panel in panels) else []
    _legend(figure, f"{title}, mean ± std over seeds", [_key("value of the other runs", **_OUTLINE, marker="o",
                                                             markersize=7), *claimed],
            None in [point for panel in panels for point in panel.points.values()])
    return figure


def _draw_setting(axes, panel: SettingPanel, look: Look) -> None:
    every = sorted(panel.points)
    points = [panel.points[value] or OverSeeds(np.nan, 0.0, 0) for value in every]  # nan: the line is broken there
    axes.errorbar(every, [p.mean for p in points], [p.deviation if p.n > 1 else np.nan for p in points],
                  color=look.color, marker="o", markersize=3.5, linewidth=0.9, gid=f"ours:{panel.name}")
    if chosen := panel.points.get(panel.chosen):
        axes.plot(panel.chosen, chosen.mean, **_OUTLINE, marker="o", markersize=8, zorder=5, gid="chosen")
    if panel.claim:
        level, until = panel.claim
        axes.plot([every[0], until], [level, level], **_CLAIM, gid="claim")
    if missing := [value for value, point in zip(every, points) if not point.n]:
        axes.plot(missing, [0.03] * len(missing), "x", color=GREY, transform=axes.get_xaxis_transform(),
                  gid="missing")
    if every[0] > 0 and every[-1] / every[0] >= 100:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    if panel.above:
        second = axes.secondary_xaxis("top")
        second.set_xticks(list(panel.above), list(panel.above.values()))
        second.set_xlabel(panel.above_label)
        axes.set_xticks(list(panel.above))
    axes.set(xlabel=_SETTING_NAMES.get(panel.name, panel.name), title=panel.title)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(y=0.12)


@styled
def forgetting_maps(matrices: Mapping[str, np.ndarray | None], look: Mapping[str, Look], metric: str,
                    title: str) -> Figure:
    """R[t, s] of every method: rows are the block trained last, columns the block tested; 6 panels a row. ``matrices``:
    method to R of shape (T, T), nan above the diagonal; None where there is no record."""
    there = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    every = np.stack(list(there.values()))
    low, high = float(np.nanmin(every)), float(np.nanmax(every))
    columns = min(6, len(there))
    rows = -(-len(there) // columns)
    width = PAGE if columns > 2 else COLUMN
    side = min(1.5, (width - 1.0) / columns)
    figure, grid = _grid(rows, columns, rows * (side + 0.25) + 0.7, width, sharex=True, sharey=True)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < len(there))
    for axes, (name, matrix) in zip(grid.flat, there.items()):
        axes.set(title=look[name].label, xticks=range(len(matrix)), yticks=range(len(matrix)))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        image = axes.imshow(np.ma.masked_invalid(matrix), cmap="cividis", vmin=low, vmax=high)
        for t, s in zip(*np.tril_indices(len(matrix))):
            axes.text(s, t, f"{matrix[t, s]:.3f}".lstrip("0"), ha="center", va="center", gid=f"R:{name}:{t},{s}",
                      color="black" if matrix[t, s] > (low + high) / 2 else "white")
    for axes in grid[:, 0]:
        axes.set_ylabel("trained up to block")
    figure.supxlabel("tested on block")
    figure.colorbar(image, ax=grid, fraction=0.03, pad=0.01, aspect=18, label=metric, ticks=MaxNLocator(4))
    _legend(figure, title, [], ", ".join(look[name].label for name in matrices if name not in there))
    return figure


def validation_curves(curves: Mapping[str, Sequence[Curve] | None], look: Mapping[str, Look], metric: str,
                      title: str) -> Figure:
    """``round_curves`` of the validation metric: method to a curve per block, None where there is no record."""
    blocks = max(len(several or ()) for several in curves.values())
    panels = {f"block {block}" if blocks > 1 else "": {name: several[block] if several else None
                                                       for name, several in curves.items()} for block in range(blocks)}
    return round_curves(panels, look, f"validation {'-' * (metric in RATING_ERRORS)}{metric}", title)


@styled
def round_curves(panels: Mapping[str, Mapping[str, Curve | None]], look: Mapping[str, Look], metric: str,
                 title: str) -> Figure:
    """A metric over the rounds: mean and band of one standard deviation over seeds.

    A line is faint where fewer seeds are left (the others have stopped early); the marker is the mean best round and
    its mean value. More than ``TANGLE`` methods in one panel would tangle: each has panels of its own, with the others
    grey behind it. ``panels``: title to method to its curve; None where there is no record."""
    names = list(dict.fromkeys(name for curves in panels.values() for name, curve in curves.items() if curve))
    together = len(names) <= TANGLE
    titles = list(panels)
    rows = [titles[i:i + ACROSS] for i in range(0, len(titles), ACROSS)]
    shown = [[(names, title) for title in row] for row in rows] if together else \
        [[([name], title) for title in row] for row in rows for name in names]
    if not together and len(panels) == 1:
        shown = [sum(shown[i:i + ACROSS], []) for i in range(0, len(shown), ACROSS)]
    figure, grid = _grid(len(shown), len(shown[0]), 1.3 * len(shown) + 0.9)
    for axes, (foreground, panel) in _panels(grid, shown):
        for name, curve in panels[panel].items():
            if curve and name in foreground:
                _draw_curve(axes, curve, name, look[name], 3 + names.index(name))
            elif curve:
                axes.plot(np.arange(len(curve.mean)) + 1, curve.mean, color="#C4C4C4", linewidth=0.6, zorder=1,
                          gid=f"background:{name}")
        axes.set_title(panel if together else "\n".join(filter(None, [look[foreground[0]].label, panel])))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
    for axes in grid[-1]:
        axes.set_xlabel("round")
    lacking: dict[str, list[str]] = {}
    for panel, curves in panels.items():
        for name in (name for name, curve in curves.items() if curve is None):
            lacking.setdefault(look[name].label, []).append(panel)
    missing = "; ".join(label if len(of) == len(panels) else f"{label} on {', '.join(of)}"
                        for label, of in lacking.items())
    handles = [_key(look[name].label, color=look[name].color, linestyle=look[name].line, marker=look[name].marker,
                    **_MARKER) for name in names]
    _legend(figure, f"{metric}, {title}" + ("" if together else "; grey: the other methods"),
            handles if together else [], missing)
    return figure


def _draw_curve(axes, curve: Curve, name: str, style: Look, z: int) -> None:
    """Mean and band over the rounds that all seeds reached, the faint tail of those that are left, and the best."""
    rounds, reached = np.arange(1, len(curve.mean) + 1), slice(curve.common)
    line = dict(color=style.color, linestyle=style.line, zorder=z)
    axes.fill_between(rounds[reached], (curve.mean - curve.deviation)[reached],
                      (curve.mean + curve.deviation)[reached], color=style.color, alpha=0.15, linewidth=0)
    axes.plot(rounds[reached], curve.mean[reached], gid=f"mean:{name}", **line)
    axes.plot(rounds[curve.common - 1:], curve.mean[curve.common - 1:], alpha=0.35, gid=f"tail:{name}", **line)
    axes.plot(curve.best_round, curve.best_value, color=style.color, marker=style.marker, zorder=20,
              gid=f"best:{name}", **{**_MARKER, "markersize": 8.5 if style.marker == "*" else 5.5})


@styled
def user_histograms(rows: Sequence[Sequence[tuple[str, Mapping[str, Histogram]]]], look: Mapping[str, Look],
                    axis: str) -> Figure:
    """FCUCR's Figure 2b and c: the share of the users in each range of some values, which ``axis`` says. A panel has a
    title, and a histogram by value, none without a record. The first is filled, the others are outlines; vertical lines
    are the means, which the legends say."""
    figure, grid = _grid(len(rows), max(map(len, rows)), 0.4 + 1.6 * len(rows), sharey=True, sharex=True)
    top = max(float(histogram.share.max()) for row in rows for _, values in row for histogram in values.values())
    for axes, (title, values) in _panels(grid, rows):
        handles = []
        for i, (name, histogram) in enumerate(values.items()):
            line = dict(color=look[name].color, linestyle=look[name].line)
            if i == 0:
                axes.stairs(histogram.share, histogram.edges, fill=True, color=look[name].color, alpha=0.3)
            axes.stairs(histogram.share, histogram.edges, gid=f"share:{name}", zorder=3 + i, **line)
            axes.plot([histogram.mean.mean] * 2, [0.0, 1.05 * top], zorder=3 + i, gid=f"mean:{name}", linewidth=0.7,
                      **line)
            handles.append(_key(f"{look[name].label}: {histogram.mean.text('.3f')}", **line))
        axes.set(title=title, ylim=(0.0, top * (1.1 + 0.14 * len(look))))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.legend(handles=handles or [_key("no record", linestyle="")], loc="upper center", handlelength=1.6,
                    borderaxespad=0.1)
    figure.supxlabel(axis)
    figure.supylabel("share of the users")
    return figure


@styled
def audit_curves(content: Mapping[str, Any], title: str) -> Figure:
    """AUC and precision of the attacks on clients' uploads over the noise on them, a marker and line per attacked
    round; whiskers are 95 % intervals over clients. ``content``: what ``audit.content`` returns."""
    figure, grid = _grid(1, 2, 2.4)
    chance = content["by_chance"]
    attacks = {"size": ("#0072B2", "size"), "direction": ("#D55E00", "direction"),
               "sum_size": ("#56B4E9", "size, uploads added up"),
               "sum_direction": ("#E69F00", "direction, uploads added up")}
    look = {number: dict(marker="os^D"[i % 4], linestyle=("-", "--", ":", "-.")[i % 4], markersize=3.5)
            for i, number in enumerate(content["rounds"])}
    noises = sorted({row["noise"] for row in content["levels"]})
    least = next((noise for noise in noises if noise > 0.0), 1.0)
    for axes, metric, label, floors in (
            (grid[0, 0], "auc", "AUC", {"by chance": chance["auc"]}),
            (grid[0, 1], "precision", "precision at n₊", {
                "by chance": chance["precision"], "by chance among changed rows": chance["precision_touched"]})):
        for number in content["rounds"]:
            for attack, (color, _) in attacks.items():
                name = f"{attack}_{metric}"
                points = np.array([(row["noise"], *(row[name][part] for part in ("mean", "low", "high")))
                                   for row in content["levels"] if row["round"] == number and row[name]]).reshape(-1, 4)
                noise, mean, low, high = points.T
                axes.errorbar(noise, mean, (mean - low, high - mean), color=color, linewidth=0.9,
                              gid=f"{name}:{number}", zorder=1.5 if attack.startswith("sum") else 2.0, **look[number])
        for words, floor in floors.items():
            axes.axhline(floor, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
            axes.annotate(words, (0.0, floor), (2, 1), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="bottom", color=GREY)
        if noises[-1] > 30 * least:
            axes.set_xscale("symlog", linthresh=least)
            axes.set_xlim(-0.4 * least, 1.3 * noises[-1])
            axes.set_xticks(noises, [f"{noise:g}" for noise in noises])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="noise on uploads", ylabel=label, ylim=(-0.03, 1.03))
    _legend(figure, title, [*(_key(f"by {words}", color=color) for color, words in attacks.values()),
                            *(_key(f"round {number}", color="black", **each) for number, each in look.items())])
    return figure


@styled
def critical_difference_diagram(labels: Sequence[str], test: FriedmanComparison, title: str) -> Figure:
    """Average ranks on an axis, best on the left; a bar joins methods that do not differ (Demšar 2006, Figure 1).
    ``labels``: of the methods, in the order of ``test.ranks``."""
    k, ranks = len(labels), np.array(test.ranks)
    names, groups = -(-k // 2), len(test.groups)  # names on the left; bars
    depth = 0.21 + 0.07 * groups + 0.17 * names  # inches below the axis
    width, height, margin = COLUMN if k <= 8 else PAGE, depth + 0.9, 0.95
    inch = (k - 1) / (width - 2 * margin)  # in ranks
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((margin / width, 0.42 / height, 1 - 2 * margin / width, depth / height))
    axes.set(xlim=(1, k), ylim=(-depth, 0.0), xticks=range(1, k + 1), yticks=[])
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    axes.spines["top"].set_visible(True)
    line = dict(color="black", linewidth=0.8, solid_capstyle="butt", clip_on=False)
    for position, i in enumerate(np.argsort(ranks, kind="stable").tolist()):
        left = position < names
        y = -(0.21 + 0.07 * groups + 0.17 * (position if left else k - 1 - position))
        edge = 1 - 0.08 * inch if left else k + 0.08 * inch
        axes.plot([ranks[i], ranks[i], edge], [0.0, y, y], gid=f"rank:{labels[i]}", **line)
        axes.annotate(f"{labels[i]}  {ranks[i]:.2f}" if left else f"{ranks[i]:.2f}  {labels[i]}", (edge, y),
                      (-3 if left else 3, 0), textcoords="offset points", ha="right" if left else "left", va="center",
                      annotation_clip=False)
    for row, group in enumerate(test.groups):
        reach = ranks[list(group)].min() - 0.04 * inch, ranks[list(group)].max() + 0.04 * inch
        axes.plot(reach, [-(0.09 + 0.07 * row)] * 2, gid=f"group:{row}", **{**line, "linewidth": 2.4})
    difference, middle, words = test.critical_difference, (1 + k) / 2, ", more than the whole axis"
    if difference <= k - 1:
        axes.plot([1, 1 + difference], [0.27, 0.27], marker="|", gid="cd", **line)
        middle, words = 1 + difference / 2, ""
    axes.text(middle, 0.3, f"CD = {difference:.2f}{words}", ha="center", va="bottom")
    p = f"p = {test.p:.3f}" if test.p >= 0.001 else "p < 0.001"
    p += "" if test.p <= LEVEL else " (no difference at 5 %)"
    figure.text(0.5, 0.32 / height, f"{title}\nFriedman χ²({k - 1}) = {test.chi2:.2f}, {p}, {test.n} rows",
                ha="center", va="top", linespacing=1.3)
    return figure


@styled
def gains(rows: Sequence[Sequence[tuple[str, Mapping[str, Headroom | None]]]], bound: str, look: Mapping[str, Look],
          title: str) -> Figure:
    """Gains over a reference with their intervals, a panel per cell; the band is the interval of the bound's gain.
    ``rows``: panels' titles, and methods to their gains."""
    lines = len(rows[0][0][1])
    figure, grid = _grid(len(rows), len(rows[0]), 0.55 + len(rows) * (0.35 + 0.15 * lines), sharex="row", sharey=True)
    for axes, (name, methods) in _panels(grid, rows):
        axes.set_title(name, loc="left")
        axes.axvline(0.0, color="black", linewidth=0.8)
        if (limit := methods.get(bound)) is not None:
            axes.axvspan(*limit.gain[1:], color=GREY, alpha=0.2, linewidth=0, gid=f"bound:{name}")
        for y, (method, found) in enumerate(methods.items()):
            if found is not None:
                style, (mean, low, high) = _look(look, method), found.gain
                ends = np.maximum(0.0, [[mean - low], [high - mean]])  # equal gains: below 0 by rounding
                axes.errorbar(mean, y, xerr=ends, color=style.color, marker=style.marker, linestyle="", elinewidth=1.0,
                              gid=f"gain:{name}:{method}")
        axes.set(ylim=(lines - 0.5, -0.5), yticks=range(lines), yticklabels=[_look(look, m).label for m in methods])
        axes.xaxis.set_major_locator(MaxNLocator(4))
    _legend(figure, title, [])
    return figure
