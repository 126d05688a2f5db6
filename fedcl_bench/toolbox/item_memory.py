"""Item rows that clients keep from round to round, each of some items: in ``client_state``, as few as a client has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plugin.state import with_trailing_dims
from ..rng import Tables
from .places import most

# Begin the names of a memory's tables: of which items its rows are, and how many a client has.
ITEMS, COUNT = "items of ", "rows of "


def copied(state: Tables, name: str, shape: tuple[int, ...], users: int, like: Tensor) -> Tables:
    """The tables of memory ``name`` in ``state``, or of an empty one, as new ones that may be written in place. A
    client's rows are the first of its part of a table, which has room for a row of every item; of the room that is
    never used the system takes no memory (on a GPU it does). ``shape``: of a client's part, (items, ...); ``like``: of
    which type and where rows are."""
    count = torch.zeros(users, dtype=torch.int64, device=like.device)
    new = {name: _zeros((users, *shape), like), ITEMS + name: _zeros((users, shape[0]), count), COUNT + name: count}
    if name in state:
        count.copy_(state[COUNT + name])
        used = torch.arange(shape[0], device=like.device) < count[:, None]
        at = used.flatten().nonzero().flatten()
        for table in (name, ITEMS + name):
            new[table].flatten(0, 1).index_copy_(0, at, state[table].flatten(0, 1).index_select(0, at))
    return new


def write(state: Tables, name: str, users: Tensor, rows: Tensor, items: Tensor, count: Tensor) -> None:
    """Replace what clients keep. What is behind a client's rows stays 0. ``rows``: (C, n, ...), 0 behind those that a
    client has; ``items``: which items these are, int64 of shape (C, n), none twice; ``count``: how many of them a
    client has, (C,)."""
    n, before = rows.shape[1], state[COUNT + name][users]
    items = items.where(torch.arange(n, device=count.device) < count[:, None], 0)
    for table, values in ((name, rows), (ITEMS + name, items)):
        state[table][users, :n] = values
        state[table][users, n:most(before, len(state[table][0]))] = 0
    state[COUNT + name][users] = count


def listed(state: Tables, name: str, users: Tensor) -> tuple[Tensor, Tensor]:
    """All rows that clients keep, (C, m, ...), and of which items they are, (C, m); a client with fewer has rows of 0
    behind them."""
    column, real = _columns(state, name, users)
    return _at(state[name], users, column, real), state[ITEMS + name][users, :column.shape[1]]


def look_up(state: Tables, name: str, users: Tensor, items: Tensor) -> Tensor:
    """What clients keep of ``items`` (C, n): (C, n, ...), 0 of those they have no row of."""
    column, real = _columns(state, name, users)
    n_items = state[name].shape[1]
    kept = state[ITEMS + name][users, :column.shape[1]].where(real, n_items)
    place = torch.full((len(users), n_items + 1), -1, device=items.device).scatter_(1, kept, column).gather(1, items)
    return _at(state[name], users, place.clamp(min=0), place >= 0)


def _columns(state: Tables, name: str, users: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of rows, 0 to m - 1 of every client, (C, m), and whether the client has such a row."""
    count = state[COUNT + name][users]
    column = torch.arange(most(count, state[name].shape[1]), device=count.device).expand(len(count), -1)
    return column, column < count[:, None]


def _at(table: Tensor, users: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Rows of users' parts of a table, (C, n, ...); 0 where there is no real one."""
    cells = (users[:, None] * table.shape[1] + places).flatten()
    rows = table.flatten(0, 1).index_select(0, cells).view(*places.shape, *table.shape[2:])
    return rows.mul_(with_trailing_dims(real, rows))


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of which a CPU's memory is taken as they are written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(shape, like.new_zeros(0).numpy().dtype))  # torch.zeros writes them
