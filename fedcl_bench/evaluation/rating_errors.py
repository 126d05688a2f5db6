"""How far predicted ratings are from those that users gave: no metric of lists, and less is better."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.stream import Ragged
from ..plugin.backbone import Backbone
from ..plugin.state import Snapshot, in_pieces, score_users
from .metrics import RATING_ERRORS
from .ranking import UserScores


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
