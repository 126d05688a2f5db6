"""FedMF: federated matrix factorisation with private user vectors and a public item table."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import ITEM, USER, Backbone, BackboneSettings, rng, setting


@dataclass(frozen=True)
class FedMFSettings(BackboneSettings):
    lr: float = setting(1.0, "learning rate of the user vector", above=0.0, search=(0.1, 0.5, 1.0))
    dim: int = setting(32, "length d of user and item vectors", low=1)
    init_std: float = setting(0.01, "both tables start from N(0, init_std^2)", low=0.0)
    item_lr: str = setting("times_items", "item rows learn at lr times the accumulated item count (released code) or "
                           "at lr (the paper names no factor)", choices=("times_items", "plain"))


class FedMF(Backbone):
    """s(u, i) = p_u . q_i on the parameters of RecBole's BPR model; p_u stays at the client, Q is public. The client's
    loss is the mean binary cross-entropy, the server's table the mean of the uploads (Eq. 7 of F3CRec)."""

    name = "fedmf"
    numbers = 1
    title = "matrix factorisation, private user vectors, public item table (RecBole's BPR)"
    reference = "Chai et al., Secure Federated Matrix Factorization, 2020; as used by F3CRec (Lim et al., CIKM 2025)"
    Settings = FedMFSettings
    ambiguities = {"item_lr": {"times_items": "released code", "plain": "paper"},
                "init_from": {"last": "released code", "best": "the model tested"}}
    factor_names = (USER, None)  # p_u of s(u, i) = p_u . q_i

    def recbole_model(self, n_users, n_items):
        """RecBole's BPR of this size; its state_dict has exactly this backbone's tables."""
        from fedcl_bench.toolbox.recbole_model import build_model

        return build_model("BPR", n_users, n_items, {"embedding_size": self.settings.dim})

    def new_rows(self, seed, users, items):
        shapes = {name: tuple(p.shape) for name, p in self.recbole_model(len(users), len(items)).named_parameters()}
        first = {USER: users.start, ITEM: items.start}
        rows = {name: rng.normal_rows(seed, f"init {name}", first[name], *shape) * self.settings.init_std
                for name, shape in shapes.items()}
        return {ITEM: rows[ITEM]}, {USER: rows[USER]}

    def keys(self, clients, rows):
        return clients[USER].unsqueeze(1) * rows[ITEM]

    def learning_rates(self, n_items, round_=0, batch=0):
        factor = n_items if self.settings.item_lr == "times_items" else 1
        return {USER: self.settings.lr, ITEM: self.settings.lr * factor}
