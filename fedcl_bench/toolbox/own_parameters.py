"""A backbone of which clients share nothing, made of one that has public parameters."""

from __future__ import annotations

import torch

from ..plugin.backbone import Backbone

ITEMS = "items"  # the one public table, without columns: all that clients have in common is how many items there are


def without_public(cls: type[Backbone], rate: float, whole_tables: bool = False) -> type[Backbone]:
    """A backbone class without public parameters: ``cls`` with private ones in their place, from the same start.
    ``rate``: their learning rates, as a multiple of the class's; ``whole_tables``: clients hold all rows of their item
    tables, not those that they look up alone."""
    return type("OwnCopies", (_OwnCopies,), {
        "original": cls, "own_rate": rate, "whole_tables": whole_tables,
        **{name: getattr(cls, name)
           for name in ("name", "title", "Settings", "pairwise", "explicit", "needs_features")}})


class _OwnCopies(Backbone):
    """What ``without_public`` makes: ``original`` is its ``cls``, ``own_rate`` its ``rate``."""

    original: type[Backbone]
    own_rate: float

    def __init__(self, settings):
        super().__init__(settings)
        self.inner = self.original(settings)
        shared = self.inner.new_rows(0, range(0), range(0))[0]
        self.shared, self.empty = list(shared), {**self.inner.new_personal(0, range(0)), **shared}

    @property
    def features(self):
        return self.inner.features

    @features.setter
    def features(self, value):
        self.inner.features = value

    def new_rows(self, seed, users, items):
        dense = {name: value.expand(len(users), *value.shape).clone()
                 for name, value in self.inner.new_dense(seed).items()}
        return ({ITEMS: torch.zeros(len(items), 0, dtype=torch.float64)},
                {**self.inner.new_rows(seed, users, range(0))[1], **dense})

    def new_personal(self, seed, items):
        if not items:  # the names, which are asked for often
            return self.empty
        return {**self.inner.new_personal(seed, items), **self.inner.new_rows(seed, range(0), items)[0]}

    def _split(self, clients):
        """Clients and their rows, as the backbone knows them."""
        return ({name: value for name, value in clients.items() if name not in self.shared},
                {name: clients[name] for name in self.shared})

    def score(self, clients, rows):
        return self.inner.score(*self._split(clients))

    def keys(self, clients, rows):
        return self.inner.keys(*self._split(clients))

    def loss(self, scores, labels, weights):
        return self.inner.loss(scores, labels, weights)

    def pair_loss(self, positive, negative, weights):
        return self.inner.pair_loss(positive, negative, weights)

    def regulariser(self, clients, rows, weights, served, round_):
        return self.inner.regulariser(*self._split(clients), weights, served, round_)

    def remember(self, step, memory):
        return self.inner.remember(step, memory)

    def groups(self, names):
        first, *others = self.inner.groups([name for name in names if name != ITEMS])
        return [[ITEMS, *first], *others]

    def learning_rates(self, n_items, round_=0, batch=0):
        own = {*self.shared, *self.inner.new_dense(0)}
        return {ITEMS: 0.0, **{name: lr * self.own_rate if name in own else lr
                               for name, lr in self.inner.learning_rates(n_items, round_, batch).items()}}
