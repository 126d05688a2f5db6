"""Threads over pieces of work, in order.

PyTorch's own threads split every single operation; the operations of a round are too short for that, and on a busy
machine its threads wait for each other. One thread per piece of work keeps all cores busy, and because results are
taken in the order of the pieces, numbers do not depend on how many threads there are.
"""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterator, Sequence, TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fedcl_bench")


def in_order(function: Callable[[Piece], Result], pieces: Sequence[Piece], device: torch.device) -> Iterator[Result]:
    """``map(function, pieces)`` on as many threads as PyTorch may use (``--threads``); on a GPU one after the other."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1 or device.type != "cpu":
        yield from map(function, pieces)
        return

    def alone(piece: Piece) -> Result:
        torch.set_num_threads(1)  # of this worker
        return function(piece)

    pool = _pool(threads)
    waiting: deque[Future] = deque()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of the calling thread, which would otherwise compete with the workers
    try:
        for piece in pieces:
            waiting.append(pool.submit(alone, piece))
            if len(waiting) > 2 * threads:  # bounds the memory of results not yet taken
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        torch.set_num_threads(before)
        for future in waiting:
            future.cancel()
