"""Tables that no paper has: any methods, backbones, datasets and metrics, laid out as one likes.

They are ``PaperTable``s as the papers' are, and filled, tested and written down by the same functions. What differs is
data: the rows are methods with settings of their own, and the numbers of a paper are shown only if one is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Callable, Iterable, Mapping, Sequence

from ..core.errors import Incompatible, UserError, require_known, unknown
from ..core.settings import as_text
from ..evaluation.beyond_accuracy import GROUPS
from ..experiments.papers import Key, PaperTable, Printed, get
from ..records.store import Run, block_names, domains_of, incremental, why_no_groups
from ..runs.metadata import NO_BACKBONE
from ..runs.registry import spelled
from ..runs.specs import RunSpec, parse_method
from ..stats.significance import LEVEL
from .cells import Filling, Table
from .comparison import NAMES, changed_settings, unequal, words_of
from .frame import check_metric, same_tests
from .notes import pilot_note
from .selection import Source, checked_spec, command_for, find
from .tables import filled

_PARTS = {"method": "row", "backbone": "backbone", "dataset": "dataset", "metric": "metric", "block": "column"}
DIMENSIONS = tuple(_PARTS)
VARIANTS = 4  # rows of one method's settings that nobody named; with more, a table says what its records have
_AVERAGES = ("avg", "value")  # columns of papers that are the mean over the blocks but block 0


@dataclass(frozen=True)
class Layout:
    """What a table shows, and how; an empty tuple is all that the records have."""

    # Names of ``DIMENSIONS``, outermost first. Those in neither become the first rows if they have several values.
    rows: tuple[str, ...] = ("method",)
    columns: tuple[str, ...] = ("backbone", "dataset")
    methods: tuple[str, ...] = ()  # as the user writes them, with settings of their own: ``my-ewc:lambda_ewc=.1``
    backbones: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()  # as ``ndcg@20``; empty: what the records were validated on, at its list length
    against: str | None = None  # the method of ``methods`` that every other one is tested against; None: no tests
    paper: str | None = None  # whose printed numbers stand beside ours; None: nobody's
    by: tuple[str, ...] = ()  # groups (``beyond_accuracy.GROUPS``) that the metrics are of; empty: all users


# From what is asked for to what is shown


def _check(layout: Layout) -> None:
    both = [*layout.rows, *layout.columns]
    require_known("dimension (--rows)", layout.rows, DIMENSIONS)
    require_known("dimension (--columns)", layout.columns, DIMENSIONS)
    for name in both:
        if both.count(name) > 1:
            raise UserError(f"--rows, --columns: found '{name}' {both.count(name)} times, accepted: each once.")
    require_known("group in --by", layout.by, GROUPS)
    if layout.by and layout.against:
        raise UserError("--against: tests are over all users, not over the groups of --by; leave one of the two out.")


def _default_metrics(runs: Sequence[Run]) -> tuple[str, ...]:
    """The metric that all runs were validated on; raises UserError if there are several."""
    metrics = sorted({run.head["settings"]["valid_metric"] for run in runs})
    if len(metrics) != 1:
        raise UserError(f"--metrics is missing: the records were validated on {', '.join(metrics) or 'nothing'}.\n"
                        f"Name one or several, as --metrics ndcg@20,recall@20.")
    return tuple(metrics)


def _metrics(layout: Layout, runs: Sequence[Run]) -> tuple[str, ...]:
    """The metrics, or those of all groups as ``"ndcg@20 new-users"``: where none is asked for, the one that the runs
    were validated on; a group of items has its recall. Raises UserError if no run has recorded one of them."""
    if not layout.by:
        metrics = layout.metrics or _default_metrics(runs)
        for metric in metrics:
            if not any(metric in run.head["metrics"] for run in runs):
                check_metric(runs, metric)
        return metrics
    recorded = [run.meta["groups"] for run in runs if run.intact and "groups" in run.meta]
    if not recorded:
        raise UserError(f"--by: none of the {len(runs)} records has groups, the first as "
                        f"{why_no_groups(runs[0].head, 'run it again with --rerun')}.")
    chosen = []
    for group in layout.by:
        known = sorted({name for groups in recorded for name in groups.get(group, {})} - {"users"})
        for name in layout.metrics or [name for name in _default_metrics(runs) if name in known] or known[:1]:
            if name not in known:
                raise UserError(f"--by {group}: found metric '{name}', accepted: what records have of this group, "
                                f"{', '.join(known)}.")
            chosen.append(f"{name} {group}")
    return tuple(dict.fromkeys(chosen))


def _recorded(method: str, runs: Iterable[Run], source: Source) -> tuple[str, ...]:
    """The rows of a method that nobody named: itself, or, where no record has its default settings, the few settings
    that its records have."""
    found, asked = set[tuple[tuple[str, str], ...]](), dict(source.assignments)
    for head in {tuple(run.head[name] for name in NAMES) + tuple(words_of(run.head["settings"]).items()): run.head
                 for run in runs}.values():  # one of all seeds
        try:
            changes = changed_settings(source.registry, head, head["dataset"], asked, source.tuned)
        except UserError:  # a plugin is not here, or has other settings now
            continue
        if not changes.keys() & asked.keys():  # else it is another one than --set asks for
            found.add(tuple((name, as_text(value)) for name, value in sorted(changes.items())
                            if name != "extra_metrics"))
        if () in found or len(found) > VARIANTS:
            return (method,)
    rows = [",".join(f"{name}={value}" for name, value in changes) for changes in sorted(found)]
    return tuple(f"{method}:{row}" for row in rows) or (method,)


def _is_asked(layout: Layout, head: Mapping[str, Any]) -> bool:
    backbones = {*map(spelled, layout.backbones), NO_BACKBONE}
    return (not layout.backbones or head["backbone"] in backbones) and (
        not layout.datasets or head["dataset"] in layout.datasets)


def _asked(layout: Layout, source: Source) -> Sequence[Run]:
    return [run for run in source.runs if _is_asked(layout, run.head)] or source.runs


def _methods(layout: Layout, source: Source) -> tuple[str, ...]:
    """The methods asked for, or all that have records and are installed; UserError for one that is not known."""
    runs: dict[str, list[Run]] = {head["method"]: [] for head in source.failed if _is_asked(layout, head)}
    for run in _asked(layout, source):
        runs.setdefault(run.head["method"], []).append(run)
    methods = layout.methods or tuple(row for method in sorted(runs) if source.registry.knows("method", method)
                                      for row in _recorded(method, runs[method], source))
    if layout.against and layout.against not in methods:
        if layout.methods:
            raise unknown("method in --against (one of the rows)", layout.against, methods)
        methods = (layout.against, *methods)
    if not methods:
        raise UserError("tables: no method of these records is loaded; name the folder of its file with --plugins DIR.")
    for name in (parse_method(method)[0] for method in methods):
        if not source.registry.knows("method", name):
            raise unknown("method", name, source.registry.names("method"))
    return methods


_Specs = Mapping[tuple[str, str, str], RunSpec]  # row, backbone and dataset to the runs that they stand for


def _specs(layout: Layout, chosen: Mapping[str, Iterable[str]], methods: Iterable[str], source: Source) -> _Specs:
    """What is shown, with settings of its own, or of all, checked; raises UserError. Rows that nobody named are left
    out where a backbone does not go with them or does not know their settings."""
    common, specs = dict(source.assignments), {}
    for row, backbone, dataset in product(methods, chosen["backbones"], chosen["datasets"]):
        spec = RunSpec.of(row, backbone, dataset)
        try:
            if spec.settings or common:
                spec = checked_spec(source.registry, spec, common, source.tuned)
        except UserError as error:
            if not layout.methods and spec.settings:
                continue
            if not isinstance(error, Incompatible):
                raise
        specs[row, backbone, dataset] = spec
    return specs


def _completed(layout: Layout, source: Source) -> tuple[Layout, _Specs, dict[str, list[str]]]:
    """The layout with every name, of those in the records where none was asked for; its specs; and of the datasets that
    are joined, their domains."""
    _check(layout)
    methods = _methods(layout, source)
    shown = [run for run in _asked(layout, source)
             if run.head["method"] in {parse_method(method)[0] for method in methods}]
    chosen = {}
    for kind, asked, known in (("backbone", map(spelled, layout.backbones), source.registry.names("backbone")),
                               ("dataset", layout.datasets, {run.head["dataset"] for run in source.runs})):
        there = sorted({run.head[kind] for run in shown})
        if len(there) > 1 and NO_BACKBONE in there:  # what needs none stands beside those on every backbone
            there.remove(NO_BACKBONE)
        names = tuple(dict.fromkeys(asked))
        require_known(kind, names, {*there, *known})
        chosen[f"{kind}s"] = names or tuple(there)
        shown = [run for run in shown if run.head[kind] in (*chosen[f"{kind}s"], NO_BACKBONE)]
    if not shown:
        raise UserError(f"tables: no records of {', '.join(methods)} on "
                        f"{', '.join(chosen['backbones']) or 'any backbone'}, "
                        f"{', '.join(chosen['datasets']) or 'any dataset'}; name others, or another folder with "
                        f"--records DIR.")
    specs = _specs(layout, chosen, methods, source)  # what is misspelt in --set is said first
    domains = {run.head["dataset"]: domains_of(run.head) for run in source.runs}
    return (replace(layout, methods=methods, metrics=_metrics(layout, shown), **chosen), specs,
            {dataset: domains.get(dataset, []) for dataset in chosen["datasets"]})


# From what is shown to the table


def _table(layout: Layout, specs: _Specs, blocks: int) -> PaperTable:
    """The layout as the definition of a table of so many blocks."""
    values = {"method": layout.methods, "backbone": layout.backbones, "dataset": layout.datasets,
              "metric": layout.metrics, "block": ("mean",)}
    down, across = list(layout.rows), list(layout.columns)
    if "block" in (*down, *across):
        values["block"] = (*(f"block{t}" for t in range(blocks)), "mean")
    unnamed = [name for name in DIMENSIONS if name not in (*down, *across, "block")]
    if "metric" in unnamed and (not across or len(layout.metrics) > 1):
        across.append("metric")
        unnamed.remove("metric")
    down = [name for name in unnamed if len(values[name]) > 1] + down
    return PaperTable(number=0, title="", datasets=layout.datasets, backbones=layout.backbones, rows=layout.methods,
                      metrics=layout.metrics, columns=values["block"], stub=tuple(_PARTS[name] for name in down),
                      across=tuple(_PARTS[name] for name in across), row_spec=lambda *name: specs[name], best="max",
                      only=tuple(dict.fromkeys((backbone, row) for row, backbone, _ in specs)), apart=True,
                      baseline=layout.against)


def _names(layout: Layout, joined: Sequence[Sequence[str]], blocks: int) -> Callable[[str], str]:
    """What things are called: by a paper's labels if one is named."""
    titles = {text: RunSpec.of(text, "", "").title for text in layout.methods}
    if all(joined):
        domains = joined[0] if len(joined) == 1 else [f"domain {number}" for number in range(max(map(len, joined)))]
        titles |= {f"block{t}": name for t, name in enumerate(block_names(domains, blocks))}
    labels = get(layout.paper).LABELS if layout.paper else {}

    def label(name: str) -> str:
        name = titles.get(name, name)
        if name.startswith("block") and name[5:].isdecimal():
            return f"block {name[5:]}"
        return labels.get(name, name)
    return label


def _printed(paper: str | None) -> dict[Key, Printed]:
    """The averages that a paper prints in any of its tables, the first where several have one."""
    printed: dict[Key, Printed] = {}
    for cells in get(paper).printed().values() if paper else ():
        for key, number in cells.items():
            if key.column in _AVERAGES:
                printed.setdefault(key._replace(column="mean"), number)
    return printed


def _title(layout: Layout, label: Callable[[str], str], panels: bool) -> str:
    """What the numbers are: the metrics, and the backbone and the dataset that all of them have. A panel names its
    backbone itself."""
    alone = [label(names[0]) for names in (() if panels else layout.backbones, layout.datasets) if len(names) == 1]
    title = ", ".join(map(label, layout.metrics))
    return f"{title} on {', '.join(alone)}" if alone else title


def _about(layout: Layout, label: Callable[[str], str], built: Table, runs: Sequence[Run],
           domains: bool) -> Iterable[str]:
    """What the numbers and the marks mean; which metrics are not kept per user and so cannot be tested."""
    several = {len(incremental(run)) for run in runs} - {1}
    yield ("Mean ± sample standard deviation over seeds of the metric on the block just trained"
           + (f", averaged over the {'domains' if domains else 'blocks but block 0'}." if several else "."))
    if users := {run.head["settings"].get("pilot_users") for run in runs} - {None, 0}:
        yield pilot_note(users)
    yield from (f"{group}: {GROUPS[group]}." for group in layout.by)
    if layout.by and several:
        yield "Blocks without anybody of a group are left out of its average."
    if layout.paper:
        yield f"In parentheses: what {get(layout.paper).TITLE} prints."
    if layout.against:
        yield (f"*, °: significantly better, worse than {label(layout.against)}: two-sided paired t-test over users, "
               f"Holm's correction over the other methods, p ≤ {LEVEL:.2f}.")
        tested = {cell.key.metric for cell in built.cells() if cell.p is not None}
        if untested := [label(metric) for metric in layout.metrics if metric not in tested]:
            yield (f"Not tested: {', '.join(untested)}; no record of a pair holds it per user, or no seed is common.")
        there = {cell.key for cell in built.cells() if cell.mean is not None}
        if cells := [f"{label(cell.key.row)} on {label(cell.key.backbone)}, {label(cell.key.dataset)}"
                     for cell in built.cells() if cell.key in there and cell.p is None and cell.key.metric in tested
                     and cell.key.column == "mean" and cell.key.row != layout.against
                     and cell.key._replace(row=layout.against) in there]:
            yield f"Not tested: {'; '.join(dict.fromkeys(cells))}; no seed is common, or users' scores are missing."


def build_any(layout: Layout, source: Source) -> Table:
    """A table of any records; raises UserError for an unknown name, metric or dimension; for records that cannot stand
    in one table."""
    everything = not layout.methods
    layout, specs, domains = _completed(layout, source)
    common, source = source.assignments, replace(source, assignments=())  # the specs of the rows have them
    runs = {name: find(source, spec)[0] for name, spec in specs.items()}
    shown = [run for several in runs.values() for run in several]
    blocks = max(run.head["blocks"] for run in shown or source.runs)
    seeds = max((run.seed + 1 for run in shown), default=5)  # as the others have
    label, table = _names(layout, list(domains.values()), blocks), _table(layout, specs, blocks)
    for dataset in layout.datasets:
        same_tests([run for name, several in runs.items() if name[2] == dataset for run in several], "tables")
    built = filled(Filling(table, source, label, printed=_printed(layout.paper), common=common),
                   _title(layout, label, table.panels),
                   remake=lambda specs: command_for(specs, source.tuned, source.where, seeds))
    about = list(_about(layout, label, built, shown, all(domains.values())))
    unloaded = {method for run in source.runs if not source.registry.knows("method", method := run.head["method"])}
    if unloaded and everything:
        about.append(f"Left out, as --plugins has no file of theirs: {', '.join(sorted(unloaded))}.")
    names = {f"{label(name[0])}: other settings than {label(against[0])}: {differ}." for name, several in runs.items()
             if (against := (layout.against, *name[1:])) in runs and several and runs[against]
             and (differ := unequal(several[0], runs[against][0], source.registry, source.tuned))}
    return replace(built, notes=(*about, *sorted(names), *built.notes))
