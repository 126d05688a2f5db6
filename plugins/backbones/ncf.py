"""NCF: GMF and MLP branches under the BPR loss; item tables, MLP and output layer are public, user vectors private."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import Backbone, BackboneSettings, setting
from fedcl_bench.toolbox.functional import dot, plus_constant
from fedcl_bench.toolbox.layers import apply_pair_perceptron, item_rows, linear, perceptron, perceptron_names

USERS = ("user_gmf.weight", "user_mlp.weight")
ITEMS = ("item_gmf.weight", "item_mlp.weight")


@dataclass(frozen=True)
class NCFSettings(BackboneSettings):
    lr: float = setting(1e-3, "learning rate of all parameters", above=0.0, search=(1e-3, 1e-2))
    dim: int = setting(64, "length of each of the four vectors", low=1)
    init_std: float = setting(0.01, "vectors start from N(0, init_std^2)", low=0.0)
    hidden: tuple[int, ...] = setting((128, 64), "sizes of the MLP's layers (ReLU)", low=1)
    output: str = setting("logit", "what the loss and the ranking see: the logit, or its sigmoid, which saturates the "
                          "BPR loss", choices=("logit", "sigmoid"))


class NCF(Backbone):
    """s(u, i) = w . [p_u * q_i ; MLP([p'_u ; q'_i])] + b with MLP, w and b shared by all clients. Of the tutorial's MLP
    the dropout of .1 is left out."""

    name = "ncf"
    numbers = 1
    title = "neural collaborative filtering with shared layers, BPR loss, clients weighted by interactions"
    reference = ("tutorial model (federated collaborative filtering with BPR); He et al., Neural Collaborative "
                 "Filtering, WWW 2017; loss: Rendle et al., BPR, UAI 2009")
    Settings = NCFSettings
    ambiguities = {"output": {"logit": "definition of BPR", "sigmoid": "tutorial"}}
    defaults = {"optimiser": "adam", "batch_size": 256, "local_epochs": 5, "weighting": "interactions",
                "init_from": "best"}
    pairwise = True

    def new_rows(self, seed, users, items):
        s = self.settings
        return ({name: item_rows(seed, name, items, s.dim, s.init_std) for name in ITEMS},
                {name: item_rows(seed, name, users, s.dim, s.init_std) for name in USERS})

    def new_dense(self, seed):
        s = self.settings
        return {**perceptron(seed, "mlp", [2 * s.dim, *s.hidden]), **linear(seed, "output", s.dim + s.hidden[-1], 1)}

    def score(self, clients, rows):
        x = torch.relu(apply_pair_perceptron(clients, "mlp", clients[USERS[1]], rows[ITEMS[1]]))
        gmf = clients[USERS[0]].unsqueeze(1) * rows[ITEMS[0]]
        logits = plus_constant(dot(clients["output.weight"][:, 0], torch.cat([gmf, x], 2)), clients["output.bias"])
        return logits if self.settings.output == "logit" else torch.sigmoid(logits)

    def learning_rates(self, n_items, round_=0, batch=0):
        layers = *perceptron_names("mlp", len(self.settings.hidden)), "output.weight", "output.bias"
        return dict.fromkeys((*ITEMS, *USERS, *layers), self.settings.lr)
