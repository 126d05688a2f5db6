"""Any table of interactions to an atomic file, in pieces, so that memory is bounded.

What is not said about the table is detected (see ``table_files``), and from the first rows how times are written. The
answer says what was detected.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute as pc

from ...core.errors import UserError
from ...core.files import made_folder, replacing, sweep, write_atomically
from ...core.text import safe_name
from . import times as units
from ..items.item_texts import item_file, item_table
from ..source import write_config
from .table_files import TableFile, detect
from .table_reader import EXACT, BadRows, content_of, joined

_CONDITION = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(-?[0-9]+(?:\.[0-9]+)?)\s*")
_OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
              "<": operator.lt}
ATOMIC = {"user": "user_id:token", "item": "item_id:token", "rating": "rating:float", "session": "session_id:token",
          "split": "split:token", "time": "timestamp:float"}
_ODD = r"(?i)^(null|nan|none|n/?a|<na>|\\n|-?[0-9]+\.0)$"  # ids that may mean none, or a whole number
_OF_REPEATS = 5_000_000  # rows that are looked at for repeated ones, of 8 bytes each


@dataclass(frozen=True)
class Columns:
    """Which columns of the table are read: names of its header, or numbers from 1 in a table without one."""

    user: str
    item: str
    time: str
    rating: str = ""
    session: str = ""
    keep: str = ""  # condition on the rating, as ``>=4``; rows that do not meet it are left out; empty: all are kept

    @property
    def named(self) -> dict[str, str]:
        """Part to column, in the order of the atomic file, of those that are read."""
        return {part: getattr(self, part) for part in ATOMIC if getattr(self, part, "")}

    @property
    def options(self) -> dict[str, str]:
        """Column to the option that names it; that of users may be the one of sessions."""
        return {column: f"--{part}" for part, column in self.named.items()}


@dataclass(frozen=True)
class Tables:
    """The files of a dataset, and how they are read."""

    interactions: Path  # a table; of sessions that are trained on, where others are in ``valid`` or ``test``
    columns: Columns
    encoding: str = "utf-8"  # of text
    skip_bad: bool = False  # leave rows out that cannot be read
    valid: Path | None = None
    test: Path | None = None
    items: Path | None = None  # a table of items, with their ids in the column ``items_id`` and ``texts`` in columns
    items_id: str = ""
    texts: tuple[str, ...] = ()
    time_format: str = ""  # as Python's strptime takes it; empty: it is recognised

    @property
    def by_split(self) -> dict[str, Path]:
        """Split to the table of its sessions; one of an empty name if there are no splits."""
        others = {split: path for split in ("valid", "test") if (path := getattr(self, split))}
        return {"train" if others else "": self.interactions, **others}


@dataclass(frozen=True)
class Imported:
    """What became of a table."""

    rows: int  # of the table
    written: int  # rows of the atomic file
    users: int  # different ones that were written
    items: int
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason to the number of rows left out for it
    notes: tuple[str, ...] = ()  # a sentence for each thing that was detected
    files: tuple[Path, ...] = ()  # written ones


def condition(text: str) -> Callable[[np.ndarray], np.ndarray]:
    """A condition as ``>=4`` as a function of numbers; raises UserError for anything else."""
    if not (match := _CONDITION.fullmatch(text)):
        raise UserError(f"--keep: found '{text}', accepted: a comparison with a number, as '>=4'.")
    return lambda numbers: _OPERATORS[match[1]](numbers, float(match[2]))


def import_table(tables: Tables, name: str, out: Path, force: bool = False) -> Imported:
    """Write ``out/name/name.inter`` from tables, ``name.item`` if there is one of items, and ``name.yaml`` if there is
    a session column; ``force`` replaces files of that name. Raises UserError for a name that is not safe, no format of
    times, a missing file or column, one column for several parts, rows that cannot be read, times in several units, or
    that may be of two formats, or files that exist. Nothing has been written then."""
    if tables.time_format:
        units.require_form(tables.time_format, "--time-format")
    columns, target = tables.columns, out / safe_name(name, "data convert") / f"{name}.inter"
    keeps = condition(columns.keep) if columns.keep else None
    for text in tables.texts:
        if text == "item_id" or tables.texts.count(text) > 1:  # which would be two columns of NAME.item
            raise UserError(f"--texts: found '{text}', accepted: columns of other names than item_id, each once.")
    options: dict[str, str] = {}
    for part, column in columns.named.items():  # sessions may be the users
        if part != "session" and (first := options.setdefault(column, part)) != part:
            raise UserError(f"--{part}: found '{column}', the column of --{first}; accepted: another column.")
    if columns.session and columns.session == columns.user and len(tables.by_split) == 1:
        raise UserError(f"--session: users are the sessions ('{columns.user}'), so nobody has a later one to test on; "
                        f"accepted: --user COLUMN of users, or --test FILE of sessions to test on.")
    files = [target, *([item_file(target)] if tables.items else []),
             *([target.with_suffix(".yaml")] if columns.session else [])]
    if not force and (exist := [file for file in files if file.exists()]):
        raise UserError(f"{exist[0]}: exists; replace it with --force, or write elsewhere with --out DIR.")
    detected = {split: detect(path, columns.options, f"--{split}" if split in ("valid", "test") else "--table",
                              tables.encoding) for split, path in tables.by_split.items()}
    bad = BadRows(tables.skip_bad)
    writer = _Writer(columns, keeps, bad, tables.time_format)
    try:
        with made_folder(target.parent), replacing(target) as file:
            sweep(target.parent)
            parts = [*columns.named, *(["split"] if "" not in detected else [])]
            file.write(("\t".join(ATOMIC[part] for part in writer.order(parts)) + "\n").encode())
            for split, table in detected.items():
                writer.read(table, split, file)
            bad.require_none()
            units.refuse_several(writer.times.counts, f"{tables.interactions}, column '{columns.time}'")
            if not writer.written:
                raise UserError(f"{tables.interactions}: no row is left of {writer.rows:,}"
                                + (f" with a rating {columns.keep}" if keeps else "") + "; nothing is written.")
            described = _describe(tables, target, writer, bad)
        if columns.session:
            write_config(target, _config_of(tables))
    except OSError as error:
        raise UserError(f"{error.filename or target}: cannot be read or written ({error.strerror or error}).") from None
    if bad.count:
        writer.left_out["that cannot be read"] = bad.count
    notes = (detected[next(iter(detected))].note, writer.times.note, writer.times.days, *bad.inside_notes(),
             *writer.notes(), *described, *(f"left out: {said}" for said in bad.first))
    notes += tuple(f"{file}: was there before, and is read with these interactions" for file in
                   (item_file(target), target.with_suffix(".yaml")) if file not in files and file.exists())
    different = (ids.count() for ids in writer.different.values())
    return Imported(writer.rows + bad.count, writer.written, *different, writer.left_out, notes, tuple(files))


def _config_of(tables: Tables) -> dict[str, Any]:
    """The YAML file of sessions."""
    settings = {"stream": "sessions", "session_from": "column"}
    if len(tables.by_split) == 1:
        return {"SESSION_FIELD": "session_id", "settings": settings}
    settings["session_split"] = "column"
    if tables.columns.user == tables.columns.session or tables.valid is None:  # nobody has several, or some held out
        settings["topology"] = "central"
    return {"SESSION_FIELD": "session_id", "SPLIT_FIELD": "split", "settings": settings}


def _describe(tables: Tables, target: Path, writer: _Writer, bad: BadRows) -> list[str]:
    """Write what a table says of items; gives a sentence on it. Raises UserError if its ids are none of the items'."""
    if tables.items is None:
        return []
    columns = [tables.items_id, *tables.texts]
    wanted = {tables.items_id: "--items-id"} | {column: "--texts" for column in tables.texts}
    table = detect(tables.items, wanted, "--items", tables.encoding)
    texts: dict[str, Sequence[str]] = {}
    rows = 0
    for batch in table.batches(columns, bad):
        rows += batch.num_rows
        for item, *described in zip(*(_clean(column).to_pylist() for column in batch.columns)):
            texts.setdefault(item, described)
    bad.require_none()
    texts.pop("", None)
    known, items = writer.different["item"].known(list(texts)), writer.different["item"].count()
    if not known:
        example = f" (as {next(iter(texts))!r})" if texts else ""
        raise UserError(f"{tables.items}: none of its {len(texts):,} ids in the column '{tables.items_id}'{example} is "
                        f"an item of {tables.interactions}.\nName the column of ids with --items-id COLUMN.")
    names = [text.removesuffix(":token_seq").replace(":", "_") for text in tables.texts]
    content, _ = item_table(names, ((item, *described) for item, described in texts.items()))
    write_atomically(item_file(target), content)
    again = f"; rows without an id or of an item that stands above, which are left out: {rows - len(texts):,}"
    return [f"{tables.items}: {table.note}; texts of {known:,} of the {items:,} items" + again * (rows > len(texts))]


class _Times:
    """Times as seconds; how they are written is said, or decided by the first ones."""

    def __init__(self, form: str) -> None:
        self.form, self.scale = form, 0.0  # as ``units.read`` takes it; or empty, and of numbers how many make a second
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
        if not self.note and len(filled := texts[~np.isin(texts, ("", "NaN", "nan"))]):
            self._decide(filled)
        if not self.note:
            return np.full(len(texts), np.nan)
        if not self.form:
            units.by_unit(_floats(texts), self.counts)
        return self._read(texts)

    def _read(self, texts: np.ndarray) -> np.ndarray:
        if self.form:
            return units.read(texts, self.form)
        seconds = _floats(texts) / self.scale
        return np.where(np.abs(seconds) < EXACT, seconds, np.nan)

    def _decide(self, texts: np.ndarray) -> None:
        numbers = _floats(texts)
        numbers = np.abs(numbers[np.isfinite(numbers)])
        dates = numbers[numbers > 0]  # a 0 stands for none
        if self.form or 2 * len(numbers) < len(texts) or len(dates) and units.are_dates(dates):
            self.form = self.form or units.form_of(texts)
            how, more = self.written, ", UTC unless they say otherwise; written in seconds"
        else:
            largest = float(np.median(numbers))
            _, self.scale, unit = next(row for row in units.UNITS if largest < row[0])
            how, more = f"{unit} since 1970", "" if self.scale == 1 else "; written in seconds"
        self.note = f"times are {how} (as {texts[np.isfinite(self._read(texts)).argmax()]}){more}"

    @property
    def written(self) -> str:
        """The format, for people."""
        return self.form if self.form != units.ISO else "ISO 8601"


class _Distinct:
    """Counts different texts by 64-bit hashes: 8 bytes each, however long the texts are."""

    def __init__(self) -> None:
        self._hashes = [np.empty(0, np.uint64)]  # different ones, then those of pieces

    def add(self, texts: pa.Array) -> None:
        unique = np.asarray(pc.unique(texts).to_numpy(zero_copy_only=False), dtype=object)
        self._hashes.append(pd.util.hash_array(unique, categorize=False))
        if sum(map(len, self._hashes[1:])) > max(1 << 20, len(self._hashes[0])):
            self.count()

    def known(self, texts: Sequence[str]) -> int:
        """How many of some different texts have been added."""
        self.count()
        return int(np.isin(pd.util.hash_array(np.array(texts, dtype=object), categorize=False), self._hashes[0]).sum())

    def count(self) -> int:
        hashes = np.concatenate(self._hashes)
        hashes.sort()  # in its place, as np.unique does not
        self._hashes = [hashes[np.concatenate([[True], hashes[1:] != hashes[:-1]])] if len(hashes) else hashes]
        return len(self._hashes[0])


class _Writer:
    """Rows of tables to lines of the atomic file, and what is counted on the way."""

    def __init__(self, columns: Columns, keeps: Callable | None, bad: BadRows, time_format: str) -> None:
        self.columns, self.keeps, self.bad = columns, keeps, bad
        self.rows = self.written = self.before = 0  # of the files before the present one
        self.left_out: Counter[str] = Counter()
        self.different = {"user": _Distinct(), "item": _Distinct()}
        self.lines, self.of_lines = _Distinct(), 0
        self.control: Counter[str] = Counter()  # rows whose users' or items' ids had control characters
        self.odd: dict[str, tuple[int, str]] = {}  # how many rows have odd ids of users or items, and the first of them
        self.times = _Times(time_format)

    @staticmethod
    def order(parts: Collection[str]) -> list[str]:
        """Parts in the order of the atomic file."""
        return [part for part in ATOMIC if part in parts]

    def read(self, table: TableFile, split: str, file: BinaryIO) -> None:
        """Add the rows of a table to the file."""
        self.before = self.rows
        for piece in table.batches(list(dict.fromkeys(self.columns.named.values())), self.bad):
            self.write(piece, table, split, file)

    def write(self, piece: pa.RecordBatch, table: TableFile, split: str, file: BinaryIO) -> None:
        """Add a piece of a table to the file."""
        named = self.columns.named
        texts = {part: _clean(piece.column(column)) for part, column in named.items()}
        whole = np.all([pc.not_equal(texts[part], "").to_numpy(zero_copy_only=False)
                        for part in ("user", "item", "session") if part in texts], axis=0)
        rows = self._narrowed(np.arange(piece.num_rows), whole, "without user, item or session")
        if "rating" in texts:
            rows, ratings = self._numbers(texts["rating"], rows, "rating", table)
            if self.keeps is not None:
                rows = self._narrowed(rows, self.keeps(ratings), f"with a rating that is not {self.columns.keep}")
        rows, seconds = self._numbers(texts["time"], rows, "time", table)
        self.rows += piece.num_rows
        self.written += len(rows)
        if not len(rows):
            return
        self.times.span = min(self.times.span[0], seconds.min()), max(self.times.span[1], seconds.max())
        values = {part: text.take(pa.array(rows)) for part, text in texts.items()}
        is_whole = bool((seconds == np.floor(seconds)).all())
        values["time"] = pc.cast(pa.array(seconds.astype(np.int64) if is_whole else seconds), pa.string())
        for part in ("user", "item"):
            written = pc.utf8_trim_whitespace(piece.column(named[part]).take(pa.array(rows)))
            self.control[part] += pc.sum(pc.not_equal(written, values[part])).as_py()
            if len(odd := written.filter(pc.match_substring_regex(written, _ODD))):
                count, first = self.odd.get(part, (0, odd[0].as_py()))
                self.odd[part] = count + len(odd), first
        if split:
            values |= _of_split(values, split, self.columns)
        for part, different in self.different.items():
            different.add(values[part])
        lines = joined([values[part] for part in self.order(values)])
        if self.of_lines < _OF_REPEATS:
            self.lines.add(lines)
            self.of_lines += len(lines)
        file.write(content_of(lines))

    def notes(self) -> Iterator[str]:
        """A sentence on each of users and items whose ids had control characters or are odd, and if rows repeat
        others."""
        for part, (count, first) in self.odd.items():
            yield f"{part} ids of {count:,} rows are as '{first}'; is that a missing one, or a whole number?"
        for part, count in (+self.control).items():
            yield f"control characters became spaces in the {part} ids of {count:,} rows"
        if repeated := self.of_lines - self.lines.count():
            among = f" of the first {self.of_lines:,}" * (self.of_lines < self.written)
            yield (f"{repeated:,} row{'s repeat' if repeated > 1 else ' repeats'} another{among} in all columns "
                   f"that are read, and {'are' if repeated > 1 else 'is'} kept")

    def _narrowed(self, rows: np.ndarray, kept: np.ndarray, reason: str) -> np.ndarray:
        """The rows that are kept; the others are counted under the reason."""
        if not kept.all():
            self.left_out[reason] += int((~kept).sum())
        return rows[kept]

    def _numbers(self, texts: pa.Array, rows: np.ndarray, part: str, table: TableFile) -> tuple[np.ndarray, np.ndarray]:
        """Those of some rows of a piece whose times, or ratings, can be read, and these, times in seconds."""
        chosen = texts.to_numpy(zero_copy_only=False)[rows]
        if not len(chosen):
            return rows, np.empty(0)
        numbers = self.times.seconds(chosen) if part == "time" else _floats(chosen)
        good = np.isfinite(numbers)
        for at in np.flatnonzero(~good):
            self.bad.add(partial(self._said, part, str(chosen[at]), self.rows - self.before + int(rows[at]), table))
        return rows[good], numbers[good]

    def _said(self, part: str, text: str, position: int, table: TableFile) -> str:
        """What is said of a row whose time or rating cannot be read."""
        accepted = "a time as 1262304000 or 2010-01-01T00:00:00Z" if part == "time" else "a number, as 4.5"
        how = self.times.note
        if self.times.form:
            how = f"such columns are read as {self.times.written}; another format is named with --time-format"
        how = f" ({how})" * (part == "time" and bool(how))
        return (f"{table.path}, row {self.bad.row(position, table.header)}{' below the header' * table.header}: column "
                f"'{self.columns.named[part]}' is {text[:60]!r}, expected {accepted}{how}.")


def _of_split(values: Mapping[str, pa.Array], split: str, columns: Columns) -> dict[str, pa.Array]:
    """Sessions, and users who are their sessions, with ids that no other split has; and the split."""
    parts = ("session", "user") if columns.user == columns.session else ("session",)
    return {**{part: pc.binary_join_element_wise(split, values[part], "-") for part in parts},
            "split": pa.array([split] * len(values["session"]), pa.string())}


def _floats(texts: np.ndarray) -> np.ndarray:
    """float64 numbers, NaN where a text is none."""
    return pd.to_numeric(pd.Series(texts), errors="coerce").to_numpy(np.float64)


def _clean(texts: pa.Array) -> pa.Array:
    """Texts without what an atomic file cannot hold: control characters become spaces, outer ones go."""
    if pc.any(pc.match_substring_regex(texts, "[\x00-\x1f\x7f]")).as_py():
        texts = pc.replace_substring_regex(texts, "[\x00-\x1f\x7f]+", " ")
    return pc.utf8_trim_whitespace(texts)
