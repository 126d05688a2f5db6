"""Distilling a client's previous model through its top-N list: shared by KD, F3CRec and methods like them.

All state is per user and private. The teacher of block t is the best validation model of block t-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plugin.backbone import Backbone
from ..core.errors import UserError
from ..kernels.functional import weighted_bce
from ..plugin.method import Method
from ..plugin.state import Snapshot, in_pieces, rows_of, score_users
from ..kernels import ops
from ..core.settings import setting


@torch.no_grad()
def refresh_teacher(state: dict[str, Tensor], model: Snapshot, backbone: Backbone, n: int, refreshed: Tensor) -> None:
    """Update every user's top-N list and the teacher's probabilities on it after a block. The list S_u^{t-1} is the
    ordered top-N of all items (no masking; F3CRec, Eq. 1). Users not in ``refreshed`` keep the list they have, but
    their probabilities are those of the new model on the old list. ``state``: the method's client state; sets ``lists``
    (int64) and ``teacher`` (probabilities), both (users, N); ``model``: the teacher; ``n``: length N of the lists;
    ``refreshed``: ids of the users whose list is made anew; new users must be among them."""
    device = refreshed.device
    lists = torch.zeros(model.n_users, n, dtype=torch.int64, device=device)
    if "lists" in state:
        lists[:len(state["lists"])] = state["lists"]
    renew = torch.zeros(model.n_users, dtype=torch.bool, device=device)
    renew[refreshed] = True
    teacher = []
    for users in in_pieces(torch.arange(model.n_users, device=device), model.n_items):
        scores = score_users(backbone, model, users)
        fresh = users[renew[users]]
        lists[fresh] = scores[renew[users]].topk(n, dim=1).indices
        teacher.append(torch.sigmoid(scores.gather(1, lists[users])))
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
    ``chosen`` says which items of the lists take part, here all of them, and ``weight`` how much, here ``lambda_kd``.
    """

    Settings = TopNSettings
    ambiguities = {"kd_reduction": {"mean": "released code", "sum": "paper, Eq. 5 as printed"},
                "refresh_lists": {"trained": "released code", "all": "paper"}}

    def check(self, step):
        if self.settings.lambda_kd > 0.0 and self.settings.top_n > step.n_items:
            raise UserError(f"setting 'top_n': found {self.settings.top_n}, accepted: at most the number of items, "
                            f"{step.n_items} in block 0.")

    def replayed_items(self, users, draw):
        if self.settings.lambda_kd == 0.0:
            return None
        return rows_of(self.client_state["lists"], users)

    def chosen(self, batch, known: Tensor, lists: Tensor) -> Tensor:
        """Which items of the lists are distilled in this local batch. ``known``: positions in the batch of the clients
        known before the block, shape (K,); ``lists``: their lists, shape (K, N). Returns bool of shape (K, N)."""
        return torch.ones_like(lists, dtype=torch.bool)

    def weight(self, users: Tensor) -> Tensor | float:
        """Of the distillation loss, of all clients or of each, (K,)."""
        return self.settings.lambda_kd

    def local_loss(self, batch):
        """lambda_kd L_KD, the second term of F3CRec's Eq. 6."""
        if self.settings.lambda_kd == 0.0:
            return None
        lists = self.client_state["lists"]
        known = batch.known(len(lists))
        if len(known) == 0:
            return None
        users = batch.users[known]
        chosen = self.chosen(batch, known, lists[users])
        loss = distillation_loss(batch.replay_scores(known), self.client_state["teacher"][users], chosen,
                                 self.settings.kd_reduction)
        return torch.zeros(len(batch.users), dtype=loss.dtype, device=loss.device).index_copy(
            0, known, self.weight(users) * loss)

    def end_step(self, step, model, backbone, trained, draw):
        if self.settings.lambda_kd == 0.0:
            return
        if self.settings.refresh_lists == "all":
            trained = torch.arange(step.n_users, device=trained.device)
        refresh_teacher(self.client_state, model, backbone, self.settings.top_n, trained)

    def downloads_previous_model(self):
        return self.settings.lambda_kd > 0.0
