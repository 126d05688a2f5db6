"""FCUCR: time-aware self-distillation at the client, prototypes of similar users' sessions through the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcl_bench import draws
from fedcl_bench.errors import UserError
from fedcl_bench.layers import ITEM, apply_linear
from fedcl_bench.method import Method
from fedcl_bench.prototypes import fuse, gaussian_epsilon, nearest
from fedcl_bench.sequential import Start, xavier, zeros, ones
from fedcl_bench.settings import setting

DELTA = 1e-5  # of the paper's (epsilon, delta)
_BN_EPS, _BN_MOMENTUM = 1e-9, 0.1


@dataclass(frozen=True)
class FCUCRSettings:
    lambda_tasd: float = setting(10.0, "lambda: weight of the self-distillation loss; with distillation=capped the most it "
                                 "can be", low=0.0, search=(0.1, 1.0, 5.0, 10.0, 20.0, 50.0))
    distillation: str = setting("capped", "the weight is the smaller of lambda and L_rec / L_dist (released code), or "
                                "lambda (paper)", choices=("capped", "fixed"))
    teacher: str = setting("broadcast", "the encoder that a client distils from: the one it has just received (what the "
                           "released code comes to), or its own after its previous round (paper)",
                           choices=("broadcast", "previous"))
    neighbours: int = setting(20, "k: the most similar prototypes that are fused", low=1,
                              search=(1, 5, 20, 100, 200, 1000))
    fusion: str = setting("softmax", "of those prototypes: weighted by a softmax over their similarities (released code), "
                          "their mean (paper), or the mean of their projections onto their first principal direction",
                          choices=("softmax", "mean", "pca"))
    window: int = setting(0, "rounds whose prototypes the knowledge base keeps; 0: all (Table 4)", low=0)
    window_rule: str = setting("rounds", "prototypes older than `window` rounds leave (paper), or the first inserted when "
                               "there are more than `window` times the clients (released code)",
                               choices=("rounds", "entries"))
    transfer_interval: int = setting(1, "prototypes are transferred every so many rounds (Table 5)", low=1)
    hidden: int = setting(80, "hidden size of the private prediction module", low=1)
    prototype_noise: float = setting(0.0, "standard deviation of Gaussian noise on the prototype a client receives, anew "
                                     "in every local batch and evaluation (released code)", low=0.0)
    without: str = setting("none", "ablation of Table 3: tasd = no self-distillation, iupr = no prototypes (zeros in their "
                           "place), both = the backbone with the private prediction module alone",
                           choices=("none", "tasd", "iupr", "both"))


class FCUCR(Method):
    """L = L_rec + lambda MSE(H, H_teacher) with logits <psi([H ; rho]), q_i>.

    H are the encoder's representations of the session, psi is private to each client: a linear layer, Dice with batch
    normalisation over the session's positions, a linear layer. After its round a client uploads H as the session's
    prototype and its representations of its next session as a query; the server answers with rho, fused from the k
    nearest prototypes of other clients, for the next round.
    """

    name = "fcucr"
    title = "time-aware self-distillation and inter-user prototype transfer, for sessions"
    reference = ("Zhang et al., Learning Evolving Preferences: A Federated Continual Framework for User-Centric "
                 "Recommendation, WWW 2026, arXiv 2603.17315")
    Settings = FCUCRSettings
    first_step = 0
    encodes_next_session = True
    needs_sequential = True
    uploads = ("session prototype", "query for the next session")
