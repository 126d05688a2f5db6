"""Exposure of the items that an attack promotes: ER@K, the share of them in the list of each user without them (Rong et
al., ICDE 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import torch
from torch import Tensor

from ..data.files.recbole_files import SPLITS
from ..data.stream import Ragged, Step, starts_of
from ..plugin.backbone import Backbone
from ..plugin.method import Method
from ..plugin.state import Snapshot
from .metrics import Recall
from .ranking import RankingTask, rank_all

KIND = "er@"
_TOPK = (5, 10)


@torch.no_grad()
def exposure(backbone: Backbone, model: Snapshot, steps: Sequence[Step], targets: Tensor, method: Method,
             sample: Tensor | None = None) -> list[tuple[int, str, Tensor, Tensor]]:
    """Rows of (step, ``er@K``, ids of users, values), float64, of the users who have not had all targets.

    Lists rank all items that a user has had in no split of any step.

    Args:
        steps: all up to the one just trained, whose users are ranked for.
        targets: the promoted items, (T,).
        sample: whether each user is evaluated, bool; None: all are.
    """
    step = steps[-1]
    had = Ragged(torch.zeros_like(step.train.indptr), step.train.values[:0])
    for each in steps:
        for name in SPLITS:
            had = replace(each.split(name), ratings=None).before(had)
    at = torch.full((step.n_items,), -1, device=targets.device)
    at[targets] = torch.arange(len(targets), device=targets.device)
    of_targets = had.where(at[had.values] >= 0)
    missing = torch.ones(step.n_users, len(targets), dtype=torch.bool, device=targets.device)
    missing[of_targets.owners, at[of_targets.values]] = False
    if sample is not None:
        missing &= sample[:, None]
    to_find = Ragged(starts_of(missing.sum(1)), targets.expand(step.n_users, -1)[missing])
    topk = [k for k in _TOPK if k <= step.n_items]
    scores = rank_all(backbone, method, model, RankingTask(to_find, [had], topk, metrics=[Recall()]))
    return [(step.index, f"{KIND}{k}", scores.users, scores.values[f"recall@{k}"].double()) for k in topk]
