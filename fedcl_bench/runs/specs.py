"""What to run, as data: the cells of grids and of papers' tables, and tuned settings.

A spec names a run without its seed. The settings it stands for follow from the plugins, the dataset's config, the tuned
settings and the spec's own, so the same spec finds its records again.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Iterable, Mapping

from msgspec import Meta, Struct

from ..data.source import configured, dataset_name, file_there, find_file, spelled as spelled_dataset
from ..core.errors import UserError
from ..core.files import read_json, shipped
from ..core.settings import parse_assignments
from .config import Layers as Layers, effective, resolve
from .metadata import NO_BACKBONE
from .registry import RECBOLE, Registry, spelled

MY_TUNED = "my-tuned"  # in a results folder: what a user's `tune` chose
SHIPPED_TUNED = Path("results/tuned")


@dataclass(frozen=True)
class RunSpec:
    """A run but for its seed."""

    # Names; a RecBole model's in any spelling. The dataset may be a path.
    method: str
    backbone: str
    dataset: str
    settings: tuple[tuple[str, Any], ...] = ()  # (name, value) pairs that lie over all defaults and over tuned settings

    def __post_init__(self):
        for kind in ("method", "backbone"):  # as records have them
            object.__setattr__(self, kind, spelled(getattr(self, kind), kind))

    @classmethod
    def of(cls, method: str, backbone: str, dataset: str) -> RunSpec:
        """With the settings that the method is named with, as ``f3crec:without=arm``."""
        name, settings = parse_method(method)
        return cls(name, backbone, dataset, settings)

    @property
    def title(self) -> str:
        """The method with the settings that make it a variant, for people."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.method} ({settings})" if settings else self.method

    def layers(self, tuned: Tuned | None = None) -> Layers:
        """The overrides of this run for ``make_config``: tuned settings, if they are asked for, then its own."""
        result: Layers = []
        if tuned is not None:
            names = self.method, self.backbone, self.dataset
            result.append((str(tuned.file(*names)), tuned.settings(*names)))
        return [*result, ("grid", dict(self.settings))]


def spelled_spec(registry: Registry, spec: RunSpec, data_dir: Path | None = None) -> RunSpec:
    """The spec with every name in its spelling, whatever its case, and a path of a dataset made absolute. Raises
    UserError if a path leads to no atomic file."""
    return replace(spec, method=registry.spelled("method", spec.method),
                   backbone=registry.backbone_for(spec.method, spec.backbone),
                   dataset=spelled_dataset(spec.dataset, data_dir))


def parse_method(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """``"f3crec:without=arm,eps=0.01"`` as its name and settings; raises UserError for anything else. A part without
    ``=`` continues the value before it, as in ``ft:topk=5,20``."""
    prefix = text[:len(RECBOLE)] if text.lower().startswith(RECBOLE) else ""
    name, colon, rest = text[len(prefix):].partition(":")
    parts: list[str] = []
    for part in rest.split(",") if colon else ():
        if "=" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += f",{part}"
    return prefix + name, tuple(parse_assignments(parts, f"{prefix}{name}:").items())


def seed_text(seeds: Iterable[int]) -> str:
    """Seeds, or other numbers, for people: ``0-4``, ``0, 2``, ``0-2, 5``."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def expected_settings(registry: Registry, spec: RunSpec, tuned: Tuned | None = None) -> dict[str, Any]:
    """The settings that the record of a spec holds; no data file is needed."""
    return effective(resolve(registry, spec.method, spec.backbone, spec.dataset, spec.layers(tuned)))


def tuned_file(folder: Path, method: str, backbone: str, dataset: str) -> Path:
    return folder / f"{dataset_name(dataset)}-{backbone}-{method}.json".replace(":", "-")


class _Updates(Struct):
    budget: Annotated[int, Meta(ge=1)]
    spent: int


class _Trial(Struct):
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = []


class _TunedFile(Struct):
    """What is read of a file of ``tune``; to use its choice the settings alone are needed."""

    settings: dict[str, Any]
    value: float = 0.0
    trials: list[_Trial] = []
    client_updates: _Updates | None = None


def read_tuned(path: Path) -> dict[str, Any]:
    """The content of a file that `tune` writes; raises Corrupt if it is another one, and FileNotFoundError."""
    return read_json(path, _TunedFile, "Delete it, and make it again with `run_bench.py tune`.")


def has_settings(head: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Whether a run, by its ``head``, has settings that were chosen. It lacks those without effect."""
    return all(head["settings"].get(name, value) == value for name, value in chosen.items())


@dataclass(frozen=True)
class Where:
    """Folders that options named; a command that is suggested names them again."""

    plugins: tuple[Path, ...] = ()
    data_dir: Path | None = None
    records: Path | None = None  # a results folder that new runs are to be added to; None: ``./results``

    @classmethod
    def of_runs(cls, results: Path, plugins: Iterable[Path] = (), data_dir: Path | None = None) -> Where:
        """Of a command that makes runs."""
        return cls(tuple(plugins), data_dir, results if results != Path("results") else None)

    @classmethod
    def of_records(cls, records: Path, plugins: Iterable[Path] = (), data_dir: Path | None = None) -> Where:
        """Of a command that reads records; no run can be added to compact ones."""
        return cls.of_runs(records if (records / "runs").is_dir() else Path("results"), plugins, data_dir)

    def words(self) -> list[str]:
        words = ["--results", str(self.records)] if self.records else []
        words += ["--data-dir", str(self.data_dir)] if self.data_dir else []
        return words + [word for folder in self.plugins for word in ("--plugins", str(folder))]


@dataclass(frozen=True)
class Tuned:
    """Where tuned settings are looked up."""

    folders: tuple[Path, ...]  # a combination's settings are those of the first folder that has its file
    words: tuple[str, ...] = ("--tuned",)  # the options that name these folders on a command line
    where: Where = Where()  # options of the command that is suggested for what was never tuned

    @classmethod
    def of(cls, option: Path | bool | None, results: Path, where: Where = Where()) -> Tuned | None:
        """What an option ``--tuned [DIR]`` asks for, the folder or True without one; None without the option.

        Without a folder, settings that a user tuned count before shipped ones. They lie in ``results``, beside the runs
        that they belong to, so published records keep to the shipped ones.
        """
        if option is None:
            return None
        if isinstance(option, Path):
            return cls((option,), ("--tuned", str(option)), where)
        shipped_ones, mine = shipped_tuned(), results / MY_TUNED
        if mine.is_dir():
            return cls((mine, shipped_ones), where=where)
        named = shipped_ones == SHIPPED_TUNED
        return cls((shipped_ones,), ("--tuned", str(shipped_ones)) if named else ("--tuned",), where)

    def file(self, method: str, backbone: str, dataset: str) -> Path:
        """The file of a combination; where no folder has one, that of the last folder."""
        files = [tuned_file(folder, method, backbone, dataset) for folder in self.folders]
        return next((file for file in files if file.is_file()), files[-1])

    def settings(self, method: str, backbone: str, dataset: str) -> dict[str, Any]:
        """The settings that ``tune`` chose for a combination. Raises UserError if it was never tuned, and has a
        backbone, or the file is not one of ``tune``."""
        path = self.file(method, backbone, dataset)
        try:
            return read_tuned(path)["settings"]
        except FileNotFoundError:
            if backbone == NO_BACKBONE:  # most of these methods have nothing to tune
                return {}
            if dataset not in configured() and file_there(dataset, self.where.data_dir) is None:
                find_file(dataset, self.where.data_dir)  # says that it is unknown, as one that is misspelt
            named = self.words[1:] and self.words[1] != str(SHIPPED_TUNED)  # by the user
            words = ["run_bench.py", "tune", "--methods", method, "--backbones", backbone, "--datasets", dataset,
                     *(("--out", self.words[1]) if named else ()), *self.where.words()]
            files = " or ".join(str(tuned_file(folder, method, backbone, dataset)) for folder in self.folders)
            raise UserError(f"no tuned settings for {method} on {backbone}, {dataset}: no file {files}.\nMake it with: "
                            f"{shlex.join(words)}") from None

    def used(self, specs: Iterable[RunSpec]) -> str:
        """A line that says which settings these specs have, for people."""
        methods: dict[Path, dict[str, dict[str, None]]] = {folder: {} for folder in self.folders}
        for spec in specs:
            file = self.file(spec.method, spec.backbone, spec.dataset)
            if file.is_file():
                methods[file.parent].setdefault(f"{spec.backbone}, {spec.dataset}", {})[spec.method] = None
        parts: list[str] = []
        for folder, of_pair in methods.items():
            pairs = "; ".join(f"{', '.join(names)} on {pair}" for pair, names in of_pair.items())
            if of_pair:
                others = " for the others" if parts else ""
                parts.append(f"of {folder}{f' for {pairs}' if folder != self.folders[-1] else others}")
        return f"tuned settings: {', '.join(parts) or 'none of ' + ' or '.join(map(str, self.folders))}"


def shipped_tuned() -> Path:
    """The folder of shipped tuned settings: ``results/tuned`` of the working folder, or else of the checkout."""
    return SHIPPED_TUNED if SHIPPED_TUNED.is_dir() else shipped(str(SHIPPED_TUNED))
