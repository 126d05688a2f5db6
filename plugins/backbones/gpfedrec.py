"""GPFedRec: the server links clients with similar item tables and returns each a mean over its neighbours' tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcl_bench import ITEM, USER, Backbone, BackboneSettings, UserError, in_order, setting
from fedcl_bench.toolbox.layers import apply_pair_perceptron, item_rows, perceptron, perceptron_names, same_for_all


@dataclass(frozen=True)
class GPFedRecSettings(BackboneSettings):
    lr: float = setting(0.1, "learning rate of the predictor", above=0.0, search=(0.01, 0.05, 0.1, 0.5))
    lr_eta: float = setting(80.0, "the user vector learns at lr lr_eta, item rows at lr lr_eta times the accumulated "
                            "item count", above=0.0)
    lr_offset: str = setting("code", "lr is taken off the last two learning rates (released code), or not",
                             choices=("code", "none"))
    dim: int = setting(32, "length d of user and item vectors", low=1)
    hidden: tuple[int, ...] = setting((32, 16, 8), "sizes of the predictor's hidden layers (ReLU)", low=1)
    reg: float = setting(1.0, "weight of the mean squared distance to the table the server made for the client",
                         low=0.0)
    graph_neighbours: int = setting(0, "most similar clients k that are linked; 0: all whose similarity is above "
                                    "threshold times the mean", low=0)
    graph_threshold: float = setting(1.0, "see graph_neighbours", low=0.0, only_if="graph_neighbours=0")
    graph_layers: int = setting(1, "rounds of message passing over the graph", low=1)
    graph_sign: str = setting("paper", "clients with similar tables are linked (paper), or with dissimilar ones (the "
                              "released code passes on a distance as if it were a similarity)",
                              choices=("paper", "code"))
    eval_item_table: str = setting("local", "clients are evaluated each with its own trained item table (released "
                                   "code) or with the averaged one", choices=("local", "global"))


# Clients, and numbers per client, that one thread multiplies at a time: their order of summation is that of one thread.
CLIENTS, COLUMNS = 128, 1 << 12


def _products(rows: Tensor) -> Tensor:
    """Inner products of all pairs of rows (N, k), shape (N, N)."""
    result = rows.new_empty(len(rows), len(rows))
    starts = range(0, len(rows), CLIENTS)
    blocks = in_order(lambda at: rows[at:at + CLIENTS] @ rows[at:].T, starts, rows.device)
    for at, block in zip(starts, blocks):  # the matrix is symmetric
        result[at:at + CLIENTS, at:] = block
        result[at:, at:at + CLIENTS] = block.T
    return result


def _mixed(graph: Tensor, rows: Tensor) -> Tensor:
    """``graph`` (N, N) times rows (N, k)."""
    result = torch.empty_like(rows)

    def multiply(at: int) -> None:
        torch.mm(graph, rows[:, at:at + COLUMNS], out=result[:, at:at + COLUMNS])

    for _ in in_order(multiply, range(0, rows.shape[1], COLUMNS), rows.device):
        pass
    return result


def user_graph(tables: Tensor, sign: str, neighbours: int, threshold: float) -> Tensor:
    """The row-normalised adjacency matrix (N, N) of clients' uploaded tables (N, items, d), by cosine similarity.
    Without a client above the threshold, a client is linked with itself alone."""
    similarity = _products(tables.flatten(1))
    sizes = similarity.diagonal().sqrt().clamp_(min=1e-12)
    similarity /= sizes[:, None] * sizes
    if sign == "code":
        similarity = (1.0 - similarity).fill_diagonal_(0.0)
    if neighbours > 0:
        chosen = similarity.topk(min(neighbours, len(similarity)), dim=1).indices
        linked = torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, chosen, True)
    else:
        linked = similarity > similarity.mean() * threshold
    alone = ~linked.any(1)
    linked[alone, alone.nonzero().flatten()] = True
    return linked / linked.sum(1, keepdim=True).to(tables.dtype)


class GPFedRec(Backbone):
    """s(u, i) = MLP_u([e_u ; q_i]); L = BCE + reg mean (Q_u - R_u)^2 over the whole table. The server turns the uploads
    into R = A^L Q over the graph of users and broadcasts the mean of R to start from; R_u goes to client u as the table
    it is kept near. All clients start from the same parameters."""

    name = "gpfedrec"
    numbers = 1
    title = "graph-guided personalisation: item tables smoothed over a graph of users at the server"
    reference = "Zhang et al., GPFedRec, KDD 2024, arXiv 2305.07866"
    Settings = GPFedRecSettings
    ambiguities = {"graph_sign": {"paper": "paper", "code": "released code"},
                "lr_offset": {"code": "released code", "none": "plain"},
                "eval_item_table": {"local": "released code", "global": "averaged"}}
    defaults = {"init_from": "best", "batch_size": 256}
    ignored = {"weighting": "with the backbone gpfedrec, whose server takes the plain mean of smoothed tables"}
    session_defaults = {"dim": 8, "lr_eta": 10.0}  # whole tables of XING's items at every client, several times
    whole_tables = rest_follows = True
    keeps_local_tables = True  # the server needs every upload
    serves_tables = True

    def __init__(self, settings):
        super().__init__(settings)
        if settings.lr_offset == "code" and settings.lr_eta <= 1.0:
            raise UserError(f"setting 'lr_eta': found {settings.lr_eta:g}, accepted: above 1 with lr_offset=code, "
                            f"which takes lr off.")
        self.scores_local_tables = settings.eval_item_table == "local"

    @property
    def _sizes(self) -> list[int]:
        return [2 * self.settings.dim, *self.settings.hidden, 1]

    def new_rows(self, seed, users, items):
        dim = self.settings.dim
        of_all = {USER: item_rows(seed, USER, range(1), dim)[0], **perceptron(seed, "predictor", self._sizes)}
        return {ITEM: item_rows(seed, ITEM, items, dim)}, same_for_all(of_all, users)

    def score(self, clients, rows):
        return apply_pair_perceptron(clients, "predictor", clients[USER], rows[ITEM]).squeeze(2)

    def pull(self, n_items):
        """Of reg mean (Q_u - R_u)^2, a mean over all of the table's numbers."""
        return 2.0 * self.settings.reg / (n_items * self.settings.dim)

    def serve(self, uploads):
        """R = A^L Q for every client, and its mean over clients, from which all start the next round."""
        s = self.settings
        tables = uploads[ITEM]
        graph = user_graph(tables, s.graph_sign, s.graph_neighbours, s.graph_threshold)
        smoothed = tables.flatten(1)
        for _ in range(s.graph_layers):
            smoothed = _mixed(graph, smoothed)
        smoothed = smoothed.view_as(tables)
        return {ITEM: smoothed.mean(0)}, {ITEM: smoothed}

    def learning_rates(self, n_items, round_=0, batch=0):
        s = self.settings
        offset = s.lr if s.lr_offset == "code" else 0.0
        return {**dict.fromkeys(perceptron_names("predictor", len(s.hidden) + 1), s.lr), USER: s.lr * s.lr_eta - offset,
                ITEM: s.lr * n_items * s.lr_eta - offset}
