"""RecBole's general and sequential recommenders as modules of one client: which there are, and how one is built.

A model is built for one user and N items; RecBole counts its padding id 0 besides both. In place of a dataset it gets
a stub that knows these numbers and one user's own history. The tables of facts say which models need more than that.
"""

from __future__ import annotations

import functools
import importlib
import logging
import random
import re
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from ..core.errors import UserError, unknown
from ..toolbox.recbole_model import importing_recbole
from . import client_facts, domain_facts

PREFIX = "recbole:"
USER, ITEM, LABEL, NEGATIVE = "user_id", "item_id", "label", "neg_item_id"
SEQUENCE, LENGTH, INVERSE = "item_id_list", "item_length", "Inverse_item_id_list"
# RecBole's names of the fields above, and what every model may ask for besides its own hyper-parameters.
_FIELDS = {"USER_ID_FIELD": USER, "ITEM_ID_FIELD": ITEM, "LABEL_FIELD": LABEL, "NEG_PREFIX": "neg_",
           "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": LENGTH, "INVERSE_ITEM_SEQ": INVERSE,
           "RATING_FIELD": "rating", "TIME_FIELD": "timestamp", "seed": 0, "train_batch_size": 512,
           "require_pow": False}
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_BUILDING = threading.RLock()  # building draws from the global generators


class Refused(Exception):
    """Why a model cannot be a federated backbone, in words that end a sentence on it."""


def first_line(error: Exception | Warning) -> str:
    """An error's type and the beginning of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:100] if text else ''}".rstrip(": ")


def tried(what: str, call: Callable[[], Any]) -> Any:
    """What a call of a model returns; raises Refused if it fails, as with hyper-parameters that do not fit together."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of RecBole's code
            return call()
    except Refused:
        raise
    except Exception as error:  # whatever a model's code raises is a reason, not a traceback
        raise Refused(f"{what}: {first_line(error)}") from error


def interaction(fields: Mapping[str, Tensor]) -> Any:
    """RecBole's batch."""
    from recbole.data.interaction import Interaction

    return Interaction(fields)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Python's and NumPy's generators begin at ``seed`` and are afterwards as before."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def quiet_generators(seed: int) -> Iterator[None]:
    """The same with PyTorch's; RecBole's models say nothing meanwhile. One thread at a time."""
    log = logging.getLogger()
    with _BUILDING, torch.random.fork_rng(devices=[]), seeded_generators(seed):
        disabled, log.disabled = log.disabled, True
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack for each accelerator not yet in use
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            log.disabled = disabled


@functools.cache
def model_class(name: str) -> type:
    """RecBole's class of this name."""
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    with importing_recbole():
        module = importlib.import_module(f"recbole.model.{names()[name]}_recommender")
    torch.autograd.set_detect_anomaly(*anomaly)  # a model's module switches it on for the whole process
    return getattr(module, name)


def names() -> dict[str, str]:
    """``general`` or ``sequential`` by RecBole's name of every such model."""
    return {name: "sequential" if name in domain_facts.TABLE else "general" for name in client_facts.TABLE}


def find(name: str, kind: str = "RecBole model", among: Iterable[str] = tuple(client_facts.TABLE)) -> str:
    """RecBole's spelling of a model's name; capital letters do not matter. Raises UserError for an unknown one."""
    known = {each.lower(): each for each in among}
    if name.lower() not in known:
        raise unknown(kind, name, among)
    return known[name.lower()]


@functools.cache
def defaults(name: str) -> Mapping[str, Any]:
    """A model's own hyper-parameters and their values in RecBole's file ``properties/model/NAME.yaml``."""
    import recbole

    file = Path(recbole.__file__).parent / "properties" / "model" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return {key: _number(value) for key, value in (content or {}).items()}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text; RecBole does not."""
    if isinstance(value, list):
        return [_number(part) for part in value]
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    return value


def is_size(hyper_parameter: str) -> bool:
    """Whether it is one of those that the setting ``dim`` sets."""
    return hyper_parameter.endswith("embedding_size") or hyper_parameter == "hidden_size"


def parse_model(name: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The setting ``model``: a YAML mapping of ``known`` hyper-parameters; raises UserError for anything else."""
    try:
        values = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"setting 'model': found '{text}', accepted: a mapping in braces, as "
                        f"--set \"model={{{', '.join(f'{k}: {v}' for k, v in list(known.items())[:1])}}}\".")
    for key in values:
        if key not in known:
            raise unknown(f"hyper-parameter in setting 'model' of {PREFIX}{name}", str(key), known)
    return {key: _number(value) for key, value in values.items()}


class Config(dict):
    """RecBole's configuration as its models see it: None for what nobody set."""

    def __missing__(self, key):
        return None

    def __getattr__(self, key: str):
        if key not in self:
            raise AttributeError(key)
        return self[key]


def configuration(name: str, values: Mapping[str, Any], length: int, negatives: int = 1, device: str = "cpu") -> Config:
    """A model's configuration; arguments as for ``build``."""
    return Config({**_FIELDS, **defaults(name), "MAX_ITEM_LIST_LENGTH": length, "device": device,
                   "train_neg_sample_args": {"distribution": "uniform", "sample_num": negatives}, **values})


class ClientDataset:
    """What a model sees of its dataset: users, items, and one user's history, which is ids, values and lengths."""

    def __init__(self, n_users: int, n_items: int, length: int, history: tuple[Tensor, Tensor, Tensor] | None = None):
        self.user_num, self.item_num = n_users + 1, n_items + 1
        self.field2seqlen = {SEQUENCE: length}
        self.uid_field, self.iid_field, self.dataset_path = USER, ITEM, ""
        self._history = history or (torch.zeros(n_users + 1, 1, dtype=torch.int64), torch.zeros(n_users + 1, 1),
                                    torch.zeros(n_users + 1, dtype=torch.int64))

    def num(self, field: str) -> int:
        return {USER: self.user_num, ITEM: self.item_num}[field]

    def history_item_matrix(self, value_field=None, max_history_len=None):
        return self._history


def build(name: str, values: Mapping[str, Any], length: int, n_users: int, n_items: int, negatives: int = 1,
          seed: int = 0, device: str = "cpu") -> nn.Module:
    """RecBole's model of some users and items, without the padding id, with ``values`` over the hyper-parameters of its
    file, a longest sequence and negatives per positive, begun by ``seed``; raises as ``built``."""
    return built(model_class(name), configuration(name, values, length, negatives, device),
                 ClientDataset(n_users, n_items, length), seed)


def built(cls: type, config: Config, dataset: Any, seed: int) -> nn.Module:
    """A RecBole model, the same for the same arguments; raises Refused if it cannot be built with these values."""
    with quiet_generators(seed):
        return tried("cannot be built", lambda: cls(config, dataset))
