"""What recommenders of domains have in common that rank by a cosine: item vectors, positions and a Transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .transformer import TransformerEncoder, TransformerSettings, by_length
from ..plugin.silo import DomainModule, Histories, TextSettings
from ..core.settings import setting


@dataclass(frozen=True)
class CosineSettings(TransformerSettings, TextSettings):
    """Settings of recommenders that make item vectors of one encoding per text, and rank by a cosine."""

    text_layers: int = setting(1, "the encoder's last so many layers are taken, and the mean of them", low=1, high=100)
    temperature: float = setting(0.07, "cosines are divided by it in the softmax", above=0.0,
                                 search=(0.03, 0.07, 0.15, 1.0))


class Positioned(nn.Module):
    """A Transformer over dropout(LN(item vector + position)); positions are counted from the first item."""

    def __init__(self, settings: TransformerSettings):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(settings.max_length, settings.dim) * 0.02)
        self.norm = nn.LayerNorm(settings.dim, eps=1e-12)
        self.drop = nn.Dropout(settings.dropout)
        self.encoder = TransformerEncoder(settings)

    def forward(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """The representation at each sample's last item, (B, d). ``vectors``: of the samples' items, (B, L, d);
        ``lengths``: how many of them are no padding, (B,)."""
        x = self.drop(self.norm(vectors + self.positions[:vectors.shape[1]]))
        return self.encoder.last(x, lengths)


class CosineModule(DomainModule):
    """Base class: a history is encoded by ``Positioned``, and a score is a cosine by the temperature. Subclasses say
    the vectors of items."""

    def __init__(self, settings: CosineSettings):
        super().__init__()
        self.temperature = settings.temperature
        self.history = Positioned(settings)

    def vectors(self) -> Tensor:
        """Of all items, (items, d)."""
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        return self.vectors()

    def represent(self, batch: Histories, vectors: Tensor) -> Tensor:
        """What users are looking for, (B, d). ``vectors``: of all items, (items, d)."""
        return by_length(batch, lambda piece: self.history(rows_at(piece.items, vectors), piece.lengths))

    def scores(self, batch: Histories) -> Tensor:
        vectors = self.vectors()
        return cosines(self.represent(batch, vectors), vectors) / self.temperature


def rows_at(items: Tensor, table: Tensor) -> Tensor:
    """A table's rows of some items, (B, L, d); of padding the first one."""
    return F.embedding(items.clamp(min=0), table)


def cosines(queries: Tensor, vectors: Tensor) -> Tensor:
    """Cosine of each of (B, d) with each of (items, d): (B, items); 0 with a vector of zeros."""
    return F.normalize(queries, dim=-1) @ F.normalize(vectors, dim=-1).T
