"""What becomes of a chunk for which the GPU has no memory left: it is trained in halves.

A client's random numbers are keyed by its id, and clients of a chunk do not touch each other, so halves give the same
numbers up to the order in which uploads are added up.
"""

from __future__ import annotations

from typing import Callable, TypeVar

import torch

from ..errors import OutOfMemory
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
    except torch.OutOfMemoryError as error:
        said = str(error)  # the error itself holds on to everything that its frames do
    for rows, users, values in kept.values():
        rows.index_copy_(0, users, values)
    kept.clear()
    if chunk.users.is_cuda:
        torch.cuda.empty_cache()
    clients = len(chunk.users)
    if clients == 1:
        raise OutOfMemory(f"out of GPU memory while training one client alone (user {int(chunk.users)}): "
                          f"{first_words(said)}")
    return [result for half in (slice(clients // 2), slice(clients // 2, clients))
            for result in in_halves(train, chunk.part(half), method)]


def first_words(text: str) -> str:
    """What PyTorch says of an allocation, without its advice on the allocator."""
    words = [part for part in text.split(". ") if part.startswith(("Tried", "GPU", "CUDA"))]
    return ". ".join(words or [text or "no more is known"]).rstrip(".") + "."
