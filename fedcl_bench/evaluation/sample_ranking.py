"""Ranking the last item of each session of one client that holds them all, among all items.

Of equal scores the item to find comes last, as in ``sessions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..plugin import checks
from ..plugin.backbone import Backbone
from ..training.silo_samples import encode, samples_at, score
from ..training.silo_modules import histories
from ..data.stream import Ragged, Sessions
from ..plugin.silo import DomainModule, ModuleBackbone
from ..plugin.backbone import ITEM
from ..plugin.metric import Catalogue, Metric
from ..plugin.state import Snapshot
from ..kernels.topk import highest
from ..plugin.sequential import Dropout, Sequence, SequentialBackbone
from ..core.tuning import SIZES
from .metrics import measure
from .ranking import UserScores
from .session_ranking import ranked_lists


def scores_after(backbone: SequentialBackbone, model: Snapshot, sequence: Sequence) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of all items after some sequences; yields as ``score`` does."""
    return score(backbone, encode(backbone, model, sequence, Dropout()), model.public[ITEM])


# The items to find after some sessions, and scores of all items, as ``scores_after`` yields them.
Scored = Callable[[Tensor], tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]]


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


def rank_samples(backbone: SequentialBackbone, model: Snapshot, sessions: Sessions, ranking: Ranking) -> UserScores:
    """Metrics of each session, by its number."""
    def scored(chosen: Tensor) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
        items, sequence = samples_at(backbone, sessions, chosen)
        return items[:, -1], scores_after(backbone, model, sequence)

    return _rank(scored, sessions, ranking, backbone, "encode" if backbone.positionwise else "session_vectors")


def rank_by_module(backbone: ModuleBackbone, module: DomainModule, n_items: int, sessions: Sessions, ranking: Ranking
                   ) -> UserScores:
    """The same of a domain's module and its items."""
    def scored(chosen: Tensor) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
        wanted, scores = scores_by_module(backbone, module, n_items, sessions, chosen)
        return wanted, iter([(torch.arange(len(chosen), device=chosen.device), scores)])

    with module.ranking():
        return _rank(scored, sessions, ranking, backbone, "scores")


@torch.no_grad()
def scores_by_module(backbone: ModuleBackbone, module: DomainModule, n_items: int, sessions: Sessions, chosen: Tensor
                     ) -> tuple[Tensor, Tensor]:
    """The items to find after some sessions of a domain, and scores of all of its items, (n, items)."""
    module.eval()
    batch, wanted = histories(sessions, chosen, backbone.settings.max_length, module.fixed_length)
    scores = module.scores(batch)
    checks.check_tensor(backbone, "scores", scores, (len(chosen), n_items), "(B, items): of all of the domain")
    return wanted, scores


@torch.no_grad()
def _rank(scored: Scored, sessions: Sessions, ranking: Ranking, plugin: Backbone, hook: str) -> UserScores:
    """Metrics of each session, given what makes its scores, a hook of the plugin."""
    topk = sorted(set(ranking.topk))
    order = sessions.lengths.argsort(stable=True)  # so that little is padding
    ranks = torch.empty_like(order)
    lists = None if ranking.catalogue is None else order.new_empty(len(order), topk[-1])
    history = Ragged(sessions.start, sessions.items)
    for chosen in order.split(SIZES.central_ranked):
        to_find, parts = scored(chosen)
        for part, scores in parts:
            checks.require_finite_scores(plugin, hook, scores, chosen[part])
            wanted = scores.gather(1, to_find[part, None])
            if ranking.mask_history:
                scores[history.select(chosen[part])] = -torch.inf
                scores.scatter_(1, to_find[part, None], wanted)
            ranks[chosen[part]] = (~(scores < wanted)).sum(1) - 1
            if lists is not None:
                lists[chosen[part]] = highest(scores, topk[-1])
    numbers = torch.arange(len(order), device=order.device)
    listed = ranked_lists(ranks, topk, lists, ranking.catalogue)
    return UserScores(numbers, measure(ranking.metrics, listed, topk))
