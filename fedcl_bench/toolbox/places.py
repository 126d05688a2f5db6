"""Columns of clients' lists that matter, gathered to the front: fewer to compute with than the widest list has."""

from __future__ import annotations

import torch
from torch import Tensor


def most(count: Tensor, limit: int) -> int:
    """The largest of numbers; on a GPU, which would have to be waited for, the largest that there may be."""
    return int(count.max()) if count.device.type == "cpu" and len(count) else limit


def true_places(mask: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Where a mask (C, n) is True, in order: (C, m), and how often, (C,), which is at most ``limit``. A client with
    fewer than m has place 0 behind them."""
    number = mask.cumsum(1)  # from 1
    count = number[:, -1] if mask.shape[1] else number.sum(1)
    width = most(count, min(mask.shape[1], limit))
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    places = torch.zeros(len(mask), width + 1, dtype=torch.int64, device=mask.device)
    return places.scatter_(1, (number - 1).where(mask, width), place)[:, :width], count


def stands_first(items: Tensor, there: Tensor, n_items: int) -> Tensor:
    """Which places of the lists (C, n), of those that are there, have their item for the first time; bool (C, n)."""
    place = torch.arange(items.shape[1], device=items.device).expand_as(items).where(there, items.shape[1])
    first = torch.full((len(items), n_items), items.shape[1], device=items.device)
    return there & (first.scatter_reduce_(1, items, place, "amin").gather(1, items) == place)


def distinct(items: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """Where each item of the lists (C, n) stands for the first time, as ``true_places``."""
    return true_places(stands_first(items, torch.ones_like(items, dtype=torch.bool), n_items), n_items)


def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Of each client's values (C, n, ...) those at places (C, m)."""
    at = places + values.shape[1] * torch.arange(len(values), device=places.device)[:, None]
    return values.flatten(0, 1).index_select(0, at.flatten()).view(*places.shape, *values.shape[2:])
