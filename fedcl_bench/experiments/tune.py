"""Search for settings on validation data, with the same budget of client-updates for every method.

FT searches the backbone's settings (the learning rate); every other method takes those over and searches its own. A
trial is an ordinary run per seed, and its value is read from the validation column of ``rounds.parquet`` and nothing
else, so no test score can choose a setting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Iterable, Mapping, Sequence

from ..data.source import dataset_name
from ..errors import Corrupt, UserError
from ..federation.parts import STAGE
from ..files import sweep, write_atomically
from ..runs.config import RunConfig
from ..runs.frames import read_columns
from ..runs.records import last_stage
from ..runs.registry import Registry
from ..runs.run_json import read_run
from ..runs.specs import RunSpec, Tuned, Where, read_tuned, tuned_file
from ..settings import unknown_setting
from .grid import Outcome, Task, make_tasks, merged, state
from .search import (REFERENCE, Allowance, Combination, Effort, Point, Run, Search, Steps, Trial, default_settings,
                     known_settings, make_search, steps)

ALIKE = 1e-4  # what no metric of a run that is FT in effect is away from FT's
Runner = Callable[[list[Task]], list[Outcome]]


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


def finished_run(task: Task, folder: Path) -> Run:
    """What a search reads of a finished run's record.

    Block 0, which most methods share, counts only where there is no other block, and where the blocks are domains.
    """
    curve = last_stage(read_columns(folder, "rounds", ["step", "valid", "participants"], [STAGE]))
    curve = curve[curve["step"] >= (0 if task.config.is_domains else min(1, curve["step"].max()))]
    best = tuple(float(value) for value in curve.groupby("step")["valid"].max())
    return Run(task.config.seed, task.config.hash, best, int(curve["participants"].sum()))


def _blocks(config: RunConfig) -> str:
    """The blocks that count, in words."""
    return "domains" if config.is_domains else "blocks 1.. where there is more than one"


def failed_run(task: Task, folder: Path) -> Run:
    """What a search reads of the record of a run that diverged; those of former versions do not say what was done."""
    try:
        updates = (read_run(folder) or {}).get("client_updates", ())
    except Corrupt:
        updates = ()
    counted = updates if task.config.is_domains else updates[1:] or updates
    return Run(task.config.seed, task.config.hash, (), sum(counted))


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

    def tasks(self, search: Search, points: Iterable[tuple[Point, int]]) -> list[Task]:
        """The runs of points, each on a seed."""
        return [make_tasks(self.registry, [search.spec(point)], [seed], self.data_dir)[0] for point, seed in points]

    def references(self, search: Search) -> tuple[list[Task], list[Task]]:
        """Runs of FT on all seeds: with default settings, and with those that the combination inherits."""
        c = replace(search.combination, method=REFERENCE)
        usual, best = [], []
        for inherited, tasks in (({}, usual), (search.inherited, best)):
            _, fixed = default_settings(self.registry, c, search.effort, inherited)
            spec = RunSpec(c.method, c.backbone, c.dataset, tuple({**inherited, **fixed}.items()))
            tasks += make_tasks(self.registry, [spec], search.effort.every_seed, self.data_dir)
        return usual, best

    def before(self, search: Search) -> dict[str, Any] | None:
        """The content of the file that an equal search left, if it is to be kept."""
        return None if self.again else _same_search(self.kept_file(search.combination), search)

    def run_of(self, outcome: Outcome) -> Run:
        """What a search reads of a run that finished or diverged."""
        read = finished_run if outcome.status == "finished" else failed_run
        return read(outcome.task, outcome.task.record(self.results).folder)


def _same_search(path: Path, search: Search) -> dict[str, Any] | None:
    """The content of a file that an equal search left, or None."""
    try:
        content = read_tuned(path)
    except (FileNotFoundError, Corrupt):
        return None
    head = json.loads(json.dumps(search.head()))
    same = all(content.get(name) == value for name, value in head.items())
    return content if same and {"value", "trials", "command", "objective", "client_updates"} <= content.keys() else None


@dataclass
class _UnderWay:
    """A search that goes on in steps: FT's runs first, by which its budget is counted, then its trials.

    Attributes:
        usual, best: FT's runs on all seeds, with default and with inherited settings.
        asked: the runs of the present step, none at the end.
        trials: those that have runs. reference: what became of ``best``.
        done: runs of trials that ended, the unfinished step's too.
        problem: status and error of a result without a choice.
    """

    tuning: Tuning
    search: Search
    usual: list[Task]
    best: list[Task]
    asked: list[Task]
    trials: list[Trial] = field(default_factory=list)
    allowance: Allowance | None = None
    reference: list[Run] = field(default_factory=list)
    done: int = 0
    problem: tuple[str, str] | None = None
    _steps: Steps | None = None

    @classmethod
    def begin(cls, tuning: Tuning, search: Search) -> _UnderWay:
        """A search before its first step."""
        references = tuning.references(search)
        return cls(tuning, search, *references, merged(references))

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Read what became of the runs of this step, by their hash, and ask for those of the next."""
        mine = [outcomes[task.config.hash] for task in self.asked]
        ended = [outcome for outcome in mine if outcome.status in ("finished", "failed")]
        self.done += len(ended) if self._steps else 0
        self.asked = []
        if len(ended) < len(mine):
            self.problem = self._unfinished(mine)
        elif self._steps is None:
            self._start(outcomes)
        else:
            self._go_on([self.tuning.run_of(outcome) for outcome in mine])

    @staticmethod
    def _unfinished(outcomes: Sequence[Outcome]) -> tuple[str, str]:
        """Runs that neither finished nor diverged leave nothing to choose from."""
        lost = next((o for o in outcomes if o.status in ("error", "busy")), None)
        stopped = any(outcome.status in ("stopped", "waiting") for outcome in outcomes)
        return ("stopped", "interrupted") if stopped else (
            "failed", f"{lost.task.label}: {lost.status}: {lost.error}")

    def _start(self, outcomes: Mapping[str, Outcome]) -> None:
        """The first step of trials, once FT's runs are there."""
        usual, best = ([outcomes[task.config.hash] for task in tasks] for tasks in (self.usual, self.best))
        for outcome in [*usual, *best]:
            if outcome.status == "failed":
                self.problem = "failed", (f"the budget is counted in runs of FT, and one failed: {outcome.task.label}: "
                                          f"{outcome.error}")
                return
        self.allowance = Allowance.of(self.search.effort, [self.tuning.run_of(outcome) for outcome in usual])
        self.reference = [self.tuning.run_of(outcome) for outcome in best]
        self._steps = steps(self.search, self.allowance, self.trials)
        self.asked = self.tuning.tasks(self.search, next(self._steps))

    def _go_on(self, runs: list[Run]) -> None:
        try:
            self.asked = self.tuning.tasks(self.search, self._steps.send(runs))
        except StopIteration:
            pass

    def content(self) -> dict[str, Any] | None:
        """The file of a search that has ended; None if no trial finished. Of equal values the first one wins."""
        search, seeds = self.search, self.search.effort.seeds
        finished = [trial for trial in self.trials if trial.value(seeds) is not None]
        if not finished:
            return None
        best = max(finished, key=lambda trial: trial.value(seeds))
        metric = self.usual[0].config.evaluation.valid_metric
        content = {**search.head(), "settings": {**search.inherited, **best.point},
                   "objective": f"best validation {metric}, mean over {_blocks(self.usual[0].config)}, and over seeds",
                   "value": best.value(seeds),
                   "client_updates": {"budget": self.allowance.updates, "spent": self.allowance.spent(self.trials)},
                   "trials": [_as_json(trial, seeds) for trial in self.trials], "command": search.command()}
        if search.sampler == "tpe":
            content["optuna"] = version("optuna")  # others may propose other points
        if search.combination.method != REFERENCE:
            content["ft_value"] = fmean(run.value for run in self.reference)
            content["ft_in_effect"] = alike(best.runs, self.reference)
        return content


def alike(mine: Sequence[Run], reference: Sequence[Run]) -> bool:
    """Whether no block's best validation value of any seed differs by ``ALIKE`` or more."""
    return all(abs(a - b) < ALIKE for run, other in zip(mine, reference) for a, b in zip(run.best, other.best))


def _as_json(trial: Trial, seeds: int) -> dict[str, Any]:
    """A trial as the file holds it; its value is the mean over all seeds."""
    status = "failed" if trial.diverged else "finished" if len(trial.runs) == seeds else "first seed only"
    return {"settings": trial.point, "value": trial.value(seeds), "status": status,
            "runs": [{"seed": run.seed, "value": run.value, "client_updates": run.updates, "hash": run.hash}
                     for run in trial.runs]}


def tune(tuning: Tuning, combinations: Iterable[Combination], run: Runner) -> list[Result]:
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
    known = set().union(*(known_settings(tuning.registry, c) for c in wanted))
    for name in tuning.effort.fixed:
        if name not in known:
            raise unknown_setting("setting (--set)", name, known)
    first = [c for c in dict.fromkeys(references) if c in wanted or not tuning.kept_file(c).exists()]
    for c in [*first, *wanted]:
        search = tuning.search(c, {})
        tuning.tasks(search, [(search.default, tuning.effort.seed)])
        tuning.references(search)
    return first, wanted


def _stage(tuning: Tuning, combinations: list[tuple[Combination, Point]], run: Runner) -> list[Result]:
    """Search combinations that do not depend on each other, the runs of all of them together."""
    done: list[Result] = []
    under_way: list[_UnderWay] = []
    for combination, inherited in combinations:
        search = tuning.search(combination, inherited)
        if content := tuning.before(search):
            done.append(Result(combination, "kept", content))
        else:
            under_way.append(_UnderWay.begin(tuning, search))
    while asking := [searching for searching in under_way if searching.asked]:
        _step(asking, run)
        done += [_ended(searching) for searching in asking if not searching.asked]
    return done


def _step(asking: list[_UnderWay], run: Runner) -> None:
    """Do what searches ask for, every run once."""
    outcomes = {o.task.config.hash: o for o in run(merged(searching.asked for searching in asking))}
    for searching in asking:
        searching.take(outcomes)


def _ended(searching: _UnderWay) -> Result:
    """Write the file of a search, if its trials allow it."""
    c, tuning = searching.search.combination, searching.tuning
    if searching.problem:
        status, error = searching.problem
        return Result(c, status, error=error)
    content = searching.content()
    if content is None:
        return Result(c, "failed", error="no trial finished: every one of them diverged")
    try:
        tuning.folder.mkdir(parents=True, exist_ok=True)
        sweep(tuning.folder)
        write_atomically(tuning.file(c), json.dumps(content, indent=1).encode())
    except OSError as error:
        raise UserError(f"{tuning.folder}: cannot be written ({error.strerror}); choose another with --results "
                        f"DIR.") from None
    return Result(c, "tuned", content)


@dataclass(frozen=True)
class Outlook:
    """How far a search is.

    Attributes:
        runs: those of its trials that have a record, up to the first step that lacks one; None if the points are not
            known yet, as FT's choice is not.
        spent: the share of the budget that they took.
        kept: an equal search was done before and would be kept.
    """

    search: Search
    runs: int | None
    spent: float
    kept: bool


def outlook(tuning: Tuning, combinations: Iterable[Combination]) -> list[Outlook]:
    """What ``tune`` with these arguments would do, and what of it is done. Nothing is run. Errors as for ``tune``."""
    first, wanted = _in_order(tuning, combinations)
    rows: dict[Combination, Outlook] = {}
    for c in dict.fromkeys([*first, *wanted]):
        reference = rows.get(Combination(REFERENCE, c.backbone, c.dataset))
        waits = c.method != REFERENCE and reference is not None and not reference.kept
        search = tuning.search(c, {} if c.method == REFERENCE or waits else tuning.inherited(c))
        if waits:
            rows[c] = Outlook(search, None, 0.0, False)
        elif content := tuning.before(search):
            spent = content["client_updates"]["spent"] / content["client_updates"]["budget"]
            rows[c] = Outlook(search, sum(len(trial["runs"]) for trial in content["trials"]), spent, True)
        else:
            rows[c] = _so_far(tuning, search)
    return list(rows.values())


def _so_far(tuning: Tuning, search: Search) -> Outlook:
    """The search as far as records go."""
    def look(tasks: list[Task]) -> list[Outcome]:
        states = [state(task, tuning.results) for task in tasks]
        return [Outcome(task, s.name if s.name in ("finished", "failed") else "waiting", error=s.error)
                for task, s in zip(tasks, states)]

    searching = _UnderWay.begin(tuning, search)
    while searching.asked:
        _step([searching], look)
    allowance = searching.allowance
    return Outlook(search, searching.done, allowance.spent(searching.trials) / allowance.updates if allowance else 0.0,
                   False)
