"""Item rows that a client does not look up in a round: what moves them all the same, alike for every client.

Two things do. A method's penalty on every row takes them as far at one client as at any other (Reg). And with
``init=per_client`` a client's first upload holds rows that it drew itself and never trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Sequence

import torch
from torch import Tensor

from .. import rng
from ..plugin.backbone import Backbone
from ..rng import DrawKey, Tables
from ..plugin.method import Method
from ..plugin.local_settings import LocalSettings
from .chunk_trainer import own_start_key, row_penalties, writable
from .optimisers import make_optimiser


def shifts_of(batches: Sequence[int], public: Tables, method: Method, backbone: Backbone, settings: LocalSettings,
              key: DrawKey) -> dict[int, Tables]:
    """How far a penalty on every row takes rows that a client does not touch, by its local batches per epoch. Empty
    without such a penalty, and where clients train all rows anyway."""
    if backbone.whole_tables or not row_penalties(method, public):
        return {}
    return {count: _shift(public, method, backbone, settings, count, key.round) for count in set(batches)}


def _shift(public: Tables, method: Method, backbone: Backbone, settings: LocalSettings, batches: int,
           round_: int) -> Tables:
    """Such a row sees only the penalty's gradient, so it is trained here once, by the local optimiser, for the whole
    table."""
    penalties = row_penalties(method, public)
    tables = {name: public[name].clone()[None] for name in penalties}
    n_items = len(next(iter(public.values())))
    items = torch.arange(n_items, device=next(iter(public.values())).device)[None]
    optimiser = make_optimiser(settings)
    for batch in range(batches * settings.local_epochs):
        for table in tables.values():
            table.requires_grad_()
        loss = sum(penalties[name](table, items).sum() for name, table in tables.items())
        if loss.requires_grad:  # else nothing is penalised, as before there is a past
            gradients = torch.autograd.grad(loss, list(tables.values()), allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                rates = backbone.learning_rates(n_items, round_, batch)
                for name, update in optimiser.updates(writable(dict(zip(tables, gradients))), rates).items():
                    tables[name] += update
        for table in tables.values():
            table.requires_grad_(False)
    return {name: table[0] - public[name] for name, table in tables.items()}


def start_elsewhere(backbone: Backbone, seed: int, name: str, weight: Tensor) -> Tensor:
    """What the item rows that clients drew themselves, and did not look up, add to the sum of uploads. The sum of
    independent N(0, std^2) rows with weights w is N(0, std^2 sum w^2): one draw per row instead of one per row and
    client, with exactly the same law. Of rows that start uniformly, the sum is drawn from the normal law of its
    variance, which it comes close to for many clients. ``weight``: sum of the squared weights of the clients that did
    not look up each item, shape (items,). Returns float64 of shape (items, ...)."""
    items = torch.arange(len(weight), device=weight.device)
    start = backbone.item_starts(len(weight))[name]
    if start.bound > 0.0:
        start = replace(start, std=start.bound / math.sqrt(3.0), bound=0.0)
    rows = start.draw(rng.row_keys(own_start_key(seed, name + " elsewhere"), items))
    return rows * weight.clamp(min=0.0).sqrt().view(-1, *[1] * (rows.dim() - 1))
