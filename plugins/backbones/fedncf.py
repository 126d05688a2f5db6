"""FedNCF: neural collaborative filtering with a public item table and a private user vector and predictor."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import ITEM, USER, Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.layers import apply_pair_perceptron, item_rows, perceptron, perceptron_names, same_for_all


@dataclass(frozen=True)
class FedNCFSettings(BackboneSettings):
    lr: float = setting(0.05, "learning rate of the predictor", above=0.0, search=tuple(i / 100 for i in range(1, 11)))
    lr_eta: float = setting(170.0, "the user vector learns at lr lr_eta, item rows at lr lr_eta times the accumulated "
                            "item count", above=0.0)
    dim: int = setting(32, "length d of user and item vectors", low=1)
    hidden: tuple[int, ...] = setting((), "sizes of the predictor's hidden layers (ReLU)", low=1)


class FedNCF(Backbone):
    """s(u, i) = MLP_u([e_u ; q_i]); without hidden layers w_u . [e_u ; q_i] + b_u, as F3CRec uses it. All users start
    from the same vector and predictor."""

    name = "fedncf"
    numbers = 1
    title = "neural collaborative filtering, private user vector and predictor, public item table"
    reference = ("Perifanis & Efraimidis, Federated Neural Collaborative Filtering, KBS 2022; as used by F3CRec "
                 "(Lim et al., CIKM 2025)")
    Settings = FedNCFSettings
    defaults = {"init_from": "best", "reset_private": True}
    ambiguities = {"reset_private": {True: "released code", False: "paper"},
                "init_from": {"best": "released code", "last": "that of FedMF"}}

    def new_rows(self, seed, users, items):
        s = self.settings
        of_all = {USER: item_rows(seed, USER, range(1), s.dim)[0],
                  **perceptron(seed, "predictor", [2 * s.dim, *s.hidden, 1])}
        return {ITEM: item_rows(seed, ITEM, items, s.dim)}, same_for_all(of_all, users)

    def factors(self, clients):
        """Of s(u, i) = w_q . q_i + (w_e . e_u + b_u) without hidden layers, what is beside q_i and what is constant."""
        if self.settings.hidden:
            return None
        of_user, of_item = clients["predictor.0.weight"][:, 0].split(self.settings.dim, dim=1)
        return of_item, (of_user * clients[USER]).sum(1, keepdim=True) + clients["predictor.0.bias"]

    def score(self, clients, rows):
        if not self.settings.hidden:
            return super().score(clients, rows)
        return apply_pair_perceptron(clients, "predictor", clients[USER], rows[ITEM]).squeeze(2)

    def learning_rates(self, n_items, round_=0, batch=0):
        s = self.settings
        predictor = perceptron_names("predictor", len(s.hidden) + 1)
        return {**dict.fromkeys(predictor, s.lr), USER: s.lr * s.lr_eta, ITEM: s.lr * n_items * s.lr_eta}
