"""How much a run computes at once, by which threads are chosen before it."""

from __future__ import annotations

from .parts import Federation


def numbers_at_once(f: Federation) -> int:
    """The numbers that clients compute together in a local batch, about, from settings and data alone.

    Of clients of one user: their samples of a block in a local epoch, each with a vector. Of clients of many users: a
    batch of histories, each position with a vector.
    """
    dim = getattr(f.backbone.settings, "dim", 32)
    if f.cross_silo:
        longest = getattr(f.backbone.settings, "max_length", 1)
        histories = max((len(step.train.values) for step in f.stream.steps), default=0)
        return min(f.local.batch_size, histories) * longest * dim
    samples = max((len(step.train.values) for step in f.stream.steps), default=0) * (1 + f.local.negatives)
    return samples * dim
