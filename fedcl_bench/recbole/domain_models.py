"""RecBole's sequential recommenders as modules of a domain, which has the interactions of all its users.

A model is RecBole's own class. In place of a dataset it gets a stub that knows the numbers of users and items. Where it
looks up a categorical feature of an item, a linear layer with ReLU adapts the vector of the item's text (UniSRec's
baselines). S3Rec's attribute of an item is its own text, so that each item has another one.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from ..plugin.silo import DomainData
from . import models
from .domain_facts import READS_TEXT
from .models import ITEM, Config

TEXT = "text"  # the field's name
_AT_ONCE = 1 << 24  # scores of attributes that are held at once
# Hyper-parameters that models read and RecBole's files lack; FEARec has no contrast unless one is named.
_MORE: dict[str, dict[str, Any]] = {"FEARec": {"contrast": None, "tau": 1.0, "sim": "dot"}}
# Those that the stages of training and the texts decide.
_DECIDED = {"train_stage", "pre_model_path", "pretrain_epochs", "save_step", "item_attribute", "selected_features",
            "pooling_mode", "transform"}


def hyper_parameters(name: str) -> dict[str, Any]:
    """A model's own hyper-parameters and their default values: those of RecBole's file."""
    known = {**models.defaults(name), **_MORE.get(name, {})}
    return {key: value for key, value in known.items() if key not in _DECIDED}


def configuration(name: str, values: Mapping[str, Any], length: int, device: str = "cpu") -> Config:
    """A model's configuration. Arguments as for ``models.build``."""
    of_text = {"item_attribute": TEXT, "selected_features": [TEXT], "train_stage": "pretrain"}
    return models.configuration(name, {**_MORE.get(name, {}), **values, **(of_text if name in READS_TEXT else {})},
                                length, device=device)


class Stub(models.ClientDataset):
    """What a model sees of its dataset: the numbers of users and items, and a field of items that stands for texts."""

    def __init__(self, data: DomainData, length: int):
        super().__init__(data.n_users, data.n_items, length)
        self.field2type = {TEXT: None}
        # FEARec makes an index of the samples by target while it is built, which ``SameTarget`` replaces.
        self.inter_feat = {ITEM: torch.zeros(0, dtype=torch.int64)}

    def num(self, field: str) -> int:
        return self.item_num + 1 if field == TEXT else super().num(field)

    def get_item_feature(self):
        from recbole.data.interaction import Interaction

        return Interaction({TEXT: torch.zeros(self.item_num, dtype=torch.int64)})


def prepared(name: str, values: Mapping[str, Any], width: int, data: DomainData,
             device: str = "cpu") -> tuple[nn.Module, Config, Callable | None]:
    """RecBole's model of a domain, its configuration, and what RecBole does with every training batch, if anything.
    Its start is decided by PyTorch's generator. Arguments and errors as for ``models.build``."""
    from recbole.data.transform import construct_transform

    config = configuration(name, values, width, device)
    transform = construct_transform(config) if config["transform"] else None  # it adds its fields' names to config
    cls = models.model_class(name)
    if name == "S3Rec":
        cls = type(name, (TextPretraining, cls), {})

    def made(config: Config, stub: Stub) -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()):  # FEARec prints its frequencies
            model = cls(config, stub)
        if name in READS_TEXT:
            _read_text(model, data)
        return model

    return models.built(made, config, Stub(data, width), int(torch.randint(1 << 62, ()))), config, transform


def _read_text(model: nn.Module, data: DomainData) -> None:
    """Put the items' texts in the place of RecBole's categorical features; their adapter starts as all its layers."""
    from recbole.model.init import xavier_normal_initialization

    text = of_ids(data.features)
    if hasattr(model, "feature_embed_layer"):
        part = model.feature_embed_layer = TextEmbedding(text, model.item_embedding.embedding_dim)
    else:
        part = model.feature_embedding = TextTable(text, model.hidden_size)
    part.apply(getattr(model, "_init_weights", xavier_normal_initialization))


def of_ids(features: Tensor) -> Tensor:
    """Vectors of texts (items, layers, d_W) by RecBole's ids, (items + 1, d_W): the last layer's, zeros for padding."""
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
    """Sum of the binary cross-entropies of all attributes, whose vectors the ``table`` (m, dim) has, at n positions,
    each of which has its ``vectors`` (n, dim) and one attribute, ``labels`` (n,)."""
    def of_none(part: Tensor) -> Tensor:
        return softplus(part @ table.T).sum()

    size = max(1, _AT_ONCE // len(table))
    total = -(vectors * table[labels]).sum()
    for part in vectors.split(size):
        total = total + checkpoint(of_none, part, use_reentrant=False, preserve_rng_state=False)
    return total
