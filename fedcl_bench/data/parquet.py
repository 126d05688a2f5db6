"""Raw files that are Parquet tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Sequence

from ..errors import UserError
from ..names import shown

if TYPE_CHECKING:
    import pandas as pd

_SPLITS = ("train", "valid", "test")


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
    _check_columns(frame, label, columns)
    return _numbered(frame, columns)


def split_sequences(path: Path, label: str, domain: str) -> Iterator[tuple[int, list[str]]]:
    """One domain of a table whose sequences are split into train, valid and test: user, item and the item's place in
    the user's history, each row with its number from 1.

    A sequence of a later split may repeat those before it. Of what repeats, the first row counts.

    Raises:
        UserError: if the file is no such table, lacks a column, or has nothing of the domain.
    """
    import pandas as pd

    frame = read_parquet(path, label)
    _check_columns(frame, label, ("domain", "split", "user_id", "item_id"))
    domains = frame["domain"].astype(str)
    if not (domains == domain).any():
        raise UserError(f"{label}: has no domain '{domain}'; found {', '.join(sorted(set(domains))) or 'no rows'}.")
    frame = frame[domains == domain]
    split = pd.Categorical(frame["split"].astype(str), _SPLITS)
    if split.isna().any():
        wrong = frame["split"][split.isna()].astype(str).iloc[0]
        raise UserError(f"{label}: column 'split' has {shown(wrong)}, expected {', '.join(_SPLITS)}.")
    frame = frame.iloc[split.codes.argsort(kind="stable")].drop_duplicates(["user_id", "item_id"])
    return _numbered(frame.assign(order=frame.groupby("user_id", dropna=False).cumcount()),
                     ("user_id", "item_id", "order"))


def _check_columns(frame: pd.DataFrame, label: str, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in frame]:
        raise UserError(f"{label}: has no column '{missing[0]}'; found {', '.join(map(str, frame.columns))}.")


def _numbered(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Rows as texts, with their numbers from 1."""
    texts = [frame[name].astype(object).where(frame[name].notna(), "").map(str) for name in columns]
    return ((number, list(fields)) for number, fields in enumerate(zip(*texts), start=1))
