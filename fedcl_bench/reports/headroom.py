"""Methods and bounds of one backbone and dataset against a reference: gains, shares of headroom, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple, Sequence

import numpy as np
import pandas as pd

from ..evaluation.metrics import sign_of
from ..records.store import Run, user_scores
from ..stats.significance import Headroom, TooFew, headroom
from .frame import check_metric, same_tests


@dataclass(frozen=True)
class HeadroomRow:
    """A method on one backbone and dataset.

    Attributes:
        seeds: those that it has in common with the reference and the bound, over which all else is.
        users: how many are tested.
        mean: of the metric on the block just trained, over users, each averaged over blocks.
        against: its gain over the reference and share of headroom; None of the reference itself.
        continual: learning (LA) and forgetting of the metric, as in tables; nan on streams of one step.
        sent: bytes that all clients upload in a run; seconds: of a run.
    """

    method: str
    seeds: tuple[int, ...]
    users: int
    mean: float
    against: Headroom | None
    continual: Mapping[str, float]
    sent: float
    seconds: float


def headroom_rows(runs: Mapping[str, Sequence[Run]], reference: str, bound: str, metric: str) -> list[HeadroomRow]:
    """Rows of all methods, the reference first and then the bound.

    Args:
        runs: method to its runs on one backbone and dataset.

    Raises:
        UserError: for runs that are not comparable or lack the metric. TooFew: without a seed or 2 users in common.
    """
    every = [run for of_method in runs.values() for run in of_method]
    same_tests(every, "headroom")
    check_metric(every, metric, per_user=True)
    order = [reference, bound, *(name for name in runs if name not in (reference, bound))]
    scores = {name: {run.seed: user_scores([run], metric) for run in runs[name]} for name in dict.fromkeys(order)}
    common = {name: _common(name, scores, (reference, bound)) for name in scores}
    against = _against({name: of_name for name, of_name in common.items() if name != reference}, sign_of(metric))
    return [_row(name, runs[name], common[name], against.get(name), metric) for name in scores]


class _Common(NamedTuple):
    """What a method, the reference and the bound have in common, and their scores of it, (seeds, users) each."""

    seeds: tuple[int, ...]
    users: pd.Index
    scores: Sequence[np.ndarray]


def _common(name: str, scores_of: Mapping[str, Mapping[int, pd.Series]], compared: tuple[str, str]) -> _Common:
    """Args: scores_of: each method's per seed and user; compared: the reference and the bound."""
    by_seed = [scores_of[each] for each in (name, *compared)]
    seeds = tuple(sorted(set.intersection(*map(set, by_seed))))
    if not seeds:
        raise TooFew(f"{name}, {compared[0]} and {compared[1]} have no seed in common; run the same seeds of all.")
    tables = [pd.concat([of[seed] for seed in seeds], axis=1) for of in by_seed]
    users = pd.concat(tables, axis=1).dropna().index
    return _Common(seeds, users, [table.loc[users].to_numpy(float).T for table in tables])


def _against(common: Mapping[str, _Common], sign: int) -> dict[str, Headroom]:
    """The shares of all methods, given the metric's sign; those of the same seeds and users have the same samples."""
    alike: dict[tuple, list[str]] = {}
    for name, of_name in common.items():
        alike.setdefault((of_name.seeds, tuple(of_name.users)), []).append(name)
    return {name: found for names in alike.values() for name, found in zip(names, headroom(
        [sign * common[name].scores[0] for name in names], *(sign * each for each in common[names[0]].scores[1:])))}


def _row(name: str, runs: Sequence[Run], common: _Common, against: Headroom | None, metric: str) -> HeadroomRow:
    chosen = [run for seed in common.seeds for run in runs if run.seed == seed]
    parts = [run.meta["continual"].get(metric, {}) for run in chosen]
    return HeadroomRow(name, common.seeds, len(common.users), float(common.scores[0].mean()), against,
                       {name: float(np.mean([np.nan if (value := part.get(name)) is None else value for part in parts]))
                        for name in ("LA", "forgetting")},
                       float(np.mean([run.meta["bytes"]["total_up"] for run in chosen])),
                       float(np.mean([run.meta["seconds"]["total"] for run in chosen])))
