"""The same federation in which some clients have other data, parameters and state: nobody but they may notice.

There are two ways to alter a table with one row per user. ``content`` gives every entry another value of its column's
range, so that sums, counts and hashes over clients change. ``rows`` gives all of them the row of one client, which is
valid as it stands, and changes what is most common.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Collection

import torch
from torch import Tensor

from ..audit.other_worlds import with_other_data, with_steps
from ..data.stream import Stream
from ..rng import Tables
from ..federation.parts import Progress
from ..plugin.state import Snapshot

WAYS = ("content", "rows")
INTERACTIONS = "interactions"
_KINDS = ("private", "client_context", "local")


def parts_of(start: Progress) -> list[str]:
    """What can be altered, by the words that evidence has for it."""
    tables = [f"{kind} '{name}'" for kind in _KINDS for name in getattr(start.model, kind)]
    return [INTERACTIONS, *tables, *(f"client_state['{name}']" for name in start.client_state)]


def altered(stream: Stream, start: Progress, others: Tensor, way: str, parts: Collection[str],
            past: bool = False) -> tuple[Stream, Progress]:
    """A stream and a state of its run in which some clients, ``others``, bool of shape (users,), have other ``parts``,
    of ``parts_of``; tables in one of ``WAYS``. ``past``: whether interactions of earlier steps are altered, too."""
    if INTERACTIONS in parts:
        first = 0 if past else start.step
        stream = with_steps(stream, {step.index: with_other_data(step, others[:step.n_users])
                                     for step in stream.steps[first:start.step + 1]})
    names = [name for name in start.client_state if f"client_state['{name}']" in parts]
    return stream, replace(start, model=altered_model(start.model, others, way, parts),
                           best=replace(start.best, model=altered_model(start.best.model, others, way, parts)),
                           client_state=_altered_tables(start.client_state, names, others, way))


def altered_model(model: Snapshot, others: Tensor, way: str, parts: Collection[str]) -> Snapshot:
    """A model in which some clients have other private parameters, and remember other things."""
    return replace(model, **{
        kind: _altered_tables(tables, [name for name in tables if f"{kind} '{name}'" in parts], others, way)
        for kind in _KINDS for tables in [getattr(model, kind)]})


def _altered_tables(tables: Tables, names: Collection[str], others: Tensor, way: str) -> Tables:
    result = dict(tables)
    for name in names:
        table = tables[name]
        if table.dim() == 0:
            continue
        rows = others.nonzero().flatten()
        rows = rows[rows < len(table)]
        if len(rows):
            values = _content(table)[rows] if way == "content" else _row_of_one(table, rows)
            result[name] = table.index_copy(0, rows, values)
    return result


def _row_of_one(table: Tensor, rows: Tensor) -> Tensor:
    """The row of one of several clients for all of them; for one client, that of its neighbour."""
    donor = int(rows[0]) if len(rows) > 1 else (int(rows[0]) + 1) % len(table)
    return table[donor].expand(len(rows), *table.shape[1:])


def _content(table: Tensor) -> Tensor:
    """A table in which every entry is another one of its column's range, if that has several."""
    if table.dtype == torch.bool:
        return ~table
    return _mirrored(table) if table.is_floating_point() else _shifted(table)


def _mirrored(table: Tensor) -> Tensor:
    """Numbers mirrored in the middle of their column's range: probabilities and variances remain such."""
    there = table.isfinite()
    low = table.masked_fill(~there, torch.inf).amin(0)
    high = table.masked_fill(~there, -torch.inf).amax(0)
    mirrored = torch.where(low < high, low + high - table, table * 1.25)
    # In the very middle nothing would change, so numbers move a little towards an end, too.
    return torch.where(there, mirrored + 0.125 * (high - mirrored).nan_to_num(0.0), table)


def _shifted(table: Tensor) -> Tensor:
    """Whole numbers moved on within their column's range, by another number for each client; those below 0, which
    stand for nothing, remain."""
    there = table >= 0
    high = table.amax(0).clamp(min=0)
    low = torch.minimum(table.masked_fill(~there, torch.iinfo(table.dtype).max).amin(0), high)
    size = high - low + 1
    number = torch.arange(len(table), device=table.device).view(-1, *[1] * (table.dim() - 1))
    by = 1 + (3 * number) % (size - 1).clamp(min=1)
    return torch.where(there, low + (table - low + by) % size, table).to(table.dtype)
