"""A figure of squares: a colour per printed number, table by table and dataset by dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .draw import GREY, PAGE, styled
from .standing import DIFFERS, DIRECTION, NO_DATA, OPEN, REPRODUCED

UNIT = 0.1  # inches from square to square
_GAP = 0.7  # units between datasets
_LETTER, _BOLD = 0.57, 0.66  # units a letter is wide, at most on average
# Colours of Okabe and Ito, which colour-blind readers can tell apart; the marks and the greys say the same without.
_COLORS = {REPRODUCED: "#0072B2", DIRECTION: "#56B4E9", DIFFERS: "#D55E00", OPEN: "#D0D0D0", NO_DATA: "#FFFFFF"}
_MARKS = {DIRECTION: "^", DIFFERS: "x"}


@dataclass(frozen=True)
class Band:
    """The squares of one table, or of one of its panels.

    Attributes:
        rows, columns: their labels.
        kinds: dataset to the kind of standing of every square, row by row; None where the table prints nothing.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    kinds: Mapping[str, Sequence[Sequence[str | None]]]


@dataclass(frozen=True)
class Side:
    """All tables of one paper; ``datasets`` run across, by their labels."""

    title: str
    datasets: tuple[str, ...]
    bands: tuple[Band, ...]

    @property
    def across(self) -> int:
        """Columns of the widest table."""
        return max(len(band.columns) for band in self.bands)

    @property
    def stub(self) -> float:
        """Units that the labels of rows take."""
        return _LETTER * max(len(row) for band in self.bands for row in band.rows) + 0.8

    @property
    def width(self) -> float:
        """Units from the left of the labels to the right of the squares, or of the longest title."""
        titles = max(len(band.title) for band in self.bands)
        return max(self.stub + len(self.datasets) * (self.across + _GAP), _BOLD * titles)


@styled
def squares(sides: Sequence[Side]) -> Figure:
    """All papers side by side, with a legend below."""
    lefts = [0.5 + sum(side.width + 2.0 for side in sides[:i]) for i in range(len(sides))]
    width = lefts[-1] + sides[-1].width + 0.5
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _COLORS}
    words: list[tuple[float, float, str, dict]] = []
    depth = max(_place(side, left, points, words) for side, left in zip(sides, lefts)) + 3.5
    inches = max(PAGE, width * UNIT)
    figure = Figure(figsize=(inches, depth * UNIT))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, inches / UNIT), ylim=(depth, 0))
    axes.axis("off")
    for x, y, text, style in words:
        axes.text(x, y, text, **style)
    handles = [_drawn(axes, kind, places) for kind, places in points.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), handletextpad=0.2, columnspacing=1.5)
    return figure


def _place(side: Side, left: float, points: Mapping[str, list], words: list) -> float:
    """Add the places of a paper's squares and words, in units from the top left; returns how deep they reach."""
    words.append((left, 1.0, side.title, dict(fontsize=8.5, fontweight="bold", va="center")))
    starts = [left + side.stub + i * (side.across + _GAP) for i in range(len(side.datasets))]
    y = 3.0 + 0.3 * max(map(len, side.datasets))
    words += [(start + 0.2, y, name, dict(rotation=35, rotation_mode="anchor", va="bottom"))
              for start, name in zip(starts, side.datasets)]
    before: tuple[str, ...] = ()
    for band in side.bands:
        y += 1.5
        words.append((left, y, band.title, dict(fontweight="bold", va="center")))
        shown = [start for start, name in zip(starts, side.datasets) if name in band.kinds]
        if band.columns != before and any(band.columns):
            y += 0.62 * max(map(len, band.columns)) + 0.4
            words += [(shown[0] + i + 0.5, y, name, dict(rotation=90, ha="center", va="bottom"))
                      for i, name in enumerate(band.columns)]
            y -= 0.5
        before, y = band.columns, y + 1.2
        for i, row in enumerate(band.rows):
            words.append((left + side.stub - 0.3, y + i, row, dict(ha="right", va="center")))
        for start, name in zip(starts, side.datasets):
            for i, kinds in enumerate(band.kinds.get(name, ())):
                for j, kind in enumerate(kinds):
                    if kind:
                        points[kind].append((start + j + 0.5, y + i))
        y += len(band.rows)
    return y


def _drawn(axes, kind: str, places: Sequence[tuple[float, float]]) -> Line2D:
    """Draw the squares of a kind with its mark; returns what stands for it in the legend."""
    look = dict(marker="s", color=_COLORS[kind], markeredgecolor=GREY if kind == NO_DATA else _COLORS[kind])
    side = 0.8 * UNIT * 72
    if places:
        across, down = zip(*places)
        axes.scatter(across, down, s=side ** 2, marker="s", facecolor=_COLORS[kind], linewidths=0.4,
                     edgecolor=look["markeredgecolor"], gid=kind.replace(" ", "-"))
        if kind in _MARKS:
            axes.scatter(across, down, s=(0.5 * side) ** 2, marker=_MARKS[kind], color="white", linewidths=0.7)
    return Line2D([], [], linestyle="", markersize=side, markeredgewidth=0.4, label=f"{len(places)} {kind}", **look)
