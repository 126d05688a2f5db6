"""FedMF as a module, for the peers that train modules."""

from __future__ import annotations

import torch
from torch import nn


# --- user code
class Model(nn.Module):
    private = ("user",)

    def __init__(self, job):
        super().__init__()
        self.user = nn.Parameter(torch.randn(job.dim) * 0.01)
        self.items = nn.Embedding(job.n_items, job.dim)

    def loss(self, item, label):
        return nn.functional.binary_cross_entropy_with_logits(self.items(item.long()) @ self.user, label)

    def optimiser(self, job):
        return torch.optim.SGD([{"params": [self.user], "lr": job.user_rate},
                                {"params": self.items.parameters(), "lr": job.item_rate}])
# --- end
