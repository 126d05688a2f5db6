"""The search of one combination: its points, who proposes them, and which of them are tried on more seeds.

A point is tried on the first seed. The better third of the points, and the default, are tried on the others (the rule
of ASHA, Li et al., MLSys 2020, with seeds in place of epochs). What is spent is counted in client-updates.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
import zlib
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Generator, Iterator, Mapping, Protocol

from ..data.source import config_file, dataset_name, load_config
from ..errors import UserError, unknown
from ..runs.config import CORE_SETTINGS, effective, resolve
from ..runs.registry import Registry
from ..runs.specs import RunSpec
from ..settings import as_text, checked, declared_idle, flat, search_space

REFERENCE = "ft"  # the method whose backbone settings all others take over, and in whose runs budgets are counted
SAMPLERS = ("tpe", "random", "grid")
ETA = 3  # one of so many points goes on to the other seeds
LEAST = 10  # a run counts a tenth of FT's default run at least, as it is also started and evaluated
WORST = -1e30  # what the estimator is told of runs that diverged: below any metric
Point = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How hard to search, the same for every combination.

    Attributes:
        budget: of client-updates, in trials on all seeds of FT's default run.
        seeds: of a trial. seed: the first of them; the sampler follows from it too.
        batch: runs of a combination at a time: ``tpe`` proposes them before it sees their values.
        fixed: settings of all trials.
    """

    budget: int = 24
    seeds: int = 2
    sampler: str = "tpe"
    seed: int = 0
    batch: int = 4
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def every_seed(self) -> range:
        """The seeds of a trial."""
        return range(self.seed, self.seed + self.seeds)


@dataclass(frozen=True)
class Combination:
    """What is tuned on its own."""

    method: str
    backbone: str
    dataset: str

    def __str__(self) -> str:
        return f"{self.method} on {self.backbone}, {dataset_name(self.dataset)}"


def searched(registry: Registry, combination: Combination) -> dict[str, tuple]:
    """The settings that a combination searches and their values: the plugin's, or the dataset's where it has some.

    Raises:
        UserError: if the dataset's config searches a setting the plugin lacks, or a value it refuses.
    """
    name = combination.backbone if combination.method == REFERENCE else combination.method
    cls = registry.get("backbone" if combination.method == REFERENCE else "method", name).cls.Settings
    path, known = config_file(combination.dataset), [f.name for f in dataclasses.fields(cls)]
    spaces = {setting: (values, "search values of the plugin") for setting, values in search_space(cls).items()}
    for setting, values in load_config(combination.dataset).search.get(name, {}).items():
        if setting not in known:
            raise unknown(f"setting in {path}, field 'search', {name}", setting, known)
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}, field 'search', {name}, {setting}: found {values!r}, accepted: a list of values.")
        spaces[setting] = values, f"{path}, field 'search'"
    return {setting: tuple(dict.fromkeys(checked(cls, setting, value, origin) for value in values))
            for setting, (values, origin) in spaces.items()}


@dataclass(frozen=True)
class Search:
    """The search of one combination, before its first trial.

    Attributes:
        space: setting to its values; the default is always among them.
        default: the point without any choice.
        inherited: FT's tuned backbone settings (empty for FT itself).
        fixed: settings of all trials that this combination knows.
    """

    combination: Combination
    effort: Effort
    space: Mapping[str, tuple]
    default: Point
    inherited: Point
    fixed: Point

    @property
    def points(self) -> int:
        """Size of the whole grid."""
        return math.prod(map(len, self.space.values()))

    @property
    def exhaustive(self) -> bool:
        """Whether every point may be tried, so that no sampler is needed."""
        return self.points <= self.effort.budget

    @property
    def sampler(self) -> str:
        """Who proposes points."""
        return "all points" if self.exhaustive and self.effort.sampler != "grid" else self.effort.sampler

    def head(self) -> dict[str, Any]:
        """What identifies the search in its file; equal heads mean equal searches."""
        effort, c = self.effort, self.combination
        return {"method": c.method, "backbone": c.backbone, "dataset": dataset_name(c.dataset), "budget": effort.budget,
                "seeds": effort.seeds, "sampler": self.sampler, "seed": effort.seed, "batch": effort.batch,
                "grid_points": self.points, "space": {name: list(values) for name, values in self.space.items()},
                "inherited": self.inherited, "fixed": self.fixed}

    def spec(self, point: Point) -> RunSpec:
        """The runs of a trial."""
        c = self.combination
        return RunSpec(c.method, c.backbone, c.dataset, tuple({**self.inherited, **self.fixed, **point}.items()))

    def command(self) -> str:
        """The command that repeats this search."""
        effort, c = self.effort, self.combination
        words = ["run_bench.py", "tune", "--methods", c.method, "--backbones", c.backbone, "--datasets", c.dataset]
        for name in ("budget", "seeds", "sampler", "seed", "batch"):
            words += [f"--{name}", str(getattr(effort, name))]
        for name, value in self.fixed.items():
            words += ["--set", f"{name}={as_text(value)}"]
        return shlex.join(words)


def known_settings(registry: Registry, combination: Combination) -> set[str]:
    """Names of all settings that a combination's runs have."""
    classes = [*CORE_SETTINGS, registry.get("backbone", combination.backbone).cls.Settings,
               registry.get("method", combination.method).cls.Settings]
    return {f.name for cls in classes for f in dataclasses.fields(cls)}


def default_settings(registry: Registry, c: Combination, effort: Effort, inherited: Point) -> tuple[Point, Point]:
    """All settings with an effect of a combination's run without any choice, and those that are fixed.

    A fixed setting stays although its value is neutral, as the dataset's config may have another.
    """
    names = known_settings(registry, c)
    fixed = {name: value for name, value in effort.fixed.items() if name in names}
    parts = resolve(registry, c.method, c.backbone, c.dataset, [("tuned", inherited), ("--set", fixed)])
    values, idle = flat(parts), declared_idle(parts)
    return effective(parts), {name: values[name] for name in fixed if name not in idle}


def make_search(registry: Registry, combination: Combination, effort: Effort, inherited: Point) -> Search:
    """Lay a search out.

    Raises:
        UserError: for bad settings, a grid larger than the budget with sampler ``grid``, or ``tpe`` without Optuna.
    """
    c = combination
    values, fixed = default_settings(registry, c, effort, inherited)
    space = {}
    for name, choices in searched(registry, c).items():
        if name not in effort.fixed and name in values:  # an idle one would give the same run again
            space[name] = choices if values[name] in choices else (values[name], *choices)
    search = Search(c, effort, space, {name: values[name] for name in space}, inherited, fixed)
    if search.sampler == "grid" and not search.exhaustive:
        raise UserError(f"--sampler grid: {c} has {search.points} points, more than --budget {effort.budget}; "
                        f"use --sampler random, or --budget {search.points} for every method.")
    if search.sampler == "tpe":
        _require_optuna(search)
    return search


def _require_optuna(search: Search) -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(f"--sampler tpe, the default, needs Optuna for the {search.points} points of "
                        f"{search.combination}: python -m pip install 'optuna>=3' (or '.[tune]').\n"
                        f"--sampler random needs nothing.") from None


class Sampler(Protocol):
    """Proposes points, each once, the default first."""

    def propose(self, count: int) -> list[Point]:
        """The next points; fewer than ``count`` if there are no more."""

    def tell(self, point: Point, value: float | None) -> None:
        """The value of a proposed point on the first seed; None if it diverged."""


def _identity(search: Search) -> bytes:
    """What random numbers follow from."""
    return f"{search.effort.seed} {search.combination}".encode()


class Shuffled:
    """All points in random order, which follows from the seed and the combination alone."""

    def __init__(self, search: Search):
        self._points = self._in_order(search)

    @staticmethod
    def _in_order(search: Search) -> Iterator[Point]:
        yield search.default
        generator = random.Random(_identity(search))
        drawn: set[int] = set()
        while len(drawn) < search.points:
            number = generator.randrange(search.points)
            if number in drawn:
                continue
            drawn.add(number)
            point = {}
            for name, values in search.space.items():
                number, index = divmod(number, len(values))
                point[name] = values[index]
            if point != search.default:
                yield point

    def propose(self, count: int) -> list[Point]:
        return [point for _, point in zip(range(count), self._points)]

    def tell(self, point: Point, value: float | None) -> None:
        pass


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) over the same points.

    Numbers are searched by their position in the sorted list of values, so neighbours are near each other. Where only
    points come that were proposed before, the next one of ``Shuffled`` is taken.
    """

    TRIES = 20  # per point

    def __init__(self, search: Search):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        effort = search.effort
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(
            seed=zlib.crc32(_identity(search)), n_startup_trials=max(2, effort.budget // 3),
            constant_liar=effort.batch > 1))
        self._numbers = {name for name, values in search.space.items() if all(type(v) in (int, float) for v in values)}
        self._values = {name: tuple(sorted(values)) if name in self._numbers else values
                        for name, values in search.space.items()}
        self._others = Shuffled(search)
        self._trials: dict[str, Any] = {}  # of every proposed point

    def propose(self, count: int) -> list[Point]:
        points: list[Point] = []
        while len(points) < count and (point := self._new() or self._from_others()):
            points.append(point)
        return points

    def _new(self) -> Point | None:
        """The estimator's next point that is new; None if it comes back to others."""
        if not self._trials:  # the default, which is the first of the others, comes first
            return None
        for _ in range(self.TRIES):
            if point := self._ask():
                return point
        return None

    def _from_others(self) -> Point | None:
        """A point in random order, put to the estimator as if it were its own."""
        while following := self._others.propose(1):
            if _key(following[0]) not in self._trials:
                self._study.enqueue_trial({name: self._values[name].index(value) if name in self._numbers else value
                                           for name, value in following[0].items()})
                return self._ask()
        return None

    def _ask(self) -> Point | None:
        trial = self._study.ask()
        point = {name: values[trial.suggest_int(name, 0, len(values) - 1)] if name in self._numbers else
                 trial.suggest_categorical(name, values) for name, values in self._values.items()}
        if _key(point) in self._trials:
            self._study.tell(trial, state=self._failed)
            return None
        self._trials[_key(point)] = trial
        return point

    def tell(self, point: Point, value: float | None) -> None:
        self._study.tell(self._trials[_key(point)], WORST if value is None else value)


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def make_sampler(search: Search) -> Sampler:
    """Who proposes the points of a search."""
    return Tpe(search) if search.sampler == "tpe" else Shuffled(search)


@dataclass(frozen=True)
class Run:
    """What became of a point on a seed.

    Attributes:
        best: the best validation value of each block that counts; empty if the run diverged.
        updates: client-updates in these blocks.
    """

    seed: int
    hash: str
    best: tuple[float, ...] = ()
    updates: int = 0

    @property
    def value(self) -> float | None:
        """What is maximised: the mean over blocks; None if the run diverged."""
        return fmean(self.best) if self.best else None


@dataclass
class Trial:
    """A point and its runs so far, the first seed's first."""

    point: Point
    runs: list[Run] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Its value on the first seed, by which it goes on to the others; -inf if it diverged."""
        return -math.inf if self.diverged else self.runs[0].value

    @property
    def diverged(self) -> bool:
        return any(run.value is None for run in self.runs)

    def value(self, seeds: int) -> float | None:
        """Its mean over so many seeds; None unless all of these runs finished."""
        return fmean(run.value for run in self.runs) if len(self.runs) == seeds and not self.diverged else None


@dataclass(frozen=True)
class Allowance:
    """The client-updates that a search may spend, and those of FT's default run, the mean over the seeds."""

    updates: int
    usual: float

    @classmethod
    def of(cls, effort: Effort, runs: list[Run]) -> Allowance:
        """What follows from FT's default runs on all seeds."""
        of_trial = max(sum(run.updates for run in runs), 1)
        return cls(effort.budget * of_trial, of_trial / len(runs))

    def spent(self, trials: list[Trial]) -> int:
        """Client-updates of these trials' runs."""
        return sum(max(run.updates, math.ceil(self.usual / LEAST)) for trial in trials for run in trial.runs)

    def new_points(self, effort: Effort, trials: list[Trial], begun: int) -> int:
        """How many new points there is likely to be room for, with other seeds for their share, as runs went so far.

        Args:
            begun: runs that are to be done besides.
        """
        spent, count = self.spent(trials), sum(len(trial.runs) for trial in trials)
        runs = (self.updates - spent) / (spent / count if count else self.usual) - begun
        return math.floor(runs / (1 + (effort.seeds - 1) / ETA))


def promoted(trials: list[Trial]) -> list[Trial]:
    """The trials that are to be run on all seeds: the better third by the first seed and the default, none diverged.

    Of equal values the earlier trial goes first.
    """
    ranked = sorted(trials, key=lambda trial: -trial.first)[:max(1, len(trials) // ETA)]
    return [trial for trial in trials if not trial.diverged and (trial is trials[0] or trial in ranked)]


Steps = Generator[list[tuple[Point, int]], list[Run], None]  # yields points with seeds, is sent their runs


def steps(search: Search, allowance: Allowance, trials: list[Trial]) -> Steps:
    """The runs of a search, some at a time, until the allowance is spent or there are no more points.

    What is asked for follows from the runs before it alone. There are new points as long as there is room for one;
    the better of the last ones still get their other seeds, so the end may differ by some runs.

    Args:
        trials: empty; filled while the search goes on.
    """
    effort, sampler = search.effort, make_sampler(search)
    first, *others = effort.every_seed
    while True:
        again = [trial for trial in promoted(trials) if others and len(trial.runs) == 1] if trials else []
        wanted = [(trial, seed) for trial in again for seed in others]
        room = allowance.new_points(effort, trials, len(wanted) if trials else len(others))  # the default's
        room = effort.batch if search.sampler == "grid" else room if trials else max(room, 1)
        new = [Trial(point) for point in sampler.propose(max(min(room, effort.batch - len(wanted)), 0))]
        wanted += [(trial, first) for trial in new]
        if not wanted:
            return
        runs = yield [(trial.point, seed) for trial, seed in wanted]
        for (trial, _), run in zip(wanted, runs):
            trial.runs.append(run)
        for trial in new:
            sampler.tell(trial.point, trial.runs[0].value)
        trials += new
