"""FFMSR: domains cluster what their items' texts say at a server, and filter what they receive.

The numbers of equations are the paper's. Where the released code differs, a setting chooses; ``ambiguities`` has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcl_bench import DomainMethod, ModuleBackbone, Stage, inherited, once_in_ranking, rng, setting
from fedcl_bench.toolbox.clustering import ALGORITHMS, Lloyd, cluster
from fedcl_bench.toolbox.cosine import cosines
from fedcl_bench.toolbox.quantisation import of_texts
from fedcl_bench.toolbox.text_fusion import (CENTROIDS, SEMANTICS, ClusterStream, FourierFilter, SemanticModule,
                                             SemanticSettings, TextFusion)
from fedcl_bench.toolbox.transformer import TransformerEncoder, TransformerSettings, by_length, normal_start

FINETUNE = "finetune"


@dataclass(frozen=True)
class FFMSRBackboneSettings(SemanticSettings, TransformerSettings):
    filter_layers: int = setting(2, "filter layers before the Transformer (Eq. 18)", low=0,
                                 only_if="without!=encoder-filter")
    filter_dropout: float = setting(0.2, "share of a filter layer's values that are dropped in training", low=0.0,
                                    below=1.0, only_if="without!=encoder-filter")
    input_dropout: float = setting(0.1, "the same of the vectors that positions are added to", low=0.0, below=1.0)
    positions: str = setting("before_filters", "positions are added after the filter layers (Eqs. 18-19), or before "
                             "them, with a normalisation (released code)", choices=("after_filters", "before_filters"))
    similarity: str = setting("cosine", "logits are inner products (Eq. 22), or cosines by a temperature (released "
                              "code)", choices=("dot", "cosine"))
    temperature: float = setting(0.07, "of cosines", above=0.0, only_if="similarity=cosine")
    item_vectors: str = setting("gated", "an item to find is e + t (Eq. 23), or w e + t + w' f with a second gate w' "
                              "(released code)", choices=("plain", "gated"))
    orthogonality: str = setting("correlation", "L_orth is the sum of |t_i e_i| (Eq. 25), or the mean square of what "
                                 "the normalised tables' columns correlate (released code)",
                                 choices=("products", "correlation"), only_if="without!=orthogonality")
    cluster_loss: bool = setting(True, "L'_orth (Eq. 27) is in the loss of the second stage (Eq. 28); the released "
                                 "command leaves it out",
                                 only_if=("without!=orthogonality|semantic-fusion", "text=fusion"))
    padding_row: bool = setting(False, "padding is an item without text and with e = 0, which passes the adapters and "
                                "is in the softmax (released code)")
    text: str = setting("fusion", "t_i is the fusion of the language model's layers, or the mean of the vectors of its "
                        "codes (FFMSR-PQ of Table 6)", choices=("fusion", "pq"))
    codes: int = setting(32, "codes per item with text=pq", low=1, only_if="text=pq")
    code_values: int = setting(256, "values that such a code can have", low=2, high=65536, only_if="text=pq")
    without: str = setting("none", "ablation of Table 4: semantic-fusion = nothing that servers cluster, "
                           "adaptation-filter = Eqs. 12-14, encoder-filter = Eq. 18, orthogonality = Eqs. 25 and 27, "
                           "gate = Eq. 16; or of Figure 9: fourier = all filters are fully connected layers",
                           choices=("none", "semantic-fusion", "adaptation-filter", "encoder-filter", "orthogonality",
                                    "gate", "fourier"))
    connects: str = setting("dimensions", "such a layer connects the d numbers of each position, or the positions of "
                            "each number", choices=("dimensions", "positions"), only_if="without=fourier")
    experts: int = inherited(SemanticSettings, "experts", only_if="text=fusion")
    adapter_dropout: float = inherited(SemanticSettings, "adapter_dropout", only_if="text=fusion")
    layer_adapters: str = inherited(SemanticSettings, "layer_adapters", only_if="text=fusion")
    fusion_layers: int = inherited(SemanticSettings, "fusion_layers", only_if="text=fusion")

    @property
    def clustered(self) -> bool:
        """Whether there is a stream of what a server clusters."""
        return self.without != "semantic-fusion" and self.text == "fusion"


@dataclass(frozen=True)
class Items:
    """Vectors of a domain's items, each (items, d), with one row more for padding with ``padding_row``."""

    ids: Tensor  # e_i
    texts: Tensor  # t_i
    clusters: Tensor | None  # f_i; None without a clustered stream
    gated: Tensor  # e'_i = w_i e_i, Eqs. (15)-(16)


class FullyConnected(nn.Module):
    """A linear layer in the place of a Fourier filter of sequences (B, L, d), as Figure 9 compares them."""

    def __init__(self, settings: FFMSRBackboneSettings):
        super().__init__()
        self.positions = settings.connects == "positions"
        size = settings.max_length if self.positions else settings.dim
        self.linear = nn.Linear(size, size)
        normal_start(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mT).mT if self.positions else self.linear(x)


def filter_of(settings: FFMSRBackboneSettings) -> nn.Module:
    """What filters sequences, Eqs. (12)-(14)."""
    if settings.without == "fourier":
        return FullyConnected(settings)
    return FourierFilter(settings.max_length, settings.dim)


class FilterLayer(nn.Module):
    """V~ = LayerNorm(V + Dropout(Filter(V))), Eq. (18)."""

    def __init__(self, settings: FFMSRBackboneSettings):
        super().__init__()
        self.filter, self.drop = filter_of(settings), nn.Dropout(settings.filter_dropout)
        self.norm = nn.LayerNorm(settings.dim, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.filter(x)))


class CodedTexts(nn.Module):
    """t_i is the mean of the vectors of an item's codes, as in PFCR (FFMSR-PQ); padding has zeros."""

    def __init__(self, codes: Tensor, padding: int, settings: FFMSRBackboneSettings):
        """``codes``: int64 (items, m); ``padding``: rows of zeros after the items."""
        super().__init__()
        self.padding = padding
        first = settings.code_values * torch.arange(codes.shape[1], device=codes.device)
        self.register_buffer("rows", codes + first, persistent=False)
        self.table = nn.Parameter(torch.randn(settings.codes * settings.code_values, settings.dim) * 0.02)

    def forward(self, _ids: Tensor) -> Tensor:
        """(items, d)."""
        return F.pad(F.embedding_bag(self.rows, self.table, mode="mean"), (0, 0, 0, self.padding))


def products(first: Tensor, second: Tensor) -> Tensor:
    """Eqs. (25) and (27): the sum over items of |a_i . b_i|, a scalar. ``first``, ``second``: (items, d)."""
    return (first * second).sum(1).abs().sum()


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """The released code's: with rows of length 1, the mean square of the entries of A^T B, a scalar. ``first``,
    ``second``: (items, d). No gradient passes their rows' lengths."""
    first, second = (x / (x.norm(dim=1, keepdim=True).detach() + 1e-6) for x in (first, second))
    return (first.T @ second).square().mean()


class FFMSRModule(SemanticModule):
    """Eqs. (3)-(28) at one domain."""

    fixed_length = True  # filters mix the positions, padding too

    def __init__(self, data, settings: FFMSRBackboneSettings):
        super().__init__()
        self.settings = s = settings
        d, self.padding = s.dim, int(s.padding_row)
        self.items = nn.Embedding(data.n_items, d)
        self.positions = nn.Embedding(s.max_length, d)
        self.gate = None if s.without == "gate" else nn.Linear(d, 1, bias=False)
        self.cluster_gate = nn.Linear(d, 1, bias=False) if s.clustered and s.item_vectors == "gated" else None
        for part in (self.items, self.positions, self.gate, self.cluster_gate):
            if part is not None:
                nn.init.normal_(part.weight, std=0.02)
        self.texts = TextFusion(F.pad(data.features, (0, 0, 0, 0, 0, self.padding)), d, s) \
            if s.text == "fusion" else CodedTexts(data.codes, self.padding, s)
        self.rows = ("items.weight",)
        if s.clustered:
            self.rows += (CENTROIDS,)
            self.clusters = ClusterStream(data.n_items, data.features.shape[2], s.max_length, s)
            if s.without in ("adaptation-filter", "fourier"):
                self.clusters.filter = nn.Identity() if s.without == "adaptation-filter" else filter_of(s)
        layers = 0 if s.without == "encoder-filter" else s.filter_layers
        self.filters = nn.Sequential(*(FilterLayer(s) for _ in range(layers)))
        self.norm = nn.LayerNorm(d, eps=1e-12) if s.positions == "before_filters" else nn.Identity()
        self.drop = nn.Dropout(s.input_dropout)
        self.encoder = TransformerEncoder(s)

    @once_in_ranking
    def vectors(self) -> Items:
        """What the network knows of all items."""
        ids = F.pad(self.items.weight, (0, 0, 0, self.padding))
        gated = ids if self.gate is None else torch.sigmoid(self.gate(ids)) * ids
        clusters = self.clusters(self.padding) if self.settings.clustered else None
        return Items(ids, self.texts(ids), clusters, gated)

    def representations(self, batch, items: Items) -> Tensor:
        """h of each history, (B, d)."""
        def with_padding(vectors: Tensor) -> Tensor:
            return vectors if self.padding else F.pad(vectors, (0, 0, 0, 1))

        plain = with_padding(items.gated + items.texts)
        clusters = None if items.clusters is None else with_padding(items.clusters)
        return by_length(batch, lambda piece: self.represented(piece, plain, clusters))

    def represented(self, batch, plain: Tensor, clusters: Tensor | None) -> Tensor:
        """h of each history, (B, d), Eqs. (12)-(14) and (17)-(21). ``plain``, ``clusters``: e' + t and f of all items,
        (items + 1, d), the last for padding."""
        numbers = F.pad(batch.items, (0, self.settings.max_length - batch.items.shape[1]), value=-1) % len(plain)
        x = F.embedding(numbers, plain)
        if clusters is not None:
            x = x + self.clusters.filter(F.embedding(numbers, clusters))
        if self.settings.positions == "before_filters":
            x = self.filters(self.drop(self.norm(x + self.positions.weight)))
        else:
            x = self.drop(self.filters(x) + self.positions.weight)
        return self.encoder.last(x[:, :batch.items.shape[1]], batch.lengths)

    def logits(self, batch, items: Items) -> Tensor:
        """Of all items, (B, items), Eqs. (22)-(23)."""
        to_find = items.ids + items.texts
        if self.settings.item_vectors == "gated":
            to_find = items.gated + items.texts
            if items.clusters is not None:
                to_find = to_find + torch.sigmoid(self.cluster_gate(items.clusters)) * items.clusters
        h = self.representations(batch, items)
        if self.settings.similarity == "dot":
            return h @ to_find.T
        return cosines(h, to_find) / self.settings.temperature

    def loss(self, batch, targets):
        """Eq. (26), and Eq. (28) in the second stage."""
        items = self.vectors()
        loss = F.cross_entropy(self.logits(batch, items), targets)  # Eq. (24)
        if self.settings.without == "orthogonality":
            return loss
        orthogonality = products if self.settings.orthogonality == "products" else correlation
        loss = loss + orthogonality(items.texts, items.ids)
        if self.stage == FINETUNE and self.settings.cluster_loss and items.clusters is not None:
            loss = loss + orthogonality(items.clusters, items.ids)
        return loss

    def scores(self, batch):
        return self.logits(batch, self.vectors())[:, :self.items.num_embeddings]

    def semantics(self):
        return self.texts.mixed(F.pad(self.items.weight, (0, 0, 0, self.padding)))[:self.items.num_embeddings]


class FFMSRBackbone(ModuleBackbone):
    """v_j = f~_j + w_j e_j + t_j through filters and a Transformer; softmax over e + t of the domain's items."""

    name = "ffmsr"
    numbers = 1
    title = "fused text layers, ID embeddings and filtered centroids, for domains"
    reference = ("Lu, Guo, Yu, Cheng, Han & Zhu, Federated Semantic Learning for Privacy-preserving Cross-domain "
                 "Recommendation, 2025")
    Settings = FFMSRBackboneSettings
    needs_features = True
    exchanges = frozenset({SEMANTICS})
    ambiguities = {"layer_adapters": {"shared": "released code", "each": "one per layer"},
                "fusion_layers": {2: "paper, Eq. 7", 3: "released code"},
                "positions": {"after_filters": "paper, Eqs. 18-19", "before_filters": "released code"},
                "similarity": {"dot": "paper, Eq. 22", "cosine": "released code"},
                "item_vectors": {"plain": "paper, Eq. 23", "gated": "released code"},
                "orthogonality": {"products": "paper, Eq. 25", "correlation": "released code"},
                "cluster_loss": {True: "paper, Eq. 28", False: "released command"},
                "padding_row": {False: "paper", True: "released code"}}

    def __init__(self, settings):
        super().__init__(settings)
        if not settings.clustered:
            self.exchanges = frozenset()

    @property
    def prepares_together(self):
        return self.settings.text != "fusion"

    def prepared(self, domains):
        if not self.prepares_together:
            return domains
        texts = [data.features[:, -1] for data in domains]
        quantiser = of_texts(torch.cat(texts), self.settings.codes, self.settings.code_values)
        return [replace(data, codes=quantiser.encode(text)) for data, text in zip(domains, texts)]

    def module(self, data):
        return FFMSRModule(data, self.settings)


@dataclass(frozen=True)
class FFMSRSettings:
    federated_rounds: int = setting(5, "rounds of the first stage, after each of which the server clusters", low=1,
                                    search=(3, 4, 5))
    clusters: int = setting(120, "K: clusters of all domains' items; 120 for Office and Arts, 90 for OnlineRetail and "
                            "Pantry", low=1, search=(30, 60, 90, 120))
    clustering: str = setting("kmeans++", "how the server clusters (Table 7); the released code has kmeans, from "
                              "points that are drawn with replacement", choices=ALGORITHMS)
    centroid: str = setting("weighted", "of K-means: the mean with weights 1 / distance (Algorithm 1), or the plain "
                            "mean (released code)", choices=("weighted", "plain"), only_if="clustering=kmeans*")
    upload_mode: str = setting("training", "encodings are mixed with the noise and dropout of training (released "
                               "code), or without", choices=("training", "evaluation"))
    keep_optimiser: bool = setting(False, "Adam's moments of the first stage go on in the second; the released code "
                                   "begins anew")


class FFMSR(DomainMethod):
    """Stage 1: in each round a domain trains an epoch and sends X_F; the server clusters all items' rows and every
    item receives its cluster's centroid (Algorithm 1). Stage 2: domains train alone with the last centroids."""

    name = "ffmsr"
    numbers = 1
    title = "clusters of items' fused texts at the server, then training alone, for domains"
    reference = FFMSRBackbone.reference
    Settings = FFMSRSettings
    needs = SEMANTICS
    sent = ("semantics",)
    backbone_defaults = {"text_layers": 0}  # of one layer, which is UniSRec's default, there is nothing to fuse
    ambiguities = {"clustering": {"kmeans++": "paper, Algorithm 1", "kmeans": "released code"},
                "centroid": {"weighted": "paper, Algorithm 1", "plain": "released code"},
                "upload_mode": {"training": "released code", "evaluation": "paper, Eq. 11, without noise"},
                "keep_optimiser": {False: "released code", True: "one optimiser"}}

    def stages(self):
        return (Stage("pretrain", rounds=self.settings.federated_rounds),
                Stage(FINETUNE, exchanges=False, new_optimiser=not self.settings.keep_optimiser))

    def upload(self, module, draw):
        """X_F, (items, d_W): its rows are the domain's items, none of its users."""
        training = module.training
        module.train(training and self.settings.upload_mode == "training")
        sent = module.semantics()
        module.train(training)
        return {"semantics": sent}

    def aggregate(self, uploads, weights, draw):
        """Centroids of the clusters of all items, for each item its own."""
        s = self.settings
        points = torch.cat([sent["semantics"] for sent in uploads])
        nearest, centroids = cluster(points, s.clusters, rng.key(draw.seed, "clusters", draw.round), s.clustering,
                                     Lloyd(weighted=s.centroid == "weighted"))
        counts = [len(sent["semantics"]) for sent in uploads]
        return [{CENTROIDS: centroids[part]} for part in nearest.split(counts)]
