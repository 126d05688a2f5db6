"""From names and overrides to one checked, immutable run configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Mapping

import torch

from . import NUMBERS_VERSION
from .datasets import DatasetSource, load_config, locate
from .errors import UserError
from .evaluation import EvaluationSettings, parse_metric
from .federation import Federation, FederationSettings
from .registry import Plugin, Registry
from .sampling import LocalSettings
from .settings import assemble, flat
from .stream import NOT_WITH_SPLIT_FILE, Stream, StreamSettings

CORE_SETTINGS = (StreamSettings, LocalSettings, FederationSettings, EvaluationSettings)


@dataclass(frozen=True)
class RunConfig:
    """dataset x stream x backbone x method x settings x seed."""

    source: DatasetSource
    backbone: Plugin
    method: Plugin
    stream: StreamSettings
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    backbone_settings: Any
    method_settings: Any
    seed: int
    device: str

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that have an effect as one flat, JSON-ready mapping."""
        return self._settings(with_method=True)

    def _settings(self, with_method: bool) -> dict[str, Any]:
        parts = [self.stream, self.local, self.server, self.evaluation, self.backbone_settings]
        return effective(parts + ([self.method_settings] if with_method else []))

    def _identity(self, with_method: bool) -> dict[str, Any]:
        settings = self._settings(with_method)
        settings["split_file"] = bool(settings["split_file"])  # its bytes count, not its place
        identity = {"numbers": NUMBERS_VERSION, "data": self.source.fingerprint, "seed": self.seed,
                    "device": self.device, "backbone": [self.backbone.name, self.backbone.digest],
                    "val_interval": dict(self.source.config.val_interval), "settings": settings}
        if with_method:
            identity["method"] = [self.method.name, self.method.digest]
        return identity

    @cached_property
    def hash(self) -> str:
        """Hash of everything that can change the run's result."""
        return _hash(self._identity(with_method=True))

    @cached_property
    def base_hash(self) -> str:
        """Hash of everything that can change block 0 under a method that acts only from block 1 on."""
        return _hash(self._identity(with_method=False))

    @property
    def name(self) -> str:
        """The run's folder: readable, then unique."""
        return f"{self.method.name}-{self.backbone.name}-{self.source.name}-s{self.seed}-{self.hash[:12]}"

    def federation(self, stream: Stream) -> Federation:
        """The run's parts over a loaded stream."""
        return Federation(stream, self.backbone.cls(self.backbone_settings), self.method.cls(self.method_settings),
                          self.local, self.server, self.evaluation, self.seed, torch.device(self.device))


def _hash(identity: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def resolve_device(name: str) -> str:
    """``cpu``, ``cuda`` or ``auto`` as the device to use. Raises UserError for cuda without one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no CUDA device here; use --device cpu or auto.")
    return name


def refuse_idle(stream: StreamSettings, overrides: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise UserError if the user set something that a fixed split leaves without effect."""
    for origin, layer in overrides if stream.split_file else ():
        for name in layer:
            if name in NOT_WITH_SPLIT_FILE:
                raise UserError(f"setting '{name}' ({origin}) has no effect with 'split_file', which says the blocks "
                                f"and splits; leave one of the two out.")


def resolve(registry: Registry, method: str, backbone: str, dataset: str,
            overrides: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> list[Any]:
    """The settings of a combination, without looking at its data: one instance per class of ``CORE_SETTINGS``, then
    the backbone's and the method's. Arguments and errors as for ``make_config``.
    """
    method_plugin, backbone_plugin = registry.get("method", method), registry.get("backbone", backbone)
    config, overrides = load_config(dataset), list(overrides)
    layers = [(f"backbone {backbone}", backbone_plugin.cls.defaults),
              (f"dataset_configs/{dataset}.yaml", config.settings),
              (f"dataset_configs/{dataset}.yaml", config.method_settings.get(method, {})), *overrides]
    parts = assemble([*CORE_SETTINGS, backbone_plugin.cls.Settings, method_plugin.cls.Settings], layers,
                     f"{method} on {backbone}")
    parse_metric(parts[3].valid_metric)
    refuse_idle(parts[0], overrides)
    return parts


def effective(parts: Iterable[Any]) -> dict[str, Any]:
    """Settings classes as one flat, JSON-ready mapping of those that have an effect: what a run record holds."""
    settings = flat(parts)
    for name in NOT_WITH_SPLIT_FILE if settings["split_file"] else ():
        del settings[name]
    return settings


def make_config(registry: Registry, method: str, backbone: str, dataset: str, seed: int = 0,
                overrides: Iterable[tuple[str, Mapping[str, Any]]] = (), data_dir: Path | None = None,
                device: str = "cpu") -> RunConfig:
    """Put a run together.

    Args:
        method, backbone, dataset: names.
        overrides: layers of (where they come from, settings), later ones win; they lie over the plugins' defaults and
            the dataset's.
        data_dir: folder of atomic files; None looks in ``./data`` and among RecBole's bundled datasets.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: for an unknown name or setting, a value out of range, or a missing file.
    """
    backbone_plugin, method_plugin = registry.get("backbone", backbone), registry.get("method", method)
    parts = resolve(registry, method, backbone, dataset, overrides)
    return RunConfig(locate(dataset, data_dir, parts[0]), backbone_plugin, method_plugin, *parts, seed, device)
