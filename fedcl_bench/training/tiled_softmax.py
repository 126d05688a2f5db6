"""Scores of all items by clients' own item tables, for a loss that concerns every item, and their gradients.

An item's score depends on its own row. So the table is taken in tiles of rows, which stay in the processor's cache:
once to score all items, and, when the loss has said how much each score matters, once more to differentiate. Only
scores and dropout's factors are kept from the first pass to the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plugin import checks
from ..plugin.sequential import Dropout, SequentialBackbone
from ..core.tuning import SIZES


class TiledSoftmax:
    """The scores of all items, as a loss sees them.

    Args:
        vectors: what the clients' items are scored with, (C, M, d), differentiable.
        mask: which of them count, (C, M).
        table: the clients' item rows, (C, items, d).
        dropout: of the forward pass.

    Attributes:
        scores: (C, items), a leaf of the loss's graph.
    """

    def __init__(self, backbone: SequentialBackbone, vectors: Tensor, mask: Tensor, table: Tensor, dropout: Dropout):
        self.backbone, self.vectors, self.mask, self.table = backbone, vectors, mask, table.detach()
        self.factors: list[Tensor | None] = []  # of the tiles
        scores = table.new_empty(table.shape[:2])
        items = torch.arange(table.shape[1], device=table.device)
        for clients, columns in self._tiles():
            factor = dropout.part(clients).of_rows(items[columns], table.shape[2], backbone.candidate_dropout,
                                                   table.dtype)
            self.factors.append(factor)
            with torch.no_grad():
                scores[clients, columns] = self._score(vectors[clients], clients, self.table[clients, columns], factor)
        self.scores = scores.requires_grad_()

    def _tiles(self) -> list[tuple[slice, slice]]:
        """Clients and items of each tile: some rows of one client, which lie together; on a GPU everything."""
        count, n_items, dim = self.table.shape
        if self.table.device.type != "cpu":
            return [(slice(0, count), slice(0, n_items))]
        size = max(1, SIZES.tile // dim)
        return [(slice(client, client + 1), slice(start, start + size))
                for client in range(count) for start in range(0, n_items, size)]

    def _score(self, vectors: Tensor, clients: slice, rows: Tensor, factor: Tensor | None) -> Tensor:
        rows = rows if factor is None else rows * factor
        scores = self.backbone.session_scores(vectors, self.mask[clients], rows)
        checks.check_tensor(self.backbone, "session_scores", scores, rows.shape[:2],
                              "(C, n): a score per client and item")
        return scores

    def gradients(self, of_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the table, (C, items, d), and of the vectors, (C, M, d), given those of the scores."""
        of_table, of_vectors = torch.empty_like(self.table), torch.zeros_like(self.vectors)
        for (clients, columns), factor in zip(self._tiles(), self.factors):
            tile = self.table[clients, columns].requires_grad_()
            vectors = self.vectors[clients].detach().requires_grad_()
            of_rows, part = torch.autograd.grad(self._score(vectors, clients, tile, factor), [tile, vectors],
                                                of_scores[clients, columns])
            of_table[clients, columns] = of_rows
            of_vectors[clients] += part
        return of_table, of_vectors
