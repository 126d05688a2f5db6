"""Graphs of items for sequential backbones: of a session's steps, and of all clicks that a client knows, its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ..data.stream import TrainingStep

_SLOPE = 0.2  # of leaky ReLUs
_REACH = 3  # positions apart at which two clicks of a session are neighbours


def neighbours(items: np.ndarray, start: np.ndarray, user: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """The most frequent neighbours of every item that a user clicked, in the user's own sessions alone. Two clicks are
    neighbours if they are at most 3 positions apart in a session and of different items; it counts in both directions.
    Of equal counts the smaller id comes first. ``items``: of all sessions, laid end to end; ``start``: where each
    begins, and the end; ``user``: of each session. Returns (user, item, rank from 0, neighbour, count), a row per
    neighbour, by user, item and rank."""
    session = np.repeat(np.arange(len(user)), np.diff(start))
    pairs = []
    for apart in range(1, _REACH + 1):
        a, b = items[:-apart], items[apart:]
        together = (session[:-apart] == session[apart:]) & (a != b)
        owner = user[session[:-apart][together]]
        pairs += [np.stack([owner, a[together], b[together]]), np.stack([owner, b[together], a[together]])]
    every = np.concatenate(pairs, 1)
    if not every.size:
        return (every[0],) * 5
    distinct, count = np.unique(every, axis=1, return_counts=True)
    order = np.lexsort((distinct[2], -count, distinct[1], distinct[0]))
    (owner, item, near), count = distinct[:, order], count[order]
    begins = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(item, prepend=-1))
    rank = np.arange(len(owner)) - np.repeat(begins, np.diff(np.append(begins, len(owner))))
    kept = rank < most
    return owner[kept], item[kept], rank[kept], near[kept], count[kept]


def neighbours_in(step: TrainingStep, most: int) -> tuple[np.ndarray, ...]:
    """``neighbours`` in the training sessions of a step of sessions."""
    sessions = step.sessions["train"]
    user = np.repeat(np.arange(step.n_users), np.diff(sessions.of_user.cpu().numpy()))
    return neighbours(sessions.items.cpu().numpy(), sessions.start.cpu().numpy(), user, most)


def power_of_two(number: int) -> int:
    """The next one from a number on, 1 at least: a width of tables of what clients know that says little of any."""
    return 1 << max(number - 1, 0).bit_length()


def find_keys(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where wanted keys (C, n) stand among each client's own, (C, N), ascending, and whether they do, both (C, n)."""
    ascending = keys[0] if keys.stride(0) == 0 else keys  # one graph of all sessions would be copied for each
    index = torch.searchsorted(ascending, wanted).clamp_(max=keys.shape[1] - 1)
    return index, keys.gather(1, index) == wanted


def first_positions(items: Tensor, real: Tensor) -> Tensor:
    """The first position at which the item of each position stands, and by which it is named, (C, L); 0 at padding.
    ``items``: (C, L); ``real``: which positions are no padding."""
    same = (items.unsqueeze(1) == items.unsqueeze(2)) & real.unsqueeze(1) & real.unsqueeze(2)
    return same.to(torch.int8).argmax(2)


def step_cells(node: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Where steps from a position to the next lie in a table of two items, flat, (C, L - 1), in both directions; L * L
    for what is no step to another item. ``node``: ``first_positions``."""
    length = node.shape[1]
    before, after = node[:, :-1], node[:, 1:]
    step = real[:, 1:] & real[:, :-1] & (before != after)
    return tuple((a * length + b).where(step, length * length) for a, b in ((before, after), (after, before)))


def table_of_cells(cells: Tensor, values: Tensor, length: int) -> Tensor:
    """A table (C, length, length) with values (C, n) at flat cells (C, n), and 0 elsewhere."""
    table = values.new_zeros(len(cells), length * length + 1).scatter_(1, cells, values)
    return table[:, :-1].unflatten(1, (length, length))


def session_edges(node: Tensor, real: Tensor) -> tuple[Tensor, ...]:
    """The edges of a session's graph by kind, each bool (C, L, L): from the item of a position to another item, named
    by its first position. Returns edges of an item to itself, to what stands after it, before it, and both."""
    length = node.shape[1]
    of_item = node.unsqueeze(2) == torch.arange(length, device=node.device)
    ahead, behind = step_cells(node, real)
    follows, back = (table_of_cells(cells, torch.ones_like(cells, dtype=torch.bool), length)
                     .gather(1, node.unsqueeze(2).expand_as(of_item)) for cells in (ahead, behind))
    return of_item, follows & ~back, back & ~follows, follows & back


def attend_edges(h: Tensor, kinds: tuple[Tensor, ...], vectors: Tensor) -> Tensor:
    """sum_j softmax_j(LeakyReLU(a_r (h_i * h_j))) h_j over edges i, j of kind r: (C, L, d). ``h``: (C, L, d);
    ``kinds``: disjoint edges of each kind, bool (C, L, L); ``vectors``: a_r, (C, kinds, d)."""
    scores = h.new_full(kinds[0].shape, -9e15)
    for kind, edges in enumerate(kinds):
        products = (h * vectors[:, kind:kind + 1]) @ h.transpose(1, 2)
        scores = torch.where(edges, leaky_relu(products, _SLOPE), scores)
    return scores.softmax(2) @ h
