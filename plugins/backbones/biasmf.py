"""BiasMF: matrix factorisation with biases, under the BPR loss or on ratings; item vectors and biases are public."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import ITEM, USER, Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.functional import dot, plus_constant
from fedcl_bench.toolbox.layers import item_rows

ITEM_BIAS, USER_BIAS, GLOBAL_BIAS = "item_bias.weight", "user_bias.weight", "global_bias"


@dataclass(frozen=True)
class BiasMFSettings(BackboneSettings):
    lr: float = setting(1e-3, "learning rate of all parameters", above=0.0, search=(1e-3, 1e-2, 1e-1))
    dim: int = setting(64, "length d of user and item vectors", low=1)
    init_std: float = setting(0.01, "both tables start from N(0, init_std^2), biases from 0", low=0.0)
    loss: str = setting("bpr", "BPR on sampled negatives, or the mean squared error of predicted ratings (Koren et "
                        "al.), of which no negatives are drawn and tests have MAE and RMSE; then --set "
                        "valid_metric=rmse too", choices=("bpr", "squared_error"), only_if="loss!=bpr")


class BiasMF(Backbone):
    """s(u, i) = p_u . q_i + b_u + b_i + b. Under a pairwise loss b_u and b cancel and never move; of ratings, s(u, i)
    is the prediction, and each client learns its own b."""

    name = "biasmf"
    numbers = 1
    title = "matrix factorisation with biases, BPR loss, clients weighted by interactions"
    reference = ("tutorial model (federated collaborative filtering with BPR); loss: Rendle et al., BPR, UAI 2009; "
                 "biases: Koren et al., Computer 2009")
    Settings = BiasMFSettings
    defaults = {"optimiser": "adam", "batch_size": 256, "local_epochs": 5, "weighting": "interactions",
                "init_from": "best"}

    @property
    def explicit(self):
        return self.settings.loss == "squared_error"

    @property
    def pairwise(self):
        return not self.explicit

    def new_rows(self, seed, users, items):
        s = self.settings
        return ({ITEM: item_rows(seed, ITEM, items, s.dim, s.init_std),
                 ITEM_BIAS: torch.zeros(len(items), 1, dtype=torch.float64)},
                {USER: item_rows(seed, USER, users, s.dim, s.init_std),
                 USER_BIAS: torch.zeros(len(users), 1, dtype=torch.float64),
                 GLOBAL_BIAS: torch.zeros(len(users), 1, dtype=torch.float64)})

    def score(self, clients, rows):
        return plus_constant(dot(clients[USER], rows[ITEM]) + rows[ITEM_BIAS].squeeze(2),
                             clients[USER_BIAS] + clients[GLOBAL_BIAS])

    def score_all(self, clients, public):
        return clients[USER] @ public[ITEM].T + public[ITEM_BIAS].T + clients[USER_BIAS] + clients[GLOBAL_BIAS]

    def loss(self, scores, labels, weights):
        return ((scores - labels).square() * weights).sum(1)

    def keys(self, clients, rows):
        return clients[USER].unsqueeze(1) * rows[ITEM]

    def learning_rates(self, n_items, round_=0, batch=0):
        return dict.fromkeys((ITEM, ITEM_BIAS, USER, USER_BIAS, GLOBAL_BIAS), self.settings.lr)
