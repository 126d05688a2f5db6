"""Grids: from a declarative list of runs to tasks, each with its state on disk."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Iterable, Mapping

import msgspec
from msgspec import Meta

from ..data.source import dataset_name
from ..core.errors import Corrupt, UserError, unknown
from ..core.text import quoted
from ..runs.config import RunConfig, make_config
from ..records.record import Record
from ..runs.registry import Registry
from ..runs.specs import Layers, RunSpec, Tuned, Where, spelled_spec
from ..core.settings import LARGEST, LARGEST_SEED, MOST_SEEDS, as_text, split_methods


@dataclass(frozen=True)
class GridPart:
    """A product of runs, or the runs of a paper's tables."""

    # Names; methods may have settings, as ``f3crec:without=arm``, which win over ``set``. With ``paper`` they choose
    # among its runs, and None means all.
    methods: tuple[str, ...] | None = None
    backbones: tuple[str, ...] | None = None
    datasets: tuple[str, ...] | None = None
    # How many seeds, and the first.
    seeds: int = 1
    first_seed: int = 0
    set: Mapping[str, Any] = field(default_factory=dict)  # settings of every run
    vary: Mapping[str, tuple] = field(default_factory=dict)  # setting to the values it takes in turn
    # A paper's name, the numbers of its tables and the names of its figures.
    paper: str | None = None
    tables: tuple[int, ...] = ()
    figures: tuple[str, ...] = ()

    def specs(self) -> list[RunSpec]:
        """The runs of this part, without their seeds. Raises UserError if it names too little, or something the paper
        lacks."""
        if self.paper is None:
            for name in ("methods", "backbones"):
                if not getattr(self, name):
                    raise UserError(f"--{name} is missing (or --paper; of `grid` also --file with a list of runs).\n"
                                    f"For example: --methods ft,reg --backbones fedmf")
            if self.tables or self.figures:
                raise UserError("--table and --figure are a paper's; say which with --paper.")
            needed = [RunSpec.of(*names) for names in itertools.product(self.methods, self.backbones,
                                                                        self.datasets or ("ml-100k",))]
        else:
            if not self.tables and not self.figures:
                raise UserError("--table is missing (or --figure): which of the paper's? It may be repeated.")
            from . import papers
            needed = papers.specs(self.paper, self.tables, self.figures, self.datasets, self.backbones, self.methods)
            if not needed:
                raise UserError(f"--paper {self.paper}: what --table and --figure name needs no runs"
                                f"{' of these' * bool(self.datasets or self.backbones or self.methods)}; name others.")
        own = {name: spec.method for spec in needed for name, _ in spec.settings} if self.paper is None else {}
        if twice := [name for name in self.vary if name in own]:
            raise UserError(f"--vary: found '{twice[0]}', which {own[twice[0]]} has of its own in --methods, accepted: "
                            f"one of the two.")
        changes = [dict(zip(self.vary, values)) for values in itertools.product(*self.vary.values())]

        def settings(own: dict[str, Any]) -> dict[str, Any]:
            return {**self.set, **own} if self.paper is None else {**own, **self.set}
        return [replace(spec, settings=tuple({**settings(dict(spec.settings)), **change}.items()))
                for spec in needed for change in changes]


_NAMES = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)], "a list of names, as [ft, kd]"
# The fields of a file: their form, and that in words.
_FIELDS: dict[str, tuple[Any, str]] = {
    "methods": _NAMES, "backbones": _NAMES, "datasets": _NAMES,
    "seeds": (Annotated[int, Meta(ge=1, le=MOST_SEEDS)], f"a whole number from 1 to {MOST_SEEDS}"),
    "first_seed": (Annotated[int, Meta(ge=0, le=LARGEST_SEED)], f"a whole number from 0 to {LARGEST_SEED}"),
    "set": (dict[str, Any], "settings, as {rounds: 50}"),
    "vary": (dict[str, Annotated[tuple, Meta(min_length=1)]],
             "settings with lists of values, as {eps: [0.001, 0.002]}"),
    "paper": (Annotated[tuple[str, ...], Meta(min_length=1, max_length=1)], "the name of one paper, as f3crec"),
    "tables": (tuple[Annotated[int, Meta(ge=1, le=LARGEST)], ...], f"a whole number from 1 to {LARGEST}"),
    "figures": _NAMES}


def _listed(name: str, value: Any) -> Any:
    """A field's value with a list where its form is one: names may stand in one text, and one number alone."""
    if name == "figures":
        value = list(map(str, value)) if isinstance(value, list) else str(value)
    if _FIELDS[name] is _NAMES:
        split = split_methods if name == "methods" else lambda text: text.split(",")
        parts = list(split(value)) if isinstance(value, str) else value
        return [part.strip() if isinstance(part, str) else part for part in parts] if isinstance(parts, list) else parts
    return [value] if name in ("paper", "tables") and not isinstance(value, list) else value


def _fields(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in content.items():
        if name not in _FIELDS:
            raise unknown(f"field in {path}", name, [*_FIELDS, "grids"])
        form, accepted = _FIELDS[name]
        try:
            result[name] = msgspec.convert(_listed(name, value), form)
        except msgspec.ValidationError:
            raise UserError(f"{path}, field '{name}': found {quoted(value)}, accepted: {accepted}.") from None
    if "paper" in result:
        result["paper"], = result["paper"]
    return result


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a part over others: settings are added, anything else is replaced."""
    merged = {name: {**below.get(name, {}), **above.get(name, {})} for name in ("set", "vary")}
    for name in above.get("set", {}).keys() - above.get("vary", {}):  # one value in place of several
        merged["vary"].pop(name, None)
    return {**below, **above, **merged}


def read_parts(path: Path | None, given: Mapping[str, Any]) -> list[GridPart]:
    """The parts of a grid file, or the single part of the command line. Raises UserError naming the file, the field,
    what was found and what is accepted.

    Args:
        path: a YAML file with fields of ``GridPart``, and optionally ``grids``: a list of such mappings, for which the
            fields beside it are defaults.
        given: fields of ``GridPart`` from the command line; they win over the file's.
    """
    if path is None:
        return [GridPart(**given)]
    from ..data.source import read_yaml

    content = read_yaml(path)
    grids = content.pop("grids", [{}])
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, dict) for grid in grids):
        raise UserError(f"{path}, field 'grids': accepted: a list of mappings with methods, backbones, ...")
    common = _fields(path, content)
    return [GridPart(**_over(_over(common, _fields(path, grid)), given)) for grid in grids]


@dataclass(frozen=True)
class Task:
    """A run of a grid, checked and ready: what it is called, its overrides, and its configuration."""

    spec: RunSpec
    layers: Layers
    config: RunConfig

    @property
    def label(self) -> str:
        settings = ", ".join(f"{name}={as_text(value)}" for name, value in self.spec.settings)
        return (f"{self.spec.method} on {self.spec.backbone}, {dataset_name(self.spec.dataset)}, "
                f"seed {self.config.seed}" + (f" ({settings})" if settings else ""))

    @property
    def group(self) -> tuple[str, str, str]:
        """Runs of one group take about equally long."""
        return self.spec.dataset, self.spec.backbone, self.spec.method

    def record(self, results: Path) -> Record:
        return Record.of(self.config.name, results)

    def command(self, where: Where) -> str:
        """The command that does this run alone."""
        words = ["run_bench.py", "--method", self.spec.method, "--backbone", self.spec.backbone,
                 "--dataset", self.spec.dataset, "--seed", str(self.config.seed)]
        for name, value in {name: value for _, layer in self.layers for name, value in layer.items()}.items():
            words += ["--set", f"{name}={as_text(value)}"]
        words += ["--device", self.config.device] if self.config.device != "cpu" else []
        return shlex.join([*words, *where.words()])


def make_tasks(registry: Registry, specs: Iterable[RunSpec], seeds: Iterable[int], data_dir: Path | None = None,
               tuned: Tuned | None = None, device: str = "cpu") -> list[Task]:
    """Every run of the specs and seeds once, seeds innermost: neighbours share no block 0 and can run side by side.
    Raises UserError for anything that is wrong with any of the runs."""
    seeds, tasks = list(seeds), []
    for spec in (spelled_spec(registry, spec, data_dir) for spec in specs):
        layers = spec.layers(tuned)
        config = make_config(registry, spec.method, spec.backbone, spec.dataset, seeds[0], layers, data_dir, device)
        tasks.append([Task(spec, layers, replace(config, seed=seed)) for seed in seeds])
    return merged(tasks)


def merged(lists: Iterable[list[Task]]) -> list[Task]:
    """Several lists of tasks as one, in which every run is once."""
    tasks: dict[str, Task] = {}
    for task in itertools.chain.from_iterable(lists):
        tasks.setdefault(task.config.hash, task)
    return list(tasks.values())


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    task: Task
    # ``finished``; ``failed``: it cannot be run to its end and its record says so; ``error``: it ended without a
    # record; ``busy``: another process is at it; ``stopped``: asked to stop, its checkpoint is saved; ``waiting``:
    # never begun. On the disk also ``interrupted``: there is a checkpoint; ``missing``; of a plan ``incompatible``: its
    # method, backbone and stream do not go together.
    status: str
    seconds: float | None = None  # wall time of a finished run from its record, with that of a block 0 it shares
    took: float | None = None  # wall time here, in seconds; None if it did not begin here
    error: str = ""  # why it did not finish

    @property
    def new(self) -> bool:
        return self.took is not None


def state(task: Task, results: Path) -> Outcome:
    """What the disk says of a run. A damaged record counts as missing: running it sets it aside and repeats it."""
    record = task.record(results)
    try:
        content = record.read()
    except Corrupt:
        content = None
    if content and content["status"] == "finished":
        return Outcome(task, "finished", content["seconds"]["total"])
    if content:
        return Outcome(task, "failed", error=content.get("error", ""))
    return Outcome(task, "interrupted" if record.checkpoint.exists() else "missing")


def planned(task: Task, results: Path) -> Outcome:
    """``state`` of a run that is to be made, or that it is ``incompatible``, and why."""
    found = state(task, results)
    why = task.config.misfit if found.status == "missing" else ""
    return replace(found, status="incompatible", error=why) if why else found
