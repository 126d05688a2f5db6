"""The Parquet files of records and audits: what is read has the checksum that it was written with."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Mapping, Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import Corrupt
from ..core.files import read_bytes
from .schema import CURE


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
        Corrupt: if the file is missing or has changed.
    """
    path = folder / f"{name}.parquet"
    return parsed(read_content(path, files.get(path.name)), path, CURE)


def read_columns(folder: Path, name: str, columns: list[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Some columns of a frame of a record that was verified before, ``optional`` ones where there are such, and nothing
    else; raises Corrupt."""
    path = folder / f"{name}.parquet"
    try:
        content = read_bytes(path, CURE)
        return parsed(content, path, CURE, [*columns, *(set(optional) & _names_of(content, path))])
    except FileNotFoundError:
        raise Corrupt(f"{path}: is missing", CURE) from None


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
