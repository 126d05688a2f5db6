"""Search for settings on validation data, with the same number of trials for every method.

FT searches the backbone's settings (the learning rate); every other method takes those over and searches its own. A
trial is an ordinary run, and its value is read from the validation column of ``rounds.parquet`` and nothing else, so no
test score can choose a setting.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Generator, Iterable, Mapping, Sequence

from ..data.source import config_file, dataset_name, load_config, parts_of
from ..errors import Corrupt, UserError, unknown
from ..files import sweep, write_atomically
from ..runs.config import CORE_SETTINGS, effective, resolve
from ..runs.frames import read_columns
from ..runs.registry import Registry
from ..runs.specs import RunSpec, Tuned, Where, read_tuned, tuned_file
from ..settings import as_text, checked, search_space, unknown_setting
from .grid import Outcome, Task, make_tasks, state

REFERENCE = "ft"  # the method whose backbone settings all others take over
SAMPLERS = ("random", "grid", "tpe")
Point = dict[str, Any]
Proposals = Generator[list[Point], list[float | None], None]  # yields points, is sent their values


@dataclass(frozen=True)
class Effort:
    """How hard to search, the same for every combination.

    Attributes:
        budget: trials per combination. seed: of the trials and of the sampler.
        batch: points that ``tpe`` proposes before it sees their values; it does not concern the other samplers.
        fixed: settings of all trials.
    """

    budget: int = 12
    sampler: str = "random"
    seed: int = 0
    batch: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Combination:
    """What is tuned on its own."""

    method: str
    backbone: str
    dataset: str

    def __str__(self) -> str:
        return f"{self.method} on {self.backbone}, {dataset_name(self.dataset)}"


@dataclass(frozen=True)
class Result:
    """What became of a combination: ``tuned``, ``kept`` (an equal search was done before), ``failed`` or ``stopped``.

    Attributes:
        content: of the file of tuned settings.
        error: why there is none.
    """

    combination: Combination
    status: str
    content: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def validation_value(folder: Path, domains: bool = False) -> float:
    """The objective of a finished run: the mean over blocks 1.. of the best validation value of each.

    Block 0, which most methods share, counts only where there is no other block.

    Args:
        domains: the blocks are domains, all of which count.
    """
    curve = read_columns(folder, "rounds", ["step", "valid"])
    best = curve.groupby("step")["valid"].max()
    return float(best[best.index >= 1].mean() if len(best) > 1 and not domains else best.mean())


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
        """Whether the budget is enough for every point."""
        return self.points <= self.effort.budget

    def head(self) -> dict[str, Any]:
        """What identifies the search in its file; equal heads mean equal searches."""
        effort, c = self.effort, self.combination
        return {"method": c.method, "backbone": c.backbone, "dataset": dataset_name(c.dataset), "budget": effort.budget,
                "sampler": "all points" if self.exhaustive else effort.sampler, "seed": effort.seed,
                "grid_points": self.points, "space": {name: list(values) for name, values in self.space.items()},
                "inherited": self.inherited, "fixed": self.fixed}

    def spec(self, point: Point) -> RunSpec:
        """The run of a trial."""
        c = self.combination
        return RunSpec(c.method, c.backbone, c.dataset, tuple({**self.inherited, **self.fixed, **point}.items()))

    def command(self) -> str:
        """The command that repeats this search."""
        effort, c = self.effort, self.combination
        words = ["run_bench.py", "tune", "--methods", c.method, "--backbones", c.backbone, "--datasets", c.dataset,
                 "--budget", str(effort.budget), "--sampler", effort.sampler, "--seed", str(effort.seed)]
        words += ["--jobs", str(effort.batch)] if effort.sampler == "tpe" and not self.exhaustive else []
        for name, value in self.fixed.items():
            words += ["--set", f"{name}={as_text(value)}"]
        return shlex.join(words)


def _knows(registry: Registry, combination: Combination) -> set[str]:
    classes = [*CORE_SETTINGS, registry.get("backbone", combination.backbone).cls.Settings,
               registry.get("method", combination.method).cls.Settings]
    return {f.name for cls in classes for f in dataclasses.fields(cls)}


def make_search(registry: Registry, combination: Combination, effort: Effort, inherited: Point) -> Search:
    """Lay a search out. Raises UserError for bad settings, or a grid larger than the budget with sampler ``grid``."""
    c = combination
    fixed = {name: value for name, value in effort.fixed.items() if name in _knows(registry, c)}
    values = effective(resolve(registry, c.method, c.backbone, c.dataset, [("tuned", inherited), ("--set", fixed)]))
    space = {}
    for name, choices in searched(registry, c).items():
        if name not in fixed and name in values:  # an idle one would give the same run again
            space[name] = choices if values[name] in choices else (values[name], *choices)
    search = Search(c, effort, space, {name: values[name] for name in space}, inherited,
                    {name: values[name] for name in fixed if name in values})
    if effort.sampler == "grid" and not search.exhaustive:
        raise UserError(f"--sampler grid: {c} has {search.points} points, more than --budget {effort.budget}; "
                        f"use --sampler random, or --budget {search.points} for every method.")
    return search


def proposals(search: Search) -> Proposals:
    """The points of a search, the default first."""
    effort, names = search.effort, list(search.space)
    grid = [search.space[name] for name in names]
    if not search.exhaustive and effort.sampler == "tpe":
        yield from _tpe(search)
    elif search.exhaustive:
        others = (dict(zip(names, values)) for values in itertools.product(*grid))
        yield [search.default, *(point for point in others if point != search.default)]
    else:
        generator = random.Random(f"{effort.seed} {search.combination}")
        points = [search.default]
        for number in generator.sample(range(search.points), effort.budget):  # one to spare for the default
            point = {}
            for name, values in zip(names, grid):
                number, index = divmod(number, len(values))
                point[name] = values[index]
            points += [point] if point != search.default else []
        yield points[:effort.budget]


def _tpe(search: Search) -> Proposals:
    """Optuna's tree-structured Parzen estimator over the same points; a point proposed twice is not counted again."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    effort = search.effort
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(
        seed=effort.seed, n_startup_trials=max(2, effort.budget // 3), constant_liar=effort.batch > 1))
    study.enqueue_trial(search.default)
    known: dict[str, float] = {}
    while len(known) < effort.budget:
        batch: dict[str, tuple[Point, list]] = {}
        for _ in range(50 * effort.batch):  # enough to find new points unless the sampler is sure of itself
            if len(batch) >= min(effort.batch, effort.budget - len(known)):
                break
            trial = study.ask()
            point = {name: trial.suggest_categorical(name, values) for name, values in search.space.items()}
            key = json.dumps(point, sort_keys=True)
            if key in known:
                study.tell(trial, known[key])
            else:
                batch.setdefault(key, (point, []))[1].append(trial)
        if not batch:
            return
        values = yield [point for point, _ in batch.values()]
        for (key, (_, trials)), value in zip(batch.items(), values):
            known[key] = -1.0 if value is None else value  # a validation metric is never below 0
            for trial in trials:
                study.tell(trial, known[key])


def require_sampler(sampler: str) -> None:
    """Raise UserError if the sampler's package is missing."""
    if sampler == "tpe":
        try:
            import optuna  # noqa: F401
        except ModuleNotFoundError:
            raise UserError("--sampler tpe needs Optuna: python -m pip install 'optuna>=3' (or '.[tune]'); "
                            "--sampler random needs nothing.") from None


@dataclass
class _Trials:
    """A search under way."""

    search: Search
    source: Proposals
    batch: list[Point]
    done: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    stopped: bool = False
    ended: bool = False

    def take(self, outcomes: Sequence[Outcome], results: Path) -> None:
        """Read the values of a batch and ask for the next one."""
        values = []
        for point, outcome in zip(self.batch, outcomes):
            finished = outcome.status == "finished"
            values.append(validation_value(outcome.task.record(results).folder, outcome.task.config.is_domains)
                          if finished else None)
            self.done.append({"settings": point, "value": values[-1], "hash": outcome.task.config.hash,
                              "status": outcome.status})
            if outcome.status in ("stopped", "waiting"):
                self.stopped = True
            elif not finished and outcome.status != "failed":
                self.error = f"{outcome.task.label}: {outcome.status}: {outcome.error}"
        try:
            self.batch = [] if self.stopped or self.error else self.source.send(values)
        except StopIteration:
            self.batch = []
        self.ended = not self.batch


def content_of(search: Search, trials: list[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """The file of a search whose trials are done; None if none of them finished. Of equal values the first one wins."""
    finished = [trial for trial in trials if trial["value"] is not None]
    if not finished:
        return None
    best = max(finished, key=lambda trial: trial["value"])
    return {**search.head(), "settings": {**search.inherited, **best["settings"]},
            "objective": f"best validation {metric}, mean over "
                         + ("domains" if len(parts_of(search.combination.dataset)) > 1 else
                            "blocks 1.. where there is more than one"),
            "value": best["value"], "trials": trials, "command": search.command()}


def _same_search(path: Path, search: Search) -> dict[str, Any] | None:
    """The content of a file that an equal search left, or None."""
    try:
        content = read_tuned(path)
    except (FileNotFoundError, Corrupt):
        return None
    head = json.loads(json.dumps(search.head()))
    same = all(content.get(name) == value for name, value in head.items())
    return content if same and {"value", "trials", "command", "objective"} <= content.keys() else None


@dataclass(frozen=True)
class Tuning:
    """How combinations are tuned, and where.

    Attributes:
        folder: where chosen settings are written. results: of run records.
        again: search even if an equal search was done before.
        below: folder of the settings of combinations that ``folder`` lacks; never written.
    """

    registry: Registry
    effort: Effort
    folder: Path
    results: Path
    data_dir: Path | None = None
    again: bool = False
    below: Path | None = None
    where: Where = Where()

    def file(self, c: Combination) -> Path:
        """The file that the combination's choice is written to."""
        return tuned_file(self.folder, c.method, c.backbone, c.dataset)

    def kept_file(self, c: Combination) -> Path:
        """The file of the combination's settings, as written or from ``below``."""
        return self._tuned.file(c.method, c.backbone, c.dataset)

    @property
    def _tuned(self) -> Tuned:
        folders = (self.folder, self.below) if self.below else (self.folder,)
        return Tuned(folders, where=self.where)

    def search(self, c: Combination, inherited: Point) -> Search:
        """The combination's search."""
        return make_search(self.registry, c, self.effort, inherited)

    def inherited(self, c: Combination) -> Point:
        """FT's tuned settings of the combination's backbone; for another method than FT."""
        return self._tuned.settings(REFERENCE, c.backbone, c.dataset)

    def tasks(self, search: Search, points: Iterable[Point]) -> list[Task]:
        """The trials of some points."""
        return make_tasks(self.registry, map(search.spec, points), [self.effort.seed], self.data_dir)

    def before(self, search: Search) -> dict[str, Any] | None:
        """The content of the file that an equal search left, if it is to be kept."""
        return None if self.again else _same_search(self.kept_file(search.combination), search)


def tune(tuning: Tuning, combinations: Iterable[Combination],
         run: Callable[[list[Task]], list[Outcome]]) -> list[Result]:
    """Tune combinations and write a file for each; FT goes first where a method needs its backbone settings.

    Args:
        run: runs tasks and says what became of them (``Pool.run``).

    Raises:
        UserError: before anything runs, for names, settings or data that do not fit.
    """
    first, wanted = _in_order(tuning, combinations)
    done = {r.combination: r for r in _stage(tuning, [(c, {}) for c in first], run)}
    second = []
    for c in wanted:
        if c.method == REFERENCE:
            continue
        reference = done.get(Combination(REFERENCE, c.backbone, c.dataset))
        if reference and not reference.content:
            done[c] = Result(c, reference.status, error=f"needs {reference.combination}, which is not tuned")
            continue
        second.append((c, tuning.inherited(c)))
    done.update((r.combination, r) for r in _stage(tuning, second, run))
    return [done[c] for c in dict.fromkeys([*first, *wanted])]


def _in_order(tuning: Tuning, combinations: Iterable[Combination]) -> tuple[list[Combination], list[Combination]]:
    """FT's combinations that must be searched, or looked up, first, and those that were asked for, each once.

    Raises UserError for names, settings or data that do not fit, before the first trial.
    """
    wanted = list(dict.fromkeys(combinations))
    references = [Combination(REFERENCE, c.backbone, c.dataset) for c in wanted]
    known = set().union(*(_knows(tuning.registry, c) for c in wanted))
    for name in tuning.effort.fixed:
        if name not in known:
            raise unknown_setting("setting (--set)", name, known)
    first = [c for c in dict.fromkeys(references) if c in wanted or not tuning.kept_file(c).exists()]
    for c in [*first, *wanted]:
        search = tuning.search(c, {})
        tuning.tasks(search, [search.default])
    return first, wanted


@dataclass(frozen=True)
class Outlook:
    """What a search would do.

    Attributes:
        trials: how many there are. finished: how many of them have a record; None if the points are not known yet, as
            FT's choice is not, or as the sampler goes by what it has seen.
        kept: an equal search was done before and would be kept.
    """

    search: Search
    trials: int
    finished: int | None
    kept: bool


def outlook(tuning: Tuning, combinations: Iterable[Combination]) -> list[Outlook]:
    """What ``tune`` with these arguments would do, and what of it is done. Nothing is run. Errors as for ``tune``."""
    first, wanted = _in_order(tuning, combinations)
    rows: dict[Combination, Outlook] = {}
    for c in dict.fromkeys([*first, *wanted]):
        reference = rows.get(Combination(REFERENCE, c.backbone, c.dataset))
        waits = c.method != REFERENCE and reference is not None and not reference.kept
        search = tuning.search(c, {} if c.method == REFERENCE or waits else tuning.inherited(c))
        kept = not waits and tuning.before(search) is not None
        finished = None
        if not waits and (search.exhaustive or tuning.effort.sampler != "tpe"):
            tasks = tuning.tasks(search, next(proposals(search)))
            finished = sum(state(task, tuning.results).name == "finished" for task in tasks)
        rows[c] = Outlook(search, min(search.points, tuning.effort.budget), finished, kept)
    return list(rows.values())


def _stage(tuning: Tuning, combinations: list[tuple[Combination, Point]],
           run: Callable[[list[Task]], list[Outcome]]) -> list[Result]:
    """Search combinations that do not depend on each other, the trials of all of them together."""
    done: list[Result] = []
    under_way: list[_Trials] = []
    for combination, inherited in combinations:
        search = tuning.search(combination, inherited)
        if content := tuning.before(search):
            done.append(Result(combination, "kept", content))
        else:
            source = proposals(search)
            under_way.append(_Trials(search, source, next(source)))
    metrics: dict[Combination, str] = {}
    while batches := [trials for trials in under_way if not trials.ended]:
        tasks = []
        for trials in batches:
            tasks.append(tuning.tasks(trials.search, trials.batch))
            metrics[trials.search.combination] = tasks[-1][0].config.evaluation.valid_metric
        outcomes = {o.task.config.hash: o for o in run(list(itertools.chain.from_iterable(tasks)))}
        for trials, mine in zip(batches, tasks):
            trials.take([outcomes[task.config.hash] for task in mine], tuning.results)
            if trials.ended:
                done.append(_ended(trials, metrics[trials.search.combination], tuning))
    return done


def _ended(trials: _Trials, metric: str, tuning: Tuning) -> Result:
    """Write the file of a search, if its trials allow it."""
    c = trials.search.combination
    if trials.stopped:
        return Result(c, "stopped", error="interrupted")
    content = None if trials.error else content_of(trials.search, trials.done, metric)
    if content is None:
        return Result(c, "failed", error=trials.error or "no trial finished: every one of them diverged")
    try:
        tuning.folder.mkdir(parents=True, exist_ok=True)
        sweep(tuning.folder)
        write_atomically(tuning.file(c), json.dumps(content, indent=1).encode())
    except OSError as error:
        raise UserError(f"{tuning.folder}: cannot be written ({error.strerror}); choose another with --results "
                        f"DIR.") from None
    return Result(c, "tuned", content)
