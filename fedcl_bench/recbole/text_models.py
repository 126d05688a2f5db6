"""RecBole's models that read features of items, given what the items' texts say (UniSRec's baselines).

Where RecBole looks up a categorical feature, a linear layer with ReLU adapts the vector of the item's text. S3Rec's
attribute of an item is its own text, so that each item has another one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

TEXT = "text"  # the field's name
# Scores of attributes that are held at once.
_AT_ONCE = 1 << 24


def of_ids(features: Tensor) -> Tensor:
    """Vectors of texts by RecBole's ids, (items + 1, d_W): the last layer's, and zeros for padding.

    Args:
        features: (items, layers, d_W).
    """
    last = features[:, -1]
    return torch.cat([last.new_zeros(1, last.shape[1]), last])


class _Adapted(nn.Module):
    """Frozen vectors of texts, (ids, d_W), and what adapts them to a model's ``dim`` numbers."""

    def __init__(self, text: Tensor, dim: int):
        super().__init__()
        self.register_buffer("text", text, persistent=False)
        self.adapter = nn.Sequential(nn.Linear(text.shape[1], dim), nn.ReLU())


class TextEmbedding(_Adapted):
    """In place of RecBole's ``FeatureSeqEmbLayer``: one feature per item."""

    def forward(self, users: None, items: Tensor) -> tuple[dict[str, Tensor], dict[str, None]]:
        """Sparse and dense features of ids (B, L): (B, L, 1, dim), and none."""
        return {"item": self.adapter(self.text[items]).unsqueeze(-2)}, {"item": None}


class TextTable(_Adapted):
    """In place of S3Rec's table of attributes."""

    @property
    def weight(self) -> Tensor:
        """(ids, dim)."""
        return self.adapter(self.text)


class TextPretraining:
    """S3Rec's pre-training where every item has an attribute of its own; goes before RecBole's class.

    The losses are RecBole's. Scores of all attributes are made for real positions alone and some at a time: RecBole's
    lists of positions x attributes do not fit into memory.
    """

    def reconstruct_pretrain_data(self, item_seq: Tensor, item_seq_len: Tensor) -> tuple[Tensor, ...]:
        """As RecBole's, with the ids of the attributes, (B, L), in place of what is 1 at these."""
        attributes, self.n_features = self.n_features, 1
        try:
            _, *sequences = super().reconstruct_pretrain_data(item_seq, item_seq_len)
        finally:
            self.n_features = attributes
        return sequences[1], *sequences  # an item's attribute has its id

    def pretrain(self, attributes: Tensor, masked: Tensor, items: Tensor, negatives: Tensor,
                 *segments: Tensor) -> Tensor:
        """Weighted sum of the losses AAP, MIP, MAP and SP of a batch (Zhou et al., CIKM 2020)."""
        output, table = self.forward(masked), self.feature_embedding.weight
        hidden = masked == self.mask_token
        seen = (masked != 0) & ~hidden
        aap = attribute_loss(self.aap_norm(output[seen]), table, attributes[seen])
        map_ = attribute_loss(self.map_norm(output[hidden]), table, attributes[hidden])
        of_items, of_negatives = (self._masked_item_prediction(output[hidden], self.item_embedding(ids[hidden]))
                                  for ids in (items, negatives))
        context, positive, negative = (self.forward(segment)[:, -1] for segment in segments)
        of_segments = self._segment_prediction(context, positive) - self._segment_prediction(context, negative)
        return (self.aap_weight * aap + self.mip_weight * softplus(of_negatives - of_items).sum()
                + self.map_weight * map_ + self.sp_weight * softplus(-of_segments).sum())


def attribute_loss(vectors: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Sum of the binary cross-entropies of all attributes at some positions, each of which has one attribute.

    Args:
        vectors: of the positions, (n, dim).
        table: vectors of the attributes, (m, dim).
        labels: the attribute of each position, (n,).
    """
    def of_none(part: Tensor) -> Tensor:
        return softplus(part @ table.T).sum()

    size = max(1, _AT_ONCE // len(table))
    total = -(vectors * table[labels]).sum()
    for part in vectors.split(size):
        total = total + checkpoint(of_none, part, use_reentrant=False, preserve_rng_state=False)
    return total
