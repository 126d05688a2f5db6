"""UniSRec: item vectors are what a mixture of whitening experts makes of texts, and with them the item's own row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedcl_bench import TEXT_MODEL, ModuleBackbone, UserError, inherited, once_in_ranking, setting
from fedcl_bench.toolbox.cosine import CosineModule, CosineSettings, rows_at
from fedcl_bench.toolbox.text_fusion import (CENTROIDS, SEMANTICS, AddedSemanticSettings, ClusterStream, SemanticModule,
                                             SemanticSettings, TextFusion)
from fedcl_bench.toolbox.transformer import MoEAdapter, by_length


@dataclass(frozen=True)
class UniSRecSettings(CosineSettings, AddedSemanticSettings):
    text_layers: int = setting(1, "the encoder's last so many layers are taken, and the mean of them, or with "
                               "semantics=true their fusion; 0: 3 of a language model, and all that another encoder "
                               "has", low=0, high=100)
    ids: bool = setting(True, "items have rows of their own beside their texts (transductive); false: their texts "
                        "alone (inductive)")
    adapter_draws: str = setting("click", "in training an adapted text has dropout and gate noise of its own in every "
                                 "click; or one per batch, which is faster where clicks are more than items",
                                 choices=("click", "item"), only_if="semantics=False")
    # The adapter of texts has these; with FFMSR's parts it is that of the fusion.
    experts: int = inherited(SemanticSettings, "experts")
    adapter_dropout: float = inherited(SemanticSettings, "adapter_dropout")


class UniSRecModule(CosineModule):
    """Adapted texts and rows of items, and a Transformer over histories of such."""

    def __init__(self, settings: UniSRecSettings, texts):
        """``texts``: encodings, (items, d_W)."""
        super().__init__(settings)
        self.per_click = settings.adapter_draws == "click"
        self.adapter = MoEAdapter(texts.shape[1], settings.dim, settings.experts, settings.adapter_dropout)
        self.register_buffer("texts", texts, persistent=False)
        self.rows = ("items",) if settings.ids else ()
        self.items = nn.Parameter(torch.randn(len(texts), settings.dim) * 0.02) if settings.ids else None

    @once_in_ranking
    def vectors(self):
        adapted = self.adapter(self.texts)
        return adapted if self.items is None else adapted + self.items

    def represent(self, batch, vectors):
        if not (self.training and self.per_click):
            return super().represent(batch, vectors)
        return by_length(batch, self._of_clicks)

    def _of_clicks(self, batch):
        """What users are looking for, each click adapted by itself, (B, d)."""
        # Padding is left out: every click that is adapted costs as much as an item.
        clicked = self.adapter(self.texts[batch.items[batch.real]])
        rows = clicked.new_zeros(*batch.items.shape, clicked.shape[1])
        rows[batch.real] = clicked
        return self.history(rows if self.items is None else rows + rows_at(batch.items, self.items), batch.lengths)


class SemanticUniSRec(CosineModule, SemanticModule):
    """UniSRec with FFMSR's parts: v_i = t_i + e_i with t_i of the fusion, and filtered clusters are added to those of a
    history."""

    def __init__(self, settings: UniSRecSettings, encodings):
        """``encodings``: of the texts, (items, layers, d_W)."""
        super().__init__(settings)
        items, _, width = encodings.shape
        self.items = nn.Parameter(torch.randn(items, settings.dim) * 0.02)
        self.texts = TextFusion(encodings, settings.dim, settings)
        self.clusters = ClusterStream(items, width, settings.max_length, settings)
        self.rows = ("items", CENTROIDS)

    @once_in_ranking
    def vectors(self):
        return self.texts(self.items) + self.items

    def represent(self, batch, vectors):
        clusters = self.cluster_vectors()
        return by_length(batch, lambda piece: self.history(
            rows_at(piece.items, vectors) + self.clusters.filtered(piece.items, clusters), piece.lengths))

    @once_in_ranking
    def cluster_vectors(self):
        return self.clusters()

    def semantics(self):
        return self.texts.mixed(self.items)


class UniSRec(ModuleBackbone):
    """Scores are cos(h, v_i) / .07 with v_i = adapter(text_i) + e_i; h is SASRec's encoder on the same vectors. The
    loss is the cross-entropy over the domain's items, the paper's fine-tuning from scratch. Its pre-training on other
    domains' texts is left out, as FFMSR's baseline has none."""

    name = "unisrec"
    numbers = 1
    title = "adapted texts and item rows, under a Transformer; cosine scores"
    reference = ("Hou et al., Towards Universal Sequence Representation Learning for Recommender Systems, KDD 2022; as "
                 "FFMSR (2025) trains it: from scratch")
    Settings = UniSRecSettings
    needs_features = True
    exchanges = frozenset({SEMANTICS, TEXT_MODEL})
    ambiguities = {"adapter_draws": {"click": "released code", "item": "once per batch, to save time"}}

    def __init__(self, settings):
        super().__init__(settings)
        if not settings.semantics:
            self.exchanges = frozenset() if settings.ids else frozenset({TEXT_MODEL})
            return
        self.exchanges = frozenset({SEMANTICS})
        if not settings.ids:
            raise UserError("setting 'ids': found false, accepted: true with semantics=true, whose weights look at the "
                            "items' rows.")

    def module(self, data):
        if self.settings.semantics:
            return SemanticUniSRec(self.settings, data.features)
        return UniSRecModule(self.settings, data.features.mean(1))
