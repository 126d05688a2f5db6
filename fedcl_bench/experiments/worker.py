"""A worker of a grid: takes runs from a pipe one after the other, and reports on each.

The parent's end of the pipe is the only thing a worker depends on: a message on it while a run is going on, or its end
when the parent is gone, makes the worker stop after the current round with the checkpoint saved.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Mapping

STOP = "stop"
REPORT_EVERY = 0.25  # seconds between two progress messages
STREAMS = 2  # streams kept: consecutive runs are mostly of one dataset


@dataclass(frozen=True)
class Job:
    """A run in plain data, so that another process can put it together again."""

    method: str
    backbone: str
    dataset: str
    seed: int
    layers: list[tuple[str, Mapping[str, Any]]]  # overrides for ``make_config``
    data_dir: Path | None
    results: Path
    plugins: tuple[Path, ...]
    hash: str  # the run's hash in the parent; the worker refuses to run anything else
    device: str = "cpu"  # where it computes
    save_lists: bool = False  # whether its ranked lists are written


def serve(pipe: Connection, threads: int) -> None:
    """Run jobs until the parent closes its end of the pipe. Sends ("progress", block, blocks, round, rounds) and
    ("warn", text) during a job and one of ("finished", seconds), ("failed" | "error" | "busy" | "stopped", text) at its
    end: "failed" runs have a record that says so."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever asks the parent to stop asks the workers through it
        signal.signal(number, signal.SIG_IGN)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported
        os.environ[name] = str(threads)
    streams: OrderedDict[Any, Any] = OrderedDict()
    parent = _Parent(pipe)
    try:
        while True:
            parent.tell(run_job(parent.next_job(), parent.tell, parent.asked_to_stop, threads, streams))
    except (EOFError, OSError):
        pass  # the parent is gone


class _Parent:
    """The process that gives jobs, at the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self._pipe, self._asked = pipe, False

    def next_job(self) -> Job:
        """The next job; raises EOFError or OSError if the process is gone."""
        self._asked = False
        while (job := self._pipe.recv()) == STOP:  # asked to stop when the last job had just ended
            pass
        return job

    def asked_to_stop(self) -> bool:
        """Whether it wants the job to stop, or is gone."""
        try:
            if not self._asked and self._pipe.poll():
                self._pipe.recv()
                self._asked = True
        except (EOFError, OSError):
            self._asked = True
        return self._asked

    def tell(self, message: tuple) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # it is gone: not a reason to lose the checkpoint
            self._asked = True


def _stream(config: Any, dataset: str, streams: OrderedDict[Any, Any], warn: Callable[[str], None]) -> Any:
    """The stream of a configuration, perhaps an earlier job's."""
    from ..data.datasets import load_stream
    from ..data.items.features import Callbacks

    source = config.source
    key = (dataset, source.fingerprint, source.persons, source.rating, source.texts, config.stream, config.features)
    if key not in streams:
        streams[key] = load_stream(config.source, config.stream, config.features, Callbacks(warn))
    streams.move_to_end(key)
    while len(streams) > STREAMS:
        streams.popitem(last=False)
    return streams[key]


def run_job(job: Job, tell: Callable[[tuple], None], asked_to_stop: Callable[[], bool], threads: int,
            streams: OrderedDict[Any, Any]) -> tuple[str, Any]:
    """Do a run; returns the last message about it (see ``serve``). ``tell``: takes the other messages; ``streams``:
    streams of earlier jobs, by what they were made of; kept up to date."""
    from ..core.tuning import importing
    from ..kernels.memory import reset_peak
    with importing():
        import torch

        from ..core.errors import Busy, HookFailed, RunFailed, UserError
        from ..runs.config import make_config, resolve_device
        from ..runs.plugin_errors import named
        from ..runs.registry import discover
        from ..runs.runner import Interrupted, RunOptions, Watch, execute

    torch.set_num_threads(threads)
    reset_peak()
    reported = 0.0

    def report(stream: Any, progress: Any) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_EVERY or progress.trained:
            reported = time.monotonic()
            tell(("progress", progress.step, len(stream.steps), progress.round, config.rounds))

    try:
        with named():
            config = make_config(discover(job.plugins), job.method, job.backbone, job.dataset, job.seed, job.layers,
                                 job.data_dir, resolve_device(job.device))
            if config.hash != job.hash:
                raise UserError("its data, plugin or configuration file was changed since the grid began; start it "
                                "again.")
            watch = Watch(report, warn=lambda text: tell(("warn", text)), stop=asked_to_stop)
            content = execute(config, lambda: _stream(config, job.dataset, streams, watch.warn), job.results, watch,
                              RunOptions(save_lists=job.save_lists))
        return "finished", content["seconds"]["total"]
    except Interrupted as error:
        return "stopped", str(error)
    except Busy as error:
        return "busy", str(error)
    except (UserError, HookFailed) as error:
        return "error", str(error)
    except RunFailed as error:
        return "failed", str(error)
    except Exception as error:  # a plugin's fault is no reason to give up the other runs
        return "error", f"{type(error).__name__}: {error}"
