"""Local training on whole histories without copies of item tables (see ``plugin/history.py``).

A client reads the first layers' rows of its own items only, so it has copies of these. The last layer's rows move under
SGD by multiples of the vectors it has had, as in ``factored.py``: a number per item and update stands for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rng import DrawKey, Tables
from ..plugin import checks
from ..plugin.history import History
from .chunk_trainer import Slots
from .factored import FactoredTrainer, Outer
from .list_trainer import BatchScoring


class HistoryTrainer(FactoredTrainer):
    """``ListTrainer`` of a ``HistoryBackbone``. Slots are the clients' positives, and ``rows`` has a number per client
    and item in place of those of the last layer, whose gradient is the logit's."""

    all_rows = fused = False

    def _layout(self, samples: Tensor, positives: int, replayed: Tensor | None, n_items: int) -> Slots:
        return Slots.touched(samples[:, :positives], positives, None, n_items)

    def _own_copies(self) -> Tables:
        self.name, self.done = self.backbone.output, 0
        table, updates, count = self.model.public[self.name], self.settings.local_epochs, len(self.users)
        self.outer = Outer(table, None, table.new_empty(count, self.n_items, updates),
                           table.new_empty(count, updates, table.shape[1]))
        return {name: table.new_zeros(()).expand(count, self.n_items) if name == self.name else rows[self.slots.items]
                for name, rows in self.model.public.items()}

    def _own_loss(self, view: BatchScoring, draw: DrawKey) -> Tensor:
        items = self.slots.items
        history = History(self.users, items, self.slots.first_copy, draw)
        tables = {**self.clients, **self.rows}

        def pool(name: str, factors: Tensor) -> Tensor:
            return torch.bmm(factors.unsqueeze(1), tables[name]).squeeze(1)

        vectors, term = self.backbone.represent(self.clients, pool, history)
        checks.check_tensor(self.backbone, "represent", vectors, self.outer.vectors[:, 0].shape,
                            "(C, d): a vector per client")
        self.vectors = vectors.detach()
        return self.backbone.loss_of(self._logits_of(vectors, None), history, term)
