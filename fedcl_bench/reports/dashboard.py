"""What records hold, for a page to look at: variants of methods, and the rows of the page's tables.

Nothing is chosen here by settings, as for a table: every record of a folder is shown. Runs that differ only in their
seed are one ``Variant``, and variants that were tested on the same items are one ``GridCell``.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np
import pandas as pd

from ..core.errors import UserError
from ..evaluation.metrics import sign_of
from ..records.frames import still_improving
from ..records.store import LEAKS, Run, continual, incremental, leaks, protocol_text, user_scores
from ..runs.registry import Registry
from ..runs.specs import Tuned, seed_text
from ..stats.significance import holm
from .cells import DASH
from .comparison import NAMES, Comparison, against_each, changes_of, unequal, words_of
from .frame import OverSeeds, over_seeds, seed_averages, tested_settings
from .notes import p_text

REFERENCES = ("ft", "fedavg")  # what the others are compared with, if it is there


class Number(NamedTuple):
    value: float
    text: str

    @classmethod
    def of(cls, over: OverSeeds) -> Number:
        return cls(over.mean, over.text())

    @classmethod
    def as_(cls, value: float, form: str) -> Number:
        return cls(value, format(value, form))


TableRow = dict[str, "str | Number"]  # column to what stands in it


@dataclass(frozen=True, eq=False)
class Variant:
    """The runs of one method with the same settings."""

    title: str  # the method, with the settings in which it differs from its other variants
    runs: tuple[Run, ...]  # one per seed, sorted

    @property
    def meta(self) -> Mapping[str, Any]:
        """The record of the first seed."""
        return self.runs[0].meta


@dataclass(frozen=True, eq=False)
class GridCell:
    """Variants that can be compared: of one backbone and dataset, tested on the same items."""

    dataset: str
    backbone: str
    stream: str  # how the numbers were taken, in words
    metric: str  # that the runs were validated on
    variants: tuple[Variant, ...]
    reference: Variant  # that the others are compared with

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.backbone}, {self.stream}"


def _variants(runs: Sequence[Run], registry: Registry) -> tuple[Variant, ...]:
    """The variants of every method, those with the fewest settings in their titles first; titles are unique.

    A title leaves out settings that all variants of the method share, those at their default, and what follows from
    another one. A second record of a seed is in a variant of its own.
    """
    groups: dict[tuple[str, str, int], list[Run]] = {}
    copies: Counter[tuple[str, str, int]] = Counter()
    for run in sorted(runs, key=lambda run: run.seed):
        method, settings = run.meta["method"], repr(words_of(run.meta["settings"]))
        copies[method, settings, run.seed] += 1
        groups.setdefault((method, settings, copies[method, settings, run.seed]), []).append(run)
    titled = []
    for method in sorted({key[0] for key in groups}):
        alike = [group for key, group in groups.items() if key[0] == method]
        changes = [changes_of(registry, group[0]).items() for group in alike]
        shared = set.intersection(*map(set, changes))
        for group, changed in zip(alike, changes):
            differs = [f"{name}={value}" for name, value in changed if (name, value) not in shared]
            said = ", ".join([*differs, *([LEAKS] if leaks(group[0].meta["settings"]) else [])])
            titled.append((method, len(differs), f"{method} ({said})" if said else method, group))
    repeated = Counter(title for _, _, title, _ in titled)
    return tuple(Variant(title + (f" [{group[0].hash[:8]}]" if repeated[title] > 1 else ""), tuple(group))
                 for _, _, title, group in sorted(titled, key=lambda item: item[:3]))


def gather(runs: Sequence[Run], registry: Registry) -> list[GridCell]:
    """All cells of some records, sorted by dataset, backbone and stream; ``registry``: of plugins; settings at their
    defaults are not named in titles."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = (run.meta["dataset"], run.meta["backbone"], protocol_text(run), run.meta["settings"]["valid_metric"],
               run.meta["data_fingerprint"], repr(tested_settings(run)))
        groups.setdefault(key, []).append(run)
    repeated, numbers = Counter(key[:3] for key in groups), Counter[tuple[str, ...]]()
    cells = []
    for key in sorted(groups):
        numbers[key[:3]] += 1
        stream = key[2] + (f" (tests {numbers[key[:3]]})" if repeated[key[:3]] > 1 else "")
        variants = _variants(groups[key], registry)
        reference = next((variant for name in REFERENCES for variant in variants if variant.meta["method"] == name),
                         variants[0])
        cells.append(GridCell(key[0], key[1], stream, key[3], variants, reference))
    return cells


# The rows of the tables


def _mean(values: Sequence[float | None], form: str = ".4f") -> str | Number:
    there = [value for value in values if value is not None]
    return DASH if len(there) < len(values) else Number.as_(float(np.mean(there)), form)


def leaderboard(cell: GridCell) -> list[TableRow]:
    """A row per variant, the best first: metrics on the block just trained, averaged over the blocks but block 0, with
    their sample deviation over seeds; continual metrics; costs of the whole run."""
    rows: list[TableRow] = []
    for variant in cell.variants:
        metas = [run.meta for run in variant.runs]
        metrics = [name for name in variant.meta["metrics"] if all(name in meta["metrics"] for meta in metas)]
        blocks = sum(len(meta["rounds"]) for meta in metas)
        rising = sum(len(still_improving(run.rounds)) for run in variant.runs)
        summaries = [continual(meta, cell.metric) for meta in metas]
        rows.append({
            "method": variant.title, "dataset": cell.dataset, "backbone": cell.backbone, "stream": cell.stream,
            **{name: Number.of(over_seeds(seed_averages(variant.runs, name))) for name in metrics},
            "learning": _mean([each["LA"] for each in summaries]),
            "forgetting": _mean([each["forgetting"] for each in summaries]),
            "MB": _mean([(m["bytes"]["total_up"] + m["bytes"]["total_down"]) / 1e6 for m in metas], ",.1f"),
            "seconds": _mean([meta["seconds"]["total"] for meta in metas], ",.1f"),
            "still improving": Number(rising / blocks, f"{rising} of {blocks}"),
            "users": Number.as_(len(user_scores(variant.runs, cell.metric)), ","),
            "seeds": seed_text(run.seed for run in variant.runs)})
    return sorted(rows, key=lambda row: -sign_of(cell.metric) * row[cell.metric].value)


@dataclass
class Test:
    """A variant against one of the reference's method: the comparison over users, or why there is none."""

    variant: Variant
    against: Variant
    result: Comparison | str


def compared(cell: GridCell, registry: Registry, tuned: Tuned | None = None) -> list[Test]:
    """Every other variant against the one of the reference's method that has its settings. Holm's correction is over
    the variants of the cell."""
    found = []
    alike = [cell.reference, *(each for each in cell.variants if each.meta["method"] == cell.reference.meta["method"])]
    for variant in cell.variants:
        if variant is cell.reference:
            continue
        differ = {each: unequal(variant.runs[0], each.runs[0], registry, tuned)
                  for each in alike if each is not variant}
        against = next((each for each in differ if not differ[each]), cell.reference)
        result: Comparison | str = differ[against]
        try:
            result = result or against_each({"variant": variant.runs, "reference": against.runs}, "variant",
                                            cell.metric, draws=1)[0]
        except UserError as error:
            result = str(error).splitlines()[0]
        found.append(Test(variant, against, result))
    made = [test for test in found if isinstance(test.result, Comparison)]
    for test, p in zip(made, holm([test.result.users.p for test in made])):
        test.result = replace(test.result, p_holm=p)
    return found


def tests(cell: GridCell, compared: Iterable[Test]) -> list[TableRow]:
    """A row per variant against the reference; a positive difference is better."""
    rows = []
    for test in compared:
        row: TableRow = {"method": test.variant.title, "against": test.against.title, "metric": cell.metric}
        if isinstance(test.result, str):
            row["seeds in common"] = f"not tested: {test.result}"
        else:
            users, seeds = test.result.users, test.result.seeds
            row |= {"difference": Number.as_(users.difference, "+.4f"), "t": Number.as_(users.t, ".2f"),
                    "p": Number(users.p, p_text(users.p)),
                    "p Holm": Number(test.result.p_holm, p_text(test.result.p_holm)),
                    "d_z": Number.as_(users.effect, ".3f"), "users": Number.as_(users.n, ","),
                    "p over seeds": Number(seeds.p, p_text(seeds.p)) if seeds else DASH,
                    "seeds in common": seed_text(test.result.common)}
        rows.append(row)
    return rows


def groups(cell: GridCell) -> list[TableRow]:
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
    return rows


def differing_settings(cell: GridCell) -> list[TableRow]:
    """A row per variant and a column per setting that is not the same in all of them."""
    frame = pd.DataFrame([words_of(variant.meta["settings"]) for variant in cell.variants]).sort_index(axis=1)
    frame = frame.loc[:, frame.nunique(dropna=False) > 1]
    return [{"method": variant.title, **each.dropna()}
            for variant, (_, each) in zip(cell.variants, frame.iterrows()) if len(frame.columns)]


def environments(runs: Iterable[Run]) -> list[TableRow]:
    """A row per environment that runs were made in, the most frequent first, and first what tells them apart."""
    frame = pd.DataFrame([run.meta["environment"] for run in runs]).sort_index(axis=1).fillna(DASH).astype(str)
    frame = frame[sorted(frame, key=lambda name: frame[name].nunique() == 1)]
    return [{"runs": Number.as_(number, ""), **dict(zip(frame, values))}
            for values, number in frame.value_counts().items()]


def failures(failed: Iterable[Mapping[str, Any]]) -> list[TableRow]:
    return [{**{name: str(head[name]) for name in (*NAMES, "seed")}, "error": head["error"].partition("\n")[0]}
            for head in failed]


def rerun_command(registry: Registry, variant: Variant, plugins: Sequence[Path] = ()) -> str:
    """The command that makes a variant's first run again: its settings that are not today's defaults."""
    meta, changes = variant.meta, changes_of(registry, variant.runs[0])
    words = [word for name in NAMES for word in (f"--{name}", meta[name])]
    words += [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    words += ["--device", meta["device"]] if meta["device"] != "cpu" else []
    words += [word for folder in plugins for word in ("--plugins", str(folder))]
    return shlex.join(["run_bench.py", "run", *words, "--seed", str(variant.runs[0].seed)])
