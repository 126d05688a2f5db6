"""Sequential backbones for one client as ordinary torch.nn modules. They share no code with the engine.

Every module has an item table whose row 0 is padding (our item i is its row i + 1), and maps one left-padded sequence
to its representations. ``names`` says where our parameters lie in it: for each of our names a parameter of the module
and the view of it that has our shape.
"""

from __future__ import annotations

import numpy as np
import torch
from recbole.model.sequential_recommender import GRU4Rec, SASRec
from torch import nn

ITEM = "item_embedding.weight"


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
    return torch.tensor(padding + [item + 1 for item in items]), torch.tensor(padding + list(times), dtype=torch.float64)


class Module(nn.Module):
    """What the modules have in common."""

    names: dict

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

    def gradients(self):
        """The gradients of all parameters under our names."""
        return {name: cut(self.get_parameter(parameter).grad) for name, (parameter, cut) in self.names.items()}


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
        theirs = {"query": "multi_head_attention.query", "key": "multi_head_attention.key",
                  "value": "multi_head_attention.value", "out": "multi_head_attention.dense",
                  "norm": "multi_head_attention.LayerNorm", "ffn.0": "feed_forward.dense_1",
                  "ffn.1": "feed_forward.dense_2", "ffn_norm": "feed_forward.LayerNorm"}
        for k in range(settings.layers):
            for name, part in theirs.items():
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


def single_client(name, settings, n_items):
    """The module of the backbone of this name."""
    if name == "sasrec" and settings.architecture == "recbole":
        return RecBoleSASRecModule(settings, n_items)
    return {"sasrec": SASRecModule, "gru4rec": GRU4RecModule, "tisasrec": TiSASRecModule}[name](settings, n_items)
