"""Finished runs made up for tests, with numbers that are known, and streams for whole runs in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fedcl_bench.data.files.recbole_files import Interactions
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import Stream, build_blocks
from fedcl_bench.records.store import Run

SETTINGS = {"blocks": 4, "split_seed": 0, "split_file": "", "eps": 0.006, "beta": 0.9, "lambda_kd": 0.1,
            "valid_metric": "ndcg@20"}


def make_run(method: str, seed: int, scores: Mapping[int, Mapping[int, float]], backbone: str = "fedmf",
             dataset: str = "ml-100k", valid: Sequence[Sequence[float]] | None = None, fingerprint: str = "data",
             **settings) -> Run:
    """A run whose users' N@20 on the block just trained is ``scores[block][user]``.

    R[t, s] below the diagonal is that of block s times .5 ** (t - s). ``valid`` is the validation curve of each block.
    """
    count = len(scores)
    valid = valid or [[0.1, 0.2, 0.15]] * count
    means = [float(np.mean(list(scores[t].values()))) for t in range(count)]
    frame = pd.DataFrame([(t, t, user, "ndcg@20", value) for t in scores for user, value in scores[t].items()],
                         columns=["trained_block", "tested_block", "user", "metric", "value"])
    rounds = pd.DataFrame([(t, r, v) for t in range(count) for r, v in enumerate(valid[t])],
                          columns=["step", "round", "valid"])
    meta = {"method": method, "backbone": backbone, "dataset": dataset, "seed": seed,
            "settings": {**SETTINGS, "blocks": count, **settings}, "data_fingerprint": fingerprint,
            "metrics": {"ndcg@20": {"per_block": means}},
            "matrix": {"ndcg@20": [[means[s] * 0.5 ** (t - s) for s in range(t + 1)] for t in range(count)]},
            "rounds": [len(v) for v in valid], "best_round": [int(np.argmax(v)) + 1 for v in valid],
            "hash": f"{method}-{backbone}-{dataset}-{seed}-{sorted(settings.items())}"}
    return run_of(meta, Path("made-up"), {"users": frame, "rounds": rounds}.__getitem__)


def run_of(meta: Mapping[str, Any], path: Path, load: Callable[[str], pd.DataFrame]) -> Run:
    """A run whose record says just this."""
    head = {**meta, "blocks": len(meta["rounds"]), "metrics": list(meta["metrics"])}
    return Run(head, path, lambda: meta, load)


def flat_runs(method: str, averages: Mapping[int, float], **options) -> list[Run]:
    """Runs (seed to average) in which 3 users have the same score in blocks 0-3."""
    return [make_run(method, seed, {t: {user: value for user in range(3)} for t in range(4)}, **options)
            for seed, value in averages.items()]


def small_interactions(users: int = 40, items: int = 60, each: tuple[int, int] = (6, 25)) -> Interactions:
    """Random rows in random order of time; no user has an item twice."""
    rng = np.random.default_rng(0)
    lists = [rng.choice(items, rng.integers(*each), replace=False) for _ in range(users)]
    user = np.repeat(np.arange(users), list(map(len, lists)))
    return Interactions(user, np.concatenate(lists), rng.permutation(len(user)).astype(float),
                        np.array([f"u{u}" for u in range(users)]), np.array([f"i{i}" for i in range(items)]))


def small_stream(blocks: int = 4, **shape) -> Stream:
    """Blocks of few users and items, for whole runs in a moment."""
    return build_blocks(small_interactions(**shape), StreamSettings(blocks=blocks), "small")
