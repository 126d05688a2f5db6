"""What becomes of a chunk for which there is no memory left: it is trained in halves.

A client's random numbers are keyed by its id, and clients of a chunk do not touch each other, so halves give the same
numbers up to the order in which uploads are added up.
"""

from __future__ import annotations

import re
from typing import Callable, TypeVar

import torch

from ..errors import OutOfMemory, ran_out
from ..method import Method
from ..sampling import Chunk, LaterChunk
from .sessions import SessionChunk

AnyChunk = Chunk | LaterChunk | SessionChunk
Result = TypeVar("Result")


def in_halves(train: Callable[[AnyChunk], Result], chunk: AnyChunk, method: Method) -> list[Result]:
    """Results of ``train`` for a chunk, or for its halves, or theirs, as far as memory demands; in order of clients.

    Clients may have written their rows of the method's state before memory ran out; they are put back first.

    Raises:
        OutOfMemory: if there is not enough for one client alone.
    """
    kept = {name: (rows, chunk.users.clamp(max=len(rows) - 1)) for name, rows in method.client_state.items()
            if len(rows)}  # a table may end before the newest users
    kept = {name: (rows, users, rows.index_select(0, users)) for name, (rows, users) in kept.items()}
    try:
        return [train(chunk)]
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        said = in_words(error)  # the error itself holds on to everything that its frames do
    for rows, users, values in kept.values():
        rows.index_copy_(0, users, values)
    kept.clear()
    if chunk.users.is_cuda:
        torch.cuda.empty_cache()
    clients = len(chunk.users)
    if clients == 1:
        raise OutOfMemory(f"{said}\nThat was while training one client alone (user {int(chunk.users)}).")
    return [result for half in (slice(clients // 2), slice(clients // 2, clients))
            for result in in_halves(train, chunk.part(half), method)]


def in_words(error: BaseException) -> str:
    """What such an error says, without where in PyTorch it was and its advice on the allocator."""
    if not isinstance(error, torch.OutOfMemoryError):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        return "out of memory: " + (f"Tried to allocate {int(asked[1]) / (1 << 30):.2f} GiB." if asked else
                                    f"{str(error) or 'no more is known'}.")
    words = [part for part in str(error).split(". ") if part.startswith(("Tried", "GPU", "CUDA"))]
    return f"out of GPU memory: {'. '.join(words or [str(error) or 'no more is known']).rstrip('.')}."
