"""Fusion and filtering of what items' texts say, and what domains tell one another of it (FFMSR).

FFMSR's own network has these parts, and others can take them (its Table 5). An item's encodings of several layers of a
language model are fused to one vector, with weights that look at the item's ID embedding. A domain sends the encodings
fused with these weights, the server clusters them, and every item receives its cluster's centroid. Sequences of
centroids are filtered in the frequency domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .transformer import MoEAdapter
from ..plugin.silo import DomainModule, TextSettings
from ..core.settings import inherited, setting

SEMANTICS = "semantics"  # the name of this exchange
CENTROIDS = "clusters.centroids"  # where a module has what it receives
_NARROW = 16  # numbers before the last layer of the released code's fusion


@dataclass(frozen=True)
class SemanticSettings(TextSettings):
    """Settings of backbones with these parts."""

    experts: int = setting(8, "G: experts of an adapter of texts", low=1)
    adapter_dropout: float = setting(0.2, "share of an adapter's inputs that are dropped in training", low=0.0,
                                     below=1.0)
    layer_adapters: str = setting("shared", "one adapter for all layers of the language model (released code), or one "
                                  "for each", choices=("shared", "each"))
    fusion_layers: int = setting(3, "layers of the network that weighs the language model's layers: 2 (Eq. 7), or 3, "
                                 "the second of 16 numbers (released code)", choices=(2, 3))


@dataclass(frozen=True)
class AddedSemanticSettings(SemanticSettings):
    """Settings of recommenders that can have these parts besides their own."""

    semantics: bool = setting(False, "with FFMSR's fusion of the language model's layers, and its filtered clusters "
                              "(its Table 5), for --method ffmsr")
    experts: int = inherited(SemanticSettings, "experts", only_if="semantics")
    adapter_dropout: float = inherited(SemanticSettings, "adapter_dropout", only_if="semantics")
    layer_adapters: str = inherited(SemanticSettings, "layer_adapters", only_if="semantics")
    fusion_layers: int = inherited(SemanticSettings, "fusion_layers", only_if="semantics")


class FourierFilter(nn.Module):
    """Sequences (B, L, d) times complex weights in the frequency domain, Eqs. (12)-(14); started with N(0, .02^2). The
    weights (L // 2 + 1, d) are those of a real sequence's discrete Fourier transform over L positions. It is computed
    as the circular convolution that this product is: twice as fast as transforms at these lengths."""

    def __init__(self, length: int, dim: int):
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.randn(length // 2 + 1, dim, 2) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.fft.irfft(torch.view_as_complex(self.weight), n=self.length, dim=0)
        position = torch.arange(self.length, device=x.device)
        circulant = kernel.T[:, (position.unsqueeze(1) - position) % self.length]  # (d, L, L)
        return torch.einsum("dlm,bmd->bld", circulant, x)


class TextFusion(nn.Module):
    """t_i of every item from the encodings of its text, Eqs. (3)-(9), and the mixed encodings x_i, Eqs. (10)-(11)."""

    def __init__(self, encodings: Tensor, dim: int, settings: SemanticSettings):
        """``encodings``: of every item by each layer, x_i^{L=j}, (items, layers, d_W)."""
        super().__init__()
        self.register_buffer("encodings", encodings, persistent=False)
        layers, width = encodings.shape[1:]
        adapters = layers if settings.layer_adapters == "each" else 1
        self.adapters = nn.ModuleList(MoEAdapter(width, dim, settings.experts, settings.adapter_dropout)
                                      for _ in range(adapters))
        sizes = (2 * dim, dim, _NARROW, 1) if settings.fusion_layers == 3 else (2 * dim, dim, 1)
        linears = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
        self.weigh = nn.Sequential(*(part for linear in linears[:-1] for part in (linear, nn.LeakyReLU())), linears[-1])

    def adapted(self) -> Tensor:
        """t_i^{L=j}, (items, layers, d), Eqs. (3)-(6)."""
        if len(self.adapters) == 1:
            return self.adapters[0](self.encodings)
        return torch.stack([adapter(x) for adapter, x in zip(self.adapters, self.encodings.unbind(1))], 1)

    def weights(self, ids: Tensor, texts: Tensor) -> Tensor:
        """w_ij, (items, layers), Eqs. (7)-(8). No gradient reaches the ID embeddings. ``ids``: e_i, (items, d);
        ``texts``: t_i^{L=j}, (items, layers, d)."""
        both = torch.cat([ids.detach().unsqueeze(1).expand_as(texts), texts], 2)
        return self.weigh(both).squeeze(2).softmax(1)

    def forward(self, ids: Tensor) -> Tensor:
        """t_i, (items, d), Eq. (9). ``ids``: e_i, (items, d)."""
        texts = self.adapted()
        return torch.einsum("ij,ijd->id", self.weights(ids, texts), texts)

    def mixed(self, ids: Tensor) -> Tensor:
        """X_F: the encodings mixed with the same weights, (items, d_W), Eqs. (10)-(11)."""
        return torch.einsum("ij,ijd->id", self.weights(ids, self.adapted()), self.encodings)


class ClusterStream(nn.Module):
    """What a domain receives, as vectors f_i of items, and the filter of their sequences, Eqs. (12)-(14)."""

    def __init__(self, items: int, width: int, length: int, settings: SemanticSettings):
        """``width``: d_W; ``length``: of the sequences."""
        super().__init__()
        self.register_buffer("centroids", torch.zeros(items, width))
        self.adapter = MoEAdapter(width, settings.dim, settings.experts, settings.adapter_dropout)
        self.filter: nn.Module = FourierFilter(length, settings.dim)

    def forward(self, padding: int = 0) -> Tensor:
        """f_i: the centroids, zeros before anything is received, through an adapter of their own: (items, d).
        ``padding``: so many rows more, of centroids that are zero."""
        return self.adapter(F.pad(self.centroids, (0, 0, 0, padding)))

    def filtered(self, items: Tensor, vectors: Tensor) -> Tensor:
        """f~ of histories, (B, L, d), Eqs. (12)-(14); padding has vectors of zeros. ``items``: their numbers, (B, L),
        and padding, which is any other number; ``vectors``: f_i of all items, (items, d)."""
        count, length = len(vectors), items.shape[1]
        numbers = F.pad(items, (0, self.filter.length - length), value=-1)
        numbers = numbers.where((numbers >= 0) & (numbers < count), count)
        return self.filter(F.embedding(numbers, F.pad(vectors, (0, 0, 0, 1))))[:, :length]


class SemanticModule(DomainModule):
    """Base class of modules that exchange ``semantics``: a method sends ``semantics()`` and sets ``CENTROIDS``. A
    subclass has ``clusters``, a ``ClusterStream``."""

    rows: ClassVar[tuple[str, ...]] = (CENTROIDS,)
    clusters: ClusterStream

    def semantics(self) -> Tensor:
        """X_F, (items, d_W), Eqs. (10)-(11); of users nothing."""
        raise NotImplementedError
