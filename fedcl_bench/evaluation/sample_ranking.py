"""Ranking the last item of each session of a domain, or of one client that holds all, among all its items.

Of equal scores the item to find comes last, as in ``session_ranking.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator

import torch
from torch import Tensor

from ..plugin import checks
from ..plugin.backbone import Backbone
from ..training.silo_samples import SequentialModule
from ..training.silo_modules import histories
from ..data.stream import Ragged, Step
from ..plugin.silo import DomainModule
from ..plugin.metric import Catalogue, Metric
from ..kernels.ops import highest
from ..core.tuning import SIZES
from .metrics import measure
from .ranking import UserScores
from .session_ranking import ranked_lists


@dataclass(frozen=True)
class Ranking:
    """How sessions are ranked.

    Attributes:
        topk: list lengths.
        catalogue: with it, metrics of items are among them.
        mask_history: items before the one to find are not ranked, unless they are it.
    """

    topk: Iterable[int]
    metrics: Iterable[Metric]
    catalogue: Catalogue | None = None
    mask_history: bool = False


@torch.no_grad()
def rank_by_module(backbone: Backbone, module: DomainModule, step: Step, split: str, ranking: Ranking) -> UserScores:
    """Metrics of each session of a domain's split, by its number."""
    sessions, hook = step.sessions[split], "scores"
    if isinstance(module, SequentialModule):
        hook = "encode" if backbone.positionwise else "session_vectors"
    topk = sorted(set(ranking.topk))
    order = sessions.lengths.argsort(stable=True)  # so that little is padding
    ranks = torch.empty_like(order)
    lists = None if ranking.catalogue is None else order.new_empty(len(order), topk[-1])
    history = Ragged(sessions.start, sessions.items)
    with module.ranking():
        for chosen in order.split(SIZES.central_ranked):
            to_find, parts = scores_after(backbone, module, step, split, chosen)
            for part, scores in parts:
                checks.require_finite_scores(backbone, hook, scores, chosen[part])
                wanted = scores.gather(1, to_find[part, None])
                if ranking.mask_history:
                    scores[history.select(chosen[part])] = -torch.inf
                    scores.scatter_(1, to_find[part, None], wanted)
                ranks[chosen[part]] = (~(scores < wanted)).sum(1) - 1
                if lists is not None:
                    lists[chosen[part]] = highest(scores, topk[-1])
    numbers = torch.arange(len(order), device=order.device)
    values = measure(ranking.metrics, ranked_lists(ranks, topk, lists, ranking.catalogue), topk)
    return UserScores(numbers, values, lists)


@torch.no_grad()
def scores_after(backbone: Backbone, module: DomainModule, step: Step, split: str, chosen: Tensor
                 ) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """The items to find after some sessions of a domain's split, and scores of all of its items.

    Returns:
        (items, (n,); which of the sessions, (m,), and their scores, (m, items), a part of them at a time).
    """
    sessions = step.sessions[split]
    module.eval()
    if isinstance(module, SequentialModule):
        return module.scores_after(sessions, chosen)
    batch, wanted = histories(sessions, chosen, backbone.settings.max_length, module.fixed_length)
    scores = module.scores(batch)
    checks.check_tensor(backbone, "scores", scores, (len(chosen), step.n_items), "(B, items): of all of the domain")
    return wanted, iter([(torch.arange(len(chosen), device=chosen.device), scores)])
