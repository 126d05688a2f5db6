"""The Parquet files of records and audits: one reader, which knows the columns that each must have."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import Corrupt
from ..schema import read_bytes
from .run_json import CURE

_TEST = {"trained_block": "number", "tested_block": "number", "metric": "text"}
# Columns of each frame, numbers or texts; there may be more.
COLUMNS: dict[str, dict[str, str]] = {
    "metrics": {**_TEST, "mean": "number", "users": "number"},
    "users": {**_TEST, "user": "number", "value": "number"},
    "rounds": dict.fromkeys(("step", "round", "participants", "loss", "valid", "bytes_up", "bytes_down",
                             "train_seconds", "evaluate_seconds"), "number"),
    "analysis": {"block": "number", "kind": "text", "id": "number", "value": "number"}}


def digest(content: bytes) -> str:
    """The checksum by which a record knows its Parquet files."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_content(path: Path, expected: str | None) -> bytes:
    """A Parquet file of a record whose checksum fits; raises Corrupt."""
    try:
        content = read_bytes(path, CURE)
    except FileNotFoundError:
        raise Corrupt(f"{path}: is missing", CURE) from None
    if digest(content) != expected:
        raise Corrupt(f"{path}: has changed since it was recorded", CURE)
    return content


def read_frame(folder: Path, name: str, files: Mapping[str, str]) -> pd.DataFrame:
    """A frame of a record.

    Args:
        name: ``metrics``, ``users``, ``rounds`` or ``analysis``.
        files: checksums by file, as ``run.json`` holds them.

    Raises:
        Corrupt: if the file is missing, has changed or has not the frame's columns.
    """
    path = folder / f"{name}.parquet"
    frame = parsed(read_content(path, files.get(path.name)), path, CURE)
    check_columns(frame, COLUMNS[name], path, CURE)
    return frame


def check_rounds(frame: pd.DataFrame, rounds: Sequence[int], where: str, cure: str) -> None:
    """Raise Corrupt unless a frame has a row for each of so many rounds per block."""
    steps = frame["step"].value_counts(sort=False)
    if {step: count for step, count in steps.items()} != dict(enumerate(rounds)):
        raise Corrupt(f"{where}: found {len(frame)} rounds, accepted: {', '.join(map(str, rounds))} of the blocks",
                      cure)


def read_columns(folder: Path, name: str, columns: list[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Some columns of a frame of a record that was verified before, ``optional`` ones where there are such, and nothing
    else; raises Corrupt."""
    path = folder / f"{name}.parquet"
    try:
        content = read_bytes(path, CURE)
        frame = parsed(content, path, CURE, [*columns, *(set(optional) & _names_of(content, path))])
    except FileNotFoundError:
        raise Corrupt(f"{path}: is missing", CURE) from None
    check_columns(frame, {column: COLUMNS[name][column] for column in columns}, path, CURE)
    return frame


def _names_of(content: bytes, path: Path) -> set[str]:
    """The columns of a Parquet file's content; raises Corrupt."""
    try:
        return set(pq.read_schema(io.BytesIO(content)).names)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"{path}: is no Parquet file ({' '.join(str(error).split())[:80]})", CURE) from None


def parsed(content: bytes, path: Path, cure: str, columns: list[str] | None = None) -> pd.DataFrame:
    """The frame of a Parquet file's content, or some of its columns; raises Corrupt."""
    try:
        return pd.read_parquet(io.BytesIO(content), columns=columns)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path}: is no Parquet file ({' '.join(str(error).split())[:80]})", cure) from None


def check_columns(frame: pd.DataFrame, columns: Mapping[str, str] | Sequence[str], path: Path, cure: str) -> None:
    """Raise Corrupt unless a frame has these columns, and, where that is said, of these kinds."""
    for name in columns:
        if name not in frame.columns:
            raise Corrupt(f"{path}: found the columns {', '.join(map(str, frame.columns))[:120]}, accepted: those with "
                          f"'{name}'", cure)
        kind = columns[name] if isinstance(columns, Mapping) else "number"
        is_number = pd.api.types.is_numeric_dtype(frame[name].dtype) and frame[name].dtype != np.bool_
        if len(frame) and is_number != (kind == "number"):
            raise Corrupt(f"{path}, column '{name}': found {frame[name].dtype}, accepted: {kind}s", cure)
