"""What is said below a table: what its numbers are, how they were tested, of how many users, and what is missing."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Callable, Iterable, Iterator, Mapping, Sequence

from ..evaluation.metrics import is_share
from ..experiments.papers import Key, PaperTable
from ..records.frames import still_improving
from ..records.store import leak_notes
from ..runs.registry import Registry
from ..runs.specs import RunSpec, seed_text
from ..stats.significance import ALIKE, FEW_USERS, interval_of_mean
from .cells import Cell, Filling
from .comparison import ONE_SEED
from .frame import split_group
from .selection import DAGGER, Source, grid_command

GRID_SEEDS = 5  # of the command for a missing cell when no other cell says how many there are


def p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def p_of(cell: Cell) -> str:
    """A cell's p over users and, where there are several, over seeds."""
    return " / ".join(p_text(p) for p in (cell.p, cell.p_seeds) if p is not None)


def pilot_note(users: Iterable[int]) -> str:
    return (f"Of pilots with {', '.join(f'{n:,}' for n in sorted(users))} users of each domain; comparable with no "
            f"numbers of all users.")


def given_up(registry: Registry, specs: Mapping[str, RunSpec]) -> Iterator[str]:
    """Which methods, by what they are called, give up a constraint on purpose."""
    which = {name: registry.gives_up(spec.method, dict(spec.settings)) for name, spec in specs.items()}
    if bounds := [f"{name} ({', '.join(each)})" for name, each in which.items() if each]:
        yield f"These give up a constraint on purpose (docs/constraints.md): {', '.join(bounds)}."


def _line(filling: Filling, place: Sequence[str]) -> str:
    """A line of the table, of which a cell's key may be given too."""
    dataset, backbone, row, *_ = map(filling.label, place)
    return f"{row} on {backbone}, {dataset}"


def notes(filling: Filling) -> Iterator[str]:
    """What the numbers mean, which seeds they are of, and how they were tested."""
    table = filling.table
    yield from table.notes
    yield from leak_notes((_line(filling, place), run.head["settings"])
                          for place, runs in filling.runs.items() for run in runs)
    yield from _seeds(filling)
    yield from _rising(filling)
    if table.added:
        yield f"Not in the paper: {', '.join(map(filling.label, table.added))}. `compare` tests them."
    yield from given_up(filling.source.registry, {filling.label(name): spec for name, spec in filling.specs.items()})
    if users := filling.source.pilot_users:
        yield f"{pilot_note([users])} So the paper's are not shown."
    if any(cell.is_reference for cell in filling.cells.values()):
        yield (f"= FT: on every later block and seed these metrics are less than {ALIKE:.4f} away from FT's, so with "
               f"its settings the method is FT in effect.")
    yield from filling.tests
    yield from _over_seeds(filling)


def _rising(filling: Filling) -> Iterator[str]:
    lines = []
    for place, runs in filling.runs.items():
        if rising := sum(len(still_improving(run.rounds)) for run in runs):
            blocks = sum(run.rounds["step"].nunique() for run in runs)
            lines.append(f"{_line(filling, place)} ({rising} of {blocks})")
    if lines:
        yield f"Validation was still improving in the last round of blocks of {'; '.join(lines)}."


def _over_seeds(filling: Filling) -> Iterator[str]:
    """How many of the marked numbers are significant over seeds as well; that a test has a single seed."""
    tested = [cell for cell in filling.cells.values() if cell.p is not None]
    if marked := [cell.holds for cell in tested if (cell.star or cell.worse) and cell.p_seeds is not None]:
        marks, how = ("* or °", ", corrected alike") if filling.table.baseline else ("*", "")
        yield (f"Numbers with {marks}: {len(marked)}; significant over seeds as well: {sum(marked)} (the same test of "
               f"each seed's average over users{how}).")
    if lacking := sum(cell.p_seeds is None for cell in tested):
        yield f"{ONE_SEED.capitalize()} ({lacking} of {len(tested)} tests)."


def footnotes(filling: Filling) -> Iterator[tuple[str, str]]:
    for key, cell in filling.cells.items():
        if cell.mark:
            place = ", ".join(filter(None, map(filling.label, (key.metric, key.column))))
            yield cell.mark, f"{_line(filling, key)}, {place}: {cell.contradiction}."
    if filling.daggers:
        yield DAGGER, "Re-implementation from the description: its code was never released."


def _usual_seeds(cells: Iterable[Cell]) -> tuple[int, ...]:
    counts = Counter(cell.seeds for cell in cells if cell.seeds)
    return max(counts, key=lambda seeds: (counts[seeds], len(seeds), seeds)) if counts else ()


def _seeds(filling: Filling) -> Iterator[str]:
    """How many seeds there are, and which cells have others."""
    if not (usual := _usual_seeds(filling.cells.values())):
        return
    yield ("1 seed, so no deviation" if len(usual) == 1 else f"{len(usual)} seeds") + f" ({seed_text(usual)})."
    others: dict[tuple[int, ...], dict[str, None]] = {}
    for key, cell in filling.cells.items():
        if cell.seeds and cell.seeds != usual:
            others.setdefault(cell.seeds, {})[_line(filling, key) + " (change)" * (key.column == "change")] = None
    for seeds, names in others.items():
        yield f"Other seeds ({seed_text(seeds)}): {'; '.join(names)}."


def _interval_key(cell: Cell) -> tuple[bool, float]:
    """Whether the interval of a cell's mean can be told, and the mean: not of metrics that may lie beyond [0, 1], and
    not of users who were chosen for their values."""
    metric, group = split_group(cell.key.metric)
    return is_share(metric) and group != "worst-decile", cell.mean


def tested(filling: Filling) -> Iterator[str]:
    """How many users the tests have, and how many interactions these are to find; what that means if they are few."""
    label, most = filling.label, {}  # the cell of most users of a test's column, by dataset and group of its users
    for key, cell in filling.cells.items():
        if cell.users and key.column != "change":
            here = most.setdefault((key.dataset, split_group(key.metric)[1]), {})
            here[key.column] = max(here.get(key.column, cell), cell, key=_interval_key)
    for (dataset, group), columns in most.items():
        if len(columns) > 1:  # those of the blocks are those of their average, and those of all domains of the mean
            columns = {column: cell for column, cell in columns.items() if column not in ("avg", "mean")}
        where = {column: label(column) if column not in ("value", "mean") else "" for column in columns}
        for what in ("users", "interactions"):
            counts = [", ".join(f"{n:,}" for n in getattr(cell, what)) + f" ({where[column]})" * bool(where[column])
                      for column, cell in columns.items() if getattr(cell, what)]
            if counts:
                yield f"Test {what} of {label(dataset)}{f', {group}' * bool(group)}: {', '.join(counts)}."
        for column, cell in columns.items():
            if (users := min(cell.users)) < FEW_USERS and len(cell.users) > 1:
                yield f"Only {users} test user{'s' * (users > 1)} in a part of {label(dataset)}."
            elif users < FEW_USERS and _interval_key(cell)[0]:
                low, high = interval_of_mean(cell.mean, users)
                yield (f"Only {users} test user{'s' * (users > 1)}{f' in {where[column]}' * bool(where[column])}: the "
                       f"95 % interval of {_line(filling, cell.key)} ({cell.mean:.4f}) is {low:.4f} to {high:.4f}.")


def command(paper: str, table: PaperTable, source: Source, seeds: int, datasets: Iterable[str] = (),
            backbones: Iterable[str] = (), methods: Iterable[str] = ()) -> str:
    """The command that makes the missing records of some cells: those of the paper, or those of added methods."""
    names = [word for kind, chosen in (("datasets", datasets), ("backbones", backbones), ("methods", methods))
             if chosen for word in (f"--{kind}", ",".join(dict.fromkeys(chosen)))]
    runs = () if {*methods} & {*table.added} else ("--paper", paper, "--table", str(table.number))
    return grid_command((*runs, *names), source.assignments, source.tuned, source.where, seeds)


def missing(filling: Filling, paper: str, remake: Callable[[Sequence[RunSpec]], str] | None) -> Iterator[str]:
    """Sentences that name every cell without a number of ours, one per dataset and reason."""
    table, cells = filling.table, filling.cells
    groups: dict[tuple[str, str, str, bool], list[Key]] = {}
    for key, cell in cells.items():
        if cell.missing:
            groups.setdefault((key.dataset, key.backbone, cell.missing, key.row in table.added), []).append(key)
    alike: dict[tuple, list[str]] = {}  # backbones on which the same cells of a dataset are missing
    for (dataset, backbone, reason, _), keys in groups.items():
        rows, columns = (tuple(dict.fromkeys(getattr(key, part) for key in keys)) for part in ("row", "column"))
        whole = [key for key in cells if (key.dataset, key.backbone) == (dataset, backbone) and key.row in rows]
        alike.setdefault((dataset, reason, rows, columns if len(keys) < len(whole) else ()), []).append(backbone)
    for (dataset, reason, rows, columns), backbones in alike.items():
        if table.row_spec is None:
            yield f"missing: statistics of {dataset}: {reason}."
            continue
        part = f" ({', '.join(columns)})" if columns and len(table.columns) > 1 else ""
        run = "."
        if reason.startswith("no record"):
            specs = [table.row_spec(row, backbone, dataset) for backbone, row in product(backbones, rows)]
            seeds = len(_usual_seeds(cells.values())) or GRID_SEEDS
            run = "; run: " + (remake(specs) if remake else command(paper, table, filling.source, seeds, [dataset],
                                                                     backbones, [spec.method for spec in specs]))
        lacking = " on ".join(filter(None, (", ".join(rows), ", ".join(backbones))))
        yield f"missing: {lacking}, {dataset}{part}: {reason}{run}"
