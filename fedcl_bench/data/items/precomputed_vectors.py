"""Vectors of items from a file per domain, instead of an encoder of their texts.

- ``NAME.npz``: ``item_id`` of shape (rows,) and ``vectors``, (rows, d) or (rows, layers, d). Instead of vectors there
  may be their optimised product quantisation, as VQ-Rec has it (Ge et al. 2014): ``codes`` (rows, C), ``centroids`` (C,
  256, d / C), ``coarse`` (d,) and ``rotation`` (d, d).
- ``NAME.parquet``: columns ``item_id`` and ``vector``, a list of d numbers.
- ``NAME.npy``: vectors as above, whose rows are those of the domain's ``.item`` file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from ...core.errors import Corrupt, UserError
from ...core.files import read_required
from ...core.text import quoted
from .item_texts import read_texts
from ..files.table_reader import read_parquet

SUFFIXES = (".npz", ".parquet", ".npy")
_CURE = "docs/domains.md says what such a file holds."
_QUANTISED = ("codes", "centroids", "coarse", "rotation")


def files_of(folder: Path, domain: str, described: Path) -> list[Path]:
    """The one file of a domain's vectors, or UserError; and its ``.item`` file where that says whose each row is."""
    if not folder.is_dir():
        raise UserError(f"encoder given:{folder}: is no folder; accepted: a folder with a file of vectors for each "
                        f"domain, as {domain}.npz.")
    paths = [path for suffix in SUFFIXES if (path := folder / f"{domain}{suffix}").is_file()]
    if len(paths) != 1:
        names = " and ".join(path.name for path in paths) or f"no file of vectors for domain '{domain}'"
        raise UserError(f"encoder given:{folder}: found {names}, accepted: one of "
                        f"{', '.join(domain + suffix for suffix in SUFFIXES)}.\n{_CURE}")
    if paths[0].suffix != ".npy":
        return paths
    if not described.is_file():
        raise UserError(f"{paths[0]}: its rows are those of {described}, which is not there; accepted without it: a "
                        f".npz or .parquet file, which names its items.\n{_CURE}")
    return [*paths, described]


def read(path: Path, items: Sequence[str], described: Sequence[Path], column: str) -> np.ndarray:
    """The vectors of some items by the publisher's ids, zeros for those that the file has not: float32 of shape (items,
    layers, d).

    Vectors without ids are those of the ``.item`` file ``described`` with ids in ``column``. Raises UserError for a
    file that does not hold finite vectors of one length and an id for each, or none of the items.
    """
    if path.suffix == ".npy":
        ids = np.array(list(read_texts(described[0], column)))
        vectors = _loaded(path)
    else:
        ids, vectors = (_npz if path.suffix == ".npz" else _parquet)(path)
    if wrong := _wrong(ids, vectors):
        raise UserError(f"{path}: {wrong}.\n{_CURE}")
    names: list[str] = ids.astype(str).tolist()
    place = {name: number for number, name in enumerate(names)}
    row = np.array([place.get(item, -1) for item in items])
    if (row < 0).all():
        raise UserError(f"{path}: has none of the domain's {len(items):,} items; its ids are as {quoted(names[0])}, "
                        f"the domain's as {quoted(items[0])}.\nGive the vectors the ids of the domain's .inter file.")
    result = np.zeros((len(items), *(vectors.shape[1:] if vectors.ndim == 3 else (1, vectors.shape[1]))), np.float32)
    with np.errstate(over="ignore"):
        result[row >= 0] = vectors[row[row >= 0]].reshape(-1, *result.shape[1:])
    if not np.isfinite(result).all():
        wrong = items[int(np.flatnonzero(~np.isfinite(result).all(axis=(1, 2)))[0])]
        raise UserError(f"{path}: the vector of the item {quoted(wrong)} has a number that is not finite in single "
                        f"precision, accepted: finite ones.\n{_CURE}")
    return result


def _wrong(ids: np.ndarray, vectors: np.ndarray) -> str:
    """What of a file's ids and vectors cannot be used; else empty."""
    if ids.ndim != 1 or not len(ids) or not (ids.dtype.kind in "uiU" or all(isinstance(item, str) for item in ids)):
        return f"'item_id' is {ids.dtype} of shape {ids.shape}, accepted: a list of texts or whole numbers"
    if vectors.dtype.kind != "f" or vectors.ndim not in (2, 3) or not all(vectors.shape):
        return (f"its vectors are {vectors.dtype} of shape {vectors.shape}, accepted: real numbers of shape (rows, d) "
                f"or (rows, layers, d)")
    if len(ids) != len(vectors):
        return f"has {len(vectors):,} vectors for {len(ids):,} items, accepted: one for each"
    names, again = ids.astype(str), np.ones(len(ids), bool)
    again[np.unique(names, return_index=True)[1]] = False
    if again.any():
        return f"has several vectors of the item {quoted(str(ids[again][0]))}, accepted: one"
    return ""


def _loaded(path: Path) -> Any:
    """The array of an ``.npy`` file, or those of an ``.npz`` file by name; raises UserError if it is none, or holds
    pickled objects."""
    file = io.BytesIO(read_required(path, _CURE))
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray) != (path.suffix == ".npy"):
            raise ValueError("it is of the other kind")
        if file.read(1) if path.suffix == ".npy" else loaded.zip.testzip():
            raise ValueError("more bytes than the array has, or others than were written")
        return loaded if path.suffix == ".npy" else dict(loaded)
    except Exception:  # NumPy and zlib raise whatever their readers do
        raise Corrupt(f"{path}: is no {path.suffix} file of tables without pickled objects", _CURE) from None


def _npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = _loaded(path)
    if "vectors" not in arrays and set(_QUANTISED) <= set(arrays):
        vectors = _decoded(path, *(arrays[name] for name in _QUANTISED))
    else:
        vectors = _member(path, arrays, "vectors")
    return _member(path, arrays, "item_id"), vectors


def _decoded(path: Path, codes: np.ndarray, centroids: np.ndarray, coarse: np.ndarray,
             rotation: np.ndarray) -> np.ndarray:
    """The vectors that product quantisation has left: the centroids of each code side by side, moved and turned."""
    try:
        chosen = centroids[np.arange(codes.shape[1]), codes].reshape(len(codes), -1)
        return (chosen + coarse.reshape(len(rotation))) @ rotation
    except (IndexError, TypeError, ValueError):
        raise UserError(f"{path}: codes {codes.shape}, centroids {centroids.shape}, coarse {coarse.shape} and rotation "
                        f"{rotation.shape} do not fit, accepted: (rows, C), (C, 256, d / C), (d,) and (d, d).\n"
                        f"{_CURE}") from None


def _parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    frame = read_parquet(path, str(path))
    columns = {name: frame[name].to_numpy() for name in ("item_id", "vector") if name in frame}
    try:
        return _member(path, columns, "item_id"), np.stack(_member(path, columns, "vector").tolist())
    except ValueError:
        raise UserError(f"{path}: column 'vector' does not hold lists of equally many numbers.\n{_CURE}") from None


def _member(path: Path, parts: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in parts:
        raise UserError(f"{path}: '{name}' is missing; found {', '.join(sorted(parts)) or 'nothing'}.\n{_CURE}")
    return parts[name]
