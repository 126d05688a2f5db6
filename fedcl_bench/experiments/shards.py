"""One run with its clients spread over workers, shards: only sums travel in a round, and private rows stay.

Every shard runs the ordinary loop (``federation.run``) on its own clients, with its own copy of what is public and of
the server. Where the loop needs something of all clients (see ``Population`` in ``federation/server.py``), the shard
hands out its part and waits; the conductor adds the parts up in the order of the shards and hands the same sums to
all. So the shards stay in step, and a message is never about one client but for its metrics.

All a run carries can be gathered from the shards at any point and dealt out to new ones. When a worker dies, its run
goes back to what was gathered last and does the rounds since then again, with the same numbers.
"""

from __future__ import annotations

import queue
import threading
import traceback
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..core import errors
from ..data.stream import Step, Stream
from ..rng import Tables
from ..core.errors import UserError
from ..evaluation.metrics import DEFAULT, EvaluationSettings
from ..evaluation.ranking import UserScores
from ..federation.client_sampling import Attendance, Participants
from ..federation.loop import run
from ..federation.parts import Federation, FederationSettings, Progress
from ..federation.server import Population
from ..runs.config import RunConfig
from ..runs.memory_check import require
from ..runs.runner import Engine
from ..plugin.local_settings import LocalSettings
from .cluster import other_versions, versions
from .partition import check_divisible, divide, outline, progress_part, stream_part, whole_progress

TRIES = 4  # starts of the shards from one state before a run is given up
GATHER = "gather"  # the conductor's answer to an outline: the whole progress, please
Request = tuple[str, Any]


class Died(Exception):
    """A worker, or the machine it was on, is gone."""


class Apart(Population):
    """Some clients of a run; ``ask`` hands a request to the conductor and returns its answer."""

    def __init__(self, ask: Callable[[str, Any], Any]):
        self._ask = ask

    def participants(self, step: Step, attendance: Attendance, seed: int, round_: int) -> Participants:
        users, count, dropped = self._ask("participants", (step.index, round_))
        return Participants(torch.tensor(users), count, dropped)

    def all_reduce(self, here: Tables) -> Tables:
        answer = self._ask("all_reduce", {name: table.numpy() for name, table in here.items()})
        return {name: torch.tensor(values) for name, values in answer.items()}  # a copy: what is received is read-only

    def mean(self, here: UserScores, metric: str) -> float:
        return self._ask("mean", (here.users.numpy(), here.values[metric].numpy()))


@dataclass(frozen=True)
class ShardTask:
    """What a shard is to do, in plain data.

    Attributes:
        method, backbone: name, what stands for the code in hashes, and settings.
        metrics: name and the same of those besides the metrics of every run.
        versions: of the suite and of PyTorch (see ``cluster.versions``); a shard refuses to run with others.
        stream: the data of its clients. names: their ids.
        progress: what the run carries of them; None: it begins.
    """

    method: tuple[str, str, dict[str, Any]]
    backbone: tuple[str, str, dict[str, Any]]
    metrics: tuple[tuple[str, str], ...]
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    seed: int
    plugins: tuple[Path, ...]
    versions: str
    stream: Stream
    names: Tensor
    progress: Progress | None

    def federation(self) -> Federation:
        """The parts of a run over the shard's clients.

        Raises:
            UserError: if a plugin or a version here is not the one that the task was made with.
        """
        from ..runs.registry import discover

        if wrong := other_versions(self.versions):
            raise UserError(wrong)
        registry = discover(self.plugins)

        def same(kind: str, name: str, numbers: object) -> type:
            plugin = registry.get(kind, name)
            if plugin.numbers != numbers:
                raise UserError(f"a worker has another version of {kind} '{name}' ({plugin.path}); bring it to every "
                                f"machine of the cluster.")
            return plugin.cls

        made = [cls(cls.Settings(**settings)) for kind, (name, numbers, settings) in
                (("backbone", self.backbone), ("method", self.method)) for cls in [same(kind, name, numbers)]]
        extra = [same("metric", name, numbers)() for name, numbers in self.metrics]
        return Federation(self.stream, *made, self.local, self.server, self.evaluation, self.seed,
                          metrics=(*DEFAULT, *extra))


class Shard:
    """Runs a task in a thread of its own and talks to the conductor in turns: one request, one answer.

    Requests are ("all_reduce" | "mean" | "participants", content), ("outline", what displays look at) after every round
    and step, ("progress", all of it) if the answer to that is ``GATHER``, ("error", (class, text)) and ("done", None).
    """

    def __init__(self, threads: int = 1):
        self._threads = threads
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self, task: ShardTask) -> Request:
        """Start; returns the first request."""
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return self._requests.get()

    def exchange(self, answer: Any) -> Request:
        """Take the answer to the last request; returns the next one."""
        self._answers.put(answer)
        return self._requests.get()

    def _ask(self, kind: str, content: Any) -> Any:
        self._requests.put((kind, content))
        return self._answers.get()

    def _run(self, task: ShardTask) -> None:
        torch.set_num_threads(self._threads)  # of this thread
        try:
            federation = replace(task.federation(), population=Apart(self._ask))
            require(federation)
            with rng.global_client_ids(task.names):
                for progress in run(federation, task.progress):
                    if self._ask("outline", outline(progress)) == GATHER:
                        self._ask("progress", progress)
            self._requests.put(("done", None))
        except Exception as error:
            known = type(error).__name__ if isinstance(error, (UserError, errors.RunFailed)) else ""
            self._requests.put(("error", (known, str(error) if known else traceback.format_exc())))


class Group(Protocol):
    """Shards that have begun, wherever they are."""

    requests: list[Request]

    def answer(self, answers: Sequence[Any]) -> None:
        """Answer all requests, and wait for the next ones. Raises Died."""

    def close(self) -> None:
        """End all shards, in whatever state they are."""


class Conductor(Engine):
    """Runs federations on shards; an engine of ``runner.execute``.

    Args:
        config: of the run; its settings name what the shards put together.
        shards: how many.
        start: puts shards to work and returns their group. May raise Died.
        note: called with a line of text when shards are started again.
    """

    def __init__(self, config: RunConfig, shards: int, plugins: tuple[Path, ...],
                 start: Callable[[list[ShardTask]], Group], note: Callable[[str], None] = lambda message: None):
        self._config, self._shards, self._plugins, self._start, self._note = config, shards, plugins, start, note
        self._group: Group | None = None

    def check(self, federation: Federation) -> None:
        """Raise UserError if its method or backbone needs more than sums; memory is for each shard to look at."""
        check_divisible(federation)

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        """As ``federation.run``, but what it yields has no tables, tests and analysis until ``whole`` gathers them.

        Raises:
            UserError: if the run cannot be spread, or its workers die again and again.
        """
        self._stream, self._names = federation.stream, divide(federation.stream, self._shards)
        self._parts = [stream_part(federation.stream, names) for names in self._names]
        self._gathered, self._seen, self._deaths = (0, progress), 0, 0  # how many outlines are seen, and all there was
        try:
            self._begin()
            while (latest := self._until(self._seen + 1)) is not None:
                self._seen += 1
                yield latest
        finally:
            self._close()

    def whole(self, progress: Progress) -> Progress:
        while self._gathered[0] < self._seen:
            try:
                parts = self._answer([GATHER] * self._shards)
                self._gathered = self._seen, whole_progress([part for _, part in parts], self._names, self._behind)
                self._deaths = 0
            except Died as death:
                self._begin(death)
                self._until(self._seen)
        return self._gathered[1]

    def _begin(self, death: Died | None = None) -> None:
        """Start the shards with what was gathered last."""
        while True:
            self._close()
            if death is not None:
                self._deaths += 1
                if self._deaths >= TRIES:
                    raise UserError(f"--ray: shards were lost {TRIES} times in a row, the last time as {death}.\n"
                                    f"The same command goes on from the run's last checkpoint.")
                self._note(f"{death}; starting the shards again, from the last state gathered.")
            self._at, progress = self._gathered
            self._behind = progress or Progress()
            tasks = [self._task(part, names, progress) for part, names in zip(self._parts, self._names)]
            try:
                self._group = self._start(tasks)
                self._requests, self._fresh = self._checked(self._group.requests), True
                return
            except Died as again:
                death = again

    def _task(self, stream: Stream, names: Tensor, progress: Progress | None) -> ShardTask:
        c = self._config
        plugins = [(plugin.name, plugin.numbers, {field.name: getattr(settings, field.name)
                                                 for field in fields(settings)})
                   for plugin, settings in ((c.method, c.method_settings), (c.backbone, c.backbone_settings))]
        metrics = tuple((plugin.name, plugin.numbers) for plugin in c.metrics)
        return ShardTask(*plugins, metrics, c.local, c.server, c.evaluation, c.seed, self._plugins, versions(), stream,
                         names, progress and progress_part(progress, names))

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _until(self, number: int) -> Progress | None:
        """Go on until so many outlines are seen, at least one more; returns the last, or None if the run has ended."""
        while True:
            try:
                while self._at < number:
                    kind, content = self._next()
                    if kind == "done":
                        return None
                    self._at += 1
                return content
            except Died as death:
                self._begin(death)

    def _next(self) -> Request:
        """Answer requests until they are outlines, or the run has ended; returns the first shard's."""
        if not self._fresh:
            self._answer([None] * self._shards)
        self._fresh = False
        while (kind := self._requests[0][0]) not in ("outline", "done"):
            self._answer(getattr(self, f"_{kind}")([content for _, content in self._requests]))
        return self._requests[0]

    def _answer(self, answers: Sequence[Any]) -> list[Request]:
        self._group.answer(answers)
        self._requests = self._checked(self._group.requests)
        return self._requests

    def _checked(self, requests: list[Request]) -> list[Request]:
        """The requests, unless one is an error."""
        for kind, content in requests:
            if kind == "error":
                known, text = content
                raise getattr(errors, known, UserError)(text) if known else RuntimeError(f"in a shard:\n{text}")
        assert len({kind for kind, _ in requests}) == 1, "the shards are out of step"
        return requests

    # Answers, given what the shards have said, in their order.

    def _all_reduce(self, parts: list[dict[str, np.ndarray]]) -> list[Any]:
        total = {name: np.array(values) for name, values in parts[0].items()}
        for part in parts[1:]:
            for name, values in part.items():
                total[name] += values
        return [total] * len(parts)

    def _mean(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> list[Any]:
        """Over the users in the order of their ids, so that it is rounded as in one process."""
        order = torch.cat([names[torch.tensor(users)] for names, (users, _) in zip(self._names, parts)]).argsort()
        values = torch.cat([torch.tensor(values) for _, values in parts])[order]
        return [float(values.mean())] * len(parts)

    def _participants(self, parts: list[tuple[int, int]]) -> list[Any]:
        step, round_ = parts[0]
        users, count, dropped = self._config.server.attendance.of(self._stream.steps[step], self._config.seed, round_)
        return [(torch.isin(names, users).nonzero().flatten().numpy(), count, dropped) for names in self._names]
