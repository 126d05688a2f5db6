"""Finished runs of one combination as pandas frames, the seed in the first column."""

from __future__ import annotations

from typing import Sequence

import numpy as np
import pandas as pd

from ..records.run import Run
from ..records.store import domains_of
from ..reports.frame import results

_BLOCKS = {"trained": "trained_block", "tested": "tested_block"}
_TEST = ["seed", *_BLOCKS.values()]


def metrics(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, trained_block, tested_block, metric, mean, users: one row per test and metric."""
    frame = results(runs).query("group == ''").drop(columns="group").rename(columns={**_BLOCKS, "value": "mean"})
    counts = _seeded(runs, "users").groupby(_TEST, observed=True)["user"].nunique().rename("users")
    return frame.join(counts, on=_TEST).fillna({"users": 0}).astype({"users": int}).reset_index(drop=True)


def groups(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, block, group, metric, mean, users: one row per block, group of users or items, and metric."""
    frame = results(runs).query("group != ''").drop(columns="trained").rename(columns={"tested": "block",
                                                                                       "value": "mean"})
    place, counted = ["seed", "block", "group"], frame["metric"] == "users"
    counts = frame[counted].set_index(place)["mean"].astype(int).rename("users")
    return frame[~counted].join(counts, on=place).reset_index(drop=True)


def _seeded(runs: Sequence[Run], name: str) -> pd.DataFrame:
    """One of the frames of all records, under each other."""
    return pd.concat({run.seed: getattr(run, name) for run in runs}, names=["seed"]).reset_index("seed").reset_index(
        drop=True)


def users(runs: Sequence[Run], user_ids: np.ndarray) -> pd.DataFrame:
    """The columns seed, trained_block, tested_block, user, metric, value: one row per test, user and metric.

    Args:
        user_ids: original ids in the order of the model's rows.
    """
    frame = _seeded(runs, "users")
    return frame.assign(user=user_ids[frame["user"].to_numpy()], metric=frame["metric"].astype(str))


def rounds(runs: Sequence[Run]) -> pd.DataFrame:
    """The column seed, then those of ``rounds.parquet``: one row per round."""
    return _seeded(runs, "rounds")


def matrix(runs: Sequence[Run]) -> pd.DataFrame:
    """R[t, s]: the columns seed, metric, trained_block (t), then 0, 1, ..., per tested block (s); nan where s > t."""
    frame = results(runs).query("group == ''").rename(columns=_BLOCKS).pivot_table(
        "value", ["seed", "metric", "trained_block"], "tested_block", sort=False)
    return frame.rename_axis(columns=None).reset_index()


def table(result: dict) -> pd.DataFrame:
    """A row of text per metric: the mean over users on the block just trained, ± standard deviation over seeds.

    Args:
        result: what ``combined`` returns.
    """
    several = len(result["seeds"]) > 1
    blocks = len(result["rounds"])
    columns = [f"block {t}" for t in range(blocks)] + ([f"avg 1-{blocks - 1}"] if blocks > 1 else [])
    if names := domains_of(result):
        columns = [*names, "mean"]

    def cell(mean: float, deviation: float) -> str:
        return f"{mean:.4f} ± {deviation:.4f}" if several else f"{mean:.4f}"
    rows = {}
    for name, values in result["metrics"].items():
        numbers = list(zip(values["per_block"], values["per_block_std"]))
        if blocks > 1:
            numbers.append((values["avg_incremental"], values["avg_incremental_std"]))
        rows[name] = [cell(*pair) for pair in numbers]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")
