"""Publishers' raw files to RecBole's atomic files, checked on the way.

``FORMATS`` has one entry per dataset: how its files are written. Where they are, their checksums and what they must
count to stands in ``dataset_configs/NAME.yaml`` under ``raw``. Nothing is written before everything is checked.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import html
import io
import itertools
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import UserError, unknown
from ..files import bar, write_atomically
from ..names import shown
from . import archives, hdf
from .overlap import persons_file
from .parquet import column_rows, split_sequences
from .session_sets import TEST, TRAIN, pickled_rows, table_rows
from .source import Published, load_config

# Kinds of fields: what is accepted, and how to say so. Fields of kind TEXT are not looked at.
ID, WHOLE, NUMBER, FLAG, TEXT, CODE = "id", "whole", "number", "flag", "text", "code"
LISTENER, ISO_TIME, DAY, SHOP_EVENT = "listener", "iso time", "day", "shop event"


def _matches(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


_CLOCK = re.compile("([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])Z")


def from_milliseconds(text: str) -> str:
    """A time in milliseconds in seconds."""
    return f"{int(text) / 1000:.3f}"


def from_iso(text: str) -> str:
    """A UTC time as ``2009-04-08T01:57:47Z`` in Unix seconds; raises ValueError for another form."""
    date, _, time = text.partition("T")
    clock = _CLOCK.fullmatch(time)
    if not clock:
        raise ValueError
    hours, minutes, seconds = map(int, clock.groups())
    return str(86400 * _days(date) + 3600 * hours + 60 * minutes + seconds)


@cache
def _days(date: str) -> int:
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", date):
        raise ValueError
    return (datetime.date.fromisoformat(date) - datetime.date(1970, 1, 1)).days


@cache
def from_day(text: str) -> str:
    """The beginning of a day of 2014, as ``0829`` or ``829``, in Unix seconds; raises ValueError for another form."""
    if not re.fullmatch("[0-9]{3,4}", text):
        raise ValueError
    return str(86400 * _days(f"2014-{text[:-2]:0>2}-{text[-2:]}"))


def _reads(parse: Callable[[str], str]) -> Callable[[str], bool]:
    def accepts(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True
    return accepts


_KINDS = {ID: (_matches("[0-9]{1,18}"), "an id, which is a whole number"),
          WHOLE: (_matches("-?[0-9]{1,18}"), "a whole number"),
          NUMBER: (_matches(r"-?[0-9]{1,18}(\.[0-9]{1,18})?"), "a number"),
          FLAG: (_matches("[01]"), "0 or 1"),
          CODE: (_matches(r"[!-~]([ -~]*[!-~])?"), "an id of letters, digits and signs"),
          LISTENER: (_matches("user_[0-9]{6}"), "a user as user_000639"),
          ISO_TIME: (_reads(from_iso), "a time as 2009-04-08T01:57:47Z"),
          DAY: (_reads(from_day), "a day as 0829, month before day"),
          SHOP_EVENT: (_matches("view|addtocart|transaction"), "view, addtocart or transaction")}


@dataclass(frozen=True)
class Table:
    """How one of a publisher's files is written.

    Attributes:
        file: its name; a marked copy (``u.corrected.data`` for ``u.data``) is taken where the file itself is missing.
        columns: the name of every column, in order, and the kind of its fields.
        separator: between fields; only files separated by commas quote fields.
        header: whether the first line holds the names of the columns, perhaps each with that of its export before a
            dot.
        encoding: of the text; text that is valid UTF-8 is read as that in any case.
        keys: of a file in pandas' HDF format, the tables in it that follow each other; the key of a row's table is its
            field in the last column.
        reader: of a file that is no text: its rows with their numbers, given its path and what messages call it.
    """

    file: str
    columns: Mapping[str, str]
    separator: str = "\t"
    header: bool = True
    encoding: str = "utf-8"
    keys: tuple[str, ...] = ()
    reader: Callable[[Path, str], Iterator[tuple[int, list[str]]]] | None = None

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
    for movie, title, *_ in movies:
        yield movie, title, " ".join(of.get(movie, ()))


def _session_set() -> Format:
    """A set of sessions as session recommenders' codes have it, pickled; or the same as tables."""
    def of(stem: str, suffix: str, reader: Callable[..., Iterator[tuple[int, list[str]]]], split: str) -> Table:
        return Table(f"{stem}.{suffix}", {"session": TEXT, "item": ID, "position": ID, "split": TEXT}, header=False,
                     reader=partial(reader, split=split))

    columns = {"user_id:token": "session", "item_id:token": "item", "timestamp:float": "position",
               "split:token": "split"}
    tables = Format(of("train", "parquet", table_rows, TRAIN), columns, more=(of("test", "parquet", table_rows, TEST),))
    return Format(of("all_train_seq", "txt", pickled_rows, TRAIN), columns,
                  more=(of("test", "txt", pickled_rows, TEST),), otherwise=tables)


def _domain(time: str, described: Mapping[str, str]) -> Format:
    """A domain: tables of its interactions in each user's order, and of its items' texts.

    Args:
        time: the column that orders a user's interactions.
        described: columns of the items' table to what they are called in the ``.item`` file; none: it has no texts.
    """
    def of(stem: str, columns: Mapping[str, str]) -> Table:
        return Table(f"{stem}.parquet", columns, header=False, reader=partial(column_rows, columns=list(columns)))

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
    inter = Table("inter.parquet", {"user_id": CODE, "item_id": CODE, "order": WHOLE}, header=False,
                  reader=partial(split_sequences, domain=domain))
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
        Table("user_taggedartists-timestamps.dat", {"userID": ID, "artistID": ID, "tagID": ID, "timestamp": WHOLE}),
        {"user_id:token": "userID", "item_id:token": "artistID", "timestamp:float": "timestamp"},
        time=from_milliseconds, distinct=True),
    "hetrec2011-ml": Format(
        Table("user_ratedmovies-timestamps.dat", {"userID": ID, "movieID": ID, "rating": NUMBER, "timestamp": WHOLE}),
        {"user_id:token": "userID", "item_id:token": "movieID", "rating:float": "rating",
         "timestamp:float": "timestamp"},
        (Table("movies.dat", {"id": ID, **dict.fromkeys((
            "title", "imdbID", "spanishTitle", "imdbPictureURL", "year", "rtID", "rtAllCriticsRating",
            "rtAllCriticsNumReviews", "rtAllCriticsNumFresh", "rtAllCriticsNumRotten", "rtAllCriticsScore",
            "rtTopCriticsRating", "rtTopCriticsNumReviews", "rtTopCriticsNumFresh", "rtTopCriticsNumRotten",
            "rtTopCriticsScore", "rtAudienceRating", "rtAudienceNumRatings", "rtAudienceScore", "rtPictureURL"), TEXT)},
               encoding="latin-1"),
         Table("movie_genres.dat", {"movieID": ID, "genre": TEXT}, encoding="latin-1")), _genres_in_a_table,
        time=from_milliseconds),
    "xing": Format(
        Table("session.hdf", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE,
                              "session_id": ID, "split": TEXT}, header=False, keys=("train", "valid", "test")),
        {"user_id:token": "user_id", "item_id:token": "item_id", "session_id:token": "session_id",
         "interaction_type:float": "interaction_type", "timestamp:float": "created_at", "split:token": "split"},
        otherwise=Format(
            Table("interactions.csv", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE}),
            {"user_id:token": "user_id", "item_id:token": "item_id", "interaction_type:token": "interaction_type",
             "timestamp:float": "created_at"},
            counted=False, settings={"session_from": "gap", "session_split": "last"})),
    "retailrocket": Format(
        Table("events.csv", {"timestamp": WHOLE, "visitorid": ID, "event": SHOP_EVENT, "itemid": ID,
                             "transactionid": TEXT}, separator=","),
        {"user_id:token": "visitorid", "item_id:token": "itemid", "event:token": "event",
         "timestamp:float": "timestamp"}, time=from_milliseconds),
    "lastfm-1k": Format(
        Table("userid-timestamp-artid-artname-traid-traname.tsv",
              {"userid": LISTENER, "timestamp": ISO_TIME, "musicbrainz-artist-id": TEXT, "artist-name": TEXT,
               "musicbrainz-track-id": TEXT, "track-name": TEXT}, header=False),
        {"user_id:token": "userid", "item_id:token": ("musicbrainz-artist-id", "artist-name"),
         "timestamp:float": "timestamp"}, time=from_iso),
    "tmall": Format(
        Table("user_log_format1.csv", {"user_id": ID, "item_id": ID, "cat_id": TEXT, "seller_id": TEXT,
                                       "brand_id": TEXT, "time_stamp": DAY, "action_type": ID}, separator=","),
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
            sample = archive is None and not file.table.keys
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


def _lines(file: RawFile, advance: Callable[[int], None]) -> Iterator[str]:
    """A file's lines with their ends, without empty ones at the file's end; raises UserError where it is no text."""
    table, empty, has_text, read = file.table, [], False, 0
    encodings = ("utf-8",) if table.encoding == "utf-8" else ("utf-8", table.encoding)
    if len(encodings) > 1 and not _is_utf8(file):
        encodings = encodings[1:]
    for number, raw in enumerate(_raw_lines(file), start=1):
        read += len(raw)
        if not number % 10000:
            advance(read)
            read = 0
        if number == 1 and raw.startswith(codecs.BOM_UTF8):
            raw = raw[len(codecs.BOM_UTF8):]
        if b"\0" in raw:
            raise UserError(f"{file.label}, line {number}: holds a NUL byte, so it is not {table.encoding} text.")
        try:
            line = raw.decode(encodings[0])
        except UnicodeDecodeError as error:
            raise UserError(f"{file.label}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8 text, which is "
                            f"expected.") from None
        if not line.strip("\r\n"):
            empty.append(line)
            continue
        has_text = True
        yield from empty
        empty.clear()
        yield line
    if not has_text:
        raise UserError(f"{file.label}: is empty; expected lines of {_expected(table)}.")


def _raw_lines(file: RawFile) -> Iterator[bytes]:
    """A file's lines, read as they are asked for: some publishers' files are larger than memory."""
    try:
        with open(file.path, "rb") as lines:
            yield from lines
    except OSError as error:
        raise UserError(f"{file.label}: cannot be read ({error.strerror}).") from None


def _is_utf8(file: RawFile) -> bool:
    try:
        for line in _raw_lines(file):
            line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _expected(table: Table) -> str:
    separator = {"\t": "a tab", ",": "a comma"}.get(table.separator, f"'{table.separator}'")
    names = list(table.columns)
    listed = ", ".join(names if len(names) < 8 else [*names[:3], "...", names[-1]])
    return f"{len(names)} fields separated by {separator} ({listed})"


def read_rows(file: RawFile) -> Iterator[list[str]]:
    """The rows of a raw file as texts, each checked against the table's columns.

    Raises:
        UserError: naming the file, line and field, what was found and what is expected.
    """
    table = file.table
    checked = [(i, name, *_KINDS[kind]) for i, (name, kind) in enumerate(table.columns.items()) if kind != TEXT]
    width, number = len(table.columns), 0
    with bar(f"reading {table.file}", file.path.stat().st_size, "bytes") as advance:
        lines = _lines(file, advance)
        if table.reader is not None:
            rows = table.reader(file.path, file.label)
        elif table.keys:
            rows = _hdf_rows(file)
        elif table.separator == ",":
            reader = csv.reader(lines, strict=True)
            rows = ((reader.line_num, fields) for fields in reader)
        else:
            rows = ((i, line.rstrip("\r\n").split(table.separator)) for i, line in enumerate(lines, start=1))
        try:
            for number, fields in rows:
                if number == 1 and table.header:
                    if [field.rpartition(".")[2] for field in fields] != list(table.columns):
                        raise UserError(f"{file.label}, line 1: the header is {_shown(fields, table)}, expected "
                                        f"{_expected(table)}.")
                    continue
                if len(fields) != width:
                    raise UserError(f"{file.label}, line {number}: found {len(fields)} field"
                                    f"{'' if len(fields) == 1 else 's'} ({_shown(fields, table)}), expected "
                                    f"{_expected(table)}.")
                for i, name, accepts, accepted in checked:
                    if not accepts(fields[i]):
                        line = "row" if table.keys or table.reader else "line"
                        raise UserError(f"{file.label}, {line} {number}: field '{name}' is {fields[i][:60]!r}, "
                                        f"expected {accepted}.")
                yield fields
        except csv.Error as error:
            raise UserError(f"{file.label}, line {reader.line_num}: is not a line of comma-separated values "
                            f"({error}).") from None
    if number == 1 and table.header:
        raise UserError(f"{file.label}: has no rows below its header.")
    if number == 0:
        raise UserError(f"{file.label}: has no rows.")


def _hdf_rows(file: RawFile) -> Iterator[tuple[int, list[str]]]:
    """The rows of the tables of a file in pandas' HDF format, counted from 1, each with its table's key at the end."""
    *columns, _ = file.table.columns
    number = 0
    for key in file.table.keys:
        try:
            frame = hdf.read(file.path, key)
        except ImportError:
            raise UserError(f"{file.label}: reading HDF files needs PyTables.\nInstall it: python -m pip install "
                            f"'tables>=3.8' (or 'fedcl_bench[hdf]').") from None
        except KeyError:
            raise UserError(f"{file.label}: has no table '{key}'; expected {', '.join(file.table.keys)}.") from None
        except hdf.HoldsObjects as error:
            raise UserError(f"{file.label}: table '{key}' holds pickled objects ({shown(str(error))}), which could run "
                            f"code of whoever wrote it; it is not read.\nGet the publisher's file, or save its columns "
                            f"as numbers.") from None
        except Exception as error:  # PyTables' own errors derive from nothing more precise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{file.label}: cannot be read as an HDF file of pandas ({reason[:100]}).") from None
        missing = [name for name in columns if name not in getattr(frame, "columns", ())]
        if missing:
            raise UserError(f"{file.label}: table '{key}' has no column '{missing[0]}'; expected {', '.join(columns)}.")
        for fields in zip(*(frame[name].astype(str) for name in columns)):
            number += 1
            yield number, [*fields, key]


def _shown(fields: list[str], table: Table) -> str:
    return repr(table.separator.join(fields)[:60])


def _interactions(format: Format, files: Iterable[RawFile]) -> tuple[bytes, dict[str, int], int]:
    """The ``.inter`` file, the counts of the raw files, and the rows written."""
    position = {name: i for i, name in enumerate(format.interactions.columns)}
    first = [position[column if isinstance(column, str) else column[0]] for column in format.columns.values()]
    alternatives = {i: [position[name] for name in column] for i, column in enumerate(format.columns.values())
                    if not isinstance(column, str)}
    time = list(format.columns).index("timestamp:float")
    content, seen, users, items, rows, written = io.StringIO(), set(), set(), set(), 0, 0
    content.write("\t".join(format.columns) + "\n")
    for fields in itertools.chain.from_iterable(map(read_rows, files)):
        rows += 1
        values = [fields[i] for i in first]
        for i, columns in alternatives.items():
            values[i] = clean(next((fields[column] for column in columns if fields[column].strip()), ""))
        if alternatives and not all(values):
            continue
        values[time] = format.time(values[time])
        users.add(values[0])
        items.add(values[1])
        line = "\t".join(values)
        if format.distinct:
            if line in seen:
                continue
            seen.add(line)
        content.write(line + "\n")
        written += 1
    return content.getvalue().encode(), {"rows": rows, "users": len(users), "items": len(items)}, written


def _items(format: Format, files: list[RawFile]) -> tuple[bytes, int]:
    """The ``.item`` file, quoted as RecBole's reader expects it, and the number of items in it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(("item_id:token", *(f"{name}:token_seq" for name in format.described)))
    count = 0
    for item, *texts in format.describe(*(read_rows(file) for file in files)):
        writer.writerow((item, *map(clean, texts)))
        count += 1
    return buffer.getvalue().encode(), count


def clean(text: str) -> str:
    """Text as a field of an atomic file: HTML character references resolved, control characters to spaces."""
    text = re.sub(r"&(#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);", lambda match: html.unescape(match[0]), text)
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
