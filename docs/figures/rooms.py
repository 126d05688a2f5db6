"""Draw docs/figures/rooms.svg, the map of the package in docs/architecture.md: python docs/figures/rooms.py [FILE]

Boxes are the rooms of ``fedcl_bench``, with the first phrase of their docstrings. Arrows are imports as they stand in
the files, those within functions too. An arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Iterator

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

PACKAGE = Path(__file__).resolve().parents[2] / "fedcl_bench"
PURPOSE = {"rng": "Counter-based random numbers"}
ACROSS = {"cli": 5.0, "audit": 1.25, "api": 3.75, "testing": 8.75, "leaderboard": 6.25, "reports": 4.25,
          "deployment": 3.0, "experiments": 5.0, "runs": 5.0, "federation": 3.75, "recbole": 6.1, "evaluation": 3.75,
          "training": 3.75, "stats": 2.0, "toolbox": 5.8, "plugin": 5.8, "records": 8.75, "data": 6.2,
          "rng": 5.0, "kernels": 3.5, "core": 6.5}
WIDTH, HEIGHT, ROW = 2.4, 0.62, 0.9
LINE, HELD, OPEN = "#444444", "#f2f2f2", "#d6e6f4"


def imports() -> dict[str, set[str]]:
    """Every room and those that it imports."""
    rooms: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in {"__init__", "__main__"}:
            source = parts[0]
            rooms.setdefault(source, set()).update(_imported(file, parts[:-1]))
            rooms[source].discard(source)
    return rooms


def _imported(file: Path, folders: tuple[str, ...]) -> Iterator[str]:
    """What a file imports of the package: the names of modules and folders that lie directly in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            path = [*folders[:len(folders) - node.level + 1], *(node.module or "").split(".")]
            names = [path[0]] if path[0] else [alias.name for alias in node.names]
            yield from (name for name in names if not name.startswith("__"))


def arrows(rooms: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that do not follow from others."""
    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(rooms[room]).union(*(below(other) for other in rooms[room]))
    return [(room, target) for room in rooms for target in sorted(rooms[room])
            if not any(target in below(other) for other in rooms[room])]


def depths(rooms: dict[str, set[str]]) -> dict[str, int]:
    """The row of every room, from the top: one more than the lowest of those that import it."""
    @cache
    def depth(room: str) -> int:
        return max((1 + depth(other) for other, targets in rooms.items() if room in targets), default=0)
    return {room: depth(room) for room in rooms}


def purpose(room: str) -> str:
    """The first phrase of a room's docstring."""
    if room in PURPOSE:
        return PURPOSE[room]
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
    return re.split(r"[:.,;]\s|[:.]$", " ".join(text.split()), maxsplit=1)[0]


def draw(path: Path) -> None:
    """Write the picture."""
    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "fedcl_bench", "svg.fonttype": "path"})
    rooms = imports()
    levels = depths(rooms)
    tall = ROW * (max(levels.values()) + 1)
    figure, ax = plt.subplots(figsize=(10, tall))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, tall)
    ax.axis("off")
    top = {room: tall - ROW * levels[room] - 0.15 for room in rooms}
    for room in rooms:
        ax.add_patch(FancyBboxPatch((ACROSS[room] - WIDTH / 2, top[room] - HEIGHT), WIDTH, HEIGHT,
                                    boxstyle="round,pad=0,rounding_size=0.1",
                                    facecolor=OPEN if room in ("plugin", "toolbox", "rng") else HELD,
                                    edgecolor=LINE, linewidth=0.9))
        ax.text(ACROSS[room], top[room] - 0.07, room, ha="center", va="top", fontsize=10, weight="bold")
        ax.text(ACROSS[room], top[room] - 0.29, "\n".join(textwrap.wrap(purpose(room), 34)), ha="center", va="top",
                fontsize=7.6, linespacing=1.25)
    for room, target in arrows(rooms):
        lean = 0.35 * max(-3.0, min(3.0, ACROSS[target] - ACROSS[room]))
        ax.add_patch(FancyArrowPatch((ACROSS[room] + lean, top[room] - HEIGHT), (ACROSS[target] - lean, top[target]),
                                     arrowstyle="-|>", mutation_scale=10, color=LINE, linewidth=1.0, shrinkA=0,
                                     shrinkB=0, gid=f"{room} imports {target}".replace(" ", "-")))
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("rooms.svg"))
