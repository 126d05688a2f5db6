"""The order of rows by time where times are equal: that of the file, a random one, or that of a paper's authors.

Released code that kept its rows in a Python set (FFMSR) has ties in a random order, another in each run of it.

Released code that sorts with ``numpy.argsort`` or ``pandas.sort_values`` has an order of ties that depends on NumPy's
version and on the processor it ran on. F3CRec's ML-100K has that of NumPy's introsort, its Last.FM 2K that of NumPy
1.25 and 1.26 with AVX-512. Both are shipped as files in ``tie_orders``, one for each order:

- 16 bytes: the BLAKE2b digest of the times it sorts, as little-endian float64 in the order of the dataset's file;
- little-endian int16 for each sorted row: its place in a stable sort less its place in this order.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
import torch

from ... import rng
from ...core.errors import UserError

# Of which rows each shipped order is.
SHIPPED = {"numpy_quicksort": "ml-100k with k_core=10", "numpy_avx512": "lastfm-2k with k_core=5"}
_FOLDER = Path(__file__).parent / "tie_orders"
_DIGEST_BYTES = 16


def time_order(times: np.ndarray, tie_order: str) -> np.ndarray:
    """The order that sorts rows by their times, finite and in the order of the file: int64, (rows,). Raises UserError
    if a shipped order is asked for that is of other rows."""
    if tie_order == "random":
        keys = rng.sort_keys(rng.row_keys(rng.key(0, "ties"), torch.arange(len(times))))
        return np.lexsort((keys.numpy(), times))
    ascending = bool((times[1:] >= times[:-1]).all())
    stable = np.arange(len(times)) if ascending else np.argsort(times, kind="stable")
    if tie_order == "file":
        return stable
    content = lzma.decompress((_FOLDER / f"{tie_order}.xz").read_bytes())
    if content[:_DIGEST_BYTES] != _digest(times):
        raise UserError(f"setting 'tie_order': found {tie_order}, which is shipped for {SHIPPED[tie_order]} alone; "
                        f"these {len(times):,} rows are others.\nAccepted here: --set tie_order=file, or "
                        f"--set tie_order=random.")
    moved = np.frombuffer(content, "<i2", offset=_DIGEST_BYTES)
    return stable[np.arange(len(times)) + moved]


def _digest(times: np.ndarray) -> bytes:
    return hashlib.blake2b(times.astype("<f8").tobytes(), digest_size=_DIGEST_BYTES).digest()
