"""Tables of HDF files as pandas writes them, read without running what may be pickled in them.

PyTables unpickles attributes and columns of Python objects as it reads, and a pickle can call any function. Here it
gets numbers, texts and their containers out of pickles, and nothing else. So a column of objects cannot be read.
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

if TYPE_CHECKING:
    import pandas as pd

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
    """Tables of a file one after the other, each row with its table's key in ``key_column``.

    Raises:
        UserError: without PyTables, or if the file is none of pandas', lacks a table or column, or holds pickled
            objects.
    """
    import pandas as pd

    for key in keys:
        refused: list[str] = []
        failed: Exception | None = None
        try:
            with _plain_pickles(refused), pd.HDFStore(path, mode="r") as store:
                frame = store.select(key)
        except Exception as error:  # PyTables' own errors derive from nothing more precise
            failed = error
        if refused:
            raise UserError(f"{label}: table '{key}' holds pickled objects ({quoted(', '.join(dict.fromkeys(refused)))}"
                            f"), which could run code of whoever wrote it; it is not read.\nGet the publisher's file, "
                            f"or save its columns as numbers.")
        if isinstance(failed, ImportError):
            raise UserError(f"{label}: reading HDF files needs PyTables.\nInstall it: python -m pip install "
                            f"'tables>=3.8' (or 'fedcl_bench[hdf]').")
        if isinstance(failed, KeyError):
            raise UserError(f"{label}: has no table '{key}'; expected {', '.join(keys)}.")
        if failed is not None:
            reason = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
            raise UserError(f"{label}: cannot be read as an HDF file of pandas ({reason[:100]}).")
        if missing := [name for name in columns if name not in getattr(frame, "columns", ())]:
            raise UserError(f"{label}: table '{key}' has no column '{missing[0]}'; expected {', '.join(columns)}.")
        yield frame.assign(**{key_column: key})
