"""Runs at several workers: who runs next, what becomes of it, and how long the rest will take.

Workers are kept over many runs. One that dies costs only the run it was at. They are processes of this machine, or with
another crew of the same methods actors on a cluster (``ray_crew.Actors``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Iterable, Mapping, Sequence

from .grid import Outcome, Task, state
from .processes import Process, Processes
from .worker import STOP, Job

TICK = 0.25  # seconds between two looks at the clock, the display and Ctrl-C
BUSY_WAIT = 5.0  # seconds until a run that another process was at is tried once more


@dataclass
class Running:
    """A task at a worker: when it began (monotonic seconds), and block, blocks, round and rounds per block so far."""

    task: Task
    began: float
    at: tuple[int, int, int, int] | None = None


@dataclass
class GridState:
    tasks: int
    jobs: int
    outcomes: list[Outcome] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    waiting: list[Task] = field(default_factory=list)

    def count(self, *statuses: str) -> int:
        return sum(outcome.status in statuses for outcome in self.outcomes)

    def time_left(self) -> float | None:
        """Seconds until the last run ends if every run takes the mean of those like it; None before the first. Times
        measured here count; before there are any, those of earlier records."""
        known: dict[tuple[str, ...], list[float]] = {}
        finished = [outcome for outcome in self.outcomes if outcome.status == "finished"]
        for outcome in [o for o in finished if o.new] or finished:
            for depth in range(4):  # every run; of the dataset; of the backbone on it; of the method on that
                known.setdefault(outcome.task.group[:depth], []).append(
                    outcome.seconds if outcome.took is None else outcome.took)
        if not known:
            return None

        def expected(task: Task) -> float:
            return fmean(next(known[task.group[:depth]] for depth in (3, 2, 1, 0) if task.group[:depth] in known))

        now = time.monotonic()
        begun = [max(expected(r.task) - (now - r.began), 0.0) for r in self.running]
        rest = sum(begun) + sum(map(expected, self.waiting))
        return max([rest / max(min(self.jobs, len(begun) + len(self.waiting)), 1), *begun])


@dataclass(frozen=True)
class PoolWatch:
    """What hears of the runs of a pool, and may stop them."""

    show: Callable[[GridState], None] = lambda board: None  # called with the board a few times per second
    ended: Callable[[Outcome, GridState], None] = lambda outcome, board: None  # called with every outcome and the board
    warn: Callable[[str], None] = lambda message: None  # called with a line of text when a record is set aside
    # Asked all the time; once true, the workers end their rounds, save and stop.
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Folders:
    """What the runs of a pool read and write; ``save_lists``: whether they write their ranked lists."""

    results: Path
    data_dir: Path | None = None
    plugins: Sequence[Path] = ()
    save_lists: bool = False


class Pool:
    """Workers for the runs of one results folder, used as a context manager. ``jobs``: how many runs at once;
    ``threads``: PyTorch's threads of each; ``crew``: of whom workers are hired; None: processes of this machine."""

    def __init__(self, folders: Folders, jobs: int, threads: int = 1, watch: PoolWatch = PoolWatch(),
                 crew: Processes | Any = None):
        self.folders, self.jobs, self.watch, self.crew = folders, jobs, watch, crew or Processes(threads)
        self._workers: list[Process] = []
        self._lost: dict[str, int] = {}  # workers that died at a run, by its hash

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception) -> None:
        for worker in self._workers:
            worker.end(kill=True)
        self._workers.clear()

    def run(self, tasks: Iterable[Task], retry_failed: bool = False) -> list[Outcome]:
        """Run all tasks that have no record, and return every task's outcome in the order of the tasks;
        ``retry_failed``: run those again whose record says that they failed."""
        tasks = list(tasks)
        board = GridState(len(tasks), self.jobs)
        begun = set()  # runs with a checkpoint
        for task in tasks:
            recorded = state(task, self.folders.results)
            if recorded.status == "finished" or recorded.status == "failed" and not retry_failed:
                board.outcomes.append(recorded)
            else:
                board.waiting.append(task)
                begun.update([task.config.hash] if recorded.status == "interrupted" else [])
        _order(board, begun)
        self._work(board)
        by_hash = {outcome.task.config.hash: outcome for outcome in board.outcomes}
        return [by_hash[task.config.hash] for task in tasks]

    def _work(self, board: GridState) -> None:
        retry_at: dict[str, float] = {}
        stopping = False
        while board.running or board.waiting:
            if not stopping and self.watch.stop():
                stopping = True
                for worker in self._busy():
                    worker.send(STOP)
            if stopping:
                board.outcomes += [Outcome(task, "waiting") for task in board.waiting]
                board.waiting.clear()
            while len(board.running) < self.jobs and (task := self._next(board, retry_at)):
                self._give(task, board)
            if not board.waiting and not self.crew.keeps_idle:
                for worker in [w for w in self._workers if not w.running]:
                    self._workers.remove(worker)
                    worker.end()
            self.watch.show(board)
            for worker in self.crew.listen(self._busy(), TICK) if board.running else ():
                self._listen(worker, board, retry_at)
            if not board.running and board.waiting:
                time.sleep(TICK)  # only runs that another process is at are left
        self.watch.show(board)

    def _busy(self) -> list[Process]:
        return [worker for worker in self._workers if worker.running]

    def _next(self, board: GridState, retry_at: Mapping[str, float]) -> Task | None:
        """The first waiting task that may begin. Among tasks with the same block 0, one computes it and the others wait
        until its file exists; runs whose lists are kept train their own."""
        making = {r.task.config.base_hash for r in board.running if not self.folders.save_lists
                  and r.task.config.shares_base and not r.task.config.base_file(self.folders.results).exists()}
        for task in board.waiting:
            if retry_at.get(task.config.hash, 0.0) <= time.monotonic() \
                    and not (task.config.shares_base and task.config.base_hash in making):
                board.waiting.remove(task)
                return task
        return None

    def _give(self, task: Task, board: GridState) -> None:
        spec, folders = task.spec, self.folders
        job = Job(spec.method, spec.backbone, spec.dataset, task.config.seed, task.layers, folders.data_dir,
                  folders.results, tuple(folders.plugins), task.config.hash, task.config.device, folders.save_lists)
        worker = next((w for w in self._workers if not w.running), None)
        if worker is None:
            self._workers.append(worker := self.crew.hire())
        worker.running = Running(task, time.monotonic())
        board.running.append(worker.running)
        worker.send(job)

    def _listen(self, worker: Process, board: GridState, retry_at: dict[str, float]) -> None:
        """Take one message of a worker that has something to say, or note its death."""
        running = worker.running
        try:
            kind, *content = worker.receive()
        except (EOFError, OSError):
            self._workers.remove(worker)
            kind, content = "died", [worker.end()]
        if kind == "progress":
            running.at = tuple(content)
            return
        if kind == "warn":
            self.watch.warn(f"{running.task.label}: {content[0]}")
            return
        worker.running = None
        board.running.remove(running)
        if kind == "died":
            name = running.task.config.hash
            self._lost[name] = self._lost.get(name, 0) + 1
            if self._lost[name] < self.crew.tries and not self.watch.stop():
                self.watch.warn(f"{running.task.label}: {content[0]}; another goes on from its last checkpoint.")
                board.waiting.insert(0, running.task)
                return
            kind, content = "error", [f"{content[0]}; the same command goes on from the run's last checkpoint."]
        if kind == "busy" and running.task.config.hash not in retry_at:
            # Perhaps a worker of a grid that was just killed, still in its last round.
            retry_at[running.task.config.hash] = time.monotonic() + BUSY_WAIT
            board.waiting.append(running.task)
            return
        finished = kind == "finished"
        outcome = Outcome(running.task, kind, content[0] if finished else None, time.monotonic() - running.began,
                          "" if finished else content[0])
        board.outcomes.append(outcome)
        self.watch.ended(outcome, board)


def _order(board: GridState, begun: set[str]) -> None:
    """Runs with a checkpoint first, then those whose like took longest, so that no long run is left for the end."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for outcome in board.outcomes:
        if outcome.status == "finished":
            seconds.setdefault(outcome.task.group, []).append(outcome.seconds)
    board.waiting.sort(key=lambda task: (task.config.hash not in begun,
                                         -fmean(seconds.get(task.group, [float("inf")]))))
