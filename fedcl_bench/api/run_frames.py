"""Runs as pandas frames; ``Results`` says what their columns are."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..records.run import Run
from ..records.store import domains_of

_TEST = ["trained_block", "tested_block"]


def seeded(runs: Sequence[Run], frame_of: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all seeds under each other."""
    parts = [frame_of(run) for run in runs]
    for run, part in zip(runs, parts):
        part.insert(0, "seed", run.seed)
    return pd.concat(parts, ignore_index=True)


def metrics(run: Run) -> pd.DataFrame:
    users = run.users.groupby(_TEST, observed=True)["user"].nunique()
    rows = [(t, s, metric, mean, int(users.get((t, s), 0))) for metric, matrix in run.meta["matrix"].items()
            for t, row in enumerate(matrix) for s, mean in enumerate(row)]
    return pd.DataFrame(rows, columns=[*_TEST, "metric", "mean", "users"])


def groups(run: Run) -> pd.DataFrame:
    rows = [(t, group, metric, np.nan if mean is None else mean, int(values["users"][t]))
            for group, values in run.meta["groups"].items() for metric in values if metric != "users"
            for t, mean in enumerate(values[metric])]
    return pd.DataFrame(rows, columns=["block", "group", "metric", "mean", "users"])


def matrix(run: Run) -> pd.DataFrame:
    every = [(metric, r) for metric, r in run.meta["matrix"].items()]
    size = len(every[0][1])
    rows = [(metric, t, *row, *[np.nan] * (size - len(row))) for metric, r in every for t, row in enumerate(r)]
    return pd.DataFrame(rows, columns=["metric", "trained_block", *range(size)])


def table(result: Mapping[str, Any]) -> pd.DataFrame:
    """A row of text per metric: the mean over users on the block just trained, ± standard deviation over seeds.

    Args:
        result: what ``execute`` or ``combined`` returns.
    """
    blocks = range(len(result["rounds"]))
    columns = [f"block {t}" for t in blocks] + [f"avg 1-{blocks[-1]}"] * (len(blocks) > 1)
    if names := domains_of(result):
        columns = [*names, "mean"]
    rows = {}
    for name, values in result["metrics"].items():
        means, deviations = ([*values[f"per_block{suffix}"], values[f"avg_incremental{suffix}"]]
                             if f"per_block{suffix}" in values else [] for suffix in ("", "_std"))
        if len(result.get("seeds", ())) > 1:
            rows[name] = [f"{mean:.4f} ± {std:.4f}" for mean, std in zip(means, deviations) if mean is not None]
        else:
            rows[name] = [f"{mean:.4f}" for mean in means if mean is not None]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")
