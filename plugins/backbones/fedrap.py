"""FedRAP: every client adds its own view of the items to the shared one, and the two are pushed apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcl_bench import Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.functional import dot, weighted_bce
from fedcl_bench.toolbox.layers import item_rows, linear, same_for_all

COMMON, PERSONAL = "item_commonality.weight", "item_personality.weight"
SPARSE = 1e-4  # entries of C at most this large count as zero

# By what the weights of the two extra terms are multiplied in round r. The formulas are the released code's, which
# takes them at the end of round r, and whose loss never reads them. The square wave is off in the first 5 rounds.
SCHEDULES = {"fixed": lambda r: 1.0, "tanh": lambda r: math.tanh(r / 10.0), "frac": lambda r: 1.0 / (r + 1.0),
             "sin": lambda r: (math.sin(r / 10.0) + 1.0) / 2.0, "square": lambda r: float(r // 5 % 2)}


@dataclass(frozen=True)
class FedRAPSettings(BackboneSettings):
    lr: float = setting(0.1, "learning rate of the score function (lr_network)", above=0.0,
                        search=(1e-3, 1e-2, 1e-1, 0.5))
    lr_items: float = setting(200.0, "learning rate of both item tables (lr_args)", above=0.0)
    dim: int = setting(32, "length d of item vectors", low=1)
    l2: float = setting(1e-6, "weight decay of all parameters, which moves every row; with 0 clients train the rows "
                        "they look up only, far faster", low=0.0)
    lambda_apart: float = setting(0.1, "lambda: weight of the term that pushes the two item tables apart", low=0.0)
    mu: float = setting(1e-3, "weight of the term that makes the shared table sparse", low=0.0)
    sparsity: str = setting("l1", "that term: mean |C| or mean C^2", choices=("l1", "l2"))
    schedule: str = setting("fixed", "both weights are constant (the released code never uses its schedule) or vary "
                            "with the round, as in the paper (tanh) and its variants", choices=tuple(SCHEDULES))
    round_decay: float = setting(0.97, "factor on the learning rates after every round", above=0.0, high=1.0)
    batch_decay: float = setting(0.95, "factor on the learning rates after every local batch of a round", above=0.0,
                                 high=1.0)


class FedRAP(Backbone):
    """s(u, i) = w_u . (D_ui + C_i) + b_u with a shared table C and a table D_u that stays at the client. L = BCE -
    lambda mean (D_u - C)^2 + mu mean |C|, means over the batch's items. All clients start alike."""

    name = "fedrap"
    numbers = 1
    title = "additive personalisation: shared item table plus a personal one"
    reference = "Li et al., Federated Recommendation with Additive Personalization, ICLR 2024, arXiv 2301.09109"
    Settings = FedRAPSettings
    ambiguities = {"schedule": {"fixed": "released code", "tanh": "paper"}}
    defaults = {"init_from": "best", "local_epochs": 10, "tolerance": 1e-4, "batch_size": 2048}
    # Personal tables of XING's 24,390 items for each of its 877 clients take 85 MB per dimension.
    # With lambda .1 the unbounded term diverges there in round 23.
    session_defaults = {"l2": 0.0, "dim": 16, "lambda_apart": 1e-3}
    rest_follows = True
    # Defaults of the released code and its public log; with the README's, the unbounded term diverges there too
    static_defaults = {"min_interactions": 10, "candidate_lists": "shared", "lr": 0.5, "l2": 1e-4, "mu": 0.1}

    def __init__(self, settings):
        super().__init__(settings)
        self.weight_decay = settings.l2
        self.whole_tables = settings.l2 > 0.0  # without it, only the batch's items change

    def new_rows(self, seed, users, items):
        dim = self.settings.dim
        return {COMMON: item_rows(seed, COMMON, items, dim)}, same_for_all(linear(seed, "score", dim, 1), users)

    def new_personal(self, seed, items):
        return {PERSONAL: item_rows(seed, PERSONAL, items, self.settings.dim)}

    def score(self, clients, rows):
        """w_u . (D_ui + C_i) + b_u."""
        return dot(clients["score.weight"][:, 0], rows[COMMON] + clients[PERSONAL]) + clients["score.bias"]

    def keys(self, clients, rows):
        return rows[COMMON] + clients[PERSONAL]

    def weights(self, round_: int) -> tuple[float, float]:
        """(lambda, mu) in a round: constant (released code: schedule=fixed) or varying (paper: schedule=tanh)."""
        growth = SCHEDULES[self.settings.schedule](round_)
        return self.settings.lambda_apart * growth, self.settings.mu * growth

    def regulariser(self, clients, rows, weights, served, round_):
        """-lambda mean (D_u - C)^2 + mu mean |C|, or mean C^2 with sparsity=l2."""
        apart, sparse = self.weights(round_)
        common = rows[COMMON]
        size = common.abs() if self.settings.sparsity == "l1" else common.square()
        per_item = sparse * size.mean(2) - apart * (clients[PERSONAL] - common).square().mean(2)
        return (per_item * weights).sum(1)

    def sgd_step(self, clients, rows, labels, weights, rates, round_):
        # As few passes over the rows as possible, in three buffers beside the two tables.
        apart, sparse = (weight / self.settings.dim for weight in self.weights(round_))
        common, personal = rows[COMMON], clients[PERSONAL]
        vector, bias = clients["score.weight"], clients["score.bias"]
        rate = rates[COMMON].view(-1, 1, 1)  # of both tables
        batch, per_item = weights.unsqueeze(1), weights.unsqueeze(2)

        both = common + personal
        scores = torch.baddbmm(bias.unsqueeze(2), vector, both.transpose(1, 2)).squeeze(1)
        loss = weighted_bce(scores, labels, weights)
        error = torch.sigmoid(scores).sub_(labels).mul_(weights).unsqueeze(1)
        to_vector = torch.bmm(error, both)

        gap = personal - common
        loss -= apart * torch.bmm(batch, torch.mul(gap, gap, out=both)).sum((1, 2))
        l1 = self.settings.sparsity == "l1"
        loss += sparse * torch.bmm(batch, torch.abs(common, out=both) if l1 else
                                   torch.mul(common, common, out=both)).sum((1, 2))
        slope = torch.sign(common) if l1 else 2.0 * common

        pulled = torch.mul((error * -rate).transpose(1, 2), vector, out=both)  # the prediction's share of both updates
        gap *= 2.0 * apart * (per_item * rate)
        decay = 1.0 - rate * self.settings.l2
        personal.mul_(decay).add_(pulled).add_(gap)
        common.mul_(decay).add_(pulled.sub_(gap)).addcmul_(slope, per_item * rate, value=-sparse)
        vector.sub_(to_vector.add_(vector, alpha=self.settings.l2) * rates["score.weight"].view(-1, 1, 1))
        bias.sub_((error.sum(2) + self.settings.l2 * bias) * rates["score.bias"].view(-1, 1))
        return loss

    def learning_rates(self, n_items, round_=0, batch=0):
        s = self.settings
        decay = s.round_decay ** round_ * s.batch_decay ** batch
        return {"score.weight": s.lr * decay, "score.bias": s.lr * decay, COMMON: s.lr_items * decay,
                PERSONAL: s.lr_items * decay}

    def diagnostics(self, public):
        return {"sparsity": float((public[COMMON].abs() <= SPARSE).double().mean())}
