"""What changed for whom: preference shift of users and rank change of items between blocks (F3CRec, Tables 4, 5, 7).

The two take work in proportion to users x items, so of many users a sample is looked at (setting ``drift_users``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from ..plugin.backbone import Backbone
from ..data.stream import Step
from ..toolbox.distillation import ranks_of
from ..rng import Tables
from ..plugin.state import Snapshot, in_pieces, score_users
from ..kernels.functional import all_ranks
from ..core.parallel import in_order

SHIFT_TOP_N = 30
_COLUMNS = 256  # items whose changes of rank are added up at once
TARGET, NEGATIVE = "target_probability", "negative_probability"  # of a session's item to find, and of a sampled one
PER_USER = ("user_shift", TARGET, NEGATIVE)  # kinds whose ids are users; those of the others are items
Add = Callable[[Tables], Tables]  # sums over all clients of a run, given those over the clients that are here


def all_here(sums: Tables) -> Tables:
    """An ``Add`` where no client is elsewhere."""
    return sums


@torch.no_grad()
def preference_shift(backbone: Backbone, previous: Snapshot, model: Snapshot, users: Tensor) -> Tensor:
    """D_u = sum over the previous top-30 list of |rank now - rank then| (F3CRec, Eq. 2), float64 of shape (n,).

    Ranks now are among all items the model knows, 1-based; nothing is masked. ``previous`` knows all ``users``.
    """
    position = torch.arange(1, SHIFT_TOP_N + 1, device=users.device)[:previous.n_items]
    parts = []
    for piece in in_pieces(users, model.n_items):
        lists = score_users(backbone, previous, piece).topk(len(position), dim=1).indices
        ranks = ranks_of(score_users(backbone, model, piece), lists)
        parts.append((ranks - position).abs().sum(1).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def item_movement(previous: Snapshot, model: Snapshot) -> Tensor:
    """phi_i = ||Q_i before - Q_i now||^2 / sqrt(d) of every old item over all public item tables (F3CRec, Eq. 8); 0 of
    tables without columns, as clients have that share nothing."""
    before = torch.cat([table.flatten(1) for table in previous.public.values()], 1)
    now = torch.cat([model.public[name][:previous.n_items].flatten(1) for name in previous.public], 1)
    return (before - now).double().square().sum(1) / max(before.shape[1], 1) ** 0.5


def item_rank_change(backbone: Backbone, previous: Snapshot, model: Snapshot, users: Tensor,
                     add: Add = all_here) -> Tensor:
    """Mean over users of |rank before - rank now| / rank before of every old item, float64 of shape (items,).

    Both ranks are 1-based among the old items; nothing is masked. nan without a user.
    """
    def changes(piece: Tensor) -> Tensor:
        with torch.no_grad():  # holds per thread
            before, now = (all_ranks(score_users(backbone, m, piece)[:, :previous.n_items]) for m in (previous, model))
            return _sum_of_changes(before, now)

    total = torch.zeros(previous.n_items, dtype=torch.float64, device=users.device)
    for part in in_order(changes, list(in_pieces(users, model.n_items)), users.device):
        total += part
    sums = add({"total": total, "users": torch.tensor(len(users))})
    total, count = sums["total"], int(sums["users"])
    return total / count if count else total * torch.nan


def _sum_of_changes(before: Tensor, now: Tensor) -> Tensor:
    """Sum over users of |before - now| / before, given ranks of shape (n, items): float64, (items,)."""
    parts = []
    for column in range(0, before.shape[1], _COLUMNS):  # numbers of a few items stay in the cache
        columns = slice(column, column + _COLUMNS)
        rank = before[:, columns].double()
        parts.append((rank - now[:, columns]).abs_().div_(rank).sum(0))
    return torch.cat(parts)


@dataclass(frozen=True)
class Drift:
    """What has moved since the step before, as rows of a step's analysis: (step, kind, ids, values)."""

    backbone: Backbone
    step: Step
    earlier: Step  # the step before
    previous: Snapshot  # its best model
    sample: Tensor | None  # whether each user's ranks are looked at, bool; None: nobody's are

    def of_users(self, first: Snapshot) -> list[tuple[int, str, Tensor, Tensor]]:
        """The shift of users who train in both steps, given the model after the step's first round."""
        if self.sample is None:
            return []
        before, now = self._training()
        users = (before & now).nonzero().flatten()
        return [(self.step.index, "user_shift", users, preference_shift(self.backbone, self.previous, first, users))]

    def of_items(self, best: Snapshot, add: Add) -> list[tuple[int, str, Tensor, Tensor]]:
        """The movement of items, and their changes of rank for users who train no more, given the step's best model."""
        items = torch.arange(self.step.old_items, device=self.step.train.values.device)
        rows = [(self.step.index, "item_phi", items, item_movement(self.previous, best))]
        if self.sample is not None:
            before, now = self._training()
            users = (before & ~now).nonzero().flatten()
            rows.append((self.step.index, "item_rank_change", items,
                         item_rank_change(self.backbone, self.previous, best, users, add)))
        return rows

    def _training(self) -> tuple[Tensor, Tensor]:
        """Which users of the step before, if they are in the sample, had training data then, and who has now."""
        before = (self.earlier.train.lengths > 0).to(self.step.train.values.device)
        return before & self.sample[:len(before)], self.step.train.lengths[:len(before)] > 0
