"""Where a run comes from: its plugins and its data, for what a record alone does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..data.datasets import load_stream
from ..data.stream import Stream
from ..errors import UserError
from ..runs.config import RunConfig, make_config
from ..runs.registry import Registry
from ..runs.run import Run
from ..runs.store import describe


@dataclass(frozen=True)
class Origin:
    """Plugins and data of runs.

    Attributes:
        records: the folder that their records are in, where other methods are looked for too.
        data_dir: folder of atomic files; None as for ``make_config``.
    """

    registry: Registry
    records: Path
    data_dir: Path | None = None

    def config(self, run: Run) -> RunConfig:
        """The configuration that made a run.

        Raises:
            UserError: if a plugin or the data is missing, or the data is another than the run's.
        """
        meta = run.meta
        ignored = self.registry.get("backbone", meta["backbone"]).cls.ignored  # stand in records with their defaults
        settings = {name: value for name, value in meta["settings"].items() if name not in ignored}
        data_dir = None if settings.get("split_file") else self.data_dir
        config = make_config(self.registry, meta["method"], meta["backbone"], meta["dataset"], run.seed,
                             [("the record", settings)], data_dir, meta["device"])
        if config.source.fingerprint != meta["data_fingerprint"]:
            raise UserError(f"{describe(meta)}: found other data in {config.source.path} than the run was made from.\n"
                            f"Name the folder of its data: data_dir=DIR.")
        return config

    def stream(self, run: Run) -> Stream:
        """The data of a run, in its blocks and splits; raises as ``config``."""
        config = self.config(run)
        return load_stream(config.source, config.stream)
