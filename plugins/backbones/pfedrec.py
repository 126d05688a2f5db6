"""PFedRec: a private score function per client, trained in turns with the public item table; no user vector."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import ITEM, Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.layers import item_rows, linear, same_for_all


@dataclass(frozen=True)
class PFedRecSettings(BackboneSettings):
    lr: float = setting(0.05, "learning rate of the score function", above=0.0,
                        search=tuple(i / 100 for i in range(1, 11)))
    lr_eta: float = setting(170.0, "item rows learn at lr lr_eta times the accumulated item count (170: F3CRec's code, "
                            "80: PFedRec's)", above=0.0)
    dim: int = setting(32, "length d of item vectors", low=1)
    eval_item_table: str = setting("global", "clients are evaluated with the averaged item table (F3CRec's code) or "
                                   "each with its own trained copy (PFedRec's)", choices=("global", "local"))


class PFedRec(Backbone):
    """s(u, i) = w_u . q_i + b_u. In every local batch the score function takes a step, then, with a fresh forward pass,
    the item rows. All clients start from the same score function.
    """

    name = "pfedrec"
    numbers = 1
    title = "dual personalisation: private score function, item table fine-tuned by each client"
    reference = "Zhang et al., Dual Personalization on Federated Recommendation, IJCAI 2023"
    Settings = PFedRecSettings
    factor_names = ("score.weight", "score.bias")  # w_u and b_u of s(u, i) = w_u . q_i + b_u
    defaults = {"init_from": "best", "reset_private": True}
    ambiguities = {"reset_private": {True: "released code of F3CRec", False: "paper"},
                "init_from": {"best": "released code of F3CRec", "last": "that of FedMF"},
                "eval_item_table": {"global": "released code of F3CRec", "local": "released code of PFedRec"}}
    session_defaults = {"lr": 1.0, "lr_eta": 1.0}  # by validation on XING
    static_defaults = {"lr": 0.1, "lr_eta": 80.0, "batch_size": 256, "eval_item_table": "local"}

    def __init__(self, settings):
        super().__init__(settings)
        self.keeps_local_tables = self.scores_local_tables = settings.eval_item_table == "local"

    def new_rows(self, seed, users, items):
        dim = self.settings.dim
        return {ITEM: item_rows(seed, ITEM, items, dim)}, same_for_all(linear(seed, "score", dim, 1), users)

    def groups(self, names):
        """First the score function, then the item rows."""
        return [[name for name in names if name != ITEM], [ITEM]]

    def learning_rates(self, n_items, round_=0, batch=0):
        s = self.settings
        return {"score.weight": s.lr, "score.bias": s.lr, ITEM: s.lr * n_items * s.lr_eta}
