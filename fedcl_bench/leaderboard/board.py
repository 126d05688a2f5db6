"""The page of all submissions: Markdown for the repository, and HTML that sorts and filters."""

from __future__ import annotations

import html as markup
from pathlib import Path
from typing import Sequence

from ..core.errors import UserError
from ..core.files import read_bytes, write_atomically
from ..core.text import for_markdown
from ..evaluation.metrics import sign_of
from ..reports.cells import DASH
from ..reports.dashboard import Number, TableRow
from ..reports.html import document, table
from ..reports.notes import p_text
from ..runs.metadata import RECBOLE
from ..runs.specs import seed_text
from ..stats.significance import holm
from .submission import BOUND, FILE, PLUGINS, REFERENCE, Row, Submission, read

PAGE, MARKDOWN, TITLE = "board.html", "README.md", "Leaderboard"
_WRITTEN_BY = f"Written by `submit`, with {PAGE}, which sorts and filters these rows in a browser; not to be edited."
_MARKS = {MARKDOWN: _WRITTEN_BY, PAGE: f"<title>{TITLE}</title>"}  # what is in a page, and in no other file
SCRIPT = 'const started = dataTables().then((DataTable) => new DataTable("#board", FILTERED));\ndrawn(started);'
_ABOUT = (
    "One row per submission, backbone and dataset. Mean ± sample standard deviation over seeds of the metric on the "
    "block just trained, averaged over the blocks after the first. Beside it FT with the same settings and seeds.",
    f"p: paired t-test against FT over users, with Holm's correction over the rows of a dataset, backbone and stream. "
    f"Detectable: the gain that this test finds with probability .8. Share of headroom: gain over that of {BOUND}, and "
    f"its 95 % interval. MB: sent and received by all clients in a run.",
    "Every row was computed again from its records, and a seed of it run again, by `run_bench.py verify FOLDER`.")


Entry = tuple[str, Submission, Row, float]  # folder, its submission, a row of it, p after Holm's correction


def entries(board: Path) -> list[Entry]:
    """The rows of all submissions in a folder, best first in each dataset, backbone and stream; raises UserError for a
    folder without one, Corrupt."""
    found = [(path.name, read(path)) for path in sorted(board.iterdir()) if (path / FILE).is_file()] \
        if board.is_dir() else []
    if not found:
        raise UserError(f"{board}: has no submission; name a folder of folders with {FILE}.")
    groups: dict[tuple[str, ...], list[tuple[str, Submission, Row]]] = {}
    for name, submission in found:
        for row in submission.rows:
            groups.setdefault((row.dataset, row.backbone, row.stream, row.metric), []).append((name, submission, row))
    return [(*each, p) for key in sorted(groups) for each, p in sorted(
        zip(groups[key], holm([row.p for _, _, row in groups[key]])),
        key=lambda pair: -sign_of(pair[0][2].metric) * pair[0][2].mean)]


def lines(every: Sequence[Entry]) -> list[TableRow]:
    return [{
        "method": submission.title, "dataset": row.dataset, "backbone": row.backbone, "stream": row.stream,
        "metric": row.metric, "mean ± sd": Number(row.mean, f"{row.mean:.4f} ± {row.deviation:.4f}"),
        REFERENCE.upper(): Number.as_(row.reference, ".4f"), "gain": Number.as_(row.difference, "+.4f"),
        "p (Holm)": Number(p_holm, p_text(p_holm)), "detectable": Number.as_(row.detectable, ".4f"),
        "share of headroom": _share(row), "MB": Number.as_(row.megabytes, ",.1f"), "leaks": row.leaks,
        "privacy": row.privacy, "gives up": ", ".join(row.gives_up) or DASH, "users": Number.as_(row.users, ","),
        "seeds": seed_text(row.seeds), "settings": _settings(row), "plugin": _plugin(submission),
        "author": submission.author, "date": submission.date, "folder": folder}
        for folder, submission, row, p_holm in every]


def _share(row: Row) -> str | Number:
    if row.share is None:
        return "no headroom" if row.bounded else DASH
    return Number(row.share[0], "{:.2f} ({:.2f} … {:.2f})".format(*row.share))


def _settings(row: Row) -> str:
    changed = ", ".join(f"{name}={value}" for name, value in row.settings.items()) or "defaults"
    return f"{changed} (tuned)" if row.tuned else changed


def _plugin(submission: Submission) -> str:
    own = [name for name in submission.files if name.startswith(f"{PLUGINS}/")]
    return ", ".join(own) or ("RecBole" if submission.method.startswith(RECBOLE) else "of the suite")


def markdown(board: Path) -> str:
    rows = lines(entries(board))
    texts = [[for_markdown(value.text if isinstance(value, Number) else value) for value in row.values()]
             for row in rows]
    numeric = [isinstance(value, Number) for value in rows[0].values()]
    return "\n".join([f"# {TITLE}", "", *(f"{text}\n" for text in _ABOUT),
                      _WRITTEN_BY, "",
                      "| " + " | ".join(rows[0]) + " |", "|" + "".join("--:|" if each else "---|" for each in numeric),
                      *("| " + " | ".join(cells) + " |" for cells in texts), ""])


def page(board: Path) -> str:
    """The page as HTML, which loads nothing."""
    about = [f"<p>{markup.escape(text).replace('`', '')}</p>" for text in _ABOUT]
    return document(TITLE, [*about, table("board", lines(entries(board)))], SCRIPT)


def refuse_others(board: Path) -> None:
    """Raise UserError if another file has the name of a page, whose place it would take."""
    for name, mark in _MARKS.items():
        if (path := board / name).exists() and mark.encode() not in read_bytes(path, "Move it away."):
            raise UserError(f"--out: the page of all submissions would take the place of {path}, which is none; name a "
                            f"folder in one of its own, as results/leaderboard/NAME.")


def write_pages(board: Path) -> list[Path]:
    """Write both pages into the folder of submissions; their paths."""
    pages = {board / MARKDOWN: markdown(board), board / PAGE: page(board)}
    for path, text in pages.items():
        write_atomically(path, text.encode(errors="backslashreplace"))
    return list(pages)
