"""What records hold, gathered for a page to look at: variants of methods, their means, curves and differences.

Nothing is chosen here by settings, as for a table: every record of a folder is shown. Runs that differ only in their
seed are one ``Variant``, and variants that were tested on the same items are one ``Cell``.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from ..errors import UserError
from ..runs.registry import Registry
from ..runs.run import Run
from ..runs.specs import RunSpec, expected_idle, expected_settings, seed_text
from ..runs.store import comparable, incremental, protocol, user_scores
from ..stats.significance import holm
from .comparison import Comparison, against_each
from .scores import (Curve, group_average, mean_matrix, over_seeds, seed_averages, tested_settings, tested_users,
                     validation_curves)

REFERENCES = ("ft", "fedavg")  # what the others are compared with, if it is there
EDGES = np.linspace(-1.0, 1.0, 42)  # of the histogram of users' differences; the middle range holds 0


@dataclass(frozen=True, eq=False)
class Variant:
    """The runs of one method with the same settings.

    Attributes:
        title: the method, with the settings in which it differs from its other variants.
        runs: one per seed, sorted.
    """

    title: str
    runs: tuple[Run, ...]

    @property
    def meta(self) -> Mapping[str, Any]:
        """The record of the first seed."""
        return self.runs[0].meta

    @property
    def seeds(self) -> str:
        return seed_text(run.seed for run in self.runs)


@dataclass(frozen=True, eq=False)
class Cell:
    """Variants that can be compared: of one backbone and dataset, tested on the same items.

    Attributes:
        stream: how the numbers were taken, in words.
        metric: the metric that the runs were validated on.
        reference: the variant that the others are compared with.
    """

    dataset: str
    backbone: str
    stream: str
    metric: str
    variants: tuple[Variant, ...]
    reference: Variant

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.backbone}, {self.stream}"


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _same_settings(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with the same settings together, one per seed; a second record of a seed is in a group of its own."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        settings = tuple(sorted((name, repr(value)) for name, value in comparable(run.meta["settings"]).items()))
        copy = 0
        while any(other.seed == run.seed for other in groups.get((run.meta["method"], settings, copy), ())):
            copy += 1
        groups.setdefault((run.meta["method"], settings, copy), []).append(run)
    return [sorted(group, key=lambda run: run.seed) for group in groups.values()]


def _defaults(registry: Registry, run: Run) -> dict[str, Any]:
    """The settings that the plugins and the dataset of a run have by default; none if one of them is not here."""
    try:
        settings = expected_settings(registry, RunSpec(*(run.meta[name] for name in ("method", "backbone", "dataset"))))
    except UserError:
        return {}
    return {name: _frozen(value) for name, value in comparable(settings).items()}


def _plain(groups: Sequence[Sequence[Run]], registry: Registry) -> dict[str, Any]:
    """The value of each setting that goes without saying: that of all groups, else the default if a group has it.

    A setting that has neither is named in every title, as no value of it is the usual one.
    """
    values: dict[str, set] = {}
    for group in groups:
        for name, value in comparable(group[0].meta["settings"]).items():
            values.setdefault(name, set()).add(_frozen(value))
    defaults = _defaults(registry, groups[0][0]) if len(groups) > 1 else {}
    return {name: next(iter(several)) if len(several) == 1 else defaults[name] for name, several in values.items()
            if len(several) == 1 or (name in defaults and defaults[name] in several)}


def _variants(runs: Sequence[Run], registry: Registry) -> tuple[Variant, ...]:
    """The variants of every method, those with the fewest settings in their titles first; titles are unique."""
    groups = _same_settings(runs)
    variants: list[Variant] = []
    for method in sorted({group[0].meta["method"] for group in groups}):
        alike = [group for group in groups if group[0].meta["method"] == method]
        plain = _plain(alike, registry)
        titled = []
        for group in alike:
            settings = {name: _frozen(value) for name, value in comparable(group[0].meta["settings"]).items()}
            differs = [f"{name}={value}" for name, value in sorted(settings.items())
                       if name not in plain or plain[name] != value]
            titled.append((len(differs), f"{method} ({', '.join(differs)})" if differs else method, group))
        repeated = Counter(title for _, title, _ in titled)
        for _, title, group in sorted(titled, key=lambda item: item[:2]):
            mark = f" [{group[0].hash[:8]}]" if repeated[title] > 1 else ""
            variants.append(Variant(title + mark, tuple(group)))
    return tuple(variants)


def gather(runs: Sequence[Run], registry: Registry) -> list[Cell]:
    """All cells of some records, sorted by dataset, backbone and stream.

    Args:
        registry: of plugins; settings at their defaults are not named in titles.
    """
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        words = ", ".join(str(value) if name == "stream" else f"{name} {value}" for name, value in protocol(run))
        key = (run.meta["dataset"], run.meta["backbone"], words, run.meta["settings"]["valid_metric"],
               run.meta["data_fingerprint"], repr(tested_settings(run)))
        groups.setdefault(key, []).append(run)
    repeated = Counter(key[:3] for key in groups)
    numbers: Counter = Counter()
    cells = []
    for key in sorted(groups):
        numbers[key[:3]] += 1
        stream = key[2] + (f" (tests {numbers[key[:3]]})" if repeated[key[:3]] > 1 else "")
        variants = _variants(groups[key], registry)
        reference = next((variant for name in REFERENCES for variant in variants if variant.meta["method"] == name),
                         variants[0])
        cells.append(Cell(key[0], key[1], stream, key[3], variants, reference))
    return cells


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the leaderboard; means are over seeds.

    Attributes:
        users: tested on the block just trained.
        metrics: metric to (mean, sample deviation), averaged over the blocks but block 0.
        learning, forgetting: of the cell's metric (``evaluation.continual``); forgetting None with a single block.
        bytes: sent up and down in the whole run. seconds: of training and evaluation together.
    """

    variant: Variant
    users: int
    metrics: Mapping[str, tuple[float, float]]
    learning: float
    forgetting: float | None
    bytes: float
    seconds: float


def _mean(values: Sequence[float | None]) -> float | None:
    return None if any(value is None for value in values) else float(np.mean(values))


def leaderboard_row(cell: Cell, variant: Variant) -> Row:
    """The numbers of a variant."""
    metas = [run.meta for run in variant.runs]
    averages = {name: over_seeds(seed_averages(variant.runs, name)) for name in variant.meta["metrics"]
                if all(name in meta["metrics"] for meta in metas)}
    continual = [meta["continual"][cell.metric] for meta in metas]
    return Row(variant, tested_users(variant.runs), {name: (a.mean, a.deviation) for name, a in averages.items()},
               _mean([c["LA"] for c in continual]), _mean([c["forgetting"] for c in continual]),
               _mean([meta["bytes"]["total_up"] + meta["bytes"]["total_down"] for meta in metas]),
               _mean([meta["seconds"]["total"] for meta in metas]))


@dataclass(frozen=True)
class GroupValue:
    """A metric of a group of users or items, averaged over the blocks but block 0 that have somebody of it.

    Attributes:
        metric: the cell's, or what items have in its place.
        mean, deviation: over seeds, sample deviation; None for a single seed.
        users: how many the group has in these blocks, together.
    """

    metric: str
    mean: float
    deviation: float | None
    users: int


def group_values(cell: Cell, variant: Variant) -> dict[str, GroupValue] | None:
    """Group to its value, without groups that nobody is in; None if a record of the variant has no groups."""
    if not all("groups" in run.meta for run in variant.runs):
        return None
    result = {}
    for group, values in variant.meta["groups"].items():
        metric = cell.metric if cell.metric in values else next(name for name in values if name != "users")
        blocks = incremental(variant.runs[0])
        averages = [group_average(run, metric, group, blocks) for run in variant.runs]
        if None not in averages:
            over = over_seeds(averages)
            result[group] = GroupValue(metric, over.mean, over.deviation if over.n > 1 else None,
                                       int(sum(values["users"][t] for t in blocks)))
    return result


def curves(variant: Variant) -> list[Curve]:
    """The validation metric per round, one curve per block."""
    return validation_curves(variant.runs)


def matrix(cell: Cell, variant: Variant) -> list[list[float]]:
    """R[t, s] of the cell's metric, its lower triangle; mean over seeds."""
    return [row[:t + 1].tolist() for t, row in enumerate(mean_matrix(variant.runs, cell.metric))]


@dataclass(frozen=True, eq=False)
class Difference:
    """A variant against the reference of its cell.

    Attributes:
        comparison: None if they cannot be compared, for ``reason``; its differences are reference - variant.
        p_holm: adjusted for all variants of the cell.
        counts: users per range of ``EDGES`` by variant - reference.
    """

    variant: Variant
    comparison: Comparison | None
    reason: str = ""
    p_holm: float | None = None
    counts: tuple[int, ...] = ()


def differences(cell: Cell) -> list[Difference]:
    """Every other variant against the reference, over users; Holm's correction over the variants of the cell."""
    result = []
    for variant in cell.variants:
        if variant is cell.reference:
            continue
        try:
            comparison, = against_each({"reference": cell.reference.runs, "variant": variant.runs}, "reference",
                                       cell.metric, draws=1)
        except UserError as error:
            result.append(Difference(variant, None, str(error).splitlines()[0]))
            continue
        scores = [user_scores([run for run in runs if run.seed in comparison.seeds], cell.metric)
                  for runs in (variant.runs, cell.reference.runs)]
        each = (scores[0] - scores[1]).dropna().to_numpy()
        counts = np.histogram(each.clip(-1.0, 1.0), EDGES)[0]
        result.append(Difference(variant, comparison, counts=tuple(map(int, counts))))
    tested = [difference for difference in result if difference.comparison]
    adjusted = iter(holm([difference.comparison.users.p for difference in tested]) if tested else ())
    return [replace(difference, p_holm=next(adjusted)) if difference.comparison else difference
            for difference in result]


def differing_settings(cell: Cell) -> dict[str, list[Any]]:
    """Settings that are not the same in all variants of a cell, with the value of each variant; None where absent."""
    settings = [comparable(variant.meta["settings"]) for variant in cell.variants]
    names = sorted({name for each in settings for name in each})
    return {name: [each.get(name) for each in settings] for name in names
            if len({repr(each.get(name)) for each in settings}) > 1}


def environments(runs: Sequence[Run]) -> list[tuple[int, dict[str, Any]]]:
    """The different environments that runs were made in, with the number of runs, the most frequent first."""
    counts: Counter = Counter()
    content: dict[str, dict[str, Any]] = {}
    for run in runs:
        text = repr(sorted(run.meta["environment"].items()))
        content[text] = run.meta["environment"]
        counts[text] += 1
    return [(number, content[text]) for text, number in counts.most_common()]


def rerun_command(registry: Registry, variant: Variant, plugins: Sequence[Path] = ()) -> str:
    """The command that makes a variant's runs again: its settings that are not today's defaults, and its seeds."""
    meta = variant.meta
    spec = RunSpec(meta["method"], meta["backbone"], meta["dataset"])
    recorded = comparable(meta["settings"])
    default = _defaults(registry, variant.runs[0])
    idle = expected_idle(registry, spec) if default else {}
    words = ["run_bench.py", "run", "--method", meta["method"], "--backbone", meta["backbone"], "--dataset",
             meta["dataset"]]
    for name, value in recorded.items():
        if name not in idle and name != "split_file" and not (name in default and _frozen(value) == default[name]):
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += ["--set", f"{name}={text}"]
    for folder in plugins:
        words += ["--plugins", str(folder)]
    return " && ".join(shlex.join([*words, "--seed", str(run.seed)]) for run in variant.runs[:1]) + (
        f"   # and seeds {seed_text(run.seed for run in variant.runs[1:])}" if len(variant.runs) > 1 else "")
