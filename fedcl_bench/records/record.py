"""Run records: one folder per run, as ``docs/records.md`` describes it, written atomically, verified when read.

A run in progress keeps one ``checkpoint.pt``. ``run.json`` is written last, so a folder without a finished one is an
unfinished run whatever else is in it. ``model.pt`` is by far the largest, and no report needs it: it may be deleted.
"""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..core.errors import Busy, Corrupt, UserError
from ..core.files import sweep, write_atomically
from ..core.text import refuse_link
from .frames import digest, numbers_in, parsed, read_content
from .schema import CURE, FILES, NAME as RUN, SCHEMA, read_run

if TYPE_CHECKING:
    import pandas as pd

MODEL, MODEL_SUM = "model.pt", "model.pt.b2sum"


@dataclass(frozen=True)
class Record:
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def read(self) -> dict[str, Any] | None:
        """The content of ``run.json``, verified; None if the run has not ended. Raises Corrupt if a file is missing,
        half-written or changed since it was recorded."""
        content = read_run(self.folder)
        if content is None or content["status"] == "failed":
            return content
        files = content.get("files", {})
        for name in FILES:
            read_content(self.folder / name, files.get(name))
        return content

    def finish(self, content: dict[str, Any], frames: Mapping[str, pa.Table]) -> dict[str, Any]:
        """Write all files of a finished run but its model, ``run.json`` last, and drop the checkpoint. ``content``: of
        ``run.json`` but for version, status and checksums; ``frames``: by file name, those of ``FILES``."""
        blobs = {}
        for name in FILES:
            buffer = io.BytesIO()
            pq.write_table(frames[name], buffer)
            blobs[name] = buffer.getvalue()
        for name, blob in blobs.items():
            write_atomically(self.folder / name, blob)
        content = {"schema": SCHEMA, "status": "finished", **content,
                   "files": {name: digest(blob) for name, blob in blobs.items()}}
        write_atomically(self.folder / RUN, json.dumps(content, indent=1).encode())
        self.tidy()
        return content

    def tidy(self) -> None:
        """Remove what a process that was killed left beside a finished record."""
        self.checkpoint.unlink(missing_ok=True)
        sweep(self.folder)

    def fail(self, content: dict[str, Any]) -> None:
        """Mark the run as failed; ``content``: of ``run.json`` but for version and status."""
        content = {"schema": SCHEMA, "status": "failed", **content}
        write_atomically(self.folder / RUN, json.dumps(content, indent=1).encode())

    def clear(self) -> None:
        """Remove the run's files, ``run.json`` first; whatever else is in the folder stays."""
        for name in (RUN, *FILES, MODEL, MODEL_SUM, self.checkpoint.name):
            (self.folder / name).unlink(missing_ok=True)
        sweep(self.folder)

    def set_aside(self) -> Path:
        """Move the record's files into a sibling folder and return it."""
        number = 1
        while (target := self.folder.with_name(f"{self.folder.name}.corrupt{number}")).exists():
            number += 1
        target.mkdir()
        for path in list(self.folder.iterdir()):
            if path.name != ".lock":
                path.rename(target / path.name)
        return target

    def frame(self, name: str) -> pd.DataFrame:
        """A frame of a finished run, of the file ``NAME.parquet``; raises Corrupt if that is missing or has changed."""
        return parsed(*self._content(name), CURE)

    def rounds(self) -> dict[str, NDArray[Any]]:
        """The columns of ``rounds.parquet``, as ``frame`` has them."""
        return numbers_in(*self._content("rounds"), CURE)

    def _content(self, name: str) -> tuple[bytes, Path]:
        path = self.folder / f"{name}.parquet"
        files = (read_run(self.folder) or {}).get("files", {})
        return read_content(path, files.get(path.name)), path

    @classmethod
    def of(cls, name: str, results: Path) -> "Record":
        """Where the run of this name is kept in a results folder; raises UserError if that is a symbolic link."""
        folder = results / "runs" / name
        refuse_link(folder)
        return cls(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from the same run; the lock vanishes with the process. Raises UserError if the folder
        cannot be written, Busy if another process is at the run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            refuse_link(self.folder / ".lock")
            lock = open(self.folder / ".lock", "a")
        except OSError as error:
            raise UserError(f"results folder {self.folder}: cannot be written ({error.strerror}); "
                            f"choose another with --results DIR.") from None
        with lock:
            try:
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{self.folder}: another process is at this run; wait for it, or stop it first.") from None
            except (ImportError, OSError):  # no advisory locks on this system, or this file system
                pass
            yield


def is_set_aside(folder: Path) -> bool:
    """Whether ``Record.set_aside`` made a folder; datasets may have dots in their names, too."""
    return folder.suffix.removeprefix(".corrupt").isdigit()


def refuse(error: Corrupt) -> None:
    raise error


@dataclass(frozen=True, eq=False)
class Run:
    head: Mapping[str, Any]  # names, seed, hash, settings, number of blocks, metrics' names: enough to choose runs by
    path: Path  # the folder it was read from
    open: Callable[[], dict[str, Any]]  # reads and verifies the record; returns the content of ``run.json``
    # Reads one of the frames ``users``, ``rounds`` and ``analysis``; called once for each that is asked for.
    load: Callable[[str], pd.DataFrame]
    left_out: Callable[[Corrupt], None] = refuse  # told why, if the record is not what was written

    @property
    def seed(self) -> int:
        return int(self.head["seed"])

    @property
    def hash(self) -> str:
        return str(self.head["hash"])

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The content of ``run.json``; raises Corrupt unless all of the record is what was written."""
        return self.open()

    @cached_property
    def intact(self) -> bool:
        """Whether the record is what was written. If not, who asked for the runs is told."""
        try:
            return bool(self.meta)
        except Corrupt as error:
            self.left_out(error)
            return False

    @cached_property
    def users(self) -> pd.DataFrame:
        """Per-user scores: trained_block, tested_block, user, metric, value."""
        return self.load("users")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round: step, round, participants, loss, valid, bytes_up, bytes_down, train_seconds,
        evaluate_seconds."""
        return self.load("rounds")

    @cached_property
    def analysis(self) -> pd.DataFrame:
        """What was measured besides the metrics: block, kind, id, value; no rows if nothing was."""
        return self.load("analysis")
