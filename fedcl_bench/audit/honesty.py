"""The honesty run: the same short run on the same data in worlds that differ in what somebody must not know.

Each world is a process of its own, with a folder of its own for what it writes, and runs as any run does. What clients
and server do is written down after every round and compared with the world as it is (see ``recording.py``).
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ..core.errors import RunFailed, UserError
from ..data.datasets import load_stream
from ..data.stream import Stream
from ..experiments.processes import ForkedProcess
from ..experiments.worker import Job
from ..federation.loop import clients_of, run
from ..federation.parts import Federation, Progress
from ..runs.config import RunConfig, make_config
from ..runs.plugin_errors import named
from ..runs.registry import discover
from ..runs.runner import Engine, Interrupted, RunOptions, Watch, execute
from .other_worlds import NEVER, WORLDS
from .outside import Outside
from .recording import Tape, loaded, recorded

STEADY_EPS = 1e-3  # of Adam
AS_IT_IS, AGAIN = list(WORLDS)[:2]
ROUNDING = 1e-8  # relative and absolute, where other clients train beside a client
_NO_HOOKS = ("__init__", "check", "uploads", "notes", "privacy", "downloads_previous_model", "score", "module",
             "overrides")


@dataclass(frozen=True)
class WorldVerdict:
    """Whether nobody has noticed what differs in a world; None: it was not tried."""

    world: str
    differs: str
    honest: bool | None
    evidence: str = ""
    hooks: tuple[str, ...] = ()


Run = Callable[[], tuple[RunConfig, Stream]]  # how a process makes a run and its stream


@dataclass(frozen=True)
class RealRun:
    """A run on its own data, with few rounds in every block."""

    job: Job
    rounds: int

    def __call__(self) -> tuple[RunConfig, Stream]:
        job = self.job
        config = make_config(discover(job.plugins), job.method, job.backbone, job.dataset, job.seed, job.layers,
                             job.data_dir, job.device)
        return shortened(config, self.rounds), load_stream(config.source, config.stream, config.features)


@dataclass(frozen=True)
class WorldRun:
    """A world's run in plain data: what ``play`` makes a process do."""

    run: Run
    words: tuple[str, ...]  # of the command that it is
    threads: int | None
    root: Path  # folder of all worlds' events and files
    world: str = AS_IT_IS
    muted: tuple[str, ...] = ()  # a hook that does nothing, of ``method`` or ``backbone``
    until: int = NEVER  # number of the last event

    @property
    def folder(self) -> Path:
        return self.root / "-".join([str(list(WORLDS).index(self.world)), *self.muted, str(self.until)])

    @property
    def as_it_is(self) -> "WorldRun":
        return replace(self, world=AS_IT_IS)


def shortened(config: RunConfig, rounds: int) -> RunConfig:
    """A run with few rounds in which what a client does follows from its own training items and what it is sent: the
    same take part in every round, and negatives, candidates, new users' lists and new items' rows ask for nobody else's
    data. In double precision and with another eps, as Adam makes whole steps of what is only rounding in a gradient:
    a penalty that is 0 at the start, as FedProx's, multiplies it from step to step."""
    server = replace(config.server, rounds=rounds, patience=0, precision="float64", client_ratio=1.0,
                     availability="always", client_dropout=0.0,
                     cold_start=config.server.cold_start.replace("popularity", "fold_in"),
                     cold_items="untrained" if (cold := config.server.cold_items) in ("popularity", "fold_in") else
                     cold)
    return replace(config, server=server, local=replace(config.local, negative_pool="untrained", adam_eps=STEADY_EPS),
                   evaluation=replace(config.evaluation, candidates="all"))


# ------------------------------------------------------------------------------------------------------ in the process


class _Taped(Engine):
    def __init__(self, tape: Tape):
        self.tape = tape

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        f = replace(federation, metrics=(*federation.metrics, self.tape.listed))
        for progress in run(f, progress, kind=recorded(clients_of(f), self.tape)):
            if progress.within is None:
                self.tape.end(progress)
            yield progress


def play(pipe: Connection, part: WorldRun) -> None:
    """Do a world's run. Sends ("progress", text) and at the end one of ("done", what plugins did outside, ...),
    ("skipped",), ("failed", text)."""
    try:
        with named():
            pipe.send(_played(part, lambda text: pipe.send(("progress", text))))
    except Exception as error:  # of a plugin, too
        kind = "" if isinstance(error, (UserError, RunFailed)) else f"{type(error).__name__}: "
        pipe.send(("failed", f"{kind}{error}"))


def _played(part: WorldRun, tell: Callable[[str], None]) -> tuple[str, ...]:
    world, work = WORLDS[part.world], part.folder / "work"
    sys.argv, os.environ["TMPDIR"], tempfile.tempdir = list(part.words), str(work), None
    work.mkdir()
    torch.set_num_threads(part.threads or torch.get_num_threads())
    config, stream = part.run()
    if (config.method.cls.gives_up.keys() & set(world.shows)
            or not world.applies(stream, config.stream.topology_in_effect == "central")):
        return ("skipped",)
    data = [each.path.resolve() for each in config.source.parts or [config.source]]
    os.chdir(work)
    os.environ.update(HOME=str(work), XDG_CACHE_HOME=str(work / ".cache"))
    stream, since = world.alter(stream, torch.Generator().manual_seed(config.seed))
    for kind, hook in [part.muted] if part.muted else []:
        cls = getattr(config, kind).cls
        setattr(cls, hook, getattr(_base(cls), hook))
    tape = Tape(part.folder, since, stream.domains, world.hears, part.as_it_is.folder)
    watch = Watch(lambda _, progress: tell(f"block {progress.step}, round {progress.round}"),
                  stop=lambda: tape.number > part.until)
    folders = [plugin.path.parent for plugin in (config.method, config.backbone)]
    with Outside(folders, part.folder, data) as outside:
        with suppress(Interrupted):  # all events that were asked for are over
            execute(config, lambda: stream, part.folder / "results", watch, RunOptions(engine=_Taped(tape)))
    return "done", *outside.seen


def _base(cls: type) -> type:
    """The suite's class that a plugin is made from."""
    return next(each for each in cls.__mro__ if each.__module__.startswith("fedcl_bench.plugin."))


# ------------------------------------------------------------------------------------------------------- in the parent


@dataclass
class Honesty:
    """The worlds of one run."""

    config: RunConfig
    part: WorldRun  # the run as it is
    tell: Callable[[str], None] = lambda text: None  # shows what is being done
    stop: Callable[[], bool] = lambda: False  # whether to end
    _done: dict[Path, tuple[str, ...]] = field(default_factory=dict)

    def verdicts(self) -> Iterator[WorldVerdict]:
        """On each world in turn. Raises UserError if the run fails as it is, Interrupted."""
        state, *text = self._play(self.part)
        if state != "done":
            raise UserError("".join(text))
        for name, world in list(WORLDS.items())[1:]:
            honest, *evidence = self._verdict(replace(self.part, world=name))
            yield WorldVerdict(name, world.differs, honest, *evidence)
            if name == AGAIN and not honest:
                return
        seen = list(dict.fromkeys(line for state, *lines in self._done.values() if state == "done" for line in lines))
        yield WorldVerdict("outside", "nothing", not seen, "; ".join(seen) or "no look at files, frames or objects")

    def _verdict(self, part: WorldRun) -> tuple[Any, ...]:
        """``honest``, ``evidence`` and ``hooks`` of a world's verdict."""
        state, *text = self._play(part)
        if state == "skipped":
            return None, "the stream has nothing of it, or the method gives it up"
        if state == "failed":
            return False, f"fails: {text[0]}"
        if (found := self._difference(part)) is None:
            return True, "all the same"
        number, evidence = found
        if part.world == AGAIN:
            return None, f"{evidence} from one run to the next, so that nothing can be said"
        return False, evidence, tuple(self._culprits(replace(part, until=number)))

    def _play(self, part: WorldRun) -> tuple[str, ...]:
        """Run a world, unless it was; returns the last message of ``play``."""
        if part.folder not in self._done:
            part.folder.mkdir()
            label = " without ".join([part.world, *part.muted[1:]])
            self._done[part.folder] = self._last_message(ForkedProcess(play, part), label)
        return self._done[part.folder]

    def _last_message(self, process: ForkedProcess, label: str) -> tuple[str, ...]:
        try:
            while not self.stop():
                if process.pipe.poll(0.2):
                    kind, *text = process.receive()
                    if kind != "progress":
                        return kind, *text
                    self.tell(f"{label}: {text[0]}")
        except EOFError:
            return "failed", process.end()
        finally:
            if not process.pipe.closed:
                process.end(kill=True)  # it has nothing more to say
        raise Interrupted("stopped; nothing is kept of it.")

    def _difference(self, part: WorldRun) -> tuple[int, str] | None:
        """The first event in which somebody has noticed, and what differs in it."""
        tolerance = ROUNDING if "" in WORLDS[part.world].hears else 0.0
        for number in range(len(list(part.folder.glob("*.pt")))):
            a, b = (loaded(each.folder / f"{number}.pt") for each in (part.as_it_is, part))
            for name, theirs in b["tables"].items():
                kept = WORLDS[part.world].kept if name[0].startswith("list") else None
                if name in a["tables"] and (how := _differs(*a["tables"][name], *theirs, b["same"], tolerance, kept)):
                    return number, f"{a['where']}: {name[0]} {how}"
        return None

    def _culprits(self, part: WorldRun) -> Iterator[str]:
        """The plugins' hooks without which nothing differs, with file and line: the method's, or else the backbone's;
        or else a class."""
        classes = {kind: getattr(self.config, kind).cls for kind in ("method", "backbone")}
        for kind, cls in classes.items():
            found = [hook for hook in _hooks(cls) if self._is_silent(replace(part, muted=(kind, hook)))]
            yield from (f"{hook} ({place(getattr(cls, hook))})" for hook in found)
            if found:
                return
        cls = classes["method" if _hooks(classes["method"]) else "backbone"]
        yield f"{cls.__name__} ({place(cls)})"

    def _is_silent(self, part: WorldRun) -> bool:
        """Whether nothing differs without a hook, or without one of a method nothing runs."""
        states = {self._play(each)[0] for each in (part.as_it_is, part)}
        return self._difference(part) is None if states == {"done"} else part.muted[0] == "method"


def _hooks(cls: type) -> list[str]:
    """The names of functions that a plugin has in place of the suite's, and can do without."""
    base = _base(cls)
    return [name for name, own in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in _NO_HOOKS
            and inspect.isfunction(suite := getattr(base, name, None)) and own is not suite]


def place(code: Any) -> str:
    """Where code stands."""
    return f"{Path(inspect.getsourcefile(code) or '?').name}:{inspect.getsourcelines(code)[1]}"


def _differs(users: Tensor, x: Tensor, others: Tensor, y: Tensor, same: Tensor, tolerance: float,
             kept: float | None) -> str | None:
    """How a table differs, and whose row most; None if it does not. ``users``, ``others``: whose rows these are in two
    worlds, empty: nobody's; ``same``: who has the same data in both, bool of shape (all users,); ``kept``: of rankings,
    the share of their items that must be there in both."""
    if len(users) or len(others):
        mine, theirs = (same[a] & torch.isin(a, b) for a, b in ((users, others), (others, users)))
        x, y, users = x[mine], y[theirs], users[mine]
    if x.shape != y.shape:
        return "has another size"
    if not len(x):
        return None
    if kept is not None:
        beyond = kept * x.shape[1] - 1e-9 - (x[:, :, None] == y[:, None, :]).any(2).sum(1)
    else:
        beyond = ((x - y).abs() - tolerance * (1.0 + x.abs().amax(0))).clamp(min=0.0).sum(1)
    row = int(beyond.argmax())
    whose = f"of client {int(users[row])} " if len(users) else f"in row {row} " if len(x) > 1 else ""
    return f"{whose}differs" if float(beyond[row]) > 0.0 else None


def examine(config: RunConfig, run: Run, words: tuple[str, ...] = ("run_bench.py",), threads: int | None = None,
            tell: Callable[[str], None] = lambda text: None, stop: Callable[[], bool] = lambda: False
            ) -> Iterator[WorldVerdict]:
    """The verdicts on a run of the command line ``words``; what its worlds write is gone at the end. PyTorch has so
    many ``threads`` in each process; ``tell`` shows what is being done, ``stop`` says whether to end."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield from Honesty(config, WorldRun(run, words, threads, Path(folder)), tell, stop).verdicts()
