"""Ranking all items for every user, of which ``metrics.py`` has what is said; and how far predicted ratings are from
those that users gave, which is no metric of lists, and of which less is better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Sequence

import torch
from torch import Tensor

from .. import rng
from ..plugin import checks
from ..plugin.backbone import Backbone
from ..data.files.recbole_files import SPLITS
from ..data.stream import Ragged, Step
from ..core.errors import UserError
from ..plugin.method import Method
from ..plugin.metric import Catalogue, Metric, RankedLists
from ..plugin.state import Snapshot, in_pieces, score_pairs, score_users
from ..kernels import ops
from ..core.parallel import in_order
from ..training.sampling import padded
from ..core.tuning import SIZES
from .metrics import DEFAULT, RATING_ERRORS, EvaluationSettings, measure


@dataclass(frozen=True)
class UserScores:
    """Metrics of each user's list."""

    users: Tensor  # ids of the users with at least one item to find, shape (n,)
    values: dict[str, Tensor]  # metric name, as ``ndcg@20``, to float64 of shape (n,)
    # The items of each user's list, best first, int64 of shape (n, K), -1 where fewer are ranked; None: not asked for.
    lists: Tensor | None = None

    def mean(self, metric: str) -> float:
        return float(self.values[metric].mean())


def draw_candidates(step: Step, settings: EvaluationSettings, seed: int, users: Tensor | None = None,
                    masks: Sequence[Ragged] = ()) -> dict[str, Tensor]:
    """The sampled items of users for ``valid`` and ``test`` (protocol of PFedRec, GPFedRec and FedRAP), each int64 of
    shape (users, sampled_candidates); empty if all items are ranked.

    Uniform without replacement over the items that the user has in no split of the step and in none of the ``masks``;
    the same in every round and for every method. A user with fewer such items gets all of them, separate lists half of
    them each; the rest of the row is -1. They are drawn for some users, which changes nobody's; None: for all.
    """
    if settings.candidates == "all":
        return {}
    n, several = settings.sampled_candidates, settings.candidate_lists == "separate"
    drawn = min(2 * n if several else n, step.n_items)
    parts = []
    own = [step.split(split) for split in SPLITS]
    masks = [lists for lists in masks if all(lists is not each for each in own)]
    every = torch.arange(step.n_users, device=step.train.values.device) if users is None else users
    for piece in in_pieces(every, step.n_items):
        keys = rng.client_keys(rng.key(seed, "candidates", step.index), piece)
        order = rng.sort_keys(rng.bits(keys[:, None], torch.arange(step.n_items, device=piece.device)))
        for lists in own:
            order[lists.select(piece)] = torch.iinfo(torch.int64).max
        for lists in masks:  # which may have items that came later
            user, item = lists.select(piece)
            inside = item < step.n_items
            order[user[inside], item[inside]] = torch.iinfo(torch.int64).max
        key, item = order.topk(drawn, dim=1, largest=False)
        parts.append(item.masked_fill(key == torch.iinfo(torch.int64).max, -1))
    items = torch.nn.functional.pad(torch.cat(parts), (0, (2 * n if several else n) - drawn), value=-1)
    if not several:
        return {"valid": items, "test": items}
    half = ((items >= 0).sum(1, keepdim=True) + 1) // 2
    column = torch.arange(n, device=items.device)
    return {"valid": items[:, :n].masked_fill(column >= half, -1), "test": items.gather(1, half + column)}


def few_candidates_note(steps: Sequence[Step], settings: EvaluationSettings) -> str:
    """A sentence if in a block users are tested among fewer than ``sampled_candidates``, as there are no more; else
    empty."""
    lists, wanted = 2 if settings.candidate_lists == "separate" else 1, settings.sampled_candidates
    for number, step in enumerate(steps):
        if step.sessions or settings.candidates == "all" or not len(step.test.values):
            continue
        known = steps[:number + 1] if settings.mask_history else [step]
        most = sum(int(each.split(split).lengths.max()) for each in known for split in SPLITS)
        if step.n_items - most >= lists * wanted:
            continue
        drawn = ((step.n_items - had_in(known, step).distinct().lengths) // lists)[step.test.lengths > 0]
        if few := int((drawn < wanted).sum()):
            where = f" in block {number}" * (len(steps) > 1)
            return (f"{few:,} of {len(drawn):,} users to test{where} have fewer than {wanted} items to sample in each "
                    f"list, down to {int(drawn.min())}, and are ranked among those; with a smaller sampled_candidates "
                    f"all have as many.")
    return ""


def had_in(steps: Iterable[Step], last: Step) -> Ragged:
    """What each user of the ``last`` step has had in all splits of some steps up to it, without ratings."""
    lists = Ragged(torch.zeros_like(last.train.indptr), last.train.values[:0])
    for step in steps:
        for split in SPLITS:
            lists = replace(step.split(split), ratings=None).before(lists)
    return lists


def in_sample(seed: int, purpose: str, users: int, about: int, clients: int, device: torch.device) -> Tensor:
    """Whether each of the users 0, 1, ... is in a sample of a purpose with the expected size ``about``, bool of shape
    (users,). All are if the run has no more ``clients``, those elsewhere among them.

    That is decided by a number of the user's own, drawn from the run's seed, so nobody's place depends on the order of
    users, on the others, on blocks or on methods: runs that are compared look at the same users.
    """
    if clients <= about:
        return torch.ones(users, dtype=torch.bool, device=device)
    key = rng.key(seed, purpose)
    chosen = torch.empty(users, dtype=torch.bool, device=device)
    for part in torch.arange(users, device=device).split(SIZES.normals):
        keys = rng.client_keys(key, part)
        chosen[part] = rng.uniform(rng.bits(keys, torch.zeros_like(keys))) < about / clients
    return chosen


@dataclass(frozen=True)
class RankingTask:
    """Which items users are to find, among which; as ``SessionTask`` for sessions."""

    target: Ragged  # the items to find, per user
    masks: Sequence[Ragged]  # items of each user that are not recommended
    topk: Iterable[int]  # list lengths
    # Sampled items to rank besides those to find, (n, m), a row for each user with items to find in their order, -1 for
    # none; None: all items.
    candidates: Tensor | None = None
    metrics: Sequence[Metric] = DEFAULT  # what is said of the lists
    catalogue: Catalogue | None = None  # for metrics of items, left out without it; with it the result has the lists


def rank_all(backbone: Backbone, method: Method | None, model: Snapshot, task: RankingTask) -> UserScores:
    """Rank every item known to the model for each user with items to find; the method may rescore. Of equal scores, the
    smaller item id comes first."""
    target, candidates, catalogue = task.target, task.candidates, task.catalogue
    topk, n_items = sorted(set(task.topk)), model.n_items
    users = (target.lengths > 0).nonzero().flatten()
    if topk[-1] > n_items:
        raise UserError(f"setting 'topk': found {topk[-1]}, accepted: at most the number of items, {n_items}.")
    wanted = pairs_of(target, users, n_items)
    hits = torch.zeros(len(users), topk[-1], dtype=torch.bool, device=users.device)
    kept = torch.full((len(users), topk[-1]), -1, device=users.device) if catalogue is not None else None

    def mark_hits(positions: Tensor) -> None:
        with torch.no_grad():  # holds per thread
            items, scores = _to_rank(backbone, method, model, task, users[positions],
                                      None if candidates is None else candidates[positions])
            if kept is None and items is None and ops.serve(scores) and scores.dtype in ops.REALS:
                row, item = target.select(users[positions])  # their ranks take less than making the lists
                place = ops.ranks(scores, row, item, first_before=True) - 1
                found = (place < topk[-1]) & (scores[row, item] > -torch.inf)
                hits[positions[row[found]], place[found]] = True
                return
            first = ops.highest(scores, topk[-1])
            ranked, items = scores.gather(1, first) > -torch.inf, first if items is None else items.gather(1, first)
            hit = ranked & contains(wanted, positions[:, None] * n_items + items)
            hits[positions, :hit.shape[1]] = hit  # in place: small results would lie between large freed blocks
            if kept is not None:
                kept[positions, :hit.shape[1]] = items.masked_fill(~ranked, -1)

    positions = torch.arange(len(users), device=users.device)
    size = users_at_once(n_items, n_items > SIZES.product_items and is_product(backbone, model))
    pieces = -(-len(users) // size)  # of equal size: products of few rows round otherwise
    for _ in in_order(mark_hits, positions.tensor_split(pieces) if pieces else (), users.device):
        pass
    relevant = torch.bincount(wanted.div(n_items, rounding_mode="floor"), minlength=len(users))
    return UserScores(users, measure(task.metrics, RankedLists(hits, relevant, kept, catalogue), topk), kept)


def _to_rank(backbone: Backbone, method: Method | None, model: Snapshot, task: RankingTask, users: Tensor,
             candidates: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Items of these users, (n, m), or None: all in order; and their scores, (n, m): -inf for those that are not
    ranked. ``candidates`` are theirs."""
    n_items = model.n_items
    if candidates is None or not scores_alone(backbone, method, n_items, candidates.shape[1]):
        scores = finite_scores(backbone, method, model, users)
        for mask in task.masks:
            scores[mask.select(users)] = -torch.inf
        if candidates is None:
            return None, scores
        ranked = torch.zeros(len(users), n_items + 1, dtype=torch.bool, device=scores.device)
        ranked.scatter_(1, candidates % (n_items + 1), True)  # -1 becomes the column beyond the last item
        ranked[task.target.select(users)] = True
        return None, scores.masked_fill(~ranked[:, :n_items], -torch.inf)
    items = torch.cat([candidates, padded(task.target, users)], 1).sort(1).values
    scores = score_pairs(backbone, model, users, items.clamp(min=0))
    checks.require_finite_scores(backbone, "score", scores, users)
    out = items < 0
    out[:, 1:] |= items[:, 1:] == items[:, :-1]  # stands there a second time
    pair = torch.arange(len(users), device=users.device)[:, None] * n_items + items
    for mask in task.masks:
        out |= contains(pairs_of(mask, users, n_items), pair)
    return items, scores.masked_fill(out, -torch.inf)


def finite_scores(backbone: Backbone, method: Method | None, model: Snapshot, users: Tensor,
                  before: Ragged | None = None) -> Tensor:
    """What users' items are ranked by before any is masked: logits, or what the method makes of them, (n, items);
    ``before`` as for ``Method.rescore_session``. Raises RunFailed if a score is not finite, PluginError if the method
    returns anything else than scores."""
    scores = score_users(backbone, model, users)
    checks.require_finite_scores(backbone, "score", scores, users)
    hook, more = "rescore", ()
    if before is not None and method.overrides("rescore_session"):
        hook, more = "rescore_session", (before,)
    if method is not None and method.overrides(hook):
        scores = getattr(method, hook)(users, scores, *more, model, backbone)
        checks.check_tensor(method, hook, scores, (len(users), model.n_items), "(n, items): a score per item")
        checks.require_finite_scores(method, hook, scores, users)
        return scores.clone(memory_format=torch.contiguous_format)  # masks are written to it, and it may be state
    return scores


def scores_alone(backbone: Backbone, method: Method | None, n_items: int, candidates: int) -> bool:
    """Whether so many candidates per user are scored without the other items: if that is less work, and neither
    backbone nor method looks at all items. Scores differ by rounding."""
    return (n_items > SIZES.items_per_candidate * (candidates + 1) and not backbone.whole_tables
            and (method is None or not (method.overrides("rescore") or method.overrides("rescore_session"))))


def users_at_once(n_items: int, product: bool) -> int:
    """Users scored together by one thread. Where their scores are one matrix ``product`` with a table that all share,
    they are enough for reading that table to pay, also if it is long."""
    fitting = max(1, SIZES.scored // n_items)
    return max(fitting, min(SIZES.product_users, SIZES.product_scores // n_items)) if product else fitting


def is_product(backbone: Backbone, model: Snapshot) -> bool:
    """Whether the scores of all items are one matrix product with a table that all users share."""
    first_user = torch.zeros(1, dtype=torch.int64, device=next(model.tables()).device)
    return not backbone.scores_local_tables and backbone.factors(model.clients(first_user)) is not None


def pairs_of(lists: Ragged, users: Tensor, n_items: int) -> Tensor:
    """The pairs of position in ``users`` and item as numbers position * n_items + item, ascending and each once."""
    row, item = lists.select(users)
    return torch.unique(row * n_items + item)


def contains(ascending: Tensor, values: Tensor) -> Tensor:
    """Whether each value is among ``ascending``: bool of the values' shape."""
    if not len(ascending):
        return torch.zeros_like(values, dtype=torch.bool)
    return ascending[torch.searchsorted(ascending, values).clamp_(max=len(ascending) - 1)] == values


@torch.no_grad()
def rating_errors(backbone: Backbone, model: Snapshot, target: Ragged) -> UserScores:
    """MAE and RMSE of every user with rated items in ``target`` (Herlocker et al., TOIS 2004)."""
    users = (target.lengths > 0).nonzero().flatten()
    parts = [score_users(backbone, model, some)[target.select(some)] - target.rated.select(some)[1]
             for some in in_pieces(users, model.n_items)]
    row = torch.arange(len(users), device=users.device).repeat_interleave(target.counts(users))
    error = torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64)

    def mean(values: Tensor) -> Tensor:
        return values.new_zeros(len(users)).index_add_(0, row, values) / target.counts(users)
    return UserScores(users, dict(zip(RATING_ERRORS, (mean(error.abs()), mean(error.square()).sqrt()))))


def pooled(errors: UserScores, counts: Tensor) -> dict[str, float]:
    """The same over all ratings at once, of users with so many each, (n,)."""
    mae, rmse = (errors.values[name].cpu() for name in RATING_ERRORS)
    return {"mae": float((mae * counts).sum() / counts.sum()),
            "rmse": float((rmse.square() * counts).sum() / counts.sum()) ** 0.5}
