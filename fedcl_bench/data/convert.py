"""Publishers' raw files to RecBole's atomic files, checked on the way.

``FORMATS`` has one preset per dataset: which files there are, how they are written and which of their columns become
which fields. Where they are, their checksums and what they must count to stands in ``dataset_configs/NAME.yaml`` under
``raw``. Nothing is written before everything is checked.
"""

from __future__ import annotations

import csv
import datetime
import html
import io
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Mapping, Sequence

from ..core.errors import UserError, unknown
from ..core.files import write_atomically
from ..core.text import quoted
from . import archives, hdf
from .overlap import persons_file
from .session_sets import TEST, TRAIN, pickled_rows, table_rows
from .source import Published, load_config
from .table_reader import (SEPARATORS, Layout, content_of, fields_of, first_lines, frame_batch, joined, read_parquet,
                           text_batches)

if TYPE_CHECKING:
    import pyarrow as pa

# Kinds of fields: what is accepted, and how to say so. Fields of kind TEXT are not looked at.
ID, WHOLE, NUMBER, FLAG, TEXT, CODE = "id", "whole", "number", "flag", "text", "code"
SPLITS = ("train", "valid", "test")
LISTENER, ISO_TIME, DAY, SHOP_EVENT = "listener", "iso time", "day", "shop event"
_KINDS = {ID: ("[0-9]{1,18}", "an id, which is a whole number"),
          WHOLE: ("-?[0-9]{1,18}", "a whole number"),
          NUMBER: (r"-?[0-9]{1,18}(\.[0-9]{1,18})?", "a number"),
          FLAG: ("[01]", "0 or 1"),
          CODE: (r"[!-~]([ -~]*[!-~])?", "an id of letters, digits and signs"),
          LISTENER: ("user_[0-9]{6}", "a user as user_000639"),
          ISO_TIME: (r"[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
                     "a time as 2009-04-08T01:57:47Z"),
          DAY: ("[0-9]{3,4}", "a day as 0829, month before day"),
          SHOP_EVENT: ("view|addtocart|transaction", "view, addtocart or transaction")}


_TIME = "timestamp:float"


def from_milliseconds(text: str) -> str:
    """A time in milliseconds in seconds."""
    return f"{int(text) / 1000:.3f}"


def from_iso(text: str) -> str:
    """A UTC time as ``2009-04-08T01:57:47Z`` in Unix seconds; raises ValueError for a day that there is not."""
    return _seconds(datetime.datetime.fromisoformat(text.removesuffix("Z")))


def from_day(text: str) -> str:
    """The beginning of a day of 2014, as ``0829`` or ``829``, in Unix seconds; raises ValueError likewise."""
    return _seconds(datetime.datetime(2014, int(text[:-2]), int(text[-2:])))


def _seconds(time: datetime.datetime) -> str:
    return str(round((time - datetime.datetime(1970, 1, 1)).total_seconds()))


@dataclass(frozen=True)
class Table:
    """How one of a publisher's files is written.

    Attributes:
        file: its name; a marked copy (``u.corrected.data`` for ``u.data``) is taken where the file itself is missing.
        columns: name of a column to the kind of its fields; with a header those that are read, which it must name,
            perhaps each with that of its export before a dot; without one all, in order.
        separator: between fields; only files separated by commas quote fields.
        header: whether the first line holds the names of the columns.
        encoding: of the text; text that is valid UTF-8 is read as that in any case.
        reader: of a file that is no text: batches of its columns as text, given its path and what messages call it.
        is_code: whether the format can hold code, so that a file of another checksum is never taken as a sample.
    """

    file: str
    columns: Mapping[str, str]
    separator: str = "\t"
    header: bool = True
    encoding: str = "utf-8"
    reader: Callable[[Path, str], Iterator[pa.RecordBatch]] | None = None
    is_code: bool = False

    def matches(self, name: str) -> bool:
        """Whether a file of this name is this table or a marked copy of it."""
        stem, _, suffix = self.file.rpartition(".")
        return name == self.file or (name.startswith(f"{stem}.") and name.endswith(f".{suffix}")
                                     and len(name) > len(self.file) + 1)


@dataclass(frozen=True)
class Format:
    """How a dataset's files become atomic ones.

    Attributes:
        interactions: the table of interactions.
        columns: header field of the ``.inter`` file to the table's column, or to several of which the first that is
            not empty counts; user and item come first. Rows where all of those are empty are left out.
        items: the tables that describe items; empty if there is no ``.item`` file.
        describe: rows of those tables to rows of an id and ``described``.
        described: what the ``.item`` file has besides ids; genres are separated by spaces.
        time: turns a time into the seconds of atomic files.
        distinct: whether rows that are alike in ``columns`` count once, at the first one's place.
        more: tables whose rows follow those of interactions, with the same columns.
        otherwise: how the data is written elsewhere; taken where this format's files are missing.
        counted: whether the counts of the dataset's config are those of this format.
        settings: what must be set to use the written file, as its config is for another one.
        persons: of domains whose users the publisher identifies, what their ids are of: an ``.overlap`` file says who
            each user is (see ``overlap``).
    """

    interactions: Table
    columns: Mapping[str, str | tuple[str, ...]]
    items: tuple[Table, ...] = ()
    describe: Callable[..., Iterable[Sequence[str]]] | None = None
    described: tuple[str, ...] = ("title", "genres")
    time: Callable[[str], str] = str
    distinct: bool = False
    more: tuple[Table, ...] = ()
    otherwise: Format | None = None
    counted: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    persons: str = ""

    @property
    def tables(self) -> tuple[Table, ...]:
        """Of interactions, then of items."""
        return (self.interactions, *self.more, *self.items)


_GENRES = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
           "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western")


def _genres_as_flags(movies):
    for movie, title, _, _, _, *flags in movies:
        yield movie, title, " ".join(genre for genre, flag in zip(_GENRES, flags) if flag == "1")


def _genres_in_one_field(movies):
    for movie, title, genres in movies:
        yield movie, title, genres.replace("|", " ")


def _genres_in_a_table(movies, genres):
    of: dict[str, list[str]] = {}
    for movie, genre in genres:
        of.setdefault(movie, []).append(genre)
    for movie, title in movies:
        yield movie, title, " ".join(of.get(movie, ()))


def _session_set() -> Format:
    """A set of sessions as session recommenders' codes have it, pickled; or the same as tables."""
    def of(stem: str, suffix: str, reader: Callable[..., Iterator[pa.RecordBatch]], split: str) -> Table:
        return Table(f"{stem}.{suffix}", {"session": TEXT, "item": ID, "position": ID, "split": TEXT},
                     reader=partial(reader, split=split))

    columns = {"user_id:token": "session", "item_id:token": "item", "timestamp:float": "position",
               "split:token": "split"}
    tables = Format(of("train", "parquet", table_rows, TRAIN), columns, more=(of("test", "parquet", table_rows, TEST),))
    return Format(of("all_train_seq", "txt", pickled_rows, TRAIN), columns,
                  more=(of("test", "txt", pickled_rows, TEST),), otherwise=tables)


def _parquet(path: Path, label: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    yield frame_batch(read_parquet(path, label, columns), columns)


def _split_sequences(path: Path, label: str, domain: str) -> Iterator[pa.RecordBatch]:
    """One domain of a table whose sequences are split into train, valid and test: user, item and the item's place in
    the user's history.

    A sequence of a later split may repeat those before it. Of what repeats, the first row counts.

    Raises:
        UserError: if the file is no such table, or has nothing of the domain.
    """
    import pandas as pd

    frame = read_parquet(path, label, ("domain", "split", "user_id", "item_id"))
    domains = frame["domain"].astype(object).map(str)  # "nan" where one is missing, which pandas 3 would leave missing
    if not (domains == domain).any():
        raise UserError(f"{label}: has no domain '{domain}'; found {', '.join(sorted(set(domains))) or 'no rows'}.")
    frame = frame[domains == domain]
    splits = frame["split"].astype(object).map(str)
    if (wrong := ~splits.isin(SPLITS)).any():
        raise UserError(f"{label}: column 'split' has {quoted(splits[wrong].iloc[0])}, expected {', '.join(SPLITS)}.")
    split = pd.Categorical(splits, SPLITS)
    frame = frame.iloc[split.codes.argsort(kind="stable")].drop_duplicates(["user_id", "item_id"])
    yield frame_batch(frame.assign(order=frame.groupby("user_id", dropna=False).cumcount()),
                      ("user_id", "item_id", "order"))


def _domain(time: str, described: Mapping[str, str]) -> Format:
    """A domain: tables of its interactions in each user's order, and of its items' texts.

    Args:
        time: the column that orders a user's interactions.
        described: columns of the items' table to what they are called in the ``.item`` file; none: it has no texts.
    """
    def of(stem: str, columns: Mapping[str, str]) -> Table:
        return Table(f"{stem}.parquet", columns, reader=partial(_parquet, columns=list(columns)))

    inter = of("inter", {"user_id": CODE, "item_id": CODE, time: WHOLE})
    columns = {"user_id:token": "user_id", "item_id:token": "item_id", "timestamp:float": time}
    if not described:
        return Format(inter, columns)
    items = of("item", {"item_id": CODE, **dict.fromkeys(described, TEXT)})
    return Format(inter, columns, (items,), describe=iter, described=tuple(described.values()))


def _identified(domain: str, persons: str) -> Format:
    """A domain in a table of several, which split sequences and share ids of users.

    Args:
        domain: what the table calls it.
        persons: names whoever has the ids.
    """
    inter = Table("inter.parquet", {"user_id": CODE, "item_id": CODE, "order": WHOLE},
                  reader=partial(_split_sequences, domain=domain))
    columns = {"user_id:token": "user_id", "item_id:token": "item_id", "timestamp:float": "order"}
    return Format(inter, columns, persons=persons)


FORMATS = {
    "amazon-arts": _domain("order", {"title": "title"}),
    "amazon-pantry": _domain("order", {"title": "title", "brand": "brand"}),
    "amazon-instruments-dated": _domain("timestamp", {}),
    **{f"amazon-{name}": _identified(name, "sport-cloth") for name in ("sport", "cloth")},
    **{f"amazon-{name}": _identified(name, "phone-electronic") for name in ("phone", "electronic")},
    **{f"amazon-{name}": _identified(name.title(), "feddcsr") for name in ("food", "kitchen", "clothing", "beauty")},
    "online-retail-ffmsr": _domain("timestamp", {"text": "title"}),
    "session-diginetica": _session_set(),
    "session-retailrocket": _session_set(),
    "ml-100k": Format(
        Table("u.data", {"user id": ID, "item id": ID, "rating": NUMBER, "timestamp": WHOLE}, header=False),
        {"user_id:token": "user id", "item_id:token": "item id", "rating:float": "rating",
         "timestamp:float": "timestamp"},
        (Table("u.item", {"movie id": ID, "movie title": TEXT, "release date": TEXT, "video release date": TEXT,
                          "IMDb URL": TEXT, **dict.fromkeys(_GENRES, FLAG)},
               separator="|", header=False, encoding="latin-1"),), _genres_as_flags),
    "ml-latest-small": Format(
        Table("ratings.csv", {"userId": ID, "movieId": ID, "rating": NUMBER, "timestamp": WHOLE}, separator=","),
        {"user_id:token": "userId", "item_id:token": "movieId", "rating:float": "rating",
         "timestamp:float": "timestamp"},
        (Table("movies.csv", {"movieId": ID, "title": TEXT, "genres": TEXT}, separator=","),), _genres_in_one_field),
    "lastfm-2k": Format(
        Table("user_taggedartists-timestamps.dat", {"userID": ID, "artistID": ID, "timestamp": WHOLE}),
        {"user_id:token": "userID", "item_id:token": "artistID", "timestamp:float": "timestamp"},
        time=from_milliseconds, distinct=True),
    "hetrec2011-ml": Format(
        Table("user_ratedmovies-timestamps.dat", {"userID": ID, "movieID": ID, "rating": NUMBER, "timestamp": WHOLE}),
        {"user_id:token": "userID", "item_id:token": "movieID", "rating:float": "rating",
         "timestamp:float": "timestamp"},
        (Table("movies.dat", {"id": ID, "title": TEXT}, encoding="latin-1"),
         Table("movie_genres.dat", {"movieID": ID, "genre": TEXT}, encoding="latin-1")), _genres_in_a_table,
        time=from_milliseconds),
    "xing": Format(
        Table("session.hdf", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE,
                              "session_id": ID, "split": TEXT},
              reader=partial(hdf.batches, keys=("train", "valid", "test"), key_column="split", columns=(
                  "user_id", "item_id", "interaction_type", "created_at", "session_id")), is_code=True),
        {"user_id:token": "user_id", "item_id:token": "item_id", "session_id:token": "session_id",
         "interaction_type:float": "interaction_type", "timestamp:float": "created_at", "split:token": "split"},
        otherwise=Format(
            Table("interactions.csv", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE}),
            {"user_id:token": "user_id", "item_id:token": "item_id", "interaction_type:token": "interaction_type",
             "timestamp:float": "created_at"},
            counted=False, settings={"session_from": "gap", "session_split": "last"})),
    "retailrocket": Format(
        Table("events.csv", {"timestamp": WHOLE, "visitorid": ID, "event": SHOP_EVENT, "itemid": ID}, separator=","),
        {"user_id:token": "visitorid", "item_id:token": "itemid", "event:token": "event",
         "timestamp:float": "timestamp"}, time=from_milliseconds),
    "lastfm-1k": Format(
        Table("userid-timestamp-artid-artname-traid-traname.tsv",
              {"userid": LISTENER, "timestamp": ISO_TIME, "musicbrainz-artist-id": TEXT, "artist-name": TEXT,
               "musicbrainz-track-id": TEXT, "track-name": TEXT}, header=False),
        {"user_id:token": "userid", "item_id:token": ("musicbrainz-artist-id", "artist-name"),
         "timestamp:float": "timestamp"}, time=from_iso),
    "tmall": Format(
        Table("user_log_format1.csv", {"user_id": ID, "item_id": ID, "time_stamp": DAY, "action_type": ID},
              separator=","),
        {"user_id:token": "user_id", "item_id:token": "item_id", "action_type:token": "action_type",
         "timestamp:float": "time_stamp"}, time=from_day),
}


@dataclass(frozen=True)
class RawFile:
    """A table's file on disk, and what messages call it (files from a zip lie in a temporary folder)."""

    table: Table
    path: Path
    label: str


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        counts: ``rows``, ``users``, ``items`` of the raw interactions, ``titles`` of the items described (if any).
        interactions: rows of the ``.inter`` file.
        files: the atomic files, in the order they were written.
        changed: whether any of them was written; False if all were there already with the same content.
        checks: a line for each checksum compared, and for each there is none for.
        warnings: a line for each thing to be told of.
        settings: what must be set to use the files.
    """

    counts: Mapping[str, int]
    interactions: int
    files: tuple[Path, ...]
    changed: bool
    checks: tuple[str, ...]
    warnings: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


def convert(name: str, raw: Path, out: Path, force: bool = False, any_checksum: bool = False,
            published: Published | None = None, label: str = "") -> Conversion:
    """Write ``out/name/name.inter`` from the publisher's files, and ``.item`` where the publisher describes items and
    ``.overlap`` where it identifies users.

    Args:
        raw: the folder that holds them (or holds the folder they were unpacked to), or the publisher's zip.
        force: replace atomic files of another content.
        any_checksum: warn instead of refusing files that are not the publisher's byte for byte, or of other counts.
            Text files in a folder are taken in any case, as samples, if their checksum is another than a known one.
        published: checksums and counts to check; None takes those of the dataset's config.
        label: what messages call ``raw``, if not by its path.

    Raises:
        UserError: for a dataset without a format, a missing, damaged or malformed file, another checksum of a zip or
            HDF file, other counts than the publisher's in what is no sample, or an existing atomic file of another
            content. Nothing has been written then.
    """
    if name not in FORMATS:
        raise unknown("dataset", name, FORMATS)
    format, published, label = FORMATS[name], published or load_config(name).raw, label or str(raw)
    with _raw_files(name, raw, label, format, published) as (format, files):
        zipped = (raw, label) if raw.is_file() else None
        checks, warnings, is_sample = _compare_checksums(published, files, zipped, any_checksum)
        described = files[1 + len(format.more):]
        inter, counts, interactions = _interactions(format, files[:1 + len(format.more)])
        contents = {".inter": inter}
        if format.items:
            contents[".item"], counts["titles"] = _items(format, described)
        if format.persons:
            contents[".overlap"] = persons_file(inter, format.persons)
    expected = published.counts if format.counted else {}
    wrong = [f"{counts[what]:,} {what} instead of {number:,}" for what, number in expected.items()
             if counts[what] != number]
    if wrong and (any_checksum or is_sample):
        warnings.append(f"taken as a sample, with {', '.join(wrong)}: no number of it can be compared with published "
                        f"ones.")
        wrong = []
    elif expected:
        checks.append(f"as many {', '.join(expected)} as the publisher counts")
    if wrong:
        raise UserError(f"{', '.join(file.label for file in files[:2])}: {', '.join(wrong)}; a file is cut short, or "
                        f"of another version.\nTake it as a sample with --any-checksum"
                        + (f", or get the expected one: {published.url}" if published.url else "."))
    # The .inter file comes last: where it is, the dataset is whole.
    targets = {out / name / f"{name}{suffix}": contents[suffix] for suffix in (".item", ".overlap", ".inter")
               if suffix in contents}
    changed = _write(targets, force)
    return Conversion(counts, interactions, tuple(targets), changed, tuple(checks), tuple(warnings), format.settings)


def _compare_checksums(published: Published, files: list[RawFile], archive: tuple[Path, str] | None,
                       any_checksum: bool) -> tuple[list[str], list[str], bool]:
    """What was checked, what to warn of, and whether a file has another checksum than the publisher's and is taken all
    the same; raises UserError for one that is not to be taken.

    Args:
        archive: path and label of the zip that the files are from, if they are from one.
        any_checksum: warn instead.
    """
    checks, warnings, differ = [], [], []

    def compare(path: Path, label: str, algorithm: str, expected: str, sample: bool = False) -> None:
        digest = archives.digest(path, algorithm)
        if digest == expected:
            checks.append(f"{label}: {algorithm} agrees with the publisher's")
        elif any_checksum or sample:
            differ.append(label)
            warnings.append(f"{label}: {algorithm} is {digest}, the publisher's is {expected}.")
        else:
            raise UserError(f"{label}: {algorithm} is {digest}, the publisher's is {expected}.\nGet the file again"
                            f"{f' from {published.url}' if published.url else ''}, or take it as it is with "
                            f"--any-checksum.")

    whole_zip = archive is not None and published.md5
    if whole_zip:
        compare(*archive, "md5", published.md5)
    for file in files:
        if file.table.file in published.sha256:
            # A file in pandas' HDF format may hold code, and one in a zip was to arrive whole: no samples of these.
            sample = archive is None and not file.table.is_code
            compare(file.path, file.label, "sha256", published.sha256[file.table.file], sample)
        elif not whole_zip:
            checks.append(f"{file.label}: no checksum is published")
        if file.path.name != file.table.file:
            warnings.append(f"{file.label} is taken for the publisher's {file.table.file}.")
    return checks, warnings, bool(differ)


def _write(targets: Mapping[Path, bytes], force: bool) -> bool:
    """Write what is not there yet, all or (before the first write) nothing; True if anything was written."""
    try:
        differs = {path: content for path, content in targets.items()
                   if not path.exists() or path.read_bytes() != content}
        for path in differs:
            if path.exists() and not force:
                raise UserError(f"{path}: exists with another content; replace it with --force, or write elsewhere "
                                f"with --out DIR.")
        for path, content in differs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{error.filename or 'the output'}: cannot be written ({error.strerror}); choose another "
                        f"folder with --out DIR.") from None
    return bool(differs)


@contextmanager
def _raw_files(name: str, raw: Path, label: str, format: Format,
               published: Published) -> Iterator[tuple[Format, list[RawFile]]]:
    """The format that is there and the file of each of its tables; those of a zip lie there while the context lasts."""
    tables = format.tables + (format.otherwise.tables if format.otherwise else ())
    if raw.is_dir():
        yield _files_in(format, [raw, raw / name, raw / Path(published.url or name).stem], label, str, published)
    elif raw.is_file():
        with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
            archives.unpack(raw, label, Path(folder), lambda file: any(table.matches(file) for table in tables))
            yield _files_in(format, [Path(folder)], label, lambda path: f"{label}: {path.name}", published)
    else:
        raise UserError(f"--raw: '{raw}' is neither a folder nor a zip file.")


def _files_in(format: Format, folders: list[Path], where: str, label: Callable[[Path], str],
              published: Published) -> tuple[Format, list[RawFile]]:
    """Each table's file in the first folder that has it, or else the one marked copy of it."""
    files, missing = [], []
    for table in format.tables:
        paths = [folder / table.file for folder in folders if (folder / table.file).is_file()][:1]
        paths = paths or [path for folder in dict.fromkeys(folders) if folder.is_dir()
                          for path in sorted(folder.iterdir()) if table.matches(path.name) and path.is_file()]
        if len(paths) > 1:
            raise UserError(f"{where}: no file {table.file}, and cannot tell which of {', '.join(map(str, paths))} to "
                            f"take; leave one there.")
        files += [RawFile(table, path, label(path)) for path in paths]
        missing += [] if paths else [table.file]
    if missing and format.otherwise and not files:
        others = format.otherwise.tables
        if any(table.matches(path.name) for folder in folders if folder.is_dir() for path in folder.iterdir()
               for table in others):
            return _files_in(format.otherwise, folders, where, label, published)
        missing += [table.file for table in others]
    if missing:
        raise UserError(f"{where}: has no {' and no '.join(missing)}."
                        + (f"\nThat is part of {published.url}" if published.url else ""))
    return format, files


def batches_of(file: RawFile) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """The columns of a raw file as text, some rows at a time, each field checked against its kind; before them what
    messages call a row, and the number of the first one.

    Raises:
        UserError: naming the file, line and field, what was found and what is expected.
    """
    from pyarrow import compute as pc

    table, first = file.table, 1
    if table.reader is not None:
        batches = table.reader(file.path, file.label)
    else:
        layout = _layout(file)
        first += layout.header
        batches = text_batches(file.path, file.label, layout, list(table.columns))
    what, start = ("row" if table.reader else "line"), first
    for batch in batches:
        for name, kind in table.columns.items():
            if kind != TEXT:
                pattern, accepted = _KINDS[kind]
                right = pc.match_substring_regex(batch.column(name), rf"\A(?:{pattern})\z")
                if not pc.all(right, min_count=0).as_py():
                    row = pc.index(right, False).as_py()
                    raise UserError(f"{file.label}, {what} {first + row}: field '{name}' is "
                                    f"{batch.column(name)[row].as_py()[:60]!r}, expected {accepted}.")
        yield what, first, batch
        first += batch.num_rows
    if first == start:
        raise UserError(f"{file.label}: has no rows{' below its header' * (table.header and not table.reader)}.")


def _layout(file: RawFile) -> Layout:
    """How a file of text is written, given its table and its first line."""
    table, columns = file.table, list(file.table.columns)
    encoding = table.encoding if table.encoding == "utf-8" or not _is_utf8(file.path) else "utf-8"
    names = tuple(columns)
    expected = f"lines of {Layout(table.separator, names, False).expected}"
    first = first_lines(file.path, file.label, expected, encoding)[0]
    if table.header:
        names = tuple(name.rpartition(".")[2] for name in fields_of(first, table.separator))
        if missing := [name for name in columns if name not in names]:
            raise UserError(f"{file.label}, line 1: has no column '{missing[0]}' ({first[:60]!r}), expected "
                            f"{', '.join(columns)}, separated by {SEPARATORS[table.separator]}.")
    return Layout(table.separator, names, table.header, table.separator == ",", encoding)


def _is_utf8(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as lines:
            return all(True for _ in lines)
    except UnicodeDecodeError:
        return False


def _interactions(format: Format, files: Iterable[RawFile]) -> tuple[bytes, dict[str, int], int]:
    """The ``.inter`` file, the counts of the raw files, and the rows written."""
    from pyarrow import compute as pc

    content = [("\t".join(format.columns) + "\n").encode()]
    seen: set[str] = set()
    users: set[str] = set()
    items: set[str] = set()
    rows = written = 0
    for file in files:
        for what, first, batch in batches_of(file):
            values = {name: batch.column(column) if isinstance(column, str) else _first_of(batch, column)
                      for name, column in format.columns.items()}
            values[_TIME] = _times(format, values[_TIME], f"{file.label}, {what} {{}}", first)
            named = pc.not_equal(values["item_id:token"], "")
            user, item, *_ = values.values()
            user, item, lines = (texts.filter(named) for texts in (user, item, joined([*values.values()])))
            rows += batch.num_rows
            users.update(pc.unique(user).to_pylist())
            items.update(pc.unique(item).to_pylist())
            if format.distinct:
                lines = _new(lines, seen)
            content.append(bytes(content_of(lines)))
            written += len(lines)
    return b"".join(content), {"rows": rows, "users": len(users), "items": len(items)}, written


def _times(format: Format, texts: pa.Array, where: str, first: int) -> pa.Array:
    """Times in seconds; raises UserError for one that there is not, as 30 February."""
    if format.time is str:
        return texts
    try:
        return _mapped(texts, format.time)
    except ValueError:
        row = next(row for row, text in enumerate(texts.to_pylist()) if not _is_time(format.time, text))
        name = format.columns[_TIME]
        raise UserError(f"{where.format(first + row)}: field '{name}' is {texts[row].as_py()!r}, expected "
                        f"{_KINDS[format.interactions.columns[name]][1]}.") from None


def _is_time(parse: Callable[[str], str], text: str) -> bool:
    try:
        return bool(parse(text))
    except ValueError:
        return False


def _mapped(texts: pa.Array, function: Callable[[str], str]) -> pa.Array:
    """A function of every text, called once for each different one."""
    import pyarrow as pa

    encoded = texts.dictionary_encode()
    return pa.array(map(function, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)


def _first_of(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """Of several columns the first that is not empty in a row, cleaned."""
    from pyarrow import compute as pc

    *others, texts = [batch.column(name) for name in columns]
    texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), "", texts)
    for other in reversed(others):
        texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(other), ""), texts, other)
    return _mapped(texts, clean)


def _new(lines: pa.Array, seen: set[str]) -> pa.Array:
    """Those lines that are not among ``seen``, each once; they are then."""
    import pyarrow as pa

    new = [line for line in dict.fromkeys(lines.to_pylist()) if line not in seen]
    seen.update(new)
    return pa.array(new, pa.string())


def _items(format: Format, files: list[RawFile]) -> tuple[bytes, int]:
    """The ``.item`` file, quoted as RecBole's reader expects it, and the number of items in it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(("item_id:token", *(f"{name}:token_seq" for name in format.described)))
    count = 0
    for item, *texts in format.describe(*(_rows(file) for file in files)):
        writer.writerow((item, *map(clean, texts)))
        count += 1
    return buffer.getvalue().encode(), count


def _rows(file: RawFile) -> Iterator[tuple[str, ...]]:
    for _, _, batch in batches_of(file):
        yield from zip(*(column.to_pylist() for column in batch.columns))


def clean(text: str) -> str:
    """Text as a field of an atomic file: HTML character references resolved, control characters to spaces."""
    text = re.sub(r"&(#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);", lambda match: html.unescape(match[0]), text)
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
