"""SASRec: self-attention over a client's session, as FCUCR's released code builds it or as RecBole does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from fedcl_bench import SequentialBackbone, SequentialSettings, linear_start, norm_start, setting, xavier, zeros
from fedcl_bench.toolbox.functional import linear
from fedcl_bench.toolbox.layers import apply_linear, attend, check_heads, feed_forward, layer_norm, transformer_block


@dataclass(frozen=True)
class SASRecSettings(SequentialSettings):
    architecture: str = setting("released", "the blocks of FCUCR's released code, or those of RecBole 1.2.0",
                                choices=("released", "recbole"))
    layers: int = setting(1, "self-attention blocks; RecBole's default is 2", low=1)
    heads: int = setting(1, "attention heads, a divisor of dim; RecBole's default is 2", low=1)
    inner_size: int = setting(256, "length of the feed-forward part's hidden layer with architecture=recbole; "
                              "otherwise it is dim", low=1)


class SASRec(SequentialBackbone):
    """Causal self-attention. Its blocks, for x at all positions:

    - released: x = sqrt(d) item + position; per block q = LN(x), x = q + Attention(q, x, x), x = LN(x), x = x + FFN(x);
      at the end LN. Normalisation is applied to the queries and not to keys and values. Padded positions are zero
      before the first block, but as keys they are not masked.
    - recbole: x = LN(item + position), positions counted from the first item; per block x = LN(x + Attention(x, x, x)),
      x = LN(x + FFN(x)), with GELU. Padded keys are masked, and representations at padding are zero.
    """

    name = "sasrec"
    numbers = 1
    title = "self-attention over the session, all parameters public"
    reference = ("Kang & McAuley, Self-Attentive Sequential Recommendation, ICDM 2018; in the form of FCUCR's released "
                 "code (WWW 2026), or of RecBole 1.2.0 with that code's start")
    Settings = SASRecSettings
    ambiguities = {"architecture": {"released": "released code of FCUCR", "recbole": "RecBole"}}

    def __init__(self, settings):
        super().__init__(settings)
        check_heads(settings.dim, settings.heads)
        self.pads = settings.architecture == "released"  # which attends to padding

    def dense_starts(self):
        d, inner = self.settings.dim, self.settings.inner_size
        if self.settings.architecture == "recbole":
            starts = {"positions": xavier(self.settings.max_length, d), **norm_start("norm", d)}
            for k in range(self.settings.layers):
                sizes = {"query": (d, d), "key": (d, d), "value": (d, d), "out": (d, d), "ffn.0": (inner, d),
                         "ffn.1": (d, inner)}
                for name, shape in sizes.items():  # RecBole sets biases to zero
                    starts |= {f"{k}.{name}.weight": xavier(*shape), f"{k}.{name}.bias": zeros(shape[0])}
                starts |= {**norm_start(f"{k}.norm", d), **norm_start(f"{k}.ffn_norm", d)}
            return starts
        # Glorot's start counts the unused row of padding, as the released code does.
        starts = {"positions": xavier(self.settings.max_length + 1, d).without_rows(1)}
        for k in range(self.settings.layers):
            starts |= {**norm_start(f"{k}.query_norm", d),
                       f"{k}.in.weight": xavier(3 * d, d), f"{k}.in.bias": zeros(3 * d),
                       f"{k}.out.weight": xavier(d, d), f"{k}.out.bias": zeros(d),
                       **norm_start(f"{k}.norm", d),
                       **linear_start(f"{k}.ffn.0", d, d), **linear_start(f"{k}.ffn.1", d, d)}
        return {**starts, **norm_start("norm", d)}

    def encode(self, clients, inputs, sequence, dropout):
        drop = partial(dropout, share=self.settings.dropout)
        length = inputs.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        blocks = self._recbole if self.settings.architecture == "recbole" else self._released
        return blocks(clients, inputs, sequence.real, future, drop)

    def _released(self, clients, inputs, real, future, drop):
        d = self.settings.dim
        x = drop(inputs * math.sqrt(d) + clients["positions"][:, -inputs.shape[1]:] * real.unsqueeze(2))
        for k in range(self.settings.layers):
            q = layer_norm(clients, f"{k}.query_norm", x)
            of_query, of_both = zip(*(clients[f"{k}.in.{name}"].split([d, 2 * d], dim=1)
                                      for name in ("weight", "bias")))
            query = linear(q, *of_query)
            keys, values = linear(x, *of_both).split(d, dim=2)
            x = q + apply_linear(clients, f"{k}.out", attend(query, keys, values, future, self.settings.heads, drop))
            x = feed_forward(clients, f"{k}.ffn", layer_norm(clients, f"{k}.norm", x), drop)
        return layer_norm(clients, "norm", x)

    def _recbole(self, clients, inputs, real, future, drop):
        position = (real.long().cumsum(1) - 1).clamp(min=0).unsqueeze(2).expand_as(inputs)
        x = drop(layer_norm(clients, "norm", inputs + clients["positions"].gather(1, position), eps=1e-12))
        # A padded position sees itself, so that no row of the softmax is empty.
        itself = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
        masked = ((future | ~real.unsqueeze(1)) & ~itself).unsqueeze(1)
        for k in range(self.settings.layers):
            x = transformer_block(clients, str(k), x, masked, self.settings.heads, drop)
        return x * real.unsqueeze(2)
