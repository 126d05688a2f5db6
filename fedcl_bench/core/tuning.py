"""Tuned by measurement: how much work is done at once, from where on another layout is less work, quick imports.

Sizes change results by the order of floating-point sums at most, and bound memory. ``benchmarks/`` has the commands
that measure what depends on them.
"""

from __future__ import annotations

import functools
import gc
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator


@dataclass
class Sizes:
    """Read from ``SIZES`` where they are used, so that a test can set others."""

    # Numbers of stacked item rows per chunk of clients: a chunk's work then outweighs calling its operations, and
    # memory stays bounded.
    chunk_elements: int = 1 << 20
    own_loss_factor: int = 16  # so many times larger may be what a backbone's own loss makes on the way
    # Most clients per chunk that train on a session each; each holds half a megabyte of parameters, gradients, moments.
    chunk_sessions: int = 256
    chunk_parameters: int = 1 << 24  # numbers of such a chunk's dense parameters
    chunk_tables: int = 1 << 25  # the same with its item tables, if clients hold all rows
    kept_positives: int = 1 << 24  # interactions of a round up to which its chunks are kept to the next, 12 bytes each
    chunks_of_calls: int = 8  # about so many chunks are made of clients whose round is one call, for threads to share
    least_of_calls: int = 1 << 13  # samples that each of those chunks has at least
    padding_elements: int = 1 << 17  # padding worth less than the fixed cost of one more chunk
    # Items per sample, over a round's local batches, up to which scoring all items is less work than copying the rows
    # of the samples.
    dense_items: int = 16
    dense_items_compiled: int = 3  # the same where compiled kernels read rows in place, for any number of batches
    factored_width: int = 4  # numbers that a sample counts as where rows are not copied, at least
    updates_per_number: int = 8  # or one for so many updates of a client, each of which keeps a number per sample
    dense_cost: int = 4  # numbers that an item counts as which a client scores in a local batch it sits out
    weighted_batches: int = 4  # local batches up to which a client scores all rows it holds in each, with weights
    most_updates: int = 128  # local batches in a round up to which every update is kept apart, not added to copies
    pulled_tables: int = 1 << 25  # numbers of item tables, one for each local batch, that a compiled round is given
    # Clients x items of a chunk up to which a table finds the local rows of one item; beyond, a sort.
    slot_table: int = 1 << 20
    threaded: int = 1 << 20  # numbers computed at once from which a run takes several threads by itself
    short_round: int = 1 << 18  # samples of a round below which threads would only wait in a method's own loss
    scored: int = 1 << 19  # users x items scored together by one thread, 2 MiB of float32
    product_items: int = 1 << 14  # items from which scores that are one matrix product are of more users together
    product_users: int = 64  # so many users then, if that is at most ``product_scores`` numbers
    product_scores: int = 1 << 25  # 128 MiB
    ranked_scores: int = 1 << 25  # clients x items scored at once for a method that ranks items in training, 128 MiB
    items_per_candidate: int = 64  # items for each sampled candidate from which candidates are scored alone
    central_scored: int = 32  # samples of one client whose scores of all items are made together
    central_encoded: int = 128  # samples of one client, of similar lengths, that are encoded together in training
    central_ranked: int = 256  # samples of one client that are ranked together
    session_users: int = 64  # users whose sessions are ranked together by one thread
    similarities: int = 1 << 22  # queries x prototypes compared at once, 16 MiB
    queries: int = 512  # of those, at most so many queries
    compared: int = 1 << 23  # clients x numbers handed together to an aggregator that compares clients, 32 MiB
    normals: int = 1 << 16  # normal numbers drawn at once, which stay in the cache
    adapted: int = 1024  # rows of texts that go through an adapter's experts together
    clustered: int = 2048  # points that one thread assigns to clusters at a time
    report_every: float = 1.0  # seconds of an epoch between two progress reports, after which it can be stopped


SIZES = Sizes()


@functools.cache
def quick_optimisers() -> None:
    """Let PyTorch's Adam and SGD take their steps without importing ``torch._dynamo``, which only compiled ones need:
    1.4 s at the first optimiser of a process."""
    import torch
    from torch.optim import SGD, Adam, Optimizer

    if "torch._dynamo" in sys.modules:
        return
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
        if plain := getattr(method, "__wrapped__", None):
            setattr(plain, "__dynamo_disable", plain)  # what it would be wrapped in at its first call
    for kind in (Adam, SGD):
        if plain := getattr(kind.step, "__wrapped__", None):
            kind.step = torch.no_grad()(plain)


@contextmanager
def importing() -> Iterator[None]:
    """While PyTorch is imported, and ever after, Python does not search its 200,000 objects for unreachable ones."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
