"""What local training makes of clients: the one type that goes from trainers to the server's sums and to observers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from ..rng import Tables
from ..plugin.state import Snapshot, with_trailing_dims
from .chunk_trainer import Slots
from .factored import Outer


@dataclass(frozen=True)
class Change:
    """What C clients made of one parameter of theirs. A client's parameter ends at ``decay`` times what it began with,
    plus ``shift``, plus ``rows`` at its ``items``."""

    # What was added to item rows, (C, slots, ...) or an ``Outer`` (see ``factored.py``), or to all of the parameter,
    # (C, ...).
    rows: Tensor | Outer
    # The items of these rows, (C, slots), of which several may be equal if all but one row is 0; None: all.
    items: Tensor | None = None
    replaces: bool = False  # ``rows`` are not added, but what has become of the parameter there
    # By what all of the parameter was multiplied first (see ``lazy_decay.py``), (C,); None: 1
    decay: Tensor | None = None
    # How far item rows moved alike for all clients (see ``unseen_rows.py``), (items, ...); None: 0.
    shift: Tensor | None = None
    # By what clipping has multiplied the whole change, (C,): that in ``rows`` already, ``decay`` and ``shift`` not.
    # None: nothing is clipped.
    scale: Tensor | None = None

    @property
    def added(self) -> Tensor:
        """``rows`` as a tensor."""
        return self.rows.rows() if isinstance(self.rows, Outer) else self.rows

    def of(self, part: slice | Tensor) -> "Change":
        """That of some clients."""
        items, decay, scale = (None if of_all is None else of_all[part]
                               for of_all in (self.items, self.decay, self.scale))
        return replace(self, rows=self.rows[part], items=items, decay=decay, scale=scale)

    def against(self, before: Tensor) -> Tensor:
        """By how much the whole parameter differs from what it was, each client's or one for all: (C, ...)."""
        rows = self.added
        if self.items is None and self.replaces:
            return rows - before
        if self.items is None:
            factor = 1.0 if self.scale is None else with_trailing_dims(self.scale.to(rows), rows)
            return rows if self.shift is None else rows + self.shift * factor
        start = torch.zeros_like(before) if self.shift is None else self.shift
        change = start.expand(len(rows), *before.shape[before.dim() - rows.dim() + 1:]).clone()
        if self.decay is not None:
            change += before * with_trailing_dims(self.decay - 1.0, change).to(change)
        if self.scale is not None:
            change *= with_trailing_dims(self.scale.to(change), change)
        index = self.items.view(*self.items.shape, *[1] * (rows.dim() - 2)).expand_as(rows)
        if self.replaces:
            return change.scatter_(1, index, rows - before.gather(1, index))
        return change.scatter_add_(1, index, rows)

    @property
    def sparse(self) -> bool:
        """Whether ``rows`` are all of the change."""
        return not self.replaces and self.shift is None and self.decay is None

    def within(self, part: slice) -> "Change":
        """That of some rows of the parameter, which follow one another."""
        shift = None if self.shift is None else self.shift[part]
        if self.items is None:
            return replace(self, rows=self.added[:, part], shift=shift)
        inside = (self.items >= part.start) & (self.items < part.stop)
        rows = self.added * with_trailing_dims(inside, self.added)
        return replace(self, rows=rows, items=(self.items - part.start).where(inside, 0), shift=shift)

    def add_to(self, total: Tensor, sent: Tensor, weights: Tensor | None) -> None:
        """Add the sum over clients, weighted, to one of the parameter, which the server ``sent``; ``weights``: (C,).
        First what is alike for many rows, which costs one pass over the table for all clients; then the rows that they
        changed themselves."""
        shares = self.scale if weights is None else weights if self.scale is None else weights * self.scale.to(weights)
        share = len(self.rows) if shares is None else shares.sum()

        def weighted(rows: Tensor) -> Tensor:
            return rows if weights is None else rows * with_trailing_dims(weights, rows)

        if self.shift is not None:
            total += self.shift * share
        if self.decay is not None:
            lost = (self.decay - 1.0) * (1.0 if weights is None else weights)
            lost = lost if self.scale is None else lost * self.scale
            total += sent * lost.sum().to(total)
        if isinstance(self.rows, Outer):
            (self.rows if weights is None else self.rows.scaled(weights)).add_to(total)
        elif self.items is not None:
            total.index_add_(0, self.items.reshape(-1), weighted(self.rows).flatten(0, 1))
        elif self.replaces:
            total += weighted(self.rows).sum(0) - sent * share
        else:
            total += weighted(self.rows).sum(0)

    def scaled(self, factors: Tensor) -> "Change":
        """Clipped: each client's times its factor, (C,)."""
        rows = (self.rows.scaled(factors) if isinstance(self.rows, Outer) else
                self.rows * with_trailing_dims(factors.to(self.rows), self.rows))
        return replace(self, rows=rows, scale=factors)


@dataclass(frozen=True)
class Trained:
    """What local training made of the C clients of a chunk."""

    users: Tensor  # ids, shape (C,)
    slots: Slots  # the item rows they held
    # Changes of public parameters, item tables and dense ones, that clients upload. With ``init=per_client`` it is the
    # whole upload in round 0.
    public: dict[str, Change]
    private: dict[str, Change]  # those of the private parameters that changed; they stay at the clients
    local: Tables  # their own trained copies of the public item tables, if they keep them, each (C, items, ...)
    loss: Tensor  # each client's mean loss, shape (C,)
    uploads: Tables  # what the method uploaded, each (C, ...)
    # Where ``public`` is what the method sends in place of changes: zeros of the shapes of its sums.
    sums: Tables = field(default_factory=dict)

    def of(self, part: slice | Tensor) -> "Trained":
        """That of some clients of the chunk."""
        public, private = ({name: change.of(part) for name, change in changes.items()}
                           for changes in (self.public, self.private))
        local, uploads = ({name: values[part] for name, values in tables.items()}
                          for tables in (self.local, self.uploads))
        return Trained(self.users[part], self.slots.of(part), public, private, local, self.loss[part], uploads,
                       self.sums)

    def changes(self, model: Snapshot) -> Tables:
        """By how much each client's upload differs from what the server sent: dense public parameters, each (C, ...),
        and item tables, each (C, items, ...). Of a method with sums, what it adds to each, (C, ...)."""
        sent = self.sums.items() or chain(model.dense.items(), model.public.items())
        return {name: self.public[name].against(before) for name, before in sent}


def at_slots(table: Tensor, slots: Slots) -> Tensor:
    """Rows of a table at each client's slots, 0 where a slot is not its item's first: (C, slots, ...)."""
    rows = table.index_select(0, slots.items.reshape(-1)).view(*slots.items.shape, *table.shape[1:])
    return rows * with_trailing_dims(slots.first_copy, rows)
