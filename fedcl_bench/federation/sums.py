"""What the clients of a round add up to. Chunks are added in their own order, whichever thread trained them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..training.factored import Outer
from ..training.trained import Change, Trained, beside
from ..rng import Tables
from ..evaluation.drift import Add
from ..plugin.state import Snapshot


@dataclass(frozen=True)
class Totals:
    """The sums of a round over all clients of a run.

    Attributes:
        change: of the public parameters, each as long as its table.
        numbers: sum of the clients' losses, how many they are, sum of their weights; float64 of shape (3,).
        squares: of the weights that touched each item, (items,), and square: of all; where clients drew their starts.
    """

    change: Tables
    numbers: Tensor
    squares: Tensor | None = None
    square: Tensor | None = None

    @property
    def loss(self) -> float:
        """The mean local loss."""
        return float(self.numbers[0] / self.numbers[1])


class RoundSums:
    """Sums and tables of a round, filled by ``add``.

    Args:
        model: what the server sent.
        users: how many clients will be added.
        weights: weight of every user in the mean, shape (users,); None: all alike.
        own_start: clients drew the public parameters that they began with.

    Attributes:
        change: of the public parameters, item tables and dense ones, summed over clients.
        private: those private parameters that are others now, of all users; local: the same of clients' own copies.
        uploads: what the method uploaded, each (N, ...) in ascending order of users.
    """

    def __init__(self, model: Snapshot, users: int, weights: Tensor | None, own_start: bool):
        self.model, self.users, self.weights, self.own_start = model, users, weights, own_start
        device = next(iter(model.public.values())).device
        self.change = {name: torch.zeros_like(table, memory_format=torch.contiguous_format)
                       for name, table in {**model.public, **model.dense}.items()}
        self.private: Tables = {}
        self.local = {name: _others_rows(table, users) for name, table in model.local.items()}
        # Of the weights that touched each item.
        self._squares = torch.zeros(model.n_items if own_start else 0, dtype=torch.float64, device=device)
        self._losses = [torch.zeros(0, dtype=torch.float64, device=device)]
        self._uploads: dict[str, list[Tensor]] = {}
        self._order = [torch.zeros(0, dtype=torch.int64, device=device)]

    def add(self, trained: Trained) -> None:
        """Add the clients of a chunk."""
        self._losses.append(trained.loss)
        self._order.append(trained.users)
        for name, change in trained.public.items():
            self._add_public(name, change, trained.users)
        for name, change in trained.private.items():
            self._set_private(name, change, trained.users)
        for name, tables in trained.local.items():
            self.local[name][trained.users] = tables
        for name, values in trained.uploads.items():
            self._uploads.setdefault(name, []).append(values)
        if self.own_start:
            self._add_squares(trained)

    def _add_public(self, name: str, change: Change, users: Tensor) -> None:
        """Add what clients changed of a public parameter, weighted.

        First what is alike for many rows, which costs one pass over the table for all clients of a chunk; then the rows
        that they changed themselves.
        """
        total, sent = self.change[name], self.model.public.get(name, self.model.dense.get(name))
        weights = None if self.weights is None else self.weights[users]
        shares = change.scale if weights is None else weights
        share = len(users) if shares is None else shares.sum()

        def weighted(rows: Tensor) -> Tensor:
            return rows if weights is None else rows * beside(weights, rows)

        if change.shift is not None:
            total += change.shift * share
        if change.decay is not None:
            lost = (change.decay - 1.0) * (1.0 if weights is None else weights)
            lost = lost if change.scale is None else lost * change.scale
            total += sent * lost.sum().to(total)
        if isinstance(change.rows, Outer):
            (change.rows if weights is None else change.rows.scaled(weights)).add_to(total)
        elif change.items is not None:
            total.index_add_(0, change.items.reshape(-1), weighted(change.rows).flatten(0, 1))
        elif change.replaces:
            total += weighted(change.rows).sum(0) - sent * share
        else:
            total += weighted(change.rows).sum(0)

    def _set_private(self, name: str, change: Change, users: Tensor) -> None:
        """Put what clients made of a private parameter of theirs among those of all users."""
        before = self.model.private[name]
        if name not in self.private:
            self.private[name] = (_others_rows(before, self.users) if change.replaces else
                                  before.clone(memory_format=torch.contiguous_format))
        after = self.private[name]
        if change.decay is not None:
            rows = before.index_select(0, users)
            after.index_copy_(0, users, rows.mul_(beside(change.decay.to(rows), rows)))
        if not change.replaces and change.items is None:
            after.index_add_(0, users, change.rows)
        elif not change.replaces:
            after.index_put_((users[:, None], change.items), change.rows, accumulate=True)
        elif change.items is None:
            after.index_copy_(0, users, change.rows)
        else:
            cells = (users[:, None] * after.shape[1] + change.items).reshape(-1)
            after.flatten(0, 1).index_copy_(0, cells, change.rows.flatten(0, 1))

    def _add_squares(self, trained: Trained) -> None:
        items, users = trained.slots.items, trained.users
        weights = torch.ones(len(users), device=items.device) if self.weights is None else self.weights[users]
        touched = trained.slots.first_copy * weights.to(self._squares)[:, None].square()
        self._squares.index_add_(0, items.reshape(-1), touched.reshape(-1))

    @property
    def uploads(self) -> Tables:
        if not self._uploads:
            return {}
        order = torch.cat(self._order).argsort()
        return {name: torch.cat(parts)[order] for name, parts in self._uploads.items()}

    def totals(self, add: Add | None = None) -> Totals:
        """The sums over all clients of the run; ``add`` adds those over clients elsewhere."""
        count = sum(map(len, self._order))
        numbers = torch.full((3,), count, dtype=torch.float64, device=self._squares.device)
        numbers[0] = torch.cat(self._losses).sum()
        weights = None if self.weights is None else self.weights[torch.cat(self._order)]
        if weights is not None:
            numbers[2] = weights.sum()
        starts = {}
        if self.own_start:
            square = numbers[1].clone() if weights is None else weights.double().square().sum()
            starts = {"squares": self._squares, "square": square}
        if add is None:
            return Totals(self.change, numbers, **starts)
        tables = {f"change of {name}": table for name, table in self.change.items()}
        sums = add({**tables, "numbers": numbers, **starts})
        change = {name: sums[f"change of {name}"] for name in self.change}
        return Totals(change, sums["numbers"], **{name: sums[name] for name in starts})


def _others_rows(table: Tensor, users: int) -> Tensor:
    """A table like this with the rows of those who are not among so many users; the others are to be written."""
    like = torch.empty_like if users == len(table) else torch.clone
    return like(table, memory_format=torch.contiguous_format)
