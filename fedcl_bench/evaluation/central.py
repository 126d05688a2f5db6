"""Ranking the last item of each session of one client that holds them all, among all items.

Of equal scores the item to find comes last, as in ``sessions.py``.
"""

from __future__ import annotations

from typing import Iterable, Iterator

import torch
from torch import Tensor

from .. import contract
from ..client.central import encode, samples_at, score
from ..data.stream import Ragged, Sessions
from ..layers import ITEM
from ..metric import Catalogue, Metric
from ..model import Snapshot
from ..ops.topk import highest
from ..sequential import Dropout, Sequence, SequentialBackbone
from ..sizes import SIZES
from .metrics import measure
from .ranking import UserScores
from .sessions import ranked_lists


def scores_after(backbone: SequentialBackbone, model: Snapshot, sequence: Sequence) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of all items after some sequences; yields as ``score`` does."""
    return score(backbone, encode(backbone, model, sequence, Dropout()), model.public[ITEM])


@torch.no_grad()
def rank_samples(backbone: SequentialBackbone, model: Snapshot, sessions: Sessions, topk: Iterable[int],
                 metrics: Iterable[Metric], catalogue: Catalogue | None = None, mask_history: bool = False
                 ) -> UserScores:
    """Metrics of each session, by its number.

    Args:
        catalogue: with it, metrics of items are among them.
        mask_history: items before the one to find are not ranked, unless they are it.
    """
    topk = sorted(set(topk))
    order = sessions.lengths.argsort(stable=True)  # so that little is padding
    ranks = torch.empty_like(order)
    lists = None if catalogue is None else order.new_empty(len(order), topk[-1])
    history = Ragged(sessions.start, sessions.items)
    hook = "encode" if backbone.positionwise else "session_vectors"
    for chosen in order.split(SIZES.central_ranked):
        items, sequence = samples_at(backbone, sessions, chosen)
        for part, scores in scores_after(backbone, model, sequence):
            contract.require_finite_scores(backbone, hook, scores, chosen[part])
            wanted = scores.gather(1, items[part, -1:])
            if mask_history:
                scores[history.select(chosen[part])] = -torch.inf
                scores.scatter_(1, items[part, -1:], wanted)
            ranks[chosen[part]] = (~(scores < wanted)).sum(1) - 1
            if lists is not None:
                lists[chosen[part]] = highest(scores, topk[-1])
    numbers = torch.arange(len(order), device=order.device)
    return UserScores(numbers, measure(metrics, ranked_lists(ranks, topk, lists, catalogue), topk))
