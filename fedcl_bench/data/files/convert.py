"""Publishers' raw files to RecBole's atomic files, checked on the way.

Nothing is written before everything is checked.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyarrow import compute as pc

from ...core.errors import UserError, require_known
from ...core.files import digest, made_folder, write_atomically
from . import archives
from ..items.item_texts import clean, item_table
from ..streams.overlap import persons_file
from .publishers import FORMATS, TEXT, Format, Kind, RawTable
from ..source import PublishedDataset, configured, load_config
from .table_reader import (SEPARATORS, TableLayout, content_of, fields_of, first_lines, frame_batch, joined, line_of,
                           parquet_batches, text_batches)


@dataclass(frozen=True)
class RawFile:
    """A table's file on disk, and what messages call it (files from a zip lie in a temporary folder)."""

    table: RawTable
    path: Path
    label: str


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    counts: Mapping[str, int]  # ``rows``, ``users``, ``items`` of raw interactions, ``titles`` of described items
    interactions: int  # rows of the ``.inter`` file
    files: tuple[Path, ...]  # the atomic ones, in the order they were written
    changed: bool  # whether any of them was written; False if all were there already with the same content
    checks: tuple[str, ...]  # a line for each checksum compared, and for each there is none for
    warnings: tuple[str, ...]  # a line for each thing to be told of
    settings: Mapping[str, str] = field(default_factory=dict)  # what must be set to use the files


def convert(name: str, raw: Path, out: Path, force: bool = False, any_checksum: bool = False,
            published: PublishedDataset | None = None, label: str = "") -> Conversion:
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
    format, published, label = format_of(name), published or load_config(name).raw, label or str(raw)
    with _raw_files(name, raw, label, format, published) as (format, files):
        zipped = (raw, label) if raw.is_file() else None
        checks, warnings, is_sample = _compare_checksums(published, files, zipped, any_checksum)
        logs = len(format.interactions)
        inter, counts, interactions = _interactions(format, files[:logs])
        contents = {".inter": inter}
        if format.items:
            described = format.describe(*map(_rows, files[logs:]))
            contents[".item"], counts["titles"] = item_table(format.described, described)
        if format.persons:
            contents[".overlap"] = persons_file(inter, format.persons)
    expected = published.counts if format.counted else {}
    wrong = ", ".join(f"{counts[what]:,} {what} instead of {number:,}" for what, number in expected.items()
                      if counts[what] != number)
    if wrong and not (any_checksum or is_sample):
        raise UserError(f"{', '.join(file.label for file in files[:2])}: {wrong}; a file is cut short, or of another "
                        f"version.\nTake it as a sample with --any-checksum"
                        + (f", or get the expected one: {published.url}" if published.url else "."))
    if wrong:
        warnings.append(f"taken as a sample, with {wrong}: no number of it can be compared with published ones.")
    elif expected:
        checks.append(f"as many {', '.join(expected)} as the publisher counts")
    # The .inter file comes last: where it is, the dataset is whole.
    targets = {out / name / f"{name}{suffix}": contents[suffix] for suffix in (".item", ".overlap", ".inter")
               if suffix in contents}
    changed = _write(targets, force)
    return Conversion(counts, interactions, tuple(targets), changed, tuple(checks), tuple(warnings), format.settings)


def format_of(name: str) -> Format:
    """How a dataset's publisher writes it; raises UserError where that is not known."""
    if name in configured() and name not in FORMATS:
        raise UserError(f"dataset '{name}': nothing here reads its publisher's files.\nMake {name}.inter yourself "
                        f"from {load_config(name).source}")
    require_known("dataset", [name], FORMATS)
    return FORMATS[name]


def _compare_checksums(published: PublishedDataset, files: list[RawFile], archive: tuple[Path, str] | None,
                       any_checksum: bool) -> tuple[list[str], list[str], bool]:
    """What was checked, what to warn of, and whether a file has another checksum than the publisher's and is taken all
    the same; raises UserError for one that is not to be taken, unless with ``any_checksum``. ``archive``: path and
    label of the zip that the files are from."""
    # A file in pandas' HDF format may hold code, and one in a zip was to arrive whole: no samples of these.
    compared = [(file.path, file.label, "sha256", published.sha256.get(file.table.file, ""),
                 archive is None and not file.table.is_code) for file in files]
    if archive is not None and published.md5:
        compared = [(*archive, "md5", published.md5, False), *(each for each in compared if each[3])]
    checks, differing = [], []
    for path, label, algorithm, expected, may_be_sample in compared:
        if not expected:
            checks.append(f"{label}: no checksum is published")
        elif (found := digest(path, algorithm)) == expected:
            checks.append(f"{label}: {algorithm} agrees with the publisher's")
        else:
            differing.append(f"{label}: {algorithm} is {found}, the publisher's is {expected}.")
            if not (any_checksum or may_be_sample):
                where = f" from {published.url}" if published.url else ""
                raise UserError(f"{differing[-1]}\nGet the file again{where}, or take it as it is with --any-checksum.")
    return checks, differing, bool(differing)


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
            with made_folder(path.parent):
                write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{error.filename or 'the output'}: cannot be written ({error.strerror}); choose another "
                        f"folder with --out DIR.") from None
    return bool(differs)


@contextmanager
def _raw_files(name: str, raw: Path, label: str, format: Format,
               published: PublishedDataset) -> Iterator[tuple[Format, list[RawFile]]]:
    """The format that is there and the file of each of its tables; those of a zip lie there while the context lasts."""
    tables = format.tables + (format.otherwise.tables if format.otherwise else ())
    if raw.is_dir():
        yield _files_in(format, [raw, raw / name, raw / Path(published.url or name).stem], label, str, published)
    elif raw.is_file():
        with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
            archives.unpack(raw, label, Path(folder), {table.file for table in tables})
            yield _files_in(format, [Path(folder)], label, lambda path: f"{label}: {path.name}", published)
    else:
        raise UserError(f"--raw: '{raw}' is neither a folder nor a zip file.")


def _files_in(format: Format, folders: list[Path], where: str, label: Callable[[Path], str],
              published: PublishedDataset) -> tuple[Format, list[RawFile]]:
    """The format that is there, with each table's file."""
    missing: list[str] = []
    for candidate in (format, format.otherwise) if format.otherwise else (format,):
        paths = [next((path for folder in folders if (path := folder / table.file).is_file()), None)
                 for table in candidate.tables]
        absent = [table.file for table, path in zip(candidate.tables, paths) if path is None]
        if not absent:
            return candidate, [RawFile(table, path, label(path)) for table, path in zip(candidate.tables, paths)]
        missing += absent
        if len(absent) < len(paths):
            missing = absent
            break
    raise UserError(f"{where}: has no {' and no '.join(missing)}."
                    + (f"\nThat is part of {published.url}" if published.url else ""))


def batches_of(file: RawFile) -> Iterator[pa.RecordBatch]:
    """The columns of a raw file as text, some rows at a time, each field checked against its kind and as it is written;
    raises UserError naming the file, line and field, what was found and what is expected."""
    table, names, header, rows = file.table, list(file.table.columns), 0, 0
    is_text = table.reader is None and not table.file.endswith(".parquet")
    if is_text:
        layout = _layout(file)
        header, batches = int(layout.header), text_batches(file.path, file.label, layout, names)
    elif table.reader:
        batches = (frame_batch(frame, names) for frame in table.reader(file.path, file.label))
    else:
        batches = parquet_batches(file.path, file.label, names)
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


def _layout(file: RawFile) -> TableLayout:
    """How a file of text is written, given its table and its first line."""
    table, columns = file.table, list(file.table.columns)
    encoding = table.encoding if table.encoding == "utf-8" or not _is_utf8(file.path) else "utf-8"
    names = tuple(columns)
    expected = f"lines of {TableLayout(table.separator, names, False).expected}"
    first = first_lines(file.path, file.label, expected, encoding)[0]
    if table.header:
        names = tuple(name.rpartition(".")[2] for name in fields_of(first, table.separator))
        if missing := [name for name in columns if name not in names]:
            raise UserError(f"{file.label}, line 1: has no column '{missing[0]}' ({first[:60]!r}), expected "
                            f"{', '.join(columns)}, separated by {SEPARATORS[table.separator]}.")
    else:  # a sample of somebody's may have more columns, which are not read
        more = range(len(columns), len(fields_of(first, table.separator)))
        names += tuple(f"column {i + 1}" for i in more)
    return TableLayout(table.separator, names, table.header, table.separator == ",", encoding)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _interactions(format: Format, files: Iterable[RawFile]) -> tuple[bytes, dict[str, int], int]:
    """The ``.inter`` file, the counts of the raw files, and the rows written."""
    content = [("\t".join(format.columns) + "\n").encode()]
    users: set[str] = set()
    items: set[str] = set()
    rows = 0
    for batch in itertools.chain.from_iterable(map(batches_of, files)):
        values = [batch.column(column) if isinstance(column, str) else _first_of(batch, column)
                  for column in format.columns.values()]
        named = pc.not_equal(values[1], "")
        user, item, lines = (texts.filter(named) for texts in (*values[:2], joined(values)))
        rows += batch.num_rows
        users.update(pc.unique(user).to_pylist())
        items.update(pc.unique(item).to_pylist())
        content.append(bytes(content_of(lines)))
    inter = b"".join(content)
    if format.distinct:
        inter = b"".join(dict.fromkeys(inter.splitlines(keepends=True)))
    return inter, {"rows": rows, "users": len(users), "items": len(items)}, inter.count(b"\n") - 1


def _mapped(texts: pa.Array, function: Callable[[str], str | None]) -> pa.Array:
    """A function of every text, called once for each different one."""
    encoded = texts.dictionary_encode()
    return pa.array(map(function, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)


def _first_of(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """Of several columns the first that is not empty in a row, cleaned."""
    *others, texts = [batch.column(name) for name in columns]
    texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), "", texts)
    for other in reversed(others):
        texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(other), ""), texts, other)
    return _mapped(texts, clean)


def _rows(file: RawFile) -> Iterator[tuple[str, ...]]:
    for batch in batches_of(file):
        yield from zip(*(column.to_pylist() for column in batch.columns))
