"""A rebuilt table as Markdown, LaTeX (booktabs), CSV, or drawn for a terminal."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any, Callable, Sequence, TypeVar

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ..core.text import for_csv, for_latex as tex, for_markdown, for_terminal
from .selection import DAGGER
from .cells import DASH, Cell, Line, Panel, Table
from .tables import REFERENCE

T = TypeVar("T")
FORMATS = {"md": "md", "latex": "tex", "csv": "csv"}  # format -> ending of its file
WORSE = "°"  # behind a number that is significantly below the baseline's


def number(cell: Cell, value: float, signed: bool = True, decimals: int | None = None) -> str:
    """A value with the cell's decimals, or others; changes carry their sign, counts a thousands separator."""
    sign = "+" if signed and cell.key.column == "change" else ""
    return f"{value:{sign},.{cell.decimals if decimals is None else decimals}f}"


def printed(cell: Cell) -> str:
    value = cell.printed.value
    return cell.printed.text if value is None else number(cell, value, decimals=cell.printed.decimals)


def ours(cell: Cell) -> str:
    """Our number as text, marked where it is FT's; a dash without a record."""
    if cell.mean is None:
        return DASH
    deviation = f" ± {number(cell, cell.std, signed=False)}" if cell.std is not None else ""
    return number(cell, cell.mean) + deviation + (" = FT" if cell.is_reference else "")


def _heading(table: Table, panel: Panel) -> str:
    return f"{table.heading}, {panel.title}" if panel.title else table.heading


def _stars(cell: Cell) -> str:
    return "*" if cell.star else WORSE if cell.worse else ""


def _columns(table: Table, lines: Sequence[Line], text: Callable[[str], T], number_of: Callable[[Cell | None], T],
             heads: Sequence[str] | None = None) -> tuple[list[list[T]], list[list[T]]]:
    """The columns of labels and of numbers of some lines, each with its heading first; labels that repeat the line
    above are empty."""
    heads = heads or table.heads
    labels, before = [], ()
    for line in lines:
        same = next((i for i, label in enumerate(line.labels[:-1]) if line.labels[:i + 1] != before[:i + 1]),
                    len(line.labels) - 1)
        labels.append(("",) * same + line.labels[same:])
        before = line.labels
    return ([[text(head), *(text(line[i]) for line in labels)] for i, head in enumerate(table.stub)],
            [[text(head), *(number_of(line.cells[i]) for line in lines)] for i, head in enumerate(heads)])


def _begins(stub: Sequence[Sequence[Any]], row: int) -> bool:
    """Whether a rule stands above a row, which counts from 1: its first label of several is a new one."""
    return row > 1 and len(stub) > 1 and bool(stub[0][row])


def _widths(columns: Sequence[Sequence[Sequence[Text]]]) -> list[list[int]]:
    """In characters, of each column of labels and of numbers, with the gap beside it."""
    return [[max(map(len, column)) + 2 for column in kind] for kind in columns]


def _parts(stub: Sequence[int], columns: Sequence[int], width: int) -> list[range]:
    """The columns in as few parts as fit the width beside the stub, of about the same number each."""
    free = max(width - sum(stub), max(columns))
    for count in range(1, len(columns) + 1):
        size = -(-len(columns) // count)
        parts = [range(i, min(i + size, len(columns))) for i in range(0, len(columns), size)]
        if all(sum(columns[i] for i in part) <= free for part in parts):
            return parts
    return [range(i, i + 1) for i in range(len(columns))]


# Markdown

def _md_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    mean = ours(cell).partition(" ± ")
    shown = {1: f"**{mean[0]}**", 2: f"<u>{mean[0]}</u>"}.get(cell.rank, mean[0])
    text = shown + _stars(cell).replace("*", "\\*") + "".join(mean[1:])
    if cell.printed is not None:
        mark = f"<sup>{cell.mark}</sup>" if cell.mark else ""
        text += f" ({printed(cell)}" + ("\\*" if cell.printed.star else "") + f"{mark})"
    return text


def markdown(table: Table) -> str:
    """The table as Markdown: best in bold, second underlined, the paper's number in parentheses."""
    out = []
    for panel in table.panels:
        stub, numbers = _columns(table, panel.lines, for_markdown, _md_cell)
        head, *rows = (f"| {' | '.join(row)} |" for row in zip(*stub, *numbers))
        out += [f"**{for_markdown(_heading(table, panel))}**", "", head,
                "|" + "---|" * len(stub) + "--:|" * len(numbers), *rows, ""]
    out += [f"- {for_markdown(note)}" for note in (*table.notes, *table.tested)]
    out += [f"- <sup>{mark}</sup> {for_markdown(text)}" for mark, text in table.footnotes]
    out += [f"- {for_markdown(sentence)}" for sentence in table.missing]
    return "\n".join(out) + "\n"


# LaTeX

PAGE_WIDTH = 130  # of two columns, in characters of \scriptsize; `adjustbox` makes smaller what is wider in the end
PAGE_HEIGHT = 200  # and so of a rotated table, which may be made a little smaller
FEW_LINES = 20  # of a table that is split and not rotated
MOST_LINES = 48  # on a page, with captions and notes
COLUMN_GAP = 3  # points on either side of a column


def _tex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    mean, _, std = ours(cell).partition(" ± ")
    text = {1: rf"\textbf{{{tex(mean)}}}", 2: rf"\underline{{{tex(mean)}}}"}.get(cell.rank, tex(mean))
    text += ("$^{*}$" if cell.star else tex(_stars(cell))) + (rf"{{\tiny$\pm${std}}}" if std else "")
    if cell.printed is not None:
        mark = (["*"] if cell.printed.star else []) + ([cell.mark] if cell.mark else [])
        text += f" ({tex(printed(cell))}" + (rf"$^{{{','.join(mark)}}}$" if mark else "") + ")"
    return text


def _floats(table: Table, panel: Panel) -> tuple[str, list[list[str]]]:
    """The environment of a panel's floats, and the lines of each.

    Where one tabular would be wider than a page it is rotated. If that does not help, or there are few lines, it is
    split into several below each other. What is too high for a page goes to the next.
    """
    widths = _widths(_columns(table, panel.lines, _plain, _drawn_cell, _innermost(table)))
    parts = _parts(*widths, PAGE_WIDTH)
    if len(parts) > 1 and FEW_LINES < len(panel.lines) <= MOST_LINES and sum(map(sum, widths)) <= PAGE_HEIGHT:
        return "sidewaystable*", [_tabular(table, panel.lines, range(len(table.heads)))]
    floats: list[list[str]] = []
    room = 0
    for lines in _pages(panel.lines):
        high = len(lines) + 1 + len(table.columns[0])
        for part in parts:
            if room < high:
                floats.append([])
                room = MOST_LINES
            floats[-1] += [r"\par\medskip"] if floats[-1] else []
            floats[-1] += _tabular(table, lines, part)
            room -= high
    return "table*", floats


def _innermost(table: Table) -> list[str]:
    """The headings of columns of numbers, without those that stand above several."""
    return [column[-1] if column else "" for column in table.columns]


def _group_heads(columns: Sequence[tuple[str, ...]], stub: int) -> list[str]:
    """A line per level of labels but the innermost, each label above all its columns with a rule below it."""
    out = []
    for level in range(1, len(columns[0])):
        groups = [(labels[-1], len(list(group))) for labels, group in
                  itertools.groupby([column[:level] for column in columns])]
        ends = list(itertools.accumulate((count for _, count in groups), initial=stub))
        heads = [rf"\multicolumn{{{count}}}{{c}}{{{tex(label)}}}" for label, count in groups]
        rules = [rf"\cmidrule(lr){{{begin + 1}-{end}}}" for begin, end in zip(ends, ends[1:])]
        out += [" & ".join([*[""] * stub, *heads]) + r" \\", " ".join(rules)]
    return out


def _pages(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines in as few parts as pages hold, each beginning with a new first label if that is possible."""
    parts: list[list[Line]] = [[]]
    groups = [list(group) for _, group in itertools.groupby(lines, lambda line: line.labels[:1])]
    for group in groups:
        for chunk in (group[i:i + MOST_LINES - 2] for i in range(0, len(group), MOST_LINES - 2)):
            if len(parts[-1]) + len(chunk) > MOST_LINES - 2:
                parts.append([])
            parts[-1] += chunk
    return parts


def _tabular(table: Table, lines: Sequence[Line], part: Sequence[int]) -> list[str]:
    """Some lines and columns as LaTeX; no wider than what surrounds it."""
    stub, numbers = _columns(table, lines, tex, _tex_cell, _innermost(table))
    head, *rows = (" & ".join(row) + r" \\" for row in zip(*stub, *(numbers[i] for i in part)))
    ruled = [line for i, row in enumerate(rows, 1) for line in ([r"\midrule"] if _begins(stub, i) else []) + [row]]
    return [r"\begin{adjustbox}{max width=\linewidth}", rf"\begin{{tabular}}{{{'l' * len(stub)}{'r' * len(part)}}}",
            r"\toprule", *_group_heads([table.columns[i] for i in part], len(stub)), head, r"\midrule", *ruled,
            r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}"]


def latex(table: Table) -> str:
    """The table as LaTeX, one ``table*`` per backbone; compiles where booktabs and adjustbox are loaded.

    It fits a page of two columns: a wider one is rotated, or split with its first columns repeated, and a higher one
    goes on in the next. Why cells are missing, and the commands that make them, stand in comments.
    """
    out = []
    for panel in table.panels:
        environment, floats = _floats(table, panel)
        words = [table.paper, str(table.number)] if table.number else ["results"]
        name = "-".join([*words, *re.findall(r"[a-z0-9]+", panel.title.lower())])
        for i, tabulars in enumerate(floats):
            last = panel is table.panels[-1] and tabulars is floats[-1]
            label = [] if i else [rf"\label{{tab:{name}}}"]
            number = [r"\addtocounter{table}{-1}"] if i else []  # the same table, so the same number
            out += [rf"\begin{{{environment}}}" + ("[t]" if environment == "table*" else ""), r"\centering", *number,
                    rf"\caption{{{tex(_heading(table, panel))}{' (continued)' if i else ''}.}}", *label, r"\scriptsize",
                    rf"\setlength{{\tabcolsep}}{{{COLUMN_GAP}pt}}", *tabulars, *(_tex_notes(table) if last else ()),
                    rf"\end{{{environment}}}"]
    packages = "booktabs,adjustbox" + (",rotating" if any("sidewaystable" in line for line in out) else "")
    out += [f"% {for_terminal(' '.join(sentence.split()))}" for sentence in table.missing]
    return "\n".join([rf"% needs \usepackage{{{packages}}}", *out]) + "\n"


def _tex_notes(table: Table) -> list[str]:
    notes = [tex(note) for note in (*table.notes, *table.tested)]
    notes += [f"{tex(mark) if mark == DAGGER else rf'$^{{{mark}}}$'} {tex(text)}" for mark, text in table.footnotes]
    notes += ["--: no number of ours."] if table.missing else []
    return [r"\par\smallskip", r"\begin{minipage}{\linewidth}\footnotesize\raggedright",
            *(rf"{note}\par" for note in notes), r"\end{minipage}"]


# CSV

CSV_FIELDS = ("table", "dataset", "backbone", "row", "metric", "column", "mean", "std", "seeds", "paper", "paper_star",
              "rank", "star", "p", "p_seeds", "contradiction", "missing", "records", "equals",
              "users", "interactions")


def csv_text(table: Table) -> str:
    lines = []
    for cell in table.cells():
        paper = cell.printed
        lines.append([table.number or "", *map(for_csv, cell.key), cell.mean, cell.std, " ".join(map(str, cell.seeds)),
                      paper and paper.text, "*" if paper and paper.star else "", cell.rank or "", _stars(cell), cell.p,
                      cell.p_seeds, cell.contradiction, cell.missing, " ".join(cell.records),
                      REFERENCE * cell.is_reference,
                      " ".join(map(str, cell.users)), " ".join(map(str, cell.interactions))])
    return pd.DataFrame(lines, columns=CSV_FIELDS).to_csv(index=False, lineterminator="\n")


# A terminal

def terminal(table: Table, color: bool = False, width: int | None = None) -> str:
    """The table drawn with lines; best in bold, second underlined, as the terminal's escape sequences if ``color``. One
    wider than ``width`` characters is split, with its first columns repeated; None: it is as wide as it is."""
    console = Console(width=10_000, highlight=False, force_terminal=color, no_color=True, file=io.StringIO())
    for panel in table.panels:
        console.print(_plain(_heading(table, panel)))
        stub, numbers = columns = _columns(table, panel.lines, _plain, _drawn_cell)
        for part in _parts(*_widths(columns), width or 10_000):
            console.print(_drawn(stub, [numbers[i] for i in part]))
    notes = [*table.notes, *table.tested, *(f"{mark} {text}" for mark, text in table.footnotes), *table.missing]
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join([*lines, *map(for_terminal, notes)]) + "\n"


def _plain(text: str) -> Text:
    return Text(" ".join(for_terminal(text).split("\n")))


def _drawn(stub: Sequence[Sequence[Text]], numbers: Sequence[Sequence[Text]]) -> Grid:
    """The columns of a table, with a line where the first label is a new one."""
    drawn = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    head, *rows = zip(*stub, *numbers)
    for i, text in enumerate(head):
        drawn.add_column(text, justify="left" if i < len(stub) else "right", no_wrap=True)
    for i, row in enumerate(rows, 1):
        if _begins(stub, i):
            drawn.add_section()
        drawn.add_row(*row)
    return drawn


def _drawn_cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    mean, sign, std = ours(cell).partition(" ± ")
    text = Text(mean, {1: "bold", 2: "underline"}.get(cell.rank, ""))
    text.append(Text(_stars(cell) + sign + std, ""))
    if cell.printed is not None:
        text.append(f" ({printed(cell)}{'*' if cell.printed.star else ''}{cell.mark})", "")
    return text


RENDERERS: dict[str, Callable[[Table], str]] = {"md": markdown, "latex": latex, "csv": csv_text, "text": terminal}
