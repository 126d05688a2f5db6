"""Beyond one mean: whom and what a step's lists serve.

From the tested lists of a step, per user: how novel, popular and varied they are, and how much of the new, old, popular
and rare items to find is in them. ``runs/records.py`` makes means and groups of users of these (``summarise``).

Sources: novelty as mean self-information, -log2 of the share of users who have the item (Zhou et al., PNAS 2010);
intra-list distance, the mean of 1 - cosine over a list's pairs (Ziegler et al., WWW 2005); coverage and average
popularity as RecBole's ``ItemCoverage`` and ``AveragePopularity``. Where popular items end, at 80 % of the
interactions, is our choice.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data.stream import Step
from ..model import Snapshot
from .drift import Add
from .ranking import UserScores

_OF_LISTS = ("novelty", "popularity", "distance")
_OF_ITEMS = ("new-items", "old-items", "popular-items", "rare-items")
PER_USER = ("interactions", "known", *_OF_LISTS, *(f"recall {kind}" for kind in _OF_ITEMS))
RECOMMENDED = "recommended"  # per item: how many lists it is in
HEAD = 0.8  # share of the interactions that popular items have
GROUPS = {"new-users": "users without data in an earlier block", "old-users": "users with data in an earlier block",
          "least-active": "the quarter of users with fewest training interactions in the block",
          "most-active": "the quarter of users with most training interactions in the block",
          "worst-decile": "the tenth of users with the lowest value",
          "new-items": "items to find that no earlier block has", "old-items": "items to find of earlier blocks",
          "popular-items": "items to find among the fewest that have 80 % of the training interactions",
          "rare-items": "the other items to find"}
Analysis = list[tuple[int, str, Tensor, Tensor]]


@torch.no_grad()
def analyse_lists(steps: Sequence[Step], model: Snapshot, users: Tensor, lists: Tensor, add: Add | None = None
                  ) -> Analysis:
    """What the lists of a step are like.

    Args:
        steps: all up to the tested one, which is the last.
        model: that made the lists.
        users: ids of the users with items to find in it, shape (n,).
        lists: their items, best first, int64 of shape (n, K), -1 where fewer are ranked.
        add: adds up over clients that are elsewhere.

    Returns:
        Rows of (step, kind, ids, values): kinds of ``PER_USER`` with users, ``RECOMMENDED`` with items. A user without
        an item of a kind to find is left out of that kind.
    """
    step, n_items = steps[-1], steps[-1].n_items
    counts = sum(torch.bincount(s.train.values, minlength=n_items).double() for s in steps)
    owners = _owners(steps)
    shown = torch.bincount(lists[lists >= 0], minlength=n_items).double()
    everybody = torch.tensor([float(step.n_users)], dtype=torch.float64, device=lists.device)
    if add is not None:
        sums = add({"counts": counts, "owners": owners, "shown": shown, "users": everybody})
        counts, owners, shown, everybody = (sums[name] for name in ("counts", "owners", "shown", "users"))
    rows: Analysis = [(step.index, RECOMMENDED, torch.arange(n_items, device=lists.device), shown)]
    if not len(users):
        return rows + [(step.index, kind, users, users.double()) for kind in PER_USER]
    earlier = torch.zeros(step.n_users, device=users.device)
    for before in steps[:-1]:
        earlier[:before.n_users] += sum(before.split(name).lengths for name in ("train", "valid", "test"))
    values = {"interactions": step.train.lengths[users].double(), "known": (earlier[users] > 0).double(),
              "novelty": _mean(_information(owners, everybody), lists), "popularity": _mean(counts, lists),
              "distance": _distance(next(iter(model.public.values())), lists)}
    rows += [(step.index, kind, users, value) for kind, value in values.items()]
    new = torch.arange(n_items, device=users.device) >= step.old_items
    popular = _popular(counts)
    for kind, items in zip(_OF_ITEMS, (new, ~new, popular, ~popular)):
        rows.append((step.index, f"recall {kind}", *_recall(step, users, lists, items)))
    return rows


def _owners(steps: Sequence[Step]) -> Tensor:
    """How many users have trained on each item, (items,), however often."""
    n_items = steps[-1].n_items
    pairs = [torch.repeat_interleave(s.train.lengths) * n_items + s.train.values for s in steps]
    return torch.bincount(torch.cat(pairs).unique() % n_items, minlength=n_items).double()


def _information(owners: Tensor, users: Tensor) -> Tensor:
    """-log2 of the share of users who have each item; an item that nobody has counts as had by half a user."""
    return -(owners.clamp(min=0.5) / users).log2()


def _mean(values: Tensor, lists: Tensor) -> Tensor:
    """Mean over each list of a value per item; 0 for an empty list."""
    ranked = lists >= 0
    return torch.where(ranked, values[lists.clamp(min=0)], 0.0).sum(1) / ranked.sum(1).clamp(min=1)


def _distance(table: Tensor, lists: Tensor) -> Tensor:
    """Mean 1 - cosine over the pairs of each list; 0 for lists of fewer than two items."""
    vectors = torch.nn.functional.normalize(table.flatten(1).double(), dim=1)
    parts = []
    for piece in lists.split(256):
        rows = torch.where((piece >= 0)[..., None], vectors[piece.clamp(min=0)], 0.0)
        length = (piece >= 0).sum(1).double()
        norms = rows.square().sum((1, 2))  # the pairs of an item with itself
        cosines = rows.sum(1).square().sum(1) - norms
        pairs = (length * (length - 1)).clamp(min=1)
        parts.append(torch.where(length > 1, 1.0 - cosines / pairs, 0.0))
    return torch.cat(parts)


def _popular(counts: Tensor) -> Tensor:
    """The fewest items that have ``HEAD`` of the interactions, bool of shape (items,)."""
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    popular = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    popular[order] = before < HEAD * counts.sum()
    return popular


def _recall(step: Step, users: Tensor, lists: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """(users with such items to find, the share of those items that is in their lists)."""
    row, item = step.test.select(users)
    row, item = row[items[item]], item[items[item]]
    hit = (lists[row] == item[:, None]).any(1).double()
    wanted = torch.bincount(row, minlength=len(users))
    hits = torch.zeros(len(users), dtype=torch.float64, device=users.device).index_add_(0, row, hit)
    having = wanted > 0
    return users[having], hits[having] / wanted[having]


def summarise(tests: Iterable[tuple[int, int, UserScores]], analysis: Analysis, k: int) -> dict[str, Any]:
    """Means and groups for a record, from a run's tests and its analysis.

    Args:
        k: length of the lists.

    Returns:
        ``{"lists": {"coverage@K": [per block], ...}, "groups": {group: {"users": [per block], metric: [per block]}}}``;
        None where a block has nobody of a group. Empty if the run has no such analysis.
    """
    kept: dict[int, dict[str, pd.Series]] = {}
    for t, kind, ids, values in analysis:
        kept.setdefault(t, {})[kind] = pd.Series(values.cpu().numpy(), index=ids.cpu().numpy())
    diagonal = [(kept[t], scores) for t, s, scores in tests if t == s and RECOMMENDED in kept.get(t, ())]
    if not diagonal:
        return {}
    lists = {f"coverage@{k}": [float((kinds[RECOMMENDED] > 0).mean()) for kinds, _ in diagonal]}
    lists |= {f"{name}@{k}": [float(kinds[name].mean()) for kinds, _ in diagonal] for name in _OF_LISTS}
    groups: dict[str, dict[str, list]] = {}
    for kinds, scores in diagonal:
        for group, values in _groups(kinds, scores, k).items():
            rows = groups.setdefault(group, {name: [] for name in ("users", *values)})
            rows["users"].append(len(next(iter(values.values()))))
            for metric, of_users in values.items():
                rows[metric].append(float(of_users.mean()) if len(of_users) else None)
    return {"lists": lists, "groups": groups}


def _groups(kinds: dict[str, pd.Series], scores: UserScores, k: int) -> dict[str, dict[str, pd.Series]]:
    """Group to metric to the values of its users, in one block."""
    users = scores.users.cpu().numpy()
    result: dict[str, dict[str, pd.Series]] = {group: {} for group in GROUPS}
    for metric, values in scores.values.items():
        for group, of_users in _user_groups(kinds, users, pd.Series(values.cpu().numpy(), index=users)).items():
            result[group][metric] = of_users
    for group in _OF_ITEMS:
        result[group][f"recall@{k}"] = kinds[f"recall {group}"]
    return result


def _user_groups(kinds: dict[str, pd.Series], users: np.ndarray, values: pd.Series) -> dict[str, pd.Series]:
    """A metric's values of the users of each group."""
    known, activity = kinds["known"].loc[users], kinds["interactions"].loc[users]
    order = np.argsort(activity.to_numpy(), kind="stable")
    quarter, tenth = -(-len(users) // 4), -(-len(users) // 10)
    return {"new-users": values[known.to_numpy() == 0.0], "old-users": values[known.to_numpy() > 0.0],
            "least-active": values.iloc[order[:quarter]], "most-active": values.iloc[order[len(users) - quarter:]],
            "worst-decile": values.sort_values().iloc[:tenth]}
