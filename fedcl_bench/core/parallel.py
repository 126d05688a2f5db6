"""Threads over pieces of work, in order.

PyTorch's own threads split every single operation; the operations of a round are too short for that, and on a busy
machine its threads wait for each other. One thread per piece of work keeps all cores busy, and because results are
taken in the order of the pieces, numbers do not depend on how many threads there are.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from threading import Condition
from typing import Callable, Iterator, Sequence, TypeVar

import torch
from torch import Tensor

from .tuning import SIZES

Piece = TypeVar("Piece")
Result = TypeVar("Result")


_workers = 1


def threads_for(numbers: int, cores: int) -> int:
    """How many threads a run takes that was not told; no number of its result depends on it. The run computes so many
    numbers at once (``federation/parts.py``) and may use so many cores.

    Small work takes one: its operations are over before others have begun, and beside other processes threads wait for
    each other. Of whole jobs on two cores a second thread gains 17 % on FedRAP (7,400,000 numbers) and 9 % on FedMF;
    a small FFMSR run (640) takes a quarter longer with it, and twice as long beside two busy loops
    (``benchmarks/threads.py``). FFMSR with 20,480 numbers gains 13 % on an idle machine and loses as much on a busy
    one, so it has one thread; with 1,310,720 it gains 23 % and loses 12.
    """
    return 1 if numbers < SIZES.threaded else cores


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
    line = _Line(function, pieces, threads)
    line.call_others()
    return line.results()


class _Line:
    """Pieces of work that threads take one after the other.

    At most twice as many as there are threads are begun and not yet taken: that bounds the memory of results. The other
    threads go on until there is none they may begin, and are called again when there is.
    """

    def __init__(self, function: Callable[[Piece], Result], pieces: Sequence[Piece], threads: int):
        self.function, self.pieces, self.threads = function, pieces, threads
        self.begun = self.taken = self.others = 0
        self.done: dict[int, tuple[Result | None, BaseException | None]] = {}
        self.changed = Condition()

    def _end(self) -> int:
        """Up to which piece they may begin."""
        return min(len(self.pieces), self.taken + 2 * self.threads)

    def _begin(self, other: bool) -> int | None:
        """The number of the next piece; None: there is none now, and ``other`` threads stop asking."""
        with self.changed:
            if self.begun >= self._end():
                self.others -= other
                return None
            self.begun += 1
            return self.begun - 1

    def _do(self, number: int, errors: type[BaseException]) -> None:
        """A piece; an error comes when it is its turn."""
        try:
            result = self.function(self.pieces[number]), None
        except errors as error:
            result = None, error
        with self.changed:
            self.done[number] = result
            self.changed.notify()

    def _help(self) -> None:
        """What another thread does."""
        while (number := self._begin(True)) is not None:
            self._do(number, BaseException)

    def call_others(self) -> None:
        """Let other threads help, if there is work for them."""
        with self.changed:
            wanted = max(0, min(self.threads - 1 - self.others, self._end() - self.begun))
            self.others += wanted
        for _ in range(wanted):
            _pool(self.threads - 1).submit(copy_context().run, self._help)

    def results(self) -> Iterator[Result]:
        """What becomes of the pieces, in order."""
        try:
            for number in range(len(self.pieces)):
                while number not in self.done:
                    if (mine := self._begin(False)) is not None:
                        self._do(mine, Exception)  # but Ctrl-C at once
                        continue
                    with self.changed:
                        self.changed.wait_for(lambda: number in self.done)
                if self.done[number][1] is not None:
                    raise self.done.pop(number)[1]
                yield self.done.pop(number)[0]
                self.taken += 1
                self.call_others()
        finally:
            self.pieces = self.pieces[:0]  # none is begun any more


def even_pieces(values: Tensor, at_most: int) -> tuple[Tensor, ...]:
    """Values in pieces of at most ``at_most``: an even number of them, whose sizes differ by one at most, so that two
    threads end together. A quarter of that or less stays one piece."""
    if 4 * len(values) <= at_most:
        return (values,)
    return values.tensor_split(min(len(values), 2 * -(-len(values) // (2 * at_most))))
