"""The same stream with some of its data replaced.

Two worlds that differ only in what somebody must not know have to look the same to it: that is how federated and
continual constraints are tested, on small streams (``testing/interference.py``) and on a run's (``honesty.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data.files.recbole_files import SPLITS
from ..data.stream import DomainPart, Ragged, Sessions, Step, Stream

NEVER = 1 << 30  # a step after the last
_SEED = 7
Altered = tuple[Stream, Tensor]  # a stream, and from which step on each user's own data are others, shape (users,)


def with_other_data(step: Step, users: Tensor | None = None, splits: tuple[str, ...] = SPLITS, longest: bool = False,
                    domains: Sequence[DomainPart] = ()) -> Step:
    """A step in which some users' items are others, drawn at random, and fewer, at the same times; of the same one of
    the ``domains``. ``users`` is bool of shape (users,); None: all of them.

    Those with the most keep as many, unless with ``longest``, because what is padded is as wide as the longest list,
    and nobody loses its last one.
    """
    rng = np.random.default_rng(_SEED)
    chosen = torch.ones(step.n_users, dtype=torch.bool) if users is None else users
    if step.sessions:
        return _with_other_sessions(step, chosen, splits, rng, domains)
    changed = {}
    for name in splits:
        lists = step.split(name)
        kept = lists.at_most(_lengths(lists.lengths, chosen, 1, longest)).indptr
        items = [_renamed(lists.of(user)[:length], step.n_items, rng) if changes else lists.of(user)
                 for user, (length, changes) in enumerate(zip(kept.diff().tolist(), chosen.tolist()))]
        changed[name] = Ragged(kept, torch.cat(items))
    gone = sum(len(step.split(name).values) - len(lists.values) for name, lists in changed.items())
    return replace(step, interactions=step.interactions - gone, **changed)


def _renamed(items: Tensor, n_items: int, rng: np.random.Generator) -> Tensor:
    """Other items, drawn at random; what is there several times still is."""
    place, different = pd.factorize(items.numpy())
    return torch.from_numpy(rng.choice(n_items, len(different), replace=False)[place])


def _lengths(lengths: Tensor, chosen: Tensor, least: int, longest: bool = False) -> Tensor:
    """Lengths of lists, those of some of them two thirds of what they were."""
    if not len(lengths):
        return lengths
    fewer = torch.minimum(lengths, (lengths * 2 // 3).clamp(min=least))
    return torch.where(chosen & (longest | (lengths < lengths.max())), fewer, lengths)


def _with_other_sessions(step: Step, chosen: Tensor, splits: tuple[str, ...], rng: np.random.Generator,
                         domains: Sequence[DomainPart]) -> Step:
    """Sessions are as many as before, as clients upload their numbers; at least two items remain of each."""
    sessions = dict(step.sessions)
    for name in splits:
        old = sessions[name]
        changes = chosen.repeat_interleave(old.count)
        kept = old.rows().at_most(_lengths(old.lengths, changes, 2))
        items = old.items[kept.values]
        items = torch.where(changes.repeat_interleave(kept.lengths), _others(items, rng, step, domains), items)
        sessions[name] = replace(old, start=kept.indptr, items=items, times=old.times[kept.values])
    return with_sessions(step, sessions)


def with_sessions(step: Step, sessions: Mapping[str, Sessions]) -> Step:
    """A step with other sessions, and the lists that follow from them."""
    return replace(step, sessions=sessions, train=sessions["train"].joined(), valid=sessions["valid"].targets(),
                   test=sessions["test"].targets())


def with_other_ends(step: Step, splits: tuple[str, ...] = SPLITS[1:], domains: Sequence[DomainPart] = ()) -> Step:
    """A step of sessions in which the items to find in validation and test are others of the same domain."""
    rng = np.random.default_rng(_SEED)
    sessions = dict(step.sessions)
    for name in splits:
        old = sessions[name]
        last = old.start[1:] - 1
        sessions[name] = replace(old, items=old.items.index_copy(0, last, _others(old.items[last], rng, step, domains)))
    return with_sessions(step, sessions)


def _others(items: Tensor, rng: np.random.Generator, step: Step, domains: Sequence[DomainPart]) -> Tensor:
    """Other items than these, drawn at random from those of the same domain, or from all where there are none."""
    starts = torch.tensor([*([part.items.start for part in domains] or [0]), step.n_items])
    domain = torch.searchsorted(starts, items, right=True) - 1
    first, size = starts[domain], starts.diff()[domain]
    by = torch.from_numpy(rng.integers(1, step.n_items, len(items)))
    return first + (items - first + 1 + (by - 1) % (size - 1).clamp(min=1)) % size


def with_steps(stream: Stream, steps: dict[int, Step]) -> Stream:
    """The stream with some of its steps replaced."""
    return replace(stream, steps=tuple(steps.get(step.index, step) for step in stream.steps))


@dataclass(frozen=True)
class World:
    """What differs in a world, and what nobody may notice of it."""

    differs: str
    alter: Callable[[Stream, torch.Generator], Altered]  # a stream, given random numbers
    # What its server is told in place of what happens there, by the beginnings of names of ``Tape.exchanged``.
    hears: tuple[str, ...] = ()
    kept: float = 0.9  # the share of a ranking's items that must be the same; below 1 close scores may change places
    # Whether a stream has any of it; ``central``: one client holds all.
    applies: Callable[[Stream, bool], bool] = lambda stream, central: True
    shows: tuple[str, ...] = ()  # statements of docs/constraints.md; a method that gives one up is not tried in it


def _nothing(stream: Stream, random: torch.Generator) -> Altered:
    return stream, torch.full((stream.steps[-1].n_users,), NEVER)


def _each(stream: Stream, change: Callable[[Step], Step]) -> Stream:
    return replace(stream, steps=tuple(map(change, stream.steps)))


def _to_find(split: str) -> Callable[[Stream, torch.Generator], Altered]:
    """Other items to find in a split; of lists, fewer."""
    return lambda stream, random: _nothing(_each(stream, lambda step: (
        with_other_ends(step, (split,), domains=stream.domains) if step.sessions else
        with_other_data(step, splits=(split,), longest=True))), random)


def _fewer_tested(stream: Stream, random: torch.Generator) -> Altered:
    """A third of the users have no test items."""
    tested = torch.randperm(stream.steps[-1].n_users, generator=random) % 3 > 0

    def change(step: Step) -> Step:
        kept = tested[:step.n_users]
        if not step.sessions:
            return replace(step, test=step.test.at_most(step.test.lengths * kept))
        test = step.sessions["test"]
        return with_sessions(step, {**step.sessions, "test": test.part(test.numbers().at_most(test.count * kept))})
    return _nothing(_each(stream, change), random)


def _other_clients(stream: Stream, random: torch.Generator) -> Altered:
    """Half of the clients, and those with the longest lists, have other items, and fewer; or every second domain."""
    since = torch.randint(2, (stream.steps[-1].n_users,), generator=random) * NEVER
    for number, part in enumerate(stream.domains):
        since[part.users.start:part.users.stop] = (number + 1) % 2 * NEVER
    if not stream.domains:
        since[[int(step.train.lengths.argmax()) for step in stream.steps]] = 0
    return _since(stream, since, random, longest=True)


def _later_blocks(stream: Stream, random: torch.Generator) -> Altered:
    """Everybody has other items from some block on, and returns in others."""
    drawn = torch.randint(1, len(stream.steps) + 1, (stream.steps[-1].n_users,), generator=random)
    return _since(stream, drawn, random, longest=False)


def _since(stream: Stream, since: Tensor, random: torch.Generator, longest: bool) -> Altered:
    """From some step on users have as many items as others of them, less a third, and other ones; with ``longest``
    those with the longest lists have fewer, too."""
    def change(step: Step) -> Step:
        altered = since[:step.n_users] <= step.index
        users, order = altered.nonzero().flatten(), torch.arange(step.n_users)
        order[users] = users[torch.randperm(len(users), generator=random)]
        if not step.sessions:
            step = replace(step, **{name: step.split(name).part(order) for name in SPLITS})
        return with_other_data(step, altered, longest=longest, domains=stream.domains)
    return _each(stream, change), since


WORLDS = {
    "as it is": World("nothing", _nothing),
    "again": World("nothing", _nothing, kept=1.0),
    "test items": World("the items to find in tests", _to_find("test"), kept=1.0),
    "test users": World("a third of the users are not tested", _fewer_tested,
                        applies=lambda stream, central: stream.steps[-1].n_users > 1),
    "validation items": World("the items to find in validation", _to_find("valid"), ("validation",), kept=0.0),
    "other clients": World("the items of half of the clients", _other_clients, ("",),
                           applies=lambda stream, central: not central, shows=("F1", "F4")),
    "later blocks": World("everybody's items from some block on", _later_blocks, ("",),
                          applies=lambda stream, central: len(stream.steps) > 1 and not central and not stream.domains,
                          shows=("F1", "F4"))}
