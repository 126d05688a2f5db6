"""Sequential backbones for one client as ordinary torch.nn modules, and a federation of them, one client at a time.

They share no code with the engine; random numbers are those of ``oracle.py``, on Python integers.

Every module has an item table whose row 0 is padding (our item i is its row i + 1), and maps one left-padded sequence
to its representations. ``names`` says where our parameters lie in it: for each of our names a parameter of the module
and the view of it that has our shape.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from oracle import GAMMA, MASK, mix, norm_bounded, stream
from recbole.model.sequential_recommender import GRU4Rec, SASRec
from torch import nn

torch.autograd.set_detect_anomaly(False)  # importing RecBole's sequential models turns it on, for the whole process
ITEM = "item_embedding.weight"
# Parts of a transformer block, ours and RecBole's.
RECBOLE_BLOCK = {"query": "multi_head_attention.query", "key": "multi_head_attention.key",
                 "value": "multi_head_attention.value", "out": "multi_head_attention.dense",
                 "norm": "multi_head_attention.LayerNorm", "ffn.0": "feed_forward.dense_1",
                 "ffn.1": "feed_forward.dense_2", "ffn_norm": "feed_forward.LayerNorm"}


def whole(parameter):
    return parameter


def after_padding(parameter):
    return parameter[1:]


def kernel(parameter):
    """A convolution of width 1 as a matrix."""
    return parameter[:, :, 0]


def left_padded(items, times, length):
    """The last ``length`` of a session's (items, times) as a sequence of item rows and times, 0 at padding."""
    items, times = items[-length:], times[-length:]
    padding = [0] * (length - len(items))
    rows = torch.tensor(padding + [item + 1 for item in items])
    return rows, torch.tensor(padding + list(times), dtype=torch.float64)


class Module(nn.Module):
    """What the modules have in common."""

    names: dict
    reads_neighbours = False  # rows of items that are near in its graph
    output = None  # a client's own linear layer to all items, in the place of public rows

    def view(self, name):
        """Our parameter as a view of the module's."""
        parameter, cut = self.names[name]
        return cut(self.get_parameter(parameter))

    @torch.no_grad()
    def load(self, public, dense):
        """Take over our tables: the item table (items, d), and dense parameters."""
        assert {*public, *dense} == set(self.names)
        for name, value in {**public, **dense}.items():
            self.view(name).copy_(value)
        return self

    @torch.no_grad()
    def tables(self):
        """All parameters under our names."""
        return {name: self.view(name).clone() for name in self.names}

    def loss(self, outputs, positives, negatives):
        """The recommendation loss of representations, or what is made of them, at all positions."""
        real = positives > 0
        if self.output is None:
            table = self.get_parameter(self.names[ITEM][0])
            logits = [(outputs * table[some]).sum(1)[real] for some in (positives, negatives)]
        else:
            logits = [self.output(outputs)[real].gather(1, some[real, None] - 1)[:, 0]
                      for some in (positives, negatives)]
        ones = torch.ones_like(logits[0])
        bce = nn.functional.binary_cross_entropy_with_logits
        return bce(logits[0], ones) + bce(logits[1], 0 * ones)

    def scores(self, outputs):
        """Of all items after the sequence."""
        return self.view(ITEM) @ outputs[-1] if self.output is None else self.output(outputs[-1])


class FeedForward(nn.Module):
    def __init__(self, d, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(d, d, 1), nn.Conv1d(d, d, 1)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        hidden = torch.relu(self.drop1(self.conv1(x.T.unsqueeze(0))))
        return x + self.drop2(self.conv2(hidden))[0].T


def feed_forward_names(k):
    return {f"{k}.ffn.{n}.{what}": (f"ffns.{k}.conv{n + 1}.{what}", kernel if what == "weight" else whole)
            for n in (0, 1) for what in ("weight", "bias")}


def both(ours, theirs):
    """A layer's weight and bias."""
    return {f"{ours}.{what}": (f"{theirs}.{what}", whole) for what in ("weight", "bias")}


class SASRecModule(Module):
    """FCUCR's SASRec as its card describes it, of PyTorch's own attention, convolutions and normalisations."""

    def __init__(self, settings, n_items):
        super().__init__()
        d, p = settings.dim, settings.dropout
        self.d, self.length = d, settings.max_length
        self.items = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.positions = nn.Embedding(self.length + 1, d, padding_idx=0)
        self.drop = nn.Dropout(p)
        blocks = range(settings.layers)
        self.query_norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-8) for _ in blocks)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(d, settings.heads, p) for _ in blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-8) for _ in blocks)
        self.ffns = nn.ModuleList(FeedForward(d, p) for _ in blocks)
        self.last = nn.LayerNorm(d, eps=1e-8)
        self.names = {ITEM: ("items.weight", after_padding), "positions": ("positions.weight", after_padding),
                      **both("norm", "last")}
        for k in blocks:
            self.names |= {**both(f"{k}.query_norm", f"query_norms.{k}"), **both(f"{k}.norm", f"norms.{k}"),
                           f"{k}.in.weight": (f"attentions.{k}.in_proj_weight", whole),
                           f"{k}.in.bias": (f"attentions.{k}.in_proj_bias", whole),
                           f"{k}.out.weight": (f"attentions.{k}.out_proj.weight", whole),
                           f"{k}.out.bias": (f"attentions.{k}.out_proj.bias", whole), **feed_forward_names(k)}

    def forward(self, seq, times):
        numbers = torch.arange(1, self.length + 1) * (seq != 0)
        x = self.drop(self.items(seq) * self.d ** 0.5 + self.positions(numbers))
        future = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        for query_norm, attention, norm, ffn in zip(self.query_norms, self.attentions, self.norms, self.ffns):
            query = query_norm(x)
            x = query + attention(query, x, x, attn_mask=future, need_weights=False)[0]
            x = ffn(norm(x))
        return self.last(x)


class _Sizes:
    def __init__(self, n_items):
        self.n_items = n_items

    def num(self, field):
        return self.n_items + 1


class RecBoleModule(Module):
    """A model of RecBole, which pads on the right and returns the representation at one position: one row of its batch
    for every position. Subclasses set ``model``."""

    def config(self, settings, **more):
        self.length = settings.max_length
        return dict(USER_ID_FIELD="user", ITEM_ID_FIELD="item", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="length",
                    NEG_PREFIX="neg_", MAX_ITEM_LIST_LENGTH=self.length, device="cpu", loss_type="BPR", **more)

    def at_padding(self):
        """The representation where there is no item yet, (d,)."""
        raise NotImplementedError

    def forward(self, seq, times):
        count = int((seq != 0).sum())
        right_padded = torch.cat([seq[self.length - count:], seq[:self.length - count]])
        found = self.model(right_padded.expand(count, -1), torch.arange(1, count + 1))
        return torch.cat([self.at_padding().expand(self.length - count, -1), found])


class GRU4RecModule(RecBoleModule):
    """RecBole's own GRU4Rec. Before the sequence there is no state, only the linear layer's bias."""

    def __init__(self, settings, n_items):
        super().__init__()
        self.model = GRU4Rec(self.config(settings, embedding_size=settings.dim, num_layers=settings.layers,
                                         hidden_size=settings.hidden_size or settings.dim,
                                         dropout_prob=settings.dropout), _Sizes(n_items))
        self.names = {ITEM: ("model.item_embedding.weight", after_padding)}
        for k in range(settings.layers):
            self.names |= {f"{k}.input.weight": (f"model.gru_layers.weight_ih_l{k}", whole),
                           f"{k}.state.weight": (f"model.gru_layers.weight_hh_l{k}", whole)}
        self.names |= {f"out.{what}": (f"model.dense.{what}", whole) for what in ("weight", "bias")}

    def at_padding(self):
        return self.model.dense.bias


class RecBoleSASRecModule(RecBoleModule):
    """RecBole's own SASRec; zero at padding."""

    def __init__(self, settings, n_items):
        super().__init__()
        self.model = SASRec(self.config(
            settings, hidden_size=settings.dim, n_layers=settings.layers, n_heads=settings.heads,
            inner_size=settings.inner_size, hidden_dropout_prob=settings.dropout, attn_dropout_prob=settings.dropout,
            hidden_act="gelu", layer_norm_eps=1e-12, initializer_range=0.02), _Sizes(n_items))
        self.names = {ITEM: ("model.item_embedding.weight", after_padding),
                      "positions": ("model.position_embedding.weight", whole), **both("norm", "model.LayerNorm")}
        for k in range(settings.layers):
            for name, part in RECBOLE_BLOCK.items():
                self.names |= both(f"{k}.{name}", f"model.trm_encoder.layer.{k}.{part}")

    def at_padding(self):
        return torch.zeros(self.model.hidden_size, dtype=self.model.item_embedding.weight.dtype)


class TiSASRecModule(Module):
    """TiSASRec as its card describes it, with every interval's vectors written out."""

    def __init__(self, settings, n_items):
        super().__init__()
        d, p = settings.dim, settings.dropout
        self.d, self.length, self.span = d, settings.max_length, settings.time_span
        self.items = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.embeddings = nn.ModuleDict({"position_keys": nn.Embedding(self.length, d),
                                     "position_values": nn.Embedding(self.length, d),
                                     "interval_keys": nn.Embedding(self.span + 1, d),
                                     "interval_values": nn.Embedding(self.span + 1, d)})
        self.drop = nn.Dropout(p)
        blocks = range(settings.layers)
        self.query_norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-8) for _ in blocks)
        for name in ("queries", "keys", "values"):
            setattr(self, name, nn.ModuleList(nn.Linear(d, d) for _ in blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-8) for _ in blocks)
        self.ffns = nn.ModuleList(FeedForward(d, p) for _ in blocks)
        self.last = nn.LayerNorm(d, eps=1e-8)
        self.names = {ITEM: ("items.weight", after_padding), **both("norm", "last")}
        for kind in ("position", "interval"):
            for what in ("key", "value"):
                self.names[f"{kind}s.{what}"] = (f"embeddings.{kind}_{what}s.weight", whole)
        for k in blocks:
            self.names |= {**both(f"{k}.query_norm", f"query_norms.{k}"), **both(f"{k}.norm", f"norms.{k}"),
                           **feed_forward_names(k)}
            for ours, theirs in (("query", "queries"), ("key", "keys"), ("value", "values")):
                self.names |= {f"{k}.{ours}.{what}": (f"{theirs}.{k}.{what}", whole) for what in ("weight", "bias")}

    def intervals(self, seq, times):
        """The matrix of intervals, by the rules of the reference implementation's preprocessing."""
        taken = [float(time) for item, time in zip(seq, times) if item != 0]
        gaps = [b - a for a, b in zip(taken, taken[1:]) if b != a]
        unit = min(gaps) if gaps else 1
        scaled = [round((time - min(taken)) / unit) + 1 for time in taken]
        scaled = np.array([0] * (self.length - len(taken)) + scaled)
        return torch.from_numpy(np.minimum(np.abs(scaled[:, None] - scaled[None]), self.span))

    def forward(self, seq, times):
        real = (seq != 0).unsqueeze(1)
        apart = self.intervals(seq, times)
        x = self.drop(self.items(seq) * self.d ** 0.5)
        at = torch.arange(self.length)
        position_keys, position_values, interval_keys, interval_values = (
            self.drop(table(apart if name.startswith("interval") else at)) for name, table in self.embeddings.items())
        past = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        for k, query_norm in enumerate(self.query_norms):
            normed = query_norm(x)
            query, key, value = self.queries[k](normed), self.keys[k](x), self.values[k](x)
            scores = query @ key.T + query @ position_keys.T + torch.einsum("id,ijd->ij", query, interval_keys)
            scores = torch.where(past & real, scores / self.d ** 0.5, torch.full_like(scores, 1 - 2.0 ** 32))
            attention = self.drop(scores.softmax(1))
            mixed = attention @ value + attention @ position_values
            x = normed + mixed + torch.einsum("ij,ijd->id", attention, interval_values)
            x = self.ffns[k](self.norms[k](x)) * real
        return self.last(x)


class SessionModule(Module):
    """What the modules have in common whose loss concerns a session's last item.

    Subclasses have ``pooled(vectors, rows)``, the scores of item rows, and ``scale``.
    """

    def __init__(self, settings):
        super().__init__()
        self.settings, self.length, self.scale = settings, settings.max_length, 1.0

    def extra(self, vectors, positives):
        """A term of its own."""
        return 0.0

    def loss(self, outputs, positives, negatives):
        target, negative = int(positives[-1]), int(negatives[-1])
        table = self.get_parameter(self.names[ITEM][0])
        if self.settings.loss == "cross_entropy":
            logits = self.scale * self.pooled(outputs, table[1:])
            main = nn.functional.cross_entropy(logits[None], torch.tensor([target - 1]))
        else:
            logits = (self.scale * self.pooled(outputs, table[[target, negative]]) if self.output is None else
                      self.output(outputs[0])[[target - 1, negative - 1]])
            main = nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([1.0, 0.0]).to(logits),
                                                                  reduction="sum")
        return main + self.extra(outputs, positives)

    def scores(self, outputs):
        return self.pooled(outputs, self.view(ITEM))


def entmax(scores, alpha):
    """alpha-entmax by the closed forms of 1.5 and 2: the largest set of scores that are all above its threshold."""
    z = (alpha - 1) * scores
    ordered = z.sort(descending=True).values
    for k in range(len(z), 0, -1):
        top = ordered[:k]
        if alpha == 2:
            tau = (top.sum() - 1) / k
        else:
            tau = top.mean() - ((1 - ((top - top.mean()) ** 2).sum()).clamp(min=0) / k).sqrt()
        weights = (z - tau).clamp(min=0) ** (1 / (alpha - 1))
        if top[-1] > tau and abs(weights.sum().item() - 1) < 1e-9:
            return weights
    raise AssertionError("no threshold")


class MiaSRecModule(SessionModule):
    """MiaSRec as its card describes it, of RecBole's transformer encoder, on a session without padding."""

    def __init__(self, settings, n_items):
        super().__init__(settings)
        from recbole.model.layers import TransformerEncoder

        d = settings.dim
        self.items = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.position = nn.Embedding(self.length + 1, d)
        self.repeat = nn.Embedding(settings.max_repeat + 1, d, padding_idx=0)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.encoder = TransformerEncoder(settings.layers, settings.heads, d, settings.inner_size, 0.0, 0.0, "gelu",
                                          1e-12)
        self.highway = nn.Linear(2 * d, d)
        self.scale = 1 / settings.score_temperature
        self.names = {ITEM: ("items.weight", after_padding), "positions": ("position.weight", whole),
                      "repeats": ("repeat.weight", after_padding), **both("norm", "norm"),
                      **both("highway", "highway")}
        if settings.padding == "vectors":
            self.names["padding"] = ("items.weight", lambda parameter: parameter[0])
        if settings.selection != "off":
            self.importance = nn.Linear(2 * d, 1)
            self.names |= both("importance", "importance")
        for k in range(settings.layers):
            for name, part in RECBOLE_BLOCK.items():
                self.names |= both(f"{k}.{name}", f"encoder.layer.{k}.{part}")

    def forward(self, seq, times):
        taken = [int(row) for row in seq if row != 0][::-1]
        rows = self.items(torch.tensor(taken))
        x = torch.cat([rows.mean(0, keepdim=True), rows])
        tokens = [1 if self.settings.mean_token == "first_item" else -1, *taken]
        counts = [min(tokens.count(token), self.settings.max_repeat) for token in tokens]
        self.real = len(tokens)
        if self.settings.padding == "vectors":
            padding = self.length - len(taken)
            x = torch.cat([x, self.items(torch.zeros(padding, dtype=torch.int64))])
            counts += [0] * padding
        unseen = -1e9 * (torch.arange(len(x)) >= self.real).to(x.dtype)
        h = self.norm(x + self.position(torch.arange(len(x))) + self.repeat(torch.tensor(counts)))
        h = self.encoder(h[None], unseen[None, None, None], True)[-1][0]
        gate = torch.sigmoid(self.highway(torch.cat([x, h], 1)))
        z = gate * x + (1 - gate) * h
        if self.settings.selection != "off":
            scores = self.importance(torch.cat([z[:1].expand_as(z), z], 1)).flatten()
            z = z * (entmax(scores, {"entmax": 1.5, "sparsemax": 2}[self.settings.selection]) > 0)[:, None]
        return nn.functional.normalize(z, dim=1)

    def pooled(self, vectors, rows):
        cosines = vectors @ nn.functional.normalize(rows, dim=1).T
        kept, beta = (vectors[:self.real] != 0).any(1), self.settings.beta_logit
        return beta * cosines.max(0).values + (1 - beta) * cosines[:self.real][kept].mean(0)

    def loss(self, outputs, positives, negatives):
        if self.settings.padding == "none":
            return super().loss(outputs, positives, negatives)
        logits = self.scale * self.pooled(outputs, self.items.weight)
        return nn.functional.cross_entropy(logits[None], positives[-1:])


def clicked_together(sessions, most):
    """Item to its most frequent neighbours, [(item, count), ...], at most 3 positions apart, in both directions."""
    counts = {}
    for session in sessions:
        for i, a in enumerate(session):
            for b in session[i + 1:i + 4]:
                for one, other in ((a, b), (b, a)):
                    if a != b:
                        counts.setdefault(one, {}).setdefault(other, 0)
                        counts[one][other] += 1
    return {item: sorted(near.items(), key=lambda pair: (-pair[1], pair[0]))[:most] for item, near in counts.items()}


class DMIGNNModule(SessionModule):
    """DMI-GNN as its card and the corrections describe it, edge by edge, on a session without padding."""

    reads_neighbours = True

    def __init__(self, settings, n_items):
        super().__init__(settings)
        d, k = settings.dim, settings.interests
        self.items = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.position, self.edges = nn.Embedding(self.length, d), nn.Embedding(4, d)
        self.mix, self.second = nn.Linear(2 * d, d, bias=False), nn.Parameter(torch.zeros(k, d))
        self.names = {ITEM: ("items.weight", after_padding), "positions": ("position.weight", whole),
                      "edges": ("edges.weight", whole), "mix.weight": ("mix.weight", whole),
                      "weights": ("second", whole)}
        if settings.patterns == "linear":
            self.pattern = nn.Linear(d, k * d)
            self.names |= both("patterns", "pattern")
        else:
            self.first = nn.Linear(d, k * d)
            self.last_weight, self.last_bias = nn.Parameter(torch.zeros(k, d, d)), nn.Parameter(torch.zeros(k, d))
            self.names |= {**both("patterns.0", "first"), "patterns.1.weight": ("last_weight", whole),
                           "patterns.1.bias": ("last_bias", whole)}
        if settings.graph_neighbours:
            self.near = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in ((d + 1, d), (d, 1), (2 * d, d)))
            self.names |= {f"near.{n}": (f"near.{n}.weight", whole) for n in range(3)}
        self.graph = {}

    def edge(self, clicks, a, b):
        """The kind of the edge from a to b, or None."""
        steps = set(zip(clicks, clicks[1:]))
        if a == b:
            return 0
        return {(True, False): 1, (False, True): 2, (True, True): 3}.get(((a, b) in steps, (b, a) in steps))

    def of_item(self, clicks, a, mean):
        """The node of an item on both graphs."""
        unit = {item: nn.functional.normalize(self.items(torch.tensor(item)), dim=0) for item in set(clicks)}
        joined = [(b, self.edge(clicks, a, b)) for b in sorted(set(clicks)) if self.edge(clicks, a, b) is not None]
        scores = torch.stack([nn.functional.leaky_relu((self.edges.weight[kind] * unit[a] * unit[b]).sum(), 0.2)
                              for b, kind in joined])
        node = sum(weight * unit[b] for weight, (b, _) in zip(scores.softmax(0), joined))
        if not self.settings.graph_neighbours:
            return node
        own, near = self.items(torch.tensor(a)), self.graph.get(a - 1, [])
        mixed = torch.zeros_like(own)
        if near:
            rows = self.items(torch.tensor([b + 1 for b, _ in near]))
            counts = torch.tensor([[count] for _, count in near]).to(rows)
            hidden = nn.functional.leaky_relu(self.near[0](torch.cat([mean * rows, counts], 1)), 0.2)
            mixed = self.near[1](hidden).flatten().softmax(0) @ rows
        return node + torch.relu(self.near[2](torch.cat([own, mixed])))

    def forward(self, seq, times):
        clicks, k = [int(row) for row in seq if row != 0][::-1], self.settings.interests
        mean = self.items(torch.tensor(clicks)).mean(0)
        nodes = {item: self.of_item(clicks, item, mean) for item in set(clicks)}
        h = torch.stack([nodes[item] for item in clicks])
        m = torch.tanh(self.mix(torch.cat([self.position.weight[:len(clicks)], h], 1)))
        if self.settings.patterns == "linear":
            n = torch.sigmoid(self.pattern(m)).view(len(clicks), k, -1)
        else:
            hidden = torch.tanh(self.first(m)).view(len(clicks), k, -1)
            n = torch.stack([hidden[:, j] @ self.last_weight[j].T + self.last_bias[j] for j in range(k)], 1)
        self.beta = (n * self.second).sum(2).T
        return self.beta @ h

    def extra(self, vectors, positives):
        s = self.settings
        pairs = [torch.cosine_similarity(self.beta[i], self.beta[j], dim=0).abs()
                 for i in range(s.interests) for j in range(i)]
        if not pairs:
            return 0.0
        return s.diversity * torch.sigmoid(torch.stack(pairs).mean() * (self.beta.shape[1] - s.long_session))

    def pooled(self, vectors, rows):
        return (vectors @ nn.functional.normalize(rows, dim=1).T).max(0).values


def k_means(table, count, iterations, number):
    """(cluster of each item, centroids), item by item, from the items with the smallest numbers of a stream."""
    points, order = table.double().numpy(), sorted(range(len(table)), key=lambda i: number(i) >> 1)
    centroids = points[order[:count]].copy()
    for _ in range(iterations + 1):
        nearest = [int(np.argmin([((point - c) ** 2).sum() for c in centroids])) for point in points]
        last = centroids.copy()
        for k in set(nearest):
            centroids[k] = points[[i for i, cluster in enumerate(nearest) if cluster == k]].mean(0)
    return nearest, last


class HearIntModule(SessionModule):
    """HearInt as its card and the corrections describe it, edge by edge; views leave out all that they may (p = 1)."""

    def __init__(self, settings, n_items):
        super().__init__(settings)
        d = settings.dim
        self.items, self.position = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(self.length, d)
        self.edges = nn.ModuleDict({name: nn.Embedding(4, d) for name in ("session", "clicks")})
        self.query, self.first, self.second = (nn.Linear(d, d) for _ in range(3))
        self.graphs, self.glu1, self.glu2 = nn.Linear(2 * d, d), nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.mix, self.out = nn.Linear(2 * d, d, bias=False), nn.Linear(d, 1, bias=False)
        self.gate = nn.Linear(2 * d, d, bias=False)
        self.names = {ITEM: ("items.weight", after_padding), "positions": ("position.weight", whole),
                      **{f"edges.{name}": (f"edges.{name}.weight", whole) for name in self.edges},
                      **both("query", "query"), **both("ffn.0", "first"), **both("ffn.1", "second"),
                      **both("graphs", "graphs"), **both("soft", "glu1"), "soft.mean": ("glu2.weight", whole),
                      "soft.mix": ("mix.weight", whole), "soft.out": ("out.weight", whole),
                      "gate": ("gate.weight", whole)}
        self.graph, self.clusters = {}, None

    def near(self, a, b):
        """Whether two clusters' centroids point to the same side."""
        centroids = self.clusters[1]
        return a == b or float(centroids[a] @ centroids[b]) > 0

    def views(self, seq):
        """(positions of the short-term view, item rows of the long-term view)."""
        real = [l for l, row in enumerate(seq) if row]
        if self.clusters is None:
            return real, set(seq) - {0}
        cluster = [self.clusters[0][row - 1] if row else 0 for row in seq]
        short = [l for l in real if self.near(cluster[l], cluster[-1])]
        by_item = self.settings.long_view == "items"
        counted = [cluster[l] for l in real if by_item or cluster[l]]
        most = min(counted, key=lambda c: (-counted.count(c), c), default=0)
        nodes = sorted(set(seq))
        return short, {row for n, row in enumerate(nodes)
                       if row and self.near(cluster[seq.index(row) if by_item else n], most)}

    def edge(self, graph, steps, a, b):
        """The kind of the edge from a to b, or None."""
        if a == b:
            return 0 if graph == "session" else 3
        ahead, behind = (a, b) in steps, (b, a) in steps
        if graph == "session" or not (ahead or behind):
            return {(True, False): 1, (False, True): 2, (True, True): 3}.get((ahead, behind))
        counts = dict(self.graph.get(a - 1, []))
        if b - 1 not in counts:
            return None
        share = counts[b - 1] / sum(counts.values())
        if share == 1:
            return 0 if self.settings.buckets == "released" and counts[b - 1] > 1 else 3
        return int(4 * share)

    def of_item(self, seq, shown, a):
        """The node of an item on both graphs, as far as they show others."""
        steps = {(x, y) for x, y in zip(seq, seq[1:]) if x and y}
        outputs = []
        for graph, vectors in self.edges.items():
            joined = [(self.items.weight[b], kind) for b in sorted(shown)
                      if (kind := self.edge(graph, steps, a, b)) is not None]
            scores = torch.stack([nn.functional.leaky_relu(vectors.weight[kind] @ (self.items.weight[a] * row), 0.2)
                                  for row, kind in joined])
            outputs.append(scores.softmax(0) @ torch.stack([row for row, _ in joined]))
        alpha = torch.sigmoid(self.graphs(torch.cat(outputs)))
        return alpha * outputs[0] + (1 - alpha) * outputs[1]

    def forward(self, seq, times):
        seq = seq.tolist()
        short, shown = self.views(seq)
        x = self.items.weight[[seq[l] for l in short]]
        if self.settings.temporal_positions:
            x = x + self.position.weight[short]
        weights = (x @ nn.functional.selu(self.query(x[-1])) / x.shape[1] ** 0.5).softmax(0)
        y = weights @ x
        temporal = y + self.second(nn.functional.selu(self.first(y)))
        spatial = torch.zeros_like(temporal)
        if shown:
            nodes = {item: self.of_item(seq, shown, item) for item in shown}
            at = [l for l, row in enumerate(seq) if row in shown]
            h = torch.stack([nodes[seq[l]] for l in at])
            mixed = torch.tanh(self.mix(torch.cat([self.position.weight[at], h], 1)))
            spatial = self.out(torch.sigmoid(self.glu1(mixed) + self.glu2(h.mean(0)))).flatten() @ h
        gate = torch.sigmoid(self.gate(torch.cat([temporal, spatial])))
        return nn.functional.normalize(gate * temporal + (1 - gate) * spatial, dim=0)[None]

    def pooled(self, vectors, rows):
        return 13 * (vectors @ nn.functional.normalize(rows, dim=1).T)[0]


class SessionTransformerModule(SessionModule):
    """The article's encoder on a session without padding, of PyTorch's own transformer."""

    def __init__(self, settings, n_items):
        super().__init__(settings)
        d = settings.dim
        self.items, self.position = nn.Embedding(n_items + 1, d, padding_idx=0), nn.Embedding(self.length, d)
        self.norm = nn.LayerNorm(d)
        layer = nn.TransformerEncoderLayer(d, settings.heads, 4 * d, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, settings.layers, enable_nested_tensor=False)
        self.names = {ITEM: ("items.weight", after_padding), "positions": ("position.weight", whole),
                      **both("norm", "norm")}
        for k in range(settings.layers):
            parts = {"norm": "norm1", "ffn_norm": "norm2", "out": "self_attn.out_proj", "ffn.0": "linear1",
                     "ffn.1": "linear2"}
            for ours, theirs in parts.items():
                self.names |= both(f"{k}.{ours}", f"transformer.layers.{k}.{theirs}")
            self.names |= {f"{k}.in.{what}": (f"transformer.layers.{k}.self_attn.in_proj_{what}", whole)
                           for what in ("weight", "bias")}

    def forward(self, seq, times):
        rows = self.items(seq[seq != 0])
        return self.transformer(self.norm(rows + self.position.weight[:len(rows)])[None])[0].mean(0, keepdim=True)

    def pooled(self, vectors, rows):
        return vectors[0] @ rows.T if self.output is None else self.output(vectors[0])


def single_client(name, settings, n_items):
    """The module of the backbone of this name."""
    if name == "sasrec" and settings.architecture == "recbole":
        return RecBoleSASRecModule(settings, n_items)
    return {"sasrec": SASRecModule, "gru4rec": GRU4RecModule, "tisasrec": TiSASRecModule,
            "miasrec": MiaSRecModule, "dmi-gnn": DMIGNNModule, "hearint": HearIntModule,
            "session-transformer": SessionTransformerModule}[name](settings, n_items)


# Rounds, one client at a time, with full models and torch.optim. Everything below is about the whole federation.

def normal(number, i):
    """The i-th standard normal number of a stream (``oracle.stream``)."""
    uniform = [((number(2 * i + j) >> 11) + 0.5) * 2.0 ** -53 for j in (0, 1)]
    return math.sqrt(-2.0 * math.log(uniform[0])) * math.cos(2.0 * math.pi * uniform[1])


def drawn(number, start):
    """A parameter as its start says, from a stream."""
    size = math.prod(start.shape)
    if start.std:
        values = [start.std * normal(number, i) for i in range(size)]
    elif start.bound:
        values = [(2.0 * ((number(i) >> 11) + 0.5) * 2.0 ** -53 - 1.0) * start.bound for i in range(size)]
    else:
        values = [start.value] * size
    return torch.tensor(values, dtype=torch.float64).view(start.shape)


class Head(nn.Module):
    """FCUCR's private prediction module."""

    names = {"head.0.weight": "first.weight", "head.0.bias": "first.bias", "head.norm.weight": "norm.weight",
             "head.norm.bias": "norm.bias", "head.alpha": "alpha", "head.1.weight": "second.weight",
             "head.1.bias": "second.bias"}

    def __init__(self, d, hidden):
        super().__init__()
        self.first, self.second = nn.Linear(2 * d, hidden), nn.Linear(hidden, d)
        self.norm, self.alpha = nn.BatchNorm1d(hidden, eps=1e-9), nn.Parameter(torch.zeros(hidden))

    def forward(self, features, rho):
        x = self.first(torch.cat([features, rho], 1))
        p = torch.sigmoid(self.norm(x))
        return self.second(p * x + (1.0 - p) * self.alpha * x)


class GELUHead(nn.Module):
    """The article's: the last layer is the client's own to all items."""

    names = {"head.weight": "layer.weight", "head.bias": "layer.bias"}

    def __init__(self, d, hidden):
        super().__init__()
        self.layer = nn.Linear(2 * d, d)

    def forward(self, features, rho):
        return nn.functional.gelu(self.layer(torch.cat([features, rho], 1)))


class Oracle:
    """A federation on sessions; with ``norm_bound`` the server scales updates down to so many times their median norm.

    Args:
        log: for each user its training sessions, its validation and its test session, each [(item, time), ...] or None.
        head: hidden size of FCUCR's head; None: plain averaging of everything.
        private: initial private parameters of each user under our names, output rows (items, d + 1) too.
        optimiser: adam or sgd.
    """

    norm_bound = prox_mu = 0.0  # the latter is FedProx's
    ader = None  # its settings

    def __init__(self, log, n_items, name, settings, *, seed, public, dense, starts, init="server", lr=0.1, epochs=4,
                 candidates=10, head=None, private=None, method=None, weights=None, optimiser="adam"):
        self.log, self.n_items, self.seed, self.settings = log, n_items, seed, settings
        self.lr, self.epochs, self.init, self.starts, self.weights = lr, epochs, init, starts, weights
        self.candidates, self.method, self.length, self.optimiser = candidates, method, settings.max_length, optimiser
        self.module = single_client(name, settings, n_items).double()
        self.module.load(public, dense)
        most = getattr(settings, "graph_neighbours", 0)
        self.graphs = [clicked_together([[item for item, _ in session] for session in entry[0]], most) for entry in log]
        self.heads = None
        if head:
            kind = GELUHead if name == "session-transformer" else Head
            self.heads = [kind(settings.dim, head).double() for _ in log]
            with torch.no_grad():
                for user, module in enumerate(self.heads):
                    for ours, theirs in kind.names.items():
                        module.get_parameter(theirs).copy_(private[ours][user])
        self.outputs = [None for _ in log]
        if "output_embedding.weight" in (private or {}):
            self.outputs = [nn.Linear(settings.dim, n_items).double() for _ in log]
            for layer, rows in zip(self.outputs, private["output_embedding.weight"]):
                layer.load_state_dict({"weight": rows[:, :-1], "bias": rows[:, -1]})
        self.positions = 1 if name == "session-transformer" else self.length
        self.zeros = torch.zeros(self.positions, settings.dim, dtype=torch.float64)
        self.rho = [self.zeros for _ in log]
        self.base = {}  # session: (round of its latest upload, user, features), in the order of first insertion
        self.mine = [None for _ in log]  # every client's own model after its latest round
        self.exemplars = [[] for _ in log]  # (number of a session, position) of each

    def train_items(self, user):
        return {item for session in self.log[user][0] for item, _ in session}

    def others(self, user):
        return sorted(set(range(self.n_items)) - self.train_items(user))

    def session(self, user, round):
        sessions = self.log[user][0]
        return sessions[round % len(sessions)]

    def input(self, session):
        return left_padded([item for item, _ in session[:-1]], [time for _, time in session[:-1]], self.length)

    def samples(self, user, round, number=None):
        """(sequence, times, positives, negatives) as rows of the item table, 0 at padding; ``number``: the stream of
        the negatives."""
        session = self.session(user, round)
        seq, times = self.input(session)
        positives, _ = left_padded([item for item, _ in session[1:]], [0] * (len(session) - 1), self.length)
        number, others = number or stream(self.seed, "negatives", 0, round, user), self.others(user)
        negatives = torch.tensor([(others[(number(l) >> 32) * len(others) >> 32] + 1) * int(positives[l] > 0)
                                  for l in range(self.length)])
        return seq, times, positives, negatives

    def start_alone(self, module, user, lookups):
        """A client's own random start; of the rows it does not look up only their sum over clients is known."""
        public = torch.zeros(self.n_items, self.settings.dim, dtype=torch.float64)
        start = self.starts[ITEM]
        for item in range(self.n_items):
            if item in lookups[user]:
                row = stream(self.seed, f"client start {ITEM}", user)(item)
                number = lambda i, row=row: mix((row + GAMMA * (i + 1)) & MASK)
                public[item] = drawn(number, start)
            else:
                away = [other for other in range(len(self.log)) if item not in lookups[other]]
                squares = sum(self.weight(other) ** 2 for other in away)
                law = start if start.std else replace(start, std=start.bound / math.sqrt(3), bound=0.0)
                total = drawn(stream(self.seed, f"client start {ITEM} elsewhere", item), law) * math.sqrt(squares)
                public[item] = total / sum(self.weight(other) for other in away)
        dense = {name: drawn(stream(self.seed, f"client start {name}", user), start)
                 for name, start in self.starts.items() if name != ITEM}
        module.load({ITEM: public}, dense)

    def weight(self, user):
        return 1.0 if self.weights is None else self.weights[user]

    def received(self, user, round, lookups):
        """The model that a client begins a round with."""
        module = copy.deepcopy(self.module)
        if round == 0 and self.init == "per_client":
            self.start_alone(module, user, lookups)
        module.graph = self.graphs[user]
        return module

    def local(self, user, round, lookups):
        """Local training; returns (model, features of the last pass)."""
        m, module = self.method, self.received(user, round, lookups)
        seq, times, positives, negatives = self.samples(user, round)
        teacher = None
        if m and round > 0 and m.without not in ("tasd", "both"):
            with torch.no_grad():
                teacher = (self.mine[user] if m.teacher == "previous" else module)(seq, times)
        head = self.heads[user] if self.heads else None
        own = [part for part in (head, self.outputs[user]) if part]
        parameters = [*module.parameters(), *(parameter for part in own for parameter in part.parameters())]
        optimiser = (torch.optim.Adam(parameters, lr=self.lr, betas=(0.9, 0.98)) if self.optimiser == "adam" else
                     torch.optim.SGD(parameters, lr=self.lr))
        table = module.get_parameter(module.names[ITEM][0])
        module.output = self.outputs[user] and self.outputs[user].forward  # no part of what the server averages
        begun = [parameter.detach().clone() for parameter in module.parameters()]
        exemplars = self.exemplar_replay(user, round, module) if self.ader and round > 0 else None
        for _ in range(self.epochs):
            features = module(seq, times)
            outputs = head(features, self.rho[user]) if head else features
            loss = recommendation = module.loss(outputs, positives, negatives)
            if teacher is not None:
                distance = nn.functional.mse_loss(features, teacher)
                ratio = recommendation.item() / (distance.item() + 1e-8)
                factor = min(ratio, m.lambda_tasd) if m.distillation == "capped" else m.lambda_tasd
                loss = recommendation + factor * distance
            if self.prox_mu:
                loss = loss + self.prox_mu / 2 * sum((after - before).square().sum()
                                                     for after, before in zip(module.parameters(), begun))
            if exemplars:
                loss = loss + exemplars()
            optimiser.zero_grad()
            loss.backward()
            if table.grad is not None:
                table.grad[0] = 0.0  # padding
            if getattr(self.settings, "gradient_norm", 0.0):
                torch.nn.utils.clip_grad_norm_(parameters, self.settings.gradient_norm)
            optimiser.step()
        return module, features.detach()

    def exemplar_replay(self, user, round, module):
        """ADER's term in a round, a function of the module as it is trained, which is now as the server sent it."""
        sessions, own = self.log[user][0], self.session(user, round)
        latest = (round - 1) % len(sessions)

        def samples(session):  # a whole session is one sample to those of one vector
            count = min(len(session) - 1, self.length)
            return range(self.length - count, self.length) if self.positions > 1 else range(1)

        candidates = sorted({*self.exemplars[user], *((latest, place) for place in samples(sessions[latest]))})
        replayed = {number: self.input(sessions[number]) for number, _ in candidates}

        def after(number, place):
            return module(*replayed[number])[place]

        with torch.no_grad():
            vectors = {sample: after(*sample) for sample in candidates}
        mean, chosen = sum(vectors.values()) / len(vectors), []
        while len(chosen) < min(self.ader.exemplars, len(candidates)):
            chosen.append(min((sample for sample in candidates if sample not in chosen), key=lambda sample: float(
                (mean - (sum(vectors[c] for c in chosen) + vectors[sample]) / (len(chosen) + 1)).pow(2).sum())))
        self.exemplars[user] = chosen
        window = lambda session: {item for item, _ in session[-self.length - 1:]}
        items = sorted(set().union(*(window(sessions[number]) for number in replayed)))

        def scores():
            return torch.stack([module.scores(after(*sample)[None])[items] for sample in chosen])
        with torch.no_grad():
            teacher = scores().softmax(1)
        factor = self.ader.lambda_kd * math.sqrt(len(items) / len({*items, *window(own)}) *
                                                 len(chosen) / len(samples(own)))
        return lambda: factor * nn.functional.cross_entropy(scores(), teacher, reduction=self.ader.kd_reduction)

    def prototype(self, module, session, features=None):
        """h of a session (L, d), of a model's features of it or of others; alike at all positions if it is a mean."""
        seq, times = self.input(session)
        features = module(seq, times) if features is None else features
        if self.method.prototype == "mean" and len(features) > 1:
            features = features[seq != 0].mean(0, keepdim=True).expand_as(features)
        return features

    def answer(self, user, query):
        """rho for a query."""
        if self.method is None or self.method.without in ("iupr", "both") or not self.base:
            return self.zeros
        found = []
        for _, owner, features in self.base.values():
            if owner != user:
                found.append((float(nn.functional.cosine_similarity(query.flatten(), features.flatten(), 0)), features))
        found = sorted(found, key=lambda pair: -pair[0])[:self.method.neighbours]
        if not found:
            return self.zeros
        stack = torch.stack([features.flatten() for _, features in found])
        if self.method.fusion == "softmax":
            weights = torch.tensor([score for score, _ in found], dtype=torch.float64).softmax(0)
            return (weights @ stack).view_as(query)
        if self.method.fusion == "mean":
            return stack.mean(0).view_as(query)
        direction = torch.linalg.svd(stack)[2][0]
        return ((stack @ direction).mean() * direction).view_as(query)

    @torch.no_grad()
    def keep(self, round, users, sent):
        """The server's knowledge base after a round's prototypes, by user."""
        for user in users:
            key = (user, round if self.method.revisited == "added" else round % len(self.log[user][0]))
            self.base[key] = (round, user, sent[user])
        if self.method.window:
            if self.method.window_rule == "rounds":
                self.base = {key: entry for key, entry in self.base.items() if entry[0] > round - self.method.window}
            while len(self.base) > self.method.window * len(self.log):
                del self.base[next(iter(self.base))]

    def round(self, round):
        users = range(len(self.log))
        lookups = {}
        for user in users:
            session = self.session(user, round)[-self.length - 1:]
            _, _, _, negatives = self.samples(user, round)
            lookups[user] = {item for item, _ in session} | {int(row) - 1 for row in negatives if row > 0}
            for item, _ in session[:-1] if self.module.reads_neighbours else ():
                lookups[user] |= {near for near, _ in self.graphs[user].get(item, [])}
            if getattr(self.settings, "loss", "") == "cross_entropy":
                lookups[user] = set(range(self.n_items))
            if self.method and self.method.encodes_next_session:
                lookups[user] |= {item for item, _ in self.session(user, round + 1)[-self.length - 1:-1]}
        if getattr(self.settings, "p", 0.0):
            self.module.clusters = k_means(self.module.view(ITEM).detach(), self.settings.clusters,
                                           self.settings.kmeans_iterations,
                                           stream(self.seed, "clusters of items", 0, round, 0))
        transfers = self.method is not None and self.method.without not in ("iupr", "both")
        if transfers and self.method.transfer == "before":
            with torch.no_grad():
                sent = {user: self.prototype(self.received(user, round, lookups), self.session(user, round))
                        for user in users}
                self.keep(round, users, sent)
                if round % self.method.transfer_interval == 0:
                    self.rho = [self.answer(user, sent[user]) for user in users]
        locals_ = {user: self.local(user, round, lookups) for user in users}
        self.module.clusters = None  # evaluation sees whole sessions
        with torch.no_grad():
            if transfers and self.method.transfer == "after":
                self.keep(round, users, {user: self.prototype(None, self.session(user, round), locals_[user][1])
                                         for user in users})
                if round % self.method.transfer_interval == 0:
                    self.rho = [self.answer(user, self.prototype(locals_[user][0], self.session(user, round + 1)))
                                for user in users]
            total = sum(self.weight(user) for user in users)
            mean = {name: sum(self.weight(user) * locals_[user][0].get_parameter(name) for user in users) / total
                    for name, _ in self.module.named_parameters()}
            if self.norm_bound:
                sent = dict(self.module.named_parameters())
                updates = {user: {name: locals_[user][0].get_parameter(name) - value for name, value in sent.items()}
                           for user in users}
                change = norm_bounded(updates, {user: self.weight(user) for user in users}, self.norm_bound)
                mean = {name: value + change[name] for name, value in sent.items()}
            for name, parameter in self.module.named_parameters():
                parameter.copy_(mean[name])
        for user in users:
            self.mine[user] = locals_[user][0]

    @torch.no_grad()
    def ranks(self, purpose):
        """User to (rank among the candidates, rank among all items, logit) of its item to find, and the
        first candidate's logit."""
        result = {}
        for user, entry in enumerate(self.log):
            session = entry[0][0] if purpose == "early" else entry[1 if purpose == "valid" else 2]
            if session is None:
                continue
            self.module.graph = self.graphs[user]
            self.module.output = self.outputs[user] and self.outputs[user].forward
            features = self.module(*self.input(session))
            if self.heads:
                self.heads[user].eval()
                outputs = self.heads[user](features, self.answer(user, self.prototype(None, session, features)))
                self.heads[user].train()
            else:
                outputs = features
            scores = self.module.scores(outputs)
            self.module.output = None
            target = session[-1][0]
            number, others = stream(self.seed, f"session candidates of {purpose}", 0, 0, user), self.others(user)
            sampled = [others[(number(j) >> 32) * len(others) >> 32] for j in range(self.candidates)]
            result[user] = (sum(bool(scores[i] >= scores[target]) for i in sampled if i != target),
                            sum(bool(scores[i] >= scores[target]) for i in range(self.n_items) if i != target),
                            float(scores[target]), float(scores[sampled[0]]))
        return result
