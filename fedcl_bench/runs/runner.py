"""One run from its configuration to its record: reuse, resume, share block 0, save, finish."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Protocol

from ..data.stream import Stream
from ..core.errors import Corrupt, OutOfMemory, RunFailed, UserError, ran_out
from ..federation.early_stopping import largest
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..core.files import sweep
from ..records.record import Record
from .checkpoints import CURE, load_progress, save_progress
from .config import SHARED, RunConfig
from .memory_check import ended, require
from .model_file import write_model
from .summary import failed, frames, summary

_Saved = tuple[Progress, float]  # and the seconds that it took so far
SAVE_EVERY = 60.0  # seconds between checkpoints inside a block
LARGE = 1e18  # a parameter beyond is finite, but products of two are near the end of single precision


class Engine(Protocol):
    """What trains a run: this process, or the shards of ``shards.py``."""

    def check(self, federation: Federation) -> None:
        """Raise UserError, before anything is written, if it cannot: there is not enough memory, say."""

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        """The progress after every round and step, from ``progress`` on, at least as much of it as is shown."""

    def whole(self, progress: Progress) -> Progress:
        """All of the progress that ``run`` has yielded last."""


class Here:
    """Trains a run in this process."""

    def check(self, federation: Federation) -> None:
        require(federation)

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        return run(federation, progress)

    def whole(self, progress: Progress) -> Progress:
        return progress


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


@dataclass(frozen=True)
class Watch:
    """What hears of a run while it goes on, and may stop it.

    Attributes:
        progress: called after every round and step.
        warn: called with a line of text when a record is set aside, or parameters grow out of bounds.
        note: called with a line of text when a run is resumed or block 0 is shared.
        stop: asked after every round; when true, the checkpoint is written and Interrupted raised.
    """

    progress: Callable[[Stream, Progress], None] = lambda stream, progress: None
    warn: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False


def _load_or_set_aside(path: Path, run: str, federation: Federation, warn: Callable[[str], None], base: bool = False
                       ) -> _Saved | None:
    """The checkpoint of a run of this hash, or a ``base``, which is a block 0 that has ended; None if there is none or
    it is wrong."""
    try:
        saved = load_progress(path, str(federation.device), federation, run)
        if base and saved and not (saved[0].trained and saved[0].step == 0):
            raise Corrupt(f"{path}: is no block 0 that has ended", CURE)
        return saved
    except Corrupt as error:
        aside = next(aside for number in itertools.count() if not os.path.lexists(
            aside := path.with_suffix(f".corrupt{number or ''}")))
        try:
            path.rename(aside)
        except FileNotFoundError:  # another run that shares block 0 has set it aside
            return None
        warn(f"{error.wrong}; set aside as {aside.name}, starting afresh.")
        return None


def _finished(record: Record, on_corrupt: Callable[[Corrupt], None]) -> dict[str, Any] | None:
    """The content of a finished record, or None."""
    try:
        content = record.read()
    except Corrupt as error:
        on_corrupt(error)
        return None
    if not content or content["status"] != "finished":
        return None
    return content


@dataclass(frozen=True)
class _Start:
    """What a run goes on from.

    Attributes:
        progress: None at the very beginning.
        seconds: that it took so far.
        shared: block 0 is from another run.
    """

    progress: Progress | None = None
    seconds: float = 0.0
    shared: bool = False


def _resumed(config: RunConfig, federation: Federation, record: Record, watch: Watch) -> _Start | None:
    """From the run's own checkpoint, if there is one."""
    saved = _load_or_set_aside(record.checkpoint, config.hash, federation, watch.warn)
    if saved is None:
        return None
    step, round_ = saved[0].step, saved[0].round
    where = f"within round {round_ + 1}" if saved[0].within else f"after round {round_}"
    watch.note("all blocks are trained, writing the record." if step == len(federation.stream.steps) else
               f"resuming in block {step}, {where}." if round_ or saved[0].within else
               f"resuming at the start of block {step}.")
    return _Start(*saved)


def _from_base(config: RunConfig, federation: Federation, base: Path | None, watch: Watch) -> _Start | None:
    """From another run's block 0, if there is one and it may be shared."""
    saved = base and _load_or_set_aside(base, config.base_hash, federation, watch.warn, base=True)
    if not saved:
        return None
    progress, seconds = saved
    watch.note(f"block 0: from an earlier run with the same block 0 ({progress.round} rounds, best validation "
               f"{federation.evaluation.valid_metric} {progress.best_value:.4f})")
    return _Start(progress, seconds, shared=True)


class _Saving:
    """Checkpoints of a run while it trains.

    Args:
        config: of the run, whose hashes are in the files.
        base: file that shares block 0 with other runs; None: it is not shared.
        began: when this part of the run did, in seconds of ``perf_counter``.
    """

    def __init__(self, config: RunConfig, engine: Engine, checkpoint: Path, base: Path | None, start: _Start,
                 began: float):
        self.config, self.engine, self.checkpoint, self.base = config, engine, checkpoint, base
        self.seconds, self.began = start.seconds, began
        self.last_saved, self.step = began, start.progress.step if start.progress else 0

    def elapsed(self) -> float:
        """Seconds that the run took so far, with those before it was resumed."""
        return self.seconds + time.perf_counter() - self.began

    def after(self, progress: Progress, stream: Stream, stop: Callable[[], bool]) -> Progress:
        """Save a round's progress if it is time to; raises Interrupted if the run is asked to stop before its end.

        Returns:
            The progress, the whole of it if it was saved.
        """
        if self.base and progress.trained and progress.step == 0:
            self.base.parent.mkdir(parents=True, exist_ok=True)
            progress = self.engine.whole(progress)
            save_progress(self.base, progress, self.elapsed(), self.config.base_hash)
        asked = stop()
        if asked or progress.step != self.step or time.perf_counter() - self.last_saved > SAVE_EVERY:
            progress = self.engine.whole(progress)
            save_progress(self.checkpoint, progress, self.elapsed(), self.config.hash)
            self.step, self.last_saved = progress.step, time.perf_counter()
        if asked and progress.step < len(stream.steps):
            where = f"after round {progress.round}" if progress.round else "at the start"
            if progress.within:
                where = f"at {progress.fraction_done:.0%} of round {progress.round + 1}"
            raise Interrupted(f"stopped {where} of block {progress.step}; the same command goes on from there.")
        return progress


def _tidy(record: Record, results: Path) -> None:
    """Remove what a process that was killed left beside a finished record, unless somebody is at it."""
    sweep(results / SHARED)
    if record.checkpoint.exists():
        try:
            with record.locked():
                record.tidy()
        except UserError:  # another process is at it, or it can only be read
            pass


def _warn_if_large(progress: Progress, warn: Callable[[str], None]) -> None:
    """Warn if a step that has just ended left parameters that are finite and yet no result of learning."""
    if (reached := largest(progress.model)) > LARGE:
        warn(f"block {progress.step - 1}: a parameter has grown to {reached:.1g}, so the training is about to diverge "
             f"and its numbers mean little; a smaller lr may help.")


def _client_updates(progress: Progress | None, blocks: int) -> list[int]:
    """Participants summed over the rounds so far, per block."""
    rows = progress.curve if progress else ()
    return [sum(int(row["participants"]) for row in rows if row["step"] == block) for block in range(blocks)]


def execute(config: RunConfig, load: Callable[[], Stream], results: Path, watch: Watch = Watch(), *,
            rerun: bool = False, engine: Engine = Here()) -> dict[str, Any]:
    """Run a configuration, or return its record if it is already finished.

    Args:
        load: builds the stream; not called for a finished run.
        results: folder of all records.
        watch: what is told of its rounds, and may stop it.
        rerun: run again even if there is a finished record.
        engine: what trains it; no number and no hash depends on it but by rounding.

    Returns:
        The content of ``run.json``, with ``record`` (its folder) and ``reused`` added.

    Raises:
        UserError: also if there is not enough memory. RunFailed, Interrupted.
    """
    began = time.perf_counter()
    record = Record.of(config.name, results)
    if not rerun and (done := _finished(record, lambda error: None)):
        _tidy(record, results)
        return {**done, "record": str(record.folder), "reused": True}
    stream = load()
    federation = config.federation(stream)
    config.check(federation)  # before anything is written
    engine.check(federation)
    with record.locked():
        if rerun:
            record.clear()
        elif done := _finished(record, lambda error: watch.warn(f"{error.wrong}; set aside as "
                                                                f"{record.set_aside().name}, running again.")):
            return {**done, "record": str(record.folder), "reused": True}
        # In a stream of one step no method acts after it, so there is nothing to share it for.
        shares_base = config.method.cls.first_step > 0 and len(stream.steps) > 1
        base = config.base_file(results) if shares_base else None
        start = _resumed(config, federation, record, watch) or (
            _from_base(config, federation, None if rerun else base, watch)) or _Start()
        saving = _Saving(config, engine, record.checkpoint, base, start, began)
        progress = start.progress
        try:
            for progress in engine.run(federation, progress):
                watch.progress(stream, progress)
                progress = saving.after(progress, stream, watch.stop)
                if progress.round == 0:  # a step has ended
                    _warn_if_large(progress, watch.warn)
            content = summary(config, progress, saving.elapsed(), start.shared, stream)
            write_model(record.folder, progress, federation)
            content = record.finish(content, frames(progress))
            sweep(results / SHARED)
        except RunFailed as error:
            record.fail(failed(config, str(error), _client_updates(progress, len(stream.units()))))
            raise RunFailed(f"{error}\nMarked as failed: {record.folder}") from None
        except (OutOfMemory, RuntimeError, MemoryError) as error:
            if not (isinstance(error, OutOfMemory) or ran_out(error)):
                raise
            raise ended(error, federation) from None
        except OSError as error:
            raise UserError(f"results folder {results}: cannot be written ({error.strerror}).") from None
        return {**content, "record": str(record.folder), "reused": False}
