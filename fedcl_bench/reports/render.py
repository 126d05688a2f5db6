"""A rebuilt table as Markdown, LaTeX (booktabs) or CSV."""

from __future__ import annotations

import csv
import io
from typing import Callable, Sequence

from ..experiments.papers import get
from .tables import DAGGER, DASH, Cell, Line, Panel, Table

FORMATS = {"md": "md", "latex": "tex", "csv": "csv"}  # format -> ending of its file


def number(cell: Cell, value: float, signed: bool = True, decimals: int | None = None) -> str:
    """A value with the cell's decimals, or others; changes carry their sign, counts a thousands separator."""
    sign = "+" if signed and cell.key.column == "change" else ""
    return f"{value:{sign},.{cell.decimals if decimals is None else decimals}f}"


def printed(cell: Cell) -> str:
    """The paper's number as text, without a star."""
    if cell.printed is None:
        return ""
    value = cell.printed.value
    return cell.printed.text if value is None else number(cell, value, decimals=cell.printed.decimals)


def ours(cell: Cell) -> str:
    """Our number as text, a dash without a record."""
    if cell.mean is None:
        return DASH
    return number(cell, cell.mean) + (f" ± {number(cell, cell.std, signed=False)}" if cell.std is not None else "")


def _heading(table: Table, panel: Panel) -> str:
    title = f"{get(table.paper).TITLE}, Table {table.number}: {table.title}"
    return f"{title}, {panel.title}" if panel.title else title


# Markdown

def _md_cell(cell: Cell | None, marks) -> str:
    if cell is None:
        return ""
    mean = ours(cell).partition(" ± ")
    shown = {1: f"**{mean[0]}**", 2: f"<u>{mean[0]}</u>"}.get(cell.rank, mean[0])
    text = shown + ("\\*" if cell.star else "") + "".join(mean[1:])
    if cell.printed is not None:
        mark = f"<sup>{marks[cell.key]}</sup>" if cell.key in marks else ""
        text += f" ({printed(cell)}" + ("\\*" if cell.printed.star else "") + f"{mark})"
    return text


def _grouped(lines: Sequence[Line]) -> list[Line]:
    """Lines with labels blanked that repeat the line above."""
    result, before = [], ()
    for line in lines:
        labels = list(line.labels)
        for i, label in enumerate(line.labels[:-1]):
            if line.labels[:i + 1] != before[:i + 1]:
                break
            labels[i] = ""
        result.append(Line(tuple(labels), line.cells))
        before = line.labels
    return result


def md_text(text: str) -> str:
    """Running text with Markdown's special characters escaped."""
    return text.replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;")


def markdown(table: Table) -> str:
    """The table as Markdown: best in bold, second underlined, the paper's number in parentheses."""
    out = []
    for panel in table.panels:
        out += [f"**{_heading(table, panel)}**", "", f"| {' | '.join((*table.stub, *table.heads))} |",
                "|" + "---|" * len(table.stub) + "--:|" * len(table.heads)]
        for line in _grouped(panel.lines):
            cells = [_md_cell(cell, table.marks) for cell in line.cells]
            out.append(f"| {' | '.join((*line.labels, *cells))} |")
        out.append("")
    out += [f"- {md_text(note)}" for note in (*table.notes, *table.tested)]
    out += [f"- <sup>{mark}</sup> {md_text(text)}" for mark, text in table.footnotes]
    out += [f"- {md_text(sentence)}" for sentence in table.missing]
    return "\n".join(out) + "\n"


# LaTeX

_TEX = {"\\": r"\textbackslash{}", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "≤": r"$\le$", "†": r"$^{\dagger}$",
        "λ": r"$\lambda$", "–": "--", "<": r"$<$", ">": r"$>$", "|": r"$|$"}


def tex(text: str) -> str:
    """Text with LaTeX's special characters escaped and the symbols of our tables as commands."""
    return "".join(_TEX.get(character, character) for character in text)


def _tex_cell(cell: Cell | None, marks) -> str:
    if cell is None:
        return ""
    mean, _, std = ours(cell).partition(" ± ")
    text = {1: rf"\textbf{{{tex(mean)}}}", 2: rf"\underline{{{tex(mean)}}}"}.get(cell.rank, tex(mean))
    text += ("$^{*}$" if cell.star else "") + (rf"{{\tiny$\pm${std}}}" if std else "")
    if cell.printed is not None:
        mark = (["*"] if cell.printed.star else []) + ([marks[cell.key]] if cell.key in marks else [])
        text += f" ({tex(printed(cell))}" + (rf"$^{{{','.join(mark)}}}$" if mark else "") + ")"
    return text


def latex(table: Table) -> str:
    """The table as LaTeX, one ``table*`` per backbone; compiles where booktabs is loaded."""
    out = [r"% needs \usepackage{booktabs}"]
    for panel in table.panels:
        out += [r"\begin{table*}[t]", r"\centering", rf"\caption{{{tex(_heading(table, panel))}.}}", r"\scriptsize",
                rf"\begin{{tabular}}{{{'l' * len(table.stub)}{'r' * len(table.heads)}}}", r"\toprule",
                " & ".join(map(tex, (*table.stub, *table.heads))) + r" \\", r"\midrule"]
        for i, line in enumerate(_grouped(panel.lines)):
            if i and line.labels[0] and len(line.labels) > 1:
                out.append(r"\midrule")
            cells = [_tex_cell(cell, table.marks) for cell in line.cells]
            out.append(" & ".join([*map(tex, line.labels), *cells]) + r" \\")
        out += [r"\bottomrule", r"\end{tabular}"]
        if panel is table.panels[-1]:
            notes = [tex(note) for note in (*table.notes, *table.tested)]
            notes += [f"{tex(mark) if mark == DAGGER else rf'$^{{{mark}}}$'} {tex(text)}" for mark, text in
                      table.footnotes]
            notes += [tex(sentence) for sentence in table.missing]
            out += [r"\par\smallskip", r"\begin{minipage}{\linewidth}\footnotesize\raggedright",
                    *(rf"{note}\par" for note in notes), r"\end{minipage}"]
        out.append(r"\end{table*}")
    return "\n".join(out) + "\n"


# CSV

CSV_FIELDS = ("table", "dataset", "backbone", "row", "metric", "column", "mean", "std", "seeds", "paper", "paper_star",
              "rank", "star", "p", "contradiction", "missing", "records",
              "users", "interactions")


def csv_text(table: Table) -> str:
    """One line per cell, all numbers in full precision."""
    def full(value: float | None) -> str:
        return "" if value is None else repr(value)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for cell in table.cells():
        key, paper = cell.key, cell.printed
        writer.writerow([table.number, key.dataset, key.backbone, key.row, key.metric, key.column, full(cell.mean),
                         full(cell.std), " ".join(map(str, cell.seeds)), paper.text if paper else "",
                         "*" if paper and paper.star else "", cell.rank or "", "*" if cell.star else "", full(cell.p),
                         cell.contradiction, cell.missing, " ".join(cell.records),
                         " ".join(map(str, cell.users)), " ".join(map(str, cell.interactions))])
    return buffer.getvalue()


RENDERERS: dict[str, Callable[[Table], str]] = {"md": markdown, "latex": latex, "csv": csv_text}
