"""FFMSR's fusion and filters in RecBole's recommenders of domains (its Table 5).

The paper does not say where the parts go. Here an item's vector is e_i + t_i wherever the recommender looks one up, as
in FFMSR's own Eq. (23). Where it looks up those of a history, f~ of the history is added, as in Eq. (17).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Iterator

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ..plugin.silo import once_in_ranking
from ..toolbox.text_fusion import CENTROIDS, AddedSemanticSettings, ClusterStream, SemanticModule, TextFusion
from .domain_modules import RecBoleModule


class _WithTexts(nn.Module):
    """RecBole's table of items, e, with t added to the items' rows; the first row is padding."""

    def __init__(self, texts: TextFusion):
        super().__init__()
        self._texts = [texts]  # whose parameters are not this module's

    def forward(self, table: Tensor) -> Tensor:
        texts, = self._texts
        count = len(texts.encodings)
        return table + F.pad(texts(table[1:1 + count]), (0, 0, 1, len(table) - 1 - count))


class SemanticRecommender(SemanticModule):
    """RecBole's model of a domain, with FFMSR's parts; ``recommender`` has a table ``item_embedding`` and encodes a
    history by ``forward``."""

    def __init__(self, recommender: RecBoleModule, features: Tensor, settings: AddedSemanticSettings):
        """With encodings of the items' texts, (items, layers, d_W)."""
        super().__init__()
        model, table = recommender.model, recommender.model.item_embedding
        sizes = replace(settings, dim=table.embedding_dim)
        self.recommender, self.fixed_length = recommender, recommender.fixed_length
        self.texts = TextFusion(features, sizes.dim, sizes).to(features.device)
        self.clusters = ClusterStream(len(features), features.shape[2], sizes.max_length, sizes).to(features.device)
        self.rows = (*(f"recommender.{name}" for name in recommender.rows), CENTROIDS)
        self._history: Tensor | None = None  # whose items' vectors are looked up next
        self._vectors: Tensor | None = None  # f of all items in a batch
        parametrize.register_parametrization(table, "weight", _WithTexts(self.texts))
        table.register_forward_hook(self._with_clusters)
        encode = model.forward

        def encoded(history: Tensor, *args: Any, **options: Any) -> Tensor:
            self._history = history
            try:
                return encode(history, *args, **options)
            finally:
                self._history = None

        model.forward = encoded  # RecBole calls it by its name

    def _with_clusters(self, _table: nn.Module, numbers: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """What was looked up, (B, L, d), with f~ if it is of the history; RecBole's ids begin at 1."""
        if numbers[0] is not self._history:
            return rows
        return rows + self.clusters.filtered(numbers[0] - 1, self._vectors)

    @once_in_ranking
    def _cluster_vectors(self) -> Tensor:
        return self.clusters()

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self.recommender.stage, self._vectors = self.stage, self._cluster_vectors()
        try:
            yield
        finally:
            self._vectors = None

    def loss(self, batch, targets):
        with self._called():
            return self.recommender.loss(batch, targets)

    def scores(self, batch):
        with self._called():
            return self.recommender.scores(batch)

    def semantics(self):
        e = self.recommender.model.item_embedding.parametrizations.weight.original0
        return self.texts.mixed(e)
