"""The records of a spec among those of a folder."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from ..core.errors import UserError
from ..data.source import DatasetSource, dataset_name, load_config
from ..records.run import Run
from ..records.store import comparable, describe, one_data, why_failed
from .config import RunConfig, backbone_of, resolve
from .registry import Registry
from .specs import RunSpec, Tuned, expected_settings, seed_text


def _of_spec(registry: Registry, spec: RunSpec, tuned: Tuned | None) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a record, of which the head is given, has a spec's names, and the settings that it stands for."""
    wanted = comparable(expected_settings(registry, spec, tuned))
    names = spec.method, spec.backbone, dataset_name(spec.dataset)
    return lambda head: ((head["method"], head["backbone"], head["dataset"]) == names
                         and comparable(head["settings"]) == wanted)


def failure(failed: Iterable[Mapping[str, Any]], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> str:
    """That the runs of a spec failed, and why; empty if none of them did."""
    alike = list(filter(_of_spec(registry, spec, tuned), failed))
    if not alike:
        return ""
    seeds = seed_text({head["seed"] for head in alike})
    return f"failed with seed{'s' if len(alike) > 1 else ''} {seeds} ({why_failed(alike[0])})"


def _current_hash(registry: Registry, spec: RunSpec, tuned: Tuned | None, meta: Mapping[str, Any]) -> str | None:
    """The hash that the run would have if it were made by the plugins as they are now; None if a metric of the run is
    not installed."""
    from ..data.features import FeatureSource

    extra = {"extra_metrics": meta["settings"].get("extra_metrics", [])}
    try:
        parts = resolve(registry, spec.method, spec.backbone, spec.dataset, [*spec.layers(tuned), ("record", extra)])
    except UserError:  # a metric that is not installed
        return None
    source = DatasetSource(dataset_name(spec.dataset), load_config(spec.dataset), Path(), meta["data_fingerprint"])
    features = meta.get("features") and FeatureSource("", 0, 0, meta["features"]["fingerprint"])
    return RunConfig(source, backbone_of(registry, spec.backbone, parts), registry.get("method", spec.method), *parts,
                     meta["seed"], meta["device"], registry, features).hash


def matching(runs: Iterable[Run], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> list[Run]:
    """The runs of a spec, sorted by seed: same names, and the settings the spec stands for.

    Of several runs of one seed (a plugin was edited in between) the one of the present code is taken; of several of
    those the one with the most metrics.

    Raises:
        UserError: for an unknown name or setting of the spec; if none or several of a seed's runs are of the present
            code, or runs of the spec used different data.
    """
    fits = _of_spec(registry, spec, tuned)
    seeds: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        if fits(run.head) and run.whole:
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
    one_data(chosen)
    _one_text(chosen)
    return chosen


def _one_text(runs: Sequence[Run]) -> None:
    """Raise UserError if seeds of one spec read different texts or models."""
    for run in runs:
        if run.meta.get("features", {}).get("fingerprint") != runs[0].meta.get("features", {}).get("fingerprint"):
            raise UserError(f"records of {describe(run.head)} come from other texts of items, vectors or models than "
                            f"those of seed {runs[0].seed} ({runs[0].hash[:12]}, {run.hash[:12]}).\nTake one of the "
                            f"two away.")
