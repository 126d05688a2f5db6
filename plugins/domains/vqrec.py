"""VQ-Rec: texts become discrete codes, and an item is the mean of its codes' vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcl_bench import DomainData, ModuleBackbone, Stage, once_in_ranking, setting
from fedcl_bench.toolbox.cosine import CosineModule, CosineSettings
from fedcl_bench.toolbox.quantisation import of_texts

PERMUTATION = "permutation"  # the stage that trains which vector each code has
_OF_PERMUTATION = ("permutation_gradient", "sinkhorn_iterations", "permutation_temperature", "frozen_encoder")
_CERTAIN = 60.0  # beside zeros, no Gumbel noise makes another entry the largest


@dataclass(frozen=True)
class VQRecSettings(CosineSettings):
    """The released code's learning rate is .003 on most datasets."""

    codes: int = setting(32, "codes m per item, each of its own part of the rotated encoding", low=1)
    centroids: int = setting(256, "values that a code can have", low=2, high=65536)
    coded: str = setting("all", "which items have codes: all, or those that somebody trains on, made anew in every "
                         "block; others' vectors are 0", choices=("all", "trained"))
    permutation_rounds: int = setting(5, "first rounds, in which only the permutation of each code's vectors is "
                                      "trained; 0: none", low=0)
    permutation_gradient: str = setting("straight_through", "what the permutation is trained by: straight_through, as "
                                        "if the largest entries were not rounded to 1; released: their rounding has no "
                                        "gradient, so nothing is trained", choices=("straight_through", "released"),
                                        only_if="permutation_rounds")
    sinkhorn_iterations: int = setting(3, "normalisations of rows and of columns", low=1, only_if="permutation_rounds")
    permutation_temperature: float = setting(0.7, "of the Gumbel-Sinkhorn operator", above=0.0,
                                             only_if="permutation_rounds")
    frozen_encoder: bool = setting(False, "after the permutation the Transformer and the positions are not trained",
                                   only_if="permutation_rounds")


class VQRecModule(CosineModule):
    """The mean of the vectors of an item's codes, and a Transformer over histories of such."""

    def __init__(self, settings: VQRecSettings, codes: Tensor):
        """``codes``: int64 (items, m), -1 for items without."""
        super().__init__(settings)
        self.settings = settings
        m, k = settings.codes, settings.centroids
        self.register_buffer("codes", codes, persistent=False)
        # The vectors of each code's values, (m, k, d)
        self.code_table = nn.Parameter(torch.randn(m, k, settings.dim) * 0.02)
        # Whose Gumbel-Sinkhorn form says which row of ``code_table`` each value has, (m, k, k)
        self.permutation = nn.Parameter(torch.randn(m, k, k)) if settings.permutation_rounds else None

    def enter_stage(self, stage):
        if self.permutation is not None and stage != PERMUTATION:
            self.code_table.copy_(self.permuted(noise=True))
            # Domains whose samples are pooled have one table and one permutation, and all enter: again nothing changes.
            self.permutation.copy_(_CERTAIN * torch.eye(self.permutation.shape[1]))

    def permuted(self, noise: bool) -> Tensor:
        """``code_table`` with each value's row taken where its row of the permutation is largest, (m, k, d)."""
        s = self.settings
        likely = gumbel_sinkhorn(self.permutation, s.sinkhorn_iterations, s.permutation_temperature, noise)
        share, row = likely.softmax(-1).max(-1, keepdim=True)
        chosen = torch.zeros_like(likely).scatter(-1, row, share)
        whole = chosen.ceil()
        if s.permutation_gradient == "straight_through":
            whole = chosen + (whole - chosen).detach()
        return whole @ self.code_table

    @once_in_ranking
    def vectors(self):
        table = self.permuted(self.training) if self.stage == PERMUTATION else self.code_table
        first = torch.arange(len(table), device=table.device) * table.shape[1]
        means = F.embedding_bag(self.codes.clamp(min=0) + first, table.flatten(0, 1), mode="mean")
        return means * (self.codes[:, :1] >= 0)


def gumbel_sinkhorn(raw: Tensor, iterations: int, temperature: float, noise: bool) -> Tensor:
    """Nearly doubly stochastic matrices: rows and columns of exp((raw + Gumbel noise) / temperature) are normalised in
    turns (Mena et al., ICLR 2018), (m, k, k). ``raw``: (m, k, k); ``noise``: whether there is any."""
    logs = (raw.exp() + 1e-6).log()
    if noise:
        uniform = torch.rand_like(logs)
        logs = logs - ((-(uniform + 1e-6).log()) + 1e-6).log()
    logs = logs / temperature
    for _ in range(iterations):
        logs = logs - logs.logsumexp(2, keepdim=True)
        logs = logs - logs.logsumexp(1, keepdim=True)
    return logs.exp()


class VQRec(ModuleBackbone):
    """v_i = mean_j E_j[c_ij] for the item's codes c_i; scores are cos(h, v_i) / .07, h is SASRec's encoder on v.

    Codes come from optimised product quantisation of the texts' encodings (Ge et al., CVPR 2013), by one quantiser for
    all domains that train together. From a random start there is a first stage: as in the fine-tuning script of VQ-Rec,
    nothing but a permutation of each code's vectors is trained, and then fixed. Row 0 of each of the released code's
    tables, which stands for padding, is left out.
    """

    name = "vqrec"
    numbers = 1
    title = "discrete codes of texts and a vector per code, under a Transformer; cosine scores"
    reference = ("Hou et al., Learning Vector-Quantized Item Representation for Transferable Sequential Recommenders, "
                 "WWW 2023; trained from scratch")
    Settings = VQRecSettings
    needs_features = True
    exchanges = frozenset({"codes"})
    of_stages = ("permutation_rounds", *_OF_PERMUTATION)
    ambiguities = {"coded": {"trained": "released index", "all": "released code of PFCR"},
                "permutation_gradient": {"straight_through": "a permutation that is learned, as described",
                                         "released": "released code"},
                "permutation_rounds": {5: "released code", 0: "released code of PFCR"},
                "frozen_encoder": {True: "released code, also without pre-training", False: "trained from scratch"}}

    def stages(self):
        train = Stage("train", trained=("code_table", "history.norm") if self.settings.frozen_encoder else
                      ("code_table", "history"))
        rounds = self.settings.permutation_rounds
        return (Stage(PERMUTATION, rounds, trained=("permutation",)), train) if rounds else (Stage("train"),)

    def prepared(self, domains):
        texts = [data.features.mean(1) for data in domains]
        coded = [self._coded(data) for data in domains]
        known = torch.cat([text[rows] for text, rows in zip(texts, coded)])
        quantiser = of_texts(known, self.settings.codes, self.settings.centroids)
        return [replace(data, codes=quantiser.encode(text).where(rows[:, None], -1))
                for data, text, rows in zip(domains, texts, coded)]

    def _coded(self, data: DomainData) -> Tensor:
        """Which of a domain's items have codes, bool (items,)."""
        if self.settings.coded == "all":
            return torch.ones(data.n_items, dtype=torch.bool)
        return torch.bincount(data.histories[0].cpu(), minlength=data.n_items) > 0

    def module(self, data):
        return VQRecModule(self.settings, data.codes)
