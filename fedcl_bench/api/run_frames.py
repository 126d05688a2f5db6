"""Runs as pandas frames; ``Results`` says what their columns are."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import pandas as pd

from ..records.run import Run
from ..records.store import block_names, domains_of
from ..reports.frame import results

_BLOCKS = {"trained": "trained_block", "tested": "tested_block"}
_TEST = ["seed", *_BLOCKS.values()]


def seeded(runs: Sequence[Run], name: str) -> pd.DataFrame:
    """One of the frames of all records, under each other."""
    return pd.concat({run.seed: getattr(run, name) for run in runs}, names=["seed"]).reset_index("seed").reset_index(
        drop=True)


def metrics(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, trained_block, tested_block, metric, mean, users: one row per test and metric."""
    frame = results(runs).query("group == ''").drop(columns="group").rename(columns={**_BLOCKS, "value": "mean"})
    counts = seeded(runs, "users").groupby(_TEST, observed=True)["user"].nunique().rename("users")
    return frame.join(counts, on=_TEST).fillna({"users": 0}).astype({"users": int}).reset_index(drop=True)


def groups(runs: Sequence[Run]) -> pd.DataFrame:
    """The columns seed, block, group, metric, mean, users: one row per block, group of users or items, and metric."""
    frame = results(runs).query("group != ''").drop(columns="trained").rename(columns={"tested": "block",
                                                                                       "value": "mean"})
    place, counted = ["seed", "block", "group"], frame["metric"] == "users"
    counts = frame[counted].set_index(place)["mean"].astype(int).rename("users")
    return frame[~counted].join(counts, on=place).reset_index(drop=True)


def matrix(runs: Sequence[Run]) -> pd.DataFrame:
    """R[t, s]: the columns seed, metric, trained_block (t), then 0, 1, ..., per tested block (s); nan where s > t."""
    frame = results(runs).query("group == ''").rename(columns=_BLOCKS).pivot_table(
        "value", ["seed", "metric", "trained_block"], "tested_block", sort=False)
    return frame.rename_axis(columns=None).reset_index()


def result_columns(result: Mapping[str, Any]) -> list[str]:
    """What the columns of a table of results are called: those of the blocks, and that of their mean."""
    blocks = len(result["rounds"])
    domains = domains_of(result)
    return block_names(domains, blocks) + ["mean" if domains else f"avg 1-{blocks - 1}"] * (blocks > 1)


def table(result: Mapping[str, Any]) -> pd.DataFrame:
    """A row of text per metric: the mean over users on the block just trained, ± standard deviation over seeds.

    Args:
        result: what ``execute`` or ``combined`` returns.
    """
    rows = {}
    for name, values in result["metrics"].items():
        means, deviations = ([*values[f"per_block{suffix}"], values[f"avg_incremental{suffix}"]]
                             if f"per_block{suffix}" in values else [] for suffix in ("", "_std"))
        if len(result.get("seeds", ())) > 1:
            rows[name] = [f"{mean:.4f} ± {std:.4f}" for mean, std in zip(means, deviations) if mean is not None]
        else:
            rows[name] = [f"{mean:.4f}" for mean in means if mean is not None]
    return pd.DataFrame.from_dict(rows, orient="index", columns=result_columns(result)).rename_axis("metric")
