"""A transformer that represents a session by one vector: the encoder of the article on FCUCR."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fedcl_bench import (ITEM, SequentialBackbone, SequentialSettings, SessionBackbone, SessionSettings, SessionVectors,
                         Start, inherited, norm_start, setting, zeros)
from fedcl_bench.toolbox.layers import apply_linear, attend, check_heads, layer_norm

_EPS = 1e-5  # of layer normalisations


@dataclass(frozen=True)
class SessionTransformerSettings(SessionSettings, SequentialSettings):
    """The article's values."""

    dim: int = setting(50, "length d of item vectors and representations", low=1)
    max_length: int = setting(50, "a session's last max_length items are encoded", low=1)
    dropout: float = setting(0.1, "share of entries that dropout sets to zero", low=0.0, high=0.9)
    layers: int = setting(2, "blocks", low=1)
    heads: int = setting(2, "attention heads, a divisor of dim", low=1)
    gradient_norm: float = setting(1.0, "the gradient of a client's local batch is scaled down to this L2 norm; 0: "
                                   "never", low=0.0, only_if=("stream=sessions", "topology!=central"))
    output_embedding: str = inherited(SequentialSettings, "output_embedding", default="private")


class SessionTransformer(SessionBackbone):
    """x = LN(item + position); per block x = x + Attention(LN(x)), x = x + W_1 relu(W_0 LN(x)); h is the mean of x.
    Every position sees all others but padding. The score of an item is the inner product of h, or of what a method
    makes of it, with the item's row. Alone it has no private parameters but output rows: FT of it is a federation whose
    clients share the encoder."""

    name = "session-transformer"
    numbers = 1
    title = "a transformer's mean over the session's items; scores by rows of each client's own"
    reference = ("the representation module of an article on FCUCR (WWW 2026); Vaswani et al., Attention Is All You "
                 "Need, NeurIPS 2017, with layer normalisation first")
    Settings = SessionTransformerSettings
    defaults = {**SessionBackbone.defaults, "adam_beta2": 0.999, "init": "server"}
    ignored = {**SessionBackbone.ignored,
               "head_size": "with one representation of a session, whose prediction module has d hidden numbers",
               "prototype": "with one representation of a session, which is the prototype itself"}
    central_defaults = {**SessionBackbone.central_defaults, "output_embedding": "tied"}
    inner_products = True
    session_scores = SequentialBackbone.session_scores
    n_vectors = 1

    def __init__(self, settings):
        super().__init__(settings)
        check_heads(settings.dim, settings.heads)
        self.gradient_norm = settings.gradient_norm

    def item_starts(self, n_items):
        return {ITEM: Start((self.settings.dim,), bound=_glorot(n_items, self.settings.dim).bound)}

    def dense_starts(self):
        d = self.settings.dim
        starts = {"positions": _glorot(self.settings.max_length, d), **norm_start("norm", d)}
        for k in range(self.settings.layers):
            starts |= {**norm_start(f"{k}.norm", d), **norm_start(f"{k}.ffn_norm", d),
                       f"{k}.in.weight": _glorot(3 * d, d), f"{k}.in.bias": zeros(3 * d),
                       f"{k}.out.weight": Start((d, d), bound=d ** -0.5), f"{k}.out.bias": zeros(d)}
            for name, inputs, outputs in ((f"{k}.ffn.0", d, 4 * d), (f"{k}.ffn.1", 4 * d, d)):
                starts |= {f"{name}.weight": Start((outputs, inputs), bound=inputs ** -0.5),
                           f"{name}.bias": Start((outputs,), bound=inputs ** -0.5)}
        return starts

    def session_vectors(self, clients, inputs, sequence, dropout):
        real, drop = sequence.real, partial(dropout, share=self.settings.dropout)
        position = (real.long().cumsum(1) - 1).clamp(min=0).unsqueeze(2).expand_as(inputs)
        x = drop(layer_norm(clients, "norm", inputs + clients["positions"].gather(1, position), _EPS))
        masked = ~real[:, None, None]
        for k in range(self.settings.layers):
            parts = apply_linear(clients, f"{k}.in", layer_norm(clients, f"{k}.norm", x, _EPS)).chunk(3, dim=2)
            x = x + drop(apply_linear(clients, f"{k}.out", attend(*parts, masked, self.settings.heads, drop)))
            hidden = torch.relu(apply_linear(clients, f"{k}.ffn.0", layer_norm(clients, f"{k}.ffn_norm", x, _EPS)))
            x = x + drop(apply_linear(clients, f"{k}.ffn.1", drop(hidden)))
        mean = (x * real.unsqueeze(2)).sum(1, keepdim=True) / real.sum(1).clamp(min=1)[:, None, None]
        return SessionVectors(mean, torch.ones_like(real[:, :1]))


def _glorot(rows: int, columns: int) -> Start:
    """Glorot's uniform start of a matrix."""
    return Start((rows, columns), bound=(6.0 / (rows + columns)) ** 0.5)
