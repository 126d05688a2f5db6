"""SASRec: self-attention over a client's session, as FCUCR's released code builds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from fedcl_bench.layers import apply_linear, feed_forward, layer_norm
from fedcl_bench.sequential import SequentialBackbone, SequentialSettings, linear_start, norm_start, xavier, zeros
from fedcl_bench.settings import setting


@dataclass(frozen=True)
class SASRecSettings(SequentialSettings):
    layers: int = setting(1, "self-attention blocks", low=1)


class SASRec(SequentialBackbone):
    """x = sqrt(d) item + position; per block q = LN(x), x = q + Attention(q, x, x), x = LN(x), x = x + FFN(x); then LN.

    Layer normalisation is applied to the queries and not to keys and values. Attention is causal, with one head; padded
    positions are zero before the first block, but as keys they are not masked.
    """

    name = "sasrec"
    title = "self-attention over the session, all parameters public"
    reference = ("Kang & McAuley, Self-Attentive Sequential Recommendation, ICDM 2018; in the form of FCUCR's released "
                 "code (WWW 2026)")
    Settings = SASRecSettings

    def dense_starts(self):
        d = self.settings.dim
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
        d, share, length = self.settings.dim, self.settings.dropout, inputs.shape[1]
        drop = partial(dropout, share=share)
        x = drop(inputs * math.sqrt(d) + clients["positions"][:, -length:] * sequence.real.unsqueeze(2))
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for k in range(self.settings.layers):
            q = layer_norm(clients, f"{k}.query_norm", x)
            weights = clients[f"{k}.in.weight"].transpose(1, 2).split([d, 2 * d], dim=2)
            biases = clients[f"{k}.in.bias"].unsqueeze(1).split([d, 2 * d], dim=2)
            query = torch.baddbmm(biases[0], q, weights[0])
            keys, values = torch.baddbmm(biases[1], x, weights[1]).split(d, dim=2)
            attention = (query @ keys.transpose(1, 2) / math.sqrt(d)).masked_fill(future, -torch.inf).softmax(2)
            x = q + apply_linear(clients, f"{k}.out", drop(attention) @ values)
            x = feed_forward(clients, f"{k}.ffn", layer_norm(clients, f"{k}.norm", x), drop)
        return layer_norm(clients, "norm", x)
