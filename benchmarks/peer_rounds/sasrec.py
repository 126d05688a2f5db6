"""SASRec as a module, for the peers that train modules; its layers are those of FCUCR's released code."""

from __future__ import annotations

import torch
from torch import nn

LENGTH, DROPOUT = 15, 0.2  # the plugin's defaults


# --- user code
class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(d, eps=1e-8), nn.Linear(d, d), nn.Linear(d, d)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x):
        x = self.norm(x)
        return x + self.drop(self.second(torch.relu(self.drop(self.first(x)))))


class SASRec(nn.Module):
    def __init__(self, n_items, d=50):
        super().__init__()
        self.items, self.positions = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(LENGTH, d)
        self.norm, self.last, self.drop = nn.LayerNorm(d, eps=1e-8), nn.LayerNorm(d, eps=1e-8), nn.Dropout(DROPOUT)
        self.attention, self.feed_forward = nn.MultiheadAttention(d, 1, DROPOUT, batch_first=True), FeedForward(d)
        self.future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def forward(self, rows, times=None):
        x = self.drop(self.items(rows) * self.items.embedding_dim ** 0.5
                      + self.positions.weight * (rows > 0)[..., None])
        query = self.norm(x)
        x = query + self.attention(query, x, x, attn_mask=self.future, need_weights=False)[0]
        return self.last(self.feed_forward(x))


class Model(SASRec):
    private = ()

    def __init__(self, job):
        super().__init__(job.n_items, job.dim)

    def loss(self, rows, positive, negative):
        outputs, real = self(rows.long()), positive > 0
        logits = [(outputs * self.items(items.long())).sum(2)[real] for items in (positive, negative)]
        return sum(nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label))
                   for found, label in zip(logits, (1.0, 0.0)))

    def optimiser(self, job):
        return torch.optim.Adam(self.parameters(), lr=job.item_rate, betas=(0.9, 0.98))
# --- end
