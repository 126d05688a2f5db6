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
from typing import Any, Iterable, Iterator, Mapping, Protocol

from ..core.errors import UserError
from ..federation.parts import Progress
from .config import RunConfig
from ..records.frames import read_frame
from ..records.schema import read_run

KINDS = ("tensorboard", "csv", "wandb")


@dataclass(frozen=True)
class Test:
    """A mean test score: of ``metric`` on block ``tested_block`` after training on ``trained_block``."""

    trained_block: int
    tested_block: int
    metric: str
    mean: float
    users: int


class Writer(Protocol):
    """Where a log goes."""

    def round(self, number: int, row: Mapping[str, Any]) -> None:
        """A round's row of the curve; ``number`` counts all rounds of the run, from 1."""

    def test(self, number: int, test: Test) -> None:
        """A test after so many rounds."""

    def close(self) -> None:
        """Write what is left."""


class CsvWriter:
    """``rounds.csv`` and ``tests.csv``, complete after every round."""

    def __init__(self, folder: Path, config: RunConfig):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rows: dict[str, list[dict[str, Any]]] = {"rounds": [], "tests": []}
        for name in self._rows:
            (folder / f"{name}.csv").write_text("", encoding="utf-8")

    def round(self, number: int, row: Mapping[str, Any]) -> None:
        self._append("rounds", {"number": number, **row})

    def test(self, number: int, test: Test) -> None:
        self._append("tests", {"number": number, **vars(test)})

    def close(self) -> None:
        pass

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Add a line, or write the file anew if the row has a column that no earlier one had."""
        rows = self._rows[name]
        known = dict.fromkeys(column for earlier in rows for column in earlier)
        rows.append(row)
        columns = list(known | dict.fromkeys(row))
        anew = len(columns) > len(known)
        with open(self._folder / f"{name}.csv", "w" if anew else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            if anew:
                writer.writeheader()
            writer.writerows(rows if anew else [row])


class TensorBoardWriter:
    """An event file with the scalars ``round/...`` and ``test/METRIC/block N``, and the settings as text."""

    def __init__(self, folder: Path, config: RunConfig):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--log tensorboard: the package 'tensorboard' is missing; python -m pip install "
                            "tensorboard") from None
        for path in folder.glob("events.out.tfevents.*"):  # of this run before it was stopped
            path.unlink()
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("settings", f"```\n{json.dumps(config.settings, indent=1)}\n```")

    def round(self, number: int, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row):
            self._writer.add_scalar(f"round/{name}", value, number)
        self._writer.flush()

    def test(self, number: int, test: Test) -> None:
        self._writer.add_scalar(f"test/{test.metric}/block {test.tested_block}", test.mean, number)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases; offline unless the variable WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, config: RunConfig):
        wandb = _wandb()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project="fedcl_bench", name=config.name, dir=str(folder),
                               mode=os.environ.get("WANDB_MODE", "offline"), reinit="finish_previous",
                               settings={"silent": True, "console": "off"},  # the run shows what it does itself
                               config={"method": config.method.name, "backbone": config.backbone.name,
                                       "dataset": config.source.name, "seed": config.seed, **config.settings})
        self._run.define_metric("*", step_metric="number")  # steps of their own may not go back, as tests of shards do

    def round(self, number: int, row: Mapping[str, Any]) -> None:
        self._run.log({"number": number, **{f"round/{name}": value for name, value in numbers(row)}})

    def test(self, number: int, test: Test) -> None:
        self._run.log({"number": number, f"test/{test.metric}/block {test.tested_block}": test.mean})

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


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row but for its place; a round that was not validated has no ``valid``."""
    for name, value in row.items():
        if name not in ("step", "round") and isinstance(value, (int, float)) and math.isfinite(value):
            yield name, float(value)


@dataclass(frozen=True)
class Target:
    """A log that was asked for.

    Attributes:
        kind: of ``KINDS``.
        folder: that holds a folder per run.
    """

    kind: str
    folder: Path


def targets(asked: Iterable[tuple[str, Path | None]], results: Path) -> list[Target]:
    """The logs asked for as (kind, folder or None for ``RESULTS/logs/KIND``).

    Raises:
        UserError: if a package is missing or two logs of one kind have one folder.
    """
    chosen = [Target(kind, folder or results / "logs" / kind) for kind, folder in asked]
    for target in chosen:
        if chosen.count(target) > 1:
            raise UserError(f"--log: found {target.kind} in {target.folder} twice; leave one of the two out.")
        if target.kind == "wandb":
            _wandb()
    return chosen


class RunLog:
    """All logs of one run; a context that closes them.

    Raises:
        UserError: if a package is missing or a folder cannot be written.
    """

    def __init__(self, config: RunConfig, targets: Iterable[Target]):
        self._config, self._targets = config, list(targets)
        self._writers: list[Writer] = []
        self._rounds = 0  # rows written
        self._last: dict[int, int] = {}  # step to the number of its last round so far
        self._tests: set[tuple[int, int, str]] = set()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        for writer in self._writers:
            writer.close()

    def update(self, progress: Progress) -> None:
        """Write the rounds and tests of a running run that are new."""
        if self._targets:
            self._write(progress.curve, (
                Test(t, s, metric, float(values.mean()), len(values)) for t, s, scores in progress.tests
                for metric, values in scores.values.items()))

    def finish(self, record: Path) -> None:
        """Write what a finished record has and the log lacks: everything, if nothing had to be run."""
        if self._targets:
            files = (read_run(record) or {}).get("files", {})
            rounds, tests = (read_frame(record, name, files).to_dict("records") for name in ("rounds", "metrics"))
            self._write(rounds, (Test(**{name: test[name] for name in Test.__dataclass_fields__}) for test in tests))

    def _write(self, curve: Iterable[Mapping[str, Any]], tests: Iterable[Test]) -> None:
        events: list[tuple[int, int, Any]] = []
        for number, row in enumerate(curve, start=1):
            self._last[row["step"]] = number
            if number > self._rounds:
                events.append((number, 0, row))
        for test in tests:
            key = test.trained_block, test.tested_block, test.metric
            if key not in self._tests:
                self._tests.add(key)
                events.append((self._last[test.trained_block], 1, test))
        self._rounds += sum(kind == 0 for _, kind, _ in events)
        try:
            for number, kind, event in sorted(events, key=lambda event: event[:2]):
                for writer in self._open():
                    (writer.test if kind else writer.round)(number, event)
        except OSError as error:
            raise UserError(f"--log: cannot be written ({error.strerror}: {error.filename}); name another folder, as "
                            f"--log csv:DIR.") from None

    def _open(self) -> list[Writer]:
        """The writers, made when there is something to write: nothing is left of a run that is refused."""
        if not self._writers:
            self._writers = [_WRITERS[target.kind](target.folder / self._config.name, self._config)
                             for target in self._targets]
        return self._writers
