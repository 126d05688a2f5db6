"""The stream of a run in which somebody has other data, and nothing else differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.stream import Ragged, Sessions, Step, Stream

SPLITS = ("train", "valid", "test")
NEVER = 1 << 30  # a step after the last


class Altered(NamedTuple):
    """A stream, and from which step on each user's own data are others, shape (users,)."""

    stream: Stream
    since: Tensor


@dataclass(frozen=True)
class World:
    """What differs in a world, and what nobody may notice of it.

    Attributes:
        differs: in words.
        alter: the stream of a seed.
        hears: what its server is told in the place of what happens in it, by the beginnings of names of ``Tape``.
        lists: whether rankings must be the same.
        applies: to a stream.
    """

    differs: str
    alter: Callable[[Stream, int], Altered]
    hears: tuple[str, ...] = ()
    lists: bool = True
    applies: Callable[[Stream], bool] = lambda stream: True


def _same(stream: Stream, seed: int) -> Altered:
    return Altered(stream, torch.full((stream.steps[-1].n_users,), NEVER))


def _mapped(stream: Stream, change: Callable[[Step, np.random.Generator], Step], seed: int) -> Stream:
    return replace(stream, steps=tuple(change(step, np.random.default_rng([seed, step.index]))
                                       for step in stream.steps))


def _other_items(split: str) -> Callable[[Stream, int], Altered]:
    """Other items to find in a split; of lists, ones that the user has nowhere, and one more of them or one fewer."""
    def change(stream: Stream, step: Step, rng: np.random.Generator) -> Step:
        if step.sessions:
            return _with_other_ends(stream, step, split, rng)
        return replace(step, **{split: _ragged([
            _not_among(_all_items(stream, user), step.n_items, len(items) + (1 if user % 2 or len(items) == 1 else -1),
                       rng) if len(items) else items
            for user, items in enumerate(_per_user(step.split(split)))])})

    return lambda stream, seed: Altered(_mapped(stream, lambda step, rng: change(stream, step, rng), seed),
                                        _same(stream, seed).since)


def _with_other_ends(stream: Stream, step: Step, split: str, rng: np.random.Generator) -> Step:
    """Sessions that end with another item, of the same domain."""
    old = step.sessions[split]
    last = old.start[1:] - 1
    starts = torch.tensor([domain.items.start for domain in stream.domains] + [step.n_items] if stream.domains
                          else [0, step.n_items])
    domain = torch.searchsorted(starts, old.items[last], right=True) - 1
    first, size = starts[domain], starts[domain + 1] - starts[domain]
    by = 1 + torch.from_numpy(rng.integers(0, 1 << 30, len(last))) % (size - 1).clamp(min=1)
    drawn = first + (old.items[last] - first + by) % size
    sessions = replace(old, items=old.items.index_copy(0, last, drawn))
    return replace(step, sessions={**step.sessions, split: sessions}, **{split: replace(step.split(split),
                                                                                       values=drawn)})


def _fewer_tested(stream: Stream, seed: int) -> Altered:
    """A third of the users have no test items."""
    keep = torch.from_numpy(np.random.default_rng(seed).permutation(stream.steps[-1].n_users) % 3 > 0)

    def change(step: Step, rng: np.random.Generator) -> Step:
        mine = keep[:step.n_users]
        empty = step.test.values[:0]
        test = _ragged([items if kept else empty for items, kept in zip(_per_user(step.test), mine)])
        if not step.sessions:
            return replace(step, test=test)
        old, count = step.sessions["test"], step.sessions["test"].count
        some = mine.repeat_interleave(count)
        chosen = Ragged(old.start, old.items).part(some.nonzero().flatten())
        rows = some.repeat_interleave(old.lengths)
        sessions = Sessions(_starts(count * mine), chosen.indptr, chosen.values, old.times[rows])
        return replace(step, test=test, sessions={**step.sessions, "test": sessions})

    return Altered(_mapped(stream, change, seed), _same(stream, seed).since)


def _other_clients(stream: Stream, seed: int) -> Altered:
    """Half of the clients, and those with the longest lists, have other items."""
    since = torch.full((stream.steps[-1].n_users,), NEVER)
    since[torch.from_numpy(np.random.default_rng(seed).permutation(len(since)) % 2 == 0)] = 0
    since[[int(step.train.lengths.argmax()) for step in stream.steps]] = 0
    return _since(stream, since, seed)


def _later_blocks(stream: Stream, seed: int) -> Altered:
    """Everybody has other items from some block on, which comes back in others, too."""
    drawn = np.random.default_rng(seed).integers(1, len(stream.steps) + 1, stream.steps[-1].n_users)
    return _since(stream, torch.from_numpy(drawn), seed)


def _since(stream: Stream, since: Tensor, seed: int) -> Altered:
    """From a step on, each user has random items, about two thirds as many as another of those users."""
    def change(step: Step, rng: np.random.Generator) -> Step:
        users = (since[:step.n_users] <= step.index).nonzero().flatten().numpy()
        if step.sessions:
            return _with_other_sessions(step, users, rng)
        changed = {}
        order = rng.permutation(users)
        for split in SPLITS:
            lists = _per_user(step.split(split))
            sizes = {int(user): -(-2 * len(lists[other]) // 3) for user, other in zip(users, order)}
            for user, size in sizes.items():
                lists[user] = torch.from_numpy(rng.choice(step.n_items, size, replace=False))
            changed[split] = _ragged(lists)
        return replace(step, **changed)

    return Altered(_mapped(stream, change, seed), since)


def _with_other_sessions(step: Step, users: np.ndarray, rng: np.random.Generator) -> Step:
    """Some users' sessions have other items, and long ones fewer."""
    sessions, chosen = dict(step.sessions), torch.zeros(step.n_users, dtype=torch.bool)
    chosen[users] = True
    for split in SPLITS:
        old = sessions[split]
        altered = chosen.repeat_interleave(old.count)
        lengths = torch.where(altered, (old.lengths * 2 // 3).clamp(min=2), old.lengths)
        start = _starts(lengths)
        rows = torch.arange(int(start[-1])) + (old.start[:-1] - start[:-1]).repeat_interleave(lengths)
        drawn = torch.from_numpy(rng.integers(0, step.n_items, len(rows)))
        items = torch.where(altered.repeat_interleave(lengths), drawn, old.items[rows])
        sessions[split] = Sessions(old.of_user, start, items, old.times[rows])
    return Step.of_sessions(step.index, (step.n_users, step.n_items), (step.old_users, step.old_items),
                            step.interactions, sessions)


def _per_user(lists: Ragged) -> list[Tensor]:
    return list(lists.values.split(lists.lengths.tolist()))


def _ragged(lists: list[Tensor]) -> Ragged:
    return Ragged(_starts(torch.tensor([len(items) for items in lists])), torch.cat(lists))


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _all_items(stream: Stream, user: int) -> np.ndarray:
    """A user's items in any split of any step."""
    return np.concatenate([step.split(split).of(user).numpy() for step in stream.steps if user < step.n_users
                           for split in SPLITS])


def _not_among(known: np.ndarray, n_items: int, count: int, rng: np.random.Generator) -> Tensor:
    """So many random items that are not known, or as many as there are; one at least."""
    drawn = rng.choice(n_items, min(n_items, count + len(known)), replace=False)
    return torch.from_numpy(drawn[np.isin(drawn, known, invert=True) | (np.arange(len(drawn)) + 1 == n_items)][:count])


def _of_one_user_each(stream: Stream) -> bool:
    return not stream.domains and stream.steps[-1].n_users > 1


WORLDS = {
    "as it is": World("nothing", _same),
    "again": World("nothing, in another process", _same),
    "test items": World("the items to find in tests", _other_items("test")),
    "test users": World("a third of the users have nothing to be tested on", _fewer_tested,
                        applies=lambda stream: stream.steps[-1].n_users > 1),
    "validation items": World("the items to find in validation", _other_items("valid"), ("validation",), lists=False),
    "other clients": World("the items of half of the clients; the server hears what it heard", _other_clients, ("",),
                           applies=_of_one_user_each),
    "later blocks": World("everybody's items from some block on; the server hears what it heard", _later_blocks, ("",),
                          applies=lambda stream: _of_one_user_each(stream) and len(stream.steps) > 1)}
