"""The page over all papers: the standing of every printed number, what decides it, and what could have been seen."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Callable, Iterable, Iterator, Sequence

from matplotlib.figure import Figure

from ..experiments.papers import PAPERS, Key, PaperTable, Reading
from ..core.text import for_csv, for_markdown
from ..runs.specs import seed_text
from .standing_figure import Band, Side, squares
from .standing import DIFFERS, MARKS, MIN_SEEDS, Judged, judge, printed_lead, rules
from .tables import DASH, Source, build, p_text

CSV_FIELDS = ("paper", "table", "dataset", "backbone", "row", "metric", "column", "printed", "ours", "std", "seeds",
              "standing", "reason", "reading", "difference", "p", "users", "detectable", "printed_difference")
_UNKNOWN = "not known"
_CONTRADICTION = "the paper prints another number that contradicts it"


@dataclass(frozen=True)
class Entry:
    """A printed number with its standing in one reading.

    Attributes:
        key: its place in the paper's table; rows that stand for one printed line share it.
    """

    paper: str
    table: PaperTable
    key: Key
    reading: Reading
    judged: Judged

    @property
    def definitions(self) -> ModuleType:
        return PAPERS[self.paper]

    @property
    def decides(self) -> bool:
        """Whether there is a number of enough seeds; statistics have none."""
        cell = self.judged.cell
        return cell.mean is not None and (not cell.seeds or len(cell.seeds) >= MIN_SEEDS)


def entries(paper: str, source_of: Callable[[Reading], Source]) -> list[Entry]:
    """Every cell of a paper's tables in every reading, in the order of both.

    Raises:
        UserError: as ``tables.build``.
    """
    definitions, result = PAPERS[paper], []
    for reading in definitions.READINGS:
        source = source_of(reading)
        for number in reading.tables:
            table = definitions.TABLES[number]
            built = build(paper, table, source)
            for key, judged in judge(paper, table, built.cells(), source).items():
                line = key._replace(row=definitions.SAME_LINE.get(key.row, key.row))
                result.append(Entry(paper, table, line, reading, judged))
    return result


def deciding(everything: Iterable[Entry]) -> list[Entry]:
    """One entry per printed number: the first that decides, or the first of all; in the order of tables."""
    places: dict[tuple, list[Entry]] = {}
    for entry in everything:
        places.setdefault((entry.paper, entry.table.number, entry.key), []).append(entry)
    chosen = [next((entry for entry in candidates if entry.decides), candidates[0]) for candidates in places.values()]
    return sorted(chosen, key=lambda entry: (list(PAPERS).index(entry.paper), entry.table.number))


def counts(chosen: Iterable[Entry]) -> list[int]:
    """How many numbers there are, and how many of each standing in the order of ``MARKS``."""
    kinds = Counter(entry.judged.standing.kind for entry in chosen)
    return [sum(kinds.values()), *(kinds[kind] for kind in MARKS)]


def _judged() -> dict[str, ModuleType]:
    """The papers of which runs were published."""
    return {paper: definitions for paper, definitions in PAPERS.items() if definitions.READINGS}


# The figure


def figure(chosen: Sequence[Entry]) -> Figure:
    """A square per printed number."""
    kinds = {(entry.paper, entry.table.number, entry.key): entry.judged.standing.kind for entry in chosen}
    sides = []
    for paper, definitions in _judged().items():
        bands = [band for table in definitions.TABLES.values() for panel in (table.backbones if table.panels else ("",))
                 if (band := _band(paper, table, panel, kinds))]
        sides.append(Side(definitions.TITLE, tuple(definitions.DATASETS.values()), tuple(bands)))
    return squares(sides)


def _band(paper: str, table: PaperTable, panel: str, kinds: dict[tuple, str]) -> Band | None:
    """A table's squares, or those of one of its panels; rows and columns without a printed number are left out."""
    definitions = PAPERS[paper]
    names = {"backbone": (panel,) if panel else table.backbones, "row": table.rows, "metric": table.metrics,
             "column": table.columns}
    downs, acrosses = ([dict(zip(parts, values)) for values in product(*(names[part] for part in parts))]
                       for parts in ([part for part in of_table if part != "dataset"]
                                     for of_table in (table.stub, table.across)))
    whole = {part: values[0] for part, values in names.items()}

    def kind(dataset: str, down: dict[str, str], across: dict[str, str]) -> str | None:
        return kinds.get((paper, table.number, Key(dataset, **{**whole, **down, **across})))
    downs = [down for down in downs if any(kind(*where) for where in product(table.datasets, [down], acrosses))]
    acrosses = [across for across in acrosses
                if any(kind(*where) for where in product(table.datasets, downs, [across]))]
    if not downs:
        return None

    def label(parts: dict[str, str]) -> str:
        backbone = parts.get("backbone", "")
        shown = " ".join(definitions.label(table.number, name) for part, name in parts.items() if part != "backbone")
        return f"{shown} on {definitions.LABELS[backbone]}" if backbone else shown
    title = f"{table.number} {table.title}" + (f", {definitions.LABELS[panel]}" if panel and len(table.backbones) > 1
                                               else "")
    return Band(title, tuple(map(label, downs)), tuple(map(label, acrosses)),
                {definitions.LABELS[dataset]: [[kind(dataset, down, across) for across in acrosses] for down in downs]
                 for dataset in table.datasets})


# The page


def page(everything: Sequence[Entry], made_by: str, picture: str, table: str) -> str:
    """The page as Markdown; the same records give the same bytes.

    Args:
        everything: of all papers, see ``entries``.
        made_by: the command that makes it.
        picture, table: files of the figure and of ``csv_text`` beside the page.
    """
    chosen = deciding(everything)
    runs = ", ".join(f"{definitions.LABELS[definitions.OURS]} {definitions.PRINTED_RUNS}"
                     for definitions in _judged().values())
    lines = [
        "# Standing of every printed number", "", f"Generated by `{made_by}`; not to be edited.", "",
        f"The tables of {len(_judged())} papers print {len(chosen):,} numbers. Each has one of five standings here. "
        f"[{table}]({table}) has them one by one: printed, ours, standing and reason.", "",
        f"![A square per printed number, coloured by its standing]({picture})", "", *rules(runs), "",
        "## Counts", "", *_counted(chosen), "", "## Which runs decide", "",
        f"A paper can be read in several ways. These were run. A number is judged by the first reading, in the order "
        f"below, that has at least {MIN_SEEDS} seeds of it. The best of several is not taken: that would favour "
        f"agreement. The counts are those of each reading alone, of the numbers that it has.", "",
        *_by_reading(everything), "", "## Reasons", "", *_reasons(chosen), "",
        "## Which difference could have been seen", "", *_power(chosen)]
    return "\n".join(lines) + "\n"


def _row(words: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, words))} |"


def _counted(chosen: Sequence[Entry]) -> Iterator[str]:
    yield _row(["paper", "table", "numbers", *(f"{mark} {kind}" for kind, mark in MARKS.items())])
    yield "|---|---|" + "--:|" * (1 + len(MARKS))
    for paper, definitions in _judged().items():
        of_paper = [entry for entry in chosen if entry.paper == paper]
        name = definitions.LABELS[definitions.OURS]
        for number, table in definitions.TABLES.items():
            yield _row([name, f"{number} {table.title}", *counts(e for e in of_paper if e.table.number == number)])
        yield _row([f"**{name}**", "all", *counts(of_paper)])
    yield _row(["**all**", "all", *counts(chosen)])


def _by_reading(everything: Sequence[Entry]) -> Iterator[str]:
    yield _row(["paper", "reading", "records", "tables", "numbers", *MARKS.values()])
    yield "|---|---|---|---|" + "--:|" * (1 + len(MARKS))
    for definitions in _judged().values():
        for reading in definitions.READINGS:
            here = deciding(entry for entry in everything if entry.reading is reading)
            folder = f"`{reading.folder}`" if reading.folder else DASH
            yield _row([definitions.LABELS[definitions.OURS], reading.title, folder, seed_text(reading.tables),
                        *counts(entry for entry in here if entry.judged.cell.mean is not None)])


def _reason(entry: Entry) -> str:
    """Why a number has its standing, as the table of reasons counts it."""
    cell, standing = entry.judged.cell, entry.judged.standing
    if standing.kind == DIFFERS and not standing.reason:
        return _UNKNOWN
    if standing.reason and standing.reason == cell.contradiction:
        return _CONTRADICTION
    if standing.reason == cell.missing:  # without the names of records and files
        return standing.reason.partition(";")[0].partition(" (")[0]
    return standing.reason


def _reasons(chosen: Sequence[Entry]) -> Iterator[str]:
    count = Counter((entry.judged.standing.kind, PAPERS[entry.paper].LABELS[PAPERS[entry.paper].OURS], _reason(entry))
                    for entry in chosen)
    yield _row(["standing", "paper", "reason, as far as it is known", "numbers"])
    yield "|---|---|---|--:|"
    order = list(MARKS)
    for (kind, paper, reason), number in sorted(count.items(), key=lambda item: (
            order.index(item[0][0]), item[0][1], -item[1], item[0][2])):
        if reason:
            yield _row([kind, paper, for_markdown(reason), number])


def compared(chosen: Iterable[Entry]) -> list[tuple[Entry, float]]:
    """The methods that were compared with FT by the number that their paper compares them by, and the paper's
    difference in it."""
    result = []
    for entry in chosen:
        table, key, definitions = entry.table, entry.judged.cell.key, entry.definitions
        if entry.judged.against and table.lead and (key.metric, key.column) == (table.lead.metric, table.lead.column):
            ours, base = (printed_lead(definitions, table, key._replace(row=row)) for row in (key.row,
                                                                                            definitions.BASELINE))
            result.append((entry, ours - base))
    return result


def _power(chosen: Sequence[Entry]) -> Iterator[str]:
    pairs = compared(chosen)
    tested = [(entry, printed) for entry, printed in pairs if not entry.judged.cell.is_reference]
    small = sum(abs(printed) < entry.judged.against.detectable for entry, printed in tested)
    yield ("Every method against FT, by the number that its paper compares methods by. The minimum detectable "
           "difference is what the test, a two-sided paired t-test over users at .05, finds with probability .8. It "
           "follows from how many users there are, and from how much the methods' scores differ from user to user once "
           "seeds are averaged (Cohen, 1988: the t distribution with noncentrality m √n / s). Smaller differences may "
           "exist; a test that does not see them says nothing about them.")
    yield ""
    yield (f"In {small} of {len(tested)} comparisons the printed difference is smaller than that, so our test would "
           f"probably have missed it. Where the answer is yes and p is large, a difference like the printed one is "
           f"unlikely on these users under our settings. Settings near FT's make the scores differ less, and so what "
           f"can be detected smaller; that says nothing of other settings. Our difference is a mean over users, and "
           f"the printed one a mean of means over blocks. Rows that are FT in effect (= FT) are not counted.")
    yield ""
    yield _row(["paper", "dataset", "backbone", "method", "our difference", "p", "users", "seeds",
                "minimum detectable", "the paper's difference", "would have been seen"])
    yield "|---|---|---|---|--:|--:|--:|---|--:|--:|---|"
    for entry, printed in pairs:
        cell, against, labels = entry.judged.cell, entry.judged.against, entry.definitions.LABELS
        seen = "yes" if abs(printed) >= against.detectable else "no"
        tests = [p_text(against.p), against.users, seed_text(cell.seeds), f"{against.detectable:.4f}"]
        if cell.is_reference:
            tests, seen = ["= FT", against.users, seed_text(cell.seeds), DASH], DASH
        yield _row([labels[entry.definitions.OURS], labels[cell.key.dataset], labels[cell.key.backbone],
                    labels[cell.key.row], f"{against.difference:+.4f}", *tests, f"{printed:+.4f}", seen])


# One by one


def csv_text(chosen: Iterable[Entry]) -> str:
    """One line per printed number; six decimals, and empty what there is not."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_FIELDS)

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.6f}"
    for entry in chosen:
        cell, standing, against = entry.judged.cell, entry.judged.standing, entry.judged.against
        tests = [number(against.difference), number(against.p), against.users, number(against.detectable),
                 number(against.printed)] if against else [""] * 5
        reading = entry.reading.title if cell.mean is not None else ""
        writer.writerow([entry.paper, entry.table.number, *entry.key, cell.printed.text, number(cell.mean),
                         number(cell.std), seed_text(cell.seeds), standing.kind, for_csv(standing.reason), reading,
                         *tests])
    return buffer.getvalue()
