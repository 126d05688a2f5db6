"""Raw files that are Parquet tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Sequence

from ..errors import UserError

if TYPE_CHECKING:
    import pandas as pd


def read_parquet(path: Path, label: str) -> pd.DataFrame:
    """A Parquet table; ``label`` is what messages call the file. Raises UserError if it is none."""
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except Exception as error:  # pyarrow raises errors of several families
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{label}: cannot be read as a Parquet table ({reason[:100]}).") from None


def column_rows(path: Path, label: str, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Some columns of a Parquet table as texts, each row with its number from 1; what is missing is empty.

    Raises:
        UserError: if the file is no such table, or lacks a column.
    """
    frame = read_parquet(path, label)
    if missing := [name for name in columns if name not in frame]:
        raise UserError(f"{label}: has no column '{missing[0]}'; found {', '.join(map(str, frame.columns))}.")
    texts = [frame[name].astype(object).where(frame[name].notna(), "").map(str) for name in columns]
    return ((number, list(fields)) for number, fields in enumerate(zip(*texts), start=1))
