"""What the clients of a round add up to. Chunks are added in their own order, whichever thread trained them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..training.factored import Outer
from ..training.trained import Trained, beside
from ..training.strategies import Strategy, Training
from ..rng import Tables
from ..evaluation.drift import Add
from ..plugin.state import Snapshot
from ..kernels import ops


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

    def __init__(self, model: Snapshot, training: Training, users: int, weights: Tensor | None, own_start: bool):
        self.model, self.users, self.weights, self.own_start = model, users, weights, own_start
        self.personal, self.at_rest = training.personal, training.strategy is Strategy.LAZY_DECAY
        self.whole = training.backbone.whole_tables
        device = next(iter(model.public.values())).device
        self.change = {name: _empty_like(table).zero_() for name, table in {**model.public, **model.dense}.items()}
        self.private = {name: _others_rows(table, users) for name, table in model.private.items()
                        if self.at_rest and name in self.personal}
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
        self._add_shift(trained)
        for name in trained.rest:
            self._add_rest(name, trained)
        for name, moved in trained.moved.items():
            self._add_moved(name, moved, trained)
        for name, values in trained.private.items():
            if name not in self.private:
                self.private[name] = _others_rows(self.model.private[name], self.users)
            self.private[name].index_copy_(0, trained.users, values)
        for name, tables in trained.kept.items():
            self.local[name][trained.users] = tables
        for name, values in trained.uploads.items():
            self._uploads.setdefault(name, []).append(values)
        if self.own_start:
            self._add_squares(trained)

    def _weighted(self, rows: Tensor, users: Tensor) -> Tensor:
        return rows if self.weights is None else rows * beside(self.weights[users], rows)

    def _share(self, trained: Trained) -> int | Tensor:
        """What a change that is alike for all clients of a chunk counts in the sum."""
        shares = trained.factors if self.weights is None else self.weights[trained.users]
        return len(trained.users) if shares is None else shares.sum()

    def _add_shift(self, trained: Trained) -> None:
        """What moved the rows that clients did not touch."""
        for name, shift in trained.shift.items():
            self.change[name] += shift * self._share(trained)

    def _add_rest(self, name: str, trained: Trained) -> None:
        """Rows at rest: what became of those that clients of whole tables did not hold."""
        users, rest = trained.users, trained.rest[name]
        if name in self.personal:
            _multiply(self.model.private[name], users, rest, self.private[name])
            rows = trained.held[name].flatten(0, 1)
            cells = trained.slots.cells(users, self.model.n_items)
            self.private[name].flatten(0, 1).index_copy_(0, cells, rows)
        elif name not in trained.kept:
            counts = (rest - 1.0) * (1.0 if self.weights is None else self.weights[users])
            counts = counts if trained.factors is None else counts * trained.factors
            self.change[name] += self.model.public[name] * counts.sum().to(self.change[name])

    def _add_moved(self, name: str, moved: Tensor | Outer, trained: Trained) -> None:
        """What training added to one kind of parameter."""
        users = trained.users
        if name in trained.rest and name in trained.kept:
            sent = self._weighted(trained.kept[name], users)
            self.change[name] += sent.sum(0) - self.model.public[name] * self._share(trained)
        elif isinstance(moved, Outer):
            (moved if self.weights is None else moved.scaled(self.weights[users])).add_to(self.change[name])
        elif name in self.model.private:
            self._add_private(name, moved, trained)
        elif name in self.model.dense or (self.whole and not self.at_rest):
            self.change[name] += self._weighted(moved, users).sum(0)
        else:
            rows = self._weighted(moved, users)
            self.change[name].index_add_(0, trained.slots.items.reshape(-1), rows.flatten(0, 1))

    def _add_private(self, name: str, moved: Tensor, trained: Trained) -> None:
        if name not in self.private:
            self.private[name] = _empty_like(self.model.private[name]).copy_(self.model.private[name])
        if name in self.personal and not self.whole:
            self.private[name].index_put_((trained.users[:, None], trained.slots.items), moved, accumulate=True)
        else:
            _add_rows(self.private[name], trained.users, moved)

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


def _empty_like(table: Tensor) -> Tensor:
    """Memory for a large table that takes the place of one like it, round after round.

    PyTorch asks glibc for aligned blocks, and such a request does not find the block of the same size that was freed
    before: every time the system gives fresh pages, which take ten times as long to write. NumPy's requests do.
    """
    if table.device.type != "cpu":
        return torch.empty_like(table, memory_format=torch.contiguous_format)
    return torch.from_numpy(np.empty(table.nbytes, np.uint8)).view(table.dtype).view(table.shape)


def _others_rows(table: Tensor, users: int) -> Tensor:
    """A table like this with the rows of those who are not among so many users; the others are to be written."""
    result = _empty_like(table)
    return result if users == len(table) else result.copy_(table)


def _multiply(table: Tensor, users: Tensor, factors: Tensor, result: Tensor) -> None:
    """Write some users' rows (items, ...) of a table, each times its factor, into another of the same shape."""
    factors = factors.to(table)
    if table.device.type == "cpu":  # one user after the other: a single pass over memory
        for user, factor in zip(users.tolist(), factors):
            torch.mul(table[user], factor, out=result[user])
    else:
        rows = table.index_select(0, users)
        result.index_copy_(0, users, rows.mul_(beside(factors, rows)))


def _add_rows(table: Tensor, users: Tensor, rows: Tensor) -> None:
    """Add rows (n, ...) to those of some users, in the table's memory."""
    if ops.serve(table) and rows.dtype == table.dtype in ops.REALS:
        ops.add_rows(table, users, rows)
    else:
        table.index_add_(0, users, rows)
