"""The search of one combination: its points, which Optuna proposes, and which of them are tried on more seeds.

A point is tried on the first seed. Optuna's pruner for successive halving lets the better third of them, and the suite
the default, go on to the others (ASHA, Li et al., MLSys 2020, with seeds in place of epochs). What is spent is counted
in client-updates.

The study is kept in memory: a trial's runs have records, so a search that goes on asks for the same points again and
finds their values there.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import warnings
import zlib
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generator, Mapping, NamedTuple

from ..data.source import config_file, dataset_name, load_config
from ..core.errors import UserError, unknown
from ..runs.config import CORE_SETTINGS, effective, resolve
from ..runs.registry import Registry
from ..runs.specs import RunSpec
from ..core.settings import as_text, checked, flat, inactive, search_space

if TYPE_CHECKING:
    import optuna

REFERENCE = "ft"  # the method whose backbone settings all others take over, and in whose runs budgets are counted
ETA = 3  # one of so many points goes on to the other seeds
LEAST = 10  # a run counts a tenth of FT's default run at least, as it is also started and evaluated
Point = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How hard to search, the same for every combination."""

    budget: int = 24  # of client-updates, in trials on all seeds of FT's default run
    seeds: int = 2  # of a trial
    sampler: str = "tpe"
    seed: int = 0  # the first of them; the sampler follows from it too
    batch: int = 4  # runs of a combination at a time: ``tpe`` proposes them before it sees their values
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings of all trials

    @property
    def every_seed(self) -> range:
        return range(self.seed, self.seed + self.seeds)


class Combination(NamedTuple):
    """What is tuned on its own."""

    method: str
    backbone: str
    dataset: str

    def __str__(self) -> str:
        return f"{self.method} on {self.backbone}, {dataset_name(self.dataset)}"


def searched(registry: Registry, combination: Combination) -> dict[str, tuple]:
    """The settings that a combination searches and their values: the plugin's, or the dataset's where it has some.

    FT searches the backbone's, as does a bound without settings of its own, which FT's learning rate may not suit.
    Raises UserError if the dataset's config searches a setting the plugin lacks, or a value it refuses."""
    method = registry.get("method", combination.method).cls
    bare = method.gives_up and method.needs_backbone and not search_space(method.Settings)
    of_backbone = bool(bare) or method.name == REFERENCE
    name = combination.backbone if of_backbone else combination.method
    cls = registry.get("backbone" if of_backbone else "method", name).cls.Settings
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
    """The search of one combination, before its first trial."""

    combination: Combination
    effort: Effort
    space: Mapping[str, tuple]  # setting to its values; the default is always among them
    default: Point  # the point without any choice
    inherited: Point  # FT's tuned backbone settings (empty for FT itself)
    fixed: Point  # settings of all trials that this combination knows

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
        return "all points" if self.exhaustive and self.effort.sampler != "grid" else self.effort.sampler

    def head(self) -> dict[str, Any]:
        """What identifies the search in its file; equal heads mean equal searches."""
        effort, c = self.effort, self.combination
        return {**c._asdict(), "dataset": dataset_name(c.dataset), "budget": effort.budget, "seeds": effort.seeds,
                "sampler": self.sampler, "seed": effort.seed, "batch": effort.batch, "grid_points": self.points,
                "space": {name: list(values) for name, values in self.space.items()}, "inherited": self.inherited,
                "fixed": self.fixed}

    def spec(self, point: Point) -> RunSpec:
        return RunSpec(*self.combination, tuple({**self.inherited, **self.fixed, **point}.items()))

    def command(self) -> str:
        words = ["run_bench.py", "tune"]
        for name, value in self.combination._asdict().items():
            words += [f"--{name}s", value]
        for name in ("budget", "seeds", "sampler", "seed", "batch"):
            words += [f"--{name}", str(getattr(self.effort, name))]
        for name, value in self.fixed.items():
            words += ["--set", f"{name}={as_text(value)}"]
        return shlex.join(words)


def known_settings(registry: Registry, combination: Combination) -> set[str]:
    classes = [*CORE_SETTINGS, registry.get("backbone", combination.backbone).cls.Settings,
               registry.get("method", combination.method).cls.Settings]
    return {f.name for cls in classes for f in dataclasses.fields(cls)}


def default_settings(registry: Registry, c: Combination, effort: Effort, inherited: Point) -> tuple[Point, Point]:
    """All settings with an effect of a combination's run without any choice, and those that are fixed. A fixed setting
    stays although its value is neutral, as the dataset's config may have another."""
    names = known_settings(registry, c)
    fixed = {name: value for name, value in effort.fixed.items() if name in names}
    parts = resolve(registry, *c, [("tuned", inherited), ("--set", fixed)])
    values, without = flat(parts), inactive(parts)
    return effective(parts), {name: values[name] for name in fixed if name not in without}


def make_search(registry: Registry, combination: Combination, effort: Effort, inherited: Point) -> Search:
    """Lay a search out. Raises UserError for bad settings, or a grid larger than the budget with sampler ``grid``."""
    c = combination
    values, fixed = default_settings(registry, c, effort, inherited)
    space = {}
    for name, choices in searched(registry, c).items():
        if name not in effort.fixed and name in values:  # an inactive one would give the same run again
            space[name] = choices if values[name] in choices else (values[name], *choices)
    search = Search(c, effort, space, {name: values[name] for name in space}, inherited, fixed)
    if search.sampler == "grid" and not search.exhaustive:
        raise UserError(f"--sampler grid: {c} has {search.points} points, more than --budget {effort.budget}; "
                        f"use --sampler random, or --budget {search.points} for every method.")
    return search


@dataclass(frozen=True)
class TrialRun:
    """What became of a point on a seed."""

    seed: int
    hash: str
    best: tuple[float, ...] = ()  # the best validation value of each block that counts; empty if the run diverged
    updates: int = 0  # client-updates in these blocks

    @property
    def value(self) -> float | None:
        """What is maximised: the mean over blocks; None if the run diverged."""
        return fmean(self.best) if self.best else None


@dataclass
class Trial:
    """A point and its runs so far, the first seed's first; ``asked``: Optuna's trial, whose parameters are positions in
    the lists of values."""

    point: Point
    asked: optuna.Trial
    runs: list[TrialRun] = field(default_factory=list)

    @property
    def diverged(self) -> bool:
        return any(run.value is None for run in self.runs)

    def value(self, seeds: int) -> float | None:
        """Its mean over so many seeds; None unless all of these runs finished."""
        return fmean(run.value for run in self.runs) if len(self.runs) == seeds and not self.diverged else None


Steps = Generator[list[tuple[Point, int]], list[TrialRun], None]  # yields points with seeds, is sent their runs


class Study:
    """Optuna's study of a search, and what the search may spend: a ``budget`` of client-updates, counted by
    ``reference``, FT's runs with default settings on all seeds. Of the ``trials``, each of another point, the default
    is first. Numbers are searched by their position in the sorted list of values, so neighbours are near each other."""

    TRIES = 10  # of TPE for a point, before one is taken in random order

    def __init__(self, search: Search, reference: list[TrialRun]):
        import optuna

        self.search, self.trials = search, list[Trial]()
        of_trial = max(sum(run.updates for run in reference), 1)
        self.budget, self._usual = search.effort.budget * of_trial, of_trial / len(reference)
        self._values = {name: sorted(values) if all(type(value) in (int, float) for value in values) else values
                        for name, values in search.space.items()}
        self._distributions = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1) if isinstance(values, list) else
            optuna.distributions.CategoricalDistribution(range(len(values))) for name, values in self._values.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._pruned, self._failed = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(direction="maximize", pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=ETA))
        seed = zlib.crc32(f"{search.effort.seed} {search.combination}".encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._samplers = [optuna.samplers.BruteForceSampler(seed)]  # every point once, in random order
            if search.sampler == "tpe":
                self._samplers[:0] = self.TRIES * [optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=max(2, search.effort.budget // 3), constant_liar=True)]
        self._teller = optuna.samplers.RandomSampler()  # as BruteForceSampler stops the study after the last point

    @property
    def spent(self) -> int:
        """Client-updates of all runs so far."""
        return sum(max(run.updates, math.ceil(self._usual / LEAST)) for trial in self.trials for run in trial.runs)

    def steps(self) -> Steps:
        """The runs of the search, some at a time, until the budget is spent or there are no more points. What is asked
        for follows from the runs before it alone. There are new points as long as there is room for one; the better of
        the last ones still get their other seeds, so the end may differ by some runs."""
        first, *others = self.search.effort.every_seed
        further: list[Trial] = []  # whose other seeds are next
        while True:
            new = [self._ask() for _ in range(self._new_points(len(further) * len(others)))]
            wanted = [*((trial, seed) for trial in further for seed in others), *((trial, first) for trial in new)]
            if not wanted:
                return
            for (trial, _), run in zip(wanted, (yield [(trial.point, seed) for trial, seed in wanted])):
                trial.runs.append(run)
            going_on = [trial for trial in new if self._goes_on(trial) and others]
            for trial in [*further, *new]:
                if trial not in going_on:
                    value = trial.value(self.search.effort.seeds)
                    self._study.tell(trial.asked, value, None if value is not None else self._pruned)
            further = going_on

    def _new_points(self, begun: int) -> int:
        """How many points are tried next: there must be room for each, with its share of runs on other seeds, if runs
        cost what they did so far; ``begun``: runs that are to be done besides."""
        effort, spent, count = self.search.effort, self.spent, sum(len(trial.runs) for trial in self.trials)
        most = min(effort.batch - begun, self.search.points - len(self.trials))
        if self.search.sampler != "grid":
            begun = begun if count else effort.seeds - 1  # the default's
            room = (self.budget - spent) / (spent / count if count else self._usual) - begun
            most = min(most, max(math.floor(room / (1 + (effort.seeds - 1) / ETA)), 0 if count else 1))
        return max(most, 0)

    def _ask(self) -> Trial:
        """A trial of a point that is new: the default, then what a sampler proposes."""
        if not self.trials:
            self._study.enqueue_trial({name: self._values[name].index(value)
                                       for name, value in self.search.default.items()})
        for self._study.sampler in self._samplers:
            asked = self._study.ask(self._distributions)
            point = {name: values[asked.params[name]] for name, values in self._values.items()}
            if all(trial.point != point for trial in self.trials):
                break
            self._study.tell(asked, state=self._failed)
        self._study.sampler = self._teller
        self.trials.append(Trial(point, asked))
        return self.trials[-1]

    def _goes_on(self, trial: Trial) -> bool:
        """Take a trial's value on the first seed, and say whether it is to be run on the others."""
        value = trial.runs[0].value
        trial.asked.report(math.nan if value is None else value, 1)
        pruned = trial.asked.should_prune()
        return value is not None and (trial is self.trials[0] or not pruned)
