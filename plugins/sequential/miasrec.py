"""MiaSRec: a vector for every item of a session and one for their mean, of which the best and the mean score count.

Each formula stands where it is computed. Where the paper and its released code differ, a setting chooses between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcl_bench import ITEM, SessionBackbone, SessionSettings, SessionVectors, Start, norm_start, setting, zeros
from fedcl_bench.toolbox.functional import Pooling, cosine_pool
from fedcl_bench.toolbox.layers import apply_linear, check_heads, layer_norm, transformer_block

_ENTMAX = {"entmax": 1.5, "sparsemax": 2.0}  # alpha
_STD = 0.02  # of the encoder's matrices at the start
_BISECTIONS = 60  # of an interval of length 1, to double precision


@dataclass(frozen=True)
class MiaSRecSettings(SessionSettings):
    dropout: float = setting(0.1, "share of entries that dropout sets to zero in the encoder", low=0.0, high=0.9)
    session_dropout: float = setting(0.1, "the same for the item rows of the session", low=0.0, high=0.9)
    item_dropout: float = setting(0.1, "the same for the item rows that the loss scores", low=0.0, high=0.9)
    layers: int = setting(2, "transformer blocks", low=1)
    heads: int = setting(2, "attention heads, a divisor of dim", low=1)
    inner_size: int = setting(256, "length of the feed-forward part's hidden layer", low=1)
    max_repeat: int = setting(2, "occurrences in the session beyond this count as it", low=1)
    score_temperature: float = setting(0.07, "tau: the loss divides scores by it", above=0.0)
    beta_logit: float = setting(0.9, "beta: weight of the best score, beside that of the mean score", low=0.0, high=1.0)
    selection: str = setting("off", "vectors whose weight under alpha-entmax is 0 leave the set: none does (what the "
                             "released code comes to), alpha = 1.5 (entmax) or 2 (sparsemax). The weights have no "
                             "gradient, so the choice is that of untrained weights",
                             choices=("off", "entmax", "sparsemax"))
    padding: str = setting("none", "the best score is one of the session's vectors (none), or also of the positions "
                           "without item up to max_length, whose weights are 7e-9 and not 0 in the released code "
                           "(vectors). A client trains on one session at a time, and that code then has none either",
                           choices=("none", "vectors"))
    mean_token: str = setting("first_item", "in counts of repeated items the token of the mean is one more of the "
                              "first item there is (released code, where both have id 1), or of none (apart)",
                              choices=("first_item", "apart"))


def support(scores: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Which weights of alpha-entmax(scores) over the mask are above 0, bool (C, M). The weights are [(alpha - 1) score
    - tau]_+ ^ (1 / (alpha - 1)), and tau is where they add up to 1 (Peters et al., Sparse Sequence-to-Sequence Models,
    ACL 2019). It is found by bisection, as their sum falls with tau."""
    scaled = (scores.double() * (alpha - 1.0)).masked_fill(~mask, -torch.inf)
    high = scaled.amax(1, keepdim=True)
    low = high - 1.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        above = (scaled - middle).clamp(min=0.0).pow(1.0 / (alpha - 1.0)).sum(1, keepdim=True) >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return scaled > low


class MiaSRec(SessionBackbone):
    """The session is read from its last item to its first, after a token for the mean of its item rows.

    - The input of a token is its row plus a position's and a repeat count's vector, normalised and through
      bidirectional transformer blocks.
    - z = g x + (1 - g) h with the gate g = sigmoid(W [x ; h] + b), for rows x and the blocks' outputs h.
    - Weights are alpha-entmax of a linear layer of [z_0 ; z_l]. The vectors of the set are z_l divided by their
      lengths, so that of the weights only matters which are 0.
    - With padding=vectors, positions without item have a row of their own, which gets no gradient there; the row is
      one more item in the cross-entropy, which is never right.
    - The score of item i is beta max_l cos(z_l, e_i) + (1 - beta) mean_l cos(z_l, e_i); the loss is the cross-entropy
      of scores over tau.
    """

    name = "miasrec"
    numbers = 1
    title = "a vector per item of the session, of which the best and the mean score count"
    reference = ("Choi et al., Multi-intent-aware Session-based Recommendation, SIGIR 2024, as in its released code, "
                 "which drops no vector")
    Settings = MiaSRecSettings
    central_defaults = {**SessionBackbone.central_defaults, "batch_size": 1024, "padding": "vectors"}

    def __init__(self, settings):
        super().__init__(settings)
        check_heads(settings.dim, settings.heads)
        self.scale, self.candidate_dropout = 1.0 / settings.score_temperature, settings.item_dropout
        self.pads = settings.padding == "vectors"

    @property
    def n_vectors(self):
        return self.settings.max_length + 1 + self.pads

    def item_starts(self, n_items):
        d = self.settings.dim
        return {ITEM: Start((d,), bound=d ** -0.5)}

    def dense_starts(self):
        s = self.settings
        d, inner = s.dim, s.inner_size
        matrices = {"highway": (d, 2 * d), **({} if s.selection == "off" else {"importance": (1, 2 * d)})}
        for k in range(s.layers):
            matrices |= {f"{k}.{name}": (d, d) for name in ("query", "key", "value", "out")}
            matrices |= {f"{k}.ffn.0": (inner, d), f"{k}.ffn.1": (d, inner)}
        starts = {"positions": Start((s.max_length + 1, d), std=_STD), "repeats": Start((s.max_repeat, d), std=_STD),
                  **norm_start("norm", d)}
        for name, shape in matrices.items():
            starts |= {f"{name}.weight": Start(shape, std=_STD), f"{name}.bias": zeros(shape[0])}
        for k in range(s.layers):
            starts |= {**norm_start(f"{k}.norm", d), **norm_start(f"{k}.ffn_norm", d)}
        return {**starts, "padding": Start((d,), bound=d ** -0.5)} if self.pads else starts

    def session_vectors(self, clients, inputs, sequence, dropout):
        s, drop = self.settings, partial(dropout, share=self.settings.dropout)
        real = sequence.real.flip(1)
        mask = torch.cat([real[:, :1], real], 1)  # a session has at least one item, so its mean is there
        rows = inputs.flip(1)
        mean = rows.sum(1, keepdim=True) / real.sum(1)[:, None, None]
        if self.pads:
            rows = torch.where(real.unsqueeze(2), rows, clients["padding"].detach().unsqueeze(1))
        x = dropout(torch.cat([mean, rows], 1), s.session_dropout)
        h = x + clients["positions"][:, :x.shape[1]] + self.repeat_vectors(clients, sequence.items.flip(1), mask)
        h = drop(layer_norm(clients, "norm", h, eps=1e-12))
        hidden = (~mask)[:, None, None]
        for k in range(s.layers):
            h = transformer_block(clients, str(k), h, hidden, s.heads, drop)
        z = self.highway(clients, x, h)
        kept = mask
        if s.selection != "off":
            with torch.no_grad():
                kept = mask & support(self.importance(clients, z), mask, _ENTMAX[s.selection])
        vectors = normalize(z, dim=2)
        if not self.pads:
            return SessionVectors(vectors * kept.unsqueeze(2), mask)
        # The mean of those with items comes last, as the mean score is its score.
        middle = (vectors * kept.unsqueeze(2)).sum(1, keepdim=True) / kept.sum(1)[:, None, None]
        vectors = torch.cat([vectors * (kept | ~mask).unsqueeze(2), middle], 1)
        return SessionVectors(vectors, torch.ones_like(vectors[:, :, 0], dtype=torch.bool),
                              {"padding": clients["padding"].unsqueeze(1)})

    def repeat_vectors(self, clients, items: Tensor, mask: Tensor) -> Tensor:
        """The vectors of how often a token's item is in the session, (C, M, d); zero at padding."""
        s = self.settings
        mean = torch.full_like(items[:, :1], 0 if s.mean_token == "first_item" else -2)
        tokens = torch.cat([mean, items], 1)
        count = (tokens.unsqueeze(1) == tokens.unsqueeze(2)).sum(2).clamp(max=s.max_repeat)
        chosen = (count - 1).unsqueeze(2).expand(-1, -1, s.dim)
        return clients["repeats"].gather(1, chosen) * mask.unsqueeze(2)

    def highway(self, clients, x: Tensor, h: Tensor) -> Tensor:
        """z = g x + (1 - g) h, (C, M, d)."""
        gate = torch.sigmoid(apply_linear(clients, "highway", torch.cat([x, h], 2)))
        return gate * x + (1.0 - gate) * h

    def importance(self, clients, z: Tensor) -> Tensor:
        """What the weights are alpha-entmax of, (C, M)."""
        pairs = torch.cat([z[:, :1].expand_as(z), z], 2)
        return apply_linear(clients, "importance", pairs).squeeze(2)

    @property
    def pooled(self):
        return not self.pads

    def pooling(self, vectors, mask):
        """beta max + (1 - beta) mean. Vectors that left the set are zero: the best score may be theirs, the mean is
        over the others."""
        beta, vectors = self.settings.beta_logit, vectors * mask.unsqueeze(2)
        kept = (vectors != 0.0).any(2)
        return Pooling(vectors, mask, beta, (1.0 - beta) / kept.sum(1).to(vectors))

    def session_scores(self, vectors, mask, rows):
        if not self.pads:
            return super().session_scores(vectors, mask, rows)
        beta, none = self.settings.beta_logit, torch.zeros_like(vectors[:, 0, 0])
        best = cosine_pool(vectors[:, :-1], mask[:, :-1], beta, none, rows)
        return best + cosine_pool(vectors[:, -1:], mask[:, -1:], 1.0 - beta, none, rows)

    def session_loss(self, session, targets):
        if self.pads and self.whole_tables:
            never = self.session_scores(session.vectors, session.mask, session.terms["padding"])
            targets = replace(targets, scores=torch.cat([targets.scores, never], 1))
        return super().session_loss(session, targets)
