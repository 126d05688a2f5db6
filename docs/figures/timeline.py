"""Draw docs/figures/timeline.png, clients and blocks of ML-100K: python docs/figures/timeline.py [FILE]"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from fedcl_bench.data.datasets import split_rows  # noqa: E402
from fedcl_bench.data.files.recbole_files import SPLITS  # noqa: E402
from fedcl_bench.data.source import locate  # noqa: E402
from fedcl_bench.reports import draw  # noqa: E402
from fedcl_bench.runs.config import make_config  # noqa: E402
from fedcl_bench.runs.registry import discover  # noqa: E402

COLORS = {"train": "#56B4E9", "valid": "#E69F00", "test": "#000000"}
WORDS = {"train": "trained on at the client", "valid": "validation", "test": "test"}
PER_BLOCK = 2  # clients drawn that begin in each block


def some_clients(user: np.ndarray, block: np.ndarray, share: np.ndarray) -> list[int]:
    """Of each block's new users those whose interactions span most of the stream."""
    users = pd.DataFrame({"user": user, "block": block, "share": share}).groupby("user").agg(
        first=("block", "min"), start=("share", "min"), end=("share", "max"))
    longest = users.assign(span=users.end - users.start).sort_values("span", ascending=False, kind="stable")
    return [client for _, new in longest.groupby("first") for client in new.index[:PER_BLOCK]]


@draw.styled
def drawn() -> Figure:
    """A row of interactions per client, over those of all clients in time order, and what happens in each block."""
    config = make_config(discover(), "ft", "fedmf", "ml-100k")
    rows, block = split_rows(locate("ml-100k", None, config.stream), config.stream)
    share = np.empty(len(block))
    share[np.lexsort((rows.time, block))] = np.arange(len(block)) / len(block)
    figure = Figure(figsize=(draw.PAGE, 2.6), layout="constrained")
    axes = figure.subplots()
    clients = some_clients(rows.user, block, share)
    for y, client in enumerate(clients):
        of_client = rows.user == client
        axes.hlines(y, share[of_client].min(), 1.0, color=draw.GREY, linewidth=0.4)
        for name, color in COLORS.items():
            at = share[of_client & (rows.split == SPLITS.index(name))]
            axes.plot(at, np.full(len(at), y), "|", color=color, markersize=7, markeredgewidth=0.7,
                      label=None if y else WORDS[name])
    for b in range(block.max() + 1):
        start, end = share[block == b].min(), share[block == b].max()
        axes.axvspan(start, end, color="#EFEFEF" if b % 2 else "#FAFAFA", zorder=-1)
        rounds = "rounds" if b else "rounds: the server sends public parameters, clients train, the server averages"
        axes.text((start + end) / 2, len(clients) + 0.1, f"block {b}", ha="center", weight="bold")
        axes.text((start + end) / 2, -1.2, rounds, ha="center", va="center")
        axes.text(end, -2.1, f"test: R[{b}, 0…{b}]" if b else "test: R[0, 0]", ha="right", va="center")
    axes.set(yticks=range(len(clients)), yticklabels=[f"client {user}" for user in rows.user_tokens[clients]],
             xlim=(0, 1), ylim=(-2.7, len(clients) + 0.9), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(loc="outside lower center", ncols=3, markerscale=1.0)
    return figure


if __name__ == "__main__":
    draw.save(drawn(), Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures/timeline.png")
