"""A paper's figures from finished runs: gathers the numbers, names what is missing, and has them drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ..core.errors import UserError
from ..core.text import JOIN
from ..experiments.papers import Key, specs
from ..records.store import Run, incremental, one_protocol
from ..runs.specs import RunSpec, expected_settings, seed_text
from ..stats.significance import TooFew
from ..toolbox.prototypes import DELTA, gaussian_epsilon
from . import draw, frame
from .comparison import over_grid
from .draw import FigurePanel, Look, SettingPanel
from .selection import DAGGER, Source, checked_spec, command_for, find, grid_command
from .tables import build

Cells = dict[tuple[str, str], dict[str, list[Run]]]  # (dataset, backbone) to row to its runs


@dataclass(frozen=True)
class FigureJob:
    """What is to be drawn from which runs; the settings of ``source`` lie below those that a figure's runs have."""

    paper: ModuleType
    paper_name: str
    source: Source
    records: Path
    methods: list[str]
    backbones: list[str]
    datasets: list[str]
    metric: str

    def label(self, name: str) -> str:
        """A dataset, backbone, method or metric as the paper calls it."""
        return self.paper.LABELS.get(name, name)

    @cached_property
    def looks(self) -> dict[str, Look]:
        registry = self.source.registry
        return draw.looks({name: self.label(name) + DAGGER * registry.reimplemented(name)
                           for name in registry.names("method")})

    def find(self, spec: RunSpec) -> tuple[RunSpec, list[Run], str]:
        """The spec of a cell with all its settings, its runs sorted by seed, and why there are none; raises UserError
        for an unknown name or setting, or a value out of its range."""
        registry, tuned, common = self.source.registry, self.source.tuned, dict(self.source.assignments)
        if tuned and not tuned.file(spec.method, spec.backbone, spec.dataset).is_file():
            spec = replace(spec, settings=tuple({**common, **dict(spec.settings)}.items()))
        else:
            spec = checked_spec(registry, spec, common, tuned)
        return spec, *find(replace(self.source, assignments=()), spec)

    @cached_property
    def gathered(self) -> tuple[Cells, list[str]]:
        """``gather`` of all methods, which must have the metric and one protocol; raises UserError if there are no
        records."""
        cells, notes = self.gather({method: RunSpec(method, "", "") for method in self.methods})
        every = _all(*cells.values())
        frame.check_metric(every, self.metric)
        one_protocol(every, "figures")
        if not every:
            raise UserError(f"figures: no records in {self.records} of {', '.join(self.methods)} on "
                            f"{', '.join(self.backbones)}, {', '.join(self.datasets)} with these settings."
                            + "".join(f"\n{_capital(note)}" for note in notes[-1:]))
        return cells, notes

    def gather(self, rows: Mapping[str, RunSpec], backbones: list[str] | None = None) -> tuple[Cells, list[str]]:
        """The runs of rows, specs of any dataset and backbone, on each of the job's datasets and these backbones (None:
        the job's), none where there is no record; each is one comparable set. Beside them sentences on what is missing,
        and on cells whose rows have different seeds; if runs are to be made, the last one is the command."""
        cells: Cells = {}
        notes: list[str] = []
        missing: list[RunSpec] = []
        for dataset, backbone in product(self.datasets, self.backbones if backbones is None else backbones):
            found = {row: self.find(replace(spec, backbone=backbone, dataset=dataset)) for row, spec in rows.items()}
            cell = cells[dataset, backbone] = {row: runs for row, (_, runs, _) in found.items()}
            frame.same_tests(_all(cell), "figures")
            if len(seeds := {_seeds(runs): self.label(row) for row, runs in cell.items() if runs}) > 1:
                notes.append(f"different seeds on {backbone}, {dataset}: "
                             + "; ".join(f"{row} {text}" for text, row in seeds.items()))
            absent = []
            for row, (spec, runs, reason) in found.items():
                if reason.startswith("failed"):
                    notes.append(f"{row} on {backbone}, {dataset} {reason}: left empty")
                elif not runs:
                    absent.append(row if row in self.methods else self.label(row))
                    missing.append(spec)
            if absent:
                notes.append(f"no records of {', '.join(absent)} on {backbone}, {dataset}: left empty")
        if missing:
            notes.append(f"make them with: {command_for(missing, self.source.tuned, self.source.where)}")
        return cells, notes

    def command(self, figure: str, datasets: list[str], *options: str) -> str:
        words = ("--paper", self.paper_name, "--figure", figure, "--datasets", ",".join(datasets), *options)
        return grid_command(words, self.source.assignments, self.source.tuned, self.source.where)

    def file(self, figure: str, *parts: str) -> str:
        return "-".join((figure, *parts, self.metric.replace("@", "")))


def _all(*cells: Mapping[str, list[Run]]) -> list[Run]:
    return [run for cell in cells for runs in cell.values() for run in runs]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _seeds(runs: list[Run]) -> str:
    return seed_text({run.seed for run in runs})


def seed_words(cell: Mapping[str, list[Run]], label: Callable[[str], str]) -> str:
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


def _improvements(job: FigureJob) -> Drawn:
    base = job.paper.BASELINE
    methods = [method for method in job.methods if method != base]
    if base not in job.methods or not methods:
        raise Skip(f"needs {base} and another method")
    printed = job.paper.printed()[2]
    cells, notes = job.gathered
    yield from notes
    rows = []
    for dataset in job.datasets:
        panels = []
        for backbone in job.backbones:
            cell = cells[dataset, backbone]
            if not any(cell.values()):
                continue
            ours = {m: frame.improvement(cell[m], cell[base], job.metric) for m in methods}
            for method, value in ours.items():
                if value is None and cell[method] and cell[base]:
                    yield (f"figure 3: {method} on {backbone}, {dataset} has no seed in common with a {base} above 0: "
                           f"left empty")
            theirs = {m: printed.get(Key(dataset, backbone, m, job.metric, "change")) for m in methods}
            panels.append(FigurePanel(f"{job.label(dataset)}, {job.label(backbone)}", "%", ours, 0.0,
                                      {m: cell.value for m, cell in theirs.items() if cell and cell.value is not None}))
        rows += [panels[i:i + 3] for i in range(0, len(panels), 3)]
    if not any(value for row in rows for panel in row for value in panel.ours.values()):
        raise Skip(f"no method has a seed in common with {base}")
    title = f"{job.label(job.metric)}, improvement over {job.label(base)} in percent, ± std over seeds"
    yield job.file("figure3"), draw.estimates(rows, job.looks, title)


def _setting_panels(name: str, found: dict[float, list[Run]], chosen: Any, metric: str,
                    dataset: str) -> list[SettingPanel]:
    """The metric for each value of a setting, of several domains in a panel of each."""
    domains = dataset.split(JOIN)

    def points(number: int) -> dict[float, frame.OverSeeds | None]:
        return {value: frame.over_seeds(frame.seed_averages(
            runs, metric, [t for t in incremental(runs[0]) if t % len(domains) == number])) if runs else None
            for value, runs in found.items()}

    return [SettingPanel(name, points(number), chosen, title=domain if len(domains) > 1 else "")
            for number, domain in enumerate(domains)]


def _varied(job: FigureJob, spec: RunSpec, settings: Sequence[str], wanted: Mapping[str, set[float]],
            decorated: Callable[[SettingPanel], SettingPanel]) -> tuple[list[SettingPanel], list[Run], list[str]]:
    """Panels in which one setting at a time is another than in ``spec``, their runs, and what has none; nothing if
    there are no records of another value."""
    chosen = expected_settings(job.source.registry, spec, job.source.tuned)
    varying = [name for name in settings if name in chosen]  # not those that --set leaves without effect
    recorded = frame.variations(job.source.runs, chosen, spec, varying)
    panels, every, empty = [], [], []
    if not any(set(values) - {chosen[name]} for name, values in recorded.items()):
        return panels, every, empty
    for name in varying:
        found = {value: [] for value in sorted(wanted.get(name, set()).union(recorded.get(name, ())))}
        for value in recorded.get(name, ()):
            found[value] = job.find(replace(spec, settings=tuple({**dict(spec.settings), name: value}.items())))[1]
            frame.check_metric(found[value], job.metric)
        panels += map(decorated, _setting_panels(name, found, chosen[name], job.metric, spec.dataset))
        every += _all(found)
        missing = [f"{value:g}" for value, point in panels[-1].points.items() if point is None]
        empty += [f"{name} = {', '.join(missing)}"] if missing else []
    return panels, every, empty


def sensitivity(figure: str, job: FigureJob, decorated: Callable[[SettingPanel], SettingPanel] = lambda panel: panel,
                claim: str = "") -> Drawn:
    """A figure of the paper that varies one setting at a time, per dataset and backbone. ``decorated`` adds a second
    axis or a paper's claim to a panel; ``claim``: that one in words."""
    method, source = job.paper.OURS, job.source
    wanted: dict[tuple[str, str], dict[str, set[float]]] = {}  # the values that the paper shows
    for spec in specs(job.paper_name, figures=[figure]):
        (name, value), *_ = spec.settings
        wanted.setdefault((spec.dataset, spec.backbone), {}).setdefault(name, set()).add(value)
    settings = list(next(iter(wanted.values())))
    there = {(run.head["dataset"], run.head["backbone"]) for run in source.runs if run.head["method"] == method}
    drawn, notes = False, []
    for dataset, backbone in product(job.datasets, job.backbones):
        if (dataset, backbone) not in there:
            continue
        spec, _, reason = job.find(job.paper.row_spec(method, backbone, dataset))
        if reason.startswith("not tuned"):
            continue
        panels, every, empty = _varied(job, spec, settings, wanted.get((dataset, backbone), {}), decorated)
        notes += [f"figure {figure}: no records of {method} on {backbone}, {dataset} with {what}: left empty"
                  for what in empty]
        if panels:
            frame.same_tests(every, f"figure {figure}")
            drawn = True
            named = " on ".join(dict.fromkeys([job.label(method), job.label(backbone)]))
            title = ", ".join([named, job.label(dataset), *_pilot(job)])
            yield (job.file(f"figure{figure}" if figure.isdecimal() else figure, dataset, backbone),
                   draw.sensitivity(panels, job.looks[method], job.label(job.metric), title, claim))
    datasets = [dataset for dataset in job.datasets if any((dataset, backbone) in wanted for backbone in job.backbones)]
    command = f"\nMake the paper's with: {job.command(figure, datasets)}" if datasets else ""
    if not drawn:
        which = f"one of {', '.join(settings)}" if len(settings) > 1 else settings[0]
        raise Skip(f"no runs of {method} in which only {which} is another.{command}")
    if notes:
        yield from notes[:-1]
        yield notes[-1] + command


def _forgetting(job: FigureJob) -> Drawn:
    cells, notes = job.gathered
    yield from notes
    for (dataset, backbone), cell in cells.items():
        if any(cell.values()):
            matrices = {method: frame.mean_matrix(runs, job.metric) if runs else None for method, runs in cell.items()}
            title = f"{job.label(backbone)}, {job.label(dataset)}, mean over {seed_words(cell, job.label)}"
            yield (job.file("forgetting", dataset, backbone),
                   draw.forgetting_maps(matrices, job.looks, job.label(job.metric), title))


def _curves(job: FigureJob) -> Drawn:
    cells, notes = job.gathered
    yield from notes
    for (dataset, backbone), cell in cells.items():
        metrics = {run.meta["settings"]["valid_metric"] for run in _all(cell)}
        if len(metrics) > 1:
            raise Skip(f"{backbone}, {dataset}: runs with different validation metrics ({', '.join(sorted(metrics))})")
        if metrics:
            by_method = {method: frame.validation_curves(runs) if runs else None for method, runs in cell.items()}
            title = (f"{job.label(backbone)}, {job.label(dataset)}, mean ± std over {seed_words(cell, job.label)}; "
                     f"marker: mean best round")
            yield (f"curves-{dataset}-{backbone}",
                   draw.validation_curves(by_method, job.looks, job.label(metrics.pop()), title))


def _ranks(job: FigureJob) -> Drawn:
    cells, notes = job.gathered
    yield from notes
    rows = {(backbone, dataset): cell for (dataset, backbone), cell in cells.items() if all(cell.values())}
    for (dataset, backbone), cell in cells.items():
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


def _early(job: FigureJob) -> Drawn:
    """FCUCR's Figure 2a: a metric of each client's first training session, round by round."""
    column = f"early_{job.metric}"

    def curve(runs: list[Run]) -> frame.Curve:
        for run in runs:
            if column not in run.rounds:
                raise Skip(f"the record {run.hash[:12]} has no column {column}; "
                           f"other metrics: --metric hit@10, ndcg@10")
        return frame.validation_curves(runs, column)[0]

    cells, notes = {}, []
    for backbone in job.backbones:
        lines = {method: spec for method, spec in job.paper.early_rows(backbone).items() if method in job.methods}
        try:
            found, missing = job.gather(lines, [backbone]) if lines else ({}, [])
        except UserError as error:  # as of a stream without sessions
            raise Skip(str(error).splitlines()[0]) from None
        cells |= found
        notes += missing
    _require_records(cells, notes)
    yield from notes
    for dataset in job.datasets:
        panels = {f"{job.label(backbone)}, {job.label(dataset)}":
                  {row: curve(runs) if runs else None for row, runs in cell.items()}
                  for (of, backbone), cell in cells.items() if of == dataset and any(cell.values())}
        if panels:
            yield (job.file("early", dataset),
                   draw.round_curves(panels, job.looks, f"{job.label(job.metric)}, first session",
                                     "mean ± std over seeds; marker: mean best round"))


def _require_records(cells: Cells, notes: list[str]) -> None:
    if not _all(*cells.values()):
        raise Skip("\n".join(["no records of its runs.", *map(_capital, notes[-1:])]))


# What records hold per user: the sigmoid of the logits of the test session's target and of a sampled item.
PROBABILITIES = {"target_probability": Look("target", "#0072B2", line="-"),
                 "negative_probability": Look("sampled item", "#D55E00", line="--")}
_EDGES = np.linspace(0.0, 1.0, 21)


def _probabilities(runs: list[Run]) -> dict[str, frame.Histogram]:
    """Histograms of the runs that have all of ``PROBABILITIES``; if none has, of what all have."""
    kinds = {run.hash: set(run.analysis["kind"]) for run in runs}
    runs = [run for run in runs if PROBABILITIES.keys() <= kinds[run.hash]] or runs
    return {kind: frame.user_histogram(runs, kind, _EDGES) for kind in PROBABILITIES
            if runs and all(kind in kinds[run.hash] for run in runs)}


def _probability(job: FigureJob) -> Drawn:
    """FCUCR's Figure 2b and c."""
    cells, notes = job.gather({row: job.paper.row_spec(row, "", "") for row in job.paper.TRANSFER})
    _require_records(cells, notes)
    yield from notes
    for dataset in job.datasets:
        rows = [[(f"{job.label(backbone)}, {job.label(row)}", _probabilities(runs)) for row, runs in cell.items()]
                for (of, backbone), cell in cells.items() if of == dataset and any(cell.values())]
        if rows:
            yield (f"probability-{dataset}",
                   draw.user_histograms(rows, PROBABILITIES, "predicted probability of a test session's items"))


def _noise(job: FigureJob) -> Drawn:
    """FCUCR's Figures 7-10: noise as in the released code, and as in the paper, beside what the paper says of it."""
    paper = job.paper

    def decorated(panel: SettingPanel) -> SettingPanel:
        deviations = {value: value / paper.NOISY[panel.name] for value in panel.points}
        text = {value: f"{gaussian_epsilon(std, DELTA):.1f}" if std else "∞" for value, std in deviations.items()}
        without = panel.points.get(0.0)
        claim = without and (paper.KEPT * without.mean, paper.KEPT_UP_TO * paper.NOISY[panel.name])
        return replace(panel, above=text, above_label="ε at δ = 10⁻⁵", claim=claim)

    return sensitivity("noise", job, decorated, f"paper: more than {paper.KEPT:.0%} is kept up to here")


def _of_table(number: int, job: FigureJob) -> Drawn:
    """A table of FFMSR as a figure, a line each, as far as there are records of the job's datasets and backbones."""
    table, drawn = job.paper.TABLES[number], False
    for dataset in job.datasets:
        built = build(job.paper_name, table, job.source, [dataset], job.backbones)
        cells = {cell.key: cell for cell in built.cells()} if built else {}
        if built is None or not any(cell.mean is not None for cell in cells.values()):
            continue
        if job.metric not in table.metrics:
            raise Skip(f"found the metric {job.metric}, accepted: {', '.join(table.metrics)}")
        lines = dict.fromkeys((key.backbone, key.row) for key in cells)
        several = len({backbone for backbone, _ in lines}) > 1
        labels = {line: _line_label(job, number, line, several) for line in lines}
        strong = {label: Look(label, "#D55E00") for (_, row), label in labels.items() if row == job.paper.OURS}
        panels = []
        for i, name in enumerate(dataset.split(JOIN)):
            ours = {labels[key.backbone, key.row]: None if cell.mean is None else
                    frame.OverSeeds(cell.mean, cell.std or 0.0, len(cell.seeds))
                    for key, cell in cells.items() if (key.metric, key.column) == (job.metric, f"D{i}")}
            best = [value.mean for label in strong if (value := ours.get(label))]
            panels.append(FigurePanel(name, job.label(job.metric), ours, best[0] if best else None))
        drawn = True
        seeds = sorted({cell.seeds for cell in cells.values() if cell.seeds})
        title = ", ".join([f"Table {number}: {built.title}", job.label(dataset), *_pilot(job),
                           f"mean ± std over seeds {'; '.join(map(seed_text, seeds))}"])
        yield job.file(f"table{number}", dataset), draw.estimates([panels], strong, title)
    if not drawn:
        of_table = [name for name in job.datasets if name in table.datasets] or list(table.datasets)
        raise Skip(f"no records of its runs.\nMake them with: "
                   f"{job.command(str(number), of_table).replace('--figure', '--table')}")


def _pilot(job: FigureJob) -> list[str]:
    users = job.source.pilot_users
    return [f"pilot of {users:,} users of each domain"] if users else []


def _line_label(job: FigureJob, number: int, line: tuple[str, str], several: bool) -> str:
    """What a line is called: its row, and where its table has several, its backbone. Table 3 has a line per method,
    and of what trains alone or pooled a line per backbone."""
    backbone, row = line
    if number == 3:
        return job.label(backbone if row == job.paper.BASELINE else row)
    return f"{job.label(backbone)}, " * several + job.paper.label(number, row)


def _layers(panel: SettingPanel) -> SettingPanel:
    """A panel of FFMSR's Figure 6, in which the default 0 stands for three layers of a language model."""
    points = {3: panel.points.get(0)} | {value: point for value, point in panel.points.items() if value and point}
    return replace(panel, points={**dict.fromkeys(filter(None, panel.points)), **points}, chosen=panel.chosen or 3)


MAKERS: dict[str, dict[str, Callable[[FigureJob], Drawn]]] = {
    "f3crec": {"3": _improvements, "4": partial(sensitivity, "4"), "forgetting": _forgetting, "curves": _curves,
               "cd": _ranks},
    "fcucr": {"early": _early, "probability": _probability, "k": partial(sensitivity, "k"),
              "lambda": partial(sensitivity, "lambda"), "noise": _noise, "curves": _curves},
    "ffmsr": {**{f"table{number}": partial(_of_table, number) for number in (3, 4, 5, 6, 7)},
              "5": partial(sensitivity, "5"), "6": partial(sensitivity, "6", decorated=_layers),
              "7": partial(sensitivity, "7")}}
