"""Finished runs of one combination as pandas frames, the seed in the first column."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..records.run import Run
from ..records.store import block_names, domains_of

_TEST = ["trained_block", "tested_block"]


def _seeded(runs: Sequence[Run], frame_of: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all seeds under each other."""
    parts = [frame_of(run) for run in runs]
    for run, part in zip(runs, parts):
        part.insert(0, "seed", run.seed)
    return pd.concat(parts, ignore_index=True)


def metrics(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, trained_block, tested_block, metric, mean, users: one row per test and metric."""
    def of(run: Run) -> pd.DataFrame:
        users = run.users.groupby(_TEST, observed=True)["user"].nunique()
        rows = [(t, s, metric, mean, int(users.get((t, s), 0))) for metric, matrix in run.meta["matrix"].items()
                for t, row in enumerate(matrix) for s, mean in enumerate(row)]
        return pd.DataFrame(rows, columns=[*_TEST, "metric", "mean", "users"])
    return _seeded(runs, of)


def groups(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, block, group, metric, mean, users: one row per block, group of users or items, and metric."""
    def of(run: Run) -> pd.DataFrame:
        rows = [(t, group, metric, np.nan if mean is None else mean, int(values["users"][t]))
                for group, values in run.meta["groups"].items() for metric in values if metric != "users"
                for t, mean in enumerate(values[metric])]
        return pd.DataFrame(rows, columns=["block", "group", "metric", "mean", "users"])
    return _seeded(runs, of)


def users(runs: Sequence[Run], user_ids: np.ndarray) -> pd.DataFrame:
    """The columns seed, trained_block, tested_block, user, metric, value: one row per test, user and metric.

    Args:
        user_ids: original ids in the order of the model's rows.
    """
    return _seeded(runs, lambda run: run.users.assign(user=user_ids[run.users["user"].to_numpy()],
                                                      metric=run.users["metric"].astype(str)))


def rounds(runs: Sequence[Run]) -> pd.DataFrame:
    """The column seed, then those of ``rounds.parquet``: one row per round."""
    return _seeded(runs, lambda run: run.rounds.copy())


def matrix(runs: Sequence[Run]) -> pd.DataFrame:
    """R[t, s]: the columns seed, metric, trained_block (t), then 0, 1, ..., per tested block (s); nan where s > t."""
    def of(run: Run) -> pd.DataFrame:
        every = [(metric, r) for metric, r in run.meta["matrix"].items()]
        size = len(every[0][1])
        rows = [(metric, t, *row, *[np.nan] * (size - len(row))) for metric, r in every for t, row in enumerate(r)]
        return pd.DataFrame(rows, columns=["metric", "trained_block", *range(size)])
    return _seeded(runs, of)


def result_columns(result: Mapping[str, Any]) -> list[str]:
    """What the columns of a table of results are called: those of the blocks, and that of their mean."""
    blocks = len(result["rounds"])
    domains = domains_of(result)
    return block_names(domains, blocks) + ["mean" if domains else f"avg 1-{blocks - 1}"] * (blocks > 1)


def table(result: dict) -> pd.DataFrame:
    """A row of text per metric: the mean over users on the block just trained, ± standard deviation over seeds.

    Args:
        result: what ``combined`` returns.
    """
    several, blocks = len(result["seeds"]) > 1, len(result["rounds"])

    def cell(mean: float, deviation: float) -> str:
        return f"{mean:.4f} ± {deviation:.4f}" if several else f"{mean:.4f}"
    rows = {}
    for name, values in result["metrics"].items():
        numbers = list(zip(values["per_block"], values["per_block_std"]))
        if blocks > 1:
            numbers.append((values["avg_incremental"], values["avg_incremental_std"]))
        rows[name] = [cell(*pair) for pair in numbers]
    return pd.DataFrame.from_dict(rows, orient="index", columns=result_columns(result)).rename_axis("metric")
