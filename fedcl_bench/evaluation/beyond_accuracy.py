"""Beyond one mean: whom and what a step's lists serve.

From the tested lists of a step, per user: how novel, popular and varied they are (``metrics.py`` has the formulas), and
how much of the new, old, popular and rare items to find is in them; and means and groups of users of these
(``summarise``). Coverage is RecBole's ``ItemCoverage``. Where popular items end, at 80 % of the interactions, is our
choice.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.stream import Ragged, Step, starts_of
from ..plugin.backbone import Backbone
from ..plugin.method import Method
from ..plugin.metric import Catalogue, RankedLists
from ..plugin.state import Snapshot
from .drift import Add, all_here
from .metrics import OF_ITEMS, Recall, sign_of
from .ranking import RankingTask, UserScores, had_in, rank_all
from .session_ranking import FULL

_OF_LISTS = tuple(metric.name for metric in OF_ITEMS)
_OF_ITEMS = ("new-items", "old-items", "popular-items", "rare-items")
OF_BLOCKS = ("interactions", "known", *_OF_LISTS, *(f"recall {kind}" for kind in _OF_ITEMS))
PER_USER = (*OF_BLOCKS, *(f"{FULL}recall {kind}" for kind in _OF_ITEMS))  # those with a prefix, of sessions alone
RECOMMENDED = "recommended"  # per item: how many lists it is in
HEAD = 0.8  # share of the interactions that popular items have
GROUPS = {"new-users": "users without data in an earlier block", "old-users": "users with data in an earlier block",
          "least-active": "the quarter of users with fewest training interactions in the block",
          "most-active": "the quarter of users with most training interactions in the block",
          "worst-decile": "the tenth of users with the worst value",
          "new-items": "items to find that no earlier block has", "old-items": "items to find of earlier blocks",
          "popular-items": "items to find among the fewest that have 80 % of the training interactions",
          "rare-items": "the other items to find"}
EXPOSURE, _EXPOSURE_TOPK = "er@", (5, 10)
_PAIRS = 1 << 20  # of user and item that are sorted at once, 8 MiB
Analysis = list[tuple[int, str, Tensor, Tensor]]


def catalogue_of(steps: Sequence[Step], vectors: Tensor, add: Add = all_here) -> Catalogue:
    """What is known of the items after some steps, all up to the one just trained, and their ``vectors`` (items, ...),
    by which distances are measured; ``add`` adds up over clients that are elsewhere."""
    n_items, users = steps[-1].n_items, torch.tensor([float(steps[-1].n_users)], dtype=torch.float64)
    sums = add({"counts": sum(torch.bincount(s.train.values, minlength=n_items).double() for s in steps),
                "owners": _owners(steps), "users": users})
    return Catalogue(sums["counts"], sums["owners"], float(sums["users"]), vectors.flatten(1))


@torch.no_grad()
def analyse_lists(steps: Sequence[Step], catalogue: Catalogue, users: Tensor, lists: Tensor, add: Add = all_here
                  ) -> Analysis:
    """What the lists of a step are like: rows of (step, kind, ids, values), kinds of ``OF_BLOCKS`` with users and
    ``RECOMMENDED`` with items. A user without an item of a kind to find is left out of that kind.

    The tested step is the last of ``steps``, after which the ``catalogue`` is. ``users`` (n,) have items to find in it,
    and ``lists`` are theirs, best first, int64 of shape (n, K), -1 where fewer are ranked; ``add`` as for
    ``catalogue_of``.
    """
    step, n_items = steps[-1], steps[-1].n_items
    rows = [_recommended(step, lists, add)]
    if not len(users):
        return rows + [(step.index, kind, users, users.double()) for kind in OF_BLOCKS]
    earlier = torch.zeros(step.n_users, device=users.device)
    for before in steps[:-1]:
        earlier[:before.n_users] += sum(before.split(name).lengths for name in ("train", "valid", "test"))
    values = {"interactions": step.train.lengths[users].double(), "known": (earlier[users] > 0).double(),
              **_properties(catalogue, lists)}
    rows += [(step.index, kind, users, value) for kind, value in values.items()]
    new = torch.arange(n_items, device=users.device) >= step.old_items
    popular, wanted = _popular(catalogue.counts), step.test.part(users).distinct()
    for kind, items in zip(_OF_ITEMS, (new, ~new, popular, ~popular)):
        having, recall = _recall(wanted.where(items[wanted.values]), lists)
        rows.append((step.index, f"recall {kind}", users[having], recall))
    return rows


@torch.no_grad()
def analyse_sessions(step: Step, catalogue: Catalogue, scores: UserScores, k: int, add: Add = all_here) -> Analysis:
    """What the lists of a stream of sessions are like, which ``scores`` have under full ranking: rows as those of
    ``analyse_lists``, for lists of length ``k``.

    In its single step nobody and nothing is new or old, so there is no kind ``known``. Kinds of items to find are of
    the ranking that the run is judged by, and of full ranking beside it if that is another.
    """
    users, lists = scores.users, scores.lists[:, :k]
    properties = {"interactions": step.train.lengths[users].double(), **_properties(catalogue, lists)}
    rows = [_recommended(step, lists, add), *((step.index, kind, users, each) for kind, each in properties.items())]
    popular = _popular(catalogue.counts)[step.test.select(users)[1]]  # a single item to find each
    for kind, chosen in zip(_OF_ITEMS, (popular[:0], popular[:0], popular, ~popular)):
        for prefix in ("", FULL):  # of any ranking
            if (values := scores.values.get(f"{prefix}recall@{k}")) is not None:
                of_kind = chosen.nonzero().flatten()
                rows.append((step.index, f"{prefix}recall {kind}", users[of_kind], values[of_kind]))
    return rows


def _recommended(step: Step, lists: Tensor, add: Add) -> tuple[int, str, Tensor, Tensor]:
    """In how many lists each item is."""
    shown = add({"shown": torch.bincount(lists[lists >= 0], minlength=step.n_items).double()})["shown"]
    return step.index, RECOMMENDED, torch.arange(step.n_items, device=lists.device), shown


def _owners(steps: Sequence[Step]) -> Tensor:
    """How many users have trained on each item, (items,), however often."""
    last, device = steps[-1], steps[-1].train.values.device
    rows, owners = sum(len(s.train.values) for s in steps), torch.zeros(last.n_items, device=device, dtype=torch.int64)
    for users in torch.arange(last.n_users, device=device).split(max(1, last.n_users * _PAIRS // max(rows, 1))):
        parts = (s.train.select(users[users < s.n_users]) for s in steps)
        pairs = torch.cat([row * last.n_items + item for row, item in parts]).unique()
        owners += torch.bincount(pairs % last.n_items, minlength=last.n_items)
    return owners.double()


def _properties(catalogue: Catalogue, lists: Tensor) -> dict[str, Tensor]:
    """The metrics of items that every run records as properties of its lists."""
    hits = torch.zeros(lists.shape, dtype=torch.bool, device=lists.device)  # which none of them looks at
    ranked = RankedLists(hits, hits.sum(1), lists, catalogue)
    return {metric.name: metric().values(ranked) for metric in OF_ITEMS}


def _popular(counts: Tensor) -> Tensor:
    """The fewest items that have ``HEAD`` of the interactions, bool of shape (items,)."""
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    popular = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    popular[order] = before < HEAD * counts.sum()
    return popular


def _recall(wanted: Ragged, lists: Tensor) -> tuple[Tensor, Tensor]:
    """(which users have ``wanted`` items, bool; for each of these the share of them that is in the list)."""
    row = wanted.owners
    hit = (lists[row] == wanted.values[:, None]).any(1).double()
    hits = torch.zeros(len(lists), dtype=torch.float64, device=lists.device).index_add_(0, row, hit)
    having = wanted.lengths > 0
    return having, hits[having] / wanted.lengths[having]


@torch.no_grad()
def exposure(backbone: Backbone, model: Snapshot, steps: Sequence[Step], targets: Tensor, method: Method,
             sample: Tensor | None = None) -> Analysis:
    """Exposure of the items that an attack promotes: rows of ``er@K``, the share of them in the list of each user who
    has not had them all (Rong et al., ICDE 2022).

    Lists rank all items that a user has had in no split of any step up to the one just trained. ``targets`` are the
    promoted items, (T,); ``sample`` says whether each user is evaluated, None: all are.
    """
    step, had = steps[-1], had_in(steps, steps[-1])
    at = torch.full((step.n_items,), -1, device=targets.device)
    at[targets] = torch.arange(len(targets), device=targets.device)
    of_targets = had.where(at[had.values] >= 0)
    missing = torch.ones(step.n_users, len(targets), dtype=torch.bool, device=targets.device)
    missing[of_targets.owners, at[of_targets.values]] = False
    if sample is not None:
        missing &= sample[:, None]
    to_find = Ragged(starts_of(missing.sum(1)), targets.expand(step.n_users, -1)[missing])
    topk = [k for k in _EXPOSURE_TOPK if k <= step.n_items]
    scores = rank_all(backbone, method, model, RankingTask(to_find, [had], topk, metrics=[Recall()]))
    return [(step.index, f"{EXPOSURE}{k}", scores.users, scores.values[f"recall@{k}"].double()) for k in topk]


class _Of(NamedTuple):
    """What was measured of users or items: their ids, each once, and a number of each."""

    ids: NDArray[Any]
    values: NDArray[Any]

    def at(self, ids: NDArray[Any]) -> NDArray[Any]:
        """The numbers of some of them."""
        order = np.argsort(self.ids)
        return self.values[order[np.searchsorted(self.ids, ids, sorter=order)]]


def summarise(tests: Iterable[tuple[int, int, UserScores]], analysis: Analysis, k: int) -> dict[str, Any]:
    """Means and groups for a record, from a run's tests and its analysis; lists have the length ``k``.

    Returns:
        ``{"lists": {"coverage@K": [per block], ...}, "groups": {group: {"users": [per block], metric: [per block]}}}``;
        None where a block has nobody of a group. Empty if the run has no such analysis.
    """
    kept: dict[int, dict[str, _Of]] = {}
    for t, kind, ids, values in analysis:
        kept.setdefault(t, {})[kind] = _Of(ids.cpu().numpy(), values.cpu().numpy())
    diagonal = [(kept[t], scores) for t, s, scores in tests if t == s and RECOMMENDED in kept.get(t, ())]
    if not diagonal:
        return {}
    # In a stream of sessions with sampled candidates the lists are those under full ranking.
    prefix = FULL if any(name.startswith(FULL) for name in diagonal[0][1].values) else ""
    lists = {f"{prefix}coverage@{k}": [float((kinds[RECOMMENDED].values > 0).mean()) for kinds, _ in diagonal]}
    lists |= {f"{prefix}{name}@{k}": [float(kinds[name].values.mean()) for kinds, _ in diagonal] for name in _OF_LISTS}
    lists |= {name: [float(kinds[name].values.mean()) if len(kinds[name].values) else None for kinds, _ in diagonal]
              for name in diagonal[0][0] if name.startswith(EXPOSURE)}
    groups: dict[str, dict[str, list]] = {}
    for kinds, scores in diagonal:
        for group, values in _groups(kinds, scores, k).items():
            rows = groups.setdefault(group, {name: [] for name in ("users", *values)})
            rows["users"].append(len(next(iter(values.values()))))
            for metric, of_users in values.items():
                rows[metric].append(float(of_users.mean()) if len(of_users) else None)
    return {"lists": lists, "groups": groups}


def _groups(kinds: dict[str, _Of], scores: UserScores, k: int) -> dict[str, dict[str, NDArray[Any]]]:
    """Group to metric to the values of its users, in one block."""
    users = scores.users.cpu().numpy()
    # Nobody is new or old in a stream of sessions.
    known = kinds["known"].at(users) if "known" in kinds else np.full(len(users), np.nan)
    order = np.argsort(kinds["interactions"].at(users), kind="stable")
    quarter, tenth = -(-len(users) // 4), -(-len(users) // 10)
    result: dict[str, dict[str, NDArray[Any]]] = {group: {} for group in GROUPS}
    for metric, tensor in scores.values.items():
        values = tensor.cpu().numpy()
        result["new-users"][metric], result["old-users"][metric] = values[known == 0.0], values[known > 0.0]
        result["least-active"][metric] = values[order[:quarter]]
        result["most-active"][metric] = values[order[len(users) - quarter:]]
        result["worst-decile"][metric] = values[(sign_of(metric) * values).argsort()[:tenth]]
    for kind, of_users in kinds.items():
        prefix, recall, group = kind.partition("recall ")
        if recall:
            result[group][f"{prefix}recall@{k}"] = of_users.values
    return result
