"""RecBole's own recommenders on the training data of all clients, of all blocks so far: ``--method recbole:NAME``.

A bound: what is ranked and masked stays the block's, so its rows stand beside those of federated methods. Users and
items are RecBole's by their number + 1. Of RecBole are the dataset, its sequences, the negatives, the model, the loss
and an epoch of its trainer; a round is an epoch, and the run's validation chooses the best one, not RecBole's.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Iterator, Mapping

import pandas as pd
import torch
from torch import Tensor, nn

from .. import rng
from ..core.errors import UserError
from ..core.settings import setting
from ..data.stream import Ragged, TrainingStep
from ..plugin.method import Method, NoSettings
from ..plugin.state import in_pieces
from ..rng import Tables
from ..toolbox.recbole_model import importing_recbole
from .calls import padded_sequences
from .models import ITEM, LENGTH, PREFIX, SEQUENCE, USER, Config, Refused, built, configuration, model_class
from .models import quiet_generators

_TIME = "timestamp"
_PARTS = {"data.dataloader": "TrainDataLoader", "data.dataset": "Dataset SequentialDataset",
          "data.interaction": "Interaction", "sampler": "Sampler", "trainer.trainer": "Trainer",
          "utils": "FeatureSource FeatureType InputType ModelType"}
_RATES = (0.01, 0.005, 0.001, 0.0005, 0.0001)


@dataclass(frozen=True)
class ItemKNNSettings:
    k: int = setting(100, "most similar items of an item that count", low=1, search=(10, 50, 100, 200, 400))
    shrink: float = setting(0.0, "added to the product of norms that a similarity is divided by", low=0.0,
                            search=(0.0, 1.0, 10.0, 100.0))


@dataclass(frozen=True)
class EASESettings:
    reg_weight: float = setting(250.0, "weight of the squared norm of the items' weights", above=0.0,
                                search=(10.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 5000.0))


@dataclass(frozen=True)
class TrainedSettings:
    learning_rate: float = setting(0.001, "learning rate of Adam, which a step begins anew", above=0.0, search=_RATES)
    train_batch_size: int = setting(2048, "samples per batch", low=1)


@dataclass(frozen=True)
class BPRSettings(TrainedSettings):
    embedding_size: int = setting(64, "length of embeddings", low=1, search=(32, 64, 128))


@dataclass(frozen=True)
class LightGCNSettings(BPRSettings):
    n_layers: int = setting(2, "layers of neighbours", low=1, search=(1, 2, 3, 4))
    reg_weight: float = setting(1e-5, "weight of the squared norm of embeddings", low=0.0,
                                search=(1e-5, 1e-4, 1e-3, 1e-2))


@dataclass(frozen=True)
class RecBoleSASRecSettings(TrainedSettings):
    hidden_size: int = setting(64, "length of embeddings and hidden states", low=1)
    inner_size: int = setting(256, "width of feed-forward layers", low=1)
    n_layers: int = setting(2, "blocks of attention", low=1, search=(1, 2, 3))
    n_heads: int = setting(2, "heads of attention", low=1, search=(1, 2))
    hidden_dropout_prob: float = setting(0.5, "dropout of embeddings and layers", low=0.0, below=1.0, search=(0.2, 0.5))
    attn_dropout_prob: float = setting(0.5, "dropout of attention", low=0.0, below=1.0, search=(0.2, 0.5))
    max_length: int = setting(50, "longest sequence; earlier items are cut off", low=1)


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """RecBole's code draws from ``seed`` on and says nothing."""
    with quiet_generators(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _recbole() -> SimpleNamespace:
    """What of RecBole is used besides its models, by name."""
    with importing_recbole():
        return SimpleNamespace(**{name: getattr(importlib.import_module(f"recbole.{module}"), name)
                                  for module, names in _PARTS.items() for name in names.split()})


def _configured(name: str, settings: Any, device: torch.device, seed: int) -> Config:
    """RecBole's configuration of a model with RecBole's defaults for training."""
    of, cls = _recbole().InputType, model_class(name)
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    kind = getattr(cls, "input_type", of.LISTWISE)  # SASRec's loss is over all items
    negatives = {"distribution": "uniform" if kind == of.PAIRWISE else "none", "sample_num": 1, "alpha": 1.0}
    return configuration(name, {
        "MODEL_TYPE": cls.type, "MODEL_INPUT_TYPE": kind, "device": device, "seed": seed, "learner": "adam",
        "single_spec": True, "worker": 0, "numerical_features": [], "train_neg_sample_args": negatives,
        **values}, values.get("max_length", 50))


def _dataset(config: Config, lists: Ragged, n_items: int) -> Any:
    """RecBole's dataset of these interactions; a sequential one is of all beginnings of a user's list."""
    recbole, n_users = _recbole(), len(lists.lengths)
    sequential = config["MODEL_TYPE"] == recbole.ModelType.SEQUENTIAL
    kind = recbole.SequentialDataset if sequential else recbole.Dataset
    data = kind.__new__(kind)  # its __init__ reads files
    data.config, data.logger, data.user_feat, data.item_feat = config, logging.getLogger(), None, None
    data._get_preset()
    data._get_field_from_config()
    for field, of, tokens in ((USER, "TOKEN", n_users), (ITEM, "TOKEN", n_items), (_TIME, "FLOAT", 0)):
        data.set_field_property(field, recbole.FeatureType[of], recbole.FeatureSource.INTERACTION, 1)
        data.field2id_token[field] = range(tokens + 1)
    user = torch.arange(n_users).repeat_interleave(lists.lengths.cpu())
    data.inter_feat = recbole.Interaction({USER: user + 1, ITEM: lists.values.cpu() + 1,
                                           _TIME: torch.arange(len(user))})
    if sequential:
        data.max_item_list_len, data.item_list_length_field = config["MAX_ITEM_LIST_LENGTH"], LENGTH
        data.data_augmentation()
    return data


class _Pooled:
    """A RecBole model and its data, the lists of all users' training interactions so far; built under
    ``quiet_generators``. ``start`` are its parameters before training, ``batches`` RecBole's loader."""

    def __init__(self, name: str, settings: Any, lists: Ragged, n_items: int, seed: int):
        from scipy.sparse import dok_matrix

        if not hasattr(dok_matrix, "_update"):  # gone since SciPy 1.13; RecBole's LightGCN calls it
            dok_matrix._update = lambda matrix, entries: matrix._dict.update(entries)
        device = lists.values.device
        self.lists, self.config = lists, _configured(name, settings, device, seed)
        self.data = _dataset(self.config, lists, n_items)
        self.model: nn.Module = built(model_class(name), self.config, self.data, seed).to(device)
        self.start = {key: value.clone() for key, value in self.model.state_dict().items()}
        negatives = self.config["train_neg_sample_args"]["distribution"] != "none"
        sampler = _recbole().Sampler("train", self.data).set_phase("train") if negatives else None
        self.batches = _recbole().TrainDataLoader(self.config, self.data, sampler, shuffle=True)

    def epoch(self, state: Tables, seed: int) -> float:
        """Train for an epoch of RecBole's trainer, from what ``state`` returned after the epoch before, which is empty
        before the first; returns the mean loss of batches."""
        self.model.load_state_dict({key: state.get(f"model.{key}", value) for key, value in self.start.items()})
        trainer = _recbole().Trainer.__new__(_recbole().Trainer)  # its __init__ makes folders
        vars(trainer).update(config=self.config, model=self.model, logger=logging.getLogger(), learner="adam",
                             learning_rate=self.config["learning_rate"], weight_decay=0.0, clip_grad_norm=None,
                             device=self.config["device"], gpu_available=False, enable_amp=False, enable_scaler=False,
                             _check_nan=lambda loss: None)  # the run ends by a loss of nan itself
        self.optimizer = trainer.optimizer = trainer._build_optimizer()
        for number, parameter in enumerate(self.model.parameters()):
            known = {key.split(".")[2]: value.clone() for key, value in state.items()
                     if key.startswith(f"adam.{number}.")}
            if known:
                self.optimizer.state[parameter] = known
        self.batches.generator.manual_seed(seed)
        return trainer._train_epoch(self.batches, 0) / len(self.batches)

    def state(self) -> Tables:
        """The parameters and what Adam remembers after an epoch."""
        tables = {f"model.{key}": value.clone() for key, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.model.parameters()):
            tables |= {f"adam.{number}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return tables

    @torch.no_grad()
    def scores(self) -> Tensor:
        """RecBole's ``full_sort_predict`` of all users, shape (users, items)."""
        self.model.eval()
        pieces = in_pieces(torch.arange(len(self.lists.lengths), device=self.lists.values.device), self.data.item_num)
        return torch.cat([self.model.full_sort_predict(self._fields_of(users)).view(len(users), -1)[:, 1:].float()
                          for users in pieces])

    def _fields_of(self, users: Tensor) -> Tables:
        """RecBole's fields of some users; the sequence of one is its latest items."""
        width = self.config["MAX_ITEM_LIST_LENGTH"]
        length = self.lists.counts(users).clamp(max=width)[:, None]
        first = self.lists.indptr[users + 1][:, None] - length
        items = (self.lists.values + 1).expand(len(users), -1)
        return {USER: users + 1, LENGTH: length[:, 0].clamp(min=1),
                SEQUENCE: padded_sequences(items, first, length, width, False)[:, 0]}


class RecBoleMethod(Method):
    """Base class of the methods made by ``method_class``; clients do nothing, one party holds all data.

    ``server_state`` has the scores, and between the rounds of a step the parameters and what Adam remembers.
    """

    model: ClassVar[str]
    numbers = 1
    first_step = 0
    trains = "nobody"
    history = restarts = True
    needs_backbone = False
    gives_up = {"F1": "one party ranks for everybody", "F4": "and holds all interactions", "C1": "of all blocks",
                "F6": "RecBole draws in the order of users' numbers"}

    def __init__(self, settings):
        super().__init__(settings)
        self._pooled: _Pooled | None = None

    def check(self, step: TrainingStep) -> None:
        if step.sessions and self.model == "SASRec":
            raise UserError(f"method '{self.name}' continues all that a user has trained on, and a session is a list "
                            f"of its own; use --backbone sasrec with sessions.")

    def _of(self, step: TrainingStep, seed: int) -> _Pooled:
        """The model on the data of a step; raises UserError if RecBole refuses them."""
        if self._pooled is None or self._pooled.lists is not step.train:
            try:
                self._pooled = _Pooled(self.model, self.settings, step.train, step.n_items, seed)
            except (Refused, ValueError) as error:
                said = str(error).partition(" Please set")[0].rstrip(".")  # which names a setting of RecBole's
                raise UserError(f"method '{self.name}': {said}.") from None
        return self._pooled

    def rescore(self, users, scores, model, backbone):
        known = self.server_state["scores"][users].to(scores)
        later = scores.shape[1] - known.shape[1]  # items that arrive after the training (`cold_items`) come last
        return torch.cat([known, known.amin(1, keepdim=True).expand(-1, later)], 1)


class Fitted(RecBoleMethod):
    """Pop, ItemKNN and EASE: RecBole computes them from counts of interactions, in no epochs."""

    def begin_round(self, step, round_, backbone):
        with _quiet(0):
            pooled = self._of(step, 0)
            if self.model == "Pop":
                items = pd.Series(step.train.values.cpu() + 1)
                # RecBole counts an item once per batch (its issue 2198), and negatives too.
                for _, batch in items.groupby(items.groupby(items).cumcount()):
                    pooled.model.calculate_loss({ITEM: torch.tensor(batch.values)})
            self.server_state = {"scores": pooled.scores()}


class RecBoleTrained(RecBoleMethod):
    """BPR, LightGCN and SASRec: a round is an epoch of RecBole's trainer."""

    trains = "server"

    def central_round(self, step, model, backbone, draw):
        of_step, of_round = (rng.key(draw.seed, "recbole", draw.step, number) >> 1 for number in (0, draw.round + 1))
        with _quiet(of_step):
            pooled = self._of(step, of_step)
        with _quiet(of_round):
            loss = pooled.epoch(self.server_state if draw.round else {}, of_round)
            self.server_state = {**pooled.state(), "scores": pooled.scores()}
        return model, loss


_OF = "Zhao et al., RecBole 2.0, CIKM 2022; "
KINDS: Mapping[str, tuple[type[RecBoleMethod], type, str]] = {
    "Pop": (Fitted, NoSettings, "items by their counts"),
    "ItemKNN": (Fitted, ItemKNNSettings, "Aiolli, RecSys 2013"),
    "EASE": (Fitted, EASESettings, "Steck, WWW 2019"),
    "BPR": (RecBoleTrained, BPRSettings, "Rendle et al., UAI 2009"),
    "LightGCN": (RecBoleTrained, LightGCNSettings, "He et al., SIGIR 2020"),
    "SASRec": (RecBoleTrained, RecBoleSASRecSettings, "Kang and McAuley, ICDM 2018")}


@functools.cache
def method_class(name: str) -> type[RecBoleMethod]:
    """The method of RecBole's model ``name``."""
    kind, settings, reference = KINDS[name]
    return type(name, (kind,), {
        "name": PREFIX + name, "model": name, "Settings": settings, "reference": _OF + reference,
        "title": f"bound: RecBole 1.2.0's {name} on everybody's training data so far", "__module__": __name__})
