"""What local training makes of clients, as the server's side and observers read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plugin.backbone import Backbone
from ..rng import Tables
from ..plugin.state import Snapshot
from .chunk_trainer import Slots
from .factored import Outer


@dataclass(frozen=True)
class Trained:
    """What local training made of the C clients of a chunk.

    Attributes:
        users: ids, shape (C,).
        slots: the item rows they held.
        moved: what they added to the parameters: item rows by slot, each (C, slots, ...), others (C, ...); beyond
            ``shift``. A table whose rows were not held has an ``Outer`` (see ``factored.py``).
        shift: how far rows that a client does not touch have moved alike for all (see ``unseen_rows.py``).
        factors: by what clipping has multiplied each client's change of public parameters, shape (C,): that in
            ``moved`` already, ``shift`` not. None: nothing is clipped.
        private: private parameters that are not in ``moved``, as they are after training, each (C, ...).
        kept: their own trained copies of the public item tables, if they keep them, each (C, items, ...).
        loss: each client's mean loss, shape (C,).
        uploads: what the method uploaded, each (C, ...).
        rest: with whole tables of which clients held only a part (see ``lazy_decay.py``), by what a client's other rows
            were multiplied, each (C,); ``moved`` is beyond that.
        held: what has become of the rows that clients held of such personal tables, each (C, slots, ...).
    """

    users: Tensor
    slots: Slots
    moved: dict[str, Tensor | Outer]
    shift: Tables
    factors: Tensor | None
    private: Tables
    kept: Tables
    loss: Tensor
    uploads: Tables
    rest: Tables
    held: Tables

    def changes(self, model: Snapshot, backbone: Backbone) -> Tables:
        """By how much each client's upload differs from what the server sent: public item tables, each (C, items, ...),
        and dense public parameters, each (C, ...). With ``init=per_client`` it is the whole upload in round 0."""
        result = {name: self.moved[name] for name in model.dense}
        for name, table in model.public.items():
            rows, items = rows_of(self.moved[name]), self.slots.items
            if name in self.rest and name in self.kept:
                result[name] = self.kept[name] - table
                continue
            if covers_all_items(self.moved[name]) or (backbone.whole_tables and name not in self.rest):
                result[name] = rows
                continue
            change = self.shift.get(name, torch.zeros_like(table)).expand(len(items), *table.shape).clone()
            if name in self.rest:
                change += table * beside(self.rest[name] - 1.0, change).to(change)
            if self.factors is not None:
                change *= beside(self.factors.to(change), change)
            index = items.view(*items.shape, *[1] * (table.dim() - 1)).expand_as(rows)
            result[name] = change.scatter_add_(1, index, rows)
        return result


def rows_of(moved: Tensor | Outer) -> Tensor:
    """What clients added to item rows, (C, slots, ...)."""
    return moved.rows() if isinstance(moved, Outer) else moved


def covers_all_items(moved: Tensor | Outer) -> bool:
    """Whether it has a row per item, though clients did not hold whole tables."""
    return isinstance(moved, Outer) and moved.items is None


def at_slots(table: Tensor, slots: Slots) -> Tensor:
    """Rows of a table at each client's slots, 0 where a slot is not its item's first: (C, slots, ...)."""
    rows = table.index_select(0, slots.items.reshape(-1)).view(*slots.items.shape, *table.shape[1:])
    return rows * beside(slots.first_copy, rows)


def beside(factors: Tensor, values: Tensor) -> Tensor:
    """Factors of the first dimensions, in a shape that multiplies ``values``."""
    return factors.view(*factors.shape, *[1] * (values.dim() - factors.dim()))
