"""Draw docs/figures/leaks.png, how ranks change with the pool of negatives: python docs/figures/leaks.py [FILE]

The runs are those of ``results/published/leaks``; the table of docs/leaks.md has their numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from make_tables import CANDIDATES, POOLS, STATIC, leaks_runs  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from fedcl_bench.reports import draw  # noqa: E402


@draw.styled
def drawn() -> Figure:
    """Ranks from all items not trained on to the released pool, with HR@10 beside them; a panel per kind of ranking."""
    runs, figure = leaks_runs(), Figure(figsize=(draw.PAGE, 1.9), layout="constrained")
    looks = {name: look for name, look in draw.looks(STATIC).items() if ("all", "untouched", name) in runs}
    for axes, (candidates, title) in zip(figure.subplots(1, len(CANDIDATES)), CANDIDATES.items()):
        means = {name: [sum(of) / len(of) for pool in POOLS for of in [runs[candidates, pool, name]]] for name in looks}
        for name, look in looks.items():
            ranks = [1 + sum(other[side] > value for other in means.values()) for side, value in enumerate(means[name])]
            axes.plot(range(len(POOLS)), ranks, color=look.color, marker=look.marker, linestyle=look.line)
            for side, rank, place, at in zip(range(2), ranks, (-6, 6), ("right", "left")):
                axes.annotate(f"{look.label}  {means[name][side]:.3f}", (side, rank), (place, 0), ha=at, va="center",
                              textcoords="offset points")
        axes.set(title=f"rank by HR@10 {title}", xticks=range(len(POOLS)), xticklabels=POOLS.values(), yticks=[],
                 xlim=(-0.6, 1.6), ylim=(len(looks) + 0.4, 0.6), xlabel="pool of negatives")
    return figure


if __name__ == "__main__":
    draw.save(drawn(), Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures/leaks.png")
