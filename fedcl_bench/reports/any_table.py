"""Tables that no paper has: any methods, backbones, datasets and metrics, laid out as one likes.

They are ``PaperTable``s as the papers' are, and filled, tested and written down by the same functions. What differs is
data: the rows are methods with settings of their own, and the numbers of a paper are shown only if one is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping, Sequence

from ..core.errors import UserError, unknown
from ..evaluation.beyond_accuracy import GROUPS
from ..experiments.papers import Key, PaperTable, Printed, get
from ..runs.registry import spelled
from ..records.run import Run
from ..runs.specs import RunSpec
from ..records.store import block_names, domains_of, incremental
from .scores import check_metric, same_tests
from .selection import checked_spec, command_for, parse_method
from .tables import STAR_LEVEL, Cell, Source, Table, filled, find, pilot_note

DIMENSIONS = ("method", "backbone", "dataset", "metric", "block")
_PARTS = {"method": "row", "backbone": "backbone", "dataset": "dataset", "metric": "metric", "block": "column"}
_AVERAGES = ("avg", "value")  # columns of papers that are the mean over the blocks but block 0


@dataclass(frozen=True)
class Layout:
    """What a table shows, and how; an empty tuple is all that the records have.

    Attributes:
        rows, columns: names of ``DIMENSIONS``, outermost first. Those in neither become the first rows if they have
            several values.
        methods: as the user writes them, with settings of their own: ``my-ewc:lambda_ewc=.1``.
        metrics: as ``ndcg@20``; empty: the metric that the records were validated on, at its list length.
        against: the method of ``methods`` that every other one is tested against; None: no tests.
        paper: whose printed numbers stand beside ours; None: nobody's.
        by: groups of users or items (``evaluation.beyond.GROUPS``) that the metrics are of; empty: all users.
    """

    rows: tuple[str, ...] = ("method",)
    columns: tuple[str, ...] = ("backbone", "dataset")
    methods: tuple[str, ...] = ()
    backbones: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    against: str | None = None
    paper: str | None = None
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Called:
    """What things are called: by a paper's labels if one is named, else by their names."""

    paper: str | None
    titles: Mapping[str, str]
    OURS: str = ""
    LABELS: Mapping[str, str] = field(default_factory=dict)

    def label(self, table: int, name: str) -> str:
        """A row, backbone, dataset, metric or block."""
        name = self.titles.get(name, name)
        if name.startswith("block") and name[5:].isdecimal():
            return f"block {name[5:]}"
        return get(self.paper).LABELS.get(name, name) if self.paper else name

    def printed(self) -> dict[int, dict[Key, Printed]]:
        """The averages that the paper prints in any of its tables, the first where several have one."""
        every: dict[Key, Printed] = {}
        for cells in get(self.paper).printed().values() if self.paper else ():
            for key, printed in cells.items():
                if key.column in _AVERAGES:
                    every.setdefault(key._replace(column="mean"), printed)
        return {0: every}

    def inconsistencies(self) -> dict[tuple[int, Key], str]:
        return {}


def split_methods(text: str) -> tuple[str, ...]:
    """``"ft,f3crec:without=arm,eps=.01"`` as methods: a setting belongs to the method before it.

    Raises:
        UserError: for an empty name.
    """
    methods: list[str] = []
    for part in map(str.strip, text.split(",")):
        # A number continues a list, as in ft:topk=5,20.
        continues = methods and ":" in methods[-1] and (part.isdecimal() or ("=" in part and ":" not in part))
        if continues:
            methods[-1] += f",{part}"
        else:
            methods.append(part)
    if not all(methods):
        raise UserError(f"--methods: found '{text}', accepted: methods with commas, as ft,f3crec:without=arm.")
    return tuple(dict.fromkeys(methods))


def _checked_dimensions(layout: Layout) -> None:
    """Raise UserError for an unknown dimension, or one that is named twice."""
    for option, names in (("--rows", layout.rows), ("--columns", layout.columns)):
        for name in names:
            if name not in DIMENSIONS:
                raise unknown(f"dimension ({option})", name, DIMENSIONS)
    both = [*layout.rows, *layout.columns]
    for name in both:
        if both.count(name) > 1:
            raise UserError(f"--rows, --columns: found '{name}' {both.count(name)} times, accepted: each once.")


def _checked_groups(layout: Layout) -> None:
    """Raise UserError for a group that does not exist, or tests of groups."""
    for group in layout.by:
        if group not in GROUPS:
            raise unknown("group in --by", group, GROUPS)
    if layout.by and layout.against:
        raise UserError("--against: tests are over all users, not over the groups of --by; leave one of the two out.")


def _metrics_of_groups(layout: Layout, runs: Sequence[Run]) -> tuple[str, ...]:
    """The metrics of all groups, as ``"ndcg@20 new-users"``. Where none is asked for, a group of items has its recall.

    Raises:
        UserError: if no run has recorded one of them.
    """
    recorded = [run for run in runs if run.whole and "groups" in run.meta]
    if not recorded:
        raise UserError(f"--by: none of the {len(runs)} records has groups; they are of an older version. Run them "
                        f"again with --rerun.")
    metrics = []
    for group in layout.by:
        known = sorted({name for run in recorded for name in run.meta["groups"].get(group, {})} - {"users"})
        usual = layout.metrics or [name for name in _default_metrics(runs) if name in known] or known[:1]
        for name in usual:
            if name not in known:
                raise UserError(f"--by {group}: found metric '{name}', accepted: what records have of this group, "
                                f"{', '.join(known)}.")
            metrics.append(f"{name} {group}")
    return tuple(dict.fromkeys(metrics))


def _default_metrics(runs: Sequence[Run]) -> tuple[str, ...]:
    """The metric that all runs were validated on; raises UserError if there are several."""
    metrics = sorted({run.head["settings"]["valid_metric"] for run in runs})
    if len(metrics) != 1:
        raise UserError(f"--metrics is missing: the records were validated on {', '.join(metrics) or 'nothing'}.\n"
                        f"Name one or several, as --metrics ndcg@20,recall@20.")
    return tuple(metrics)


def _names(kind: str, asked: Iterable[str], runs: Sequence[Run], known: Iterable[str]) -> tuple[str, ...]:
    """Those asked for, or all that the runs have; UserError for one that neither runs nor the suite know."""
    there = sorted({run.head[kind] for run in runs})
    every = {*there, *known}
    asked = tuple(asked)
    for name in asked:
        if name not in every:
            raise unknown(kind, name, every)
    return tuple(dict.fromkeys(asked)) or tuple(there)


def _completed(layout: Layout, source: Source) -> Layout:
    """The layout with every name, of those in the records where none was asked for."""
    _checked_dimensions(layout)
    _checked_groups(layout)
    installed = [run for run in source.runs if source.registry.knows("method", run.head["method"])]
    methods = layout.methods or tuple(sorted({run.head["method"] for run in installed}))
    if layout.against and layout.against not in methods:
        if layout.methods:
            raise unknown("method in --against (one of the rows)", layout.against, methods)
        parse_method(layout.against)
        methods = (layout.against, *methods)
    plain = {method: parse_method(method)[0] for method in methods}
    for name in plain.values():
        if not source.registry.knows("method", name):
            raise unknown("method", name, source.registry.names("method"))
    of_methods = [run for run in source.runs if run.head["method"] in plain.values()]
    backbones = _names("backbone", map(spelled, layout.backbones), of_methods, source.registry.names("backbone"))
    datasets = _names("dataset", layout.datasets, [run for run in of_methods if run.head["backbone"] in backbones],
                      {run.head["dataset"] for run in source.runs})
    shown = [run for run in of_methods if run.head["backbone"] in backbones and run.head["dataset"] in datasets]
    if not shown:
        raise UserError(f"tables: no records of {', '.join(methods)} on {', '.join(backbones) or 'any backbone'}, "
                        f"{', '.join(datasets) or 'any dataset'}; name others, or another folder with --records DIR.")
    if layout.by:
        metrics = _metrics_of_groups(layout, shown)
        return replace(layout, methods=methods, backbones=backbones, datasets=datasets, metrics=metrics)
    metrics = layout.metrics or _default_metrics(shown)
    for metric in metrics:
        if not any(metric in run.head["metrics"] for run in shown):
            check_metric(shown, metric)
    return replace(layout, methods=methods, backbones=backbones, datasets=datasets, metrics=metrics)


def _table(layout: Layout, source: Source, blocks: int) -> PaperTable:
    """The layout as a table's definition."""
    values = {"method": layout.methods, "backbone": layout.backbones, "dataset": layout.datasets,
              "metric": layout.metrics, "block": ("mean",)}
    down, across = list(layout.rows), list(layout.columns)
    if "block" in (*down, *across):
        values["block"] = (*(f"block{t}" for t in range(blocks)), "mean")
    unnamed = [name for name in DIMENSIONS if name not in (*down, *across) and name != "block"]
    if "metric" in unnamed and (not across or len(layout.metrics) > 1):
        across.append("metric")
        unnamed.remove("metric")
    down = [name for name in unnamed if len(values[name]) > 1] + down
    settings = dict(source.assignments)

    def row_spec(row: str, backbone: str, dataset: str) -> RunSpec:
        method, changes = parse_method(row)
        spec = RunSpec(method, backbone, dataset, changes)
        return checked_spec(source.registry, spec, settings, source.tuned) if changes or settings else spec
    return PaperTable(number=0, title="", datasets=layout.datasets, backbones=layout.backbones, rows=layout.methods,
                      metrics=layout.metrics, columns=values["block"], stub=tuple(_PARTS[name] for name in down),
                      across=tuple(_PARTS[name] for name in across), row_spec=row_spec, best="max", apart=True,
                      baseline=layout.against)


def _title(layout: Layout, called: _Called, table: PaperTable) -> str:
    """What the numbers are: the metrics, and the backbone and the dataset that all of them have. A panel names its
    backbone itself."""
    alone = [called.label(0, names[0]) for names in (() if table.panels else layout.backbones, layout.datasets)
             if len(names) == 1]
    title = ", ".join(called.label(0, metric) for metric in layout.metrics)
    return f"{title} on {', '.join(alone)}" if alone else title


def _test_note(layout: Layout, called: _Called, cells: Iterable[Cell]) -> list[str]:
    """What the marks mean; which metrics are not kept per user and so cannot be tested."""
    if layout.against is None:
        return []
    tested = {cell.key.metric for cell in cells if cell.p is not None}
    untested = [called.label(0, metric) for metric in layout.metrics if metric not in tested]
    notes = [f"*, °: significantly better, worse than {called.label(0, layout.against)}: two-sided paired t-test over "
             f"users, Holm's correction over the other methods, p ≤ {STAR_LEVEL:.2f}."]
    if untested:
        notes.append(f"Not tested: {', '.join(untested)}; no record of a pair holds it per user, or no seed is common.")
    return notes


def build_any(layout: Layout, source: Source) -> Table:
    """A table of any records.

    Raises:
        UserError: for an unknown name, metric or dimension; for records that cannot stand in one table.
    """
    layout = _completed(layout, source)
    titles = {text: RunSpec(*_named(text)).title for text in layout.methods}
    domains = {run.head["dataset"]: domains_of(run.head) for run in source.runs}
    joined = [domains.get(dataset, []) for dataset in layout.datasets]
    blocks = max(run.head["blocks"] for run in source.runs)
    if all(joined):
        names = joined[0] if len(joined) == 1 else [f"domain {number}" for number in range(max(map(len, joined)))]
        titles |= {f"block{t}": name for t, name in enumerate(block_names(names, blocks))}
    called = _Called(layout.paper, titles)
    table = _table(layout, source, blocks)
    runs = {name: find(replace(source, assignments=()), table.row_spec(*name))[0] for name in table.run_names()}
    for dataset in layout.datasets:
        if every := [run for name, several in runs.items() if name[2] == dataset for run in several]:
            same_tests(every, "tables")
    built = filled("", called, table, replace(source, assignments=()), _title(layout, called, table),
                   lambda specs: command_for(specs, source.tuned, source.where))
    several = {len(incremental(run)) for of_row in runs.values() for run in of_row} - {1}
    about = ["Mean ± sample standard deviation over seeds of the metric on the block just trained"
             + (f", averaged over the {'domains' if all(joined) else 'blocks but block 0'}." if several else ".")]
    if users := {run.head["settings"]["pilot_users"] for of_row in runs.values() for run in of_row
                 if run.head["settings"].get("pilot_users")}:
        about.append(pilot_note(users))
    about += [f"{group}: {GROUPS[group]}." for group in layout.by]
    if layout.by and several:
        about.append("Blocks without anybody of a group are left out of its average.")
    if layout.paper:
        about.append(f"In parentheses: what {get(layout.paper).TITLE} prints.")
    return replace(built, notes=(*about, *_test_note(layout, called, built.cells()), *built.notes))


def _named(text: str) -> tuple[str, str, str, tuple[tuple[str, Any], ...]]:
    method, settings = parse_method(text)
    return method, "", "", settings
