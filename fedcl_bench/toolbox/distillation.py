"""Distilling a client's previous model through its top-N list: shared by KD, F3CRec and methods like them.

All state is per user and private. The teacher of block t is the best validation model of block t-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from .. import rng
from ..plugin.backbone import Backbone
from ..core.errors import UserError
from ..kernels.functional import weighted_bce
from ..plugin.method import Method, SoftTargets
from ..plugin.state import Snapshot, in_pieces, score_users
from ..plugin.views import LocalBatch
from ..kernels import ops
from ..core.settings import setting


@torch.no_grad()
def refresh_teacher(state: dict[str, Tensor], model: Snapshot, backbone: Backbone, n: int, refreshed: Tensor) -> None:
    """Update every user's top-N list and the teacher's probabilities on it after a block. The list S_u^{t-1} is the
    ordered top-N of all items (no masking; F3CRec, Eq. 1). Users not in ``refreshed`` keep the list they have, but
    their probabilities are those of the new model on the old list. ``state``: the method's client state; sets ``lists``
    (int64, -1 of users who have no list yet) and ``teacher`` (probabilities), both (users, N); ``model``: the teacher;
    ``n``: length N of the lists; ``refreshed``: ids of the users whose list is made anew."""
    device = refreshed.device
    lists = torch.full((model.n_users, n), -1, device=device)
    if "lists" in state:
        lists[:len(state["lists"])] = state["lists"]
    renew = torch.zeros(model.n_users, dtype=torch.bool, device=device)
    renew[refreshed] = True
    teacher = []
    for users in in_pieces(torch.arange(model.n_users, device=device), model.n_items):
        scores = score_users(backbone, model, users)
        fresh = users[renew[users]]
        lists[fresh] = scores[renew[users]].topk(n, dim=1).indices
        teacher.append(torch.sigmoid(scores.gather(1, lists[users].clamp(min=0))))
    state["lists"], state["teacher"] = lists, torch.cat(teacher)


def distillation_loss(scores: Tensor, teacher: Tensor, chosen: Tensor, reduction: str) -> Tensor:
    """Binary cross-entropy of each client's scores to the teacher's probabilities (F3CRec, Eq. 5). ``scores``: the
    client's logits on its list, shape (C, N). ``teacher``: soft targets, shape (C, N). ``chosen``: which items of the
    list take part, bool of shape (C, N). ``reduction``: ``mean`` over the chosen items (released code) or ``sum`` (Eq.
    5 as printed). Returns shape (C,); 0 for a client without a chosen item."""
    weights = chosen.to(scores.dtype)
    if reduction == "mean":
        weights = weights / chosen.sum(1, keepdim=True).clamp(min=1)
    return weighted_bce(scores, teacher, weights)


def ranks_of(scores: Tensor, items: Tensor) -> Tensor:
    """1-based ranks among all items, as 1 + the number of items that score higher. Counts by merging all scores into
    the few sorted ones of ``items``, without sorting all items. ``scores``: all items' scores, shape (C, items);
    ``items``: int64 of shape (C, N). Returns int64 of shape (C, N)."""
    if ops.serve(scores):
        clients = torch.arange(len(items)).repeat_interleave(items.shape[1])
        return ops.ranks(scores, clients, items.reshape(-1)).view_as(items)
    listed, order = scores.gather(1, items).sort(dim=1)
    below = torch.searchsorted(listed, scores)  # listed scores strictly below each item's score
    count = torch.zeros(len(scores), items.shape[1] + 1, dtype=torch.int64, device=scores.device)
    count.scatter_add_(1, below, torch.ones_like(below))
    higher = count.flip(1).cumsum(1).flip(1)[:, 1:]
    return torch.empty_like(items).scatter_(1, order, higher + 1)


def preference_shift(ranks: Tensor) -> Tensor:
    """D = sum_k |r(i_k) - k| of each user's ordered list (F3CRec, Eq. 2). ``ranks``: 1-based ranks of the list's items
    among all items under the current model, shape (C, N). Returns int64 of shape (C,)."""
    position = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    return (ranks - position).abs().sum(1)


def replay_size(shift: Tensor, eps: float, n: int) -> Tensor:
    """Number of replayed items floor(exp(-eps D) N) (F3CRec, Eqs. 3 and 4), int64 of shape (C,)."""
    return torch.floor(torch.exp(-eps * shift.double()) * n).long()


def replay_memory(batch: LocalBatch, known: Tensor, lists: Tensor, eps: float) -> Tensor:
    """F3CRec's adaptive replay memory: a uniform sample of each list, as large as Eqs. 2 to 4 say. ``known``: positions
    of clients in the batch, (K,); ``lists``: theirs, (K, N). Returns bool of shape (K, N)."""
    n = lists.shape[1]
    size = replay_size(preference_shift(batch.ranks(known, lists)), eps, n)
    # The replayed items are uniform without replacement: those with the smallest of N random keys.
    keys = batch.draw.clients("replay", batch.users[known])
    order = rng.sort_keys(rng.bits(keys[:, None], torch.arange(n, device=keys.device))).argsort(1)
    chosen = torch.zeros_like(lists, dtype=torch.bool)
    return chosen.scatter_(1, order, torch.arange(n, device=keys.device) < size[:, None])


def soft_target_loss(soft: SoftTargets, batch: LocalBatch, scores: Callable[[Tensor], Tensor]) -> Tensor | None:
    """What soft targets add to the loss of C clients, (C,); None if none of them has a list. ``scores``: of the lists
    of clients at some positions in the batch, given these."""
    known = batch.known(len(soft.items))
    if len(known) == 0:
        return None
    users = batch.users[known]
    chosen = torch.ones_like(soft.items[users], dtype=torch.bool) if soft.chosen is None else soft.chosen[users]
    if soft.eps is not None:
        chosen &= replay_memory(batch, known, soft.items[users], soft.eps)
    listed = scores(known)
    loss = distillation_loss(listed, soft.targets[users].to(listed), chosen, soft.reduction)
    weight = soft.weights[users].to(listed) if isinstance(soft.weights, Tensor) else soft.weights
    return torch.zeros(len(batch.users), dtype=loss.dtype, device=loss.device).index_copy(0, known, weight * loss)


@dataclass(frozen=True)
class TopNSettings:
    """Settings of a method that distils top-N lists."""

    lambda_kd: float = setting(0.1, "weight of the distillation loss; at 1 KD diverges on FedMF", low=0.0,
                               search=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1))
    top_n: int = setting(30, "length N of each user's list", low=1, search=(30, 50))
    kd_reduction: str = setting("mean", "distillation over a list is averaged (released code) or summed (Eq. 5)",
                                choices=("mean", "sum"))
    refresh_lists: str = setting("trained", "whose list is renewed after a block: users with data in it (released "
                                 "code) or all", choices=("trained", "all"))


class TopNDistillation(Method):
    """Adds lambda_kd times the distillation loss on the previous model's top-N list, for users known before the block.
    """

    Settings = TopNSettings
    ambiguities = {"kd_reduction": {"mean": "released code", "sum": "paper, Eq. 5 as printed"},
                "refresh_lists": {"trained": "released code", "all": "paper"}}

    _latest: tuple[Tensor | None, ...] = (None,)  # lists, their items, and which of these there are; None: all

    def check(self, step):
        if self.settings.lambda_kd > 0.0 and self.settings.top_n > step.n_items:
            raise UserError(f"setting 'top_n': found {self.settings.top_n}, accepted: at most the number of items, "
                            f"{step.n_items} in block 0.")

    def soft_targets(self):
        """lambda_kd L_KD, the second term of F3CRec's Eq. 6."""
        state = self.client_state
        if self.settings.lambda_kd == 0.0 or "lists" not in state:
            return None
        lists = state["lists"]
        if self._latest[0] is not lists:  # once per block, as a GPU is waited for
            listed = lists >= 0
            self._latest = (lists, lists, None) if bool(listed.all()) else (lists, lists.clamp(min=0), listed)
        _, items, chosen = self._latest
        return SoftTargets(items, state["teacher"], self.settings.lambda_kd, chosen=chosen,
                           reduction=self.settings.kd_reduction)

    def end_step(self, step, model, backbone, trained, draw):
        if self.settings.lambda_kd == 0.0:
            return
        if self.settings.refresh_lists == "all":
            trained = torch.arange(step.n_users, device=trained.device)
        refresh_teacher(self.client_state, model, backbone, self.settings.top_n, trained)

    def downloads_previous_model(self):
        return self.settings.lambda_kd > 0.0
