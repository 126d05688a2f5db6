"""The suite's own metrics of ranked lists, what evaluation can be set to, and how all metrics are taken.

Of every list length, per user; means are taken last. Those of hits are in every run. Those of items are in every run
too, as properties of the lists (``beyond_accuracy.py``), and per user where ``extra_metrics`` names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.settings import setting
from ..data.settings import NOT_IN_EPOCHS
from ..plugin.metric import Metric, RankedLists


class NDCG(Metric):
    """DCG / IDCG: the sum of 1 / log2(1 + rank) over the hits, divided by its value were the items to find first; of
    these there are min(|T_u|, K) places."""

    name = "ndcg"
    title = "normalised discounted cumulative gain"
    reference = "Järvelin and Kekäläinen, TOIS 2002; RecBole's NDCG"

    def values(self, lists: RankedLists) -> Tensor:
        discount = 1.0 / torch.log2(_ranks(lists) + 1.0)
        ideal = torch.cumsum(discount, 0)
        return (lists.hits.double() * discount).sum(1) / ideal[lists.relevant.clamp(max=lists.k) - 1]


class Recall(Metric):
    """Hits / |T_u|: the share of the items to find that are in the list."""

    name = "recall"
    title = "share of the items to find that are in the list"
    reference = "RecBole's Recall"

    def values(self, lists: RankedLists) -> Tensor:
        return lists.hits.double().sum(1) / lists.relevant


class Hit(Metric):
    """1 if an item to find is in the list, else 0 (hit rate, HR)."""

    name = "hit"
    title = "whether an item to find is in the list (HR)"
    reference = "RecBole's Hit"

    def values(self, lists: RankedLists) -> Tensor:
        return (lists.hits.sum(1) > 0).double()


class Precision(Metric):
    """Hits / K: the share of the list that is to be found."""

    name = "precision"
    title = "share of the list that is to be found"
    reference = "RecBole's Precision"

    def values(self, lists: RankedLists) -> Tensor:
        return lists.hits.double().sum(1) / lists.k


class MRR(Metric):
    """1 / rank of the first hit; 0 without a hit."""

    name = "mrr"
    title = "reciprocal rank of the first hit"
    reference = "RecBole's MRR"

    def values(self, lists: RankedLists) -> Tensor:
        return (lists.hits.double() / _ranks(lists)).max(1).values


class Novelty(Metric):
    """Mean over the list of -log2 of the share of users who have trained on the item. An item that nobody has counts as
    had by half a user; an empty list has 0."""

    name = "novelty"
    title = "mean self-information of the list's items"
    reference = "Zhou et al., PNAS 2010"
    of_items = True

    def values(self, lists: RankedLists) -> Tensor:
        known = lists.catalogue
        return _mean(-(known.owners.clamp(min=0.5) / known.users).log2(), lists.items)


class Popularity(Metric):
    """Mean over the list of the item's training interactions up to the step trained; 0 for an empty list."""

    name = "popularity"
    title = "mean training interactions of the list's items"
    reference = "RecBole's AveragePopularity"
    of_items = True

    def values(self, lists: RankedLists) -> Tensor:
        return _mean(lists.catalogue.counts, lists.items)


class Distance(Metric):
    """Mean of 1 - cosine over the pairs of a list's items, by rows of the public item table; 0 for fewer than two
    items."""

    name = "distance"
    title = "intra-list distance: mean 1 - cosine over the list's pairs"
    reference = "Ziegler et al., WWW 2005"
    of_items = True

    def values(self, lists: RankedLists) -> Tensor:
        table, items = lists.catalogue.vectors, lists.items.clamp(min=0)
        shown = torch.bincount(items.flatten(), minlength=len(table)) > 0  # of many items few are in a list
        vectors, row = torch.nn.functional.normalize(table[shown].double(), dim=1), shown.cumsum(0) - 1
        parts = []
        for piece in lists.items.split(256):
            rows = torch.where((piece >= 0)[..., None], vectors[row[piece.clamp(min=0)]], 0.0)
            length = (piece >= 0).sum(1).double()
            norms = rows.square().sum((1, 2))  # the pairs of an item with itself
            cosines = rows.sum(1).square().sum(1) - norms
            pairs = (length * (length - 1)).clamp(min=1)
            parts.append(torch.where(length > 1, 1.0 - cosines / pairs, 0.0))
        return torch.cat(parts)


def _ranks(lists: RankedLists) -> Tensor:
    """1, ..., K."""
    return torch.arange(1, lists.k + 1, dtype=torch.float64, device=lists.hits.device)


def _mean(values: Tensor, lists: Tensor) -> Tensor:
    """Mean over each list of a value per item; 0 for an empty list."""
    ranked = lists >= 0
    return torch.where(ranked, values[lists.clamp(min=0)], 0.0).sum(1) / ranked.sum(1).clamp(min=1)


OF_EVERY_RUN: tuple[type[Metric], ...] = (NDCG, Recall, Hit, Precision, MRR)
OF_ITEMS: tuple[type[Metric], ...] = (Novelty, Popularity, Distance)
SHIPPED = (*OF_EVERY_RUN, *OF_ITEMS)
RATING_ERRORS = ("mae", "rmse")  # of backbones that predict ratings (see ``ranking.py``)
DEFAULT: tuple[Metric, ...] = tuple(cls() for cls in OF_EVERY_RUN)


def sign_of(metric: str) -> int:
    """1 of a metric of which more is better, -1 of an error."""
    return -1 if metric in RATING_ERRORS else 1


@dataclass(frozen=True)
class EvaluationSettings:
    """How lists are judged (F3CRec, section 5.1; released code)."""

    topk: tuple[int, ...] = setting((20,), "list lengths K", low=1)
    valid_metric: str = setting("ndcg@20", "metric for early stopping and the best round, as NAME@K; rmse or "
                                 "mae, of which the lowest is best, where ratings are predicted")
    extra_metrics: tuple[str, ...] = setting((), "metrics of tests besides those of every run, by name: of plugins, or "
                                             "novelty, popularity, distance")
    valid_decimals: int = setting(5, "decimals of the validation metric before rounds are compared, as in the "
                                  "released code", low=1, high=17)
    evaluate_users: int = setting(0, "validate and test about so many users, drawn by the run's seed, each by its own "
                                  "number; 0: all", low=0, only_if=(*NOT_IN_EPOCHS, "evaluate_users!=0"))
    drift_users: int = setting(10_000, "users by whom a block's changes of ranks are measured (user_shift, "
                               "item_rank_change): of more clients about so many, drawn likewise; 0: none, not "
                               "measured", low=0, only_if=("stream=blocks", "drift_users!=10000"))
    candidates: str = setting("all", "rank all items, or a user's items to find among sampled ones; numbers of the two "
                              "cannot be compared", choices=("all", "sampled"), only_if=NOT_IN_EPOCHS)
    sampled_candidates: int = setting(99, "sampled items per user, besides the one to find. In a static stream all "
                                      "different, and none the user ever has; in a stream of sessions drawn with "
                                      "replacement among the items the user does not train on", low=1,
                                      only_if="candidates=sampled")
    candidate_lists: str = setting("separate", "validation and test have different sampled items (PFedRec, GPFedRec), "
                                   "or the same (FedRAP)", choices=("separate", "shared"),
                                   only_if=("candidates=sampled", "stream!=sessions"))
    candidate_draw: str = setting("once", "sampled items are drawn once per seed, so that methods and rounds are "
                                  "comparable, or anew at every evaluation (FCUCR's released code)",
                                  choices=("once", "redraw"), only_if=("stream=sessions", "candidates=sampled"))
    early_session: bool = setting(False, "in every validation, also find the last item of each client's first training "
                                  "session: its forgetting curve (FCUCR, Figure 2a)",
                                  only_if=("stream=sessions", "topology!=central"))
    mask_history: bool = setting(False, "items that a user has had before (of blocks: in an earlier block) are not "
                                 "recommended, but for those to find; F3CRec's code recommends them, as RecBole does "
                                 "to sequential models",
                                 only_if=("stream=blocks|domains", "stream=domains or mask_history"))


def parse_metric(text: str) -> tuple[str, int]:
    """``"ndcg@20"`` as ("ndcg", 20), whatever metrics there are, and an error of ratings with 0; raises UserError for
    anything else."""
    if text in RATING_ERRORS:
        return text, 0
    name, at, k = text.partition("@")
    if not name or not at or not k.isdecimal() or int(k) < 1:
        raise UserError(f"setting 'valid_metric': found '{text}', accepted: NAME@K with K at least 1, as ndcg@20.")
    return name, int(k)


def is_share(metric: str) -> bool:
    """Whether a recorded metric, as ``all:hit@10``, is known to lie in [0, 1] for every user."""
    name = metric.partition("@")[0].rpartition(":")[2]
    return any(cls.name == name for cls in OF_EVERY_RUN)


def measure(metrics: Iterable[Metric], lists: RankedLists, topk: Sequence[int]) -> dict[str, Tensor]:
    """Metrics of ranked lists by length, then by metric: ``{"ndcg@20": float64 of shape (n,), ...}``.

    The lists are as long as the largest of the ascending ``topk``, or longer; without items, metrics of items are left
    out. Raises PluginError for values that are not (n,) floating and finite numbers.
    """
    from ..plugin import checks

    metrics, result = list(metrics), {}
    for k in topk:
        top = lists.top(k)
        hits = top.without_items()
        for metric in metrics:
            if not metric.of_items or top.items is not None:
                values = metric.values(top if metric.of_items else hits)
                checks.check_metric(metric, values, len(hits.relevant))
                result[f"{metric.name}@{k}"] = values.double()
    return result
