"""Logs of running runs: every round's row of the curve, and every test, to TensorBoard, CSV files or Weights & Biases.

A log holds nothing that the record lacks. It is written from the run's beginning, also when the run is resumed, shares
block 0 or is finished already: then its rows come from the checkpoint or the record. A row's place on the horizontal
axis is its number among all rounds of the run, from 1; that of a step's tests is its last round's.
"""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from ..core.errors import UserError
from ..federation.parts import Progress
from ..records.record import Record
from .config import RunConfig
from .summary import test_means

Row = Mapping[str, Any]


class LogWriter:
    """Where a log goes; made from the run's folder and configuration. It is flushed after all rows of a round, and
    closed after the last row."""

    def write(self, kind: str, number: int, row: Row) -> None:
        """A row of ``rounds`` or ``tests`` after so many rounds."""

    flush = close = lambda self: None


def scalars(kind: str, row: Row) -> dict[str, float]:
    """The finite numbers of a row, by what they are called in curves; a round that was not validated has no
    ``valid``."""
    if kind == "tests":
        return {f"test/{row['metric']}/block {row['tested_block']}": row["mean"]}
    return {f"round/{name}": float(value) for name, value in row.items() if name not in ("step", "round")
            and isinstance(value, (int, float)) and math.isfinite(value)}


class CsvWriter(LogWriter):
    """``rounds.csv`` and ``tests.csv``, complete after every round."""

    def __init__(self, folder: Path, config: RunConfig):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rows: dict[str, list[dict[str, Any]]] = {"rounds": [], "tests": []}

    def write(self, kind: str, number: int, row: Row) -> None:
        self._rows[kind].append({"number": number, **row})

    def flush(self) -> None:
        for kind, rows in self._rows.items():
            with open(self._folder / f"{kind}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
                writer.writeheader()
                writer.writerows(rows)


class TensorBoardWriter(LogWriter):
    """An event file with the scalars ``round/...`` and ``test/METRIC/block N``, and the settings as text."""

    def __init__(self, folder: Path, config: RunConfig):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--log tensorboard: the package 'tensorboard' is missing; python -m pip install "
                            "tensorboard") from None
        for path in folder.glob("events.out.tfevents.*"):  # of this run before it was stopped
            path.unlink()
        writer = SummaryWriter(str(folder))
        writer.add_text("settings", f"```\n{json.dumps(config.settings, indent=1)}\n```")
        self._writer, self.flush, self.close = writer, writer.flush, writer.close

    def write(self, kind: str, number: int, row: Row) -> None:
        for name, value in scalars(kind, row).items():
            self._writer.add_scalar(name, value, number)


class WandbWriter(LogWriter):
    """A run of Weights & Biases; offline unless the variable WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, config: RunConfig):
        folder.mkdir(parents=True, exist_ok=True)
        self._run = _wandb().init(
            project="fedcl_bench", name=config.name, dir=str(folder), mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="finish_previous", settings={"silent": True, "console": "off"},  # the run shows what it does itself
            config={"method": config.method.name, "backbone": config.backbone.name, "dataset": config.source.name,
                    "seed": config.seed, **config.settings})
        self._run.define_metric("*", step_metric="number")  # steps of their own may not go back, as tests of shards do

    def write(self, kind: str, number: int, row: Row) -> None:
        self._run.log({"number": number, **scalars(kind, row)})

    def close(self) -> None:
        self._run.finish()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("--log wandb: the package 'wandb' is missing; python -m pip install wandb, or use --log "
                        "tensorboard or csv.") from None
    return wandb


_WRITERS = {"tensorboard": TensorBoardWriter, "csv": CsvWriter, "wandb": WandbWriter}


@dataclass(frozen=True)
class Target:
    """A log that was asked for: its kind, and a folder that holds a folder per run."""

    kind: str
    folder: Path


def targets(asked: Iterable[str], results: Path) -> list[Target]:
    """The logs asked for as KIND:DIR, or KIND for ``RESULTS/logs/KIND``. Raises UserError for another kind, if a
    package is missing or two logs of one kind have one folder."""
    chosen: list[Target] = []
    for text in asked:
        kind, colon, folder = text.partition(":")
        if kind not in _WRITERS or colon and not folder:
            raise UserError(f"--log: found '{text}', accepted: {', '.join(_WRITERS)}, each also with a folder, as "
                            f"csv:DIR.")
        target = Target(kind, Path(folder) if folder else results / "logs" / kind)
        if target in chosen:
            raise UserError(f"--log: found {kind} in {target.folder} twice; leave one of the two out.")
        if kind == "wandb":
            _wandb()
        chosen.append(target)
    return chosen


class RunLog:
    """All logs of one run; a context that closes them. Raises UserError if a package is missing or a folder cannot be
    written."""

    def __init__(self, config: RunConfig, targets: Iterable[Target]):
        self._config, self._targets = config, list(targets)
        self._writers: list[LogWriter] = []
        self._rounds = 0  # rows written
        self._tests: set[tuple[int, int, str]] = set()

    def __enter__(self) -> "RunLog":
        for target in self._targets:  # before a record is cleared for a run that could not begin
            there = next(path for path in (target.folder, *target.folder.absolute().parents) if path.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise UserError(f"--log: cannot be written ({target.folder}); name another folder, as --log csv:DIR.")
        return self

    def __exit__(self, *exception) -> None:
        for writer in self._writers:
            writer.close()

    def update(self, progress: Progress) -> None:
        """Write the rounds and tests of a running run that are new."""
        if self._targets:
            self._write(progress.curve, test_means(progress))

    def finish(self, record: Path) -> None:
        """Write what a finished record has and the log lacks: everything, if nothing had to be run."""
        if self._targets:
            self._write(*(Record(record).frame(name).to_dict("records") for name in ("rounds", "metrics")))

    def _write(self, curve: Iterable[Row], tests: Iterable[Row]) -> None:
        curve = list(curve)
        last = {row["step"]: number for number, row in enumerate(curve, start=1)}
        events = [(number, "rounds", row) for number, row in enumerate(curve, start=1) if number > self._rounds]
        self._rounds = max(self._rounds, len(curve))
        for row in tests:
            key = row["trained_block"], row["tested_block"], row["metric"]
            if key not in self._tests:
                self._tests.add(key)
                events.append((last[row["trained_block"]], "tests", row))
        if not events:
            return
        try:
            if not self._writers:  # not before there is something to write: nothing is left of a run that is refused
                self._writers = [_WRITERS[target.kind](target.folder / self._config.name, self._config)
                                 for target in self._targets]
            for writer in self._writers:
                for number, kind, row in sorted(events, key=lambda event: event[:2]):
                    writer.write(kind, number, row)
                writer.flush()
        except OSError as error:
            raise UserError(f"--log: cannot be written ({error.strerror}: {error.filename}); name another folder, as "
                            f"--log csv:DIR.") from None
