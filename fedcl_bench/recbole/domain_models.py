"""RecBole's sequential recommenders as modules of a domain, which has the interactions of all its users.

A model is RecBole's own class. In place of a dataset it gets a stub that knows the numbers of users and items; what it
reads of items is what their texts say.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, Callable, Mapping

import torch
from torch import nn

from ..plugin.silo import DomainData
from . import models
from .domain_facts import READS_TEXT
from .models import ITEM, Config
from .text_models import TEXT, TextEmbedding, TextPretraining, TextTable, of_ids

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
