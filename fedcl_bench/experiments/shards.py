"""One run with its clients spread over workers, shards, each a node of ``federation/remote.py``.

All a run carries can be gathered from the shards at any point and dealt out to new ones. When a worker dies, its run
goes back to what was gathered last and does the rounds since then again, with the same numbers.
"""

from __future__ import annotations

import queue
import threading
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor

from .. import rng
from ..core import errors
from ..data.stream import Stream
from ..rng import Tables
from ..core.errors import UserError
from ..evaluation.metrics import DEFAULT, EvaluationSettings
from ..federation.loop import run
from ..federation.parts import Federation, FederationSettings, Progress
from ..federation.remote import Node, NodeClients, Server, ServerClients, sizes_of
from ..federation.remote_silos import NodeSilos, ServerSilos
from ..runs.config import RunConfig
from ..runs.memory_check import require
from ..runs.runner import Engine
from ..plugin.local_settings import LocalSettings
from .cluster import other_versions, versions
from .partition import check_divisible, divide, progress_part, stream_part, with_rows_of

TRIES = 4  # starts of the shards from one state before a run is given up
Request = tuple[str, Any]


class Died(Exception):
    """A worker, or the machine it was on, is gone."""


@dataclass(frozen=True)
class RunParts:
    """What a run is put together of, in plain data."""

    # Name, what stands for the code in hashes, and settings.
    method: tuple[str, int | str, dict[str, Any]]
    backbone: tuple[str, int | str, dict[str, Any]]
    metrics: tuple[tuple[str, int | str | None], ...]  # name and the same of those besides the metrics of every run
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    seed: int
    topology: str


@dataclass(frozen=True)
class ShardTask(RunParts):
    """What a shard is to do."""

    plugins: tuple[Path, ...]
    versions: str  # of the suite and of PyTorch (see ``cluster.versions``); a shard refuses to run with others
    stream: Stream  # the data of its clients
    names: Tensor  # their ids, or of domains their numbers
    clients: int  # of the whole run
    progress: Progress | None  # what the run carries of them; None: it begins

    def federation(self) -> Federation:
        """The parts of a run over the shard's clients. Raises UserError if a plugin or a version here is not the one
        that the task was made with."""
        from ..runs.registry import discover

        if wrong := other_versions(self.versions):
            raise UserError(wrong)
        registry = discover(self.plugins)

        def same(kind: str, name: str, numbers: object) -> type:
            plugin = registry.get(kind, name)
            if plugin.numbers != numbers:
                raise UserError(f"a worker has another version of {kind} '{name}' ({plugin.path}); bring it to every "
                                f"machine.")
            return plugin.cls

        backbone, method = (cls(cls.Settings(**settings)) for kind, (name, numbers, settings) in
                            (("backbone", self.backbone), ("method", self.method))
                            for cls in [same(kind, name, numbers)])
        backbone = method.trained_backbone(backbone, self.clients)
        extra = [same("metric", name, numbers)() for name, numbers in self.metrics]
        return Federation(self.stream, backbone, method, self.local, self.server, self.evaluation, self.seed,
                          metrics=(*DEFAULT, *extra), topology=self.topology)


def parts_of(config: RunConfig) -> tuple:
    """The fields of a run's ``RunParts``."""
    c = config
    plugins = [(plugin.name, plugin.numbers, {field.name: getattr(settings, field.name) for field in fields(settings)})
               for plugin, settings in ((c.method, c.method_settings), (c.backbone, c.backbone_settings))]
    return (*plugins, tuple((plugin.name, plugin.numbers) for plugin in c.metrics), c.local, c.server, c.evaluation,
            c.seed, c.stream.topology_in_effect)


class Shard:
    """Runs a task in a thread of its own and talks to the conductor in turns: one request, one answer.

    Requests are (kind, tables) of ``remote.MESSAGES``, and ("error", (class, text)). Tables are NumPy arrays. If the
    answer is the number of a step, the next request is ("progress", all that it had last in that step), and the answer
    comes after it. ``keep``: called with the progress after every round and step. ``error``: what it ended with, if
    something went wrong."""

    def __init__(self, threads: int = 1, keep: Callable[[Progress], None] = lambda progress: None):
        self._threads, self._keep = threads, keep
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._latest: Progress | None = None
        self._ended: Progress | None = None  # the step that it has just ended, as its server may be about to
        self.error: Exception | None = None

    def begin(self, task: ShardTask) -> Request:
        """Start; returns the first request."""
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return self._requests.get()

    def exchange(self, answer: Any) -> Request:
        """Take the answer to the last request; returns the next one."""
        self._answers.put(answer)
        return self._requests.get()

    def end(self) -> None:
        """Have its thread end, whatever it waits for."""
        self._answers.put(None)

    def _ask(self, kind: str, tables: Tables) -> Tables:
        with self._asking:  # an evaluation has several threads
            self._requests.put((kind, {name: table.numpy() for name, table in tables.items()}))
            while isinstance(answer := self._answers.get(), int):
                ended = self._ended is not None and self._ended.step == answer
                self._requests.put(("progress", self._ended if ended else self._latest))
            if answer is None:
                raise Died("the server has stopped")
            return {name: torch.tensor(values) for name, values in answer.items()}  # what is received is read-only

    def _run(self, task: ShardTask) -> None:
        torch.set_num_threads(self._threads)  # of this thread
        try:
            node = Node(self._ask, task.names, task.clients)
            federation, self._latest = replace(task.federation(), population=node), task.progress
            require(federation)
            silos = federation.cross_silo
            with nullcontext() if silos else rng.global_client_ids(task.names):
                for point in run(federation, task.progress, kind=NodeSilos if silos else NodeClients):
                    begins = self._latest is not None and self._latest.step < point.step
                    self._ended, self._latest = self._latest if begins else None, point
                    self._keep(point)
            self._ask("done", {})
        except Exception as error:
            self.error = error
            known = type(error).__name__ if isinstance(error, (UserError, errors.RunFailed)) else ""
            self._requests.put(("error", (known, str(error) if known else traceback.format_exc())))


class ShardNodes:
    """Shards, as ``ray_crew.ShardActors``, as nodes of a server (see ``remote.Nodes``)."""

    def __init__(self, group: Any):
        self._group = group
        self._open: dict[int, tuple[str, Tables]] = {}

    def receive(self) -> dict[int, tuple[str, Tables]]:
        for number, (kind, content) in self._group.receive().items():
            if kind == "error":
                known, text = content
                raise getattr(errors, known, UserError)(text) if known else RuntimeError(f"in a shard:\n{text}")
            self._open[number] = kind, {name: torch.tensor(values) for name, values in content.items()}
        return dict(self._open)

    def answer(self, answers: Mapping[int, Tables]) -> None:
        same: dict[int, Any] = {}  # what is the same for all stays one object
        for tables in answers.values():
            same.setdefault(id(tables), {name: table.numpy() for name, table in tables.items()})
        for number in answers:
            del self._open[number]
        self._group.answer({number: same[id(tables)] for number, tables in answers.items()})

    def gather(self, step: int) -> list[Progress]:
        """All that each has last had in a step; what they have asked stays open."""
        asked = self.receive()
        self._group.answer(dict.fromkeys(asked, step))
        return [progress for _, (_, progress) in sorted(self._group.receive().items())]


class Conductor(Engine):
    """Runs federations on shards; an engine of ``runner.execute``.

    Args:
        config: of the run; its settings name what the shards put together.
        start: puts shards to work and returns their group, as ``ray_crew.ShardActors``. May raise Died.
        note: called with a line of text when shards are started again.
    """

    def __init__(self, config: RunConfig, shards: int, plugins: tuple[Path, ...],
                 start: Callable[[list[ShardTask]], Any], note: Callable[[str], None] = lambda message: None):
        self._config, self._shards, self._plugins, self._start, self._note = config, shards, plugins, start, note
        self._group: Any = None

    def check(self, federation: Federation) -> None:
        """Raise UserError if its clients cannot be spread; memory is for each shard to look at."""
        check_divisible(federation)
        divide(federation.stream, self._shards)

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        """As ``federation.run``, but what it yields has clients' rows as they started until ``complete`` gathers them.
        Raises UserError if the run cannot be spread, or its workers die again and again."""
        self._federation, self._names = federation, divide(federation.stream, self._shards)
        self._parts = [stream_part(federation.stream, names) for names in self._names]
        self._gathered, self._seen, self._deaths = (0, progress), 0, 0  # how many points are seen, and all there was
        self._begin()
        try:
            while (latest := self._until(self._seen + 1)) is not None:
                self._seen += 1
                yield latest
        finally:
            self._close()

    def complete(self, progress: Progress) -> Progress:
        while self._gathered[0] < self._seen:
            try:
                self._gathered = self._seen, with_rows_of(progress, self._nodes.gather(progress.step), self._names)
                self._deaths = 0
            except Died as death:
                self._begin(death)
                progress = self._until(self._seen)
        return self._gathered[1]

    def _begin(self, death: Died | None = None) -> None:
        """Be about to start the shards with what was gathered last."""
        self._close()
        if death is not None:
            self._deaths += 1
            if self._deaths >= TRIES:
                raise UserError(f"--ray: shards were lost {TRIES} times in a row, the last time as {death}.\n"
                                f"The same command goes on from the run's last checkpoint.")
            self._note(f"{death}; starting the shards again, from the last state gathered.")
        self._at, progress = self._gathered
        self._points = self._served(progress)

    def _served(self, progress: Progress | None) -> Iterator[Progress]:
        """Start the shards and be their server."""
        self._group = self._start([self._task(part, names, progress)
                                   for part, names in zip(self._parts, self._names)])
        self._nodes = ShardNodes(self._group)
        f = replace(self._federation, stream=sizes_of(self._federation.stream),
                    population=Server(self._nodes, self._names))
        yield from run(f, progress, kind=ServerSilos if f.cross_silo else ServerClients)

    def _until(self, number: int) -> Progress | None:
        """Go on to the point of this number, the next one at least; None if the run has ended."""
        while True:
            try:
                point = next(self._points, None)
                self._at += 1
                if point is None or self._at >= number:
                    return point
            except Died as death:
                self._begin(death)

    def _task(self, stream: Stream, names: Tensor, progress: Progress | None) -> ShardTask:
        return ShardTask(*parts_of(self._config), self._plugins, versions(), stream, names,
                         self._federation.stream.steps[-1].n_users,
                         progress and progress_part(progress, names, self._federation.stream.domains))

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
