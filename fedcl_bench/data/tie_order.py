"""The order of rows by time where times are equal: that of the file, a random one, or what NumPy's sorts leave.

Released code that kept its rows in a Python set (FFMSR) has ties in a random order, another in each run of it.

Released code that sorts with ``numpy.argsort`` or ``pandas.sort_values`` has an order of ties that depends on NumPy's
version and on the processor it ran on. The sorts here depend on neither. They take seconds per million rows, as they
follow what the algorithms do to the order of rows, part by part:

- introsort (Musser, 1997), as NumPy has it without AVX-512: the median of three, and insertion sort of short parts;
- quicksort with vectors (Bramas, 2017; Blacher et al., 2021) down to bitonic networks (Batcher, 1968), as NumPy 1.25
  and 1.26 sort 64-bit floats with AVX-512. Where it gives up, ``std::sort`` takes over: of the GNU C++ library, with
  which NumPy is built for Linux.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Iterator

import numpy as np
import torch

from .. import draws
from ..errors import UserError

TIE_ORDERS = ("file", "numpy_quicksort", "numpy_avx512", "random")
_LANES = 8  # 64-bit numbers in a vector
_NETWORK = 64  # rows that a network sorts at most
_UNROLLED = 4  # vectors read at a time in parts of more than _LONG rows
_LONG = 8 * _UNROLLED * _LANES
_SHORT = 16  # rows that insertion sort takes at most
_NETWORKS_AT_A_TIME = 1 << 12  # bounds memory

Parts = list[tuple[int, int]]  # where each begins and ends
Partition = Callable[[np.ndarray, np.ndarray], Parts]
Sort = Callable[[np.ndarray, np.ndarray], None]


def time_order(times: np.ndarray, tie_order: str) -> np.ndarray:
    """The order that sorts rows by time.

    Args:
        times: finite, (rows,), in the order of the file.
        tie_order: of ``TIE_ORDERS``.

    Returns:
        int64, (rows,): rows of the file in the order of their times.

    Raises:
        UserError: if introsort would leave a part to heapsort, which is not implemented.
    """
    if tie_order == "file" or len(times) < 2:
        return np.argsort(times, kind="stable")
    if tie_order == "random":
        keys = draws.sort_keys(draws.row_keys(draws.key(0, "ties"), torch.arange(len(times))))
        return np.lexsort((keys.numpy(), times))
    times, rows = times.astype(np.float64), np.arange(len(times))
    if tie_order == "numpy_quicksort":
        _introsort(times, rows, _numpy_partition)
    else:
        _vector_sort(times, rows)
    return rows


def _cut(times: np.ndarray, rows: np.ndarray, partition: Partition, longest: int, give_up: Sort) -> Parts:
    """Quicksort ``rows`` in place down to parts of at most ``longest`` rows, whose bounds are given back.

    A part that was cut 2 log2(rows) times and is still longer goes to ``give_up``.
    """
    parts = []
    waiting = [(0, len(rows), 2 * (len(rows).bit_length() - 1))]
    while waiting:
        start, end, cuts_left = waiting.pop()
        if end - start <= longest:
            parts.append((start, end))
        elif cuts_left <= 0:
            give_up(times, rows[start:end])
        else:
            waiting += [(start + low, start + high, cuts_left - 1) for low, high in partition(times, rows[start:end])]
    return parts


def _introsort(times: np.ndarray, rows: np.ndarray, partition: Partition) -> None:
    """Sort ``rows`` in place. Insertion sort of the short parts is stable, and so is one stable sort of them all."""
    _cut(times, rows, partition, _SHORT, _refuse)
    rows[:] = rows[np.argsort(times[rows], kind="stable")]


def _refuse(times: np.ndarray, rows: np.ndarray) -> None:
    raise UserError(f"tie_order: the times are arranged so that quicksort gives up on {len(rows):,} rows, and their "
                    f"order is not defined.\nUse the file's, --set tie_order=file.")


def _numpy_partition(times: np.ndarray, rows: np.ndarray) -> Parts:
    """Partition ``rows`` in place as NumPy: the median of the first, middle and last time waits at the last but one."""
    middle, last = (len(rows) - 1) // 2, len(rows) - 1
    for a, b in ((0, middle), (middle, last), (0, middle)):
        if times[rows[b]] < times[rows[a]]:
            _swap(rows, a, b)
    _swap(rows, middle, last - 1)
    cut = _meet(times, rows, 1, last - 1, times[rows[last - 1]])
    _swap(rows, cut, last - 1)
    return [(0, cut), (cut + 1, len(rows))]


def _gnu_partition(times: np.ndarray, rows: np.ndarray) -> Parts:
    """Partition ``rows`` in place as the GNU C++ library: the median of second, middle and last time waits in front."""
    small, large, last = 1, len(rows) // 2, len(rows) - 1
    if not times[rows[small]] < times[rows[large]]:
        small, large = large, small
    at_last = times[rows[last]]
    _swap(rows, 0, large if times[rows[large]] < at_last else last if times[rows[small]] < at_last else small)
    cut = _meet(times, rows, 1, len(rows), times[rows[0]])
    return [(0, cut), (cut, len(rows))]


def _meet(times: np.ndarray, rows: np.ndarray, low: int, high: int, pivot: float) -> int:
    """Swap rows of ``low:high`` not before the pivot, from the front, with those not after it, from the back.

    Returns where the two directions meet: the first place, or ``high``, from which on no row is before the pivot.
    """
    value = times[rows[low:high]]
    late = low + np.append(np.flatnonzero(value >= pivot), high - low)
    early = low + np.flatnonzero(value <= pivot)[::-1]
    pairs = min(len(late), len(early))
    swaps = int((late[:pairs] < early[:pairs]).sum())
    front, back = late[:swaps], early[:swaps]
    rows[front], rows[back] = rows[back], rows[front]
    return int(min(late[swaps], back[-1])) if swaps else int(late[0])


def _swap(rows: np.ndarray, a: int, b: int) -> None:
    rows[a], rows[b] = rows[b], rows[a]


def _vector_sort(times: np.ndarray, rows: np.ndarray) -> None:
    """Sort ``rows`` in place by quicksort with vectors and networks; where it gives up, as ``std::sort``."""
    parts = _cut(times, rows, _vector_partition, _NETWORK, partial(_introsort, partition=_gnu_partition))
    _networks(times, rows, parts)


def _vector_partition(times: np.ndarray, rows: np.ndarray) -> Parts:
    """Partition ``rows`` in place around a sampled time; gives the parts that have other times than the pivot's.

    Rows are read in turn from the side that has less room for what is written, so rows from the front and from the
    back mix. Earlier rows are written to the front in the order of reading, the others to the back vector by vector.
    """
    step = (len(rows) - 1) // _LANES
    pivot = np.sort(times[rows[step * np.arange(1, _LANES + 1)]])[_LANES // 2]
    vectors = _UNROLLED if len(rows) > _LONG else 1
    low, high = _shorten(times, rows, pivot, vectors * _LANES)
    inner = rows[low:high].copy()
    late = (times[inner] >= pivot).reshape(-1, vectors * _LANES)
    turn = _reading_turns(late.sum(axis=1).tolist(), vectors * _LANES)
    inner, late = inner.reshape(late.shape)[turn].reshape(-1, _LANES), late[turn].reshape(-1, _LANES)
    cut = high - int(late.sum())
    rows[low:cut] = inner[~late]
    rows[cut:high] = inner[::-1][late[::-1]]
    parts = [(0, cut)] if cut else []
    return [*parts, (cut, len(rows))] if (times[rows[cut:]] != pivot).any() else parts


def _shorten(times: np.ndarray, rows: np.ndarray, pivot: float, width: int) -> tuple[int, int]:
    """Bring single rows to their side until a multiple of ``width`` is left between the two bounds given back."""
    low, high = 0, len(rows)
    for _ in range(len(rows) % width):
        if times[rows[low]] < pivot:
            low += 1
        else:
            high -= 1
            _swap(rows, low, high)
    return low, high


def _reading_turns(late: list[int], width: int) -> list[int]:
    """In which order stretches of ``width`` rows are read, given how many rows of each go to the back.

    The first and the last are kept aside to make room, and come at the end.
    """
    front, back = 1, len(late) - 2
    room_front = room_back = width
    turns = []
    while front <= back:
        if room_back < room_front:
            chosen, back, room_back = back, back - 1, room_back + width
        else:
            chosen, front, room_front = front, front + 1, room_front + width
        turns.append(chosen)
        room_front -= width - late[chosen]
        room_back -= late[chosen]
    return [*turns, 0, len(late) - 1]


def _networks(times: np.ndarray, rows: np.ndarray, parts: Parts) -> None:
    """Sort each part of ``rows`` in place by a bitonic network, several parts at a time.

    A shorter part has infinite times behind it, which no comparison moves.
    """
    start, end = np.array(parts, dtype=np.int64).reshape(-1, 2).T
    for first in range(0, len(parts), _NETWORKS_AT_A_TIME):
        several = slice(first, first + _NETWORKS_AT_A_TIME)
        position = start[several, None] + np.arange(_NETWORK)
        real = position < end[several, None]
        row = np.where(real, rows[np.minimum(position, len(rows) - 1)], 0)
        value = np.where(real, times[row], np.inf)
        for left, right in _comparisons():
            swap = value[:, left] > value[:, right]
            for array in (value, row):
                a, b = array[:, left], array[:, right]
                array[:, left], array[:, right] = np.where(swap, b, a), np.where(swap, a, b)
        rows[position[real]] = row[real]


def _comparisons() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The stages of the network: places that are compared with one another, the earlier and the later ones.

    Sorted stretches of equal width are merged: the second is compared in reverse, then halves with one another.
    """
    position = np.arange(_NETWORK)
    width = 2
    while width <= _NETWORK:
        other = position ^ (width - 1)
        yield position[position < other], other[position < other]
        half = width // 4
        while half:
            other = position ^ half
            yield position[position < other], other[position < other]
            half //= 2
        width *= 2
