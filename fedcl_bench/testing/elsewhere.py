"""A pair in processes of its own, into which nothing has been loaded that a plugin could have left something in; and
with its clients apart from their server."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Mapping

import torch
from torch import Tensor

from ..audit.honesty import examine, shortened
from ..data.source import locate
from ..data.settings import StreamSettings
from ..data.stream import Stream
from ..core.errors import UserError
from ..experiments.partition import check_divisible, divide, stream_part, with_rows_of
from ..experiments.processes import ForkedProcess
from ..experiments.shards import Request, Shard, ShardNodes
from ..federation.loop import run as run_federation
from ..federation.parts import Federation, Progress
from ..federation.remote import Server, ServerClients, sizes_of
from ..runs.checkpoints import load_progress, save_progress
from ..runs.config import RunConfig
from ..runs.registry import RECBOLE, discover
from .properties import similarity, random_state
from .report import Inapplicable, Violated
from .trials import ROUNDS, Pair, finished, runs_differ, where

PARTS = 2  # nodes that have a pair's clients
_APART = 1e-7  # sums over nodes are rounded otherwise, and methods divide by small deviations


@dataclass(frozen=True)
class SmallRun:
    """A pair in plain data; ``files`` are those of its plugins. Called, it is the run and its stream."""

    files: tuple[Path, ...]
    method: str
    backbone: str
    kind: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, pair: Pair) -> "SmallRun":
        plugins = [plugin for plugin in pair.plugins if not plugin.name.startswith(RECBOLE)]  # made by their names
        if any(getattr(sys.modules[cls.__module__], cls.__name__, None) is not cls for cls in (
                plugin.cls for plugin in plugins)):
            raise Inapplicable("the class is defined inside a function: another process cannot import it")
        return cls(tuple(plugin.path for plugin in plugins), pair.method, pair.backbone, pair.kind, dict(pair.settings))

    def pair(self) -> Pair:
        registry = discover()  # which imports plugins of installed packages as parts of these
        packaged = {plugin.path for plugin in registry.loaded.values()}
        registry.waiting = {path: path.read_bytes() for path in self.files if path not in packaged}
        return Pair(registry, self.method, self.backbone, self.kind, self.settings)

    def __call__(self) -> tuple[RunConfig, Stream]:
        pair = self.pair()
        return shortened(pair.config(source=locate("ml-100k", None, StreamSettings())), ROUNDS), pair.stream


def go_on(pipe: Connection, run: SmallRun, start: Path, end: Path) -> None:
    """Resume a run. Sends what went wrong, if something did."""
    try:
        with random_state(123):
            progress = finished(run.pair().federation(), load_progress(start, "cpu")[0])
        save_progress(end, progress, 0.0)
        pipe.send("")
    except Exception as error:  # of a plugin, too
        pipe.send(f"{type(error).__name__}: {error}")


def a_new_process(pair: Pair) -> str:
    """Another process comes to the same numbers, from the middle of the run and from before its last step."""
    last = len(pair.stream.steps) - 1
    starts = (pair.points[len(pair.points) // 2], *([pair.after_step(last - 1)] if last else []))
    return "; ".join(_goes_on(pair, start) for start in starts)


def _goes_on(pair: Pair, progress: Progress) -> str:
    """A process of its own resumes the run and comes to the same numbers; returns the evidence."""
    with tempfile.TemporaryDirectory() as folder:
        start, end = Path(folder) / "start.pt", Path(folder) / "end.pt"
        save_progress(start, progress, 0.0)
        process = ForkedProcess(go_on, SmallRun.of(pair), start, end)
        try:
            wrong = process.pipe.recv()
        except EOFError:
            wrong = process.end()
        if wrong:
            raise Violated(f"a new process failed: {wrong}")
        ended = load_progress(end, "cpu")[0]
    if mismatch := runs_differ(pair.points[-1], ended):
        raise Violated(f"a new process, from round {progress.round} of step {progress.step}: {mismatch}; does a class "
                       f"or module keep something?")
    return f"{similarity(pair.points[-1], ended)} from round {progress.round} of step {progress.step}"


def worlds_of_their_own(pair: Pair) -> str:
    """Whole runs, a process each, in worlds that differ in what somebody must not know: `run --honest` on the small
    stream."""
    run = SmallRun.of(pair)
    verdicts = list(examine(run()[0], run, threads=1))
    for verdict in verdicts:
        if verdict.honest is False:
            where = f" ({', '.join(verdict.hooks)})" if verdict.hooks else ""
            raise Violated(f"{verdict.world}, in which {verdict.differs} differ: {verdict.evidence}{where}")
    return f"the same in {sum(verdict.honest is True for verdict in verdicts)} worlds, a process each"


IN_PROCESSES = [("a new process", a_new_process), ("worlds of their own", worlds_of_their_own)]


class _Parts:
    """Parts of a pair's clients, each a shard in a thread of this process; ``ends``: the last progress of each."""

    def __init__(self, pair: Pair, names: list[Tensor]):
        self.ends = [Progress() for _ in names]
        self._shards = [Shard(torch.get_num_threads(), partial(self.ends.__setitem__, number))
                        for number in range(len(names))]
        self._requests = {number: shard.begin(_task(pair, part))
                          for number, (shard, part) in enumerate(zip(self._shards, names))}

    def receive(self) -> dict[int, Request]:
        for shard in self._shards:
            if shard.error is not None:
                raise shard.error
        requests, self._requests = self._requests, {}
        return requests

    def answer(self, answers: Mapping[int, Any]) -> None:
        for number, answer in answers.items():
            self._requests[number] = self._shards[number].exchange(answer)

    def close(self) -> None:
        for shard in self._shards:
            shard.end()


def _task(pair: Pair, names: Tensor) -> Any:
    """What a ``Shard`` is to do with some of a pair's clients."""
    def federation() -> Federation:
        return replace(pair.federation(), stream=stream_part(pair.stream, names))
    return SimpleNamespace(names=names, clients=pair.stream.steps[-1].n_users, progress=None, federation=federation)


def clients_elsewhere(pair: Pair) -> str:
    """Clients that are apart from their server, as real ones are, come to the same numbers: what passes between them is
    all that hooks need."""
    whole = pair.federation()
    try:
        check_divisible(whole, "clients elsewhere")
    except UserError as refused:
        raise Inapplicable(str(refused).partition("\n")[0]) from None
    names = divide(pair.stream, PARTS, "clients elsewhere")
    parts, mismatch = _Parts(pair, names), None
    try:
        f = replace(whole, stream=sizes_of(pair.stream), population=Server(ShardNodes(parts), names))
        for progress in run_federation(f, kind=ServerClients):
            pass
    except Exception as error:  # of a plugin, too
        mismatch = where(error, pair.plugins[0].path)
    finally:
        parts.close()
    if mismatch := mismatch or runs_differ(pair.points[-1], with_rows_of(progress, parts.ends, names), _APART):
        raise Violated(f"apart from their server, as real clients are: {mismatch}. Of server_state a client's hook has "
                       f"what begin_step and end_step make and what `broadcasts` names, and a server's hook has what "
                       f"clients upload")
    return f"the same with {PARTS} nodes of clients apart from the server"
