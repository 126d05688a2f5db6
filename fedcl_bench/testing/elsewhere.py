"""A pair in processes of its own, into which nothing has been loaded that a plugin could have left something in."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Mapping

from ..audit.honesty import examine, shortened
from ..data.source import locate
from ..data.settings import StreamSettings
from ..data.stream import Stream
from ..experiments.processes import ForkedProcess
from ..runs.checkpoints import load_progress, save_progress
from ..runs.config import RunConfig
from ..runs.registry import RECBOLE, Registry
from .properties import similarity, random_state
from .report import Inapplicable, Violated
from .trials import ROUNDS, Pair, finished, module_of, runs_differ


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
        if any(getattr(module_of(plugin.cls), plugin.cls.__name__, None) is not plugin.cls for plugin in plugins):
            raise Inapplicable("the class is defined inside a function: another process cannot import it")
        return cls(tuple(plugin.path for plugin in plugins), pair.method, pair.backbone, pair.kind, dict(pair.settings))

    def pair(self) -> Pair:
        registry = Registry(waiting={path: path.read_bytes() for path in self.files})
        return Pair(registry, self.method, self.backbone, self.kind, self.settings)

    def __call__(self) -> tuple[RunConfig, Stream]:
        pair, settings = self.pair(), StreamSettings()
        method, backbone = pair.plugins
        config = RunConfig(locate("ml-100k", None, settings), backbone, method, *pair.parts(), 0, "cpu", pair.registry)
        return shortened(config, ROUNDS), pair.stream


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
    """Another process, started from the middle of the run, comes to the same numbers."""
    middle = pair.points[len(pair.points) // 2]
    with tempfile.TemporaryDirectory() as folder:
        start, end = Path(folder) / "start.pt", Path(folder) / "end.pt"
        save_progress(start, middle, 0.0)
        process = ForkedProcess(go_on, SmallRun.of(pair), start, end)
        try:
            wrong = process.pipe.recv()
        except EOFError:
            wrong = process.end()
        if wrong:
            raise Violated(f"a new process failed: {wrong}")
        ended = load_progress(end, "cpu")[0]
    if mismatch := runs_differ(pair.points[-1], ended):
        raise Violated(f"a new process, from round {middle.round} of step {middle.step}: {mismatch}; does a class or "
                       f"module keep something?")
    return f"{similarity(pair.points[-1], ended)} from round {middle.round} of step {middle.step}"


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
