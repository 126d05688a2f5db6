"""Numbers of finished runs in the form that tests and figures need: per user, per seed, per block, per round."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..data.settings import StreamSettings
from ..core.errors import UserError, unknown
from ..evaluation.metrics import SHIPPED
from ..core.text import quoted
from ..records.run import Run
from ..runs.specs import RunSpec
from ..records.store import comparable, describe, incremental, one_data, one_protocol

# Settings that say which items a user is tested on, and among which others.
_TESTED = (*(f.name for f in fields(StreamSettings)), "candidates", "sampled_candidates", "candidate_lists")


def parse_blocks(text: str) -> tuple[int, ...]:
    """``"1-3"`` or ``"0,2"`` as block numbers; raises UserError for anything else."""
    blocks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(re.fullmatch("0|[1-9][0-9]{0,3}", number) for number in numbers) or int(numbers[-1]) < int(first):
            raise UserError(f"--blocks: found {quoted(text)}, accepted: blocks as 1-3 or 1,3, at most 9999.")
        blocks |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(blocks))


def split_group(metric: str) -> tuple[str, str]:
    """``"ndcg@20 new-users"`` as the metric and the group of users or items that it is of; the group may be empty."""
    name, _, group = metric.partition(" ")
    return name, group


def group_blocks(run: Run, metric: str, group: str) -> list[float | None] | None:
    """A metric of a group on the block just trained, per block, None where it has nobody; ``"users"`` is how many it
    has. None if the run has not recorded it."""
    return run.meta.get("groups", {}).get(group, {}).get(metric)


def group_average(run: Run, metric: str, group: str, blocks: Iterable[int]) -> float | None:
    """A recorded metric of a group, averaged over those of the blocks that have somebody of it; None without one."""
    of_blocks = group_blocks(run, metric, group) or {}
    values = [of_blocks[t] for t in blocks if of_blocks and of_blocks[t] is not None]
    return float(np.mean(values)) if values else None


def stream_metric(run: Run) -> str:
    """The metric by which runs of this stream are compared unless another is asked for: that of their validation."""
    return run.head["settings"]["valid_metric"]


def check_blocks(runs: Iterable[Run], blocks: Iterable[int]) -> None:
    """Raise UserError if a run lacks one of the blocks."""
    for run in runs:
        count = run.head["blocks"]
        for block in blocks:
            if block >= count:
                raise UserError(f"--blocks: found {block}; {describe(run.meta)}, has blocks 0-{count - 1}.")


def check_metric(runs: Iterable[Run], metric: str, per_user: bool = False) -> None:
    """Raise UserError if ``metric`` is unknown (naming the nearest) or a run has not recorded it."""
    runs = list(runs)
    recorded = {name.partition("@")[0] for run in runs for name in run.head["metrics"]}
    anywhere = recorded.union(cls.name for cls in SHIPPED)
    for run in runs:
        known = set(run.users["metric"].unique()) if per_user else set(run.head["metrics"])
        if metric in known:
            continue
        name, at, k = metric.partition("@")
        if name not in anywhere or not (at and k.isdecimal()):
            raise unknown("metric", metric, known)
        kind = " per user" if per_user else ""
        raise UserError(f"{describe(run.meta)}: its record in {run.path} has no {metric}{kind}.\nIt has: "
                        f"{', '.join(sorted(known))}. Other list lengths come from runs with --set topk=20,50, other "
                        f"metrics with --set extra_metrics=NAME.")


def tested_settings(run: Run) -> dict[str, Any]:
    """The settings that say which items a run's users are tested on, and among which others; who trains with whom, and
    who of the users is known, changes neither where domains are clients."""
    settings = comparable(run.meta["settings"])
    if settings.get("stream") == "domains":
        for name in ("topology", "known_users"):
            settings.pop(name, None)
    return {name: settings.get(name) for name in _TESTED}


def same_tests(runs: Sequence[Run], where: str) -> None:
    """Raise UserError unless all runs of a dataset ranked the same items for the same users under the same protocol."""
    one_protocol(runs, where)
    one_data(runs)
    for run in runs[1:]:
        mine, first = tested_settings(run), tested_settings(runs[0])
        for name in _TESTED:
            if mine[name] != first[name]:
                raise UserError(f"{where}: {describe(runs[0].meta)} has {name}={first[name]} and "
                                f"{describe(run.meta)} has {name}={mine[name]}: what they are tested on differs.")


def tested_users(runs: Iterable[Run]) -> int:
    """How many users runs tested on the block just trained, in any incremental block."""
    users: set[int] = set()
    for run in runs:
        keep = ((run.users["trained_block"] == run.users["tested_block"])
                & run.users["trained_block"].isin(incremental(run)))
        users.update(run.users.loc[keep, "user"].unique())
    return len(users)


def seed_averages(runs: Iterable[Run], metric: str, blocks: Sequence[int] | None = None) -> pd.Series:
    """One score per seed: the metric on the block just trained (a mean over users), averaged over blocks.

    Args:
        blocks: None is ``incremental``.

    Returns:
        Values by seed, sorted.
    """
    values = {}
    for run in runs:
        per_block = run.meta["metrics"][metric]["per_block"]
        values[run.seed] = float(np.mean([per_block[t] for t in (incremental(run) if blocks is None else blocks)]))
    return pd.Series(values, dtype=float).sort_index()


@dataclass(frozen=True)
class OverSeeds:
    """A mean over n seeds and its sample standard deviation (0 for a single seed)."""

    mean: float
    deviation: float
    n: int


def over_seeds(values: Iterable[float]) -> OverSeeds:
    """Mean and deviation of values; at least one."""
    values = np.asarray(list(values), dtype=float)
    return OverSeeds(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0, len(values))


def improvement(runs: Iterable[Run], base: Iterable[Run], metric: str) -> OverSeeds | None:
    """Improvement in percent of the average over incremental blocks, over the seeds that both have; None without one.

    The mean is that of the averages' means, as tables show it; the deviation is that of the seeds' own improvements.
    """
    mine, theirs = seed_averages(runs, metric), seed_averages(base, metric)
    seeds = mine.index.intersection(theirs.index)
    if not len(seeds) or not (theirs[seeds] > 0).all():
        return None
    each = over_seeds(100.0 * (mine[seeds] / theirs[seeds] - 1.0))
    return OverSeeds(float(100.0 * (mine[seeds].mean() / theirs[seeds].mean() - 1.0)), each.deviation, each.n)


def mean_matrix(runs: Sequence[Run], metric: str) -> np.ndarray:
    """R[t, s], the metric on block s after block t, averaged over seeds; nan above the diagonal."""
    size = len(runs[0].meta["matrix"][metric])
    result = np.full((size, size), np.nan)
    for t in range(size):
        result[t, :t + 1] = np.mean([run.meta["matrix"][metric][t] for run in runs], axis=0)
    return result


@dataclass(frozen=True)
class Curve:
    """What was measured in every round of one block: the validation metric, or another column of the rounds.

    Attributes:
        mean, deviation: of the seeds that still train, per round; sample standard deviation, 0 where one seed is left.
        common: rounds that every seed reached; beyond them the mean is of fewer seeds.
        best_round, best_value: of each seed's best validation round, averaged over seeds; rounds count from 1.
    """

    mean: np.ndarray
    deviation: np.ndarray
    common: int
    best_round: float
    best_value: float


def validation_curves(runs: Sequence[Run], column: str = "valid") -> list[Curve]:
    """One curve per block, of the validation metric or of another column of the runs' rounds. A round that was not
    validated has the value of the last one that was; nan before the first."""
    curves = []
    for block in range(len(runs[0].meta["rounds"])):
        valid = [run.rounds.loc[run.rounds["step"] == block].sort_values("round")[column].ffill().to_numpy()
                 for run in runs]
        best = [run.meta["best_round"][block] for run in runs]
        points = [over_seeds(v[i] for v in valid if len(v) > i) for i in range(max(map(len, valid)))]
        curves.append(Curve(np.array([p.mean for p in points]), np.array([p.deviation for p in points]),
                            min(map(len, valid)), float(np.mean(best)),
                            float(np.mean([v[b - 1] for v, b in zip(valid, best)]))))
    return curves


@dataclass(frozen=True)
class Histogram:
    """How many users have a value in which range.

    Attributes:
        edges: of the b ranges, shape (b + 1,).
        share: of the users, shape (b,), averaged over seeds; they add up to 1.
        mean: the users' mean.
    """

    edges: np.ndarray
    share: np.ndarray
    mean: OverSeeds


def user_histogram(runs: Sequence[Run], kind: str, edges: np.ndarray) -> Histogram:
    """The users' values of one kind of analysis; the first and the last range also take what lies beyond.

    Raises:
        UserError: for a run whose record has no such values.
    """
    shares, means = [], []
    for run in runs:
        values = run.analysis.loc[run.analysis["kind"] == kind, "value"].to_numpy(dtype=float)
        if not len(values):
            raise UserError(f"{describe(run.meta)}: its record in {run.path} has no {kind}; run it again with this "
                            f"version of the suite.")
        shares.append(np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / len(values))
        means.append(float(values.mean()))
    return Histogram(edges, np.mean(shares, axis=0), over_seeds(means))


def variations(runs: Iterable[Run], base: Mapping[str, Any], spec: RunSpec,
               names: Iterable[str]) -> dict[str, list[float]]:
    """Which values of single settings there are runs of, all other settings being those of ``base``.

    Args:
        runs: any; those of the spec's method, backbone and dataset count.
        base: the settings that the spec stands for.
        names: the settings to look at.

    Returns:
        Setting to its values, sorted; the value of ``base`` is among them if there are runs of it.
    """
    base = comparable(base)
    values_of: dict[str, set] = defaultdict(set)
    for run in runs:
        if any(run.head[key] != getattr(spec, key) for key in ("method", "backbone", "dataset")):
            continue
        settings = comparable(run.head["settings"])
        differs = [name for name in {**base, **settings} if settings.get(name) != base.get(name)]
        for name in names:
            if differs in ([], [name]):
                values_of[name].add(settings[name])
    return {name: sorted(values) for name, values in values_of.items()}
