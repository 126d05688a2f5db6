"""Publishers' raw files to RecBole's atomic files, checked on the way.

``FORMATS`` has one entry per dataset: how its files are written. Where they are, their checksums and what they must
count to stands in ``dataset_configs/NAME.yaml`` under ``raw``. Nothing is written before everything is checked.
"""

from __future__ import annotations

import csv
import html
import io
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping

from . import archives
from .datasets import Published, load_config
from .errors import UserError, unknown
from .progress import bar
from .records import write_atomically

# Kinds of fields: what is accepted, and how to say so. Fields of kind TEXT are not looked at.
ID, WHOLE, NUMBER, FLAG, TEXT = "id", "whole", "number", "flag", "text"
_KINDS = {ID: (re.compile("[0-9]{1,18}"), "an id, which is a whole number"),
          WHOLE: (re.compile("-?[0-9]{1,18}"), "a whole number"),
          NUMBER: (re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?"), "a number"),
          FLAG: (re.compile("[01]"), "0 or 1")}


@dataclass(frozen=True)
class Table:
    """How one of a publisher's files is written.

    Attributes:
        file: its name; a marked copy (``u.corrected.data`` for ``u.data``) is taken where the file itself is missing.
        columns: the name of every column, in order, and the kind of its fields.
        separator: between fields; only files separated by commas quote fields.
        header: whether the first line holds the names of the columns.
        encoding: of the text; text that is valid UTF-8 is read as that in any case.
    """

    file: str
    columns: Mapping[str, str]
    separator: str = "\t"
    header: bool = True
    encoding: str = "utf-8"

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
        columns: header field of the ``.inter`` file to the table's column: user, item, (rating,) time.
        items: the tables that describe items; empty if there is no ``.item`` file.
        describe: rows of those tables to rows of (id, title, genres separated by spaces).
        milliseconds: whether times are in milliseconds; atomic files have seconds.
        distinct: whether rows that are alike in ``columns`` count once, at the first one's place.
    """

    interactions: Table
    columns: Mapping[str, str]
    items: tuple[Table, ...] = ()
    describe: Callable[..., Iterable[tuple[str, str, str]]] | None = None
    milliseconds: bool = False
    distinct: bool = False


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


FORMATS = {
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
        milliseconds=True, distinct=True),
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
        milliseconds=True),
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
    """

    counts: Mapping[str, int]
    interactions: int
    files: tuple[Path, ...]
    changed: bool
    checks: tuple[str, ...]
    warnings: tuple[str, ...]


def convert(name: str, raw: Path, out: Path, force: bool = False, any_checksum: bool = False,
            published: Published | None = None, label: str = "") -> Conversion:
    """Write ``out/name/name.inter`` (and ``.item`` where the publisher describes items) from the publisher's files.

    Args:
        raw: the folder that holds them (or holds the folder they were unpacked to), or the publisher's zip.
        force: replace atomic files of another content.
        any_checksum: warn instead of refusing files that are not the publisher's byte for byte.
        published: checksums and counts to check; None takes those of the dataset's config.
        label: what messages call ``raw``, if not by its path.

    Raises:
        UserError: for a dataset without a format, a missing, damaged or malformed file, another checksum, other counts
            than the publisher's, or an existing atomic file of another content. Nothing has been written then.
    """
    if name not in FORMATS:
        raise unknown("dataset", name, FORMATS)
    format, published, label = FORMATS[name], published or load_config(name).raw, label or str(raw)
    checks, warnings = [], []

    def compare(path: Path, label: str, algorithm: str, expected: str) -> None:
        found = archives.digest(path, algorithm)
        if found == expected:
            checks.append(f"{label}: {algorithm} agrees with the publisher's")
        elif any_checksum:
            warnings.append(f"{label}: {algorithm} is {found}, the publisher's is {expected}.")
        else:
            raise UserError(f"{label}: {algorithm} is {found}, the publisher's is {expected}.\nGet the file again"
                            f"{f' from {published.url}' if published.url else ''}, or take it as it is with "
                            f"--any-checksum.")

    with _raw_files(name, raw, label, format, published) as files:
        whole_zip = raw.is_file() and published.md5
        if whole_zip:
            compare(raw, label, "md5", published.md5)
        for file in files:
            if file.table.file in published.sha256:
                compare(file.path, file.label, "sha256", published.sha256[file.table.file])
            elif not whole_zip:
                checks.append(f"{file.label}: no checksum is published")
            if file.path.name != file.table.file:
                warnings.append(f"{file.label} is taken for the publisher's {file.table.file}.")
        inter, counts, interactions = _interactions(format, files[0])
        contents = {".inter": inter}
        if format.items:
            contents[".item"], counts["titles"] = _items(format, files[1:])
    wrong = [f"{counts[what]:,} {what} instead of {expected:,}" for what, expected in published.counts.items()
             if counts[what] != expected]
    if wrong:
        raise UserError(f"{', '.join(file.label for file in files[:2])}: {', '.join(wrong)}; a file is cut short, or "
                        f"of another version." + (f"\nThe expected one: {published.url}" if published.url else ""))
    # The .inter file comes last: where it is, the dataset is whole.
    targets = {out / name / f"{name}{suffix}": contents[suffix] for suffix in (".item", ".inter") if suffix in contents}
    changed = _write(targets, force)
    return Conversion(counts, interactions, tuple(targets), changed, tuple(checks), tuple(warnings))


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
def _raw_files(name: str, raw: Path, label: str, format: Format, published: Published) -> Iterator[list[RawFile]]:
    """The file of every table of a format, interactions first; those of a zip lie there while the context lasts."""
    tables = (format.interactions, *format.items)
    if raw.is_dir():
        yield _found(tables, [raw, raw / name, raw / Path(published.url or name).stem], label, str, published)
    elif raw.is_file():
        with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
            archives.unpack(raw, label, Path(folder), lambda file: any(table.matches(file) for table in tables))
            yield _found(tables, [Path(folder)], label, lambda path: f"{label}: {path.name}", published)
    else:
        raise UserError(f"--raw: '{raw}' is neither a folder nor a zip file.")


def _found(tables: Iterable[Table], folders: list[Path], where: str, label: Callable[[Path], str],
           published: Published) -> list[RawFile]:
    """Each table's file in the first folder that has it, or else the one marked copy of it."""
    files, missing = [], []
    for table in tables:
        paths = [folder / table.file for folder in folders if (folder / table.file).is_file()][:1]
        paths = paths or [path for folder in dict.fromkeys(folders) if folder.is_dir()
                          for path in sorted(folder.iterdir()) if table.matches(path.name) and path.is_file()]
        if len(paths) > 1:
            raise UserError(f"{where}: no file {table.file}, and cannot tell which of {', '.join(map(str, paths))} to "
                            f"take; leave one there.")
        files += [RawFile(table, path, label(path)) for path in paths]
        missing += [] if paths else [table.file]
    if missing:
        raise UserError(f"{where}: has no {' and no '.join(missing)}."
                        + (f"\nThat is part of {published.url}" if published.url else ""))
    return files


def _text(file: RawFile) -> str:
    """A file's text without blank lines at the end; raises UserError if it is none."""
    try:
        raw = file.path.read_bytes()
    except OSError as error:
        raise UserError(f"{file.label}: cannot be read ({error.strerror}).") from None
    if not raw.strip():
        raise UserError(f"{file.label}: is empty; expected lines of {_expected(file.table)}.")
    if b"\0" in raw:
        raise UserError(f"{file.label}, line {_line(raw, raw.index(0))}: holds a NUL byte, so it is not "
                        f"{file.table.encoding} text.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if file.table.encoding == "utf-8":
            raise UserError(f"{file.label}, line {_line(raw, error.start)}: byte 0x{raw[error.start]:02x} is not "
                            f"UTF-8 text, which is expected.") from None
        text = raw.decode(file.table.encoding)
    return text.rstrip("\r\n")


def _line(raw: bytes, position: int) -> int:
    return raw.count(b"\n", 0, position) + 1


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
    table, text = file.table, _text(file)
    if table.separator == ",":
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = ((reader.line_num, fields) for fields in reader)
    else:  # split at line feeds only: str.splitlines would also split at what Latin-1 text may hold
        lines = ((number, line.rstrip("\r\n").split(table.separator))
                 for number, line in enumerate(io.StringIO(text, newline="\n"), start=1))
    checked = [(i, name, *_KINDS[kind]) for i, (name, kind) in enumerate(table.columns.items()) if kind != TEXT]
    width, number = len(table.columns), 0
    with bar(f"reading {file.table.file}", text.count("\n") + 1, "lines") as advance:
        try:
            for number, fields in lines:
                if number == 1 and table.header:
                    if fields != list(table.columns):
                        raise UserError(f"{file.label}, line 1: the header is {_shown(fields, table)}, expected "
                                        f"{_expected(table)}.")
                    continue
                if len(fields) != width:
                    raise UserError(f"{file.label}, line {number}: found {len(fields)} field"
                                    f"{'' if len(fields) == 1 else 's'} ({_shown(fields, table)}), expected "
                                    f"{_expected(table)}.")
                for i, name, pattern, accepted in checked:
                    if not pattern.fullmatch(fields[i]):
                        raise UserError(f"{file.label}, line {number}: field '{name}' is {fields[i][:60]!r}, expected "
                                        f"{accepted}.")
                if not number % 10000:
                    advance(10000)
                yield fields
        except csv.Error as error:
            raise UserError(f"{file.label}, line {reader.line_num}: is not a line of comma-separated values "
                            f"({error}).") from None
    if number == 1 and table.header:
        raise UserError(f"{file.label}: has no rows below its header.")


def _shown(fields: list[str], table: Table) -> str:
    return repr(table.separator.join(fields)[:60])


def _interactions(format: Format, file: RawFile) -> tuple[bytes, dict[str, int], int]:
    """The ``.inter`` file, the counts of the raw file, and the rows written."""
    positions = [list(format.interactions.columns).index(column) for column in format.columns.values()]
    lines, seen, users, items, rows = ["\t".join(format.columns)], set(), set(), set(), 0
    for fields in read_rows(file):
        values = [fields[i] for i in positions]
        if format.milliseconds:
            values[-1] = f"{int(values[-1]) / 1000:.3f}"
        rows += 1
        users.add(values[0])
        items.add(values[1])
        line = "\t".join(values)
        if format.distinct:
            if line in seen:
                continue
            seen.add(line)
        lines.append(line)
    content = "\n".join([*lines, ""]).encode()
    return content, {"rows": rows, "users": len(users), "items": len(items)}, len(lines) - 1


def _items(format: Format, files: list[RawFile]) -> tuple[bytes, int]:
    """The ``.item`` file, quoted as RecBole's reader expects it, and the number of items in it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(("item_id:token", "title:token_seq", "genres:token_seq"))
    count = 0
    for item, title, genres in format.describe(*(read_rows(file) for file in files)):
        writer.writerow((item, clean(title), clean(genres)))
        count += 1
    return buffer.getvalue().encode(), count


def clean(text: str) -> str:
    """Text as a field of an atomic file: HTML character references resolved, control characters to spaces."""
    text = re.sub(r"&(#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);", lambda found: html.unescape(found[0]), text)
    return re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
