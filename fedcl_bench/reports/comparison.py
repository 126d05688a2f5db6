"""Methods against each other, from their finished runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Sequence

from ..core.errors import UserError
from ..records.run import Run
from ..records.store import describe, incremental, one_protocol
from ..stats.significance import FriedmanComparison, PairedComparison, TooFew, compare_paired, friedman, holm
from .frame import check_metric, common_seeds, paired_scores, same_tests, seed_averages


@dataclass(frozen=True)
class Comparison:
    """The proposed method against another one on one backbone and dataset.

    Attributes:
        other: name of the other method.
        seeds: those both methods have; all numbers are over these.
        left_out: seeds that only one of the two has with the metric.
        users: over the users that both have, each averaged over blocks and seeds.
        means: over these users, of the proposed method and of the other.
        users_left_out: how many users only one of the two has.
        p_holm: p of ``users`` adjusted for all methods that the proposed one is compared with.
        by_seed: over the seeds' averages; None if it cannot be computed, for the reason ``by_seed_reason``.
    """

    other: str
    seeds: tuple[int, ...]
    left_out: tuple[int, ...]
    users: PairedComparison
    means: tuple[float, float]
    users_left_out: int
    p_holm: float
    by_seed: PairedComparison | None
    by_seed_reason: str


def _blocks(runs: Sequence[Run], blocks: Sequence[int] | None) -> tuple[int, ...]:
    """The blocks to average over: those given, or the incremental ones; raises UserError if a run lacks one."""
    chosen = incremental(runs[0]) if blocks is None else tuple(blocks)
    for run in runs:
        if beyond := [block for block in chosen if block >= run.head["blocks"]]:
            raise UserError(f"--blocks: found {beyond[0]}; {describe(run.meta)}, has blocks "
                            f"0-{run.head['blocks'] - 1}.")
    return chosen


def against_each(runs: Mapping[str, Sequence[Run]], proposed: str, metric: str,
                 blocks: Sequence[int] | None = None, draws: int = 9999) -> list[Comparison]:
    """The proposed method against each other one.

    Args:
        runs: method to its runs on one backbone and dataset.
        metric: as ``ndcg@20``; on the block just trained.
        blocks: averaged over; None: the incremental ones.
        draws: of the bootstrap and of the sign flips; 1 where only the t-test is wanted, which is quick.

    Raises:
        UserError: for runs that are not comparable, a metric or block that they lack, or fewer than 2 common users.
    """
    same_tests([run for of_method in runs.values() for run in of_method], "compare")
    having = {name: [run for run in of_method if metric in run.meta["metrics"]] or list(of_method)
              for name, of_method in runs.items()}
    every = [run for of_method in having.values() for run in of_method]
    check_metric(every, metric, per_user=True)
    blocks = _blocks(every, blocks)
    comparisons = []
    for other in runs:
        if other != proposed:
            seeds = {run.seed for name in (proposed, other) for run in runs[name]}
            comparisons.append(_against((proposed, having[proposed]), (other, having[other]), seeds, metric, blocks,
                                        draws))
    adjusted = holm([comparison.users.p for comparison in comparisons])
    return [replace(comparison, p_holm=p) for comparison, p in zip(comparisons, adjusted)]


def _against(mine: tuple[str, Sequence[Run]], theirs: tuple[str, Sequence[Run]], seeds: set[int], metric: str,
             blocks: Sequence[int], draws: int) -> Comparison:
    """One method against another one; ``seeds`` are those of either. Its p is not adjusted yet."""
    if not (pairs := common_seeds(mine[1], theirs[1])):
        first, second = (", ".join(str(run.seed) for run in runs) for _, runs in (mine, theirs))
        raise TooFew(f"{mine[0]} and {theirs[0]} have no seed in common: {mine[0]} has {first}, {theirs[0]} {second}.\n"
                     f"Run the same seeds of both.")
    scores = paired_scores(pairs, metric, blocks)
    both, common = scores.dropna(), tuple(run.seed for run, _ in pairs)
    by_seed, reason = None, ""
    try:
        by_seed = compare_paired(*(seed_averages(runs, metric, blocks) for runs in zip(*pairs)), draws=draws,
                                 unit="seed")
    except TooFew as error:
        reason = str(error)
    users = compare_paired(both["mine"], both["theirs"], draws, unit="user")
    return Comparison(theirs[0], common, tuple(sorted(seeds.difference(common))), users, tuple(both.mean()),
                      len(scores) - len(both), users.p, by_seed, reason)


@dataclass(frozen=True)
class GridRow:
    """The methods on one backbone and dataset: averages over blocks and over ``seeds``, which all of them have."""

    backbone: str
    dataset: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]


def over_grid(cells: Mapping[tuple[str, str], Mapping[str, Sequence[Run]]], metric: str,
              blocks: Sequence[int] | None = None,
              where: str = "compare --friedman") -> tuple[list[GridRow], FriedmanComparison]:
    """Friedman's test with one row per backbone and dataset.

    Args:
        cells: (backbone, dataset) to method to its runs; every row has the same methods in the same order.
        metric, blocks: as for ``against_each``; None are each row's own incremental blocks.
        where: what asks, for errors.

    Returns:
        The rows and the test over them.

    Raises:
        UserError: for runs that are not comparable, a metric or block that they lack, or too few rows or methods.
    """
    one_protocol([run for row in cells.values() for of_method in row.values() for run in of_method], where)
    rows = []
    for (backbone, dataset), row in cells.items():
        every = [run for of_method in row.values() for run in of_method]
        same_tests(every, where)
        check_metric(every, metric)
        chosen = _blocks(every, blocks)
        averages = [seed_averages(of_method, metric, chosen) for of_method in row.values()]
        seeds = sorted(set.intersection(*(set(a.index) for a in averages)))
        if not seeds:
            raise TooFew(f"the methods have no seed in common on {backbone}, {dataset}; run the same seeds of all.")
        rows.append(GridRow(backbone, dataset, tuple(seeds), tuple(float(a[seeds].mean()) for a in averages)))
    return rows, friedman([row.scores for row in rows])
