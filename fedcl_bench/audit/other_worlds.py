"""The stream of a run in which somebody has other data, and nothing else differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

import torch
from torch import Tensor

from ..data.streams.other_data import SPLITS, with_other_data, with_other_ends, with_sessions
from ..data.stream import Step, Stream

NEVER = 1 << 30  # a step after the last
Altered = tuple[Stream, Tensor]  # a stream, and from which step on each user's own data are others, shape (users,)


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
