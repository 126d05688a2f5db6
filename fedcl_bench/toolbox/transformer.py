"""Parts that several recommenders of domains share: RecBole's Transformer encoder and UniSRec's adapter of texts.

Both are plain modules. Their dropout and noise act in training mode alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..plugin.silo import Histories, ModuleSettings
from .layers import check_heads
from ..core.settings import setting
from ..core.tuning import SIZES


@dataclass(frozen=True)
class TransformerSettings(ModuleSettings):
    """Settings of backbones with a ``TransformerEncoder``, with FFMSR's values, which are RecBole's but for dim."""

    layers: int = setting(2, "layers of the Transformer", low=1)
    heads: int = setting(2, "attention heads, a divisor of dim", low=1)
    inner_size: int = setting(256, "length of the feed-forward part's hidden layer", low=1)
    dropout: float = setting(0.5, "share of the encoder's values that are dropped in training", low=0.0, below=1.0)
    attention_dropout: float = setting(0.5, "share of the attention that is dropped in training", low=0.0, below=1.0)


def normal_start(module: nn.Module) -> None:
    """Start all linear layers and embeddings of ``module`` as RecBole: weights N(0, .02^2), biases 0."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def by_length(batch: Histories, encode: Callable[[Histories], Tensor]) -> Tensor:
    """What ``encode`` makes of all samples, (B, d), in pieces of samples of about one length. Pieces are as long as
    their longest history, so that little padding is encoded, and on a processor so small that what is made of them
    stays in its cache."""
    order = batch.lengths.argsort()
    pieces = []
    for chosen in order.split(len(order) if batch.lengths.is_cuda else SIZES.central_encoded):
        lengths = batch.lengths[chosen]
        pieces.append(encode(Histories(batch.items[chosen, :int(lengths[-1])], lengths, batch.users[chosen])))
    return torch.cat(pieces)[order.argsort()]


def attended(query: Tensor, keys: Tensor, values: Tensor, heads: int, dropout: float, **seen: Any) -> Tensor:
    """Scaled dot-product attention of several heads, (B, n, d). ``query``: (B, n, d); ``keys``, ``values``: (B, L, d);
    ``dropout``: of the attention; ``seen``: PyTorch's ``attn_mask``, of a shape that fits (B, heads, n, L), or
    ``is_causal``."""
    parts = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, keys, values))
    return F.scaled_dot_product_attention(*parts, dropout_p=dropout, **seen).transpose(1, 2).flatten(2)


class TransformerLayer(nn.Module):
    """x = LN(x + Attention(x, x, x)), then LN(x + FFN(x)) with GELU, as RecBole 1.2.0's of that name."""

    def __init__(self, settings: TransformerSettings):
        super().__init__()
        d, self.heads = settings.dim, settings.heads
        self.attention_dropout = settings.attention_dropout
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.inner, self.outer = nn.Linear(d, settings.inner_size), nn.Linear(settings.inner_size, d)
        self.norm, self.ffn_norm = (nn.LayerNorm(d, eps=1e-12) for _ in range(2))
        self.drop = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """(B, n, d) of the queries' representations. ``x``: queries, (B, n, d); ``keys``: what they look at, (B, L, d);
        ``seen``: which of the keys each query sees, bool of a shape that fits (B, heads, n, L)."""
        mixed = attended(self.query(x), self.key(keys), self.value(keys), self.heads,
                         self.attention_dropout if self.training else 0.0, attn_mask=seen)
        x = self.norm(x + self.drop(self.out(mixed)))
        return self.ffn_norm(x + self.drop(self.outer(F.gelu(self.inner(x)))))


class TransformerEncoder(nn.Module):
    """RecBole's causal encoder: layers with normalisation after each part (eps 1e-12), started with N(0, .02^2)."""

    def __init__(self, settings: TransformerSettings):
        """Raises UserError if ``heads`` does not divide ``dim``."""
        super().__init__()
        check_heads(settings.dim, settings.heads)
        self.layers = nn.ModuleList(TransformerLayer(settings) for _ in range(settings.layers))
        normal_start(self)

    def last(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The representation at each sample's last item, (B, d), without the last layer's other positions. ``x``: (B,
        L, d); ``lengths``: how many positions of each sample have an item, from the first on, (B,)."""
        length = x.shape[1]
        real = (torch.arange(length, device=x.device) < lengths.unsqueeze(1))[:, None, None]
        seen = real & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers[:-1]:
            x = layer(x, x, seen)
        query = x[torch.arange(len(x), device=x.device), lengths - 1].unsqueeze(1)
        return self.layers[-1](query, x, real).squeeze(1)


_VALUES = 2 ** 16  # of a number that decides whether another is dropped


class ExpertDropout:
    """Dropout of the same rows for several experts, each with draws of its own. ``F.dropout`` draws a number for each
    of theirs, this one word for four. A short run of FFMSR takes 28 % less of a processor's time by it
    (benchmarks/README.md)."""

    def __init__(self, share: float, experts: int, rows: Tensor):
        """``share``: of numbers that are dropped; it is rounded to a 65,536th; ``rows``: (n, width); of these no more
        than their shape counts."""
        self._zeros = min(round(share * _VALUES), _VALUES - 1)
        self.scale = _VALUES / (_VALUES - self._zeros)  # what kept numbers are to be multiplied by
        words = torch.empty(experts, (rows.numel() + 3) // 4, dtype=torch.int64, device=rows.device)
        self._draws = words.random_(-2 ** 63, None).view(torch.int16)[:, :rows.numel()].unflatten(1, rows.shape)

    def dropped(self, rows: Tensor, first: int = 0) -> Tensor:
        """Rows with 0 in the place of what is dropped, (experts, rows, width). ``first``: number of the first row."""
        draws = self._draws[:, first:first + len(rows)]
        kept = torch.empty(draws.shape, dtype=rows.dtype, device=rows.device)  # bools would be copied to be multiplied
        torch.ge(draws, self._zeros - _VALUES // 2, out=kept)
        return kept.mul_(rows)


class MoEAdapter(nn.Module):
    """A mixture of parametric-whitening experts, from text encodings to item vectors (UniSRec; FFMSR, Eqs. 3-5):
    x -> sum_k g_k (dropout(x) - b_k) W_k with g = softmax(x W_gate + noise), where the noise is Gaussian and its
    deviation is softplus(x W_noise) + .01. W_k starts as N(0, .02^2), all else as 0. Each expert draws a dropout of
    its own."""

    def __init__(self, inputs: int, outputs: int, experts: int = 8, dropout: float = 0.2):
        super().__init__()
        self.dropout = dropout
        self.weight = nn.Parameter(torch.randn(experts, inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(experts, inputs))
        self.gate = nn.Parameter(torch.zeros(inputs, experts))
        self.noise = nn.Parameter(torch.zeros(inputs, experts))

    def gates(self, x: Tensor) -> Tensor:
        """Of (..., inputs) the weights g of the experts, (..., experts), Eq. (4)."""
        logits = x @ self.gate
        if self.training:
            logits = logits + torch.randn_like(logits) * (F.softplus(x @ self.noise) + 0.01)
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), Eqs. (3) and (5). On a processor some rows at a time, so that what is made
        of them stays in its cache: a step of FFMSR on Office takes a fifth less time by it (benchmarks/README.md)."""
        gates, rows, weight = self.gates(x), x.flatten(0, -2), self.weight
        drop = ExpertDropout(self.dropout, len(weight), rows) if self.training and self.dropout else None
        if drop:
            weight = weight * drop.scale
        size, mixed = len(rows) if x.is_cuda else SIZES.adapted, []
        for number, (piece, of_piece) in enumerate(zip(rows.split(size), gates.flatten(0, -2).split(size))):
            outputs = (drop.dropped(piece, number * size) if drop else piece) @ weight  # (experts, n, outputs)
            mixed.append(torch.einsum("nk,kno->no", of_piece, outputs))
        # (x - b) W = x W - b W, where b W is one row for all x.
        shifts = torch.einsum("ki,kio->ko", self.bias, self.weight)
        return torch.cat(mixed).view(*x.shape[:-1], -1) - gates @ shifts
