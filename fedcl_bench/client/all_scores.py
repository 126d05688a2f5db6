"""Scores of all items by clients' own item tables, for a loss that concerns every item, and their gradients.

An item's score depends on its own row. So the table is taken in tiles of rows, which stay in the processor's cache:
once to score all items, and, when the loss has said how much each score matters, once more to differentiate. Only
scores and dropout's factors are kept from the first pass to the second.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from .. import contract
from ..sequential import Dropout, SequentialBackbone
from ..sizes import SIZES


class AllScores:
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
        self.backbone, self.vectors, self.mask = backbone, vectors, mask
        self.table, leaf = table.detach(), vectors.detach()
        self.factors: list[Tensor | None] = []  # of the tiles
        parts = []
        for rows, items in self._tiles():
            factor = dropout.of_rows(items, rows.shape[2], backbone.candidate_dropout, rows.dtype)
            self.factors.append(factor)
            with torch.no_grad():
                parts.append(self._score(leaf, rows, factor))
        self.scores = torch.cat(parts, 1).requires_grad_()

    def _tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows (C, n, d) and their items, (n,)."""
        clients, n_items, dim = self.table.shape
        size = n_items if self.table.device.type != "cpu" else max(1, SIZES.tile // (clients * dim))
        items = torch.arange(n_items, device=self.table.device)
        return zip(self.table.split(size, 1), items.split(size))

    def _score(self, vectors: Tensor, rows: Tensor, factor: Tensor | None) -> Tensor:
        scores = self.backbone.session_scores(vectors, self.mask, rows if factor is None else rows * factor)
        contract.check_tensor(self.backbone, "session_scores", scores, rows.shape[:2],
                              "(C, n): a score per client and item")
        return scores

    def gradients(self, of_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the table, (C, items, d), and of the vectors, (C, M, d), given those of the scores."""
        of_table, of_vectors, start = torch.empty_like(self.table), torch.zeros_like(self.vectors), 0
        for (rows, items), factor in zip(self._tiles(), self.factors):
            tile, vectors = rows.detach().requires_grad_(), self.vectors.detach().requires_grad_()
            columns = slice(start, start + len(items))
            start += len(items)
            of_rows, part = torch.autograd.grad(self._score(vectors, tile, factor), [tile, vectors],
                                                of_scores[:, columns])
            of_table[:, columns] = of_rows
            of_vectors += part
        return of_table, of_vectors
