"""RecBole's general recommenders by name and size, for a backbone that has the parameters of one."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Iterator, Mapping

from ..core.errors import unknown


class _Later(ModuleType):
    """Stands in for a module while RecBole is imported; what is called is looked up then."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Warning"):
            return type(name, (UserWarning,), {})

        def call(*args, **kwargs):
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)
        return call


class _AtUse(ModuleType):
    """Stands in for a module that is imported when something of it is looked up."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# RecBole imports these for a few metrics, two models and its own logs, none of which is used here; scikit-learn alone
# takes longer than reading a dataset.
_UNUSED = {"sklearn": ("", ".metrics", ".linear_model", ".exceptions", ".utils", ".utils.extmath"),
           "torch.utils.tensorboard": ("",)}
_GENERAL = "recbole.model.general_recommender"


@contextmanager
def importing_recbole() -> Iterator[None]:
    """Where RecBole is imported: without what it imports and the suite does not use."""
    names = [root + part for root, parts in _UNUSED.items() if root not in sys.modules for part in parts]
    stands_in: dict[str, ModuleType] = {name: _Later(name) for name in names}
    if "pandas" not in sys.modules:
        stands_in["pandas"] = _AtUse("pandas")
    sys.modules.update(stands_in)
    try:
        yield
    finally:
        for name, module in stands_in.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _general(name: str) -> type | None:
    """RecBole's general recommender of this name; None if there is none. RecBole imports all of them together, but each
    has a file by its name."""
    import recbole.model

    folder = Path(recbole.model.__file__).parent / _GENERAL.rpartition(".")[2]
    if _GENERAL not in sys.modules and (folder / f"{name.lower()}.py").is_file():
        package = sys.modules[_GENERAL] = ModuleType(_GENERAL)
        package.__path__ = [str(folder)]
        try:
            module = importlib.import_module(f"{_GENERAL}.{name.lower()}")
        finally:
            del sys.modules[_GENERAL]
    else:
        module = importlib.import_module(_GENERAL)
    found = getattr(module, name, None)
    return found if isinstance(found, type) else None


class _Sizes:
    """What a RecBole general recommender asks of its dataset: the number of users and items."""

    def __init__(self, n_users: int, n_items: int):
        self._sizes = {"user_id": n_users, "item_id": n_items}

    def num(self, field: str) -> int:
        return self._sizes[field]


def build_model(name: str, n_users: int, n_items: int, settings: Mapping[str, object]):
    """Instantiate RecBole's general recommender ``name`` for a number of users and items (no padding id). ``settings``:
    its hyper-parameters by RecBole's names, as ``{"embedding_size": 32}``. Raises UserError if RecBole has no such
    general recommender."""
    import torch
    with importing_recbole():
        if (model := _general(name)) is None:
            known = vars(importlib.import_module(_GENERAL))
            raise unknown("RecBole model", name, (n for n, v in known.items() if isinstance(v, type)))
    config = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "NEG_PREFIX": "neg_", "device": "cpu", **settings}
    with torch.random.fork_rng(devices=[]):  # its own initialisation leaves the caller's random state alone
        return model(config, _Sizes(n_users, n_items))
