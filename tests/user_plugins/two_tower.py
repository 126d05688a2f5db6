"""A two-tower recommender: a private user vector and a public item vector each go through a public layer of their own,
and the logit is the inner product of what comes out."""

from dataclasses import dataclass

import torch

from fedcl_bench import ITEM, USER, Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.functional import dot
from fedcl_bench.toolbox.layers import item_rows

TOWERS = {USER: "user_tower.weight", ITEM: "item_tower.weight"}


@dataclass(frozen=True)
class TwoTowerSettings(BackboneSettings):
    lr: float = setting(0.01, "learning rate of all parameters", above=0.0, search=(0.001, 0.01))
    dim: int = setting(16, "length of all vectors", low=1)
    init_std: float = setting(0.1, "vectors start from N(0, init_std^2)", low=0.0)


class TwoTower(Backbone):
    name = "two-tower"
    title = "a private user vector and public item vectors, each through a public layer"
    Settings = TwoTowerSettings
    defaults = {"optimiser": "adam"}

    def new_rows(self, seed, users, items):
        s = self.settings
        return ({ITEM: item_rows(seed, ITEM, items, s.dim, s.init_std)},
                {USER: item_rows(seed, USER, users, s.dim, s.init_std)})

    def new_dense(self, seed):  # rows of a table whose "items" are the layer's outputs
        dim = self.settings.dim
        return {name: item_rows(seed, name, range(dim), dim, dim ** -0.5) for name in TOWERS.values()}

    def score(self, clients, rows):
        user = torch.tanh(torch.einsum("cd,ced->ce", clients[USER], clients[TOWERS[USER]]))
        items = torch.tanh(torch.einsum("cnd,ced->cne", rows[ITEM], clients[TOWERS[ITEM]]))
        return dot(user, items)

    def learning_rates(self, n_items, round_=0, batch=0):
        return dict.fromkeys((USER, ITEM, *TOWERS.values()), self.settings.lr)
