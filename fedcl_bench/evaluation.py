"""Ranking all items for every user, and the metrics of the resulting lists.

Metrics are computed per user and kept per user; means are taken last. Definitions are RecBole's: Recall = hits / |T_u|,
NDCG = DCG / IDCG with IDCG over min(|T_u|, K), HR, Precision = hits / K, MRR = 1 / rank of the first hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch
from torch import Tensor

from .backbone import Backbone
from .errors import UserError, unknown
from .method import Method
from .model import Snapshot, in_pieces, score_users
from .parallel import in_order
from .settings import setting
from .stream import Ragged

METRICS = ("ndcg", "recall", "hit", "precision", "mrr")
_SCORES_AT_ONCE = 1 << 19  # users x items scored together by one thread: 2 MiB of float32


@dataclass(frozen=True)
class EvaluationSettings:
    """How lists are judged (F3CRec, section 5.1; released code)."""

    topk: tuple[int, ...] = setting((20,), "list lengths K", low=1)
    valid_metric: str = setting("ndcg@20", "metric for early stopping and the best round, as NAME@K")
    valid_decimals: int = setting(5, "decimals of the validation metric before rounds are compared, as in the "
                                  "released code", low=1, high=17)


def parse_metric(text: str) -> tuple[str, int]:
    """``"ndcg@20"`` as ("ndcg", 20); raises UserError for anything else."""
    name, at, k = text.partition("@")
    if name not in METRICS:
        raise unknown("metric in setting 'valid_metric'", name, METRICS)
    if not at or not k.isdecimal() or int(k) < 1:
        raise UserError(f"setting 'valid_metric': found '{text}', accepted: NAME@K with K at least 1, as ndcg@20.")
    return name, int(k)


@dataclass(frozen=True)
class UserScores:
    """Metrics of each user's list.

    Attributes:
        users: ids of the users with at least one item to find, shape (n,).
        values: metric name, as ``ndcg@20``, to float64 of shape (n,).
    """

    users: Tensor
    values: dict[str, Tensor]

    def mean(self, metric: str) -> float:
        return float(self.values[metric].mean())


def list_metrics(hits: Tensor, relevant: Tensor, topk: Iterable[int]) -> dict[str, Tensor]:
    """Metrics of ranked lists.

    Args:
        hits: bool of shape (n, K): whether the item at each rank is one to find; K at least max(topk).
        relevant: number of items to find, shape (n,), at least 1.
        topk: list lengths.

    Returns:
        ``{"ndcg@20": float64 of shape (n,), ...}`` for every metric and length.
    """
    hits = hits.double()
    rank = torch.arange(1, hits.shape[1] + 1, dtype=torch.float64, device=hits.device)
    discount = 1.0 / torch.log2(rank + 1.0)
    ideal = torch.cumsum(discount, 0)
    result = {}
    for k in topk:
        top = hits[:, :k]
        found = top.sum(1)
        result[f"ndcg@{k}"] = (top * discount[:k]).sum(1) / ideal[relevant.clamp(max=k) - 1]
        result[f"recall@{k}"] = found / relevant
        result[f"hit@{k}"] = (found > 0).double()
        result[f"precision@{k}"] = found / k
        result[f"mrr@{k}"] = (top / rank[:k]).max(1).values
    return result


def rank_all(backbone: Backbone, model: Snapshot, target: Ragged, masks: Iterable[Ragged], topk: Iterable[int],
             method: Method | None = None) -> UserScores:
    """Rank every item known to the model for each user with items to find.

    Args:
        model: the tables to score with; candidates are all rows of its public tables.
        target: the items to find, per user.
        masks: items of each user that are not recommended.
        topk: list lengths.
        method: may rescore.
    """
    topk = sorted(set(topk))
    users = (target.lengths > 0).nonzero().flatten()
    n_items = model.n_items
    if topk[-1] > n_items:
        raise UserError(f"setting 'topk': found {topk[-1]}, accepted: at most the number of items, {n_items}.")
    masks = list(masks)

    @torch.no_grad()  # holds per thread
    def score(some: Tensor) -> dict[str, Tensor]:
        scores = score_users(backbone, model, some)
        if method is not None:
            scores = method.rescore(some, scores, model, backbone)
        for mask in masks:
            scores[mask.select(some)] = -torch.inf
        find = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        find[target.select(some)] = True
        value, item = scores.topk(topk[-1], dim=1)
        hits = find.gather(1, item) & (value > -torch.inf)
        return list_metrics(hits, find.sum(1), topk)

    pieces = list(in_pieces(users, n_items, _SCORES_AT_ONCE))
    parts = list(in_order(score, pieces, users.device))
    return UserScores(users, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
