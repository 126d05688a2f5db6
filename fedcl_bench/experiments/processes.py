"""Who does the runs of a pool: processes of this machine. ``ray_crew.py`` has workers on a cluster."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Callable, Sequence

from .worker import Job, serve


class Processes:
    """A crew: hires workers of one kind, here processes of this machine, with so many of PyTorch's threads each."""

    tries = 1  # how often a run is begun whose worker dies; what killed one, as too little memory, would kill the next
    keeps_idle = True  # as long as the pool. If not, workers make room for others as soon as no run is left to give

    def __init__(self, threads: int):
        self._threads = threads

    def hire(self) -> "Process":
        return Process(serve, self._threads)

    def listen(self, workers: "Sequence[Process]", seconds: float) -> "list[Process]":
        """Those that have something to say, or have died; waits for so long until there is one."""
        ready = wait([worker.pipe for worker in workers], seconds)
        return [worker for worker in workers if worker.pipe in ready]


class Process:
    """A process and this end of its pipe; it calls ``target`` with the other end and ``arguments``. As a worker it does
    one run at a time, and reports on it with the messages of ``worker.serve``."""

    method = "spawn"  # a fork of this one would inherit PyTorch's threads in an undefined state

    def __init__(self, target: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context(self.method)
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        # Ctrl-C reaches the whole process group; what workers do about it is the parent's decision. The mask is
        # inherited, so it holds from the worker's first instruction on, unless starting the tracker lifts it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends when the worker does
        self.running: Any = None  # what the pool notes of the worker's run

    def send(self, message: Job | str) -> None:
        """Give a run, or ask to stop it; a worker that has died takes no message, and says so when listened to."""
        try:
            self.pipe.send(message)
        except OSError:
            pass

    def receive(self) -> tuple:
        """A message. Raises EOFError or OSError if the worker has died."""
        return self.pipe.recv()

    def end(self, kill: bool = False) -> str:
        """End an idle worker, or one that has died, or any; returns why it ended."""
        self.pipe.close()
        if kill:
            self.process.kill()
        self.process.join()
        return _ended(self.process.exitcode)


class ForkedProcess(Process):
    """Starts in milliseconds, where the system can fork: from a process that has imported what all of them need, the
    target's module and ``preloads``, and neither computed anything nor imported a plugin."""

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

    def __init__(self, target: Callable[..., None], *arguments: Any, preloads: Sequence[str] = ()):
        multiprocessing.set_forkserver_preload([target.__module__, *preloads])
        super().__init__(target, *arguments)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (out of memory? fewer --jobs help)" if -code == signal.SIGKILL else ""
        return f"the worker was killed by {name}{hint}"
    by_itself = " in the middle of its run, as a plugin that calls os._exit would end it" if code == 0 else ""
    return f"the worker ended with exit code {code}{by_itself}"
