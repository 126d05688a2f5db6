"""Draw docs/figures/dataflow.svg, the picture of docs/architecture.md: python docs/figures/dataflow.py [FILE]"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

PLAIN, SERVER, CLIENT = "#f2f2f2", "#d6e6f4", "#fde8d0"
LINE = "#444444"


def box(ax, x: float, y: float, width: float, height: float, title: str, text: str = "", colour: str = PLAIN) -> None:
    """A rounded box with a title and lines below it; x and y are its lower left corner."""
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=colour,
                                edgecolor=LINE, linewidth=0.9))
    ax.text(x + width / 2, y + height - 0.14, title, ha="center", va="top", fontsize=10, weight="bold")
    ax.text(x + width / 2, y + height - 0.48, text, ha="center", va="top", fontsize=8.4, linespacing=1.4)


def arrow(ax, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """An arrow, with words to the left of its middle."""
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=LINE, linewidth=1.1,
                                 shrinkA=0, shrinkB=0))
    if text:
        ax.text((start[0] + end[0]) / 2 - 0.1, (start[1] + end[1]) / 2, text, ha="right", va="center", fontsize=8.4,
                linespacing=1.4)


def draw(path: Path) -> None:
    """Write the picture."""
    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "fedcl_bench", "svg.fonttype": "path"})
    figure, ax = plt.subplots(figsize=(10, 5.1))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 5.1)
    ax.axis("off")

    box(ax, 0.1, 3.55, 1.9, 1.35, "RunConfig",
        "method × backbone ×\ndataset × settings ×\nseed, checked before\nanything runs")
    box(ax, 0.1, 0.95, 1.9, 1.95, "Stream",
        "atomic file → k-core →\nids by first appearance →\nsteps: time blocks,\nsessions, or one\n"
        "leave-one-out split,\nevery client's own")

    ax.add_patch(FancyBboxPatch((2.6, 0.2), 5.0, 4.7, boxstyle="round,pad=0,rounding_size=0.12", facecolor="white",
                                edgecolor=LINE, linewidth=0.9, linestyle=(0, (4, 3))))
    ax.text(5.1, 4.72, "Federation: for every step, for every round", ha="center", va="top", fontsize=10,
            weight="bold")
    box(ax, 2.8, 3.05, 4.6, 1.3, "Server", "public parameters: item tables, dense layers; the method's server state\n"
        "mean of the uploads → aggregate (method) → next round's tables\nnever sees interactions or private parameters",
        SERVER)
    box(ax, 2.8, 0.85, 4.6, 1.35, "Clients, a batch dimension",
        "own data of the step; private parameters; the method's client state\nloss of the backbone + local_loss (method), optimiser steps\n"
        "each exactly as if trained alone", CLIENT)
    arrow(ax, (4.0, 3.05), (4.0, 2.2), "public\nparameters")
    arrow(ax, (6.2, 2.2), (6.2, 3.05), "uploads: public parameters\nand what the method declares")
    ax.text(5.1, 0.72, "after each round: validation, perhaps an early end\n"
            "after each step: tests on all steps so far, R[t, s]", ha="center", va="top", fontsize=8.4, linespacing=1.4)

    box(ax, 8.2, 3.2, 1.7, 1.7, "RunRecord",
        "settings, versions,\nR[t, s], curve,\nscores per user,\nbytes, seconds;\ncheckpoint")
    box(ax, 8.2, 0.95, 1.7, 1.5, "Reports", "tables, tests,\nfigures, pages:\nfrom records\nalone")

    arrow(ax, (2.0, 4.1), (2.6, 4.1))
    arrow(ax, (2.0, 1.6), (2.8, 1.6))
    arrow(ax, (1.05, 3.55), (1.05, 2.9))
    arrow(ax, (7.6, 4.1), (8.2, 4.1))
    arrow(ax, (9.05, 3.2), (9.05, 2.45))
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
