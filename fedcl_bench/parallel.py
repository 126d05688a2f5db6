"""Threads over pieces of work, in order.

PyTorch's own threads split every single operation; the operations of a round are too short for that, and on a busy
machine its threads wait for each other. One thread per piece of work keeps all cores busy, and because results are
taken in the order of the pieces, numbers do not depend on how many threads there are.
"""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Callable, Iterator, Sequence, TypeVar

import torch
from torch import Tensor

Piece = TypeVar("Piece")
Result = TypeVar("Result")


_workers = 1


@contextmanager
def workers() -> Iterator[None]:
    """Give PyTorch's threads (``--threads``) to ``in_order`` while the block runs; single operations then use one."""
    global _workers
    before, threads = _workers, torch.get_num_threads()
    _workers = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _workers = before
        torch.set_num_threads(threads)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fedcl_bench", initializer=torch.set_num_threads,
                              initargs=(1,))


def in_order(function: Callable[[Piece], Result], pieces: Sequence[Piece], device: torch.device) -> Iterator[Result]:
    """``map(function, pieces)`` on several threads inside ``workers``; on a GPU, or outside, one after the other."""
    threads = min(_workers, len(pieces))
    if threads <= 1 or device.type != "cpu":
        yield from map(function, pieces)
        return
    pool = _pool(threads)
    waiting: deque[Future] = deque()
    try:
        for piece in pieces:
            waiting.append(pool.submit(copy_context().run, function, piece))
            if len(waiting) > 2 * threads:  # bounds the memory of results not yet taken
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def even_pieces(values: Tensor, at_most: int) -> tuple[Tensor, ...]:
    """Values in pieces of at most ``at_most``: an even number of them, whose sizes differ by one at most, so that two
    threads end together. A quarter of that or less stays one piece."""
    if 4 * len(values) <= at_most:
        return (values,)
    return values.tensor_split(min(len(values), 2 * -(-len(values) // (2 * at_most))))
