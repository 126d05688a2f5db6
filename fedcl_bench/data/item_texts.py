"""What a dataset says of its items in words: the ``.item`` file beside its ``.inter`` file.

Its columns are typed as RecBole's are. Those of type ``token_seq`` are words; their fields, joined in the order of the
columns, are an item's text.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Sequence

from ..core.errors import UserError
from ..core.text import quoted

_WORDS = ":token_seq"


def item_file(inter: Path) -> Path:
    """Where the items of a file of interactions are described, if they are."""
    return inter.with_suffix(".item")


def read_texts(path: Path, item_column: str, items: Sequence[str]) -> list[str]:
    """The texts of some items; empty for those that have none, and of all if there is no file.

    Args:
        path: the ``.item`` file.
        item_column: name of the column of ids.
        items: the publisher's ids.

    Raises:
        UserError: for a file that is no such table, or describes an item twice.
    """
    texts = _all_texts(path, item_column) if path.is_file() else {}
    return [texts.get(item, "") for item in items]


def item_ids(path: Path, item_column: str) -> list[str]:
    """The items that a ``.item`` file describes, in its order; raises UserError as ``read_texts``."""
    return list(_all_texts(path, item_column))


def _all_texts(path: Path, item_column: str) -> dict[str, str]:
    """Item to its text, in the order of the file."""
    header, *rows = _rows(path)
    names = [name.partition(":")[0] for name in header]
    if item_column not in names:
        raise UserError(f"{path}: column '{item_column}' is missing; found columns {', '.join(names)} (tab-separated "
                        f"header, as item_id:token).")
    at, words = names.index(item_column), [i for i, name in enumerate(header) if name.endswith(_WORDS)]
    texts: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise UserError(f"{path}, row {number}: found {len(row)} fields, the header has {len(header)}.")
        if row[at] in texts:
            raise UserError(f"{path}, row {number}: describes the item {quoted(row[at])} again; leave one row of it.")
        texts[row[at]] = " ".join(" ".join(row[i] for i in words).split())
    return texts


def _rows(path: Path) -> list[list[str]]:
    """The rows of a tab-separated table with a header; fields may be quoted, as RecBole reads them."""
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}).") from None
    try:
        rows = [row for row in csv.reader(io.StringIO(content, newline=""), delimiter="\t", strict=True) if row]
    except csv.Error as error:
        raise UserError(f"{path}: is no tab-separated table ({error}); a quote within a quoted field is written "
                        f"twice.") from None
    if not rows:
        raise UserError(f"{path}: is empty; expected a header line, as item_id:token, and a line per item.")
    return rows
