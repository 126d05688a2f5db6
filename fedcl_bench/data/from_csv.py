"""Any table of interactions to an atomic file, in pieces, so that memory does not grow with the table.

What is not said about the table is detected from its first lines: the separator, whether there is a header, and how
times are written. The answer says what was detected.
"""

from __future__ import annotations

import copy
import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Callable, Iterator, Mapping

import numpy as np

from ..core.errors import UserError
from ..core.files import replacing
from ..core.text import safe_name
from . import times as units
from .source import write_config
from .table_reader import SEPARATORS, TableLayout, content_of, fields_of, first_lines, joined, text_batches

if TYPE_CHECKING:
    import pyarrow as pa

_CONDITION = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(-?[0-9]+(?:\.[0-9]+)?)\s*")
_ZONE = r"[0-9][Tt ].*(?:[Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)$"
_OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
              "<": operator.lt}
ATOMIC = {"user": "user_id:token", "item": "item_id:token", "rating": "rating:float", "session": "session_id:token",
          "time": "timestamp:float"}


@dataclass(frozen=True)
class Columns:
    """Which columns of the table are read: names of its header, or numbers from 1 in a table without one.

    Attributes:
        keep: condition on the rating, as ``>=4``; rows that do not meet it are left out. Empty: all are kept.
    """

    user: str
    item: str
    time: str
    rating: str = ""
    session: str = ""
    keep: str = ""

    @property
    def named(self) -> dict[str, str]:
        """Part to column, in the order of the atomic file, of those that are read."""
        return {part: getattr(self, part) for part in ATOMIC if getattr(self, part)}


@dataclass(frozen=True)
class Imported:
    """What became of a table.

    Attributes:
        rows: of the table. written: rows of the atomic file. left_out: reason to the number of rows left out for it.
        users, items: different ones that were written.
        notes: a sentence for each thing that was detected.
        files: written ones.
    """

    rows: int
    written: int
    users: int
    items: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def condition(text: str) -> Callable[[np.ndarray], np.ndarray]:
    """A condition as ``>=4`` as a function of numbers; raises UserError for anything else."""
    match = _CONDITION.fullmatch(text)
    if not match:
        raise UserError(f"--keep: found '{text}', accepted: a comparison with a number, as '>=4'.")
    return lambda numbers: _OPERATORS[match[1]](numbers, float(match[2]))


def import_table(path: Path, columns: Columns, name: str, out: Path, force: bool = False) -> Imported:
    """Write ``out/name/name.inter`` from a table of text, and ``name.yaml`` beside it if there is a session column.

    Args:
        path: the table, UTF-8, compressed (.gz, .bz2, .zst) or not.
        force: replace files of that name.

    Raises:
        UserError: for a name that is not safe, a missing file or column, one column for several parts, a row of another
            width, a time or rating that cannot be read, times in several units, or files that exist. Nothing has been
            written then.
    """
    target = out / safe_name(name, "data convert") / f"{name}.inter"
    config = target.with_suffix(".yaml")
    keeps = condition(columns.keep) if columns.keep else None
    _refuse_same(columns)
    files = (target, config) if columns.session else (target,)
    if not force and (exist := [file for file in files if file.exists()]):
        raise UserError(f"{exist[0]}: exists; replace it with --force, or write elsewhere with --out DIR.")
    layout = detect(path, columns)
    writer = _Writer(path, columns, layout, keeps)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(("\t".join(ATOMIC[part] for part in columns.named) + "\n").encode())
            for piece in text_batches(path, str(path), layout, list(dict.fromkeys(columns.named.values()))):
                writer.write(piece, file)
            units.refuse_several(writer.times.counts, f"{path}, column '{columns.time}'")
            if not writer.written:
                raise UserError(f"{path}: no row is left of {writer.rows:,}"
                                + (f" with a rating {columns.keep}" if keeps else "") + "; nothing is written.")
        if columns.session:
            write_config(target, {"SESSION_FIELD": "session_id",
                                  "settings": {"stream": "sessions", "session_from": "column"}})
    except OSError as error:
        raise UserError(f"{error.filename or target}: cannot be read or written ({error.strerror or error}).") from None
    notes = (f"separated by {SEPARATORS[layout.separator]}, "
             f"{'with a header' if layout.header else 'without header: columns are numbers from 1'}", writer.times.note,
             writer.times.days, *writer.control_notes())
    different = (ids.count() for ids in writer.different.values())
    return Imported(writer.rows, writer.written, *different, writer.left_out, notes, files)


def _refuse_same(columns: Columns) -> None:
    """Raise UserError if two parts have one column, but for sessions, which may be the users."""
    options: dict[str, str] = {}
    for part, column in columns.named.items():
        if part != "session" and (first := options.setdefault(column, part)) != part:
            raise UserError(f"--{part}: found '{column}', the column of --{first}; accepted: another column.")


def detect(path: Path, columns: Columns) -> TableLayout:
    """How a table is written, from its first lines.

    Raises:
        UserError: if it cannot be read, is empty, or lacks one of the columns; names those that it has.
    """
    if not path.is_file():
        raise UserError(f"--csv: no file {path}.")
    first = first_lines(path, str(path), "a line of columns, then one interaction per line")[0]
    wanted = list(columns.named.values())
    rows = {separator: fields_of(first, separator) for separator in SEPARATORS}
    for separator, names in rows.items():
        if set(wanted) <= set(names):
            if doubled := [name for name in wanted if names.count(name) > 1]:
                raise UserError(f"{path}: has several columns '{doubled[0]}'; rename one of them.")
            return TableLayout(separator, tuple(names), True)
    separator = max(rows, key=lambda candidate: len(rows[candidate]))
    names = rows[separator]
    if all(re.fullmatch("[1-9][0-9]*", column) for column in wanted):
        numbers = tuple(str(i + 1) for i in range(len(names)))
        if set(wanted) <= set(numbers):
            return TableLayout(separator, numbers, not _is_time(names[int(columns.time) - 1]))
    missing = next(column for column in wanted if column not in names)
    headless = any(re.fullmatch(r"-?[0-9.]+", field) for field in names)
    hint = "\nIf that is no header, name columns by number, as --user 1 --item 2 --time 3." if headless else ""
    raise UserError(f"{path}: has no column '{missing}'; its columns are {', '.join(names)} (separated by "
                    f"{SEPARATORS[separator]}).{hint}")


def _is_time(text: str) -> bool:
    import pandas as pd

    return bool(pd.notna(pd.to_numeric(text, errors="coerce"))
                or pd.notna(pd.to_datetime(text, format="ISO8601", utc=True, errors="coerce")))


class _Times:
    """Times as seconds; how they are written is decided by the first ones."""

    def __init__(self) -> None:
        self.scale: float | None = None  # None: not decided; 0: ISO 8601
        self.counts: units.Counts = {}  # of the numbers that are read
        self.note = ""
        self.span = (np.inf, -np.inf)  # the first and the last that were written

    @property
    def days(self) -> str:
        """The days of the first and the last time, for people."""
        first, last = (str(np.datetime64(int(second), "s").astype("datetime64[D]")) for second in self.span)
        return f"from {first} to {last}" if first != last else f"all on {first}; is that the column of times?"

    def seconds(self, texts: np.ndarray) -> np.ndarray:
        """float64 seconds since 1970, NaN where a text is no time."""
        import pandas as pd

        if self.scale is None:
            self._decide(texts)
        if self.scale:
            numbers = _floats(texts)
            units.by_unit(numbers, self.counts)
            return numbers / self.scale
        seconds = np.empty(len(texts))
        zoned = pd.Series(texts).str.contains(_ZONE).to_numpy(bool)
        for rows in (zoned, ~zoned):  # among others with a zone, pandas gives times without one that of another row
            times = pd.to_datetime(pd.Series(texts[rows]), format="ISO8601", utc=True, errors="coerce")
            times = times.dt.as_unit("us")  # pandas 2 counts nanoseconds, whose division rounds otherwise
            seconds[rows] = ((times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
        return seconds

    def _decide(self, texts: np.ndarray) -> None:
        numbers = _floats(texts)
        numbers = np.abs(numbers[np.isfinite(numbers)])
        if 2 * len(numbers) >= len(texts) and not (len(numbers) == len(texts) and units.are_days(numbers)):
            largest = float(np.median(numbers))
            _, self.scale, unit = next(row for row in units.UNITS if largest < row[0])
            self.note = f"times are {unit} since 1970 (as {texts[0]})" + (
                "" if self.scale == 1 else "; written in seconds")
        else:
            self.scale = 0.0
            self.note = f"times are ISO 8601 (as {texts[0]}), UTC unless they say otherwise; written in seconds"


class _Distinct:
    """Counts different texts by 64-bit hashes: 8 bytes each, however long the texts are."""

    def __init__(self) -> None:
        self._hashes = [np.empty(0, np.uint64)]  # different ones, then those of pieces

    def add(self, texts: pa.Array) -> None:
        import pandas as pd
        import pyarrow.compute as pc

        unique = np.asarray(pc.unique(texts).to_numpy(zero_copy_only=False), dtype=object)
        self._hashes.append(pd.util.hash_array(unique, categorize=False))
        if sum(map(len, self._hashes[1:])) > max(1 << 20, len(self._hashes[0])):
            self.count()

    def count(self) -> int:
        self._hashes = [np.unique(np.concatenate(self._hashes))]
        return len(self._hashes[0])


class _Writer:
    """Rows of the table to lines of the atomic file, and what is counted on the way."""

    def __init__(self, path: Path, columns: Columns, layout: TableLayout, keeps: Callable | None) -> None:
        self.path, self.columns, self.layout, self.keeps = path, columns, layout, keeps
        self.rows = self.written = 0
        self.left_out: Counter[str] = Counter()
        self.different = {"user": _Distinct(), "item": _Distinct()}
        self.uncleaned: dict[str, _Distinct] = {}  # ids as they were, if there are control characters
        self.control: Counter[str] = Counter()
        self.times = _Times()

    def write(self, piece: pa.RecordBatch, file: BinaryIO) -> None:
        """Add a piece of the table to the file; raises UserError for a time or rating that cannot be read."""
        import pyarrow as pa
        from pyarrow import compute as pc

        named = self.columns.named
        texts = {part: _clean(piece.column(column)) for part, column in named.items()}
        whole = np.all([pc.not_equal(texts[part], "").to_numpy(zero_copy_only=False)
                        for part in ("user", "item", "session") if part in texts], axis=0)
        rows = self._narrowed(np.arange(piece.num_rows), whole, "without user, item or session")
        if "rating" in texts:
            ratings = self._numbers(texts["rating"], rows, "rating", "a number")
            if self.keeps is not None:
                rows = self._narrowed(rows, self.keeps(ratings), f"with a rating that is not {self.columns.keep}")
        seconds = self._numbers(texts["time"], rows, "time", "a time as 1262304000 or 2010-01-01T00:00:00Z")
        self.rows += piece.num_rows
        self.written += len(rows)
        if not len(rows):
            return
        self.times.span = min(self.times.span[0], seconds.min()), max(self.times.span[1], seconds.max())
        values = {part: text.take(pa.array(rows)) for part, text in texts.items()}
        is_whole = bool((seconds == np.floor(seconds)).all())
        values["time"] = pc.cast(pa.array(seconds.astype(np.int64) if is_whole else seconds), pa.string())
        for part, different in self.different.items():
            self._count_control(part, piece.column(named[part]).take(pa.array(rows)), values[part])
            different.add(values[part])
        file.write(content_of(joined([values[part] for part in named])))

    def _count_control(self, part: str, ids: pa.Array, cleaned: pa.Array) -> None:
        """Count ids with control characters, and the different ones before these are spaces."""
        from pyarrow import compute as pc

        ids = pc.utf8_trim_whitespace(ids)
        found = pc.sum(pc.not_equal(ids, cleaned)).as_py()
        self.control[part] += found
        if found or part in self.uncleaned:
            self.uncleaned.setdefault(part, copy.deepcopy(self.different[part])).add(ids)

    def control_notes(self) -> Iterator[str]:
        """A sentence on each of users and items whose ids had control characters."""
        for part, ids in self.uncleaned.items():
            yield (f"control characters became spaces in the {part} ids of {self.control[part]:,} rows, which made "
                   f"{self.different[part].count():,} different ids of {ids.count():,}")

    def _narrowed(self, rows: np.ndarray, kept: np.ndarray, reason: str) -> np.ndarray:
        """The rows that are kept; the others are counted under the reason."""
        if not kept.all():
            self.left_out[reason] += int((~kept).sum())
        return rows[kept]

    def _numbers(self, texts: pa.Array, rows: np.ndarray, part: str, accepted: str) -> np.ndarray:
        """Times in seconds, or ratings, of some rows of a piece."""
        chosen = texts.to_numpy(zero_copy_only=False)[rows]
        if not len(chosen):
            return np.empty(0)
        numbers = self.times.seconds(chosen) if part == "time" else _floats(chosen)
        bad = ~np.isfinite(numbers)
        if bad.any():
            at = int(np.argmax(bad))
            row = self.rows + int(rows[at]) + 1
            raise UserError(f"{self.path}, row {row}{' below the header' * self.layout.header}: "
                            f"column '{self.columns.named[part]}' is {str(chosen[at])[:60]!r}, expected {accepted}"
                            + (f" ({self.times.note if self.times.scale else 'such columns are read as ISO 8601'})."
                               if part == "time" else "."))
        return numbers


def _floats(texts: np.ndarray) -> np.ndarray:
    """float64 numbers, NaN where a text is none."""
    import pandas as pd

    return pd.to_numeric(pd.Series(texts), errors="coerce").to_numpy(np.float64)


def _clean(texts: pa.Array) -> pa.Array:
    """Texts without what an atomic file cannot hold: control characters become spaces, outer ones go."""
    from pyarrow import compute as pc

    if pc.any(pc.match_substring_regex(texts, "[\x00-\x1f\x7f]")).as_py():
        texts = pc.replace_substring_regex(texts, "[\x00-\x1f\x7f]+", " ")
    return pc.utf8_trim_whitespace(texts)
