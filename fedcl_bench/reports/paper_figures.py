"""A paper's figures from finished runs: gathers the numbers, names what is missing, and has them drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, Sequence

from matplotlib.figure import Figure

from ..core.errors import UserError
from ..experiments.papers import Key, figure_specs
from ..runs.registry import Registry
from ..records.run import Run
from ..runs.specs import RunSpec, Tuned, Where, expected_inactive, expected_settings, seed_text
from ..runs.matching import failure, matching
from ..records.store import one_protocol
from ..stats.significance import TooFew
from . import draw, frame
from .comparison import over_grid
from .draw import BarPanel, Look, SettingPanel
from .selection import DAGGER, checked_spec, command_for, grid_command

Cells = dict[tuple[str, str], dict[str, list[Run]]]  # (dataset, backbone) to method to its runs


@dataclass(frozen=True)
class Job:
    """What is to be drawn from which runs.

    Attributes:
        changes: settings of ``--set``.
        tuned: where the tuned settings are that the runs have, or None.
        where: folders of the command's options.
        failed: the content of ``run.json`` of runs that failed.
    """

    paper: ModuleType
    paper_name: str
    registry: Registry
    runs: list[Run]
    records: Path
    tuned: Tuned | None
    changes: dict[str, str]
    methods: list[str]
    backbones: list[str]
    datasets: list[str]
    metric: str
    where: Where = Where()
    failed: Sequence[Mapping[str, Any]] = ()

    def label(self, name: str) -> str:
        """A dataset, backbone, method or metric as the paper calls it."""
        return self.paper.LABELS.get(name, name)

    @cached_property
    def looks(self) -> dict[str, Look]:
        return draw.looks({name: self.label(name) + (DAGGER if self.registry.reimplemented(name) else "")
                              for name in self.registry.names("method")})

    def spec(self, method: str, backbone: str, dataset: str, settings: dict[str, Any] | None = None) -> RunSpec | None:
        """The spec of a cell; None if tuned settings are asked for and it was never tuned."""
        if self.tuned and not self.tuned.file(method, backbone, dataset).is_file():
            return None
        spec = RunSpec(method, backbone, dataset, tuple((settings or {}).items()))
        return checked_spec(self.registry, spec, self.changes, self.tuned)

    @cached_property
    def cells(self) -> Cells:
        """Every dataset and backbone; no runs where there is no record. Each is one comparable set."""
        cells = {(dataset, backbone): {method: self.find(method, backbone, dataset) for method in self.methods}
                 for dataset, backbone in product(self.datasets, self.backbones)}
        for cell in cells.values():
            frame.same_tests(_all(cell), "figures")
            frame.check_metric(_all(cell), self.metric)
        one_protocol([run for cell in cells.values() for run in _all(cell)], "figures")
        if not any(run for cell in cells.values() for run in _all(cell)):
            raise UserError(f"figures: no records in {self.records} of {', '.join(self.methods)} on "
                            f"{', '.join(self.backbones)}, {', '.join(self.datasets)} with these settings.\nMake them "
                            f"with: {self._command_for_missing(cells)}")
        return cells

    @cached_property
    def cell_notes(self) -> list[str]:
        """Sentences on cells without records, and on those whose methods have different seeds."""
        notes = []
        for (dataset, backbone), cell in self.cells.items():
            if len(seeds := {_seeds(runs): method for method, runs in cell.items() if runs}) > 1:
                notes.append(f"different seeds on {backbone}, {dataset}: "
                             + "; ".join(f"{method} {text}" for text, method in seeds.items()))
        lacking = {pair: [method for method, runs in cell.items() if not runs] for pair, cell in self.cells.items()}
        for (dataset, backbone), methods in lacking.items():
            failed = {method: reason for method in methods if (reason := self.failure(method, backbone, dataset))}
            notes += [f"{method} on {backbone}, {dataset} {reason}: left empty" for method, reason in failed.items()]
            if absent := [method for method in methods if method not in failed]:
                notes.append(f"no records of {', '.join(absent)} on {backbone}, {dataset}: left empty")
        if command := self._command_for_missing(self.cells):
            notes.append(f"make them with: {command}")
        return notes

    def failure(self, method: str, backbone: str, dataset: str) -> str:
        """That a cell's runs failed, and why; empty if none did."""
        spec = self.spec(method, backbone, dataset)
        return failure(self.failed, self.registry, spec, self.tuned) if spec else ""

    def _command_for_missing(self, cells: Cells) -> str:
        missing = [self.spec(method, backbone, dataset)
                   or RunSpec(method, backbone, dataset, tuple(self.changes.items()))
                   for (dataset, backbone), cell in cells.items() for method, runs in cell.items()
                   if not runs and not self.failure(method, backbone, dataset)]
        return command_for(missing, self.tuned, self.where)

    def find(self, method: str, backbone: str, dataset: str, settings: dict[str, Any] | None = None) -> list[Run]:
        """The runs of a cell, sorted by seed."""
        spec = self.spec(method, backbone, dataset, settings)
        return matching(self.runs, self.registry, spec, self.tuned) if spec else []

    def command(self, figure: str, datasets: list[str], *options: str) -> str:
        """The command that makes the runs of the paper's figure."""
        words = ("--paper", self.paper_name, "--figure", figure, "--datasets", ",".join(datasets), *options)
        return grid_command(words, self.changes.items(), self.tuned, self.where)

    def file(self, figure: str, *parts: str) -> str:
        """A file's name without its suffix."""
        return "-".join((figure, *parts, self.metric.replace("@", "")))


def _all(cell: dict[str, list[Run]]) -> list[Run]:
    return [run for runs in cell.values() for run in runs]


def _seeds(runs: list[Run]) -> str:
    return seed_text({run.seed for run in runs})


def seed_words(cell: dict[str, list[Run]], label: Callable[[str], str]) -> str:
    """The seeds of every method of a cell: those that most have, and which methods have others."""
    seeds = {method: _seeds(runs) for method, runs in cell.items() if runs}
    counts = Counter(seeds.values())
    usual = max(counts, key=lambda text: (counts[text], text))
    others: dict[str, list[str]] = {}
    for method, text in seeds.items():
        if text != usual:
            others.setdefault(text, []).append(label(method))
    more = "; ".join(f"{', '.join(methods)}: {text}" for text, methods in others.items())
    return f"seeds {usual}" + (f" ({more})" if more else "")


class Skip(Exception):
    """A figure that these records do not allow, and why."""


# File names without their suffix with figures, and sentences on what could not be drawn.
Drawn = Iterator[tuple[str, Figure] | str]


def _improvements(job: Job) -> Drawn:
    base = job.paper.BASELINE
    methods = [method for method in job.methods if method != base]
    if base not in job.methods or not methods:
        raise Skip(f"needs {base} and another method")
    printed = job.paper.printed()[2]
    yield from job.cell_notes
    rows = []
    for dataset in job.datasets:
        panels = []
        for backbone in job.backbones:
            cell = job.cells[dataset, backbone]
            if not any(cell.values()):
                continue
            ours = {m: frame.improvement(cell[m], cell[base], job.metric) for m in methods}
            for method, value in ours.items():
                if value is None and cell[method] and cell[base]:
                    yield (f"figure 3: {method} on {backbone}, {dataset} has no seed in common with a {base} above 0: "
                           f"left empty")
            cells = {m: printed.get(Key(dataset, backbone, m, job.metric, "change")) for m in methods}
            panels.append(BarPanel(f"{job.label(dataset)}, {job.label(backbone)}", ours,
                                   {m: cell.value for m, cell in cells.items() if cell}))
        rows += [panels[i:i + 3] for i in range(0, len(panels), 3)]
    if not any(value for row in rows for panel in row for value in panel.ours.values()):
        raise Skip(f"no method has a seed in common with {base}")
    yield job.file("figure3"), draw.improvement_bars(rows, job.looks, job.label(base), job.label(job.metric))


def _over_values(job: Job, spec: RunSpec, name: str, values: set[float],
                 recorded: set[float]) -> tuple[dict[float, frame.OverSeeds | None], list[Run]]:
    """The metric for each value of a setting, and the runs; ``recorded`` are the values that have records."""
    points, every = {}, []
    for value in sorted(values | recorded):
        runs = []
        if value in recorded:
            runs = job.find(spec.method, spec.backbone, spec.dataset, {name: value})
        frame.check_metric(runs, job.metric)
        points[value] = frame.over_seeds(frame.seed_averages(runs, job.metric)) if runs else None
        every += runs
    return points, every


def sensitivity(figure: str, job: Job, above: Callable[[float], str] | None = None, above_label: str = "") -> Drawn:
    """A figure of the paper that varies one setting at a time, per dataset and backbone.

    Args:
        above, above_label: see ``SettingPanel``; from a value to its text.
    """
    method = job.paper.OURS
    wanted: dict[tuple[str, str], dict[str, set[float]]] = {}  # the values that the paper shows
    for spec in figure_specs(job.paper_name, [figure]):
        (name, value), = spec.settings
        wanted.setdefault((spec.dataset, spec.backbone), {}).setdefault(name, set()).add(value)
    settings = list(next(iter(wanted.values())))
    drawn, notes = False, []
    for dataset, backbone in product(job.datasets, job.backbones):
        spec = job.spec(method, backbone, dataset)
        if spec is None:
            continue
        chosen = expected_settings(job.registry, spec, job.tuned)
        varying = [name for name in settings if name in chosen]  # not those that --set leaves without effect
        recorded = frame.variations(job.runs, chosen, spec, varying, expected_inactive(job.registry, spec, job.tuned))
        varied = any(set(values) - {chosen[name]} for name, values in recorded.items())
        panels, every = [], []
        for name in varying:
            points, runs = _over_values(job, spec, name, wanted.get((dataset, backbone), {}).get(name, set()),
                                        set(recorded.get(name, ())))
            second_axis = {value: above(value) for value in points} if above else {}
            panels.append(SettingPanel(name, points, chosen[name], second_axis, above_label))
            every += runs
            missing = [f"{value:g}" for value, point in points.items() if point is None]
            if missing and varied:
                notes.append(f"figure {figure}: no records of {method} on {backbone}, {dataset} with {name} = "
                             f"{', '.join(missing)}: left empty")
        if varied:
            frame.same_tests(every, f"figure {figure}")
            drawn = True
            title = f"{job.label(method)} on {job.label(backbone)}, {job.label(dataset)}"
            yield (job.file(f"figure{figure}" if figure.isdecimal() else figure, dataset, backbone),
                   draw.sensitivity(panels, job.looks[method], job.label(job.metric), title))
    datasets = [dataset for dataset in job.datasets if any((dataset, backbone) in wanted for backbone in job.backbones)]
    command = ""
    if datasets:
        command = f"\nMake the paper's with: {job.command(figure, datasets)}"
    if not drawn:
        which = f"one of {', '.join(settings)}" if len(settings) > 1 else settings[0]
        raise Skip(f"no runs of {method} in which only {which} is another.{command}")
    if notes:
        yield from notes[:-1]
        yield notes[-1] + command


def _forgetting(job: Job) -> Drawn:
    yield from job.cell_notes
    for (dataset, backbone), cell in job.cells.items():
        every = [run for runs in cell.values() for run in runs]
        if every:
            matrices = {method: frame.mean_matrix(runs, job.metric) if runs else None for method, runs in cell.items()}
            title = f"{job.label(backbone)}, {job.label(dataset)}, mean over {seed_words(cell, job.label)}"
            yield (job.file("forgetting", dataset, backbone),
                   draw.forgetting_maps(matrices, job.looks, job.label(job.metric), title))


def curves(job: Job) -> Drawn:
    yield from job.cell_notes
    for (dataset, backbone), cell in job.cells.items():
        every = [run for runs in cell.values() for run in runs]
        metrics = {run.meta["settings"]["valid_metric"] for run in every}
        if len(metrics) > 1:
            raise Skip(f"{backbone}, {dataset}: runs with different validation metrics ({', '.join(sorted(metrics))})")
        if every:
            by_method = {method: frame.validation_curves(runs) if runs else None for method, runs in cell.items()}
            title = (f"{job.label(backbone)}, {job.label(dataset)}, mean ± std over {seed_words(cell, job.label)}; "
                     f"marker: mean best round")
            yield (f"curves-{dataset}-{backbone}",
                   draw.validation_curves(by_method, job.looks, job.label(metrics.pop()), title))


def _ranks(job: Job) -> Drawn:
    yield from job.cell_notes
    rows = {(backbone, dataset): cell for (dataset, backbone), cell in job.cells.items() if all(cell.values())}
    for (dataset, backbone), cell in job.cells.items():
        if any(cell.values()) and (backbone, dataset) not in rows:
            lacking = ", ".join(method for method, runs in cell.items() if not runs)
            yield f"cd: {backbone}, {dataset} is left out, as it lacks {lacking}"
    if not rows:
        raise Skip("no dataset and backbone has records of all methods")
    try:
        _, test = over_grid(rows, job.metric, where="figure cd")
    except TooFew as error:
        raise Skip(str(error)) from None
    backbones, datasets = ({key[i] for key in rows} for i in (0, 1))
    complete = len(rows) == len(datasets) * len(backbones)
    scope = " × ".join(job.label(names.pop()) if len(names) == 1 else f"{len(names)} {kind}"
                       for kind, names in (("datasets", datasets), ("backbones", backbones)))
    title = f"{job.label(job.metric)} on {scope}" + ("" if complete else ", as far as complete")
    labels = [job.looks[method].label for method in job.methods]
    yield job.file("cd"), draw.critical_difference_diagram(labels, test, title)


MAKERS = {"3": _improvements, "4": partial(sensitivity, "4"), "forgetting": _forgetting, "curves": curves,
          "cd": _ranks}
