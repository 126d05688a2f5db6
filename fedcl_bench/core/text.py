"""Names and texts of plugins, datasets and records, made safe for each place that they go to.

Who wrote them is not known. So a name is checked before it becomes part of a path, and a text is escaped for what shows
it. HTML has ``html.escape``.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from pathlib import Path
from typing import Any

from .errors import UserError

LONGEST = 100  # characters of a dataset's name, or of several joined ones
JOIN = "+"  # between the datasets of a run, each of which is a domain
LONGEST_IN_RECORD = 200
RECORD_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:-]*(\+[A-Za-z0-9][A-Za-z0-9._:-]*)*\Z"
ACCEPTED_IN_RECORD = (f"at most {LONGEST_IN_RECORD} letters, digits, '.', '-', '_', ':' and '{JOIN}', with a letter or "
                      f"digit first")
LONGEST_OF_PLUGIN = 40  # a record's folder is named by two plugins, a dataset, seed and hash, in 255 bytes at most
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
ACCEPTED = "letters, digits, '.', '-' and '_', with a letter or digit first"
# Control characters of ASCII and Latin-1 but for line ends and tabs, and those that turn the direction of text around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_JOIN = "\ue000"  # between two hyphens, which LaTeX would make a dash
_TEX = {"\\": r"\textbackslash{}", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "≤": r"$\le$", "†": r"$^{\dagger}$",
        "≥": r"$\ge$", "×": r"$\times$", "−": "$-$", "…": r"\dots{}", "ε": r"$\varepsilon$", "λ": r"$\lambda$",
        "–": "--", "<": r"$<$", ">": r"$>$", "|": r"$|$", "°": r"$^{\circ}$", _JOIN: "{}"}
_FORMULA = ("=", "+", "-", "@")  # what a spreadsheet takes for the beginning of a formula


def is_safe(name: object, longest: int = LONGEST) -> bool:
    """Whether a name may be part of a file's name: it means the same everywhere, and nothing but itself."""
    return isinstance(name, str) and len(name) <= longest and _NAME.fullmatch(name) is not None


def is_safe_in_record(name: object) -> bool:
    """Whether a name may be that of a record's plugin or dataset: RecBole's models have a colon in theirs, and several
    datasets are joined."""
    return isinstance(name, str) and len(name) <= LONGEST_IN_RECORD and re.match(RECORD_NAME, name) is not None


def safe_name(name: str, where: str) -> str:
    """The name; raises UserError unless it is safe in a file's name."""
    if not is_safe(name, LONGEST):
        raise UserError(f"{where}: found the name {quoted(name)}, accepted: at most {LONGEST} {ACCEPTED}.")
    return name


def hash_of(content: Any, size: int = 16) -> str:
    """Of anything that is JSON, in hexadecimal, by so many bytes."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=size).hexdigest()


def refuse_link(path: Path) -> None:
    """Raise UserError for a symbolic link: what is written there would go elsewhere."""
    if path.is_symlink():
        raise UserError(f"{path}: is a symbolic link, which could lead anywhere; delete it.")


def quoted(value: object, longest: int = 60) -> str:
    """A value in quotes for a message, cut where it is long."""
    if not isinstance(value, str):
        return for_terminal(reprlib.repr(value))
    return f"'{for_terminal(value)}'" if len(value) <= longest else \
        f"'{for_terminal(value[:longest])}…' ({len(value)} characters)"


def for_terminal(text: str) -> str:
    """Text without control characters but line ends and tabs: none can move the cursor or change what stands there."""
    if text.isprintable():  # as nearly all are
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_markdown(text: str) -> str:
    """Text on one line with Markdown's special characters escaped: no emphasis, cell, link or HTML comes of it."""
    text = for_terminal(text).replace("\n", " ")
    return text.replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")


def for_csv(text: str) -> str:
    """Text that a spreadsheet shows as it is: an apostrophe stands before what it would take for a formula."""
    text = for_terminal(text)
    return f"'{text}" if text.startswith((*_FORMULA, "\t")) else text


def for_latex(text: str) -> str:
    """Text on one line with LaTeX's special characters escaped and the symbols of our tables as commands; ``?`` for
    characters that pdflatex has no letter for."""
    joined = re.sub("-(?=-)", "-" + _JOIN, for_terminal(text).replace("\n", " "))
    return "".join(_TEX.get(character, character if character < "\u0180" else "?") for character in joined)
