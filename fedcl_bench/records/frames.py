"""The Parquet files of records and audits: what is read has the checksum that it was written with.

Arrow reads them in this thread: one of its own may give Python's memory back later than the result is there, and ends
the process if Python has ended meanwhile.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..core.arrow import numbers
from ..core.errors import Corrupt
from ..core.files import read_required
from .schema import CURE

if TYPE_CHECKING:
    import pandas as pd

Columns = Mapping[str, Any]  # a frame, or arrays by name


def digest(content: bytes) -> str:
    """The checksum by which a record knows its Parquet files."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_content(path: Path, expected: str | None) -> bytes:
    """A Parquet file of a record whose checksum fits; raises Corrupt."""
    content = read_required(path, CURE)
    if digest(content) != expected:
        raise Corrupt(f"{path}: has changed since it was recorded", CURE)
    return content


@contextmanager
def _parsing(path: Path, cure: str) -> Iterator[None]:
    """While a Parquet file's content is read; raises Corrupt if it is none."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path}: is no Parquet file ({' '.join(str(error).split())[:80]})", cure) from None


def in_this_thread(content: bytes) -> pq.ParquetFile:
    """A Parquet file's content, of which ``read`` is to be told ``use_threads=False``."""
    return pq.ParquetFile(io.BytesIO(content), pre_buffer=False)


def _table(content: bytes, columns: list[str] | None = None) -> pa.Table:
    """Columns of a Parquet file; raises KeyError where it lacks one."""
    table = in_this_thread(content).read(columns, use_threads=False)
    return table if columns is None else table.select(columns)


def parsed(content: bytes, path: Path, cure: str, columns: list[str] | None = None, optional: Iterable[str] = ()
           ) -> pd.DataFrame:
    """The frame of a Parquet file's content, or some of its columns, ``optional`` ones where it has such; raises
    Corrupt."""
    with _parsing(path, cure):
        if columns is not None and optional:
            columns = [*columns, *({*optional} & {*pq.read_schema(io.BytesIO(content)).names})]
        return _table(content, columns).to_pandas(use_threads=False)


def numbers_in(content: bytes, path: Path, cure: str) -> dict[str, NDArray[Any]]:
    """The columns of a Parquet file of numbers; raises Corrupt."""
    with _parsing(path, cure):
        table = _table(content)
        return {name: numbers(table.column(name)) for name in table.column_names}


def column(values: Iterable[Any]) -> NDArray[Any]:
    """A column of numbers; what is None becomes nan."""
    array = np.asarray(values)
    return array.astype(float) if array.dtype == object else array


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Rows by column, of numbers; what a row lacks is nan."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: column([row.get(name) for row in rows]) for name in names}


def of_last_stage(curve: Columns) -> NDArray[Any]:
    """The validation of each round; nan before a method's last stage, as only the best of that is tested."""
    valid = column(curve["valid"])
    if "stage" not in curve:
        return valid
    stage = column(curve["stage"])
    return np.where(stage == stage.max(), valid, np.nan)


def still_improving(curve: Columns) -> list[int]:
    """The blocks whose training ended too early for what validation says: the value of the last validated round is
    above all earlier ones of the block. Early stopping has ended none of these, as it waits for rounds without
    improvement. A block that was validated once is not among them. ``curve``: one row per round, as ``rounds.parquet``
    has them."""
    step, valid, found = column(curve["step"]), of_last_stage(curve), []
    for block in np.unique(step):
        each = valid[(step == block) & ~np.isnan(valid)]
        if len(each) > 1 and each[-1] > each[:-1].max():
            found.append(int(block))
    return found
