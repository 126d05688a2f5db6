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
from typing import Any, Callable, Generator, Iterable, Mapping, Sequence

from ..core.errors import Corrupt, UserError
from ..federation.parts import STAGE
from ..core.files import read_bytes, sweep, write_atomically
from ..records.frames import of_last_stage, parsed
from ..runs.metadata import NO_BACKBONE
from ..runs.registry import Registry
from ..records.schema import CURE, read_run
from ..runs.specs import RunSpec, Tuned, Where, read_tuned, tuned_file
from ..core.settings import as_text, unknown_setting
from ..stats.significance import ALIKE
from .grid import Outcome, Task, make_tasks, merged, state
from .search import (REFERENCE, Combination, Effort, Point, Search, Study, Trial, TrialRun, default_settings,
                     known_settings, make_search, searched)

Runner = Callable[[list[Task]], list[Outcome]]


@dataclass(frozen=True)
class Result:
    """What became of a search."""

    search: Search
    status: str  # ``tuned``, ``kept`` (an equal search was done before), ``failed`` or ``stopped``
    content: Mapping[str, Any] = field(default_factory=dict)  # of the file of tuned settings
    error: str = ""  # why there is none
    runs: int | None = 0  # those of its trials that ended; None if its points are not known, as FT's choice is not
    spent: float = 0.0  # the share of the budget that they took

    @property
    def combination(self) -> Combination:
        return self.search.combination


def finished_run(task: Task, folder: Path) -> TrialRun:
    """What a search reads of a finished run's record. The first step, which most methods share, counts only where there
    is no other."""
    path = folder / "rounds.parquet"  # of a record that was verified before
    curve = parsed(read_bytes(path, CURE), path, CURE, ["step", "valid", "participants"], [STAGE])
    curve["valid"] = of_last_stage(curve)
    per_step = task.config.per_step
    curve = curve[curve["step"] >= (per_step if curve["step"].max() >= per_step else 0)]
    best = tuple(float(value) for value in curve.groupby("step")["valid"].max())
    return TrialRun(task.config.seed, task.config.hash, best, int(curve["participants"].sum()))


def failed_run(task: Task, folder: Path) -> TrialRun:
    """What a search reads of the record of a run that diverged."""
    try:
        updates = (read_run(folder) or {}).get("client_updates", ())
    except Corrupt:
        updates = ()
    counted = updates[task.config.per_step:] or updates
    return TrialRun(task.config.seed, task.config.hash, (), sum(counted))


@dataclass(frozen=True)
class Tuning:
    """How combinations are tuned, and where."""

    registry: Registry
    effort: Effort
    folder: Path  # where chosen settings are written
    results: Path  # of run records
    data_dir: Path | None = None
    again: bool = False  # search even if an equal search was done before
    below: Path | None = None  # folder of the settings of combinations that ``folder`` lacks; never written
    where: Where = Where()

    @property
    def _tuned(self) -> Tuned:
        return Tuned((self.folder, self.below) if self.below else (self.folder,), where=self.where)

    def kept_file(self, c: Combination) -> Path:
        """The file of the combination's settings, as written or from ``below``."""
        return self._tuned.file(*c)

    def search(self, c: Combination, inherited: Point) -> Search:
        return make_search(self.registry, c, self.effort, inherited)

    def inherited(self, c: Combination) -> Point:
        """FT's tuned settings of the combination's backbone; for another method than FT."""
        return self._tuned.settings(REFERENCE, c.backbone, c.dataset)

    def tasks(self, search: Search, points: Iterable[tuple[Point, int]]) -> list[Task]:
        return [make_tasks(self.registry, [search.spec(point)], [seed], self.data_dir)[0] for point, seed in points]

    def references(self, search: Search) -> tuple[list[Task], list[Task]]:
        """Runs of FT on all seeds: with default settings, and with those that the combination inherits."""
        c = search.combination._replace(method=REFERENCE)
        usual, best = [], []
        for inherited, tasks in (({}, usual), (search.inherited, best)):
            _, fixed = default_settings(self.registry, c, search.effort, inherited)
            spec = RunSpec(*c, tuple({**inherited, **fixed}.items()))
            tasks += make_tasks(self.registry, [spec], search.effort.every_seed, self.data_dir)
        return usual, best

    def before(self, search: Search) -> dict[str, Any] | None:
        """The content of the file that an equal search left, if it is to be kept."""
        try:
            content = {} if self.again else read_tuned(self.kept_file(search.combination))
        except (FileNotFoundError, Corrupt):
            return None
        head = json.loads(json.dumps(search.head()))
        same = all(content.get(name) == value for name, value in head.items())
        whole = {"value", "trials", "command", "objective", "client_updates"} <= content.keys()
        if not (same and whole):
            return None
        if not tuned_file(self.folder, *search.combination).exists():
            return content  # from ``below``: a shipped choice holds, also where the code has changed since
        task, = self.tasks(search, [(search.default, self.effort.seed)])  # whose hash covers the data and the code
        ran = any(run.get("hash") == task.config.hash for trial in content["trials"] for run in trial["runs"])
        return content if ran else None

    def run_of(self, outcome: Outcome) -> TrialRun:
        """What a search reads of a run that finished or diverged."""
        read = finished_run if outcome.status == "finished" else failed_run
        return read(outcome.task, outcome.task.record(self.results).folder)


def _search(tuning: Tuning, search: Search) -> Generator[list[Task], list[Outcome], Result]:
    """A search in steps: yields runs and is sent what became of them, FT's first, by which the budget is counted."""
    usual, best = tuning.references(search)
    outcomes = yield (asked := merged([usual, best]))
    if lost := _lost(outcomes) or next((("failed", f"the budget is counted in runs of FT, and one failed: "
                                                   f"{o.task.label}: {o.error}")
                                        for o in outcomes if o.status == "failed"), None):
        return Result(search, lost[0], error=lost[1])
    found = {task.config.hash: tuning.run_of(outcome) for task, outcome in zip(asked, outcomes)}
    study, done, runs = Study(search, [found[task.config.hash] for task in usual]), 0, None
    steps = study.steps()
    while True:
        try:
            outcomes = yield tuning.tasks(search, steps.send(runs))
        except StopIteration:
            break
        done += sum(outcome.status in ("finished", "failed") for outcome in outcomes)
        if lost := _lost(outcomes):
            return Result(search, lost[0], error=lost[1], runs=done, spent=study.spent / study.budget)
        runs = [tuning.run_of(outcome) for outcome in outcomes]
    content = _content(study, usual[0], [found[task.config.hash] for task in best])
    return Result(search, "tuned" if content else "failed", content,
                  "" if content else "no trial finished: every one of them diverged", done, study.spent / study.budget)


def _lost(outcomes: Sequence[Outcome]) -> tuple[str, str] | None:
    """Status and error of a search with runs that neither finished nor diverged: nothing is chosen from the others."""
    if any(outcome.status in ("stopped", "waiting") for outcome in outcomes):
        return "stopped", "interrupted"
    return next((("failed", f"{outcome.task.label}: {outcome.status}: {outcome.error}") for outcome in outcomes
                 if outcome.status in ("error", "busy")), None)


def _content(study: Study, task: Task, reference: Sequence[TrialRun]) -> dict[str, Any]:
    """The file of a search that has ended; empty if no trial finished. Of equal values the first one wins. ``task``:
    one of its runs; ``reference``: FT's with the same backbone settings."""
    search, seeds = study.search, study.search.effort.seeds
    finished = [trial for trial in study.trials if trial.value(seeds) is not None]
    if not finished:
        return {}
    best = max(finished, key=lambda trial: trial.value(seeds))
    blocks = "domains" if task.config.stream.of_domains else "blocks 1.. where there is more than one"
    metric = task.config.evaluation.valid_metric
    tunable = {*search.inherited, *searched(task.config.registry, search.combination)}
    fixed = {name: value for name, value in search.fixed.items() if name in tunable}
    content = {**search.head(), "settings": {**search.inherited, **fixed, **best.point},
               "objective": f"best validation {metric}, mean over {blocks}, and over seeds",
               "value": best.value(seeds), "client_updates": {"budget": study.budget, "spent": study.spent},
               "trials": [_as_json(trial, seeds) for trial in study.trials], "command": search.command(),
               "optuna": version("optuna")}  # others may propose other points
    if search.combination.method != REFERENCE:
        content["ft_value"] = fmean(run.value for run in reference)
        content["ft_in_effect"] = all(abs(a - b) < ALIKE for run, other in zip(best.runs, reference)
                                      for a, b in zip(run.best, other.best))
    return content


def _as_json(trial: Trial, seeds: int) -> dict[str, Any]:
    """A trial as the file holds it; its value is the mean over all seeds."""
    status = "failed" if trial.diverged else "finished" if len(trial.runs) == seeds else "first seed only"
    return {"settings": trial.point, "value": trial.value(seeds), "status": status,
            "runs": [{"seed": run.seed, "value": run.value, "client_updates": run.updates, "hash": run.hash}
                     for run in trial.runs]}


def tune(tuning: Tuning, combinations: Iterable[Combination], run: Runner, write: bool = True) -> list[Result]:
    """Tune combinations and write a file for each; FT goes first where a method needs its backbone settings. ``run``:
    runs tasks and says what became of them (``Pool.run``). Raises UserError before anything runs, for names, settings
    or data that do not fit."""
    first, wanted = _in_order(tuning, combinations)
    done = _stage(tuning, [(c, {}) for c in first], run, write)
    second = []
    for c in wanted:
        reference = done.get(c._replace(method=REFERENCE))
        if c.method != REFERENCE and reference and not reference.content:
            done[c] = Result(tuning.search(c, {}), reference.status, runs=None,
                             error=f"needs {reference.combination}, which is not tuned")
        elif c.method != REFERENCE:
            second.append((c, reference.content["settings"] if reference else tuning.inherited(c)))
    done |= _stage(tuning, second, run, write)
    return [done[c] for c in dict.fromkeys([*first, *wanted])]


def notes(tuning: Tuning, combinations: Iterable[Combination]) -> list[str]:
    """Which settings are taken over that FT was tuned to under other settings of all trials."""
    wanted, said = list(combinations), []
    for c in dict.fromkeys(c._replace(method=REFERENCE) for c in wanted if c.backbone != NO_BACKBONE):
        if c in wanted or not (path := tuning.kept_file(c)).exists():
            continue  # it is tuned first
        before, now = read_tuned(path).get("fixed", {}), json.loads(json.dumps(tuning.search(c, {}).fixed))
        if before != now:
            texts = (", ".join(f"{name}={as_text(value)}" for name, value in each.items()) or "none"
                     for each in (before, now))
            said.append("note: {}, which others take over, was tuned with other --set ({}; here {}); name {} too to "
                        "tune it with these.".format(c, *texts, REFERENCE))
    return said


def outlook(tuning: Tuning, combinations: Iterable[Combination]) -> list[Result]:
    """What ``tune`` comes to with the records that there are; nothing is run or written. Errors as for ``tune``."""
    def look(tasks: list[Task]) -> list[Outcome]:
        found = [state(task, tuning.results) for task in tasks]
        return [each if each.status in ("finished", "failed") else replace(each, status="waiting") for each in found]
    return tune(tuning, combinations, look, write=False)


def _in_order(tuning: Tuning, combinations: Iterable[Combination]) -> tuple[list[Combination], list[Combination]]:
    """FT's combinations that must be searched, or looked up, first, and those that were asked for, each once. Raises
    UserError for names, settings or data that do not fit, before the first trial."""
    wanted = list(dict.fromkeys(combinations))
    if without := [c.method for c in wanted if c.backbone == NO_BACKBONE]:
        raise UserError(f"tune: found {without[0]}, accepted: methods that need a backbone; the budget is counted in "
                        f"runs of {REFERENCE} on it.")
    references = [c._replace(method=REFERENCE) for c in wanted]
    known = set().union(*(known_settings(tuning.registry, c) for c in wanted))
    for name in tuning.effort.fixed:
        if name not in known:
            raise unknown_setting("setting (--set)", name, known)
    first = [c for c in dict.fromkeys(references) if c in wanted or not tuning.kept_file(c).exists()]
    for c in [*first, *wanted]:
        search = tuning.search(c, {})
        task, = tuning.tasks(search, [(search.default, tuning.effort.seed)])
        if task.config.misfit:
            raise UserError(task.config.misfit)
        tuning.references(search)
    return first, wanted


def _stage(tuning: Tuning, combinations: list[tuple[Combination, Point]], run: Runner,
           write: bool) -> dict[Combination, Result]:
    """Search combinations that do not depend on each other, the runs of all of them together."""
    done: dict[Combination, Result] = {}
    asked = {}  # the runs of the present step of each search
    for c, inherited in combinations:
        search = tuning.search(c, inherited)
        if content := tuning.before(search):
            spending = content["client_updates"]
            done[c] = Result(search, "kept", content, "", sum(len(trial["runs"]) for trial in content["trials"]),
                             spending["spent"] / spending["budget"])
        else:
            searching = _search(tuning, search)
            asked[searching] = next(searching)
    while asked:
        outcomes = {outcome.task.config.hash: outcome for outcome in run(merged(asked.values()))}
        for searching, tasks in list(asked.items()):
            try:
                asked[searching] = searching.send([outcomes[task.config.hash] for task in tasks])
            except StopIteration as end:
                del asked[searching]
                result = done[end.value.combination] = end.value
                if result.content and write:
                    _write(tuning, result)
    return done


def _write(tuning: Tuning, result: Result) -> None:
    try:
        tuning.folder.mkdir(parents=True, exist_ok=True)
        sweep(tuning.folder)
        write_atomically(tuned_file(tuning.folder, *result.combination), json.dumps(result.content, indent=1).encode())
    except OSError as error:
        raise UserError(f"{tuning.folder}: cannot be written ({error.strerror}); choose another with --out "
                        f"DIR.") from None
