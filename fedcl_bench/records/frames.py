"""The Parquet files of records and audits: what is read has the checksum that it was written with."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Iterable

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import Corrupt
from ..core.files import read_required
from .schema import CURE


def digest(content: bytes) -> str:
    """The checksum by which a record knows its Parquet files."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_content(path: Path, expected: str | None) -> bytes:
    """A Parquet file of a record whose checksum fits; raises Corrupt."""
    content = read_required(path, CURE)
    if digest(content) != expected:
        raise Corrupt(f"{path}: has changed since it was recorded", CURE)
    return content


def parsed(content: bytes, path: Path, cure: str, columns: list[str] | None = None, optional: Iterable[str] = ()
           ) -> pd.DataFrame:
    """The frame of a Parquet file's content, or some of its columns, ``optional`` ones where it has such; raises
    Corrupt."""
    try:
        if columns is not None and optional:
            columns = [*columns, *({*optional} & {*pq.read_schema(io.BytesIO(content)).names})]
        return pd.read_parquet(io.BytesIO(content), columns=columns)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path}: is no Parquet file ({' '.join(str(error).split())[:80]})", cure) from None


def last_stage(curve: pd.DataFrame) -> pd.DataFrame:
    """The rounds, of which only those of a method's last stage count as validated, whose best is tested."""
    if "stage" not in curve:
        return curve
    return curve.assign(valid=curve["valid"].where(curve["stage"] == curve["stage"].max()))


def still_improving(curve: pd.DataFrame) -> list[int]:
    """The blocks whose training ended too early for what validation says: the value of the last validated round is
    above all earlier ones of the block. Early stopping has ended none of these, as it waits for rounds without
    improvement. A block that was validated once is not among them.

    Args:
        curve: one row per round, as ``rounds.parquet`` has them.
    """
    valid = {block: each.dropna() for block, each in last_stage(curve).groupby("step")["valid"]}
    return [int(block) for block, each in valid.items() if len(each) > 1 and each.iloc[-1] > each.iloc[:-1].max()]
