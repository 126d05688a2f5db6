"""Finished runs with known numbers, written by the code that writes real ones, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable, Mapping, Sequence

import numpy as np
import torch

from fedcl_bench.data.source import DatasetSource, load_config
from fedcl_bench.evaluation.ranking import UserScores
from fedcl_bench.federation.parts import Best, Progress
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.config import RunConfig, resolve
from fedcl_bench.records.record import Record
from fedcl_bench.runs.summary import failed, frames, summary
from fedcl_bench.runs.specs import RunSpec, Tuned

USERS, ITEMS, BLOCKS = 40, 10, 4
DATA = "d" * 32
Scores = Callable[[int, int, int], np.ndarray]  # (trained block, tested block, seed) -> N@20 per user


def level(mean: float, gap: float = 0.002, noise: int = 0) -> Scores:
    """N@20 with mean ``mean + .01 t`` on block t, plus ``gap`` per seed; users differ, and alike for all methods.

    Args:
        noise: seed of a difference between users that is this method's own.
    """
    def scores(t: int, s: int, seed: int) -> np.ndarray:
        shared = np.linspace(-0.02, 0.02, USERS)
        own = np.random.default_rng(noise).normal(0.0, 0.001, USERS)
        return mean + 0.01 * s + gap * seed + shared + own - own.mean()
    return scores


def config_of(registry, spec: RunSpec, seed: int, data: str = DATA, tuned: Path | None = None) -> RunConfig:
    """The configuration of a spec; its data file need not exist."""
    parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(Tuned.of(tuned, Path())))
    source = DatasetSource(spec.dataset, load_config(spec.dataset), Path("nowhere"), data)
    return RunConfig(source, registry.get("backbone", spec.backbone), registry.get("method", spec.method), *parts,
                     seed, "cpu")


def fabricate(results: Path, registry, spec: RunSpec, seed: int, scores: Scores, data: str = DATA,
              tuned: Path | None = None, users: int = USERS, rounds: int = 2, errors: bool = False) -> Path:
    """Write the record of a run. R@20 is twice N@20, and with ``errors`` RMSE is N@20; user u has shift u, item i phi i
    and rank change i / 100."""
    config = config_of(registry, spec, seed, data, tuned)
    ids = torch.arange(users)
    tests = []
    for t in range(BLOCKS):
        for s in range(t + 1):
            values = torch.from_numpy(np.resize(scores(t, s, seed), users))
            tests.append((t, s, UserScores(ids, {"ndcg@20": values, "recall@20": 2 * values,
                                                  **({"rmse": values} if errors else {})})))
    curve = tuple({"step": t, "round": r, "participants": users, "loss": 0.5 / (r + 1), "valid": 0.1 + 0.001 * r,
                   "bytes_up": 4, "bytes_down": 4, "train_seconds": 0.12345678, "evaluate_seconds": 0.01}
                  for t in range(BLOCKS) for r in range(rounds))
    items = torch.arange(ITEMS)
    analysis = []
    for t in range(1, BLOCKS):
        analysis += [(t, "user_shift", ids, ids.double()), (t, "item_phi", items, items.double()),
                     (t, "item_rank_change", items, items.double() / 100)]
    model = Snapshot({"item": torch.zeros(1)}, {"user": torch.zeros(1)})
    progress = Progress(step=BLOCKS, trained=True, best=Best(model), curve=curve, tests=tuple(tests),
                        analysis=tuple(analysis))
    return _finished(results, config, progress)


def _finished(results: Path, config: RunConfig, progress: Progress) -> Path:
    record = Record(results / "runs" / config.name)
    record.folder.mkdir(parents=True)
    record.finish(summary(config, progress, 1.0, False), frames(progress))
    return record.folder


def fabricate_failed(results: Path, registry, spec: RunSpec, seed: int, error: str) -> None:
    """Write the record of a run that failed."""
    config = config_of(registry, spec, seed)
    record = Record(results / "runs" / config.name)
    record.folder.mkdir(parents=True)
    record.fail(failed(config, error))


def alter(folder: Path, without: Sequence[str] = (), **changes) -> None:
    """Change fields of a record's ``run.json``, or take some away."""
    path = folder / "run.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in without}))


def fabricate_methods(results: Path, registry, means: Mapping[str, float]) -> None:
    """Write the records of methods on FedMF and two datasets, seeds 0-2: method to the mean of ``level``."""
    for dataset in ("ml-100k", "lastfm-2k"):
        for i, (method, mean) in enumerate(means.items()):
            for seed in range(3):
                fabricate(results, registry, RunSpec(method, "fedmf", dataset), seed, level(mean, noise=i))


def fabricate_sessions(results: Path, registry, spec: RunSpec, seed: int, hit: float, *, full: float = 0.02,
                       noise: int = 0, early: Sequence[float] = (), probability: float = 0.5, seconds: float = 1.5,
                       rounds: int = 3, data: str = DATA, tuned: Path | None = None) -> Path:
    """Write the record of a run over sessions (FCUCR), in which the users' mean HR@10 is ``hit``, NDCG@10 half of it,
    and under full ranking ``full`` and half of that.

    Args:
        noise: seed of a difference between users that is this method's own.
        early: HR@10 of the first session after each round; says how many rounds there are.
        probability: mean over users of the predicted probability of the test target; users lie within .1 of it.
        seconds: of a round, two thirds of them training.
    """
    config = config_of(registry, spec, seed, data, tuned)
    ids = torch.arange(USERS)
    own = np.random.default_rng(noise).normal(0.0, 0.01, USERS)
    spread = torch.from_numpy(np.linspace(-0.1, 0.1, USERS) + own - own.mean())
    values = {f"{full_}{name}": level_ * (1.0 + spread) for full_, mean in (("", hit), ("all:", full))
              for name, level_ in (("hit@10", mean), ("ndcg@10", mean / 2))}
    curve = []
    for r in range(len(early) or rounds):
        more = {"early_hit@10": early[r], "early_ndcg@10": early[r] / 2} if early else {}
        curve.append({"step": 0, "round": r, "participants": USERS, "loss": 0.5, "valid": 0.1 + 0.001 * r,
                      "bytes_up": 4, "bytes_down": 4, "train_seconds": seconds * 2 / 3,
                      "evaluate_seconds": seconds / 3, **more})
    probabilities = probability + torch.linspace(-0.1, 0.1, USERS, dtype=torch.float64)
    model = Snapshot({"item": torch.zeros(1)}, {})
    progress = Progress(step=1, trained=True, best=Best(model), curve=tuple(curve),
                        tests=((0, 0, UserScores(ids, values)),),
                        analysis=((0, "target_probability", ids, probabilities),
                                  (0, "negative_probability", ids, 1.0 - probabilities)))
    return _finished(results, config, progress)
