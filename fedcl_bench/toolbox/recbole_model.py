"""RecBole's general recommenders by name and size, for a backbone that has the parameters of one."""

from __future__ import annotations

from typing import Mapping

from ..core.errors import unknown


class _Sizes:
    """What a RecBole general recommender asks of its dataset: the number of users and items."""

    def __init__(self, n_users: int, n_items: int):
        self._sizes = {"user_id": n_users, "item_id": n_items}

    def num(self, field: str) -> int:
        return self._sizes[field]


def build_model(name: str, n_users: int, n_items: int, settings: Mapping[str, object]):
    """Instantiate RecBole's general recommender ``name`` for a number of users and items (no padding id).

    Args:
        settings: its hyper-parameters by RecBole's names, as ``{"embedding_size": 32}``.

    Raises:
        UserError: if RecBole has no such general recommender.
    """
    import recbole.model.general_recommender as models
    import torch

    if not isinstance(getattr(models, name, None), type):
        raise unknown("RecBole model", name, (n for n, v in vars(models).items() if isinstance(v, type)))
    config = {"USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "NEG_PREFIX": "neg_", "device": "cpu", **settings}
    with torch.random.fork_rng(devices=[]):  # its own initialisation leaves the caller's random state alone
        return getattr(models, name)(config, _Sizes(n_users, n_items))
