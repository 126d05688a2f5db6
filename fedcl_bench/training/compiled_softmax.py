"""Clients' own item tables under a loss of pooled cosine scores of all items: scored, and moved by Adam, in C.

The gradient of a row is a sum of itself and of few vectors, so it is made where the row takes its step, in one pass
over tables and moments. Until the first step all clients may look at the server's table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rng import Tables
from ..kernels.functional import Pooling
from ..plugin.method import Method
from ..kernels import ops
from ..plugin.local_settings import LocalSettings
from ..plugin.sequential import Dropout, SequentialBackbone, SessionBackbone
from .optimisers import BETA1


def serve(backbone: SequentialBackbone, method: Method, settings: LocalSettings, public: Tables) -> bool:
    """Whether a backbone's tables are trained here."""
    return (isinstance(backbone, SessionBackbone) and backbone.whole_tables and settings.optimiser == "adam"
            and backbone.pooled and not method.penalises_rows and not method.sees_rows
            and len(public) == 1 and all(map(ops.serve, public.values())))


class CompiledSoftmax:
    """The tables of C clients. ``table``: what they begin with, (C, items, d); ``rate``: learning rate. ``scores``: of
    all items in the latest forward pass, (C, items), a leaf of the loss's graph; ``vectors``: what these are made of,
    (C, M, d), differentiable; ``of_scores``: gradients of the scores in the latest step."""

    def __init__(self, table: Tensor, rate: float, settings: LocalSettings):
        self.rate, self.beta2, self.eps, self.steps = rate, settings.adam_beta2, settings.adam_eps, 0
        self._tables = ops.CosineTables(table if table.is_contiguous() else table[:1])  # all may look at one
        self._clients = len(table)

    @property
    def table(self) -> Tensor:
        """As it is now, (C, items, d)."""
        return self._tables.now.expand(self._clients, -1, -1)

    def score(self, pooling: Pooling, dropout: Dropout, share: float) -> None:
        """Score all items, a ``share`` of the numbers of whose rows is dropped."""
        keys = torch.zeros(self._clients, dtype=torch.int64) if dropout.keys is None else dropout.keys
        threshold = 0 if dropout.keys is None else round(share * 65536)
        self.vectors = pooling.vectors
        self._tables.score(pooling._replace(vectors=self.vectors.detach().contiguous(), mask=pooling.mask.contiguous()),
                           keys, threshold)
        self.scores = self._tables.scores.detach().requires_grad_()

    @torch.no_grad()
    def step(self, of_scores: Tensor, held: Tensor) -> Tensor:
        """Move all rows but those of held items, (C, n), given gradients of the scores; returns those of the vectors.
        """
        self.of_scores, self.steps = of_scores, self.steps + 1
        root = (1.0 - self.beta2 ** self.steps) ** -0.5
        rule = (1.0 - BETA1, self.beta2, 1.0 - self.beta2, self.rate / (1.0 - BETA1 ** self.steps), root, self.eps)
        return self._tables.step(of_scores, held, rule)

    @torch.no_grad()
    def step_held(self, of_rows: Tensor) -> None:
        """Move the rows of the held items, given their gradients besides those of scores, (C, n, d)."""
        self._tables.step_held(of_rows)
