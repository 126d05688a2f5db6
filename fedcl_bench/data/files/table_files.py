"""A user's own table as batches of columns of text: whether it is text, JSON Lines or Parquet is detected from its
first bytes.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import pyarrow as pa

from ...core.errors import UserError
from .table_reader import (COLONS, EXACT, SEPARATORS, BadRows, TableLayout, codec, fields_of, first_lines, listed,
                           opened, parquet_batches, parquet_file, reason_of, text_batches)

TEXT, JSON, PARQUET = "text", "JSON Lines", "Parquet"
_TYPE = re.compile(":(token|float)(_seq)?$")  # of a column of an atomic file
_NUMBER = re.compile(r"-?[0-9.]+")
_AT_ONCE = 1 << 14  # rows of a batch of JSON Lines


@dataclass(frozen=True)
class TableFile:
    """A table on disk."""

    path: Path
    kind: str  # TEXT, JSON or PARQUET
    columns: Mapping[str, str]  # name as it is asked for to name as it is written
    layout: TableLayout | None = None  # of a table of text
    encoding: str = "utf-8"  # of text and JSON Lines

    @property
    def header(self) -> int:
        return int(self.layout is not None and self.layout.header)

    @property
    def note(self) -> str:
        """What was detected."""
        if self.layout is None:
            return self.kind
        return (f"separated by {SEPARATORS[self.layout.separator]}, "
                f"{'with a header' if self.layout.header else 'without header: columns are numbers from 1'}")

    def batches(self, wanted: Sequence[str], bad: BadRows) -> Iterator[pa.RecordBatch]:
        """Columns of the table as text, some rows at a time; raises UserError if the file cannot be read."""
        bad.ragged = []
        written = [self.columns[name] for name in wanted]
        if self.kind == TEXT:
            batches = text_batches(self.path, str(self.path), self.layout, written, bad)
        elif self.kind == JSON:
            batches = _json_batches(self, written, bad)
        else:
            batches = parquet_batches(self.path, str(self.path), written)
        for batch in batches:
            yield batch.rename_columns(list(wanted))


def detect(path: Path, wanted: Mapping[str, str], option: str, encoding: str = "utf-8") -> TableFile:
    """How the table of an option is written, given column to the option that names it. Raises UserError if it cannot be
    read, is empty, or lacks one of the columns; names those that it has."""
    if not path.is_file():
        raise UserError(f"{option}: no file {path}.")
    if parquet := parquet_file(path, str(path)):
        names = parquet.schema_arrow.names
        return TableFile(path, PARQUET, _column_names(path, wanted, names, PARQUET))
    lines = first_lines(path, str(path), "a line of columns, then one interaction per line", encoding)
    first = lines[0]
    if first.lstrip().startswith("["):
        raise UserError(f"{path}: is a JSON array, accepted: JSON Lines, which have an object in each line.\n"
                        f"Make them with: jq -c '.[]' {path.name}")
    if first.lstrip().startswith("{"):
        if not (names := list(dict.fromkeys(name for line in lines for name in _object(line) or ()))):
            raise UserError(f"{path}: its first lines are no JSON objects ({first[:60]!r}), accepted: JSON Lines, with "
                            f"names and texts in double quotes.")
        return TableFile(path, JSON, _column_names(path, wanted, names, f"{JSON}, first line"), encoding=encoding)
    return _detect_text(path, wanted, first, encoding)


def _detect_text(path: Path, wanted: Mapping[str, str], first: str, encoding: str) -> TableFile:
    """How a table of text is written, given its first line."""
    rows = {separator: fields_of(first, separator) for separator in SEPARATORS}
    columns = list(wanted)
    for separator, names in rows.items():
        numbers = [name for name in names if _NUMBER.fullmatch(name)]
        if set(columns) <= set(_places(names)) and numbers != [str(i) for i in range(len(numbers))]:
            continue  # a row such as 2,1,3, unless it is the header that pandas writes where columns have no names
        if set(columns) <= {*names, *map(_plain, names)}:
            layout = TableLayout(separator, tuple(names), True, separator != COLONS, encoding)
            return TableFile(path, TEXT, _column_names(path, wanted, names, ""), layout, encoding)
    separator = max(rows, key=lambda each: len(rows[each]) * (each != " "))  # texts have spaces
    if len(rows[COLONS]) > 2 or len(rows[separator]) == 1 < len(rows[" "]):
        separator = COLONS if len(rows[COLONS]) > 2 else " "
    names = rows[separator]
    places = _places(names)
    if set(columns) <= set(places):
        times = [column for column, option in wanted.items() if option == "--time"]
        header = bool(times) and not re.search("[0-9]", names[int(times[0]) - 1])  # of a time
        layout = TableLayout(separator, places, header, separator != COLONS, encoding)
        return TableFile(path, TEXT, dict(zip(places, places)), layout, encoding)
    if beyond := [column for column in columns if all(map(str.isdecimal, columns)) and column not in places]:
        raise UserError(f"{path}: found {wanted[beyond[0]]} {beyond[0]}, accepted: the numbers of its columns, 1 to "
                        f"{len(names)} (separated by {SEPARATORS[separator]}).")
    headless = any(map(_NUMBER.fullmatch, names))
    hint = "If that is no header, name columns by number, as --user 1 --item 2 --time 3." if headless else ""
    return TableFile(path, TEXT, _column_names(path, wanted, names, f"separated by {SEPARATORS[separator]}", hint))


def _column_names(path: Path, wanted: Mapping[str, str], names: Sequence[str], how: str, hint: str = ""
                  ) -> dict[str, str]:
    """Each column that is wanted to its name in the file, where its type may follow it."""
    for column, option in wanted.items():
        there = [name for name in names if column in (name, _plain(name))]
        if len(there) > 1:
            raise UserError(f"{path}: has several columns '{column}'; rename one of them.")
        if not there:
            raise UserError(f"{path}: has no column '{column}'; its columns are {listed(names) or 'none'} ({how}).\n"
                            + (hint or f"Name the column that is meant with {option} COLUMN."))
    return {column: name for column in wanted for name in names if column in (name, _plain(name))}


def _places(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(i + 1) for i in range(len(names)))


def _plain(name: str) -> str:
    return _TYPE.sub("", name.strip())


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_batches(table: TableFile, names: Sequence[str], bad: BadRows) -> Iterator[pa.RecordBatch]:
    """Values by name of each line's object; one that is not there is empty."""
    rows: list[list[str]] = []

    def batch() -> pa.RecordBatch:
        columns = zip(*rows) if rows else [()] * len(names)
        return pa.RecordBatch.from_arrays([pa.array(column, pa.string()) for column in columns], list(names))

    try:
        with opened(table.path) as stream:
            row = 0
            lines = io.TextIOWrapper(io.BufferedReader(stream), codec(table.encoding), newline="\n")
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row += 1
                if (value := _object(line)) is None:
                    said = f"{table.path}, line {number}: is no JSON object ({line.strip()[:60]!r})."
                    bad.left_out(row, lambda said=said: said)
                    continue
                rows.append([_json_text(value.get(name)) for name in names])
                if len(rows) == _AT_ONCE:
                    yield batch()
                    rows.clear()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{table.path}: cannot be read as {table.encoding} text ({reason_of(error)}).") from None
    yield batch()


def _json_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:  # as 7.0, which is the item 7
        value = int(value)
    if isinstance(value, list):
        return " ".join(map(_json_text, value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()  # half of a pair of surrogates is no text
