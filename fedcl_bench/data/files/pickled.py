"""Files of publishers that may hold pickles, read without running what is in them.

A pickle can call any function. Here numbers, texts and their containers come out of one, and nothing else. PyTables
unpickles attributes and columns of Python objects of HDF files, as pandas writes them; sets of sessions for session
recommenders are pickled lists of item ids, or tables of them.
"""

from __future__ import annotations

import io
import pickle
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from ...core.errors import UserError
from ...core.text import quoted
from .table_reader import read_parquet

if TYPE_CHECKING:
    import pandas as pd

TRAIN, TEST = "train", "test"  # a file's split: whole sessions, or each a sequence and the item that follows it
# What NumPy's numbers in attributes, which pandas writes, are made of.
_HARMLESS = {("numpy", "dtype"), ("_codecs", "encode"), ("numpy.core.multiarray", "scalar"),
             ("numpy._core.multiarray", "scalar")}


class HoldsObjects(Exception):
    """The file holds pickled objects, which were not read."""


class PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function but the harmless ones, so that nothing in a pickle is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise HoldsObjects(f"{module}.{name}")


@contextmanager
def _plain_pickles(refused: list[str]) -> Iterator[None]:
    """While it lasts, PyTables reads pickles by ``PlainUnpickler``; adds what it refuses, as PyTables hides it."""
    from tables import atom, attributeset

    def loads(content: bytes, **options: Any) -> Any:
        try:
            return PlainUnpickler(io.BytesIO(content), **options).load()
        except HoldsObjects as error:
            refused.append(str(error))
            raise

    before = {module: module.pickle for module in (atom, attributeset)}
    for module in before:
        module.pickle = SimpleNamespace(**{**vars(pickle), "loads": loads})
    try:
        yield
    finally:
        for module, original in before.items():
            module.pickle = original


def tables_of(path: Path, label: str, keys: Sequence[str], columns: Sequence[str], key_column: str
              ) -> Iterator[pd.DataFrame]:
    """Tables of a file one after the other, each row with its table's key in ``key_column``; raises UserError without
    PyTables, or if the file is none of pandas', lacks a table or column, or holds pickled objects."""
    import pandas as pd

    for key in keys:
        refused: list[str] = []
        wrong = ""
        try:
            with _plain_pickles(refused), pd.HDFStore(path, mode="r") as store:
                frame = store.select(key)
        except ImportError:
            raise UserError(f"{label}: reading HDF files needs PyTables.\nInstall it: python -m pip install "
                            f"'tables>=3.8' (or 'fedcl_bench[hdf]').") from None
        except KeyError:
            wrong = f"has no table '{key}'; expected {', '.join(keys)}"
        except Exception as error:  # PyTables' own errors derive from nothing more precise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            wrong = f"cannot be read as an HDF file of pandas ({reason[:100]})"
        if refused:
            raise UserError(f"{label}: table '{key}' holds pickled objects ({quoted(', '.join(dict.fromkeys(refused)))}"
                            f"), which could run code of whoever wrote it; it is not read.\nGet the publisher's file, "
                            f"or save its columns as numbers.")
        if wrong:
            raise UserError(f"{label}: {wrong}.")
        if missing := [name for name in columns if name not in getattr(frame, "columns", ())]:
            raise UserError(f"{label}: table '{key}' has no column '{missing[0]}'; expected {', '.join(columns)}.")
        yield frame.assign(**{key_column: key})


def pickled_rows(path: Path, label: str, split: str) -> Iterator[pd.DataFrame]:
    """Rows (session, item, position in the file, split) of a pickled file: a list of sessions for ``train``, a pair of
    lists, of sequences and of the items after them, for ``test``. Raises UserError if it holds anything but that."""
    import pandas as pd

    expected = ("a pickled list of sessions, each a list of item ids" if split == TRAIN else
                "a pickled pair of lists: of sequences of item ids, and of the item after each")
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
        raise UserError(f"{label}: is another pickle, or none, or is cut short; expected {expected}.") from None
    yield _rows(pd.DataFrame({"session": range(len(sessions)), "item": sessions}).explode("item"), split)


def table_rows(path: Path, label: str, split: str) -> Iterator[pd.DataFrame]:
    """The same rows of a Parquet table of ``session``, in order, and ``item_id``; raises UserError if it is none."""
    frame = read_parquet(path, label, ("session", "item_id"))
    if not frame["session"].is_monotonic_increasing:
        raise UserError(f"{label}: column 'session' does not ascend; expected the clicks of each session together.")
    yield _rows(frame.rename(columns={"item_id": "item"}), split)


def _rows(frame: pd.DataFrame, split: str) -> pd.DataFrame:
    """Rows, given the number of the session and the item of each."""
    return frame.assign(session=f"{split}-" + frame["session"].astype(str), position=range(1, len(frame) + 1),
                        split=split)
