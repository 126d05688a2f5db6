"""TiSASRec: self-attention over a client's session that knows the time between any two of its items."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedcl_bench import Sequence, SequentialBackbone, SequentialSettings, linear_start, norm_start, setting, xavier
from fedcl_bench.toolbox.functional import attention
from fedcl_bench.toolbox.layers import apply_linear, feed_forward, layer_norm


@dataclass(frozen=True)
class TiSASRecSettings(SequentialSettings):
    # FCUCR does not say how deep its TiSASRec is. Its SASRec has one block, and with the same depth the two backbones
    # differ by the attention only.
    layers: int = setting(1, "self-attention blocks; 2 in TiSASRec's paper", low=1, search=(1, 2))
    time_span: int = setting(256, "longest interval, in multiples of the session's shortest; longer ones count as it",
                             low=1)


def intervals(sequence: Sequence, span: int) -> Tensor:
    """The interval between any two positions in multiples of the shortest one, at most ``span``: int64, (C, L, L). A
    sequence's time is rounded in units of its own smallest non-zero gap (1 if there is none) and starts at 1; padding
    is at time 0. The time of an item to predict after the last position plays no part. At earlier positions a later gap
    can, through the unit, as it does in TiSASRec's own preparation of data."""
    times, real = sequence.times, sequence.real
    gaps = (times.unsqueeze(2) - times.unsqueeze(1)).abs()
    counted = (gaps > 0.0) & real.unsqueeze(2) & real.unsqueeze(1)
    unit = torch.where(counted, gaps, torch.inf).flatten(1).amin(1, keepdim=True)
    unit = torch.where(unit.isinf(), 1.0, unit)
    first = torch.where(real, times, torch.inf).amin(1, keepdim=True)
    scaled = torch.where(real, ((times - first) / unit).round() + 1.0, 0.0)
    return (scaled.unsqueeze(2) - scaled.unsqueeze(1)).abs().clamp(max=span).long()


class TiSASRec(SequentialBackbone):
    """SASRec's blocks whose keys and values have a part for the position and one for the interval to the query:
    a_ij = q_i . (k_j + PK_j + TK_(r_ij)) / sqrt(d) for j <= i; block: q = LN(x), x = LN(q + sum_j softmax(a)_ij (v_j +
    PV_j + TV_(r_ij))), x = x + FFN(x); then LN. No output projection. As keys, padded positions are not masked: their
    items are zero, but their positions and intervals count. After every block they are set to zero again. Its paper's
    penalty of tables' norms, 5e-5, is left out, as in FCUCR's code."""

    name = "tisasrec"
    numbers = 1
    title = "self-attention with the time between items, all parameters public"
    reference = ("Li, Wang & McAuley, Time Interval Aware Self-Attention for Sequential Recommendation, WSDM 2020, "
                 "with the start of FCUCR's released code (WWW 2026)")
    Settings = TiSASRecSettings

    def dense_starts(self):
        d = self.settings.dim
        starts = {name: xavier(self.settings.max_length, d) for name in ("positions.key", "positions.value")}
        starts |= {name: xavier(self.settings.time_span + 1, d) for name in ("intervals.key", "intervals.value")}
        for k in range(self.settings.layers):
            starts |= norm_start(f"{k}.query_norm", d)
            for name in ("query", "key", "value", "ffn.0", "ffn.1"):
                starts |= linear_start(f"{k}.{name}", d, d)
            starts |= norm_start(f"{k}.norm", d)
        return {**starts, **norm_start("norm", d)}

    def encode(self, clients, inputs, sequence, dropout):
        d, (count, length) = self.settings.dim, inputs.shape[:2]
        drop = partial(dropout, share=self.settings.dropout)
        real = sequence.real.unsqueeze(2)
        x = drop(inputs * math.sqrt(d))
        at_key, at_value = (drop(clients[f"positions.{name}"][:, -length:]) for name in ("key", "value"))
        # Only pairs (i, j <= i) are looked up: half of all, and the dropout of every looked-up entry stays its own.
        i, j = torch.tril_indices(length, length, device=x.device)
        pair = i * length + j
        row = intervals(sequence, self.settings.time_span).flatten(1)[:, pair]
        row = row + torch.arange(count, device=x.device).unsqueeze(1) * (self.settings.time_span + 1)
        since_key, since_value = (drop(clients[f"intervals.{name}"].flatten(0, 1).index_select(0, row.view(-1))
                                       .view(count, len(pair), d)) for name in ("key", "value"))
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for k in range(self.settings.layers):
            q = layer_norm(clients, f"{k}.query_norm", x)
            query = apply_linear(clients, f"{k}.query", q)
            keys = apply_linear(clients, f"{k}.key", x) + at_key
            values = apply_linear(clients, f"{k}.value", x) + at_value
            by_time = x.new_zeros(count, length * length).index_copy(
                1, pair, (query.index_select(1, i) * since_key).sum(2)).view(count, length, length)
            weights = drop(attention(torch.baddbmm(by_time, query, keys.transpose(1, 2)), future, d ** -0.5))
            of_pair = weights.flatten(1).index_select(1, pair).unsqueeze(2)
            x = (q + weights @ values).index_add(1, i, of_pair * since_value)
            x = feed_forward(clients, f"{k}.ffn", layer_norm(clients, f"{k}.norm", x), drop) * real
        return layer_norm(clients, "norm", x)
