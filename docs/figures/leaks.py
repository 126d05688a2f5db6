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
    """A line per backbone from all items not trained on to the released pool, a panel per kind of ranking."""
    runs, figure = leaks_runs(), Figure(figsize=(draw.PAGE, 2.4), layout="constrained")
    looks = draw.looks(STATIC)
    for axes, (candidates, title) in zip(figure.subplots(1, len(CANDIDATES)), CANDIDATES.items()):
        for name, look in looks.items():
            values = [runs.get((candidates, pool, name)) for pool in POOLS]
            if all(values):
                means = [sum(each) / len(each) for each in values]
                axes.plot(range(len(POOLS)), means, color=look.color, marker=look.marker, linestyle=look.line)
                axes.annotate(look.label, (1, means[-1]), (5, 0), textcoords="offset points", va="center")
        axes.set(title=f"HR@10 {title}", xticks=range(len(POOLS)), xticklabels=POOLS.values(), xlim=(-0.15, 1.35),
                 ylim=(0.0, None), xlabel="pool of negatives")
    return figure


if __name__ == "__main__":
    draw.save(drawn(), Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures/leaks.png")
