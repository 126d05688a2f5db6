"""What a dataset says of its items in words: the ``.item`` file beside its ``.inter`` file.

Its columns are typed as RecBole's are, and fields may be quoted. Those of type ``token_seq`` are words; their fields,
joined in the order of the columns, are an item's text.
"""

from __future__ import annotations

import csv
import html
import io
import re
from pathlib import Path
from typing import Iterable, Sequence

from ...core.errors import UserError
from ...core.text import quoted
from ..files.table_reader import TableLayout, fields_of, first_lines, line_of, listed, require_distinct, text_batches

_WORDS = "token_seq"


def item_file(inter: Path) -> Path:
    """Where the items of a file of interactions are described, if they are."""
    return inter.with_suffix(".item")


def read_texts(path: Path, item_column: str) -> dict[str, str]:
    """Item, by the publisher's id, to its text, in the order of a ``.item`` file; empty if there is no file. Raises
    UserError for one that is no such table, or describes an item twice."""
    if not path.is_file():
        return {}
    words = [name for name, kind in columns_of(path, item_column).items() if kind == _WORDS]
    return {item: joined(fields) for item, fields in read_fields(path, item_column, words).items()}


def joined(fields: Iterable[str]) -> str:
    """An item's text."""
    return " ".join(" ".join(fields).split())


def columns_of(path: Path, item_column: str) -> dict[str, str]:
    """Name and type of the columns of a ``.item`` file but that of ids; raises as ``read_texts``."""
    header = _header(path)
    columns = {name: kind for name, _, kind in (field.partition(":") for field in header)}
    if item_column not in columns:
        raise UserError(f"{path}: column '{item_column}' is missing; found columns {listed(columns)} (tab-separated "
                        f"header, as item_id:token).")
    return {name: kind for name, kind in columns.items() if name != item_column}


def read_fields(path: Path, item_column: str, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Item, by the publisher's id, to its fields in some of the columns; raises as ``read_texts``."""
    header = _header(path)
    field_of = {field.partition(":")[0]: field for field in header}
    rows: dict[str, tuple[str, ...]] = {}
    for batch in text_batches(path, str(path), TableLayout("\t", tuple(header), True), header):
        columns = [batch.column(field_of[name]).to_pylist() for name in (item_column, *names)]
        for item, *fields in zip(*columns):
            if item in rows or "\n" in "".join(fields):
                wrong = (f"describes the item {quoted(item)} again; leave one row of it" if item in rows else
                         "a quote is not closed; one within a quoted field is written twice")
                raise UserError(f"{path}, line {line_of(path, len(rows) + 2)}: {wrong}.")
            rows[item] = tuple(fields)
    return rows


def _header(path: Path) -> list[str]:
    first = first_lines(path, str(path), "a header line, as item_id:token, and a line per item")[0]
    fields = fields_of(first, "\t")
    require_distinct([field.partition(":")[0] for field in fields], path)
    return fields


def item_table(described: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[bytes, int]:
    """A ``.item`` file as RecBole's reader expects it, and its number of items, from rows of an item and its texts."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(("item_id:token", *(f"{name}:{_WORDS}" for name in described)))
    count = 0
    for item, *texts in rows:
        writer.writerow((item, *map(clean, texts)))
        count += 1
    return buffer.getvalue().encode(), count


def clean(text: str) -> str:
    """Text as a field of an atomic file: HTML character references resolved, control characters to spaces."""
    text = re.sub(r"&(#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);", lambda match: html.unescape(match[0]), text)
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
