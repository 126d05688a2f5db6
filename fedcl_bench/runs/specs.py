"""What to run, as data: the cells of grids and of papers' tables, and tuned settings.

A spec names a run without its seed. The settings it stands for follow from the plugins, the dataset's config, the tuned
settings and the spec's own, so the same spec finds its records again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Mapping

from ..data.source import dataset_name, spelled as spelled_dataset
from ..errors import UserError
from ..settings import declared_idle
from .config import effective, resolve
from .registry import Registry, spelled

Layers = list[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class RunSpec:
    """A run but for its seed.

    Attributes:
        method, backbone, dataset: names; a RecBole model's in any spelling. The dataset may be a path.
        settings: (name, value) pairs that lie over all defaults and over tuned settings.
    """

    method: str
    backbone: str
    dataset: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "backbone", spelled(self.backbone))  # as records have it

    @property
    def title(self) -> str:
        """The method with the settings that make it a variant, for people."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.method} ({settings})" if settings else self.method

    def layers(self, tuned: Path | None = None) -> Layers:
        """The overrides of this run for ``make_config``: tuned settings, if a folder of them is given, then its own."""
        result: Layers = []
        if tuned is not None:
            chosen = tuned_settings(tuned, self.method, self.backbone, self.dataset)
            result.append((str(tuned_file(tuned, self.method, self.backbone, self.dataset)), chosen))
        return [*result, ("grid", dict(self.settings))]


def spelled_spec(registry: Registry, spec: RunSpec, data_dir: Path | None = None) -> RunSpec:
    """The spec with every name in its spelling, whatever its case, and a path of a dataset made absolute.

    Raises:
        UserError: if a path leads to no atomic file.
    """
    return replace(spec, method=registry.spelled("method", spec.method),
                   backbone=registry.spelled("backbone", spec.backbone),
                   dataset=spelled_dataset(spec.dataset, data_dir))


def seed_text(seeds: Iterable[int]) -> str:
    """Seeds, or other numbers, for people: ``0-4``, ``0, 2``, ``0-2, 5``."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def expected_settings(registry: Registry, spec: RunSpec, tuned: Path | None = None) -> dict[str, Any]:
    """The settings that the record of a spec holds; no data file is needed."""
    return effective(resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned)))


def expected_idle(registry: Registry, spec: RunSpec, tuned: Path | None = None) -> dict[str, str]:
    """The settings that the plugins of a spec leave without effect, and why; older records hold their values."""
    return declared_idle(resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned)))


def tuned_file(folder: Path, method: str, backbone: str, dataset: str) -> Path:
    """Where the tuned settings of a combination are."""
    return folder / f"{dataset_name(dataset)}-{backbone.replace(':', '-')}-{method}.json"


def tuned_settings(folder: Path, method: str, backbone: str, dataset: str) -> dict[str, Any]:
    """The settings that ``tune`` chose for a combination.

    Raises:
        UserError: if it was never tuned or the file is not one of ``tune``.
    """
    path = tuned_file(folder, method, backbone, dataset)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except FileNotFoundError:
        raise UserError(f"no tuned settings for {method} on {backbone}, {dataset}: no file {path}.\nMake it with: "
                        f"run_bench.py tune --methods {method} --backbones {backbone} --datasets {dataset}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not a file of `tune`.") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: field 'settings' is {type(settings).__name__}, expected a mapping.")
    return settings
