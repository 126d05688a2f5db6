"""The honesty run: the same short run on the same data in worlds that differ in what somebody must not know.

Each world is a process of its own, with a folder of its own for what it writes, and runs as any run does. What clients
and server do is written down after every round and compared with the world as it is (see ``recording.py``).
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ..core.errors import RunFailed, UserError
from ..data.datasets import load_stream
from ..experiments.processes import Process
from ..experiments.worker import Job
from ..federation.loop import clients_of, run
from ..federation.parts import Federation, Progress
from ..plugin.method import Method
from ..runs.config import RunConfig, make_config
from ..runs.plugin_errors import named
from ..runs.registry import discover
from ..runs.runner import Engine, Interrupted, Watch, execute
from .other_worlds import WORLDS
from .outside import Outside
from .recording import Ended, Tape, recorded

AS_IT_IS, AGAIN = list(WORLDS)[:2]
ROUNDING = {"float64": 1e-8, "float32": 1e-4}  # relative, where other clients train beside a client
_ALIKE = {"test users": "test items", "later blocks": "other clients"}  # mostly noticed by the same hooks
_NO_HOOKS = ("__init__", "check", "uploads", "notes", "privacy", "downloads_previous_model", "score", "overrides")


@dataclass(frozen=True)
class Verdict:
    """Whether nobody has noticed what differs in a world; None: it was not tried."""

    world: str
    differs: str
    honest: bool | None
    evidence: str = ""
    hooks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Part:
    """A world's run in plain data: what ``play`` makes a process do.

    Attributes:
        words: of the command that it is.
        folder: of its events and files; heard: of the events of the world as it is.
        muted: a hook that does nothing, of ``method`` or ``backbone``.
        until: number of the last event.
    """

    job: Job
    words: tuple[str, ...]
    world: str
    rounds: int
    threads: int | None
    folder: Path
    heard: Path
    muted: tuple[str, str] | None = None
    until: int | None = None


def shortened(config: RunConfig, rounds: int) -> RunConfig:
    """A run with few rounds in which what a client does follows from its own training items and what it is sent: the
    same take part in every round, and negatives, candidates and new users' lists ask for nobody else's data."""
    server = replace(config.server, rounds=rounds, patience=0, client_ratio=1.0, availability="always",
                     client_dropout=0.0, cold_start=config.server.cold_start.replace("popularity", "fold_in"))
    return replace(config, server=server,
                   local=replace(config.local, negative_pool="untrained"),
                   evaluation=replace(config.evaluation, candidates="all"))


# ------------------------------------------------------------------------------------------------------ in the process


class _Taped(Engine):
    """Runs with a tape."""

    def __init__(self, tape: Tape):
        self.tape = tape

    def run(self, federation: Federation, progress: Progress | None) -> Iterator[Progress]:
        self.tape.metrics = len(federation.topk)
        f = replace(federation, metrics=(*federation.metrics, self.tape.listed))
        return run(f, progress, kind=recorded(clients_of(f), self.tape))


def play(pipe: Connection, part: Part) -> None:
    """Do a world's run. Sends ("progress", text) and at the end one of ("done", what plugins did outside, ...),
    ("skipped",), ("failed", text)."""
    for name in ("tmp", "home", "work"):
        (part.folder / name).mkdir()
    sys.argv, os.environ["TMPDIR"], tempfile.tempdir = list(part.words), str(part.folder / "tmp"), None
    torch.set_num_threads(part.threads or torch.get_num_threads())
    try:
        with named():
            pipe.send(_played(part, lambda text: pipe.send(("progress", text))))
    except Exception as error:  # of a plugin, too
        kind = "" if isinstance(error, (UserError, RunFailed)) else f"{type(error).__name__}: "
        pipe.send(("failed", f"{kind}{error}"))


def _played(part: Part, tell: Callable[[str], None]) -> tuple[str, ...]:
    job, world = part.job, WORLDS[part.world]
    config = shortened(make_config(discover(job.plugins), job.method, job.backbone, job.dataset, job.seed, job.layers,
                                   job.data_dir, job.device), part.rounds)
    stream = load_stream(config.source, config.stream, config.features)
    if not world.applies(stream, config.stream.topology_in_effect == "central"):
        return ("skipped",)
    os.chdir(part.folder / "work")
    os.environ.update(HOME=str(part.folder / "home"), XDG_CACHE_HOME=str(part.folder / "home" / ".cache"))
    stream, since = world.alter(stream, torch.Generator().manual_seed(config.seed))
    if part.muted:
        cls = getattr(config, part.muted[0]).cls
        setattr(cls, part.muted[1], getattr(_base(cls), part.muted[1]))
    tape = Tape(part.folder, since, part.heard if world.hears else None, world.hears, part.until)
    watch = Watch(lambda _, progress: tell(f"block {progress.step}, round {progress.round}"))
    folders = [plugin.path.parent for plugin in (config.method, config.backbone)]
    with Outside(folders, part.folder, [each.path for each in config.source.parts or [config.source]]) as outside:
        try:
            execute(config, lambda: stream, part.folder / "results", watch, engine=_Taped(tape))
            tape.write()
        except Ended:
            pass
    return "done", *outside.seen


def _base(cls: type) -> type:
    """The suite's class that a plugin is made from."""
    return next(each for each in cls.__mro__ if each.__module__.startswith("fedcl_bench.plugin."))


# ------------------------------------------------------------------------------------------------------- in the parent


@dataclass
class Honesty:
    """The worlds of one run.

    Attributes:
        job: the run in plain data. words: its command line. folder: of what the worlds write.
        tell: shows what is being done; stop: whether to end.
    """

    config: RunConfig
    job: Job
    words: tuple[str, ...]
    rounds: int
    threads: int | None
    folder: Path
    tell: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False
    _done: dict[tuple, tuple[str, ...]] = field(default_factory=dict)
    _noticed: set[str] = field(default_factory=set)

    def verdicts(self) -> Iterator[Verdict]:
        """On each world in turn. Raises UserError if the run fails as it is, Interrupted."""
        state, *text = self._play(AS_IT_IS)
        if state != "done":
            raise UserError("".join(text))
        for name in list(WORLDS)[1:]:
            verdict = self._verdict(name)
            yield verdict
            if name == AGAIN and not verdict.honest:
                return
        seen = list(dict.fromkeys(line for state, *lines in self._done.values() if state == "done" for line in lines))
        yield Verdict("outside", "nothing", not seen, "; ".join(seen) or "no look at files, frames or objects")

    def _verdict(self, name: str) -> Verdict:
        differs = WORLDS[name].differs
        state, *text = self._play(name)
        if state == "skipped":
            return Verdict(name, differs, None, "the stream has nothing of it")
        if state == "failed":
            return Verdict(name, differs, False, f"fails: {text[0]}")
        found = self._difference(name)
        if found is None:
            return Verdict(name, differs, True, "all the same")
        number, evidence = found
        if name == AGAIN:
            return Verdict(name, differs, None, f"{evidence} from one run to the next, so that nothing can be said")
        if (alike := _ALIKE.get(name)) in self._noticed:
            return Verdict(name, differs, False, f"{evidence}; see '{alike}'")
        self._noticed.add(name)
        return Verdict(name, differs, False, evidence, tuple(self._culprits(name, number)))

    def _play(self, world: str, muted: tuple[str, str] | None = None, until: int | None = None) -> tuple[str, ...]:
        """Run a world, unless it was; returns the last message of ``play``."""
        key = world, muted, until
        if key not in self._done:
            folder, heard = self._folder(*key), self._folder(AS_IT_IS, muted, until)
            folder.mkdir()
            part = Part(self.job, self.words, world, self.rounds, self.threads, folder, heard, muted, until)
            self._done[key] = self._ended(world + (f" without {muted[1]}" if muted else ""), Process(play, part))
        return self._done[key]

    def _folder(self, world: str, muted: tuple[str, str] | None, until: int | None) -> Path:
        return self.folder / f"{list(WORLDS).index(world)}-{'-'.join(muted or ())}-{until}"

    def _ended(self, label: str, process: Process) -> tuple[str, ...]:
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

    def _difference(self, world: str, muted: tuple[str, str] | None = None, until: int | None = None
                    ) -> tuple[int, str] | None:
        """The first event in which somebody has noticed, and what differs in it."""
        ours, theirs = (self._folder(each, muted, until) for each in (AS_IT_IS, world))
        tolerance = ROUNDING[self.config.server.precision] if "" in WORLDS[world].hears else 0.0
        for number in range(len(list(ours.glob("*.pt")))):
            a, b = (torch.load(folder / f"{number}.pt", weights_only=True) for folder in (ours, theirs))
            if (text := _differs(a["tables"], b["tables"], b["same"], tolerance, WORLDS[world].lists)) is not None:
                return number, f"{a['where']}: {text}"
        return None

    def _culprits(self, world: str, until: int) -> Iterator[str]:
        """The plugins' hooks without which nothing differs, with file and line."""
        found = False
        for kind in ("method", "backbone"):
            cls = getattr(self.config, kind).cls
            for hook in [] if found else _hooks(cls):
                muted = kind, hook
                states = [self._play(each, muted, until)[0] for each in (AS_IT_IS, world)]
                silent = all(state == "done" for state in states) and self._difference(world, muted, until) is None
                if silent or kind == "method" and "failed" in states:
                    found = True
                    yield f"{hook} ({place(getattr(cls, hook))})"
        if not found:
            cls = (self.config.method if _hooks(self.config.method.cls) else self.config.backbone).cls
            yield f"{cls.__name__} ({place(cls)})"


def _hooks(cls: type) -> list[str]:
    """The names of functions that a plugin has in place of the suite's, and can do without."""
    base = _base(cls)
    return [name for name, own in inspect.getmembers(cls, inspect.isfunction) if name not in _NO_HOOKS
            and inspect.isfunction(suite := getattr(base, name, None)) and own is not suite
            and not (name.startswith("_") or issubclass(cls, Method) and base is not Method and name == "module")]


def place(code: Any) -> str:
    """Where code stands."""
    return f"{Path(inspect.getsourcefile(code) or '?').name}:{inspect.getsourcelines(code)[1]}"


def _differs(a: dict[str, tuple], b: dict[str, tuple], same: Tensor, tolerance: float, lists: bool) -> str | None:
    """What differs most in the first table of an event that differs; ``same``: users with the same data."""
    for name in b:
        if name not in a:
            return f"{name} is there only in one of them"
        (users, x, width), (others, y, other_width) = a[name], b[name]
        if name.startswith("client_") and width != other_width:
            continue  # padded up to the longest list; 'later blocks' leaves that as it is
        if users is not None:
            both = same[torch.isin(same, users) & torch.isin(same, others)]
            x, y, users = x[torch.isin(users, both)], y[torch.isin(others, both)], users[torch.isin(users, both)]
        if x.shape != y.shape:
            return f"{name} has {len(x)} rows of {x[:1].numel()} numbers, and {len(y)} of {y[:1].numel()}"
        if name.startswith("list"):
            row = _other_list(x, y) if lists else None
        else:
            gap = (x - y).abs()
            worst = gap > tolerance * (x.abs().amax(0) if len(x) else 0.0)
            row = int((gap * worst).sum(1).argmax()) if bool(worst.any()) else None
        if row is not None:
            whose = f" of client {int(users[row])}" if users is not None else f", row {row}," if len(x) > 1 else ""
            return f"{name}{whose} differs"
    return None


def _other_list(x: Tensor, y: Tensor) -> int | None:
    """A list in which more than a tenth of the items are others: close scores may change places."""
    kept = (x[:, :, None] == y[:, None, :]).any(2).sum(1)
    row = int(kept.argmin()) if len(x) else 0
    return row if len(x) and int(kept[row]) < 0.9 * x.shape[1] - 1e-9 else None


def examine(config: RunConfig, job: Job, words: tuple[str, ...], rounds: int, threads: int | None,
            tell: Callable[[str], None], stop: Callable[[], bool]) -> Iterator[Verdict]:
    """The verdicts on a run; what its worlds write is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield from Honesty(shortened(config, rounds), job, words, rounds, threads, Path(folder), tell, stop).verdicts()
