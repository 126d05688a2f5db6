"""Figures for print, drawn from plain numbers.

Every function returns a matplotlib ``Figure`` 3.3 or 7 inches wide (one or two columns of a paper) with text of at
least 7 points. A method has one look in all figures: a colour of Okabe and Ito's palette, which colour-blind readers
can tell apart, and a hatch, marker and line style that say the same without colour. What has no record stays empty.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Tick
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..core.files import write_atomically
from ..stats.significance import LEVEL, FriedmanComparison
from .frame import Curve, Histogram, OverSeeds

COLUMN, PAGE = 3.3, 7.0  # inches
FORMATS = ("png", "pdf", "svg")
GREY = "#6E6E6E"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False, "axes.linewidth": 0.6, "lines.linewidth": 1.1,
    "lines.markersize": 4, "hatch.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "xtick.major.size": 2.5, "ytick.major.size": 2.5, "axes.spines.top": False, "axes.spines.right": False,
    "figure.titlesize": 7.5, "figure.labelsize": 7, "legend.title_fontsize": 7.5, "errorbar.capsize": 2,
    "figure.constrained_layout.w_pad": 0.03, "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.wspace": 0.03, "figure.constrained_layout.hspace": 0.03,
    "axes.unicode_minus": True, "savefig.dpi": 300, "pdf.fonttype": 42, "svg.hashsalt": "fedcl_bench",
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn and called in every figure."""

    label: str
    color: str
    hatch: str
    marker: str
    line: str | tuple


_FIXED = {  # Okabe and Ito's colours
    "ft": ("#000000", "", "o", "-"), "reg": ("#56B4E9", "....", "s", "--"), "kd": ("#009E73", "////", "^", "-."),
    "rlp2": ("#E69F00", "\\\\\\\\", "v", ":"), "spp": ("#CC79A7", "xxxx", "D", (0, (3, 1, 1, 1, 1, 1))),
    "f3crec": ("#D55E00", "", "*", "-"),
}
# Of other methods: as dark on white as the strongest of those above (Tol's muted colours, but for the first).
_OTHERS = (("#0072B2", "----", "P", (0, (5, 1))), ("#882255", "||||", "X", (0, (1, 1))),
           ("#117733", "++++", "<", (0, (4, 2, 1, 2))), ("#332288", "oooo", ">", (0, (2, 2))),
           ("#8A5A00", "**", "p", (0, (6, 2))), ("#AA4499", "OO", "h", (0, (1, 3))))
_MARKER = dict(markeredgecolor="white", markeredgewidth=0.5)
TANGLE = 3  # curves that one pair of axes shows without tangling; more get a panel each


def looks(labels: Mapping[str, str]) -> dict[str, Look]:
    """The look of every method.

    Args:
        labels: all methods there are, not only those of a figure: name to what it is called. The methods of the F3CRec
            paper have looks of their own; the others take the remaining ones in the order of their names.
    """
    others = sorted(set(labels) - set(_FIXED))
    return {name: Look(label, *(_FIXED.get(name) or _OTHERS[others.index(name) % len(_OTHERS)]))
            for name, label in labels.items()}


def styled(draw: Callable) -> Callable:
    """Draw or save with our style and matplotlib's own defaults, whatever the user's matplotlibrc says."""
    @functools.wraps(draw)
    def drawn(*args, **options):
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return draw(*args, **options)
    return drawn


@styled
def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the path ends in; the same figure gives the same bytes.

    Raises:
        OSError: if the file cannot be written.
    """
    kind = path.suffix[1:]
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
                "svg": {"Date": None, "Creator": None}}[kind]
    for text in _texts(figure):
        text.set_parse_math(False)  # a dollar sign in somebody's title is a dollar sign
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=metadata)
    write_atomically(path, buffer.getvalue())


def _texts(artist: Artist) -> Iterator[Text]:
    """All texts but those at ticks, which matplotlib writes as formulas."""
    for child in artist.get_children():
        if isinstance(child, Text):
            yield child
        elif not isinstance(child, Tick):
            yield from _texts(child)


def _grid(rows: int, columns: int, height: float, width: float | None = None, **options) -> tuple[Figure, np.ndarray]:
    """A figure of rows x columns axes, one column of a paper wide if it has one axes across, else two."""
    figure = Figure(figsize=(width or (COLUMN if columns == 1 else PAGE), height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _key(label: str, **look) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], label=label, **look)


def missing_key() -> Line2D:
    """The entry of what has no record."""
    return _key("no record", linestyle="", marker="x", color=GREY)


@dataclass(frozen=True)
class BarPanel:
    """Improvements in percent on one dataset and backbone.

    Attributes:
        ours: method to improvement; None where there is no record.
        paper: method to what the paper prints; None or absent where it prints nothing.
    """

    title: str
    ours: Mapping[str, OverSeeds | None]
    paper: Mapping[str, float | None]


@styled
def improvement_bars(rows: Sequence[Sequence[BarPanel]], look: Mapping[str, Look], base: str, metric: str) -> Figure:
    """F3CRec's Figure 3: bars of the improvement over a base method, with a whisker of one standard deviation over
    seeds and an outlined diamond where the paper's number is.

    Args:
        rows: panels in rows and columns, at most 3 across for print; rows may differ in length.
        base, metric: what they are called.
    """
    figure, grid = _grid(len(rows), max(map(len, rows)), 1.55 * len(rows) + 0.35, sharey="row")
    for panels, axes_row in zip(rows, grid):
        for axes in axes_row[len(panels):]:
            axes.set_visible(False)
        for panel, axes in zip(panels, axes_row):
            _draw_bars(axes, panel, look)
        axes_row[0].set_ylabel(f"{metric}, improvement\nover {base} (%)")
    handles = [_key("ours, ± std over seeds", marker="s", linestyle="", color=GREY, markersize=6)]
    if any(panel.paper.get(name) is not None for panels in rows for panel in panels for name in panel.ours):
        handles.append(_key("the paper", marker="D", linestyle="", markerfacecolor="white", markeredgecolor="black"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


def _draw_bars(axes, panel: BarPanel, look: Mapping[str, Look]) -> None:
    """One panel of ``improvement_bars``: per method our bar and the paper's diamond."""
    for x, (name, ours) in enumerate(panel.ours.items()):
        style = look[name]
        if ours is None:
            axes.text(x - 0.1, 0.0, "no record", rotation=90, ha="center", va="bottom", color=GREY, gid="missing")
        else:
            # A hatch has the colour of the edge, so the black outline is a bar of its own.
            axes.bar(x - 0.1, ours.mean, 0.58, color=style.color, hatch=style.hatch, edgecolor="white", linewidth=0.0,
                     gid=f"ours:{name}")
            axes.bar(x - 0.1, ours.mean, 0.58, fill=False, edgecolor="black", linewidth=0.6)
            if ours.n > 1:
                axes.errorbar(x - 0.1, ours.mean, ours.deviation, color="black", linewidth=0.8)
        printed = panel.paper.get(name)
        if printed is not None:
            axes.plot(x + 0.33, printed, "D", markerfacecolor="white", markeredgecolor="black", markersize=4,
                      markeredgewidth=0.8, zorder=5, gid=f"paper:{name}")
    axes.axhline(0.0, color="black", linewidth=0.6)
    axes.set_xlim(-0.6, len(panel.ours) - 0.4)
    axes.set_xticks(range(len(panel.ours)), [look[name].label for name in panel.ours],
                    **(dict(rotation=40, ha="right", rotation_mode="anchor") if len(panel.ours) > 6 else {}))
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.margins(y=0.12)
    axes.set_title(panel.title)


@dataclass(frozen=True)
class SettingPanel:
    """The metric over the values of one setting.

    Attributes:
        points: value to the metric; None where there is no record.
        chosen: the value that all other runs use, if it is a number.
        above, above_label: value to what a second axis above the panel shows there, and that axis' name.
    """

    name: str
    points: Mapping[float, OverSeeds | None]
    chosen: float | None
    above: Mapping[float, str] = field(default_factory=dict)
    above_label: str = ""


_SETTING_NAMES = {"eps": "ε", "lambda_kd": "λ_KD", "beta": "β", "neighbours": "k, prototypes retrieved",
                  "lambda_tasd": "λ of time-aware self-distillation",
                  "prototype_noise": "standard deviation of the noise on prototypes"}


@styled
def sensitivity(panels: Sequence[SettingPanel], look: Look, metric: str, title: str) -> Figure:
    """F3CRec's Figure 4, FCUCR's sensitivity and noise curves: the metric for each value of each setting.

    Mean and one standard deviation over seeds. The chosen value has a large marker; values without a record are grey
    crosses on the axis.
    """
    figure, grid = _grid(1, len(panels), 1.75 if len(panels) > 1 else 2.4, sharey=True)
    for panel, axes in zip(panels, grid[0]):
        _draw_setting(axes, panel, look)
    grid[0, 0].set_ylabel(metric)
    handles = [_key(f"{title}, ± std over seeds", color=look.color, marker="o", markersize=3.5),
               _key("value of the other runs", linestyle="", marker="o", markersize=7, markerfacecolor="none",
                    markeredgecolor="black")]
    if any(point is None for panel in panels for point in panel.points.values()):
        handles.append(missing_key())
    figure.legend(handles=handles, loc="outside upper center", ncols=3 if len(panels) > 1 else 1)
    return figure


def _draw_setting(axes, panel: SettingPanel, look: Look) -> None:
    """One panel of ``sensitivity``."""
    every = sorted(panel.points)
    points = [panel.points[value] for value in every]
    # nan where there is no record, so that the line is broken there
    axes.errorbar(every, [p.mean if p else np.nan for p in points],
                  [p.deviation if p and p.n > 1 else np.nan for p in points], color=look.color, linestyle="-",
                  marker="o", markersize=3.5, linewidth=0.9, gid=f"ours:{panel.name}")
    if panel.points.get(panel.chosen):
        axes.plot(panel.chosen, panel.points[panel.chosen].mean, "o", markersize=8, markerfacecolor="none",
                  markeredgecolor="black", markeredgewidth=0.9, zorder=5, gid="chosen")
    missing = [value for value, point in zip(every, points) if not point]
    if missing:
        axes.plot(missing, [0.03] * len(missing), "x", color=GREY, transform=axes.get_xaxis_transform(),
                  gid="missing")
    if every and every[0] > 0 and every[-1] / every[0] >= 100:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
    elif every and every[-1] < 0.01:
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0), useMathText=True)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    if panel.above:
        second = axes.secondary_xaxis("top")
        second.set_xticks(list(panel.above), list(panel.above.values()))
        second.set_xlabel(panel.above_label)
        axes.set_xticks(list(panel.above))
    axes.set_xlabel(_SETTING_NAMES.get(panel.name, panel.name))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(y=0.12)


@styled
def forgetting_maps(matrices: Mapping[str, np.ndarray | None], look: Mapping[str, Look], metric: str,
                    title: str) -> Figure:
    """R[t, s] of every method: rows are the block trained last, columns the block tested; 6 panels a row.

    Args:
        matrices: method to R of shape (T, T), nan above the diagonal; None where there is no record.
    """
    columns = min(6, len(matrices))
    rows = -(-len(matrices) // columns)
    shown = [m for m in matrices.values() if m is not None]
    size = len(shown[0])
    low, high = min(float(np.nanmin(m)) for m in shown), max(float(np.nanmax(m)) for m in shown)
    width = PAGE if columns > 2 else COLUMN
    side = min(1.5, (width - 1.0) / columns)
    figure, grid = _grid(rows, columns, rows * (side + 0.25) + 0.45, width, sharex=True, sharey=True)
    image = None
    for axes, (name, matrix) in zip(grid.flat, matrices.items()):
        axes.set_title(look[name].label)
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        if matrix is None:
            axes.text((size - 1) / 2, (size - 1) / 2, "no record", ha="center", va="center", color=GREY, gid="missing")
            axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
            continue
        image = axes.imshow(np.ma.masked_invalid(matrix), cmap="cividis", vmin=low, vmax=high)
        for t in range(size):
            for s in range(t + 1):
                bright = (matrix[t, s] - low) / (high - low or 1.0) > 0.5
                axes.text(s, t, f"{matrix[t, s]:.3f}".lstrip("0"), ha="center", va="center",
                          color="black" if bright else "white", gid=f"R:{name}:{t},{s}")
    for axes in list(grid.flat)[len(matrices):]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("trained up to block")
    figure.supxlabel("tested on block")
    figure.colorbar(image, ax=grid, fraction=0.03, pad=0.01, aspect=18, label=metric, ticks=MaxNLocator(4))
    figure.suptitle(title)
    return figure


def _draw_curve(axes, curve: Curve, name: str, z: int, line: Mapping) -> None:
    """Mean and band over the rounds that all seeds reached, then the faint tail of those that are left."""
    rounds = np.arange(1, len(curve.mean) + 1)
    axes.fill_between(rounds[:curve.common], (curve.mean - curve.deviation)[:curve.common],
                      (curve.mean + curve.deviation)[:curve.common], color=line["color"], alpha=0.15, linewidth=0)
    axes.plot(rounds[:curve.common], curve.mean[:curve.common], zorder=z, gid=f"mean:{name}", **line)
    axes.plot(rounds[curve.common - 1:], curve.mean[curve.common - 1:], zorder=z, alpha=0.35, gid=f"tail:{name}",
              **line)


def _note_missing(figure: Figure, lacking: Sequence[str]) -> None:
    """Name below a figure what has no record."""
    if lacking:
        text = "\n".join(f"No record: {names}." for names in lacking)
        figure.supxlabel(text, x=0.01, ha="left", color=GREY)


@styled
def early_curves(panels: Mapping[str, Mapping[str, Curve | None]], look: Mapping[str, Look], metric: str) -> Figure:
    """FCUCR's Figure 2a: how well each client's first session is still predicted after every round.

    Mean and band of one standard deviation over seeds; a line is faint where fewer seeds are left.

    Args:
        panels: title to method to its curve; None where there is no record.
    """
    figure, grid = _grid(1, len(panels), 2.1, sharey=True)
    handles: dict[str, Line2D] = {}
    lacking: list[str] = []
    for axes, (title, curves) in zip(grid[0], panels.items()):
        for z, (name, curve) in enumerate(curves.items(), start=3):
            style = look[name]
            line = dict(color=style.color, linestyle=style.line, linewidth=1.0)
            handles.setdefault(name, _key(style.label, **line))
            if curve is not None:
                _draw_curve(axes, curve, name, z, line)
        missing = [look[name].label for name, curve in curves.items() if curve is None]
        lacking += [f"{', '.join(missing)} on {title}"] if missing else []
        axes.set_title(title)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    grid[0, 0].set_ylabel(f"{metric},\nfirst session")
    figure.legend(handles=list(handles.values()), loc="outside upper center", ncols=len(handles), handlelength=2.8,
                  title="mean ± std over seeds")
    _note_missing(figure, lacking)
    return figure


@styled
def user_histograms(panels: Mapping[str, Mapping[str, Histogram | None]], look: Mapping[str, Look],
                    axis: str) -> Figure:
    """FCUCR's Figure 2b and c: the share of the users in each range of a value, one variant over the other.

    Args:
        panels: title to variant to its histogram; None where there is no record. The first is filled, the others are
            outlines; vertical lines are the means.
        axis: what the value is.
    """
    figure, grid = _grid(1, len(panels), 2.0, sharey=True)
    top = max(float(histogram.share.max()) for variants in panels.values() for histogram in variants.values()
              if histogram)
    for axes, (title, variants) in zip(grid[0], panels.items()):
        handles = []
        for i, (name, histogram) in enumerate(variants.items()):
            style = look[name]
            if histogram is None:
                handles.append(_key(f"{style.label}: no record", linestyle=""))
                continue
            line = dict(color=style.color, linestyle=style.line, linewidth=1.0)
            if i == 0:
                axes.stairs(histogram.share, histogram.edges, fill=True, color=style.color, alpha=0.3)
            axes.stairs(histogram.share, histogram.edges, gid=f"share:{name}", zorder=3 + i, **line)
            axes.plot([histogram.mean.mean] * 2, [0.0, 1.05 * top], zorder=3 + i, gid=f"mean:{name}",
                      **{**line, "linewidth": 0.7})
            deviation = f" ± {histogram.mean.deviation:.3f}" if histogram.mean.n > 1 else ""
            handles.append(_key(f"{style.label}: mean {histogram.mean.mean:.3f}{deviation}", **line))
        axes.set_title(title)
        axes.set_xlabel(axis)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(0.0, top * (1.1 + 0.14 * len(handles)))
        axes.legend(handles=handles, loc="upper center", handlelength=2.4, borderaxespad=0.1)
    grid[0, 0].set_ylabel("share of the users")
    return figure


def _draw_best(axes, curve: Curve, name: str, style: Look) -> None:
    """The mean best round and its mean value."""
    axes.plot(curve.best_round, curve.best_value, color=style.color, marker=style.marker,
              markersize=8.5 if style.marker == "*" else 5.5, zorder=20, gid=f"best:{name}", **_MARKER)


@styled
def validation_curves(curves: Mapping[str, Sequence[Curve] | None], look: Mapping[str, Look], metric: str,
                      title: str) -> Figure:
    """The validation metric over the rounds: mean and band of one standard deviation over seeds.

    Up to ``TANGLE`` methods share the axes of a block. More would tangle: each has a row of panels, or a panel if there
    is one block, with the others grey behind it. A line is faint where fewer seeds are left (the others have stopped
    early); the marker is the mean best round and its mean value. Methods without a record are named below.
    """
    there = {name: several for name, several in curves.items() if several}
    draw = _curves_together if len(there) <= TANGLE else _curves_apart
    figure = draw(there, look, metric, title)
    lacking = [look[name].label for name, several in curves.items() if not several]
    _note_missing(figure, [", ".join(lacking)] if lacking else [])
    return figure


def _curves_together(curves: Mapping[str, Sequence[Curve]], look: Mapping[str, Look], metric: str,
                     title: str) -> Figure:
    """One panel per block with every method's curve."""
    blocks = max(map(len, curves.values()))
    columns = min(4, blocks)
    rows = -(-blocks // columns)
    figure, grid = _grid(rows, columns, 1.65 * rows + 0.5)
    handles = []
    for z, (name, several) in enumerate(curves.items(), start=3):
        style = look[name]
        line = dict(color=style.color, linestyle=style.line, linewidth=1.0)
        handles.append(_key(style.label, **line, **_MARKER, marker=style.marker, markersize=5.5))
        for axes, curve in zip(grid.flat, several):
            _draw_curve(axes, curve, name, z, line)
            _draw_best(axes, curve, name, style)
    for block, axes in enumerate(grid.flat):
        axes.set_title(f"block {block}" if blocks > 1 else "")
        axes.set_visible(block < blocks)
        axes.set_xlabel("round")
        _few_ticks(axes)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"validation {metric}")
    figure.legend(handles=handles, loc="outside upper center", ncols=min(7, len(handles)),
                  title=title if columns > 1 else title.replace("; ", "\n"), handlelength=2.8, columnspacing=1.2)
    return figure


def _few_ticks(axes, ticks: int = 5) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(ticks))


def _curves_apart(curves: Mapping[str, Sequence[Curve]], look: Mapping[str, Look], metric: str, title: str) -> Figure:
    """Small multiples: a row per method and a column per block, at most 4 of them; one block: a panel per method."""
    blocks = max(map(len, curves.values()))
    shown = min(4, blocks)
    pairs = [(name, block) for start in range(0, blocks, shown) for name in curves
             for block in range(start, start + shown)]
    columns = shown if blocks > 1 else min(4, len(curves))
    rows = -(-len(pairs) // columns)
    figure, grid = _grid(rows, columns, 1.05 * rows + 0.6, sharey="col" if blocks > 1 else True,
                         sharex="col" if blocks > 1 else True)
    for i, axes in enumerate(grid.flat):
        name, block = pairs[i] if i < len(pairs) else ("", blocks)
        axes.set_visible(block < blocks)
        if block >= blocks:
            continue
        style = look[name]
        for other, several in curves.items():
            if other != name and block < len(several):
                axes.plot(np.arange(len(several[block].mean)) + 1, several[block].mean, color="#C4C4C4", linewidth=0.6,
                          zorder=1, gid=f"background:{other}")
        if block < len(curves[name]):
            _draw_curve(axes, curves[name][block], name, 3, dict(color=style.color, linewidth=1.2))
            _draw_best(axes, curves[name][block], name, style)
        axes.set_title(f"block {block}" if blocks > 1 and i < columns else style.label if blocks == 1 else "")
        if blocks > 1 and i % columns == 0:
            axes.set_ylabel(style.label, color=style.color)
        if i + columns >= len(pairs):
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        _few_ticks(axes, 3)
    figure.suptitle(f"validation {metric}: {title}; grey: the other methods")
    return figure


@dataclass(frozen=True)
class Swing:
    """By how much a number moves, and the deviation of that over seeds, or None for one seed."""

    change: float
    deviation: float | None = None


@dataclass(frozen=True)
class SwingPanel:
    """One number under several changes.

    Attributes:
        name: of the number. default: what it is without a change.
        swings: by change; None where there is no record.
        zero: mark where the number is 0, if that is in sight.
    """

    name: str
    default: float
    swings: Sequence[Swing | None]
    zero: bool = False


@styled
def tornado(labels: Sequence[str], panels: Sequence[SwingPanel], title: str) -> Figure:
    """How far each of several changes moves each of several numbers from its default, which is the vertical line.

    Whiskers are one standard deviation of the change over seeds. A bar far longer than the others is cut, with an arrow
    and its length beside it as beside all.

    Args:
        labels: of the changes, the first on top.
    """
    figure, grid = _grid(1, len(panels), 0.34 * len(labels) + 0.85, PAGE, sharey=True)
    for panel, axes in zip(panels, grid[0]):
        reach = _reach([abs(swing.change) + (swing.deviation or 0.0) for swing in panel.swings if swing])
        for y, swing in enumerate(panel.swings):
            _draw_swing(axes, y, panel.default, swing, reach)
        axes.axvline(panel.default, color="black", linewidth=0.8)
        edge = 1.8 * reach  # leaves room for numbers
        if panel.zero and abs(panel.default) < edge:
            axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=":", gid="zero")
        axes.set(xlim=(panel.default - edge, panel.default + edge), ylim=(len(labels) - 0.4, -0.6),
                 xlabel=panel.name, title=f"default: {panel.default:{'+' if panel.zero else ''}.4f}")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    grid[0, 0].set_yticks(range(len(labels)), labels)
    figure.suptitle(title)
    return figure


def _reach(lengths: Sequence[float]) -> float:
    """How far an axis goes from the default: to the longest bar, or to that before those five times as long as the
    next, if they are fewer than the others."""
    ascending = sorted(length for length in lengths if length > 0.0)
    for shorter, longer in zip(ascending[len(ascending) // 2:], ascending[len(ascending) // 2 + 1:]):
        if longer > 5.0 * shorter:
            return 1.4 * shorter
    return ascending[-1] if ascending else 1e-4


def _draw_swing(axes, y: int, default: float, swing: Swing | None, reach: float) -> None:
    """One bar of a tornado, with its number at the end."""
    if swing is None:
        axes.text(default, y, " no record", va="center", color=GREY, gid="missing")
        return
    rises, cut = swing.change >= 0.0, abs(swing.change) > reach
    length = min(max(swing.change, -reach), reach)
    axes.barh(y, length, 0.55, left=default, color="#0072B2" if rises else "#D55E00", gid=f"swing:{y}")
    end = default + length
    if swing.deviation is not None and not cut:
        axes.errorbar(end, y, xerr=swing.deviation, color="black", linewidth=0.8)
        end += swing.deviation if rises else -swing.deviation
    arrow = ("▸" if rises else "◂") if cut else ""
    text = f"{arrow} {swing.change:+.4f}" if rises else f"{swing.change:+.4f} {arrow}"
    axes.annotate(text.strip(), (end, y), (3 if rises else -3, 0), textcoords="offset points", va="center",
                  ha="left" if rises else "right", gid=f"change:{y}",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # over the line at 0


@styled
def audit_curves(content: Mapping[str, Any], title: str) -> Figure:
    """AUC and precision of the attacks on clients' uploads over the noise on them, a marker and line per attacked
    round; whiskers are 95 % intervals over clients.

    Args:
        content: what ``audit.content`` returns.
    """
    figure, grid = _grid(1, 2, 2.3)
    chance = content["by_chance"]
    attacks = {"size": "#0072B2", "direction": "#D55E00"}
    lines = ("-", "--", ":", "-.")
    for axes, metric, label, floors in ((grid[0, 0], "auc", "AUC", [(chance["auc"], "by chance")]),
                                        (grid[0, 1], "precision", "precision at n₊",
                                         [(chance["precision"], "by chance"),
                                          (chance["precision_touched"], "by chance among changed rows")])):
        for i, number in enumerate(content["rounds"]):
            rows = [row for row in content["levels"] if row["round"] == number]
            for attack, color in attacks.items():
                name = f"{attack}_{metric}"
                points = [(row["noise"], row[name]) for row in rows if row[name] is not None]
                means = np.array([value["mean"] for _, value in points])
                reach = np.abs([[value["low"], value["high"]] for _, value in points] - means[:, None]).T
                axes.errorbar([noise for noise, _ in points], means, reach, color=color, marker="os^D"[i % 4],
                              linestyle=lines[i % 4], markersize=3.5, linewidth=0.9,
                              gid=f"{name}:{number}")
        for floor, words in floors:
            axes.axhline(floor, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
            axes.annotate(words, (0.0, floor), (2, 1), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="bottom", color=GREY)
        every = sorted({row["noise"] for row in content["levels"]})
        least = next((noise for noise in every if noise > 0.0), 1.0)
        if every[-1] > 30 * least:
            axes.set_xscale("symlog", linthresh=least)
            axes.set_xlim(-0.4 * least, 1.3 * every[-1])
            axes.set_xticks(every, [f"{noise:g}" for noise in every])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="noise on uploads", ylabel=label, ylim=(-0.03, 1.03))
    handles = [_key(f"by {attack} of the change", color=color) for attack, color in attacks.items()]
    handles += [_key(f"round {number}", color="black", marker="os^D"[i % 4], linestyle=lines[i % 4], markersize=3.5)
                for i, number in enumerate(content["rounds"])]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), title=title,
                  handlelength=2.6, columnspacing=1.2)
    return figure


_RANK_LINE = dict(color="black", linewidth=0.8, solid_capstyle="butt")


@styled
def critical_difference_diagram(labels: Sequence[str], test: FriedmanComparison, title: str) -> Figure:
    """Average ranks on an axis, best on the left; a bar joins methods that do not differ (Demšar 2006, Figure 1).

    Args:
        labels: of the methods, in the order of ``test.ranks``.
    """
    k, ranks = len(labels), np.array(test.ranks)
    order = [int(i) for i in np.argsort(ranks, kind="stable")]
    left = order[:-(-k // 2)]
    step, bars, first_bar = 0.17, 0.07, 0.09  # inches between names, between bars, and from the axis to the first bar
    first_name = first_bar + bars * len(test.groups) + 0.12
    depth = first_name + step * (len(left) - 1) + 0.12
    above, width, margin = 0.46, COLUMN if k <= 8 else PAGE, 0.95
    figure = Figure(figsize=(width, above + depth + 0.42))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(-depth - 0.42, above))
    axes.axis("off")

    def x(rank: float) -> float:
        return margin + (width - 2 * margin) * (rank - 1) / (k - 1)

    _draw_rank_axis(axes, k, x)
    _draw_critical_difference(axes, test.critical_difference, k, x, width / 2)
    for position, i in enumerate(order):
        on_left = position < len(left)
        row = position if on_left else k - 1 - position
        y = -(first_name + step * row)
        edge = margin - 0.08 if on_left else width - margin + 0.08
        axes.plot([x(ranks[i]), x(ranks[i]), edge], [0.0, y, y], gid=f"rank:{labels[i]}", **_RANK_LINE)
        text = f"{labels[i]}  {ranks[i]:.2f}" if on_left else f"{ranks[i]:.2f}  {labels[i]}"
        axes.text(edge + (-0.05 if on_left else 0.05), y, text, ha="right" if on_left else "left", va="center")
    for row, group in enumerate(test.groups):
        y = -(first_bar + bars * row)
        axes.plot([x(min(ranks[list(group)])) - 0.04, x(max(ranks[list(group)])) + 0.04], [y, y], color="black",
                  linewidth=2.4, solid_capstyle="butt", gid=f"group:{row}")
    p = f"p = {test.p:.3f}" if test.p >= 0.001 else "p < 0.001"
    p += "" if test.p <= LEVEL else " (no difference at 5 %)"
    axes.text(width / 2, -depth - 0.10, f"{title}\nFriedman χ²({k - 1}) = {test.chi2:.2f}, {p}, {test.n} rows",
              ha="center", va="top", linespacing=1.3)
    return figure


def _draw_rank_axis(axes, methods: int, x: Callable[[float], float]) -> None:
    """The axis at height 0 with a tick per rank; ``x`` is where a rank stands."""
    axes.plot([x(1), x(methods)], [0.0, 0.0], **_RANK_LINE)
    for rank in range(1, methods + 1):
        axes.plot([x(rank)] * 2, [0.0, 0.05], **_RANK_LINE)
        axes.text(x(rank), 0.07, str(rank), ha="center", va="bottom")


def _draw_critical_difference(axes, cd: float, methods: int, x: Callable[[float], float], middle: float) -> None:
    """The critical difference as a length above the axis, or in words if the axis is shorter."""
    y = 0.27
    if cd > methods - 1:
        axes.text(middle, y, f"CD = {cd:.2f}, more than the whole axis", ha="center", va="bottom")
        return
    start, end = x(1), x(1 + cd)
    axes.plot([start, end], [y, y], gid="cd", **_RANK_LINE)
    for edge in (start, end):
        axes.plot([edge, edge], [y - 0.03, y + 0.03], **_RANK_LINE)
    axes.text((start + end) / 2, y + 0.03, f"CD = {cd:.2f}", ha="center", va="bottom")
