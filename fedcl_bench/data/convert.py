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
import itertools
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from .table_reader import (SEPARATORS, Layout, content_of, fields_of, first_lines, frame_batch, joined, line_of,
                           read_parquet, text_batches)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SPLITS = ("train", "valid", "test")

@dataclass(frozen=True)
class Kind:
    """What is accepted in a field, a regular expression and how to say it, and how it is written in atomic files; for
    what only looks right, ``written`` raises ValueError."""

    pattern: str
    accepted: str
    written: Callable[[str], str] | None = None


def _seconds(time: datetime.datetime) -> str:
    return str(round((time - datetime.datetime(1970, 1, 1)).total_seconds()))


ID = Kind("[0-9]{1,18}", "an id, which is a whole number")
WHOLE = Kind("-?[0-9]{1,18}", "a whole number")
NUMBER = Kind(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", "a number")
FLAG = Kind("[01]", "0 or 1")
CODE = Kind(r"[!-~]([ -~]*[!-~])?", "an id of letters, digits and signs")
LISTENER = Kind("user_[0-9]{6}", "a user as user_000639")
SHOP_EVENT = Kind("view|addtocart|transaction", "view, addtocart or transaction")
MILLISECONDS = replace(WHOLE, written=lambda text: f"{int(text) / 1000:.3f}")
ISO_TIME = Kind(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
                "a time as 2009-04-08T01:57:47Z",
                lambda text: _seconds(datetime.datetime.fromisoformat(text.removesuffix("Z"))))
DAY_OF_2014 = Kind("[0-9]{3,4}", "a day as 0829, month before day",
                   lambda text: _seconds(datetime.datetime(2014, int(text[:-2]), int(text[-2:]))))
TEXT = None  # is not looked at


@dataclass(frozen=True)
class Table:
    """How one of a publisher's files is written.

    Attributes:
        file: its name; a marked copy (``u.corrected.data`` for ``u.data``) is taken where the file itself is missing.
        columns: name of a column to the kind of its fields, None for any text; with a header those that are read,
            which it must name, perhaps each with that of its export before a dot; without one all, in order.
        separator: between fields; only files separated by commas quote fields.
        header: whether the first line holds the names of the columns.
        encoding: of the text; text that is valid UTF-8 is read as that in any case.
        reader: of a file that is neither text nor Parquet with these columns: frames with its columns, given its path
            and what messages call it.
        is_code: whether the format can hold code, so that a file of another checksum is never taken as a sample.
    """

    file: str
    columns: Mapping[str, Kind | None]
    separator: str = "\t"
    header: bool = True
    encoding: str = "utf-8"
    reader: Callable[[Path, str], Iterator[pd.DataFrame]] | None = None
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
        interactions: the tables of interactions, with the same columns; the rows of one follow those of another.
        columns: header field of the ``.inter`` file to the table's column, or to several of which the first that is
            not empty counts; user and item come first. Rows where all of those are empty are left out.
        items: the tables that describe items; empty if there is no ``.item`` file.
        describe: rows of those tables to rows of an id and ``described``.
        described: what the ``.item`` file has besides ids; genres are separated by spaces.
        distinct: whether rows that are alike in ``columns`` count once, at the first one's place.
        otherwise: how the data is written elsewhere; taken where this format's files are missing.
        counted: whether the counts of the dataset's config are those of this format.
        settings: what must be set to use the written file, as its config is for another one.
        persons: of domains whose users the publisher identifies, what their ids are of: an ``.overlap`` file says who
            each user is (see ``overlap``).
    """

    interactions: tuple[Table, ...]
    columns: Mapping[str, str | tuple[str, ...]]
    items: tuple[Table, ...] = ()
    describe: Callable[..., Iterable[Sequence[str]]] | None = None
    described: tuple[str, ...] = ("title", "genres")
    distinct: bool = False
    otherwise: Format | None = None
    counted: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    persons: str = ""

    @property
    def tables(self) -> tuple[Table, ...]:
        """Of interactions, then of items."""
        return (*self.interactions, *self.items)


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


def _fields(user: str, item: str | tuple[str, ...], time: str, **more: str) -> dict[str, str | tuple[str, ...]]:
    """Columns of an atomic file of interactions; those of ``more``, of the same name in the table, with their types."""
    return {"user_id:token": user, "item_id:token": item, **{f"{name}:{kind}": name for name, kind in more.items()},
            "timestamp:float": time}


def _session_set() -> Format:
    """A set of sessions as session recommenders' codes have it, pickled; or the same as tables."""
    def of(files: Mapping[str, str], reader: Callable[..., Iterator[pd.DataFrame]],
           otherwise: Format | None = None) -> Format:
        columns = {"session": TEXT, "item": ID, "position": ID, "split": TEXT}
        return Format(tuple(Table(file, columns, reader=partial(reader, split=split)) for split, file in files.items()),
                      {**_fields("session", "item", "position"), "split:token": "split"}, otherwise=otherwise)

    return of({TRAIN: "all_train_seq.txt", TEST: "test.txt"}, pickled_rows,
              of({TRAIN: "train.parquet", TEST: "test.parquet"}, table_rows))


def _split_sequences(path: Path, label: str, domain: str) -> Iterator[pd.DataFrame]:
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
    yield frame.assign(order=frame.groupby("user_id", dropna=False).cumcount())


def _domain(time: str, described: Mapping[str, str]) -> Format:
    """A domain: tables of its interactions in each user's order, and of its items' texts.

    Args:
        time: the column that orders a user's interactions.
        described: columns of the items' table to what they are called in the ``.item`` file; none: it has no texts.
    """
    items = (Table("item.parquet", {"item_id": CODE, **dict.fromkeys(described, TEXT)}),) if described else ()
    return Format((Table("inter.parquet", {"user_id": CODE, "item_id": CODE, time: WHOLE}),),
                  _fields("user_id", "item_id", time), items, describe=iter, described=tuple(described.values()))


def _identified(domain: str, persons: str) -> Format:
    """A domain in a table of several, which split sequences and share ids of users.

    Args:
        domain: what the table calls it.
        persons: names whoever has the ids.
    """
    inter = Table("inter.parquet", {"user_id": CODE, "item_id": CODE, "order": WHOLE},
                  reader=partial(_split_sequences, domain=domain))
    return Format((inter,), _fields("user_id", "item_id", "order"), persons=persons)


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
        (Table("u.data", {"user id": ID, "item id": ID, "rating": NUMBER, "timestamp": WHOLE}, header=False),),
        _fields("user id", "item id", "timestamp", rating="float"),
        (Table("u.item", {"movie id": ID, "movie title": TEXT, "release date": TEXT, "video release date": TEXT,
                          "IMDb URL": TEXT, **dict.fromkeys(_GENRES, FLAG)},
               separator="|", header=False, encoding="latin-1"),), _genres_as_flags),
    "ml-latest-small": Format(
        (Table("ratings.csv", {"userId": ID, "movieId": ID, "rating": NUMBER, "timestamp": WHOLE}, separator=","),),
        _fields("userId", "movieId", "timestamp", rating="float"),
        (Table("movies.csv", {"movieId": ID, "title": TEXT, "genres": TEXT}, separator=","),), _genres_in_one_field),
    "lastfm-2k": Format(
        (Table("user_taggedartists-timestamps.dat", {"userID": ID, "artistID": ID, "timestamp": MILLISECONDS}),),
        _fields("userID", "artistID", "timestamp"), distinct=True),
    "hetrec2011-ml": Format(
        (Table("user_ratedmovies-timestamps.dat", {"userID": ID, "movieID": ID, "rating": NUMBER,
                                                   "timestamp": MILLISECONDS}),),
        _fields("userID", "movieID", "timestamp", rating="float"),
        (Table("movies.dat", {"id": ID, "title": TEXT}, encoding="latin-1"),
         Table("movie_genres.dat", {"movieID": ID, "genre": TEXT}, encoding="latin-1")), _genres_in_a_table),
    "xing": Format(
        (Table("session.hdf", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE,
                               "session_id": ID, "split": TEXT},
               reader=partial(hdf.tables_of, keys=SPLITS, key_column="split", columns=(
                   "user_id", "item_id", "interaction_type", "created_at", "session_id")), is_code=True),),
        {"user_id:token": "user_id", "item_id:token": "item_id", "session_id:token": "session_id",
         "interaction_type:float": "interaction_type", "timestamp:float": "created_at", "split:token": "split"},
        otherwise=Format(
            (Table("interactions.csv", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE}),),
            _fields("user_id", "item_id", "created_at", interaction_type="token"),
            counted=False, settings={"session_from": "gap", "session_split": "last"})),
    "retailrocket": Format(
        (Table("events.csv", {"timestamp": MILLISECONDS, "visitorid": ID, "event": SHOP_EVENT, "itemid": ID},
               separator=","),),
        _fields("visitorid", "itemid", "timestamp", event="token")),
    "lastfm-1k": Format(
        (Table("userid-timestamp-artid-artname-traid-traname.tsv",
               {"userid": LISTENER, "timestamp": ISO_TIME, "musicbrainz-artist-id": TEXT, "artist-name": TEXT,
                "musicbrainz-track-id": TEXT, "track-name": TEXT}, header=False),),
        _fields("userid", ("musicbrainz-artist-id", "artist-name"), "timestamp")),
    "tmall": Format(
        (Table("user_log_format1.csv", {"user_id": ID, "item_id": ID, "time_stamp": DAY_OF_2014, "action_type": ID},
               separator=","),),
        _fields("user_id", "item_id", "time_stamp", action_type="token")),
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
        logs = len(format.interactions)
        inter, counts, interactions = _interactions(format, files[:logs])
        contents = {".inter": inter}
        if format.items:
            contents[".item"], counts["titles"] = _items(format, files[logs:])
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
    checks: list[str] = []
    warnings: list[str] = []
    is_sample = False

    def compare(path: Path, label: str, algorithm: str, expected: str, lenient: bool) -> None:
        nonlocal is_sample
        digest = archives.digest(path, algorithm)
        differs = f"{label}: {algorithm} is {digest}, the publisher's is {expected}."
        if digest == expected:
            checks.append(f"{label}: {algorithm} agrees with the publisher's")
        elif lenient:
            is_sample = True
            warnings.append(differs)
        else:
            raise UserError(f"{differs}\nGet the file again{f' from {published.url}' if published.url else ''}, or "
                            f"take it as it is with --any-checksum.")

    whole_zip = archive is not None and published.md5
    if whole_zip:
        compare(*archive, "md5", published.md5, any_checksum)
    for file in files:
        if file.table.file in published.sha256:
            # A file in pandas' HDF format may hold code, and one in a zip was to arrive whole: no samples of these.
            lenient = any_checksum or archive is None and not file.table.is_code
            compare(file.path, file.label, "sha256", published.sha256[file.table.file], lenient)
        elif not whole_zip:
            checks.append(f"{file.label}: no checksum is published")
        if file.path.name != file.table.file:
            warnings.append(f"{file.label} is taken for the publisher's {file.table.file}.")
    return checks, warnings, is_sample


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
    """The format that is there, with each table's file."""
    missing: list[str] = []
    for candidate in (format, format.otherwise) if format.otherwise else (format,):
        paths = [_file_of(table, folders, where) for table in candidate.tables]
        absent = [table.file for table, path in zip(candidate.tables, paths) if path is None]
        if not absent:
            return candidate, [RawFile(table, path, label(path)) for table, path in zip(candidate.tables, paths)]
        missing += absent
        if len(absent) < len(paths):
            missing = absent
            break
    raise UserError(f"{where}: has no {' and no '.join(missing)}."
                    + (f"\nThat is part of {published.url}" if published.url else ""))


def _file_of(table: Table, folders: list[Path], where: str) -> Path | None:
    """A table's file in the first folder that has it, or else the one marked copy of it."""
    there = [path for folder in dict.fromkeys(folders) if folder.is_dir() for path in sorted(folder.iterdir())
             if table.matches(path.name) and path.is_file()]
    paths = [path for path in there if path.name == table.file][:1] or there
    if len(paths) > 1:
        raise UserError(f"{where}: no file {table.file}, and cannot tell which of {', '.join(map(str, paths))} to "
                        f"take; leave one there.")
    return paths[0] if paths else None


def batches_of(file: RawFile) -> Iterator[pa.RecordBatch]:
    """The columns of a raw file as text, some rows at a time, each field checked against its kind and as it is written.

    Raises:
        UserError: naming the file, line and field, what was found and what is expected.
    """
    import pyarrow as pa
    from pyarrow import compute as pc

    table, names, header, rows = file.table, list(file.table.columns), 0, 0
    is_text = table.reader is None and not table.file.endswith(".parquet")
    if is_text:
        layout = _layout(file)
        header, batches = int(layout.header), text_batches(file.path, file.label, layout, names)
    else:
        frames = table.reader(file.path, file.label) if table.reader else [read_parquet(file.path, file.label, names)]
        batches = (frame_batch(frame, names) for frame in frames)
    for batch in batches:
        columns = []
        for name, kind in table.columns.items():
            texts = column = batch.column(name)
            if kind is not TEXT:
                right = pc.match_substring_regex(texts, rf"\A(?:{kind.pattern})\z")
                if kind.written is not None:
                    column = _mapped(texts, partial(_written, kind))
                    right = pc.and_(right, column.is_valid())
                if not pc.all(right, min_count=0).as_py():
                    row = pc.index(right, False).as_py()
                    number = 1 + header + rows + row
                    place = f"line {line_of(file.path, number)}" if is_text else f"row {number}"
                    raise UserError(f"{file.label}, {place}: field '{name}' is {texts[row].as_py()[:60]!r}, expected "
                                    f"{kind.accepted}.")
            columns.append(column)
        yield pa.RecordBatch.from_arrays(columns, names)
        rows += batch.num_rows
    if not rows:
        raise UserError(f"{file.label}: has no rows{' below its header' * header}.")


def _written(kind: Kind, text: str) -> str | None:
    try:
        return kind.written(text)
    except ValueError:
        return None


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
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _interactions(format: Format, files: Iterable[RawFile]) -> tuple[bytes, dict[str, int], int]:
    """The ``.inter`` file, the counts of the raw files, and the rows written."""
    from pyarrow import compute as pc

    content = [("\t".join(format.columns) + "\n").encode()]
    seen: set[str] = set()
    users: set[str] = set()
    items: set[str] = set()
    rows = written = 0
    for batch in itertools.chain.from_iterable(map(batches_of, files)):
        values = [batch.column(column) if isinstance(column, str) else _first_of(batch, column)
                  for column in format.columns.values()]
        named = pc.not_equal(values[1], "")
        user, item, lines = (texts.filter(named) for texts in (*values[:2], joined(values)))
        rows += batch.num_rows
        users.update(pc.unique(user).to_pylist())
        items.update(pc.unique(item).to_pylist())
        if format.distinct:
            lines = _new(lines, seen)
        content.append(bytes(content_of(lines)))
        written += len(lines)
    return b"".join(content), {"rows": rows, "users": len(users), "items": len(items)}, written


def _mapped(texts: pa.Array, function: Callable[[str], str | None]) -> pa.Array:
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
    for batch in batches_of(file):
        yield from zip(*(column.to_pylist() for column in batch.columns))


def clean(text: str) -> str:
    """Text as a field of an atomic file: HTML character references resolved, control characters to spaces."""
    text = re.sub(r"&(#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);", lambda match: html.unescape(match[0]), text)
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
