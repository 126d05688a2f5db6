"""The same step of a stream with some of its data replaced.

Two worlds that differ only in what somebody must not know have to look the same to it: that is how federated and
continual constraints are tested, on small streams (``testing/interference.py``) and on a run's (``audit/honesty.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..files.recbole_files import SPLITS
from ..stream import DomainPart, Ragged, Sessions, Step, Stream

_SEED = 7


def with_other_data(step: Step, users: Tensor | None = None, splits: tuple[str, ...] = SPLITS, longest: bool = False,
                    domains: Sequence[DomainPart] = ()) -> Step:
    """A step in which some users' items are others, drawn at random, and fewer, at the same times; of the same one of
    the ``domains``. ``users`` is bool of shape (users,); None: all of them.

    Those with the most keep as many, unless with ``longest``, because what is padded is as wide as the longest list,
    and nobody loses its last one."""
    rng = np.random.default_rng(_SEED)
    chosen = torch.ones(step.n_users, dtype=torch.bool) if users is None else users
    if step.sessions:
        return _with_other_sessions(step, chosen, splits, rng, domains)
    changed = {}
    for name in splits:
        lists = step.split(name)
        kept = lists.at_most(_lengths(lists.lengths, chosen, 1, longest)).indptr
        items = [torch.from_numpy(rng.choice(step.n_items, length, replace=False)) if changes else lists.of(user)
                 for user, (length, changes) in enumerate(zip(kept.diff().tolist(), chosen.tolist()))]
        changed[name] = Ragged(kept, torch.cat(items))
    gone = sum(len(step.split(name).values) - len(lists.values) for name, lists in changed.items())
    return replace(step, interactions=step.interactions - gone, **changed)


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


def with_other_ends(step: Step, splits: tuple[str, ...] = SPLITS[1:],
                    domains: Sequence[DomainPart] = ()) -> Step:
    """A step of sessions in which the last items of validation and test sessions, which are to be found, are others of
    the same domain."""
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
