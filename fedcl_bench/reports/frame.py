"""The results frame: what finished runs measured, one number a row, and what tables, tests and figures ask of it.

Whatever is shown of a run's metrics is read here: ``results`` is the long frame, ``by_block`` a metric on the block
just trained, and ``seed_averages`` the one average over blocks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..core.errors import UserError, unknown
from ..core.text import quoted
from ..data.settings import StreamSettings
from ..evaluation.metrics import SHIPPED, sign_of
from ..records.store import Run, comparable, describe, incremental, one_data, one_protocol, user_scores
from ..runs.specs import RunSpec

# Settings that say which items a user is tested on, and among which others.
_TESTED = (*(f.name for f in fields(StreamSettings)), "candidates", "sampled_candidates", "candidate_lists")


# The frame, and numbers of it


def results(runs: Iterable[Run]) -> pd.DataFrame:
    """What runs measured: a row per run, step trained, step tested, group of users or items, and metric.

    Returns:
        Columns seed, trained, tested, group (empty: all users), metric and value: the mean over the group, nan where a
        step has nobody of it. Of groups the metric ``users`` is how many there are; they are tested on the step just
        trained alone.
    """
    rows = []
    for run in runs:
        rows += [(run.seed, t, s, "", metric, value) for metric, matrix in run.meta["matrix"].items()
                 for t, line in enumerate(matrix) for s, value in enumerate(line)]
        rows += [(run.seed, t, t, group, metric, value) for group, metrics in run.meta.get("groups", {}).items()
                 for metric, values in metrics.items() for t, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["seed", "trained", "tested", "group", "metric", "value"]).astype(
        {"value": float})


def split_group(metric: str) -> tuple[str, str]:
    """``"ndcg@20 new-users"`` as the metric and the group of users or items that it is of; the group may be empty."""
    name, _, group = metric.partition(" ")
    return name, group


def by_block(run: Run, metric: str) -> list[float | None] | None:
    """A metric, or as ``"ndcg@20 new-users"`` that of a group, on the block just trained, per block: None where it has
    nobody; ``"users new-users"`` is how many it has. None if the run has not recorded it."""
    name, group = split_group(metric)
    if group:
        return run.meta.get("groups", {}).get(group, {}).get(name)
    return run.meta["metrics"][name]["per_block"] if name in run.meta["metrics"] else None


def seed_averages(runs: Iterable[Run], metric: str, blocks: Iterable[int] | None = None) -> pd.Series:
    """One score per seed, sorted: the metric on the block just trained (a mean over users), averaged over ``blocks``
    (None: ``incremental``); nan where nothing is recorded. ``metric`` is as of ``by_block``; that of a group counts in
    the blocks that have somebody of it."""
    values = {}
    for run in runs:
        of_blocks, chosen = by_block(run, metric), incremental(run) if blocks is None else blocks
        there = [of_blocks[t] for t in chosen if of_blocks and of_blocks[t] is not None]
        values[run.seed] = float(np.mean(there)) if there else np.nan
    return pd.Series(values, dtype=float).sort_index()


def common_seeds(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]]:
    others = {run.seed: run for run in b}
    return [(run, others[run.seed]) for run in sorted(a, key=lambda run: run.seed) if run.seed in others]


def paired_scores(pairs: Iterable[tuple[Run, Run]], metric: str, blocks: Sequence[int] | None = None) -> pd.DataFrame:
    """The two of every pair against each other, by user: the columns mine and theirs, averaged over blocks (None is
    ``incremental``) and pairs; nan for a user whom only one of the two has."""
    both = [user_scores(runs, metric, blocks) for runs in zip(*pairs)]
    return pd.concat(both, axis=1, keys=["mine", "theirs"]).sort_index()


@dataclass(frozen=True)
class OverSeeds:
    """A mean over n seeds and its sample standard deviation (0 for a single seed)."""

    mean: float
    deviation: float
    n: int

    def text(self, form: str = ".4f") -> str:
        """Both; of a single seed the number alone. ``form`` may ask for the sign of the mean."""
        return format(self.mean, form) + (f" ± {format(self.deviation, form.lstrip('+'))}" if self.n > 1 else "")


def over_seeds(values: Iterable[float]) -> OverSeeds:
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
    percent = 100.0 * sign_of(metric)
    each = over_seeds(percent * (mine[seeds] / theirs[seeds] - 1.0))
    return OverSeeds(float(percent * (mine[seeds].mean() / theirs[seeds].mean() - 1.0)), each.deviation, each.n)


def mean_matrix(runs: Sequence[Run], metric: str) -> np.ndarray:
    """R[t, s], averaged over seeds; nan above the diagonal."""
    frame = results(runs)
    frame = frame[(frame["metric"] == metric) & (frame["group"] == "")]
    by_seed = frame.set_index(["trained", "tested", "seed"])["value"].unstack("seed")
    return by_seed.mean(axis=1).unstack("tested").to_numpy()


# Curves and distributions


@dataclass(frozen=True)
class Curve:
    """What was measured in every round of one block: the validation metric, or another column of the rounds."""

    # Of the seeds that still train, per round; the sample standard deviation is 0 where one seed is left.
    mean: np.ndarray
    deviation: np.ndarray
    common: int  # rounds that every seed reached; beyond them the mean is of fewer seeds
    # Of each seed's best validation round, averaged over seeds; rounds count from 1.
    best_round: float
    best_value: float


def validation_curves(runs: Sequence[Run], column: str = "valid") -> list[Curve]:
    """One curve per block, of the validation metric or of another column of the runs' rounds. A round that was not
    validated has the value of the last one that was; nan before the first."""
    curves = []
    for block in range(len(runs[0].meta["rounds"])):
        valid = [run.rounds.loc[run.rounds["step"] == block].sort_values("round")[column].ffill().reset_index(drop=True)
                 for run in runs]
        best = [run.meta["best_round"][block] for run in runs]
        rounds = pd.concat(valid, axis=1)
        curves.append(Curve(rounds.mean(axis=1).to_numpy(), rounds.std(axis=1).fillna(0.0).to_numpy(),
                            min(map(len, valid)), float(np.mean(best)),
                            float(np.mean([values[b - 1] for values, b in zip(valid, best)]))))
    return curves


@dataclass(frozen=True)
class Histogram:
    """How many users have a value in which range."""

    edges: np.ndarray  # of the b ranges, shape (b + 1,)
    share: np.ndarray  # of the users, shape (b,), averaged over seeds; they add up to 1
    mean: OverSeeds  # the users' mean


def user_histogram(runs: Sequence[Run], kind: str, edges: np.ndarray) -> Histogram:
    """The users' values of one kind of analysis; the first and the last range also take what lies beyond. Raises
    UserError for a run whose record has no such values."""
    shares, means = [], []
    for run in runs:
        values = run.analysis.loc[run.analysis["kind"] == kind, "value"].to_numpy(dtype=float)
        if not len(values):
            raise UserError(f"{describe(run.meta)}: its record in {run.path} has no {kind}; run it again with this "
                            f"version of the suite.")
        shares.append(np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / len(values))
        means.append(float(values.mean()))
    return Histogram(edges, np.mean(shares, axis=0), over_seeds(means))


# What can be asked


def parse_blocks(text: str) -> tuple[int, ...]:
    """``"1-3"`` or ``"0,2"`` as block numbers; raises UserError for anything else."""
    blocks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch("(0|[1-9][0-9]{0,3})(?:-(0|[1-9][0-9]{0,3}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise UserError(f"--blocks: found {quoted(text)}, accepted: blocks as 1-3 or 1,3, at most 9999.")
        blocks |= set(range(first, last + 1))
    return tuple(sorted(blocks))


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
        cure = "It is a compact record, which has the means of others; full records have them per user." \
            if metric in run.head["metrics"] else ("Other list lengths come from runs with --set topk=20,50, other "
                                                   "metrics with --set extra_metrics=NAME.")
        raise UserError(f"{describe(run.meta)}: its record in {run.path} has no {metric}{kind}.\nIt has: "
                        f"{', '.join(sorted(known))}. {cure}")


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


def variations(runs: Iterable[Run], base: Mapping[str, Any], spec: RunSpec,
               names: Iterable[str]) -> dict[str, list[float]]:
    """Which values of the settings ``names`` there are runs of, all other settings being those of ``base``, for which
    the spec stands: setting to its values, sorted, that of ``base`` among them if there are runs of it. Of the runs
    those of the spec's method, backbone and dataset count."""
    base, values_of = comparable(base), defaultdict(set)
    for run in runs:
        if all(run.head[kind] == getattr(spec, kind) for kind in ("method", "backbone", "dataset")):
            settings = comparable(run.head["settings"])
            # A setting that only one has is inactive in the other for another's sake.
            differs = {name for name in base.keys() & settings.keys() if settings[name] != base[name]}
            for name in names:
                if name in settings and differs <= {name}:
                    values_of[name].add(settings[name])
    return {name: sorted(values) for name, values in values_of.items()}
