"""Sets of sessions as they are published for session recommenders: pickled lists of item ids, or tables of them.

A pickle can call any function. Here only instructions that make whole numbers, lists and tuples are let through, each
list once, and a file with any other is refused before anything of it is read.
"""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

from ..core.errors import UserError
from .table_reader import frame_batch, read_parquet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_PLAIN = {"PROTO", "FRAME", "MARK", "EMPTY_LIST", "APPEND", "APPENDS", "BININT", "BININT1", "BININT2", "BINPUT",
          "LONG_BINPUT", "MEMOIZE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "STOP"}
TRAIN, TEST = "train", "test"  # a file's split: whole sessions, or each a sequence and the item that follows it


def pickled_rows(path: Path, label: str, split: str) -> Iterator[pa.RecordBatch]:
    """Rows (session, item, position in the file, split) of a pickled file.

    Args:
        label: what messages call the file.
        split: ``train``: a list of sessions. ``test``: a pair of lists, of sequences and of the items after them.

    Raises:
        UserError: if the file holds anything but that.
    """
    import pandas as pd

    try:
        sessions = _sessions(_numbers(path.read_bytes(), label), split)
    except _Unexpected as error:
        raise UserError(f"{label}: {error}, expected {_expected(split)}.") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror}).") from None
    yield _rows(pd.DataFrame({"session": range(len(sessions)), "item": sessions}).explode("item"), split)


class _Unexpected(Exception):
    """What a file holds instead of sessions."""


def _expected(split: str) -> str:
    return ("a pickled list of sessions, each a list of item ids" if split == TRAIN else
            "a pickled pair of lists: of sequences of item ids, and of the item after each")


def _numbers(content: bytes, label: str) -> Any:
    """What a pickle of whole numbers, lists and tuples holds."""
    try:
        kinds = {operation.name for operation, _, _ in pickletools.genops(content)}
        if others := sorted(kinds - _PLAIN):
            raise UserError(f"{label}: is a pickle of more than lists of numbers ({', '.join(others[:4])}), which "
                            f"could run code of whoever wrote it; it is not read.\nGet the publisher's file.")
        return pickle.loads(content)  # nothing but those instructions is in it
    except UserError:
        raise
    except Exception:  # whatever its readers raise of a damaged file
        raise _Unexpected("is no pickle, or is cut short") from None


def _sessions(content: Any, split: str) -> list[list[int]]:
    """Each session of a file; the item to find of a test session comes last."""
    if split == TEST:
        if not (isinstance(content, tuple) and len(content) == 2 and all(isinstance(part, list) for part in content)
                and len(content[0]) == len(content[1])):
            raise _Unexpected("is no pair of lists of one length")
        if not all(isinstance(sequence, list) for sequence in content[0]):
            raise _Unexpected("holds what is no sequence")
        content = [[*sequence, target] for sequence, target in zip(*content)]
    if not isinstance(content, list) or not content:
        raise _Unexpected("holds no list of sessions")
    for number, session in enumerate(content, start=1):
        if not (isinstance(session, list) and session and all(type(item) is int and item >= 0 for item in session)):
            raise _Unexpected(f"holds in session {number} what is no list of item ids")
    return content


def _rows(frame: pd.DataFrame, split: str) -> pa.RecordBatch:
    """Rows, given the number of the session and the item of each."""
    frame = frame.assign(session=f"{split}-" + frame["session"].astype(str), position=range(1, len(frame) + 1),
                         split=split)
    return frame_batch(frame, ("session", "item", "position", "split"))


def table_rows(path: Path, label: str, split: str) -> Iterator[pa.RecordBatch]:
    """The same rows of a Parquet table with the columns ``session`` and ``item_id``, in the sessions' order.

    Raises:
        UserError: if the file is no such table.
    """
    import pandas as pd

    frame = read_parquet(path, label)
    for name in ("session", "item_id"):
        if name not in frame or not pd.api.types.is_integer_dtype(frame[name]):
            raise UserError(f"{label}: has no column '{name}' of whole numbers; expected session, item_id.")
    if not frame["session"].is_monotonic_increasing:
        raise UserError(f"{label}: column 'session' does not ascend; expected the clicks of each session together.")
    yield _rows(frame[["session", "item_id"]].rename(columns={"item_id": "item"}), split)
