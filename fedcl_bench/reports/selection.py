"""Which finished runs a table, test or figure is about: methods as the user writes them, and their records."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from ..core.errors import Incompatible, UserError, require_known
from ..data.source import DatasetSource, configured, dataset_name, load_config
from ..records.store import Run, comparable, describe, one_data, why_failed
from ..runs.config import RunConfig, backbone_of, resolve, with_ratings
from ..runs.metadata import NO_BACKBONE
from ..runs.registry import Registry
from ..runs.specs import RunSpec, Tuned, Where, expected_settings, seed_text, spelled_spec
from .comparison import at_default, recorded_values

DAGGER = "†"
FOOTNOTE = f"{DAGGER} re-implementation from the description: its code was never released."


@dataclass(frozen=True)
class Source:
    runs: Sequence[Run]  # all finished ones there are
    registry: Registry
    tuned: Tuned | None = None  # where tuned settings are, or None for the plugins' and datasets' defaults
    assignments: tuple[tuple[str, Any], ...] = ()  # settings that lie over those of every run of the table
    # Dataset to its statistics (see ``datasets.statistics``), called for tables that need no runs; raises UserError if
    # the data is not there.
    statistics: Callable[[str], Mapping[str, list]] | None = None
    where: Where = Where()  # folders of the command's options
    failed: Sequence[Mapping[str, Any]] = ()  # the content of ``run.json`` of runs that failed

    @property
    def pilot_users(self) -> int:
        """How many users of each domain the runs have that are asked for; 0 if they have all."""
        return int(dict(self.assignments).get("pilot_users", 0))


def find(source: Source, spec: RunSpec) -> tuple[list[Run], str]:
    """The runs of a spec, and why there are none: a plugin, tuned settings or a record is missing, or method and
    backbone do not go together; raises UserError for settings that do not exist, and records that contradict each
    other."""
    registry, tuned = source.registry, source.tuned
    for kind, name in (("method", spec.method), ("backbone", spec.backbone)):
        if not registry.knows(kind, name):
            broken = registry.broken.get(name)
            return [], f"{kind} '{name}' " + (f"cannot be loaded ({broken})" if broken else "is not installed")
    spec = replace(spec, backbone=registry.backbone_for(spec.method, spec.backbone))
    path = tuned and tuned.file(spec.method, spec.backbone, spec.dataset)
    if path and not path.is_file() and spec.backbone != NO_BACKBONE:
        return [], f"not tuned (no {path})"
    spec = replace(spec, settings=(*spec.settings, *source.assignments))
    try:
        runs = matching(source.runs, registry, spec, tuned)
    except Incompatible as error:
        return [], str(error).splitlines()[0].rstrip(".")
    if runs:
        return runs, ""
    failed = failure(source.failed, registry, spec, tuned) if source.failed else ""
    return [], failed or _nearest(source, spec)


def _nearest(source: Source, spec: RunSpec) -> str:
    """That there is no record of a spec, and in what the nearest of other settings differs."""
    names = spec.method, spec.backbone, dataset_name(spec.dataset)
    others = [run for run in source.runs
              if (run.head["method"], run.head["backbone"], run.head["dataset"]) == names]
    if not others:
        return "no record"
    parts = resolve(source.registry, spec.method, spec.backbone, spec.dataset, spec.layers(source.tuned))
    wanted = comparable(recorded_values(parts))
    differences = []
    for run in others:  # a setting that only one has is inactive in the other for another's sake
        there = comparable({**at_default(run.head, parts), **run.head["settings"]})
        other = [f"{name} {there[name]} instead of {wanted[name]}" for name in sorted(wanted.keys() & there.keys())
                 if there[name] != wanted[name]]
        differences.append((other, run.hash))
    fewest, nearest = min(differences, key=lambda pair: (len(pair[0]), pair[1]))
    if not fewest:
        return f"no record with these settings that is whole; {nearest[:12]} is damaged"
    more = f" and {len(fewest) - 4} more" if len(fewest) > 4 else ""
    return f"no record with these settings; the nearest, {nearest[:12]}, has {', '.join(fewest[:4])}{more}"


def checked_spec(registry: Registry, spec: RunSpec, common: Mapping[str, Any] | None = None,
                 tuned: Tuned | None = None) -> RunSpec:
    """A spec over the settings that all have, checked, with every name in its spelling; ``common``: settings of
    ``--set``; the spec's win over them. Raises UserError for an unknown name or setting, or a value out of its
    range."""
    spec = spelled_spec(registry, spec)
    settings, common = dict(spec.settings), dict(common or {})
    below = replace(spec, settings=()).layers(tuned)[:-1]
    resolve(registry, spec.method, spec.backbone, spec.dataset,
            [*below, ("--set", common), (f"{spec.method}:", settings)])
    return replace(spec, settings=tuple({**common, **settings}.items()))


def grid_command(options: Iterable[str], settings: Iterable[tuple[str, Any]], tuned: Tuned | None,
                 where: Where, seeds: int = 5) -> str:
    """A command of `grid`: its options, seeds, the settings of the records that are read, and where things are."""
    sets = [word for name, value in settings for word in ("--set", f"{name}={value}")]
    return shlex.join(["run_bench.py", "grid", *options, "--seeds", str(seeds), *sets, *(tuned.words if tuned else ()),
                       *where.words()])


def command_for(specs: Sequence[RunSpec], tuned: Tuned | None = None, where: Where = Where(), seeds: int = 5) -> str:
    """The command, or commands with ``&&``, that make the runs of some specs."""
    methods: dict[tuple, dict[str, None]] = {}
    for spec in specs:
        methods.setdefault((spec.backbone, spec.dataset, spec.settings), {})[spec.method] = None
    backbones: dict[tuple, list[str]] = {}  # that miss the same methods: these need one command
    for (backbone, dataset, settings), names in methods.items():
        backbones.setdefault((tuple(names), dataset, settings), []).append(backbone)
    return " && ".join(
        grid_command(("--methods", ",".join(names), "--backbones", ",".join(alike), "--datasets", dataset), settings,
                     tuned, where, seeds) for (names, dataset, settings), alike in backbones.items())


def require_different(specs: Iterable[RunSpec]) -> None:
    """Raise UserError if one is named twice."""
    for spec, count in Counter(specs).items():
        if count > 1:
            raise UserError(f"{spec.title} is named twice on {spec.backbone}, {spec.dataset}; leave one of them out.")


def find_all(source: Source, specs: Iterable[RunSpec], records: Path) -> dict[RunSpec, list[Run]]:
    """The runs of every spec, sorted by seed; ``records``: the folder that was read. Raises UserError if a spec has
    none, naming it and the command that makes them, or two specs are the same runs."""
    specs = list(specs)
    require_known("dataset", (dataset_name(spec.dataset) for spec in specs),
                  {*configured(), *(run.head["dataset"] for run in source.runs)})
    runs_of: dict[RunSpec, list[Run]] = {}
    missing: dict[RunSpec, str] = {}
    owner: dict[str, RunSpec] = {}
    for spec in dict.fromkeys(specs):
        runs_of[spec], reason = find(source, spec)
        if reason:
            missing[spec] = reason
        for run in runs_of[spec]:
            if (other := owner.setdefault(run.hash, spec)) != spec:
                raise UserError(f"{other.title} and {spec.title} are the same runs on {spec.backbone}, {spec.dataset}; "
                                f"leave one of them out.")
    if failed := [f"{spec.title} on {spec.backbone}, {spec.dataset} {reason}" for spec, reason in missing.items()
                  if reason.startswith("failed")]:
        raise UserError(f"runs in {records} failed: {'; '.join(failed)}.\nLeave them out, or take other settings with "
                        f"--set; `grid --retry-failed` tries them again.")
    if missing:
        seeds = max((run.seed + 1 for runs in runs_of.values() for run in runs), default=5)  # as the others have
        titles: dict[str, list[str]] = {}
        for spec in missing:
            titles.setdefault(f"on {spec.backbone}, {spec.dataset}", []).append(spec.title)
        names = "; ".join(f"{', '.join(several)} {place}" for place, several in titles.items())
        nearest = next((f" ({spec.method}: {reason}; take other settings with --set)"
                        for spec, reason in missing.items() if reason != "no record"), "")
        raise UserError(f"no record in {records} of {names}{nearest}.\n"
                        f"Make them with: {command_for(list(missing), source.tuned, source.where, seeds)}")
    return runs_of


def _of_spec(registry: Registry, spec: RunSpec, tuned: Tuned | None) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a record, of which the head is given, has a spec's names, and the settings that it stands for."""
    wanted = comparable(expected_settings(registry, spec, tuned))
    names = spec.method, spec.backbone, dataset_name(spec.dataset)
    return lambda head: ((head["method"], head["backbone"], head["dataset"]) == names
                         and comparable(head["settings"]) == wanted)


def failure(failed: Iterable[Mapping[str, Any]], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> str:
    alike = list(filter(_of_spec(registry, spec, tuned), failed))
    if not alike:
        return ""
    seeds = seed_text({head["seed"] for head in alike})
    return f"failed with seed{'s' if len(alike) > 1 else ''} {seeds} ({why_failed(alike[0])})"


def _current_hash(registry: Registry, spec: RunSpec, tuned: Tuned | None, meta: Mapping[str, Any]) -> str | None:
    """The hash that the run would have if it were made by the plugins as they are now; None if a metric of the run is
    not installed."""
    from ..data.items.features import FeatureSource

    extra = {"extra_metrics": meta["settings"].get("extra_metrics", [])}
    try:
        parts = resolve(registry, spec.method, spec.backbone, spec.dataset, [*spec.layers(tuned), ("record", extra)])
    except UserError:  # a metric that is not installed
        return None
    source = DatasetSource(dataset_name(spec.dataset), load_config(spec.dataset), Path(), meta["data_fingerprint"])
    features = meta.get("features") and FeatureSource("", 0, 0, meta["features"]["fingerprint"])
    backbone = backbone_of(registry, spec.backbone, parts)
    source = with_ratings(backbone.cls, parts, source)
    return RunConfig(source, backbone, registry.get("method", spec.method), *parts, meta["seed"], meta["device"],
                     registry, features).hash


def matching(runs: Iterable[Run], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> list[Run]:
    """The runs of a spec, sorted by seed: same names, and the settings the spec stands for.

    Of several runs of one seed (a plugin was edited in between) the one of the present code is taken; of several of
    those the one with the most metrics. Raises UserError for an unknown name or setting of the spec; if none or several
    of a seed's runs are of the present code, or runs of the spec used different data."""
    fits = _of_spec(registry, spec, tuned)
    seeds: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        if fits(run.head) and run.intact:
            seeds[run.seed].append(run)
    chosen = []
    for seed, several in sorted(seeds.items()):
        if len(several) > 1:
            several = [run for run in sorted(several, key=lambda run: -len(run.head["metrics"]))
                       if _current_hash(registry, spec, tuned, run.meta) == run.hash]
            if len({(run.head["device"], run.head["data_fingerprint"]) for run in several}) == 1:
                several = several[:1]
        if len(several) != 1:
            raise UserError(f"{len(seeds[seed])} records of {describe(seeds[seed][0].head)} have the same settings: "
                            f"{', '.join(run.hash[:12] for run in seeds[seed])} (other data, device or code).\n"
                            f"Take away all but one of them.")
        chosen += several
    plugins = registry.get("method", spec.method), registry.get("backbone", spec.backbone)
    # Those with a text for ``numbers``: a user's, by its file, and RecBole's, by its version.
    if len(chosen) > 1 and any(isinstance(plugin.numbers, str) for plugin in plugins):
        old = [run for run in chosen if _current_hash(registry, spec, tuned, run.meta) != run.hash]
        if 0 < len(old) < len(chosen):
            raise UserError(f"records of {describe(old[0].head)} ({old[0].hash[:12]}) and of other seeds are of "
                            f"different plugin code.\nRun those of the old code again, or take them away.")
    one_data(chosen)
    for run in chosen:
        if run.meta.get("features", {}).get("fingerprint") != chosen[0].meta.get("features", {}).get("fingerprint"):
            raise UserError(f"records of {describe(run.head)} come from other texts of items, vectors or models than "
                            f"those of seed {chosen[0].seed} ({chosen[0].hash[:12]}, {run.hash[:12]}).\nTake one of "
                            f"the two away.")
    return chosen
