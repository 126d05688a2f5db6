"""HearInt: a session's short- and long-term intents, by an encoder of its order and one of its graphs.

Each formula stands where it is computed. Where the paper and its released code differ, a setting chooses between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, selu

from fedcl_bench import ITEM, SessionBackbone, SessionSettings, SessionVectors, Start, rng, setting
from fedcl_bench.toolbox.clustering import k_means
from fedcl_bench.toolbox.functional import Pooling, attention, linear
from fedcl_bench.toolbox.item_graphs import (attend_edges, find_keys, first_positions, neighbours_in, power_of_two,
                                             session_edges, step_cells, table_of_cells)
from fedcl_bench.toolbox.layers import apply_linear

_SCALE = 13.0  # of cosines
_BUCKETS = 4  # of shares


@dataclass(frozen=True)
class HearIntSettings(SessionSettings):
    dropout: float = setting(0.1, "share of entries that dropout sets to zero in the temporal encoder", low=0.0,
                             high=0.9)
    p: float = setting(0.4, "probability that a view leaves out a click whose cluster is not near; 0: no views",
                       low=0.0, high=1.0)
    clusters: int = setting(100, "K: clusters of items; at most as many as there are items", low=1, only_if="p")
    kmeans_iterations: int = setting(10, "iterations of K-means in every round; 50 in the code", low=1, only_if="p")
    long_view: str = setting("positions", "the long-term view leaves out items by their own cluster (items), or item "
                             "number n of the session's, in order of ids, by the cluster at its n-th position, padding "
                             "and cluster 0 being one (positions, released code)", choices=("positions", "items"),
                             only_if="p")
    temporal_positions: bool = setting(True, "the temporal encoder adds vectors of positions; false in the code for "
                                       "Tmall")
    graph_neighbours: int = setting(12, "neighbours of an item in the graph of all clicks, the most frequent", low=0)
    buckets: str = setting("released", "kinds of edges in that graph are quarters of a neighbour's share of the "
                           "counts, and an only neighbour seen more than once is in the first (released code) or in "
                           "the last (quarters)", choices=("released", "quarters"))


class HearInt(SessionBackbone):
    """Rows x of a session's clicks, left-padded; E are vectors of positions.

    - Clusters of items are K-means of the table that the clients received. In training, the short-term view leaves out
      clicks whose centroid has a cosine of 0 or less with that of the last click, with probability p; the long-term
      view does so with that of the most frequent cluster.
    - Temporal encoder, on the short-term view: y = sum_l softmax_l(q x_l / sqrt d) x_l for q = SELU(W x_last + b) of
      x + E, then t = y + W2 SELU(W1 y + b1) + b2.
    - Spatial encoder, on the long-term view: h^r = sum_j softmax_j(LeakyReLU(a_r (x_i * x_j))) x_j on two graphs of the
      session's steps, whose edges' kinds are directions, or shares in the graph of all clicks (a client knows its own
      training sessions and no others; the released code trains with the session graph of the batch's second session
      in its place); h = g h^1 + (1 - g) h^2 with g = sigmoid(W [h^1 ; h^2] + b);
      s = sum_l w . sigmoid(W1 tanh(W0 [E_l ; h_l]) + b1 + W2 mean h) h_l.
    - The session is g t + (1 - g) s with g = sigmoid(W [t ; s]), and an item's score 13 times its cosine with it.
    - The contrast of sessions with centroids has no negatives where a batch is one session: it is 0 and left out,
      also with ``topology=central``, whose batches would have some.
    """

    name = "hearint"
    numbers = 2
    title = "short- and long-term intents of a session from its order and its graphs"
    reference = ("Wang et al., Spatial-Temporal Perceiving: Deciphering User Hierarchical Intent in Session-Based "
                 "Recommendation, IJCAI 2024, as in its released code")
    Settings = HearIntSettings
    central_defaults = {**SessionBackbone.central_defaults, "lr_step": 1, "lr_decay": 0.6}

    def __init__(self, settings):
        super().__init__(settings)
        self.pads = settings.p > 0.0 and settings.long_view == "positions"  # which count from the first padding

    @property
    def n_vectors(self):
        return 1

    def item_starts(self, n_items):
        return {ITEM: self._start(self.settings.dim)}

    def _start(self, *shape: int) -> Start:
        return Start(shape, bound=self.settings.dim ** -0.5)

    def dense_starts(self):
        d = self.settings.dim
        shapes = {"positions": (self.settings.max_length, d), "edges.session": (4, d), "edges.clicks": (_BUCKETS, d),
                  "soft.mix": (d, 2 * d), "soft.mean": (d, d), "soft.out": (1, d), "gate": (d, 2 * d)}
        for name, inputs in (("query", d), ("ffn.0", d), ("ffn.1", d), ("graphs", 2 * d), ("soft", d)):
            shapes |= {f"{name}.weight": (d, inputs), f"{name}.bias": (d,)}
        return {name: self._start(*shape) for name, shape in shapes.items()}

    # What a client knows of its own clicks, and makes of the items.

    def remember(self, step, memory):
        """Of every user the pairs of an item and a neighbour as keys, negative and ascending, and their buckets, both
        (users, n), 0 beyond."""
        if not step.sessions:
            return {}
        owner, item, rank, near, count = neighbours_in(step, self.settings.graph_neighbours)
        group = np.cumsum(rank == 0) - 1  # of an item and user
        total = np.bincount(group, weights=count).astype(np.int64)[group] if len(group) else count
        bucket = np.minimum(1 + _BUCKETS * count // np.maximum(total, 1), _BUCKETS)
        if self.settings.buckets == "released":
            bucket[(count == total) & (count > 1)] = 1
        keys = _pair_keys(item.astype(np.int64), near.astype(np.int64))
        order = np.lexsort((keys, owner))
        owner, keys, bucket = owner[order], keys[order], bucket[order]
        column = np.arange(len(owner)) - np.searchsorted(owner, owner)
        shape = step.n_users, power_of_two(int(column.max(initial=0)) + 1)
        tables = {"graph pairs": np.zeros(shape, np.int64), "graph buckets": np.zeros(shape, np.int8)}
        tables["graph pairs"][owner, column], tables["graph buckets"][owner, column] = keys, bucket
        device = step.sessions["train"].items.device
        return {name: torch.from_numpy(table).to(device) for name, table in tables.items()}

    def derive(self, public, draw):
        """Each item's cluster, (items,), and which clusters have a cosine above 0, (K, K)."""
        s = self.settings
        if s.p == 0.0:
            return {}
        key = rng.key(draw.seed, "clusters of items", draw.step, draw.round)
        clusters, centroids = k_means(public[ITEM], s.clusters, s.kmeans_iterations, key)
        unit = normalize(centroids, dim=1)
        return {"clusters": clusters, "near": (unit @ unit.T > 0.0).fill_diagonal_(True)}

    # The model.

    def session_vectors(self, clients, inputs, sequence, dropout):
        real = sequence.real
        node = first_positions(sequence.items, real)
        short, long = real, real
        if self.settings.p > 0.0 and dropout.keys is not None:
            short, long = self.views(clients, sequence, node, dropout)
        positions = clients["positions"][:, -real.shape[1]:]
        t = self.temporal(clients, inputs + positions if self.settings.temporal_positions else inputs, short,
                          partial(dropout, share=self.settings.dropout))
        h = self.on_graphs(clients, inputs, sequence, node, long)
        s = self.soft_attention(clients, h, positions, long)
        gate = torch.sigmoid(linear(torch.cat([t, s], 2), clients["gate"]))
        session = normalize(gate * t + (1.0 - gate) * s, dim=2)
        return SessionVectors(session, torch.ones_like(session[:, :, 0], dtype=torch.bool))

    def views(self, clients, sequence, node: Tensor, dropout) -> tuple[Tensor, Tensor]:
        """Which clicks the short- and the long-term view show, both (C, L)."""
        real, items, near = sequence.real, sequence.items, clients["near"][0]
        cluster = clients["clusters"][0][items.clamp(min=0)] * real
        chosen = [dropout(torch.ones_like(real, dtype=clients["positions"].dtype), self.settings.p) == 0.0
                  for _ in range(2)]
        short = real & (near[cluster[:, -1:], cluster] | ~chosen[0])

        by_item = self.settings.long_view == "items"
        counted = real if by_item else cluster > 0
        count = ((cluster.unsqueeze(1) == cluster.unsqueeze(2)) & counted.unsqueeze(1)).sum(2)
        rank = (count * len(near) - cluster).where(counted, 0 if not by_item else -len(near))  # the smallest of equals
        frequent = cluster.gather(1, rank.argmax(1, keepdim=True))
        hidden = ~near[frequent, cluster] & chosen[1]
        if by_item:
            return short, real & ~hidden.gather(1, node)
        # Its number among the session's items in order of ids, the first of which is padding if there is any.
        padding = ~real & ((~real).cumsum(1) == 1)
        first = (node == torch.arange(node.shape[1], device=node.device)) & real | padding
        number = ((items.unsqueeze(1) < items.unsqueeze(2)) & first.unsqueeze(1)).sum(2)
        return short, real & ~hidden.gather(1, number)

    def temporal(self, clients, x: Tensor, shown: Tensor, drop) -> Tensor:
        """t, (C, 1, d)."""
        query = selu(apply_linear(clients, "query", x[:, -1:]))
        weights = attention(query @ x.transpose(1, 2), ~shown.unsqueeze(1), x.shape[2] ** -0.5)
        y = weights @ drop(x)
        return y + drop(apply_linear(clients, "ffn.1", selu(apply_linear(clients, "ffn.0", y))))

    def on_graphs(self, clients, rows: Tensor, sequence, node: Tensor, shown: Tensor) -> Tensor:
        """h at every position, (C, L, d)."""
        length = node.shape[1]
        directions = session_edges(node, sequence.real)
        cells = step_cells(node, sequence.real)
        bucket = table_of_cells(torch.cat(cells, 1), self._buckets(clients, sequence.items), length)
        bucket = bucket.gather(1, node.unsqueeze(2).expand_as(bucket)).masked_fill(directions[0], _BUCKETS)
        graphs = []
        for kinds, name in ((directions, "session"), ([bucket == b + 1 for b in range(_BUCKETS)], "clicks")):
            kinds = tuple(kind & shown.unsqueeze(1) for kind in kinds)
            graphs.append(attend_edges(rows, kinds, clients[f"edges.{name}"]))
        gate = torch.sigmoid(apply_linear(clients, "graphs", torch.cat(graphs, 2)))
        return gate * graphs[0] + (1.0 - gate) * graphs[1]

    def _buckets(self, memory, items: Tensor) -> Tensor:
        """Of steps from a position to the next, and then of steps back, (C, 2 L - 2); 0: no neighbours."""
        a, b = items[:, :-1], items[:, 1:]
        keys = torch.cat([_pair_keys(a, b), _pair_keys(b, a)], 1)
        index, known = find_keys(memory["graph pairs"], keys)
        return memory["graph buckets"].gather(1, index) * known

    def soft_attention(self, clients, h: Tensor, positions: Tensor, shown: Tensor) -> Tensor:
        """s, (C, 1, d)."""
        shown = shown.unsqueeze(2).to(h)
        mean = (h * shown).sum(1, keepdim=True) / shown.sum(1, keepdim=True).clamp(min=1.0)
        mixed = torch.tanh(linear(torch.cat([positions, h], 2), clients["soft.mix"]))
        weights = torch.sigmoid(apply_linear(clients, "soft", mixed) + linear(mean, clients["soft.mean"]))
        beta = linear(weights, clients["soft.out"]) * shown
        return (beta * h).sum(1, keepdim=True)

    def pooling(self, vectors, mask):
        """13 cos(session, e)"""
        return Pooling(vectors, mask, _SCALE, torch.zeros_like(vectors[:, 0, 0]))


def _pair_keys(a, b):
    """A negative number for an ordered pair of items, of tensors or arrays."""
    return -((a << 32) + b + 1)
