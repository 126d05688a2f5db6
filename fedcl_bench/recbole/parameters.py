"""Which of a RecBole model's parameters are public and which private, and how they start.

A model is built at several sizes. A dimension that grows with the users makes a parameter private, one row per user;
one that grows with the items makes it a public item table; a parameter with neither is public and dense. In our tables
the item dimension comes first, and RecBole's padding row (and rows behind the last item) are dense parameters of their
own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import rng
from ..rng import Tables
from ..core.errors import UserError

# Users and items of the model whose initial values are measured: some laws depend on the size of a table.
REFERENCE = 1000, 1000
_SIZES = (3, 20), (5, 20), (3, 27)
PADDING = "[padding]"  # ends the name of a table's padding row, which many models never read


@dataclass(frozen=True)
class Law:
    """A new row's numbers: constant, normal or uniform, with a mean, and the standard deviation or half width."""

    kind: str
    mean: float
    scale: float

    @staticmethod
    def of(values: Tensor) -> "Law":
        """The law of measured values: uniform ones have a kurtosis of 1.8, normal ones of 3."""
        values = values.detach().double().flatten()
        mean, std = float(values.mean()), float(values.std(correction=0))
        if std == 0.0:
            return Law("constant", float(values[0]), 0.0)
        if abs(mean) < 5.0 * std / len(values) ** 0.5:
            mean = 0.0
        centred = values - mean
        if float(centred.pow(4).mean()) / std ** 4 > 2.4:
            return Law("normal", mean, std)
        return Law("uniform", mean, float(centred.abs().max()) * (len(values) + 1) / len(values))

    def rows(self, seed: int, name: str, ids: range, shape: tuple[int, ...]) -> Tensor:
        """float64 rows of some users or items; a row depends on the seed and its own id only."""
        columns = math.prod(shape)
        if self.kind == "normal":
            values = rng.normal_rows(seed, f"init {name}", ids.start, len(ids), columns) * self.scale
        elif self.kind == "uniform":
            keys = rng.client_keys(rng.key(seed, f"init {name}"), torch.arange(ids.start, ids.start + len(ids)))
            pattern = rng.bits(keys[:, None], torch.arange(columns))
            values = (2.0 * rng.uniform(pattern) - 1.0) * self.scale
        else:
            values = torch.zeros(len(ids), columns, dtype=torch.float64)
        return (values + self.mean).view(len(ids), *shape)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a RecBole model."""

    name: str  # RecBole's
    follows: str  # ``users``, ``items`` or nothing
    axis: int  # the dimension that does
    row: tuple[int, ...]  # shape of what belongs to one user or item; a single number has the shape (1,)
    shape: tuple[int, ...]  # that without the axis, as the model has it
    behind: int  # rows behind the last item's
    private: bool  # kept at the client

    @property
    def padding(self) -> str:
        """Name of the padding row of an item table."""
        return self.name + PADDING

    @property
    def rows_behind(self) -> str:
        return f"{self.name}[behind]"

    def assemble(self, tables: Tables) -> Tensor:
        """The model's parameter from one client's: rows of ``tables`` by name, ``padding`` and ``rest`` among them."""
        value = tables[self.name]
        if not self.follows:
            return value
        if self.follows == "users":
            value = value.view(1, *self.shape)
            return torch.cat([torch.zeros_like(value), value]).movedim(0, self.axis)
        rows = [tables[self.padding].view(1, *self.shape), value.view(len(value), *self.shape)]
        if self.behind:
            rows.append(tables[self.rows_behind].view(self.behind, *self.shape))
        return torch.cat(rows).movedim(0, self.axis)


def classify(build: Callable[[int, int], nn.Module], private: Sequence[str]) -> list[Parameter]:
    """The trained parameters in its own order of a model that ``build`` makes for a number of users and items, the
    padding id not counted. Those whose names are like the patterns in ``private`` are kept at the client besides those
    of users.

    Raises UserError for a pattern that no public parameter has, or if no item table is left public.
    """
    items = _SIZES[0][1]
    small, wide, long = (dict(build(*size).named_parameters()) for size in _SIZES)
    result, matched = [], set()
    for name, parameter in small.items():
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        of_users, of_items = (next((axis for axis, size in enumerate(shape) if larger[name].shape[axis] != size), None)
                              for larger in (wide, long))
        axis = of_items if of_users is None else of_users
        patterns = [pattern for pattern in private if of_users is None and fnmatchcase(name, pattern)]
        matched.update(patterns)
        if axis is None:
            result.append(Parameter(name, "", 0, shape, shape, 0, bool(patterns)))
            continue
        rest = shape[:axis] + shape[axis + 1:]
        follows, behind = ("items", shape[axis] - items - 1) if of_users is None else ("users", 0)
        result.append(Parameter(name, follows, axis, rest or (1,), rest, behind, follows == "users" or bool(patterns)))
    for pattern in private:
        if pattern not in matched:
            raise UserError(f"setting 'private': found '{pattern}', accepted: patterns of parameters that are public "
                            f"otherwise: {', '.join(p.name for p in result if p.follows != 'users')}.")
    if not any(p.follows == "items" and not p.private for p in result):
        raise UserError("setting 'private': leaves no public item table, so clients would share nothing about items; "
                        "leave at least one out.")
    return result


@dataclass(frozen=True)
class Starts:
    """Initial values of all parameters."""

    laws: dict[str, Law]  # of the rows of users and items, by parameter
    dense: Tables  # values of all others, float64, of padding rows too

    @staticmethod
    def measure(build: Callable[..., nn.Module], parameters: Sequence[Parameter], seed: int) -> "Starts":
        """Of models of the size ``REFERENCE``, which ``build`` makes for a number of users, of items and a seed: rows
        have the law that the model with seed 0 shows; dense parameters are those of the model with the run's seed."""
        measured = dict(build(*REFERENCE, seed=0).named_parameters())
        of_run = dict(build(*REFERENCE, seed=seed).named_parameters())
        laws, dense = {}, {}
        for p in parameters:
            value = of_run[p.name].detach().double()
            if not p.follows:
                dense[p.name] = value.clone()
                continue
            count = REFERENCE[0] if p.follows == "users" else REFERENCE[1]
            laws[p.name] = Law.of(measured[p.name].movedim(p.axis, 0)[1:1 + count])
            if p.follows == "items":
                rows = value.movedim(p.axis, 0)
                dense[p.padding] = rows[0].reshape(p.row).clone()
                if p.behind:
                    dense[p.rows_behind] = rows[1 + count:].reshape(p.behind, *p.row).clone()
        return Starts(laws, dense)
