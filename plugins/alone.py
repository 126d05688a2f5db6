"""Alone: no federation, every client trains a recommender of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import Backbone, Incompatible, Method, ModuleBackbone, SequentialBackbone, setting

ITEMS = "items"  # the one public table, without columns: all that clients have in common is how many items there are


@dataclass(frozen=True)
class AloneSettings:
    own_rate: float = setting(1.0, "learning rates of what was public, as a multiple of the backbone's over the number "
                              "of clients, which is the share of one client in the server's mean", above=0.0,
                              search=(0.1, 0.3, 1.0, 3.0, 10.0))


class Alone(Method):
    """Nobody uploads anything: public item tables and dense parameters become private, from the same start."""

    name = "alone"
    numbers = 1
    title = "bound: no federation, every client trains by itself on its own data"
    reference = "local training, the usual lower reference of federated learning (McMahan et al., AISTATS 2017)"
    Settings = AloneSettings
    first_step = 0
    topology = "local"
    ignored = dict.fromkeys(("weighting", "upload_noise", "upload_mechanism", "upload_clip", "cold_items",
                             "aggregator", "server_optimiser"),
                            "with the method alone, whose clients share no table and upload nothing")

    def trained_backbone(self, backbone, clients):
        if isinstance(backbone, (SequentialBackbone, ModuleBackbone)):  # of domains
            return backbone
        if backbone.whole_tables or backbone.keeps_local_tables or backbone.serves_tables:
            raise Incompatible(f"method '{self.name}' gives each client its own rows of the items that it looks up, "
                               f"and clients of '{backbone.name}' train all rows or keep their own.", "backbone",
                               lambda cls: not (cls.whole_tables or cls.keeps_local_tables or cls.serves_tables))
        return _own_copies(type(backbone), self.settings.own_rate / clients)(backbone.settings)


def _own_copies(cls: type[Backbone], rate: float) -> type[Backbone]:
    """A backbone class without public parameters: ``cls`` with private ones in their place."""
    class OwnCopies(Backbone):
        name, title, Settings, pairwise = cls.name, cls.title, cls.Settings, cls.pairwise

        def __init__(self, settings):
            super().__init__(settings)
            self.inner = cls(settings)
            shared = self.inner.new_rows(0, range(0), range(0))[0]
            self.shared, self.empty = list(shared), {**self.inner.new_personal(0, range(0)), **shared}

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
            return {ITEMS: 0.0, **{name: lr * rate if name in own else lr
                                   for name, lr in self.inner.learning_rates(n_items, round_, batch).items()}}

    return OwnCopies
