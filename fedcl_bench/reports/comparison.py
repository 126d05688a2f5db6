"""Methods against each other, from their finished runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import Any, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from ..core.errors import UserError
from ..core.settings import AT_DEFAULT, as_text, flat, inactive
from ..evaluation.metrics import sign_of
from ..records.store import Run, comparable, continual, describe, incremental, one_protocol, user_scores
from ..runs.config import CORE_SETTINGS, resolve
from ..runs.registry import Registry
from ..runs.specs import RunSpec, Tuned
from ..stats.significance import (FriedmanComparison, Headroom, PairedComparison, TooFew, compare_paired, friedman,
                                  headroom, holm)
from .frame import check_metric, common_seeds, paired_scores, same_tests, seed_averages

ONE_SEED = "one seed: no test over seeds"
NAMES = ("method", "backbone", "dataset")


def words_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as ``--set`` takes them, sorted."""
    return {name: as_text(value) for name, value in sorted(comparable(settings).items())}


def at_default(head: Mapping[str, Any], classes: Iterable[Any]) -> dict[str, Any]:
    """The settings that a record leaves out as they do nothing at their default; classes: of settings, or instances."""
    defaults = {f.name: list(f.default) if isinstance(f.default, tuple) else f.default
                for each in classes for f in fields(each)}
    return {name: defaults[name] for name, why in head.get("inactive_settings", {}).items()
            if why == AT_DEFAULT and name in defaults}


def recorded_values(parts: Sequence[Any]) -> dict[str, Any]:
    """What a record says of these settings, with ``at_default``: all but those that do nothing for another reason."""
    without = inactive(parts)
    return {name: value for name, value in flat(parts).items() if without.get(name, AT_DEFAULT) == AT_DEFAULT}


def changed_settings(registry: Registry, head: Mapping[str, Any], dataset: str, below: Mapping[str, Any] | None = None,
                     tuned: Tuned | None = None) -> dict[str, Any]:
    """The settings of a record, given its head, that are not today's defaults, which make its run again. What follows
    from another one of them, as a stream's own defaults, is not among them. Raises UserError if a plugin is not here,
    or does not take these settings. ``dataset``: the record's, or its path; ``below``: settings that count as defaults,
    as those of ``--set``; ``tuned``: where tuned ones are that do so too."""
    found = dict[str, Any]()
    while True:
        spec = RunSpec(head["method"], head["backbone"], dataset, tuple({**(below or {}), **found}.items()))
        parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))
        usual = recorded_values(parts)
        differs = {name: value for name, value in {**at_default(head, parts), **head["settings"]}.items()
                   if name in usual and name not in found and value != usual[name]}
        if not differs:
            return found
        first = {name: differs[name] for name in ("stream", "split_file", "topology") if name in differs}
        found |= first or differs


def changes_of(registry: Registry, run: Run, tuned: Tuned | None = None) -> dict[str, str]:
    """The settings of a run that are not today's defaults, or tuned, as ``--set`` takes them, sorted; all of them, if a
    plugin is not here or was not tuned."""
    try:
        changes = changed_settings(registry, run.head, run.head["dataset"], tuned=tuned)
    except UserError:
        changes = run.head["settings"]
    return {name: as_text(value) for name, value in sorted(changes.items()) if name != "extra_metrics"}


def unequal(mine: Run, theirs: Run, registry: Registry, tuned: Tuned | None = None) -> str:
    """The settings that runs of two methods share and have neither alike nor each by its own default (or each tuned),
    so that a difference may be theirs, as ``rounds=2 beside 100``; empty for one method, whose variants are named."""
    if mine.head["method"] == theirs.head["method"]:
        return ""
    classes = [*CORE_SETTINGS, *(registry.get(kind, mine.head[kind]).cls.Settings for kind in ("backbone", "method")
                                 if registry.knows(kind, mine.head[kind]))]
    pair = [{**words_of(at_default(run.head, classes)), **words_of(run.head["settings"])} for run in (mine, theirs)]
    differ = [name for name in pair[0] if name in pair[1] and pair[0][name] != pair[1][name]]
    changed = [{name for run in (mine, theirs) for name in changes_of(registry, run, base)}
               for base in dict.fromkeys((None, tuned)) if differ]
    fewest = min(([name for name in differ if name in names] for names in changed), key=len, default=[])
    return ", ".join(f"{name}={pair[0][name]} beside {pair[1][name]}" for name in fewest)


@dataclass(frozen=True)
class PairedTests:
    """One method's runs against another's. A positive difference means that the one is better, also of errors, of which
    less is."""

    users: PairedComparison  # over the users that both have, each averaged over blocks and the seeds that both have
    seeds: PairedComparison | None  # over these seeds, each averaged over its users and blocks; None for fewer than two
    means: tuple[float, float]  # over the users, of either method
    users_left_out: int  # how many users only one of the two has


def paired_tests(a: Sequence[Run], b: Sequence[Run], metric: str, blocks: Sequence[int] | None = None,
                 draws: int = 1) -> PairedTests:
    """Runs of a against runs of b, over users and over seeds; arguments as of ``against_each``. Raises TooFew without a
    seed, or for fewer than 2 users, that both have."""
    pairs = [pair for pair in common_seeds(a, b) if all(metric in run.meta["metrics"] for run in pair)]
    if not pairs:
        raise TooFew("no seed in common")
    scores = paired_scores(pairs, metric, blocks)
    both = scores.dropna()
    averages = pd.concat([seed_averages(runs, metric, blocks) for runs in zip(*pairs)], axis=1).dropna()
    sign = sign_of(metric)
    users = compare_paired(sign * both["mine"], sign * both["theirs"], draws, unit="user")
    seeds = compare_paired(sign * averages[0], sign * averages[1], draws, unit="seed") if len(averages) > 1 else None
    return PairedTests(users, seeds, tuple(both.mean()), len(scores) - len(both))


def holm_adjusted(tests: Sequence[PairedTests]) -> Iterator[PairedTests]:
    seeds = iter(holm([test.seeds.p for test in tests if test.seeds]))
    for test, p in zip(tests, holm([test.users.p for test in tests])):
        yield replace(test, users=replace(test.users, p=p), seeds=test.seeds and replace(test.seeds, p=next(seeds)))


@dataclass(frozen=True)
class Comparison(PairedTests):
    """The proposed method against another one on one backbone and dataset."""

    other: str  # name of the other method
    common: tuple[int, ...]  # the seeds that both methods have
    left_out: tuple[int, ...]  # the seeds that only one of the two has with the metric
    p_holm: float  # p of ``users`` adjusted for all methods that the proposed one is compared with


def _blocks(runs: Sequence[Run], blocks: Sequence[int] | None) -> tuple[int, ...]:
    """Those to average over; raises UserError if a run lacks one."""
    chosen = incremental(runs[0]) if blocks is None else tuple(blocks)
    for run in runs:
        if beyond := [block for block in chosen if not 0 <= block < run.head["blocks"]]:
            raise UserError(f"--blocks: found {beyond[0]}; {describe(run.meta)}, has blocks "
                            f"0-{run.head['blocks'] - 1}.")
    return chosen


def against_each(runs: Mapping[str, Sequence[Run]], proposed: str, metric: str,
                 blocks: Sequence[int] | None = None, draws: int = 9999) -> list[Comparison]:
    """The proposed method against each other one, given each method's runs on one backbone and dataset. Raises
    UserError for runs that are not comparable, a metric or block that they lack, or fewer than 2 common users.

    ``metric``: on the block just trained; ``blocks``: averaged over, None: the incremental ones; ``draws``: of the
    bootstrap and of the sign flips; 1 where only the t-test is wanted, which is quick."""
    same_tests([run for of_method in runs.values() for run in of_method], "compare")
    having = {name: [run for run in of_method if metric in run.meta["metrics"]] or list(of_method)
              for name, of_method in runs.items()}
    every = [run for of_method in having.values() for run in of_method]
    check_metric(every, metric, per_user=True)
    blocks = _blocks(every, blocks)
    comparisons = []
    mine = having[proposed]
    for other, theirs in having.items():
        if other == proposed:
            continue
        if not (common := tuple(run.seed for run, _ in common_seeds(mine, theirs))):
            first, second = (", ".join(str(run.seed) for run in of_method) for of_method in (mine, theirs))
            raise TooFew(f"{proposed} and {other} have no seed in common: {proposed} has {first}, {other} {second}.\n"
                         f"Run the same seeds of both.")
        left_out = {run.seed for name in (proposed, other) for run in runs[name]}.difference(common)
        tests = paired_tests(mine, theirs, metric, blocks, draws)
        comparisons.append(Comparison(**vars(tests), other=other, common=common, left_out=tuple(sorted(left_out)),
                                      p_holm=tests.users.p))
    adjusted = holm([comparison.users.p for comparison in comparisons])
    return [replace(comparison, p_holm=p) for comparison, p in zip(comparisons, adjusted)]


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
    """Friedman's test with one row per backbone and dataset: the rows, and the test over them. Raises UserError for
    runs that are not comparable, a metric or block that they lack, or too few rows or methods.

    ``cells``: (backbone, dataset) to method to its runs; every row has the same methods in the same order. ``metric``,
    ``blocks``: as for ``against_each``; None are each row's own incremental blocks. ``where``: what asks, for errors.
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
    return rows, friedman([[sign_of(metric) * score for score in row.scores] for row in rows])


# Gains over a reference, and shares of the headroom below a bound


@dataclass(frozen=True)
class HeadroomRow:
    """A method on one backbone and dataset."""

    method: str
    seeds: tuple[int, ...]  # that it has in common with the reference and the bound, over which all else is
    users: int  # how many are tested
    mean: float  # of the metric on the block just trained, over users, each averaged over blocks
    against: Headroom | None  # its gain over the reference and share of headroom; None of the reference itself
    continual: Mapping[str, float]  # learning (LA) and forgetting of the metric, as in tables; nan on streams of a step
    sent: float  # bytes that all clients upload in a run
    seconds: float  # of a run


def headroom_rows(runs: Mapping[str, Sequence[Run]], reference: str, bound: str, metric: str) -> list[HeadroomRow]:
    """Rows of all methods, the reference first and then the bound, given each method's runs on one backbone and
    dataset. Raises UserError for runs that are not comparable or lack the metric, TooFew without a seed or 2 users in
    common."""
    every = [run for of_method in runs.values() for run in of_method]
    same_tests(every, "headroom")
    check_metric(every, metric, per_user=True)
    if any(run.head["settings"].get("evaluate_users") for run in every):
        raise UserError("headroom: the runs test samples of users, which differ between seeds (evaluate_users), "
                        "accepted: runs that test all.")
    scores = {name: {run.seed: user_scores([run], metric) for run in of_method} for name, of_method in runs.items()}
    rows, sign, alike = [], sign_of(metric), defaultdict(dict)
    for name in dict.fromkeys([reference, bound, *runs]):
        by_seed = [scores[each] for each in (name, reference, bound)]
        seeds = sorted(set.intersection(*map(set, by_seed)))
        if not seeds:
            raise TooFew(f"{name}, {reference} and {bound} have no seed in common; run the same seeds of all.")
        tables = [pd.concat([of[seed] for seed in seeds], axis=1) for of in by_seed]
        users = pd.concat(tables, axis=1).dropna().index
        compared = [table.loc[users].to_numpy(float).T for table in tables]  # (seeds, users) each
        if name != reference:
            alike[tuple(seeds), tuple(users)][name] = [sign * each for each in compared]
        chosen = [run for seed in seeds for run in runs[name] if run.seed == seed]
        summaries = [continual(run.meta, metric) for run in chosen]
        rows.append(HeadroomRow(
            name, tuple(seeds), len(users), float(compared[0].mean()), None,
            {summary: float(np.mean(np.array([each.get(summary) for each in summaries], float)))  # of None: nan
             for summary in ("LA", "forgetting")},
            float(np.mean([run.meta["bytes"]["total_up"] for run in chosen])),
            float(np.mean([run.meta["seconds"]["total"] for run in chosen]))))
    against = {}  # methods with the same seeds and users are resampled together
    for of_methods in alike.values():
        (_, of_reference, of_bound), *_ = of_methods.values()
        found = headroom([scores for scores, *_ in of_methods.values()], of_reference, of_bound)
        against |= dict(zip(of_methods, found))
    return [replace(row, against=against.get(row.method)) for row in rows]
