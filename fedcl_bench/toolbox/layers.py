"""Initial values and layers that several backbones share; the first dimension of a layer's parameters is clients."""

from __future__ import annotations

import functools
from typing import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .. import rng
from ..kernels import functional
from ..rng import Tables
from ..core.errors import UserError
from ..plugin.backbone import Backbone

Shapes = dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=8)  # methods ask for each chunk of clients
def public_shapes(backbone: Backbone) -> tuple[Shapes, Shapes]:
    """Of public item tables without items, (0, ...), and of public parameters without item rows."""
    tables = backbone.new_rows(0, range(0), range(0))[0], backbone.new_dense(0)
    return tuple({name: tuple(value.shape) for name, value in each.items()} for each in tables)


def same_for_all(rows: Tables, users: range) -> Tables:
    """Private parameters that every client starts alike, each (users, ...), from those of one client."""
    return {name: row.expand(len(users), *row.shape).clone() for name, row in rows.items()}


def item_rows(seed: int, name: str, items: range, dim: int, std: float = 1.0) -> Tensor:
    """Initial rows N(0, std^2), shape (items, dim); 1 is PyTorch's default for embeddings."""
    return rng.normal_rows(seed, f"init {name}", items.start, len(items), dim) * std


def linear(seed: int, name: str, inputs: int, outputs: int) -> Tables:
    """PyTorch's default initial values of a linear layer: U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    bound = inputs ** -0.5
    return {f"{name}.weight": rng.uniform_values(seed, f"init {name}.weight", (outputs, inputs), bound),
            f"{name}.bias": rng.uniform_values(seed, f"init {name}.bias", (outputs,), bound)}


def perceptron(seed: int, name: str, sizes: list[int]) -> Tables:
    """Initial values of linear layers ``name.0``, ``name.1``, ... between the given sizes."""
    return {key: value for k, (inputs, outputs) in enumerate(zip(sizes, sizes[1:]))
            for key, value in linear(seed, f"{name}.{k}", inputs, outputs).items()}


def perceptron_names(name: str, layers: int) -> list[str]:
    """What parameters of a ``perceptron`` of so many layers are called."""
    return [f"{name}.{k}.{part}" for k in range(layers) for part in ("weight", "bias")]


def apply_linear(clients: Tables, name: str, inputs: Tensor, constant: Tensor | None = None) -> Tensor:
    """(C, n, inputs) through each client's own layer: (C, n, outputs); ``constant`` as for ``functional.linear``."""
    return functional.linear(inputs, clients[f"{name}.weight"], clients[f"{name}.bias"], constant)


def apply_pair_linear(clients: Tables, name: str, user: Tensor, items: Tensor) -> Tensor:
    """[user ; item] through each client's own layer, without writing the user's half out for every item. ``user``: (C,
    d_u); ``items``: (C, n, d_i). Returns (C, n, outputs)."""
    weight = clients[f"{name}.weight"]
    of_user, of_items = weight.split([user.shape[1], items.shape[2]], dim=2)
    constant = clients[f"{name}.bias"] + (of_user * user.unsqueeze(1)).sum(2)
    return torch.baddbmm(constant.unsqueeze(1), items, of_items.transpose(1, 2))


def apply_pair_perceptron(clients: Tables, name: str, user: Tensor, items: Tensor) -> Tensor:
    """The same through all layers of a ``perceptron``, with ReLU between them."""
    x, k = apply_pair_linear(clients, f"{name}.0", user, items), 1
    while f"{name}.{k}.weight" in clients:
        x, k = apply_linear(clients, f"{name}.{k}", torch.relu(x)), k + 1
    return x


def layer_norm(clients: Tables, name: str, x: Tensor, eps: float = 1e-8) -> Tensor:
    """(C, n, d) through each client's own layer normalisation."""
    return functional.layer_norm(x, clients[f"{name}.weight"], clients[f"{name}.bias"], eps)


def feed_forward(clients: Tables, name: str, x: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """x + drop(W2 relu(drop(W1 x + b1)) + b2) at every position, (C, n, d): the feed-forward part of SASRec's blocks.
    The layers are ``name.0`` and ``name.1``."""
    return x + drop(apply_linear(clients, f"{name}.1", torch.relu(drop(apply_linear(clients, f"{name}.0", x)))))


def attend(query: Tensor, keys: Tensor, values: Tensor, masked: Tensor, heads: int,
           drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Scaled dot-product attention of several heads, (C, n, d). ``query``, ``keys``, ``values``: (C, n, d); ``masked``:
    keys that a query does not see, bool of a shape that fits (C, heads, n, n); not all of a row; ``drop``: dropout of
    the attention."""
    query, keys, values = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, keys, values))
    weights = drop(functional.attention(query @ keys.transpose(2, 3), masked, query.shape[3] ** -0.5))
    return (weights @ values).transpose(1, 2).flatten(2)


def check_heads(dim: int, heads: int) -> None:
    """Raise UserError unless vectors of length ``dim`` can be cut into as many pieces as there are attention heads."""
    if dim % heads:
        raise UserError(f"setting 'heads': found {heads}, accepted: a divisor of dim={dim}.")


def transformer_block(clients: Tables, name: str, x: Tensor, masked: Tensor, heads: int,
                      drop: Callable[[Tensor], Tensor]) -> Tensor:
    """x = LN(x + Attention(x, x, x)), then LN(x + FFN(x)) with GELU, as in RecBole: (C, n, d). Its layers are
    ``name.query``, ``.key``, ``.value``, ``.out``, ``.norm``, ``.ffn.0``, ``.ffn.1`` and ``.ffn_norm``; other arguments
    as for ``attend``."""
    query, keys, values = (apply_linear(clients, f"{name}.{part}", x) for part in ("query", "key", "value"))
    mixed = drop(apply_linear(clients, f"{name}.out", attend(query, keys, values, masked, heads, drop)))
    x = layer_norm(clients, f"{name}.norm", mixed + x, eps=1e-12)
    hidden = drop(apply_linear(clients, f"{name}.ffn.1", gelu(apply_linear(clients, f"{name}.ffn.0", x))))
    return layer_norm(clients, f"{name}.ffn_norm", hidden + x, eps=1e-12)
