"""The records of a spec among those of a folder."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from ..core.errors import UserError
from ..data.features import FeatureSource
from ..data.source import DatasetSource, dataset_name, load_config
from ..records.run import Run
from ..records.store import comparable, describe, one_data, why_failed
from .config import RunConfig, backbone_of, effective, resolve
from .registry import Registry
from .specs import RunSpec, Tuned, seed_text


def failure(failed: Iterable[Mapping[str, Any]], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> str:
    """That the runs of a spec failed, and why; empty if none of them did."""
    parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))
    wanted = comparable(effective(parts))
    names = spec.method, spec.backbone, dataset_name(spec.dataset)
    alike = [meta for meta in failed if (meta["method"], meta["backbone"], meta["dataset"]) == names
             and comparable(meta["settings"]) == wanted]
    if not alike:
        return ""
    seeds = seed_text({meta["seed"] for meta in alike})
    return f"failed with seed{'s' if len(alike) > 1 else ''} {seeds} ({why_failed(alike[0])})"


def _current_hash(registry: Registry, spec: RunSpec, tuned: Tuned | None, meta: Mapping[str, Any]
                  ) -> str | None:
    """The hash that the run would have if it were made by the plugins as they are now; None if a metric of the run is
    not installed."""
    extra = {"extra_metrics": meta["settings"].get("extra_metrics", [])}
    try:
        parts = resolve(registry, spec.method, spec.backbone, spec.dataset, [*spec.layers(tuned), ("record", extra)])
    except UserError:  # a metric that is not installed
        return None
    source = DatasetSource(dataset_name(spec.dataset), load_config(spec.dataset), Path(), meta["data_fingerprint"])
    features = meta.get("features") and FeatureSource("", 0, 0, meta["features"]["fingerprint"])
    config = RunConfig(source, backbone_of(registry, spec.backbone, parts), registry.get("method", spec.method), *parts,
                       meta["seed"], meta["device"], registry, features)
    return config.hash


def matching(runs: Iterable[Run], registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> list[Run]:
    """The runs of a spec, sorted by seed: same names, and the settings the spec stands for.

    Of several runs of one seed (a plugin was edited in between) the one of the present code is taken; of several of
    those the one with the most metrics.

    Raises:
        UserError: for an unknown name or setting of the spec; if none or several of a seed's runs are of the present
            code, or runs of the spec used different data.
    """
    parts = resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned))
    wanted = comparable(effective(parts))
    wanted_names = spec.method, spec.backbone, dataset_name(spec.dataset)
    seeds: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        names = (run.head["method"], run.head["backbone"], run.head["dataset"])
        if names == wanted_names and comparable(run.head["settings"]) == wanted and run.whole:
            seeds[run.seed].append(run)
    chosen = []
    for seed in sorted(seeds):
        several = seeds[seed]
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
