"""What records hold, for a page to look at: variants of methods, and the rows of the page's tables.

Nothing is chosen here by settings, as for a table: every record of a folder is shown. Runs that differ only in their
seed are one ``Variant``, and variants that were tested on the same items are one ``Cell``.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from ..core.errors import UserError
from ..runs.registry import Registry
from ..records.run import Run
from ..runs.specs import RunSpec, expected_settings, seed_text
from ..records.store import comparable, incremental, protocol
from ..stats.significance import holm
from .cells import DASH
from .comparison import Comparison, against_each
from .frame import OverSeeds, over_seeds, seed_averages, tested_settings, tested_users
from .notes import p_text

REFERENCES = ("ft", "fedavg")  # what the others are compared with, if it is there


@dataclass(frozen=True)
class Number:
    """A number as text, with the full value that sorting uses; the best of its kind is in bold."""

    text: str
    value: float
    best: bool = False

    @classmethod
    def of(cls, over: OverSeeds) -> Number:
        return cls(f"{over.mean:.4f}" + (f" ± {over.deviation:.4f}" if over.n > 1 else ""), over.mean)


TableRow = dict[str, "str | Number"]  # column to what stands in it


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


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in sorted(comparable(settings).items())}


def _defaults(registry: Registry, run: Run) -> dict[str, Any]:
    """The settings that the plugins and the dataset of a run have by default; none if one of them is not here."""
    try:
        return _settings(expected_settings(registry, RunSpec(*(run.meta[name] for name in ("method", "backbone",
                                                                                           "dataset")))))
    except UserError:
        return {}


def _same_settings(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of a method with the same settings, one per seed; a second record of a seed is in a list of its own."""
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        key = run.meta["method"], repr(_settings(run.meta["settings"]))
        copy = sum(other.seed == run.seed for group in groups if group[:2] == key for other in groups[group])
        groups.setdefault((*key, copy), []).append(run)
    return list(groups.values())


def _variants(runs: Sequence[Run], registry: Registry) -> tuple[Variant, ...]:
    """The variants of every method, those with the fewest settings in their titles first; titles are unique.

    A title leaves out a setting that all variants of the method share, and one at its default. A setting that has
    neither is in every title, as no value of it is the usual one.
    """
    groups = _same_settings(runs)
    titled = []
    for method in sorted({group[0].meta["method"] for group in groups}):
        alike = [group for group in groups if group[0].meta["method"] == method]
        settings = [_settings(group[0].meta["settings"]) for group in alike]
        values = {name: {each.get(name) for each in settings if name in each} for each in settings for name in each}
        defaults = _defaults(registry, alike[0][0]) if len(alike) > 1 else {}
        for group, each in zip(alike, settings):
            differs = [f"{name}={value}" for name, value in each.items()
                       if len(values[name]) > 1 and not (name in defaults and defaults[name] == value)]
            title = f"{method} ({', '.join(differs)})" if differs else method
            titled.append((method, len(differs), title, group))
    repeated = Counter(title for _, _, title, _ in titled)
    return tuple(Variant(title + (f" [{group[0].hash[:8]}]" if repeated[title] > 1 else ""), tuple(group))
                 for _, _, title, group in sorted(titled, key=lambda item: item[:3]))


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
    repeated, numbers = Counter(key[:3] for key in groups), Counter()
    cells = []
    for key in sorted(groups):
        numbers[key[:3]] += 1
        stream = key[2] + (f" (tests {numbers[key[:3]]})" if repeated[key[:3]] > 1 else "")
        variants = _variants(groups[key], registry)
        reference = next((variant for name in REFERENCES for variant in variants if variant.meta["method"] == name),
                         variants[0])
        cells.append(Cell(key[0], key[1], stream, key[3], variants, reference))
    return cells


# The rows of the tables


def _in_bold(rows: Sequence[TableRow], columns: Iterable[str]) -> None:
    """Mark the largest number of each column."""
    for name in columns:
        there = [row for row in rows if isinstance(row.get(name), Number)]
        for row in there:
            row[name] = replace(row[name], best=row[name].value == max(other[name].value for other in there))


def _mean(values: Sequence[float | None], form: str = ".4f", scale: float = 1.0) -> str | Number:
    """A mean over seeds; a dash if one has no such number."""
    if None in values:
        return DASH
    mean = float(np.mean(values)) / scale
    return Number(format(mean, form), mean)


def leaderboard(cell: Cell) -> list[TableRow]:
    """A row per variant, the best first: metrics on the block just trained, averaged over the blocks but block 0, with
    their sample deviation over seeds; continual metrics; costs of the whole run."""
    rows = []
    for variant in cell.variants:
        metas = [run.meta for run in variant.runs]
        metrics = [name for name in variant.meta["metrics"] if all(name in meta["metrics"] for meta in metas)]
        continual = [meta["continual"][cell.metric] for meta in metas]
        users = tested_users(variant.runs)
        rows.append({
            "method": variant.title, "dataset": cell.dataset, "backbone": cell.backbone, "stream": cell.stream,
            **{name: Number.of(over_seeds(seed_averages(variant.runs, name))) for name in metrics},
            "learning": _mean([c["LA"] for c in continual]), "forgetting": _mean([c["forgetting"] for c in continual]),
            "MB sent": _mean([m["bytes"]["total_up"] + m["bytes"]["total_down"] for m in metas], ",.1f", 1e6),
            "seconds": _mean([meta["seconds"]["total"] for meta in metas], ",.1f"),
            "users": Number(f"{users:,}", users), "seeds": seed_text(run.seed for run in variant.runs)})
        _in_bold(rows, metrics)
    return sorted(rows, key=lambda row: -row[cell.metric].value if cell.metric in row else 0.0)


def compared(cell: Cell) -> list[tuple[Variant, Comparison | str]]:
    """Every other variant against the reference over users, or why it cannot be compared. Holm's correction is over
    the variants of the cell."""
    result: list[tuple[Variant, Comparison | str]] = []
    for variant in cell.variants:
        if variant is not cell.reference:
            try:
                result.append((variant, *against_each({"variant": variant.runs, "reference": cell.reference.runs},
                                                      "variant", cell.metric, draws=1)))
            except UserError as error:
                result.append((variant, str(error).splitlines()[0]))
    tests = [test.users.p for _, test in result if isinstance(test, Comparison)]
    adjusted = iter(holm(tests) if tests else ())
    return [(variant, test if isinstance(test, str) else replace(test, p_holm=next(adjusted)))
            for variant, test in result]


def tests(cell: Cell, results: Iterable[tuple[Variant, Comparison | str]]) -> list[TableRow]:
    """A row per variant against the reference; a positive difference is better."""
    rows = []
    for variant, test in results:
        row: TableRow = {"method": variant.title, "against": cell.reference.title, "metric": cell.metric}
        if isinstance(test, str):
            rows.append({**row, "seeds in common": f"not tested: {test}"})
            continue
        users = test.users
        rows.append({**row, "difference": Number(f"{users.difference:+.4f}", users.difference),
                     "t": Number(f"{users.t:.2f}", users.t), "p": Number(p_text(users.p), users.p),
                     "p Holm": Number(p_text(test.p_holm), test.p_holm),
                     "d_z": Number(f"{users.effect:.3f}", users.effect), "users": Number(f"{users.n:,}", users.n),
                     "seeds in common": seed_text(test.seeds)})
    return rows


def groups(cell: Cell) -> list[TableRow]:
    """A row per variant and a column per group that has somebody: its metric, averaged over the blocks but block 0.
    Groups of items have a metric of their own."""
    rows = []
    for variant in cell.variants:
        row: TableRow = {}
        for group, values in variant.meta.get("groups", {}).items():
            metric = cell.metric if cell.metric in values else next(name for name in values if name != "users")
            blocks = incremental(variant.runs[0])
            averages = seed_averages(variant.runs, f"{metric} {group}", blocks)
            if averages.notna().all():
                users = int(sum(values["users"][t] for t in blocks))
                row[f"{group}: {metric} ({users:,} users)"] = Number.of(over_seeds(averages))
        rows += [{"method": variant.title, **row}] if row else []
    _in_bold(rows, {name for row in rows for name in row})
    return rows


def differing_settings(cell: Cell) -> list[TableRow]:
    """A row per variant and a column per setting that is not the same in all of them."""
    settings = [_settings(variant.meta["settings"]) for variant in cell.variants]
    names = sorted({name for each in settings for name in each})
    differing = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
    return [{"method": variant.title, **{name: str(each[name]) for name in differing if each.get(name) is not None}}
            for variant, each in zip(cell.variants, settings) if differing]


def environments(runs: Iterable[Run]) -> list[TableRow]:
    """A row per environment that runs were made in, the most frequent first, and first what tells them apart."""
    counts = Counter(tuple(sorted((name, str(value)) for name, value in run.meta["environment"].items()))
                     for run in runs)
    several = [dict(items) for items in counts]
    names = sorted({name for each in several for name in each},
                   key=lambda name: (len({each.get(name) for each in several}) == 1, name))
    return [{"runs": Number(str(number), number), **{name: dict(items).get(name, DASH) for name in names}}
            for items, number in counts.most_common()]


def failures(failed: Iterable[Mapping[str, Any]]) -> list[TableRow]:
    """A row per run that failed, with the first line of its error."""
    return [{**{name: str(head[name]) for name in ("method", "backbone", "dataset", "seed")},
             "error": head["error"].partition("\n")[0]} for head in failed]


def rerun_command(registry: Registry, variant: Variant, plugins: Sequence[Path] = ()) -> str:
    """The command that makes a variant's first run again: its settings that are not today's defaults."""
    meta, default = variant.meta, _defaults(registry, variant.runs[0])
    words = [word for name in ("method", "backbone", "dataset") for word in (f"--{name}", meta[name])]
    for name, value in _settings(meta["settings"]).items():
        if name != "split_file" and not (name in default and value == default[name]):
            words += ["--set", f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"]
    words += [word for folder in plugins for word in ("--plugins", str(folder))]
    return shlex.join(["run_bench.py", "run", *words, "--seed", str(variant.runs[0].seed)])
