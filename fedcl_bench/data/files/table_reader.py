"""The one reader of tables: files of text and Parquet as batches of columns, all of them as text.

Text is read by pyarrow, some rows at a time, so that memory does not grow with the file. How a table is written is a
``TableLayout``: publishers' are given (``convert``), that of a user's own table is detected (``from_csv``).
"""

from __future__ import annotations

import csv
import io
import itertools
import lzma
import re
import time
import weakref
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from ...core.errors import UserError
from ...core.files import bar
from ...core.text import for_terminal

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow import parquet

COLONS = "::"  # as MovieLens 1M has it; its fields are never quoted
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", COLONS: "double colons", " ": "spaces"}
_FOR_COLONS = "\x1f"  # what pyarrow, whose separators have one character, reads in their place
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
PIECE = 1 << 20  # bytes of a piece; up to 32 of them are read ahead, so they are small
EXACT = 2.0 ** 53  # beyond it not every whole number is a float
_HEAD = 1 << 16  # bytes that a header and its separator are found in
_SHOWN = 3  # bad rows of a message
_NAMES = 30  # columns of a message
_MOST_BAD = 1000  # before it is clear that the table is another one than was said


@dataclass(frozen=True)
class TableLayout:
    """How a table of text is written."""

    separator: str
    columns: tuple[str, ...]  # all of them, in order
    header: bool  # the first line holds their names
    quoted: bool = True  # fields may be quoted; if not, a return within a line is part of a field
    encoding: str = "utf-8"

    @property
    def expected(self) -> str:
        """What a line holds, for messages."""
        names = self.columns if len(self.columns) < 8 else (*self.columns[:3], "...", self.columns[-1])
        return (f"{len(self.columns)} fields separated by {SEPARATORS.get(self.separator, repr(self.separator))} "
                f"({', '.join(names)})")


@dataclass
class BadRows:
    """Rows that cannot be read."""

    skip: bool = False  # leave them out, instead of ending the command
    count: int = 0
    first: list[str] = field(default_factory=list)  # what is said of the first of them
    ragged: list[int] = field(default_factory=list)  # numbers from 1, with the header, of those the reader leaves out
    inside: int = 0  # lines of all files that are inside quoted fields, as those after a quote that is never closed

    def add(self, said: Callable[[], str]) -> None:
        """Note a row; ``said`` says what is wrong with it. Raises UserError as ``require_none`` if there are many."""
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(said())
        if self.count >= _MOST_BAD:
            self.require_none("at least ")

    def left_out(self, number: int, said: Callable[[], str]) -> None:
        """Note a row of the present file that a reader leaves out."""
        self.ragged.append(number)
        self.add(said)

    def row(self, position: int, header: int) -> int:
        """The number from 1 below the header of a row that was read, given its position among these."""
        number = position + 1 + header
        for left_out in self.ragged:  # ascending
            number += left_out <= number
        return number - header

    def inside_notes(self) -> Iterator[str]:
        """A sentence if lines are inside quoted fields."""
        if self.inside > 0:
            yield (f"lines inside quoted fields, which are no rows: {self.inside:,}; where no field has several lines, "
                   f"a quote is not closed")

    def require_none(self, at_least: str = "") -> None:
        """Raise UserError if there are bad rows and they are not to be left out."""
        if not self.count or self.skip:
            return
        rows = f"{at_least}{self.count:,} rows cannot be read; the first:\n" if self.count > 1 else ""
        raise UserError(rows + "\n".join(self.first) + "\nLeave such rows out with --skip-bad.")


def first_lines(path: Path, label: str, expected: str, encoding: str = "utf-8") -> list[str]:
    """The lines that are not empty at the beginning of a file; raises UserError if it cannot be read or has none."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        with opened(path) as stream:
            head = stream.read(_HEAD)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{label}: cannot be read ({reason_of(error)}).") from None
    text = head.decode(codec(encoding), errors="replace")
    lines = [line for line in re.split("[\r\n]+", text) if line.strip()]  # str.splitlines knows more ends than a table
    if not lines:
        raise UserError(f"{label}: is empty; expected {expected}.")
    if "\ufffd" in lines[0]:
        raise UserError(f"{label}, line 1: is not {encoding.upper()} text ({lines[0][:60]!r}).\n{_guess(head)}")
    return lines


def codec(encoding: str) -> str:
    """What Python reads an encoding by: UTF-8 may begin with a byte order mark."""
    return "utf-8-sig" if encoding == "utf-8" else encoding


def _guess(head: bytes) -> str:
    """What may be done about text of another encoding, by its beginning."""
    if head[:2] in (b"PK", b"\x1f\x8b"):
        return "It is a workbook, a zip or a gzip: save a workbook's sheet as CSV; name the others .zip or .gz."
    guess = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
    if "\ufffd" in head.decode(guess, errors="replace"):
        guess = "latin-1"
    line = next((line for line in head.decode(guess, errors="replace").splitlines() if not line.isascii()), "")
    return (f"Save the table as UTF-8; or `data convert --table` takes --encoding NAME, perhaps {guess}, in which it "
            f"reads {line[:60]!r}.")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed by its suffix: .gz, .bz2, .zst, .lz4, .xz, or .zip with one file in it; raises
    OSError or pa.ArrowInvalid if it cannot be read, or what is compressed is damaged."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                files = [file for file in archive.infolist() if not file.is_dir()]
                if len(files) != 1:
                    raise OSError(f"the zip holds {len(files)} files, accepted: one; unpack it")
                with archive.open(files[0]) as stream:
                    yield stream
        elif suffix == ".xz":
            with lzma.open(path) as stream:
                yield stream
        else:
            with pa.input_stream(str(path), compression=_COMPRESSED.get(suffix)) as stream:
                yield stream
    except (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, RuntimeError) as error:  # that of a password, too
        raise OSError(reason_of(error)) from None


def fields_of(line: str, separator: str) -> list[str]:
    return line.split(COLONS) if separator == COLONS else next(csv.reader([line], delimiter=separator))


def line_of(path: Path, row: int, encoding: str = "utf-8") -> int:
    """The line of a row of a table, both counted from 1; empty lines are no rows, and quoted fields have no ends."""
    with opened(path) as stream:
        lines = io.TextIOWrapper(io.BufferedReader(stream), encoding, errors="replace", newline="\n")
        filled = (number for number, line in enumerate(lines, start=1) if line.strip("\r\n"))
        return next(itertools.islice(filled, row - 1, None), row)


def text_batches(path: Path, label: str, layout: TableLayout, wanted: Sequence[str], bad: BadRows | None = None
                 ) -> Iterator[pa.RecordBatch]:
    """Columns of a table of text, compressed or not, as text, some rows at a time; messages call the file ``label``.
    Raises UserError naming the line for text of another encoding, or a row of another width that ``bad`` keeps."""
    from pyarrow import csv as pa_csv

    wrong, rows, colons, lent = [], int(layout.header), layout.separator == COLONS, weakref.WeakSet[_Lent]()

    def of_another_width(row: Any) -> str:
        text = row.text.replace(_FOR_COLONS, COLONS) if colons else row.text
        found = f"{row.actual_columns} field{'s' * (row.actual_columns != 1)} ({text[:60]!r})"

        def said() -> str:
            line = line_of(path, row.number, layout.encoding)
            return f"{label}, line {line}: found {found}, expected {layout.expected}."
        if bad and not wrong:
            try:
                bad.left_out(row.number, said)
                return "skip"
            except UserError as error:  # pyarrow would print it
                wrong.append(str(error))
        wrong.append(said())
        return "error"

    parse = pa_csv.ParseOptions(delimiter=_FOR_COLONS if colons else layout.separator,
                                quote_char='"' if layout.quoted else False, newlines_in_values=layout.quoted,
                                invalid_row_handler=of_another_width)
    text = pa_csv.ConvertOptions(include_columns=list(wanted), column_types=dict.fromkeys(wanted, pa.string()),
                                 strings_can_be_null=False)
    try:
        read = pa_csv.ReadOptions(block_size=PIECE, column_names=list(layout.columns),
                                  skip_rows=_lines_to_header(path, layout), encoding=layout.encoding,
                                  use_threads=False)  # rows have numbers in one thread alone
        with bar(f"reading {path.name}", path.stat().st_size, "bytes") as advance, opened(path) as stream:
            source = _Lines(stream) if layout.quoted else _Rewritten(stream, colons)
            for batch in pa_csv.open_csv(_lend(source, lent), read, parse, text):
                rows += batch.num_rows
                yield batch
                advance(PIECE)
            if bad and layout.quoted and "\n".encode(layout.encoding) == b"\n":
                bad.inside += source.count - rows - len(bad.ragged)
    except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError) as error:
        if "Empty CSV file" in str(error):
            return
        raise UserError(wrong[0] if wrong else _not_text(error, path, label, layout)) from None
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror or reason_of(error)}).") from None
    finally:
        end = time.monotonic() + 1.0
        while lent and time.monotonic() < end:  # pyarrow's thread, which aborts a process that ends before it
            time.sleep(0.001)


def _lines_to_header(path: Path, layout: TableLayout) -> int:
    """The number of the header's line, above which lines are empty; 0 without a header."""
    if not layout.header:
        return 0
    with opened(path) as stream:
        head = stream.read(_HEAD).decode(codec(layout.encoding), errors="replace")
    return next((number for number, line in enumerate(re.split("\r\n|[\r\n]", head), 1) if line.strip()), 1)


class _Lent:
    """What pyarrow holds of a stream while it reads."""

    def __init__(self, stream: Any) -> None:
        self.read, self.close, self.closed = stream.read, stream.close, False


def _lend(stream: Any, lent: weakref.WeakSet[_Lent]) -> pa.PythonFile:
    """A stream for pyarrow; it is among ``lent`` until pyarrow lets go of it."""
    handle = _Lent(stream)
    lent.add(handle)
    return pa.PythonFile(handle, mode="r")


def _not_text(error: Exception, path: Path, label: str, layout: TableLayout) -> str:
    """What a message says of an error of pyarrow's."""
    if place := re.match(r"In CSV column #(\d+): Row #(\d+): .*invalid UTF8", str(error)):
        with opened(path) as stream:
            hint = _guess(stream.read(_HEAD))
        line, column = line_of(path, int(place[2])), layout.columns[int(place[1])]
        return f"{label}, line {line}: column '{column}' is not UTF-8 text, which is expected.\n{hint}"
    endless = "straddling" in str(error)  # a row that is longer than a piece
    reason = "a quote is not closed, or a row is longer than a megabyte" if endless else reason_of(error)
    return (f"{label}: cannot be read as a table ({reason}).\nExpected: {layout.encoding.upper()} text, lines of "
            f"{layout.expected}.")


class _Lines:
    """A stream whose lines are counted, but for empty ones: ``count`` of them have been read."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.closed, self.count, self._ended = stream, False, 0, True

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        byte = np.frombuffer(content, np.uint8)
        ends = np.concatenate([[self._ended], (byte == 10) | (byte == 13)])
        self.count += int((ends[:-1] & ~ends[1:]).sum())  # where lines begin
        self._ended = bool(ends[-1])
        return content

    def close(self) -> None:
        self.closed = True


class _Rewritten:
    """A stream in which returns that end no line are vertical tabs, as pyarrow takes each return for an end; and double
    colons, if they separate fields, are one character."""

    def __init__(self, stream: Any, colons: bool) -> None:
        self.stream, self.colons, self.closed, self._rest = stream, colons, False, b""

    def read(self, size: int) -> bytes:
        more = self.stream.read(max(size - 1, 1))
        content = self._rest + more
        colons = len(content) - len(content.rstrip(b":")) if self.colons else 0
        whole = len(content) - bool(more and (colons % 2 or content.endswith(b"\r")))  # which may be half of a pair
        content, self._rest = content[:whole], content[whole:]
        if more and not content:
            return self.read(size)
        if self.colons:
            content = content.replace(COLONS.encode(), _FOR_COLONS.encode())
        return re.sub(rb"\r(?!\n)", b"\v", content) if b"\r" in content else content

    def close(self) -> None:
        self.closed = True


def reason_of(error: Exception) -> str:
    """What an error of a reader says, in one line."""
    return " ".join(str(error).split())[:160]


@contextmanager
def _as_parquet(label: str) -> Iterator[None]:
    """Says of whatever error comes up that the file is no Parquet table: pyarrow's are of several families."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{label}: cannot be read as a Parquet table ({reason_of(error)[:100]}).") from None


def listed(names: Iterable[Any]) -> str:
    """Names of columns in a message, cut where the file may be no table."""
    names = [for_terminal(str(name)) for name in names]
    shown = [name if len(name) <= 60 else f"{name[:60]}…" for name in names[:_NAMES]]
    return ", ".join(shown) + f" and {len(names) - _NAMES:,} more" * (len(names) > _NAMES)


def require_distinct(names: Sequence[str], path: Path) -> None:
    """Raise UserError for a name of columns that is there several times."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: column '{name}' is there {names.count(name)} times; rename all but one of them "
                            f"in the first line.")


def _require_columns(columns: Sequence[str], names: Sequence[Any], label: str) -> None:
    if missing := [name for name in columns if name not in names]:
        raise UserError(f"{label}: has no column '{missing[0]}'; found {listed(names)}.")


def read_parquet(path: Path, label: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A Parquet table; ``label`` is what messages call the file. Raises UserError if it is none, or lacks a column."""
    import pandas as pd

    with _as_parquet(label):
        frame = pd.read_parquet(path)
        _require_columns(columns, [*frame.columns], label)
    return frame


def parquet_file(path: Path, label: str) -> parquet.ParquetFile | None:
    """A file of Parquet; None if it is none. Raises UserError if it is a damaged one."""
    from pyarrow import parquet

    with _as_parquet(label):
        with open(path, "rb") as file:
            if file.read(4) != b"PAR1":
                return None
        return parquet.ParquetFile(path)


def parquet_batches(path: Path, label: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Columns of a Parquet table as text, some rows at a time; raises UserError if it is none, or lacks one."""
    with _as_parquet(label):
        if (file := parquet_file(path, label)) is None:
            raise ValueError("it does not begin as one")
        _require_columns(columns, file.schema_arrow.names, label)
        for batch in file.iter_batches(columns=list(dict.fromkeys(columns))):
            values = [as_text(batch.column(name), f"{label}, column '{name}'") for name in columns]
            yield pa.RecordBatch.from_arrays(values, list(columns))


def as_text(values: pa.Array, where: str) -> pa.Array:
    """Values as text; what is missing is empty, whole numbers have no point, and lists are joined by spaces. Raises
    UserError for other types."""
    from pyarrow import compute as pc

    try:
        if pa.types.is_duration(values.type):
            raise pa.ArrowTypeError("lengths of time")
        if pa.types.is_floating(values.type):
            numbers = values.cast(pa.float64())
            numbers = pc.if_else(pc.is_nan(numbers), None, numbers)
            whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), EXACT))
            return pc.if_else(whole, numbers.cast(pa.int64(), safe=False).cast(pa.string()),
                              values.cast(pa.string())).fill_null("")
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            texts = values.cast(pa.list_(pa.string()))
            values = pc.binary_join(pa.ListArray.from_arrays(texts.offsets, texts.values.fill_null("")), " ")
        return values.cast(pa.string()).fill_null("")
    except pa.ArrowException:
        raise UserError(f"{where}: found values of type {values.type}, accepted: texts, numbers, times, and lists of "
                        f"them.") from None


def frame_batch(frame: pd.DataFrame, columns: Sequence[str]) -> pa.RecordBatch:
    """Columns of a frame as text; what is missing is empty."""
    return pa.RecordBatch.from_pydict({
        name: pa.array(frame[name].astype(object).where(frame[name].notna(), "").map(str), pa.string())
        for name in columns})


def joined(columns: Sequence[pa.Array]) -> pa.Array:
    """Rows as lines of tab-separated fields, without their ends."""
    from pyarrow import compute as pc

    return pc.binary_join_element_wise(*columns, "\t")


def content_of(lines: pa.Array) -> memoryview:
    """All lines of an array, each with its end, as bytes."""
    from pyarrow import compute as pc

    ended = pc.binary_join_element_wise(lines, "", "\n")
    _, offsets, content = ended.buffers()
    ends = np.frombuffer(offsets, np.int32)[ended.offset:ended.offset + len(ended) + 1]
    return memoryview(content)[ends[0]:ends[-1]] if content is not None else memoryview(b"")
