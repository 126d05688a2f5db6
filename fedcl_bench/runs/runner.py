"""One run from its configuration to its record: reuse, resume, share block 0, save, finish."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from ..data.stream import Stream
from ..core.errors import Corrupt, OutOfMemory, RunFailed, UserError, ran_out
from ..federation.early_stopping import largest
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..core.files import sweep
from ..records.record import Record
from .checkpoints import CURE, load_progress, save_progress, write_model
from .config import SHARED, RunConfig
from .memory_check import ended, require, require_disk
from .plugin_errors import in_hook
from .ranked_lists import RankedListWriter, folder_of, require_lists
from .summary import failed, frames, summary

SAVE_EVERY = 60.0  # seconds between checkpoints inside a block
LARGE = 1e18  # a parameter beyond is finite, but products of two are near the end of single precision


class Engine:
    """What trains a run: this process. Classes made from it train elsewhere, as on the shards of ``shards.py``."""

    save_every: float | None = None  # seconds between checkpoints inside a block; None: ``SAVE_EVERY``
    about: Mapping[str, Any] = {}  # what the record says of it, beside the environment
    keeps_all = True  # its progress has all that a run carries; checkpoints of others are theirs alone, and no block 0

    def check(self, federation: Federation) -> None:
        """Raise UserError, before anything is written, if it cannot: there is not enough memory, say."""
        require(federation)

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        """The progress after every round and step, from ``progress`` on, at least as much of it as is shown."""
        return run(federation, progress)

    def complete(self, progress: Progress) -> Progress:
        """All of the progress that ``run`` has yielded last."""
        return progress

    def for_record(self, progress: Progress) -> Progress:
        """What of a run's last progress its record may hold."""
        return progress

    def known(self, stream: Stream) -> Stream:
        """The data as they are known when the run ends."""
        return stream


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


@dataclass(frozen=True)
class Watch:
    """What hears of a run while it goes on, and may stop it."""

    progress: Callable[[Stream, Progress], None] = lambda stream, progress: None  # called after every round and step
    # Called with a line of text when a record is set aside, or parameters grow out of bounds.
    warn: Callable[[str], None] = lambda text: None
    # Called with a line of text when a run is resumed or block 0 is shared.
    note: Callable[[str], None] = lambda text: None
    # Asked after every round; when true, the checkpoint is written and Interrupted raised.
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class RunOptions:
    """How a run is done."""

    rerun: bool = False  # run again even if there is a finished record
    engine: Engine = Engine()  # what trains it; no number and no hash depends on it but by rounding
    save_lists: bool = False  # whether ranked lists are written beside (see ``ranked_lists.py``); not by all engines


def _train(config: RunConfig, federation: Federation, record: Record, results: Path, watch: Watch, options: RunOptions,
           began: float, lists: RankedListWriter | None) -> dict[str, Any]:
    """Go on from what is saved, to the end; returns the content of ``run.json``. ``began``: when this part of the run
    did, in seconds of ``perf_counter``; ``lists``: where its ranked lists are written, if they are."""
    engine, stream = options.engine, federation.stream
    checkpoints = _Checkpoints(config, federation, record, results, watch, options, began)
    progress = checkpoints.take_start()
    if lists and progress:
        lists.require(progress, record.folder)

    def mark_failed(why: str) -> None:
        updates = [0] * len(stream.units())
        for row in progress.curve if progress else ():
            updates[row["step"]] += int(row["participants"])
        record.fail(failed(config, why, updates))
    with _explained(record, federation, results, mark_failed):
        for progress in engine.run(federation, progress):
            watch.progress(stream, progress)
            progress = checkpoints.after(progress)
            if progress.round == 0 and (reached := largest(progress.model)) > LARGE:  # of a step that has ended
                watch.warn(f"block {progress.step - 1}: a parameter has grown to {reached:.1g}, so the training is "
                           f"about to diverge and its numbers mean little; a smaller lr may help.")
        progress = replace(progress, model=progress.best.model, previous=progress.best.model)  # frees the others
        content = summary(config, progress, checkpoints.elapsed(), checkpoints.shared, engine.known(stream))
        content["environment"] |= engine.about
        if lists:
            lists.finish()
        write_model(record.folder, engine.for_record(progress), federation)
        content = record.finish(content, frames(progress))
        sweep(results / SHARED)
    return content


def _finished(record: Record, on_corrupt: Callable[[Corrupt], None]) -> dict[str, Any] | None:
    try:
        content = record.read()
    except Corrupt as error:
        on_corrupt(error)
        return None
    return content if content and content["status"] == "finished" else None


class _Checkpoints:
    """What a run goes on from, and what it saves while it trains. ``start``: progress that the run goes on from; None
    at the very beginning; ``shared``: its block 0 is from another run."""

    def __init__(self, config: RunConfig, federation: Federation, record: Record, results: Path, watch: Watch,
                 options: RunOptions, began: float):
        self._config, self._federation, self._watch, self._rerun = config, federation, watch, options.rerun
        self._engine = engine = options.engine
        # In a stream of one step no method acts after it, so there is nothing to share block 0 for.
        shares = config.shares_base and len(federation.stream.steps) > 1 and engine.keeps_all
        self._own, self._base = record.checkpoint, config.base_file(results) if shares else None
        self._hash = config.hash if engine.keeps_all else f"{config.hash} without clients"
        self.start, seconds = self._loaded(self._own, self._hash)
        self.shared = False
        if self.start:
            watch.note(self._where(self.start))
        elif self._base and not (options.rerun or options.save_lists):
            self.start, seconds = self._loaded(self._base, config.base_hash)
            self.shared = self.start is not None
        if self.shared:
            watch.note(f"block 0: from an earlier run with the same block 0 ({self.start.round} rounds, best "
                       f"validation {federation.evaluation.valid_metric} {self.start.best_value:.4f})")
        self._began, self._last_saved = began - seconds, began
        self._save_every = SAVE_EVERY if engine.save_every is None else engine.save_every
        self._step = self.start.step if self.start else 0

    def _where(self, start: Progress) -> str:
        """Where the run goes on, for people."""
        if start.step == len(self._federation.stream.steps):
            return "all blocks are trained, writing the record."
        if start.within:
            return f"resuming in block {start.step}, within round {start.round + 1}."
        return f"resuming in block {start.step}, after round {start.round}." if start.round else \
            f"resuming at the start of block {start.step}."

    def _loaded(self, path: Path, run: str) -> tuple[Progress | None, float]:
        """A checkpoint and the seconds that it took; None if there is none or it is wrong, which is set aside."""
        try:
            # A server without domains' modules does not know their tables.
            known = self._engine.keeps_all or not self._federation.cross_silo
            saved = load_progress(path, str(self._federation.device), self._federation if known else None, run)
            if path == self._base and saved and not (saved[0].trained and saved[0].step == 0):
                raise Corrupt(f"{path}: is no block 0 that has ended", CURE)
            return saved or (None, 0.0)
        except Corrupt as error:
            aside = next(aside for number in itertools.count() if not os.path.lexists(
                aside := path.with_suffix(f".corrupt{number or ''}")))
            with suppress(FileNotFoundError):  # another run that shares block 0 has set it aside
                path.rename(aside)
                self._watch.warn(f"{error.wrong}; set aside as {aside.name}, starting afresh.")
            return None, 0.0

    def take_start(self) -> Progress | None:
        """The progress that the run goes on from, which is then not held here: its tables take as much as the run's."""
        start, self.start = self.start, None
        return start

    def elapsed(self) -> float:
        """Seconds that the run took so far, with those before it was resumed."""
        return time.perf_counter() - self._began

    def after(self, progress: Progress) -> Progress:
        """Save a round's progress if it is time to; raises Interrupted if the run is asked to stop before its end.
        Returns the progress, the whole of it if it was saved."""
        if self._base and progress.trained and progress.step == 0:
            self._base.parent.mkdir(parents=True, exist_ok=True)
            progress = self._engine.complete(progress)
            save_progress(self._base, progress, self.elapsed(), self._config.base_hash)
        asked = self._watch.stop()
        if asked or progress.step != self._step or time.perf_counter() - self._last_saved > self._save_every:
            progress = self._engine.complete(progress)
            save_progress(self._own, progress, self.elapsed(), self._hash)
            self._step, self._last_saved = progress.step, time.perf_counter()
        if asked and progress.step < len(self._federation.stream.steps):
            where = f"after round {progress.round}" if progress.round else "at the start"
            if progress.within:
                where = f"at {progress.fraction_done:.0%} of round {progress.round + 1}"
            command = f"command without --rerun, for seed {self._config.seed} alone," if self._rerun else "command"
            raise Interrupted(f"stopped {where} of block {progress.step}; the same {command} goes on from there.")
        return progress


def _tidy(record: Record, results: Path) -> None:
    """Remove what a process that was killed left beside a finished record, unless somebody is at it."""
    sweep(results / SHARED)
    if record.checkpoint.exists():
        with suppress(UserError), record.locked():  # another process is at it, or it can only be read
            record.tidy()


@contextmanager
def _explained(record: Record, federation: Federation, results: Path, mark_failed: Callable[[str], None]
               ) -> Iterator[None]:
    """Errors of training and writing in words for the user; a run that failed is marked so."""
    try:
        yield
    except RunFailed as error:
        mark_failed(str(error))
        raise RunFailed(f"{error}\nMarked as failed: {record.folder}") from None
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if not (isinstance(error, OutOfMemory) or ran_out(error)):
            raise
        raise ended(error, federation) from None
    except OSError as error:
        if in_hook(error):  # ``named`` says more
            raise
        raise UserError(f"results folder {results}: cannot be written ({error.strerror}).") from None


def execute(config: RunConfig, load: Callable[[], Stream], results: Path, watch: Watch = Watch(),
            options: RunOptions = RunOptions()) -> dict[str, Any]:
    """Run a configuration, or return its record if it is already finished: the content of ``run.json``, with ``record``
    (its folder) and ``reused`` added.

    Raises RunFailed, Interrupted and UserError, also if there is not enough memory, or a finished run has no lists.

    Args:
        load: builds the stream; not called for a finished run.
        results: folder of all records.
    """
    began = time.perf_counter()
    record, of_lists = Record.of(config.name, results), folder_of(config.name, results)
    there = {"record": str(record.folder)}
    if not options.rerun and (done := _finished(record, lambda error: None)):
        _tidy(record, results)
        if options.save_lists:
            require_lists(record.folder, of_lists)
        return {**done, **there, "reused": True}
    stream = load()
    lists = RankedListWriter(of_lists, config, stream) if options.save_lists else None
    federation = replace(config.federation(stream), on_test=lists and lists.write)
    config.check(federation)
    options.engine.check(federation)
    if options.engine.keeps_all:
        require_disk(federation, results)
    with record.locked():
        if options.rerun:
            record.clear()
        elif done := _finished(record, lambda error: watch.warn(f"{error.wrong}; set aside as "
                                                                f"{record.set_aside().name}, running again.")):
            return {**done, **there, "reused": True}
        content = _train(config, federation, record, results, watch, options, began, lists)
        return {**content, **there, "reused": False}
