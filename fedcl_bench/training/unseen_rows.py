"""Item rows that a client does not look up in a round: what moves them all the same, alike for every client.

Two things do. A method's penalty on every row, or its pull, takes them as far at one client as at any other (Reg). And
with ``init=per_client`` a client's first upload holds rows that it drew itself and never trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import rng
from ..core.errors import UserError
from ..plugin.backbone import Backbone
from ..rng import DrawKey, Tables
from ..plugin.method import Method
from ..plugin.local_settings import LocalSettings
from .chunk_trainer import own_start_key, pulls_of, row_penalties, writable
from .optimisers import LocalOptimiser


def shifts_of(batches: Sequence[int], public: Tables, method: Method, backbone: Backbone, settings: LocalSettings,
              key: DrawKey) -> dict[int, Tables]:
    """How far what a method adds on every row takes rows that a client does not touch, by its local batches per epoch.
    Empty if it adds nothing, and where clients train all rows anyway. Raises UserError where a tolerance may end
    clients' rounds early."""
    if backbone.whole_tables:
        return {}
    penalties = row_penalties(method, public)
    pulls = {name: pull for name, pull in pulls_of(method, public).items() if pull.to is not None}
    if not (penalties or pulls):
        return {}
    if settings.tolerance > 0.0 and settings.local_epochs > 1:
        raise UserError(f"setting 'tolerance': found {settings.tolerance:g}, accepted: 0 with method '{method.name}' "
                        f"and backbone '{backbone.name}'; the method moves item rows that a client does not look up, "
                        f"alike for all, and clients would end their rounds after different numbers of local epochs.")

    def gradients(tables: Tables) -> Tables:
        result = _gradients(penalties, tables)
        for name, pull in pulls.items():
            known = len(pull.to)
            result[name][0, :known] += pull.weight * (tables[name][0, :known] - pull.to)
        return result

    tables = {name: public[name] for name in public if name in penalties or name in pulls}
    return {count: _shift(tables, gradients, backbone, settings, count, key.round) for count in set(batches)}


def _gradients(penalties: Mapping[str, Callable[[Tensor, Tensor], Tensor]], tables: Tables) -> Tables:
    """Of the penalties on whole tables, each (1, items, ...)."""
    tables = {name: table.detach().requires_grad_() for name, table in tables.items()}
    items = torch.arange(next(iter(tables.values())).shape[1], device=next(iter(tables.values())).device)[None]
    with torch.enable_grad():
        loss = sum(penalty(tables[name], items).sum() for name, penalty in penalties.items())
    if not isinstance(loss, Tensor) or not loss.requires_grad:  # nothing is penalised, as before there is a past
        return {name: torch.zeros_like(table) for name, table in tables.items()}
    found = torch.autograd.grad(loss, list(tables.values()), allow_unused=True, materialize_grads=True)
    return writable(dict(zip(tables, found)))


@torch.no_grad()
def _shift(public: Tables, gradients: Callable[[Tables], Tables], backbone: Backbone, settings: LocalSettings,
           batches: int, round_: int) -> Tables:
    """Such a row sees only these gradients, so it is trained here once, by the local optimiser, for the whole table."""
    tables = {name: table.clone()[None] for name, table in public.items()}
    n_items, optimiser = len(next(iter(public.values()))), LocalOptimiser(settings)
    for batch in range(batches * settings.local_epochs):
        rates = backbone.learning_rates(n_items, round_, batch)
        for name, update in optimiser.updates(gradients(tables), rates).items():
            tables[name] += update
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
