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
from itertools import islice
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
    """``map(function, pieces)`` on several threads inside ``workers``; on a GPU, or outside, one after the other.

    The others begin at once. The thread that takes the results is one of them: waking another takes about as long as a
    small piece.
    """
    threads = min(_workers, len(pieces))
    if threads <= 1 or device.type != "cpu":
        return map(function, pieces)
    pool, coming = _pool(threads - 1), iter(pieces)
    waiting: deque[tuple[Future, Piece]] = deque()

    def submit(some: int) -> None:
        for piece in islice(coming, some):
            waiting.append((pool.submit(copy_context().run, function, piece), piece))

    def results() -> Iterator[Result]:
        try:
            while waiting:
                while not waiting[0][0].done() and _do_one(function, waiting):
                    pass
                yield waiting.popleft()[0].result()
                submit(1)
        finally:
            for future, _ in waiting:
                future.cancel()

    submit(2 * threads)  # bounds the memory of results not yet taken
    return results()


def _do_one(function: Callable[[Piece], Result], waiting: deque[tuple[Future, Piece]]) -> bool:
    """Do the first piece that nobody has begun, here; False: there is none."""
    for number, (future, piece) in enumerate(waiting):
        if future.cancel():
            mine = Future()
            try:
                mine.set_result(function(piece))
            except Exception as error:  # comes when it is its turn
                mine.set_exception(error)
            waiting[number] = mine, piece
            return True
    return False


def even_pieces(values: Tensor, at_most: int) -> tuple[Tensor, ...]:
    """Values in pieces of at most ``at_most``: an even number of them, whose sizes differ by one at most, so that two
    threads end together. A quarter of that or less stays one piece."""
    if 4 * len(values) <= at_most:
        return (values,)
    return values.tensor_split(min(len(values), 2 * -(-len(values) // (2 * at_most))))
