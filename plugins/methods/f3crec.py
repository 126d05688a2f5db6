"""F3CRec: adaptive replay memory at the client, item-wise temporal mean at the server.

Equations are those of the paper. Eqs. 1 to 6 are computed in ``fedcl_bench/toolbox/distillation.py``; Eq. 7, the mean
of the uploads, is the server's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcl_bench import inherited, setting
from fedcl_bench.toolbox.distillation import TopNDistillation, TopNSettings


@dataclass(frozen=True)
class F3CRecSettings(TopNSettings):
    eps: float = setting(0.006, "how fast the replay rate falls with a user's preference shift (Eq. 3)", low=0.0,
                         search=tuple(i / 1000 for i in range(1, 10)), only_if="without!=cc|arm")
    beta: float = setting(0.9, "weight of the temporal mean for an unmoved item (Eq. 9)", low=0.0, high=1.0,
                          search=tuple(i / 20 for i in range(21)), only_if="without!=sc")
    without: str = setting("none", "ablation of Tables 3 and 6: cc = no client loss, arm = the whole list is replayed, "
                           "sc = plain averaging at the server, itm = the same weight beta for every old item",
                           choices=("none", "cc", "arm", "sc", "itm"))
    lambda_kd: float = inherited(TopNSettings, "lambda_kd", only_if="without!=cc")
    top_n: int = inherited(TopNSettings, "top_n", only_if="without!=cc")
    kd_reduction: str = inherited(TopNSettings, "kd_reduction", only_if="without!=cc")
    refresh_lists: str = inherited(TopNSettings, "refresh_lists", only_if="without!=cc")


def temporal_weight(previous: Tensor, mean: Tensor, beta: float) -> Tensor:
    """gamma_i = beta / (1 + phi_i) with phi_i = ||previous_i - mean_i||^2 / sqrt(d) (Eqs. 8 and 9), shape (items,)."""
    moved = (previous - mean).flatten(1)
    return beta / (1.0 + moved.square().sum(1) / moved.shape[1] ** 0.5)


class F3CRec(TopNDistillation):
    """The client distils as many items of its old top-N list as its preferences have stayed the same; the server pulls
    every old item's averaged row towards the previous block's, the more the less the row has moved.
    """

    name = "f3crec"
    numbers = 2
    title = "adaptive replay memory at the client, item-wise temporal mean at the server"
    reference = "Lim et al., Federated Continual Recommendation, CIKM 2025, arXiv 2508.04792"
    Settings = F3CRecSettings
    ambiguities = {**TopNDistillation.ambiguities, "inc_split": {"chronological": "released split", "random": "paper"},
                "valid_decimals": {5: "released code", 17: "not rounded"},
                "repeated_positives": {"every": "each row", "once": "released code"}}

    def __init__(self, settings):
        if settings.without == "cc":
            settings = replace(settings, lambda_kd=0.0)
        if settings.without == "sc":
            settings = replace(settings, beta=0.0)
        super().__init__(settings)

    def soft_targets(self):
        """With an adaptive replay memory (Eqs. 2 to 4), unless the whole list is replayed."""
        soft = super().soft_targets()
        return soft if soft is None or self.settings.without == "arm" else replace(soft, eps=self.settings.eps)

    def aggregate(self, public):
        """Item-wise temporal mean Q_i <- (1 - gamma_i) Q'_i + gamma_i Q_i^{t-1} for old items (Eqs. 10 and 13)."""
        if self.settings.beta == 0.0:
            return public
        result = {}
        for name, mean in public.items():
            previous = self.server_state[name]
            old = mean[:len(previous)]
            gamma = temporal_weight(previous, old, self.settings.beta)
            if self.settings.without == "itm":
                gamma = torch.full_like(gamma, self.settings.beta)
            gamma = gamma.view(-1, *[1] * (mean.dim() - 1))
            result[name] = torch.cat([(1.0 - gamma) * old + gamma * previous, mean[len(previous):]])
        return result

    def end_step(self, step, model, backbone, trained, draw):
        super().end_step(step, model, backbone, trained, draw)
        self.server_state = dict(model.public)
