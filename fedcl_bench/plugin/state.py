"""The tables of a federation at one moment, and scoring users with them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Iterator

import torch
from torch import Tensor

from .backbone import Backbone
from ..rng import Tables


@dataclass(frozen=True)
class Snapshot:
    """All parameters after a round or a step."""

    public: Tables  # item tables, each (items, ...), the same for everybody
    private: Tables  # each client's own parameters, each (users, ...), or (users, items, ...) for personal tables
    dense: Tables = field(default_factory=dict)  # public parameters without item rows
    # Each client's own trained copy of the public item tables, each (users, items, ...), if it keeps one.
    local: Tables = field(default_factory=dict)
    # Tables that the server made for each client, each (users, items, ...), if it does
    personalised: Tables = field(default_factory=dict)
    # What clients remember of their own data besides parameters, each (users, ...), if they do (see
    # ``Backbone.remember``).
    client_context: Tables = field(default_factory=dict)

    @property
    def n_users(self) -> int:
        return len(next(iter((self.private or self.client_context).values())))

    @property
    def n_items(self) -> int:
        return len(self.item_vectors)

    @property
    def item_vectors(self) -> Tensor:
        """What the distance between items is measured by: the first public table, (items, ...)."""
        return next(iter(self.public.values()))

    def clients(self, users: Tensor) -> Tables:
        """Parameters of some clients as ``Backbone.score`` takes them, each (C, ...); not to be written to."""
        rows = _slice(users)
        return {**{name: table[rows] for name, table in (self.private | self.client_context).items()},
                **{name: value.expand(len(users), *value.shape) for name, value in self.dense.items()}}

    @property
    def sent(self) -> Tables:
        """What the server sends all clients and they send back: all public parameters."""
        return {**self.public, **self.dense}

    def with_sent(self, tables: Tables) -> Snapshot:
        """The same with these in the place of ``sent``."""
        return replace(self, public={name: tables[name] for name in self.public},
                       dense={name: tables[name] for name in self.dense})

    def tables(self) -> Iterator[Tensor]:
        """Every tensor."""
        for kind in fields(self):
            yield from getattr(self, kind.name).values()


def rows_of(kept: Tensor, users: Tensor) -> Tensor:
    """Rows of what clients keep, (C, ...), zeros of those that are new and have none yet. ``kept``: a row for each user
    that was known when it was made, perhaps none."""
    if not len(kept):
        return kept.new_zeros(len(users), *kept.shape[1:])
    known = (users < len(kept)).view(-1, *[1] * (kept.dim() - 1))
    return kept[users.clamp(max=len(kept) - 1)].where(known, kept.new_zeros(()))


def with_trailing_dims(factors: Tensor, values: Tensor) -> Tensor:
    """Factors of the first dimensions, in a shape that multiplies ``values``."""
    return factors.view(*factors.shape, *[1] * (values.dim() - factors.dim()))


def _slice(users: Tensor) -> Tensor | slice:
    """Users that follow one another as a slice, for which rows are not copied; on a GPU, which would have to be waited
    for, the users."""
    if users.device.type != "cpu" or not len(users) or not bool((users.diff() == 1).all()):
        return users
    return slice(int(users[0]), int(users[-1]) + 1)


def score_users(backbone: Backbone, model: Snapshot, users: Tensor) -> Tensor:
    """Logits of all items for some users, as the model is evaluated: shape (n, items)."""
    clients = model.clients(users)
    if backbone.scores_local_tables:
        rows = _slice(users)
        return backbone.score(clients, {name: table[rows] for name, table in model.local.items()})
    return backbone.score_all(clients, model.public)


def score_pairs(backbone: Backbone, model: Snapshot, users: Tensor, items: Tensor) -> Tensor:
    """Logits of some users' pairs with the items (n, m), as the model is evaluated: shape (n, m). Not for backbones
    with ``whole_tables``."""
    return backbone.score(*_pairs(backbone, model, users, items))


def pair_keys(backbone: Backbone, model: Snapshot, users: Tensor, items: Tensor) -> Tensor:
    """``Backbone.keys`` of some users' pairs with the items (n, m): shape (n, m, k)."""
    return backbone.keys(*_pairs(backbone, model, users, items))


def all_keys(backbone: Backbone, model: Snapshot, users: Tensor, n_items: int) -> Tensor:
    """The same of some users' pairs with all items, (n, items, k): one user's, seen n times, where keys are of items
    alone."""
    items = torch.arange(n_items, device=users.device)
    if backbone.scores_local_tables or backbone.overrides("keys"):
        return pair_keys(backbone, model, users, items.expand(len(users), -1))
    return pair_keys(backbone, model, users[:1], items[None]).expand(len(users), -1, -1)


def _pairs(backbone: Backbone, model: Snapshot, users: Tensor, items: Tensor) -> tuple[Tables, Tables]:
    """Parameters of the users and item rows of their pairs, as ``Backbone.score`` takes them."""
    if backbone.scores_local_tables:
        rows = {name: table[users[:, None], items] for name, table in model.local.items()}
    else:
        rows = {name: table[items] for name, table in model.public.items()}
    personal = backbone.new_personal(0, range(0))
    others = {name: table for name, table in model.private.items() if name not in personal}
    clients = replace(model, private=others).clients(users)
    for name in personal:
        clients[name] = model.private[name][users[:, None], items]
    return clients, rows


def in_pieces(users: Tensor, n_items: int) -> Iterator[Tensor]:
    """Groups of users whose scores of all items fit into little memory."""
    return iter(users.split(max(1, (1 << 21) // max(1, n_items))))

