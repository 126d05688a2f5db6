"""Compact records: what tables, tests and figures need of finished runs, small enough for git.

A folder holds ``index.json`` and Parquet files (zstd): one per dataset and backbone, or several where one would exceed
``LIMIT``. A row of such a file is a run: its ``run.json`` as text, and its frames as lists. Kept are the metrics of
``METRICS`` and extra ones per user as 32-bit numbers, the rounds, and the analysis; there is no model. The bytes depend
on the runs alone, not on when or in which order they were packed. Files are named by their content, and the index is
written last, so a pack that dies changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Literal, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from numpy.typing import NDArray

from ..core.errors import Corrupt, UserError
from ..core.files import read_json, read_required, sweep, write_atomically
from ..core.text import ACCEPTED_IN_RECORD, is_safe_in_record, refuse_link, quoted
from .frames import in_this_thread
from .schema import CURE, SCHEMA, parse_meta

if TYPE_CHECKING:
    import pandas as pd

    from .record import Run

INDEX = "index.json"
FORMAT = 1
LIMIT = 512 * 1024  # bytes of a file
# Of the papers with blocks, and of those with one step; all: is full ranking beside sampled items.
METRICS = ("ndcg@20", "recall@20", "hit@10", "ndcg@10", "all:hit@10", "all:ndcg@10")
OF_EVERY_RUN = {"ndcg", "recall", "hit", "precision", "mrr"}  # of which only those above are kept
OF_RATINGS = {"mae", "rmse"}
OF_DOMAINS = {"recall", "ndcg"}  # of FFMSR's tables
# Files hold their places in this order.
KINDS = ("user_shift", "item_phi", "item_rank_change", "target_probability", "negative_probability")
_PER_ITEM = ("item_phi", "item_rank_change")
_KEYS = ("trained_block", "tested_block", "user")
_DIGITS = 4  # of seconds; finer is noise that does not compress
_Row = dict[str, Any]
_CURE = "Restore it, or pack the runs again."


class _Packed(Struct, forbid_unknown_fields=True):
    """A Parquet file as the index knows it."""

    hash: str
    runs: int
    bytes: int


class _Index(Struct, forbid_unknown_fields=True):
    """``index.json``: the versions of its form and of the records in it, the commands that packed them, the files."""

    format: Literal[1]
    schema: Literal[3]
    commands: list[str]
    files: dict[str, _Packed]


def is_compact(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _check_name(name: str, where: str) -> None:
    if not is_safe_in_record(name):
        raise UserError(f"{where}: found the name {quoted(name)}, accepted: {ACCEPTED_IN_RECORD}.")


def _list(column: str, values: NDArray[Any]) -> NDArray[Any]:
    """A frame's column in its compact type."""
    if not np.issubdtype(values.dtype, np.floating):
        return values.astype(np.int64)
    return (values.round(_DIGITS) if column.endswith("seconds") else values).astype(np.float32)


def _row(run: Run, item_analysis: bool) -> _Row:
    """A run as one row: the text ``meta`` and one array per ``frame.column``."""
    meta = {key: value for key, value in run.meta.items() if key != "files"}
    settings = meta["settings"]
    if settings.get("split_file"):  # where it was is of this machine; its bytes are in the fingerprint
        meta["settings"] = {**settings, "split_file": Path(settings["split_file"]).name}
    row: _Row = {"meta": json.dumps(meta, sort_keys=True, separators=(",", ":"))}
    users = run.load("users")  # once, and not kept: there may be thousands of runs
    for metric in [*METRICS, *_extra(meta["settings"], users["metric"].unique())]:
        part = users[users["metric"] == metric].sort_values(list(_KEYS))
        if not len(part):
            continue
        for key in _KEYS:
            values = part[key].to_numpy(np.int64)
            if not np.array_equal(row.setdefault(f"users.{key}", values), values):
                raise Corrupt(f"{run.path}: metrics were taken over different users", CURE)
        row[f"users.{metric}"] = part["value"].to_numpy(np.float32)
    rounds = run.load("rounds")
    for column in rounds:
        row[f"rounds.{column}"] = _list(column, rounds[column].to_numpy())
    analysis = run.load("analysis")  # of its other kinds, means and groups are in the summary
    analysis = analysis[analysis["kind"].isin(KINDS) & (item_analysis | ~analysis["kind"].isin(_PER_ITEM))]
    row["analysis.kind"] = analysis["kind"].map({kind: i for i, kind in enumerate(KINDS)}).to_numpy(np.int64)
    for column in ("block", "id"):
        row[f"analysis.{column}"] = analysis[column].to_numpy(np.int64)
    row["analysis.value"] = analysis["value"].to_numpy(np.float32)
    return row


def _extra(settings: Mapping[str, Any], recorded: Iterable[str]) -> list[str]:
    """The metrics of a run that its user asked for, or that runs of domains are compared by, with all lengths; the one
    that validates; and errors of ratings."""
    valid = settings["valid_metric"]
    names = {*settings.get("extra_metrics", ()), valid.partition("@")[0]} - OF_EVERY_RUN | OF_RATINGS
    names |= OF_DOMAINS if settings.get("stream") == "domains" else set()
    return sorted(metric for metric in {*recorded} - {*METRICS}
                  if metric == valid or metric.partition("@")[0].rpartition(":")[2] in names)


def _table(rows: list[_Row]) -> pa.Table:
    columns = sorted({name for row in rows for name in row} - {"meta"})
    arrays = {"meta": pa.array([row["meta"] for row in rows])}
    for name in columns:
        kept = [row.get(name) for row in rows]
        # Of what one run has in each round and another in some alone, as lost clients: whole numbers beside nan.
        kind = np.result_type(*(values.dtype for values in kept if values is not None))
        arrays[name] = pa.array(kept, pa.list_(pa.from_numpy_dtype(kind)))
    return pa.table(arrays)


class _File:
    """A file's columns, each decoded when it is first asked for: most commands need few of them; ``metas``: the content
    of each run's ``run.json``. Raises Corrupt if it holds a ``run.json`` of another version."""

    def __init__(self, content: bytes, path: Path):
        self._read: dict[str, pa.ChunkedArray] = {}
        self._parquet = in_this_thread(content)
        self.columns = self._parquet.schema_arrow.names
        lines = self.column("meta").to_pylist()
        self.metas = [parse_meta(line, f"{path}, run {i}", _CURE) for i, line in enumerate(lines)]

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of the file, a value per run."""
        if name not in self._read:
            self._read[name] = self._parquet.read(columns=[name], use_threads=False)[name]
        return self._read[name]

    def values(self, row: int, column: str) -> NDArray[Any] | None:
        """A run's values of a column; None if it has none."""
        values = self.column(column)[row].values
        return None if values is None else values.to_numpy(zero_copy_only=False)

    def rows(self) -> list[_Row]:
        """All runs: the inverse of ``_table``."""
        return [{"meta": meta.as_py(), **{name: values for name in self.columns if name != "meta"
                                          if (values := self.values(i, name)) is not None}}
                for i, meta in enumerate(self.column("meta"))]


def _frame(file: _File, row: int, name: str) -> pd.DataFrame:
    """One frame of a run, in the form it has in a full record."""
    import pandas as pd

    kept = {column.split(".", 1)[1]: values for column in file.columns
            if column.startswith(f"{name}.") and (values := file.values(row, column)) is not None}
    frame = _users(kept) if name == "users" else pd.DataFrame({
        column: values.astype(np.float64) if values.dtype == np.float32 else values for column, values in kept.items()})
    if name == "analysis":
        frame["kind"] = pd.Categorical.from_codes(kept["kind"], KINDS)
    return frame[["block", "kind", "id", "value"]] if name == "analysis" else frame


def _users(kept: Mapping[str, NDArray[Any]]) -> pd.DataFrame:
    import pandas as pd

    extra = sorted(kept.keys() - {*METRICS, *_KEYS})
    metrics = [metric for metric in (*METRICS, *extra) if metric in kept]
    if not metrics:
        return pd.DataFrame(columns=[*_KEYS, "metric", "value"]).astype({"metric": "category"})
    ascending = sorted(metrics)
    names = np.repeat([ascending.index(metric) for metric in metrics], [len(kept[metric]) for metric in metrics])
    return pd.DataFrame({**{key: np.tile(kept[key], len(metrics)) for key in _KEYS if key in kept},
                         "metric": pd.Categorical.from_codes(names, ascending),
                         "value": np.concatenate([kept[metric] for metric in metrics]).astype(np.float64)})


def _encoded(rows: list[_Row]) -> bytes:
    table, buffer = _table(rows), io.BytesIO()
    # Runs of one dataset share their users, so one large page per column compresses those to almost nothing.
    pq.write_table(table, buffer, compression="zstd", compression_level=19, use_dictionary=False,
                   data_page_size=1 << 26, row_group_size=len(table))
    return buffer.getvalue()


def _files(rows: list[_Row]) -> list[tuple[int, bytes]]:
    """Rows in their order as files of at most ``LIMIT`` bytes, or of a single run: (runs, content) of each."""
    content = _encoded(rows)
    if len(content) <= LIMIT or len(rows) == 1:
        return [(len(rows), content)]
    half = len(rows) // 2
    return [*_files(rows[:half]), *_files(rows[half:])]


def _read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = read_json(folder / INDEX, _Index, _CURE)
    for name in index["files"]:
        _check_name(name, str(folder / INDEX))
    return index


def _read_file(path: Path, expected: Mapping[str, Any]) -> _File:
    """A file of the index; raises Corrupt unless it is what was packed."""
    refuse_link(path)
    content = read_required(path, _CURE)
    if _hash(content) != expected["hash"]:
        raise Corrupt(f"{path}: has changed since it was packed", _CURE)
    return _File(content, path)


def read(folder: Path, left_out: Callable[[Corrupt], None]
         ) -> Iterator[tuple[dict[str, Any], Callable[[str], pd.DataFrame]]]:
    """All runs of a folder of compact records: pairs of (content of ``run.json``, loader of the frame ``users``,
    ``rounds`` or ``analysis``). ``left_out`` is told of each file that is not what was packed, whose runs are left
    out."""
    try:
        index = _read_index(folder)
    except Corrupt as error:
        return left_out(error)
    for name, expected in index["files"].items():
        try:
            file = _read_file(folder / name, expected)
        except Corrupt as error:
            left_out(error)
            continue
        for i, meta in enumerate(file.metas):
            yield meta, partial(_frame, file, i)


def _groups(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    """Rows by what files are named by, in the order in which files hold them; raises UserError if a record's name of
    its dataset or backbone is not safe in a file's name."""
    groups: dict[str, list[tuple[tuple[Any, ...], _Row]]] = {}
    for row in rows:
        meta = json.loads(row["meta"])
        order = (meta["method"], json.dumps(meta["settings"], sort_keys=True), meta["seed"], meta["hash"])
        group = f"{meta['dataset']}-{meta['backbone']}"
        _check_name(group, f"record {meta['hash'][:12]}")
        groups.setdefault(group, []).append((order, row))
    return {name: [row for _, row in sorted(group, key=lambda pair: pair[0])] for name, group in groups.items()}


def _index_bytes(folder: Path) -> bytes:
    return (folder / INDEX).read_bytes() if is_compact(folder) else b""


def write(folder: Path, runs: Iterable[Run], command: str, item_analysis: Callable[[Run], bool]) -> dict[str, Any]:
    """Add full or compact runs to a folder of compact records, which is made if needed; one whose hash is there already
    is the same run. Returns the index, of the form of ``_Index``. Raises UserError if the folder cannot be written, or
    what is in it is corrupt or of another schema version. ``command``: what packed them; ``item_analysis``: whether a
    run's analysis per item is kept, which is several times larger than all the rest."""
    commands, old_files = {command}, set[str]()
    rows: dict[str, _Row] = {}
    before = _index_bytes(folder)
    if before:
        index = _read_index(folder)
        commands |= set(index["commands"])
        old_files = set(index["files"])
        for name, expected in index["files"].items():
            file = _read_file(folder / name, expected)
            rows |= {meta["hash"]: row for meta, row in zip(file.metas, file.rows())}
    for run in (run for run in runs if run.intact):
        row = _row(run, item_analysis(run))  # of two records of one run the one with more analysis is kept
        rows[run.hash] = min(rows.get(run.hash, row), row, key=lambda row: (-len(row["analysis.kind"]), row["meta"]))
    groups, files, new = _groups(rows.values()), {}, {}
    for group in sorted(groups):
        for count, content in _files(groups[group]):
            name = f"{group}-{_hash(content)[:8]}.parquet"
            files[name] = {"hash": _hash(content), "runs": count, "bytes": len(content)}
            if name not in old_files:
                new[name] = content
    if _index_bytes(folder) != before:
        raise UserError(f"{folder}: another command has packed runs into it meanwhile; the same command again adds "
                        f"these to them.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in new.items():
            write_atomically(folder / name, content)
        index = {"format": FORMAT, "schema": SCHEMA, "commands": sorted(commands), "files": files}
        write_atomically(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
        for name in old_files - set(files):
            (folder / name).unlink(missing_ok=True)
        sweep(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}).") from None
    return index
