"""SPP: slow and fast averages of past parameters, at clients and server, teach what the current model ranks too low."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcl_bench import setting
from fedcl_bench.toolbox.functional import weighted_bce
from fedcl_bench.toolbox.proxies import ProxyReplay, ProxySettings


@dataclass(frozen=True)
class SPPSettings(ProxySettings):
    replay_reduction: str = setting("mean", "cross-entropies of a client's replayed items are averaged, like every "
                                    "other loss here, or summed (CCD); summed, FedMF diverges at its learning rate",
                                    choices=("mean", "sum"))


class SPP(ProxyReplay):
    """Our adaptation of CCD's student update (Lee et al., KDD 2024) to federated clients, as F3CRec describes it.

    A proxy is a moving average of the models that past blocks started from: clients keep it of their private
    parameters, the server of the public ones. From a proxy's top A items a client draws some with weights exp(eps
    (rank_model - rank_proxy)), leaving out its interactions of this and the previous block, anew in every round, and
    adds lambda exp(-round / T) times the cross-entropy to the proxy's probabilities. An item drawn from both proxies
    counts once, with the larger probability. Only users and items known before the block take part. Formulas follow
    CCD's released code (Run/S_update.py); F3CRec gives none for this baseline.
    """

    name = "spp"
    numbers = 1
    title = "stability and plasticity proxies of private and public parameters (CCD, federated)"
    reference = ("Lee et al., Continual Collaborative Distillation, KDD 2024; baseline of F3CRec (Lim et al., CIKM "
                 "2025), whose code is not released")
    Settings = SPPSettings
    ambiguities = {"replay_reduction": {"mean": "as other losses", "sum": "released code of CCD"}}
    reimplementation = True

    def replayed_items(self, users, draw):
        drawn = None if self.off else self.drawn(users, draw)
        return None if drawn is None else drawn[0]

    def local_loss(self, batch):
        """lambda exp(-round / T) times the cross-entropy of the replayed items to the proxies' probabilities."""
        drawn = None if self.off else self.drawn(batch.users, batch.draw)
        if drawn is None:
            return None
        _, labels, weights = drawn
        anneal = self.settings.lambda_replay * math.exp(-batch.draw.round / self.settings.anneal)
        scores = batch.replay_scores(torch.arange(len(batch.users), device=batch.users.device))
        if self.settings.replay_reduction == "mean":
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1.0)
        return anneal * weighted_bce(scores, labels, weights)

    def downloads_previous_model(self):
        return not self.off

