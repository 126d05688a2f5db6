"""None: no recommender, for methods that rank without one."""

import torch

from fedcl_bench import ITEM, Backbone


class NoBackbone(Backbone):
    """s(u, i) = 0; its tables hold a zero per user and per item."""

    name = "none"
    numbers = 1
    title = "no recommender: what methods run on that rank by themselves"
    reference = "of this suite"

    def new_rows(self, seed, users, items):
        return ({ITEM: torch.zeros(len(items), 1, dtype=torch.float64)},
                {"user": torch.zeros(len(users), 1, dtype=torch.float64)})

    def score(self, clients, rows):
        return clients["user"] * rows[ITEM][:, :, 0]

    def learning_rates(self, n_items, round_=0, batch=0):
        return {"user": self.settings.lr, ITEM: self.settings.lr}
