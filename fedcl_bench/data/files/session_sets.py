"""Sets of sessions as they are published for session recommenders: pickled lists of item ids, or tables of them.

A pickle can call any function: one of more than lists and numbers is refused (see ``hdf``).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

from ...core.errors import UserError
from .hdf import HoldsObjects, PlainUnpickler
from .table_reader import read_parquet

if TYPE_CHECKING:
    import pandas as pd

TRAIN, TEST = "train", "test"  # a file's split: whole sessions, or each a sequence and the item that follows it
_EXPECTED = {TRAIN: "a pickled list of sessions, each a list of item ids",
             TEST: "a pickled pair of lists: of sequences of item ids, and of the item after each"}


def pickled_rows(path: Path, label: str, split: str) -> Iterator[pd.DataFrame]:
    """Rows (session, item, position in the file, split) of a pickled file.

    Args:
        label: what messages call the file.
        split: ``train``: a list of sessions. ``test``: a pair of lists, of sequences and of the items after them.

    Raises:
        UserError: if the file holds anything but that.
    """
    import pandas as pd

    try:
        sessions = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        if split == TEST:
            sessions = [[*sequence, target] for sequence, target in zip(*sessions, strict=True)]
        if not (isinstance(sessions, list) and all(isinstance(session, list) for session in sessions)):
            raise TypeError
    except HoldsObjects as error:
        raise UserError(f"{label}: is a pickle of more than lists of numbers ({error}), which could run code of "
                        f"whoever wrote it; it is not read.\nGet the publisher's file.") from None
    except Exception:  # whatever a pickle's reader raises of a damaged file
        raise UserError(f"{label}: is another pickle, or none, or is cut short; expected {_EXPECTED[split]}."
                        ) from None
    yield _rows(pd.DataFrame({"session": range(len(sessions)), "item": sessions}).explode("item"), split)


def table_rows(path: Path, label: str, split: str) -> Iterator[pd.DataFrame]:
    """The same rows of a Parquet table with the columns ``session`` and ``item_id``, in the sessions' order.

    Raises:
        UserError: if the file is no such table.
    """
    frame = read_parquet(path, label, ("session", "item_id"))
    if not frame["session"].is_monotonic_increasing:
        raise UserError(f"{label}: column 'session' does not ascend; expected the clicks of each session together.")
    yield _rows(frame.rename(columns={"item_id": "item"}), split)


def _rows(frame: pd.DataFrame, split: str) -> pd.DataFrame:
    """Rows, given the number of the session and the item of each."""
    return frame.assign(session=f"{split}-" + frame["session"].astype(str), position=range(1, len(frame) + 1),
                        split=split)
