"""FedDCSR: each domain splits a history's representation into a shared and an exclusive part; the shared encoder is
averaged, and so are shared representations, which the next round's are told from the exclusive ones by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcl_bench import (DomainData, DomainMethod, DomainModule, Histories, ModuleBackbone, ModuleSettings,
                         once_in_ranking, setting)
from fedcl_bench.toolbox.layers import check_heads
from fedcl_bench.toolbox.transformer import attended

SENT = "shared.encoder."  # what the names of the shared encoder's parameters begin with


@dataclass(frozen=True)
class FedDCSRSettings(ModuleSettings):
    """The released code's values for Food-Kitchen-Clothing-Beauty."""

    dim: int = setting(256, "length d of item vectors and representations", low=1)
    layers: int = setting(2, "self-attention blocks of each encoder", low=1)
    heads: int = setting(4, "attention heads, a divisor of dim", low=1)
    dropout: float = setting(0.3, "share of values that are dropped in training, everywhere", low=0.0, below=1.0)
    graph_layers: int = setting(1, "steps over the graph of items that follow each other", low=1)
    item_vectors: str = setting("mean", "raw vectors beside those of the graph: again the mean over its steps, or "
                                "once", choices=("mean", "once"))
    padding: str = setting("before", "where padding stands: before the items and attended to, or after them",
                           choices=("before", "after"))
    predicts: str = setting("last", "a sample's positions that predict the next item: the last one, or all",
                            choices=("last", "all"))
    averaged_over: str = setting("all", "with predicts=all, means are over all positions, or those with an item",
                                 choices=("all", "items"), only_if="predicts=all")
    kl_cap: float = setting(1.0, "the most that the Kullback-Leibler terms weigh", low=0.0)
    kl_batches: int = setting(10_000, "batches until they would weigh 1", low=1)
    similarity_weight: float = setting(2.0, "beta, of telling shared from exclusive parts", low=0.0,
                                       search=(0.5, 1.0, 2.0))
    margin: float = setting(0.3, "of that term's hinge", low=0.0, only_if="similarity_weight")
    negative: str = setting("again", "exclusive parts that shared ones are told from: encoded again with other noise, "
                            "or the same", choices=("again", "same"), only_if="similarity_weight")
    anchor: str = setting("kept", "the server's representations in a round: kept, or masked by one batch after the "
                          "other", choices=("kept", "eroded"), only_if="similarity_weight")
    anchor_rows: int = setting(256, "samples whose shared representations a domain sends; the batch in the paper",
                               low=1)
    exclusive_weight: float = setting(1.0, "gamma, of predicting by the exclusive part alone", low=0.0)
    contrast_weight: float = setting(1.0, "lambda, of the contrast with shuffled histories", low=0.0, search=(0.1, 1.0))
    temperature: float = setting(1.0, "of that contrast", above=0.0, only_if="contrast_weight")


@dataclass(frozen=True)
class Items:
    """The n items of B histories, one history after the other, without padding."""

    numbers: Tensor  # of the items, (n,)
    owners: Tensor  # the sample of each, (n,)
    real: Tensor  # where they stand in B rows of a certain length, bool of shape (B, L)

    @property
    def last(self) -> Tensor:
        """The place of each sample's last item among the n, (B,)."""
        return self.real.sum(1).cumsum(0) - 1

    def shuffled(self) -> "Items":
        """Each history's items in random order."""
        keys = self.owners + torch.rand(len(self.owners), dtype=torch.float64, device=self.owners.device)
        return replace(self, numbers=self.numbers[keys.argsort()])

    def padded(self, values: Tensor, padding: Tensor | None = None) -> Tensor:
        """Values (n, d) as (B, L, d), with ``padding`` (d,) between, or zeros."""
        padding = values.new_zeros(values.shape[1]) if padding is None else padding
        rows = padding.expand(self.real.numel(), -1).index_copy(0, self._places, values)
        return rows.unflatten(0, self.real.shape)

    def unpadded(self, values: Tensor) -> Tensor:
        """Values (B, L, d) as (n, d)."""
        return values.flatten(0, 1).index_select(0, self._places)

    @property
    def _places(self) -> Tensor:
        return self.real.flatten().nonzero().flatten()


class Attention(nn.Module):
    """SASRec's causal blocks, as FCUCR's: q = LN(x), x = LN(q + Attention(q, x, x)), x = x + FFN(x); at the end LN.
    Padding is zero before every block. So its keys and values are the biases, and nothing else of it is computed."""

    def __init__(self, s: FedDCSRSettings):
        super().__init__()
        d, self.heads, self.dropout = s.dim, s.heads, s.dropout
        self.query_norms, self.norms = (nn.ModuleList(nn.LayerNorm(d, eps=1e-8) for _ in range(s.layers))
                                        for _ in range(2))
        self.inputs = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(s.layers))
        self.outputs, self.inner, self.outer = (nn.ModuleList(nn.Linear(d, d) for _ in range(s.layers))
                                                for _ in range(3))
        self.norm = nn.LayerNorm(d, eps=1e-8)
        for inputs, outputs in zip(self.inputs, self.outputs):  # as nn.MultiheadAttention starts them
            nn.init.xavier_uniform_(inputs.weight)
            nn.init.zeros_(inputs.bias)
            nn.init.zeros_(outputs.bias)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, items: Items) -> Tensor:
        """(n, d), of the items' inputs of that shape."""
        for k, (inner, outer) in enumerate(zip(self.inner, self.outer)):
            query = self.query_norms[k](x)
            x = self.norms[k](query + self.outputs[k](self._attend(self.inputs[k], query, x, items)))
            x = x + self._drop(outer(F.relu(self._drop(inner(x)))))
        return self.norm(x)

    def _attend(self, layer: nn.Linear, query: Tensor, x: Tensor, items: Items) -> Tensor:
        d = x.shape[1]
        of_query, of_both = zip(*(each.split([d, 2 * d]) for each in (layer.weight, layer.bias)))
        keys_values = items.padded(F.linear(x, *of_both), of_both[1])
        return items.unpadded(attended(items.padded(F.linear(query, *of_query)), *keys_values.split(d, dim=2),
                                       self.heads, self.dropout if self.training else 0.0, is_causal=True))


class Gaussian(NamedTuple):
    """Distributions of n items' representations, and a draw of each; each (n, d)."""

    mean: Tensor
    log_variance: Tensor
    drawn: Tensor

    def divergence(self) -> Tensor:
        """KL(N(mean, variance) || N(0, 1)) of each, (n,)."""
        return -0.5 * (1 + self.log_variance - self.mean ** 2 - self.log_variance.exp()).sum(1)


class Encoder(nn.Module):
    """Two stacks of blocks: the mean and the logarithm of the variance."""

    def __init__(self, s: FedDCSRSettings):
        super().__init__()
        self.mean, self.log_variance = Attention(s), Attention(s)

    def forward(self, x: Tensor, items: Items) -> Gaussian:
        """In training a draw mean + noise * exp(log_variance / 2), otherwise the mean."""
        mean, log_variance = self.mean(x, items), self.log_variance(x, items)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if self.training else mean
        return Gaussian(mean, log_variance, drawn)


class Part(nn.Module):
    """The variational graph self-attention encoder of one part: item vectors of its own, a graph and an encoder."""

    def __init__(self, s: FedDCSRSettings, n_items: int):
        super().__init__()
        self.s = s
        self.positions = nn.Parameter(torch.randn(s.max_length, s.dim))
        self.graph_biases = nn.Parameter(torch.empty(s.graph_layers, s.dim).uniform_(-1, 1) * s.dim ** -0.5)
        self.norm = nn.LayerNorm(s.dim, eps=1e-12)
        self.encoder = Encoder(s)
        self.items = nn.Parameter(torch.empty(n_items, s.dim))

    def item_vectors(self, graph: Tensor) -> Tensor:
        """(items, d): per step the mean of the items that follow each one, plus a bias; beside them the raw vectors.
        With ``item_vectors=mean`` it is (raw + steps) / (1 + number of steps) + raw, as the code has it."""
        steps = [self.items]
        for bias in self.graph_biases:
            steps.append(torch.sparse.mm(graph, F.dropout(steps[-1], self.s.dropout, self.training)) + bias)
        if self.s.item_vectors == "once":
            return sum(steps)
        return sum(steps) / len(steps) + self.items

    def forward(self, vectors: Tensor, items: Items) -> Gaussian:
        """What is made of histories, by all items' ``vectors``."""
        x = F.embedding(items.numbers, vectors) * self.s.dim ** 0.5 + self.positions[items.real.nonzero()[:, 1]]
        return self.encoder(F.dropout(self.norm(x), self.s.dropout, self.training), items)


class Discriminator(nn.Module):
    """Three layers on two representations of whole histories, of which it gives a logit."""

    def __init__(self, s: FedDCSRSettings):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * s.max_length * s.dim, s.dim), nn.ReLU(), nn.Linear(s.dim, s.dim),
                                    nn.ReLU(), nn.Linear(s.dim, 1))

    def forward(self, representation: Tensor, anchor: Tensor) -> Tensor:
        """(B,), of two (B, L, d) that are zero at padding."""
        return self.layers(torch.cat([representation.flatten(1), anchor.flatten(1)], 1)).squeeze(1)


def following(histories: tuple[Tensor, Tensor], n_items: int) -> Tensor:
    """The graph of a domain: row i holds how often each item follows item i in a history, divided by the row's sum.
    Returns sparse (items, items), float32; rows of items that nothing follows are zero."""
    items, ends = histories
    first = torch.zeros(len(items) + 1, dtype=torch.bool, device=items.device)
    first[ends] = True
    after = (~first[1:-1]).nonzero().flatten() + 1
    pairs, counts = torch.stack([items[after - 1], items[after]]).unique(dim=1, return_counts=True)
    sums = torch.zeros(n_items, device=items.device).index_add_(0, pairs[0], counts.float())
    return torch.sparse_coo_tensor(pairs, counts / sums[pairs[0]], (n_items, n_items), is_coalesced=True,
                                   check_invariants=True)


def contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """InfoNCE of two views (B, d) each: the other view of the same sample against all other samples of both views. The
    mean over the 2 B representations, by cosines."""
    both = F.normalize(torch.cat([first, second]), dim=1)
    cosines = both @ both.T / temperature
    count = len(first)
    itself = torch.eye(2 * count, dtype=torch.bool, device=both.device)
    return F.cross_entropy(cosines.masked_fill(itself, -torch.inf),
                           torch.arange(2 * count, device=both.device).roll(count))


class FedDCSRModule(DomainModule):
    """Next items by z_s + z_e, the draws of the shared and the exclusive part; see ``loss``. ``sent``: shared
    representations of the last batch, (anchor_rows, L, d), which the domain sends; ``anchor``: what the server made of
    all domains', of the same shape; zero before the first."""

    rows = ("shared.items", "exclusive.items", "output.weight", "output.bias")

    def __init__(self, s: FedDCSRSettings, data: DomainData):
        super().__init__()
        self.s = s
        self.shared, self.exclusive = Part(s, data.n_items), Part(s, data.n_items)
        self.discriminator = Discriminator(s)
        # What has a row per item comes last: the rest starts alike in all domains.
        for part in (self.shared, self.exclusive):
            nn.init.normal_(part.items)
        self.output = nn.Linear(s.dim, data.n_items)
        self.register_buffer("graph", following(data.histories, data.n_items), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("anchor", torch.zeros(s.anchor_rows, s.max_length, s.dim))
        self.register_buffer("sent", self.anchor.clone())

    def _items(self, batch: Histories) -> Items:
        """The items of a batch, in rows of max_length with padding where ``padding`` says."""
        length, place = self.s.max_length, torch.arange(self.s.max_length, device=batch.items.device)
        owners = torch.arange(len(batch.items), device=batch.items.device).repeat_interleave(batch.lengths)
        if self.s.padding == "after":
            return Items(batch.items[batch.real], owners, place < batch.lengths.unsqueeze(1))
        return Items(batch.items[batch.real], owners, place >= length - batch.lengths.unsqueeze(1))

    @once_in_ranking
    def _item_vectors(self) -> list[Tensor]:
        """Of the shared and of the exclusive part, each (items, d)."""
        return [part.item_vectors(self.graph) for part in (self.shared, self.exclusive)]

    def scores(self, batch: Histories) -> Tensor:
        items = self._items(batch)
        shared, exclusive = (part(vectors, items).drawn for part, vectors in
                             zip((self.shared, self.exclusive), self._item_vectors()))
        return self.output((shared + exclusive)[items.last])

    def loss(self, batch: Histories, targets: Tensor) -> Tensor:
        """CE(z_s + z_e) + k (KL_s + KL_e) + beta L_sim + gamma CE(z_e) + lambda L_contrast. L_sim is ``_similarity``, k
        grows by 1 / ``kl_batches`` a batch up to ``kl_cap``, and the contrast is that of z_e at the last item with that
        of the shuffled history."""
        s, items = self.s, self._items(batch)
        of_items = self.exclusive.item_vectors(self.graph)
        shared = self.shared(self.shared.item_vectors(self.graph), items)
        exclusive = self.exclusive(of_items, items)
        loss = self._prediction(items, targets, shared.drawn + exclusive.drawn)
        weight = min(s.kl_cap, int(self.batches) / s.kl_batches)
        loss = loss + weight * self._mean(items, shared.divergence() + exclusive.divergence())
        if s.similarity_weight and self.anchor.any():
            negative = self.exclusive(of_items, items) if s.negative == "again" else exclusive
            loss = loss + s.similarity_weight * self._similarity(items, shared.drawn, negative.drawn)
        if s.exclusive_weight:
            loss = loss + s.exclusive_weight * self._prediction(items, targets, exclusive.drawn)
        if s.contrast_weight:
            view = self.exclusive(of_items, items.shuffled())
            loss = loss + s.contrast_weight * contrast(exclusive.drawn[items.last], view.drawn[items.last],
                                                       s.temperature)
        self.batches = self.batches + 1  # pooled domains have one, which each counts from
        self._keep(items.padded(shared.drawn.detach()))
        return loss

    def _keep(self, shared: Tensor) -> None:
        """Keep representations (B, L, d) to be sent, as many as all domains send: the first again, if there are fewer.
        The released code fills its last batch with samples of the first one."""
        self.sent = shared[torch.arange(self.s.anchor_rows, device=shared.device) % len(shared)]

    def _prediction(self, items: Items, targets: Tensor, z: Tensor) -> Tensor:
        """Cross-entropy of the items that follow, by representations (n, d)."""
        if self.s.predicts == "last":
            return F.cross_entropy(self.output(z[items.last]), targets)
        followers = items.numbers.roll(-1).index_copy(0, items.last, targets)
        return F.cross_entropy(self.output(z), followers, reduction="sum") / self._count(items)

    def _mean(self, items: Items, values: Tensor) -> Tensor:
        """Of values (n,) at the items that predict."""
        return values[items.last].mean() if self.s.predicts == "last" else values.sum() / self._count(items)

    def _count(self, items: Items) -> int:
        return items.real.numel() if self.s.averaged_over == "all" else len(items.numbers)

    def _similarity(self, items: Items, shared: Tensor, negative: Tensor) -> Tensor:
        """The mean of max(0, margin - sigmoid D(z_s, z_g) + sigmoid D(z_e, z_g)), z_g the server's representations.
        Sample i of a batch meets row i of z_g, whoever's that is; domains have no users in common."""
        samples = torch.arange(len(items.real), device=shared.device)
        anchor = self.anchor[samples % self.s.anchor_rows] * items.real.unsqueeze(2)
        if self.s.anchor == "eroded":
            count = min(len(samples), self.s.anchor_rows)
            self.anchor[:count] = anchor[:count]
        positive, other = (self.discriminator(items.padded(z), anchor).sigmoid() for z in (shared, negative))
        return F.relu(self.s.margin - positive + other).mean()


class FedDCSRBackbone(ModuleBackbone):
    """The module with its released sizes and optimiser: Adam with beta2 .98 at .001, batches of 256."""

    name = "feddcsr"
    numbers = 1
    title = "shared and exclusive variational graph self-attention encoders"
    reference = ("Zhang et al., FedDCSR: Federated Cross-domain Sequential Recommendation via Disentangled "
                 "Representation Learning, SDM 2024")
    Settings = FedDCSRSettings
    exchanges = frozenset({"shared representations"})
    central_defaults = {"optimiser": "adam", "adam_beta2": 0.98, "batch_size": 256, "weighting": "interactions"}
    ambiguities = {
        "item_vectors": {"mean": "released code: 1.5 raw + 0.5 graph", "once": "raw + graph"},
        "padding": {"before": "released code", "after": "the suite's other backbones"},
        "predicts": {"last": "samples of FFMSR's protocol", "all": "released code, whose samples are whole histories"},
        "averaged_over": {"all": "released code", "items": "a mean of what there is"},
        "negative": {"again": "released code", "same": "z_e itself"},
        "anchor": {"kept": "what the server sends", "eroded": "released code"},
        "kl_cap": {1.0: "released code for FKCB", 0.01: "released code for MBG and SGH"},
        "similarity_weight": {2.0: "released code for FKCB", 0.5: "released code for MBG and SGH"},
        "contrast_weight": {1.0: "released code for FKCB and MBG", 0.1: "released code for SGH"},
    }

    def __init__(self, settings):
        super().__init__(settings)
        check_heads(settings.dim, settings.heads)

    def module(self, data: DomainData) -> FedDCSRModule:
        return FedDCSRModule(self.settings, data)


class FedDCSR(DomainMethod):
    """A domain sends its shared encoder and the shared representations of its last batch; the server averages both.
    Everything else stays: item vectors, graphs, positions, the exclusive encoder, the output layer, the discriminator.
    Each row sent is what the encoder makes of one user's history, without the user's name; the server sees it."""

    name = "feddcsr"
    numbers = 1
    title = "domains average a shared encoder and shared representations"
    reference = FedDCSRBackbone.reference
    needs = "shared representations"
    sent = (SENT, "anchor")

    def upload(self, module, draw):
        return {name: value for name, value in module.named_parameters() if name.startswith(SENT)} | {
            "anchor": module.sent}
