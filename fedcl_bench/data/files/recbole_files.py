"""RecBole's atomic files: tab-separated tables with typed columns, read and filtered as RecBole does.

RecBole's own dataset is not gone through: it would fill a missing time with the column's mean, read the command line
and change the process. Tests compare what it gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Collection, Mapping

import numpy as np
import pyarrow as pa

from ...core.arrow import from_numbers, numbers
from ...core.errors import UserError
from ...core.text import quoted
from . import times
from .table_reader import TableLayout, first_lines, line_of, listed, require_distinct, text_batches

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Interactions:
    """The rows of a dataset after its filters, in file order; None for what was not asked for.

    Ids are from 0, numbered by first appearance in the file; int32, of which there are fewer than 2^31, so that what is
    calculated with them is to be made int64 first.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray  # float64, one per row, or empty where nothing looks at them any more
    user_tokens: np.ndarray  # the publisher's id of each user
    item_tokens: np.ndarray
    session: np.ndarray | None = None  # the publisher's session id of each row as text
    split: np.ndarray | None = None  # which of ``SPLITS`` each row is in, as its number (int8)
    rating: np.ndarray | None = None  # float64, one per row

    def of_rows(self, rows: np.ndarray) -> Interactions:
        """Some of the rows, whose users and items are numbered anew; this itself if that changes nothing."""
        if len(rows) == len(self.user) and bool((rows[1:] > rows[:-1]).all()) and all(
                _by_appearance(*each) for each in ((self.user, self.user_tokens), (self.item, self.item_tokens))):
            return self
        user, old_user = _numbered(self.user[rows])
        item, old_item = _numbered(self.item[rows])
        time = self.time[rows] if len(self.time) else self.time
        return Interactions(user, item, time, self.user_tokens[old_user], self.item_tokens[old_item],
                            *(None if values is None else values[rows]
                              for values in (self.session, self.split, self.rating)))


def _by_appearance(ids: np.ndarray, tokens: np.ndarray) -> bool:
    """Whether ids are numbered by first appearance, and all tokens appear."""
    largest = -1
    for part in pieces(len(ids)):
        so_far = np.maximum.accumulate(np.concatenate([[largest], ids[part]]))
        if (np.diff(so_far) > 1).any():
            return False
        largest = so_far[-1]
    return bool(largest + 1 == len(tokens))


def _numbered(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids from 0 numbered anew by first appearance, and the former ones by their new numbers."""
    first = np.full(ids.max(initial=-1) + 1, len(ids))
    for part in reversed(pieces(len(ids))):  # of equal ones the last written stays
        first[ids[part][::-1]] = np.arange(part.start, part.stop)[::-1]
    former = np.flatnonzero(first < len(ids))
    former = former[np.argsort(first[former])]
    number = np.empty(len(first), ids.dtype)
    number[former] = np.arange(len(former))
    return number[ids], former


def pieces(rows: int, at_once: int = 1 << 18) -> list[slice]:
    """Rows in pieces, so that what is made on the way of them does not grow with them."""
    return [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]


def core(user: np.ndarray, item: np.ndarray, count: int, rows: np.ndarray) -> np.ndarray:
    """Those of some rows that are left when each user and item keeps at least ``count`` rows."""
    while count > 1 and len(rows):
        enough = np.all([(np.bincount(ids[rows]) >= count)[ids[rows]] for ids in (user, item)], axis=0)
        if enough.all():
            break
        rows = rows[enough]
    return rows


def bundled(name: str) -> Path | None:
    """The folder of a dataset that ships with RecBole, or None."""
    import recbole

    folder = Path(recbole.__file__).parent / "dataset_example" / name
    return folder if (folder / f"{name}.inter").is_file() else None


def read_table(path: Path, required: Mapping[str, str], optional: Mapping[str, str] | None = None) -> pa.Table:
    """Columns of a tab-separated file with a header, plain (``user``) or typed as in RecBole (``user:token``): the
    required ones and those optional ones that it has, tokens as a dictionary.

    Both map a column to its kind, ``token`` (a category, of text) or ``float`` (finite numbers). Raises UserError for a
    missing or empty file, a missing column, a row of the wrong width, an empty id, a value that is not a finite number;
    names the file, line and field.
    """
    header = first_lines(path, str(path), "a header line, then one interaction per line")[0]
    names = [field.partition(":")[0] for field in header.split("\t")]
    require_distinct(names, path)
    for name in required:
        if name not in names:
            hint = "" if "\t" in header else "\nSeparate its columns by tabs."
            if hint and path.suffix == ".inter":
                hint = f"\nMake it so with: run_bench.py data convert --table {path.name} NAME"
            raise UserError(f"{path}: column '{name}' is missing; found columns {listed(names)} "
                            f"(tab-separated header, as user_id:token).{hint}")
    wanted = {name: kind for name, kind in {**required, **(optional or {})}.items() if name in names}
    layout = TableLayout("\t", tuple(names), True, quoted=False)
    read: dict[str, _Tokens | _Numbers] = {name: _Tokens() if kind == "token" else _Numbers()
                                           for name, kind in wanted.items()}
    rows = 0
    for batch in text_batches(path, str(path), layout, list(wanted)):
        rows += batch.num_rows
        for name, column in read.items():
            column.add(batch.column(name))
    if not rows:
        raise UserError(f"{path}: has no rows; expected a header line and one interaction per line.")
    columns = {}
    for name in wanted:
        column = read.pop(name)
        values = columns[name] = column.values()
        if (row := column.first_bad(values)) is not None:
            texts = pa.chunked_array([batch.column(name) for batch in text_batches(path, str(path), layout, [name])])
            raise UserError(f"{path}, line {line_of(path, row + 2)}: field '{name}' is {texts[row].as_py()!r}, "
                            f"expected {column.expected}.")
    pa.default_memory_pool().release_unused()
    return pa.table(columns)


def _categories(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each row's token, int32, and the tokens as text."""
    from pyarrow import compute as pc

    array, = column.chunks
    tokens = array.dictionary
    texts = np.empty(len(tokens), f"<U{max(pc.max(pc.utf8_length(tokens)).as_py(), 1)}")
    for part in pieces(len(tokens)):  # as objects of Python they take many times as much
        texts[part] = tokens[part].to_pylist()
    return numbers(array.indices), texts


class _Grown:
    """A long array that parts are appended to, of which there is no second copy: large blocks are moved, not copied."""

    def __init__(self, dtype: type) -> None:
        self.values = np.empty(0, dtype)

    def add(self, part: np.ndarray) -> None:
        before = len(self.values)
        self.values.resize(before + len(part), refcheck=False)
        self.values[before:] = part


class _Tokens:
    """A column of ids, numbered by first appearance while it is read: its text is not kept."""

    expected = "an id"
    _AT_ONCE = 1 << 18  # ids that are looked up together at least

    def __init__(self) -> None:
        self._batches: list[pa.DictionaryArray] = []
        self._codes = _Grown(np.int32)
        self._known = self._waiting = 0

    def add(self, texts: pa.Array) -> None:
        self._batches.append(texts.dictionary_encode())
        self._waiting += len(self._batches[-1].dictionary)
        if self._waiting > max(self._AT_ONCE, self._known):  # each time all that are known are looked up too
            self._number()

    def _number(self) -> None:
        chunks = pa.chunked_array(self._batches).unify_dictionaries().chunks
        for chunk in chunks:
            self._codes.add(numbers(chunk.indices))
        self._batches = [pa.DictionaryArray.from_arrays(chunks[0].indices[:0], chunks[0].dictionary)]
        self._known, self._waiting = len(chunks[0].dictionary), 0

    def values(self) -> pa.DictionaryArray:
        self._number()
        return pa.DictionaryArray.from_arrays(from_numbers(self._codes.values), self._batches[0].dictionary)

    def first_bad(self, values: pa.DictionaryArray) -> int | None:
        """The first row that is no id."""
        from pyarrow import compute as pc

        empty = np.flatnonzero(numbers(pc.utf8_length(values.dictionary)) == 0)  # `pc.index` imports pandas
        return int(np.argmax(numbers(values.indices) == empty[0])) if len(empty) else None


class _Numbers:
    """A column of float64 numbers, of which the text is not kept."""

    expected = "a finite number"

    def __init__(self) -> None:
        self._numbers = _Grown(np.float64)

    def add(self, texts: pa.Array) -> None:
        try:
            self._numbers.add(numbers(texts.cast(pa.float64())))
        except pa.ArrowInvalid:  # of a text that is none, or has a space or a plus, which Python takes and rounds alike
            self._numbers.add(np.array([finite(text) for text in texts.to_pylist()]))

    def values(self) -> pa.Array:
        return from_numbers(self._numbers.values)

    def first_bad(self, values: pa.Array) -> int | None:
        """The first row that is no finite number."""
        finite = np.isfinite(numbers(values))
        return None if finite.all() else int(np.argmin(finite))


def finite(text: str) -> float:
    """The number that a text is, NaN if it is none or not finite."""
    try:
        return value if "_" not in text and np.isfinite(value := float(text)) else np.nan
    except ValueError:
        return np.nan


# What to do about a column that only streams of sessions, or losses of ratings, read.
_WITHOUT = {"session": "cut sessions at inactivity with --set session_from=gap",
            "split": "take the last sessions for testing with --set session_split=last",
            "event": "take EVENT_FIELD and drop_events out of the dataset's config to use every row",
            "rating": "name the column of ratings as RATING_FIELD in the dataset's config, or leave out the loss that "
                      "reads them"}


def splits_of(path: Path, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """The number of each row's split, int8; raises UserError if a row of a file is in none, naming its line."""
    codes, tokens = _categories(column)
    split = np.array([SPLITS.index(token) if token in SPLITS else -1 for token in tokens], np.int8)[codes]
    if (split < 0).any():
        row = int(np.argmax(split < 0))
        raise UserError(f"{path}, line {line_of(path, row + 2)}: field '{name}' is {quoted(str(tokens[codes[row]]))}, "
                        f"expected train, valid or test.")
    return split


def load_interactions(path: Path, k_core: int, fields: Mapping[str, str], keep: Mapping[str, str],
                      drop_events: Collection[str] = ()) -> Interactions:
    """Read a ``.inter`` file and apply RecBole's value and k-core filters.

    Args:
        path: the atomic file ``.../NAME.inter``.
        k_core: every user and item keeps at least this many rows (0 or 1: no filter).
        fields: names of the ``user``, ``item`` and ``time`` columns, and of those of ``session``, ``split`` and
            ``event`` (all three as text) and ``rating`` that are to be read.
        keep: RecBole value intervals of float columns, as ``{"rating": "(0,inf)"}``; a column the file lacks is an
            error.
        drop_events: rows with one of these values in the ``event`` column are left out before any other filter.

    Raises:
        UserError: for a bad file, or when the filters leave no interaction.
    """
    extra = {part: fields[part] for part in _WITHOUT if part in fields}
    as_numbers = {fields["time"], *keep} | ({extra["rating"]} if "rating" in extra else set())
    for part, column in fields.items():
        if part not in ("time", "rating") and column in as_numbers:
            raise UserError(f"{path}: column '{column}' is asked for as text (its {part}) and as numbers (times, "
                            f"ratings or val_interval), accepted: one of both.\nGive it twice in the file, under two "
                            f"names.")
    table = read_table(path, {fields["user"]: "token", fields["item"]: "token", fields["time"]: "float",
                              **dict.fromkeys(keep, "float")},
                       {column: "float" if part == "rating" else "token" for part, column in extra.items()})
    if absent := [part for part, column in extra.items() if column not in table.column_names]:
        raise UserError(f"{path}: {' and '.join(f'{extra[part]!r} ({part})' for part in absent)} is missing among its "
                        f"columns; {', '.join(_WITHOUT[part] for part in absent)}.")
    values = {name: numbers(table.column(name)) for name in (fields["time"], *keep)}
    times.check(values[fields["time"]], f"{path}, field '{fields['time']}'")

    split = splits_of(path, extra["split"], table.column(extra["split"])) if "split" in extra else None
    left = np.ones(len(table), bool)
    if "event" in extra:
        event, events = _categories(table.column(extra["event"]))
        left = ~np.isin(events, list(drop_events))[event]
        if not left.any():
            raise UserError(f"{path}: every row has a value of column '{extra['event']}' that drop_events of the "
                            f"dataset's config drops ({', '.join(drop_events)}).")
    count = int(left.sum())
    for column, intervals in keep.items():
        left &= _within(values[column], intervals)
    (user, users), (item, items) = (_categories(table.column(fields[part])) for part in ("user", "item"))
    rows = core(user, item, k_core, np.flatnonzero(left))
    if not len(rows):
        filters = [f"the {k_core}-core filter"] * (k_core > 1) + [f"val_interval {dict(keep)}"] * bool(keep)
        cure = "lower it with --set k_core=N" if left.any() else "correct val_interval in the dataset's YAML file"
        raise UserError(f"{path}: no interaction is left of {count} after {' and '.join(filters)}; {cure}.")
    session, rating = None, numbers(table.column(extra["rating"])) if "rating" in extra else None
    if "session" in extra:
        each, sessions = _categories(table.column(extra["session"]))
        session = sessions.astype(object)[each]
    return Interactions(user, item, values[fields["time"]], users, items, session, split, rating).of_rows(rows)


def _within(values: np.ndarray, intervals: str) -> np.ndarray:
    """Where values are in one of RecBole's intervals, as ``[1,2];(4,inf)``."""
    inside = np.zeros(len(values), bool)
    for opening, low, high, closing in re.findall(r"([\[(])([^,]*),([^])]*)([])])", intervals):
        above = values >= float(low) if opening == "[" else values > float(low)
        inside |= above & (values <= float(high) if closing == "]" else values < float(high))
    return inside
