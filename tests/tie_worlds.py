"""Times with ties of every kind, and a digest of how they are sorted; run as a program, that of each order here."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Callable

import numpy as np

from fedcl_bench.data.tie_order import TIE_ORDERS, time_order

UNSTABLE = TIE_ORDERS[1:3]


def worlds() -> dict[str, np.ndarray]:
    """The same everywhere."""
    number = np.arange(20_000)
    hashed = number * 2_654_435_761 % 2**32
    return {"few values": hashed % 7, "months": hashed % 500, "seconds": hashed, "mostly the first": hashed % 19 // 18,
            "mostly the last": hashed % 19 > 0, "equal": number * 0, "ascending": number // 50,
            "descending": -(number // 50), "by user": number % 40 * 9 + hashed % 30,
            **{f"{rows} rows": hashed[:rows] % 5 for rows in (0, 1, 2, 8, 9, 16, 17, 33, 64, 65, 72, 256, 257, 289)}}


def digest_of(sort: Callable[[np.ndarray], np.ndarray]) -> str:
    """Of the orders of all worlds."""
    digest = hashlib.blake2b(digest_size=8)
    for times in worlds().values():
        digest.update(sort(times.astype(np.float64)).astype("<i8").tobytes())
    return digest.hexdigest()


def digests() -> dict[str, str]:
    """Of our orders, by name."""
    return {tie_order: digest_of(lambda times: time_order(times, tie_order)) for tie_order in UNSTABLE}


def numpy_order() -> str:
    """Which of our orders ``np.argsort`` gives here; empty if none."""
    with_avx512 = np.core._multiarray_umath.__cpu_features__.get("AVX512_SKX")
    if not with_avx512 or np.lib.NumpyVersion(np.__version__) < "1.25.0":
        return "numpy_quicksort"
    return "numpy_avx512" if sys.platform == "linux" else ""  # elsewhere its std::sort is another library's


if __name__ == "__main__":
    print(json.dumps([numpy_order(), digest_of(np.argsort), digests()]))
