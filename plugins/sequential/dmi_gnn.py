"""DMI-GNN: several interests from patterns of positions, on a graph of the session and on one of all a client's clicks.

Each formula stands where it is computed. The authors' code was not found; what they do not say follows two codes that
name DMI-GNN as their source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, normalize

from fedcl_bench import ITEM, SessionBackbone, SessionSettings, SessionVectors, Start, setting
from fedcl_bench.toolbox.functional import Pooling, linear
from fedcl_bench.toolbox.item_graphs import (attend_edges, find_keys, first_positions, neighbours_in, power_of_two,
                                             session_edges)
from fedcl_bench.toolbox.layers import apply_linear

_SLOPE = 0.2  # of leaky ReLUs


@dataclass(frozen=True)
class DMIGNNSettings(SessionSettings):
    dropout: float = setting(0.0, "dropout of what the session's graph gives; .7 in the code for Tmall", low=0.0,
                             high=1.0)
    global_dropout: float = setting(0.5, "dropout of what the graph of all clicks gives", low=0.0, high=1.0)
    graph_dropout: float = setting(0.0, "dropout inside that graph", low=0.0, high=1.0)
    graph_neighbours: int = setting(12, "neighbours of an item in that graph, the most frequent; 0: no such graph",
                                    low=0)
    interests: int = setting(3, "K: vectors of a session", low=1)
    patterns: str = setting("linear", "what weights are made of: K vectors of one linear layer after a sigmoid, or of "
                            "K two-layer networks (extractors, one of the two codes)",
                            choices=("linear", "extractors"))
    diversity: float = setting(0.01, "beta: weight of the loss that keeps patterns of long sessions apart", low=0.0)
    long_session: float = setting(8.0, "eta: the length from which a session is long", low=0.0)


class DMIGNN(SessionBackbone):
    """The session is read from its last click to its first; row e, position p, h = e / |e|.

    - Session graph: h'_i = sum_j softmax_j(LeakyReLU(a_r (h_i * h_j))) h_j over edges i, j of kind r: an item with
      itself, its successors, its predecessors, or both.
    - Graph of all clicks: alpha = softmax(w2 LeakyReLU(W1 [mean e * e_j ; count_j])) over neighbours j,
      h'' = ReLU(W3 [e ; sum_j alpha_j e_j]). A client knows its own training sessions and no others.
    - Patterns on h = h' + h'': m_l = tanh(W [p_l ; h_l]), n_l = sigmoid(U m_l + u) in K parts, beta_lk = n_lk w_k,
      interests s_k = sum_l beta_lk h_l. The score of an item is max_k <s_k, e / |e|>.
    - The loss has besides weight * sigmoid(mean_(i<j) |cos(beta_i, beta_j)| (length - eta)).
    """

    name = "dmi-gnn"
    numbers = 1
    title = "interests from patterns of positions on two graphs of a client's clicks, of which the best counts"
    reference = ("Lv, Liu & Xu, Dynamic Multi-Interest Graph Neural Network for Session-Based Recommendation, AAAI "
                 "2025, after the released derivative Co-DMI-GNN")
    Settings = DMIGNNSettings
    # As in both codes, whose regulariser is a sum over 100 samples beside the mean of their cross-entropies.
    central_defaults = {**SessionBackbone.central_defaults, "weight_decay": 1e-5, "lr_step": 3, "lr_decay": 0.1,
                        "diversity": 1.0}

    @property
    def n_vectors(self):
        return self.settings.interests

    def item_starts(self, n_items):
        return {ITEM: self._start(self.settings.dim)}

    def _start(self, *shape: int) -> Start:
        return Start(shape, bound=self.settings.dim ** -0.5)

    def dense_starts(self):
        s, d = self.settings, self.settings.dim
        shapes = {"positions": (s.max_length, d), "edges": (4, d), "mix.weight": (d, 2 * d),
                  "weights": (s.interests, d)}
        if s.patterns == "linear":
            shapes |= {"patterns.weight": (s.interests * d, d), "patterns.bias": (s.interests * d,)}
        else:
            shapes |= {"patterns.0.weight": (s.interests * d, d), "patterns.0.bias": (s.interests * d,),
                       "patterns.1.weight": (s.interests, d, d), "patterns.1.bias": (s.interests, d)}
        if s.graph_neighbours:
            shapes |= {"near.0": (d, d + 1), "near.1": (1, d), "near.2": (d, 2 * d)}
        return {name: self._start(*shape) for name, shape in shapes.items()}

    # What a client knows of its own clicks.

    def remember(self, step, memory):
        """Of every user the items i with neighbours as keys -1 - i, ascending, (users, n); these, as 1 + j, and how
        often they were, both (users, n, neighbours); 0 beyond."""
        most = self.settings.graph_neighbours
        if not most or not step.sessions:
            return {}
        owner, item, rank, near, count = neighbours_in(step, most)
        first = rank == 0
        number = np.cumsum(first) - 1  # of the (user, item)
        after = np.searchsorted(owner[first], owner, side="right")
        column = after - 1 - number
        shape = step.n_users, power_of_two(min(int(step.train.lengths.max()), step.n_items))
        tables = {"graph items": np.zeros(shape, np.int64),
                  **{name: np.zeros((*shape, most), np.int32) for name in ("graph neighbours", "graph counts")}}
        tables["graph items"][owner, column] = -1 - item
        tables["graph neighbours"][owner, column, rank] = 1 + near
        tables["graph counts"][owner, column, rank] = count
        device = step.sessions["train"].items.device
        return {name: torch.from_numpy(table).to(device) for name, table in tables.items()}

    def _in_graph(self, memory, items: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbours of items (C, L) in their client's graph, -1 where there is none, and counts, both (C, L, n)."""
        column, known = find_keys(memory["graph items"], -1 - items)
        known = (known & (items >= 0)).unsqueeze(2)
        index = column.unsqueeze(2).expand(-1, -1, self.settings.graph_neighbours)
        near, count = (memory[name].gather(1, index).long() for name in ("graph neighbours", "graph counts"))
        return near * known - 1, count * known

    def more_items(self, memory, sequence):
        if not self.settings.graph_neighbours:
            return None
        near = self._in_graph(memory, sequence.items)[0]
        return near.where(near >= 0, sequence.items[:, -1:, None]).flatten(1)  # where there is none, one that is read

    # The model.

    def session_vectors(self, clients, inputs, sequence, dropout):
        s, length = self.settings, sequence.real.shape[1]
        real, items = sequence.real.flip(1), sequence.items.flip(1)
        rows, near = inputs[:, :length].flip(1), inputs[:, length:]
        node = first_positions(items, real)
        h = attend_edges(normalize(rows, dim=2), session_edges(node, real), clients["edges"])
        h = dropout(h, s.dropout)
        if s.graph_neighbours:
            near = near.view(len(near), length, -1, s.dim).flip(1)
            h = h + dropout(self.in_clicks(clients, rows, near, items, real, dropout), s.global_dropout)
        h = h.gather(1, node.unsqueeze(2).expand_as(h))  # equal items have lost equal entries
        beta = self.patterns(clients, h) * real.unsqueeze(1)
        mask = torch.ones_like(beta[:, :, 0], dtype=torch.bool)
        return SessionVectors(beta @ h, mask, {"beta": beta, "length": real.sum(1).to(h)})

    def in_clicks(self, clients, rows: Tensor, near: Tensor, items: Tensor, real: Tensor, dropout) -> Tensor:
        """h'' of the graph of all clicks at every position, (C, L, d). ``near``: rows of the neighbours, (C, L, n, d).
        """
        known, count = self._in_graph(clients, items)
        known = known >= 0
        mean = rows.sum(1) / real.sum(1, keepdim=True)
        given = torch.cat([mean[:, None, None] * near, count.unsqueeze(3).to(near)], 3)
        hidden = leaky_relu(linear(given.flatten(1, 2), clients["near.0"]), _SLOPE)
        scores = linear(hidden, clients["near.1"]).view(known.shape)
        alpha = scores.masked_fill(~known, -9e15).softmax(2) * known
        mixed = (alpha.unsqueeze(2) @ near).squeeze(2)
        return torch.relu(linear(dropout(torch.cat([rows, mixed], 2), self.settings.graph_dropout), clients["near.2"]))

    def patterns(self, clients, h: Tensor) -> Tensor:
        """beta before it is masked, (C, K, L)."""
        s = self.settings
        positions = clients["positions"][:, :h.shape[1]]
        m = torch.tanh(linear(torch.cat([positions, h], 2), clients["mix.weight"]))
        if s.patterns == "linear":
            n = torch.sigmoid(apply_linear(clients, "patterns", m)).unflatten(2, (s.interests, s.dim))
        else:
            hidden = torch.tanh(apply_linear(clients, "patterns.0", m)).unflatten(2, (s.interests, s.dim))
            n = torch.einsum("clki,ckoi->clko", hidden, clients["patterns.1.weight"])
            n = n + clients["patterns.1.bias"].unsqueeze(1)
        return torch.einsum("clkd,ckd->ckl", n, clients["weights"])

    def pooling(self, vectors, mask):
        """max_k <s_k, e / |e|>"""
        return Pooling(vectors, mask, 1.0, torch.zeros_like(vectors[:, 0, 0]))

    def session_term(self, session, targets):
        """weight * sigmoid(mean |cos| (length - eta)); 0 where there is one pattern."""
        s, beta = self.settings, normalize(session.terms["beta"], dim=2)
        if s.interests == 1 or s.diversity == 0.0:
            return None
        first, second = torch.triu_indices(s.interests, s.interests, 1, device=beta.device)
        similarity = (beta[:, first] * beta[:, second]).sum(2).abs().mean(1)
        return s.diversity * torch.sigmoid(similarity * (session.terms["length"] - s.long_session))
