"""Ranking the last item of each session of one client that holds them all, among all items.

Of equal scores the item to find comes last, as in ``sessions.py``.
"""

from __future__ import annotations

from typing import Iterable

import torch

from .. import contract
from ..client.central import encode, samples_at, score
from ..data.stream import Sessions
from ..layers import ITEM
from ..metric import Catalogue, Metric
from ..model import Snapshot
from ..ops.topk import highest
from ..sequential import Dropout, SequentialBackbone
from ..sizes import SIZES
from .metrics import measure
from .ranking import UserScores
from .sessions import ranked_lists


@torch.no_grad()
def rank_samples(backbone: SequentialBackbone, model: Snapshot, sessions: Sessions, topk: Iterable[int],
                 metrics: Iterable[Metric], catalogue: Catalogue | None = None) -> UserScores:
    """Metrics of each session, by its number; ``catalogue``: with it those of items are among them."""
    topk, table = sorted(set(topk)), model.public[ITEM]
    order = sessions.lengths.argsort(stable=True)  # so that little is padding
    ranks = torch.empty_like(order)
    lists = None if catalogue is None else order.new_empty(len(order), topk[-1])
    hook = "encode" if backbone.positionwise else "session_vectors"
    for chosen in order.split(SIZES.central_ranked):
        items, sequence = samples_at(backbone, sessions, chosen)
        session = encode(backbone, model, sequence, Dropout())
        for part, scores in score(backbone, session, table):
            contract.require_finite_scores(backbone, hook, scores, chosen[part])
            ranks[chosen[part]] = (~(scores < scores.gather(1, items[part, -1:]))).sum(1) - 1
            if lists is not None:
                lists[chosen[part]] = highest(scores, topk[-1])
    numbers = torch.arange(len(order), device=order.device)
    return UserScores(numbers, measure(metrics, ranked_lists(ranks, topk, lists, catalogue), topk))
