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
from .optimisers import BETA1, EPS


def serve(backbone: SequentialBackbone, method: Method, settings: LocalSettings, public: Tables) -> bool:
    """Whether a backbone's tables are trained here."""
    return (isinstance(backbone, SessionBackbone) and backbone.whole_tables and settings.optimiser == "adam"
            and backbone.pooled and not method.penalises_rows
            and len(public) == 1 and all(map(ops.serve, public.values())))


class CompiledSoftmax:
    """The tables of C clients.

    Args:
        table: what they begin with, (C, items, d).
        rate: learning rate.

    Attributes:
        table: as it is now, (C, items, d).
        scores: of all items in the latest forward pass, (C, items), a leaf of the loss's graph.
        vectors: what these are made of, (C, M, d), differentiable.
        of_scores: gradients of the scores in the latest step.
    """

    def __init__(self, table: Tensor, rate: float, settings: LocalSettings):
        self.table, self.rate, self.beta2, self.steps = table, rate, settings.adam_beta2, 0

    def score(self, pooling: Pooling, dropout: Dropout, share: float) -> None:
        """Score all items, a ``share`` of the numbers of whose rows is dropped."""
        vectors, mask, best, each = pooling
        keys = torch.zeros(len(vectors), dtype=torch.int64) if dropout.keys is None else dropout.keys
        threshold = 0 if dropout.keys is None else round(share * 65536)
        self._task = ops.CosineTask(vectors.detach().contiguous(), mask.contiguous(), best, each, keys, threshold)
        self._made = ops.cosine_scores(self._task, self._distinct())
        self.vectors, self.scores = vectors, self._made.scores.requires_grad_()

    def _distinct(self) -> Tensor:
        """The tables, or the one that all clients look at, (1, items, d)."""
        return self.table if self.table.is_contiguous() else self.table[:1]

    @torch.no_grad()
    def step(self, of_scores: Tensor, held: Tensor) -> Tensor:
        """Move all rows but those of held items, (C, n), given gradients of the scores; returns those of the vectors.
        """
        before, fresh = self._distinct(), self.steps == 0
        if fresh:
            self.table, self._first, self._second = (before.new_empty(self.table.shape) for _ in range(3))
        self.steps += 1
        root = (1.0 - self.beta2 ** self.steps) ** -0.5
        rule = (1.0 - BETA1, self.beta2, 1.0 - self.beta2, self.rate / (1.0 - BETA1 ** self.steps), root, EPS)
        self._step = ops.AdamStep(before, self.table, self._first, self._second, fresh, rule)
        self.of_scores, self._held = of_scores, held
        return ops.cosine_adam(self._task, self._made, of_scores, self._step, held)

    @torch.no_grad()
    def step_held(self, of_rows: Tensor) -> None:
        """Move the rows of the held items, given their gradients besides those of scores, (C, n, d)."""
        ops.cosine_adam(self._task, self._made, self.of_scores, self._step, self._held, of_rows)
