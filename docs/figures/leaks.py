"""Draw docs/figures/leaks.png, HR@10 by the pool of negatives: python docs/figures/leaks.py [FILE]

The runs are those of ``results/published/leaks``; the table of docs/leaks.md has their numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from make_tables import CANDIDATES, POOLS, STATIC, STATIC_SETS, leaks_ranks, leaks_runs  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from fedcl_bench.reports import draw  # noqa: E402


@draw.styled
def drawn() -> Figure:
    """HR@10 with all items not trained on and with the released pool; a row per dataset, a column per ranking."""
    datasets = [each for each in STATIC_SETS if all((each, candidates) in leaks_runs() for candidates in CANDIDATES)]
    figure = Figure(figsize=(draw.PAGE, 2.2 * len(datasets)), layout="constrained")
    for row, dataset in zip(figure.subplots(len(datasets), len(CANDIDATES), squeeze=False), datasets):
        for axes, (candidates, title) in zip(row, CANDIDATES.items()):
            ranks = [leaks_ranks(dataset, candidates, pool) for pool in POOLS]
            for name, look in draw.looks(STATIC).items():
                if any(name not in of for of in ranks):
                    continue
                means = [sum(of[name][0]) / len(of[name][0]) for of in ranks]
                axes.plot(range(len(POOLS)), means, color=look.color, marker=look.marker, linestyle=look.line,
                          label=look.label)
            axes.set(title=f"{STATIC_SETS[dataset]}, {title}", xticks=range(len(POOLS)), xticklabels=POOLS.values(),
                     xlim=(-0.3, 1.3), ylim=(0.0, 1.08 * axes.dataLim.y1), ylabel="HR@10")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right")
    return figure


if __name__ == "__main__":
    draw.save(drawn(), Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures/leaks.png")
