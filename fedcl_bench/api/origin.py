"""Where a run comes from: its plugins and its data, for what a record alone does not tell."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Mapping

from ..data.source import dataset_name, file_there, find_file, is_path, spelled
from ..core.errors import Corrupt, UserError
from ..reports.comparison import changed_settings
from ..runs.config import RunConfig, make_config
from ..runs.registry import Registry
from ..runs.specs import RunSpec
from ..records.store import Run, describe


def located(dataset: str, data_dir: Path | None) -> tuple[str, Path | None]:
    """A dataset's name, and the folder that its file is looked for in; of a path they are the file's. Raises UserError
    if a path leads to no atomic file."""
    if is_path(dataset):
        return dataset_name(dataset), find_file(dataset, None).parent
    return dataset, data_dir


def warned(error: Corrupt) -> None:
    warnings.warn(f"left out: {error.wrong}.", stacklevel=2)


@dataclass(frozen=True)
class Origin:
    registry: Registry
    records: Path  # the folder that their records are in, where other methods are looked for too
    data_dir: Path | None = None  # folder of atomic files; None as for ``make_config``
    plugins: tuple[Path, ...] = ()  # the folders of plugin files that ``registry`` has

    def dataset(self, run: Run) -> str:
        """The dataset of a run as configurations and specs take it: a path where a YAML file beside the data counts."""
        return spelled(run.meta["dataset"], self.data_dir)

    def config(self, run: Run) -> RunConfig:
        """The configuration that made a run; raises UserError if a plugin or the data is missing, or the data is
        another than the run's."""
        meta = run.meta
        # What has no effect for a plugin's sake stands in records with its defaults.
        settings = changed_settings(self.registry, meta, self.dataset(run))
        split_file = settings.get("split_file")
        if not split_file and file_there(meta["dataset"], self.data_dir) is None:
            raise UserError(f"{describe(meta)}: found no data of it in {self.data_dir or Path('data')}.\n"
                            f"Name the folder with {meta['dataset']}.inter: data_dir=DIR.")
        config = make_config(self.registry, meta["method"], meta["backbone"], meta["dataset"], run.seed,
                             [("the record", settings)], None if split_file else self.data_dir, meta["device"])
        if config.source.fingerprint != meta["data_fingerprint"]:
            raise UserError(f"{describe(meta)}: found other data in {config.source.path} than the run was made from.\n"
                            f"Name the folder of its data: data_dir=DIR.")
        if config.features and config.features.fingerprint != meta["features"]["fingerprint"]:
            raise UserError(f"{describe(meta)}: found other texts of items, given vectors or another model under "
                            f"encoder '{config.features.encoder}' than the run was made with.\n"
                            f"Put back those that it had.")
        return config

    def call(self, spec: RunSpec, settings: Mapping[str, Any], seeds: Collection[int]) -> str:
        """The call that makes the runs of a spec beside those of some seeds, for messages."""
        first = min(seeds)
        words = [repr(spec.method), repr(spec.backbone), repr(dataset_name(spec.dataset)),
                 f"seeds={max(seeds) - first + 1}", *([f"first_seed={first}"] if first else [])]
        if (self.records / "runs").is_dir() and self.records != Path("results"):
            words.append(f"results={str(self.records)!r}")
        if self.data_dir is not None and not settings.get("split_file"):
            words.append(f"data_dir={str(self.data_dir)!r}")
        if self.plugins:
            folders = list(map(str, self.plugins))
            words.append(f"plugins={folders if len(folders) > 1 else folders[0]!r}")
        return f"fb.run({', '.join([*words, *(f'{name}={value!r}' for name, value in settings.items())])})"
