"""Several datasets in one run, each of which is a domain with users and items of its own (FFMSR and its baselines).

Users are matched nowhere, also where two domains have the same id. In each domain a user's last interaction is for
testing and the one before it for validation; every beginning of what comes before them is a training sample.

With ``domain_blocks`` the interactions of each domain are cut in time, and the same is done in each of these blocks:
what comes before it is known, and only what is in it is trained on, validated and tested.
"""

from __future__ import annotations

import itertools
from typing import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..core.errors import UserError
from .recbole_files import SPLITS, Interactions, core
from .settings import StreamSettings
from .stream import DomainPart, Ragged, Sessions, Step, Stream, block_of_rows, places
from .tie_order import time_order

_TESTED = 3  # interactions of a user of whom something is validated and tested, two of them in the block
_HELD_OUT = {"train": 2, "valid": 1, "test": 0}  # of a user's last interactions, so many are not in a split's history


def build_domains(parts: Sequence[tuple[str, Interactions]], settings: StreamSettings) -> Stream:
    """A step per block of time. The users and items of a domain are numbered after those of the ones before, in the
    order of ``parts``, by first appearance in the file.

    Rows of equal time stand as ``tie_order`` says. A user with fewer than 3 interactions, or with
    one in the block, trains alone. Every item of a domain can be found, also one that nobody trains on.

    Args:
        parts: name and rows of each dataset.

    Raises:
        UserError: if a pilot leaves nothing of a domain, or nobody of one can be tested or trained on.
    """
    if settings.pilot_users:
        parts = [(name, _pilot(name, data, settings)) for name, data in parts]
    of_domains = [_steps(name, data, settings) for name, data in parts]
    domains: list[DomainPart] = []
    for (name, _), steps in zip(parts, of_domains):
        users, items = (domains[-1].users.stop, domains[-1].items.stop) if domains else (0, 0)
        domains.append(DomainPart(name, range(users, users + steps[0].n_users), range(items, items + steps[0].n_items),
                                  tuple(step.interactions for step in steps)))
    tokens = ([np.char.add(f"{name}:", kind.astype(str)) for kind in (data.user_tokens, data.item_tokens)]
              for name, data in parts)
    return Stream(tuple(_together(steps) for steps in zip(*of_domains)), *map(np.concatenate, zip(*tokens)),
                  domains=tuple(domains))


def _together(domains: Sequence[Step]) -> Step:
    """One step of all domains, given each one's with users and items numbered from 0."""
    def before(sizes: Iterable[int]) -> list[int]:
        return [0, *itertools.accumulate(sizes)][:-1]

    def ends(parts: Sequence[Tensor]) -> Tensor:  # of lists that follow on each other
        shifts = before(int(part[-1]) for part in parts)
        return torch.cat([parts[0][:1], *(part[1:] + shift for part, shift in zip(parts, shifts))])

    def ids(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part + first for part, first in zip(parts, before(step.n_items for step in domains))])

    lists, histories = [], {}
    for split in SPLITS:
        parts = [step.split(split) for step in domains]
        lists.append(Ragged(ends([part.indptr for part in parts]), ids([part.values for part in parts])))
    for split in domains[0].sessions:
        each = [step.sessions[split] for step in domains]
        histories[split] = Sessions(ends([part.of_user for part in each]), ends([part.start for part in each]),
                                    ids([part.items for part in each]), torch.cat([part.times for part in each]))
    index, users, items, rows = domains[0].index, *map(sum, zip(*(
        (step.n_users, step.n_items, step.interactions) for step in domains)))
    old = (users, items) if index else (0, 0)  # all are known from the start
    return Step(index, users, items, *old, rows, *lists, histories)


def _pilot(name: str, data: Interactions, settings: StreamSettings) -> Interactions:
    """Users drawn by the domain's name and ``split_seed``, and of their interactions the core."""
    count = len(data.user_tokens)
    keys = rng.row_keys(rng.key(settings.split_seed, f"pilot {name}"), torch.arange(count))
    chosen = rng.sort_keys(keys).argsort()[:settings.pilot_users].numpy()
    rows = core(data.user, data.item, settings.pilot_core, np.flatnonzero(np.isin(data.user, chosen)))
    if not len(rows):
        raise UserError(f"domain '{name}': no item is left of a pilot of {min(settings.pilot_users, count):,} users in "
                        f"which users and items have {settings.pilot_core} interactions; raise it with --set "
                        f"pilot_users=N, or lower the other with --set pilot_core=N.")
    return data.of_rows(rows)


def _steps(name: str, data: Interactions, settings: StreamSettings) -> list[Step]:
    """One domain's steps, with users and items numbered from 0."""
    order = time_order(data.time, settings.tie_order)
    block = np.empty(len(order), np.int64)
    block[order] = block_of_rows(len(block), settings.domain_blocks, settings.base_share)
    order = order[np.argsort(data.user[order], kind="stable")]
    return [_step(name, data, settings, order[block[order] <= now], block, now)
            for now in range(settings.domain_blocks)]


def _step(name: str, data: Interactions, settings: StreamSettings, order: np.ndarray, block: np.ndarray, now: int
          ) -> Step:
    """One domain's step of a block.

    Args:
        order: the rows up to it, by user and in time order. block: of every row.
    """
    user, new = data.user[order], block[order] == now
    count, of_block = (np.bincount(users, minlength=len(data.user_tokens)) for users in (user, user[new]))
    later = count[user] - 1 - places(user)
    tested = ((count >= _TESTED) & (of_block >= _TESTED - 1))[user]
    where, of_these = f"domain '{name}'", ""
    if settings.domain_blocks > 1:
        where, of_these = f"{where}, block {now}", ", two of them in the block"
    if not tested.any():
        raise UserError(f"{where}: no user has {_TESTED} interactions{of_these}, of which the last is for testing and "
                        f"the one before it for validation; found at most {of_block.max()}.")
    chosen = {split: (tested & (later >= held_out)) | (~tested if split == "train" else False)
              for split, held_out in _HELD_OUT.items()} | ({"known": ~new} if now else {})
    sessions = {split: _sessions(order[rows], user[rows], data) for split, rows in chosen.items()}
    step = Step.of_sessions(now, (len(count), len(data.item_tokens)), (0, 0), int(new.sum()), sessions)
    if not len(step.samples().end):
        raise UserError(f"{where}: nobody has 2 interactions to train on beside those that are held out.")
    return step


def _sessions(rows: np.ndarray, user: np.ndarray, data: Interactions) -> Sessions:
    """The chosen rows of each user, which stand together, as one session."""
    users, count = np.unique(user, return_counts=True)
    return Sessions.laid_out(users, count, data.item[rows], data.time[rows], len(data.user_tokens))


def statistics(stream: Stream) -> dict[str, list[float]]:
    """Per domain, step by step: users, items, interactions and their mean per user (FFMSR, Table 2), training samples,
    and users who are validated and tested."""
    counts: dict[str, list[float]] = {name: [] for name in ("users", "items", "interactions", "average_length",
                                                            "samples", "valid", "test")}
    for step in stream.units():
        values = (step.n_users, step.n_items, step.interactions, round(step.interactions / step.n_users, 2),
                  len(step.samples().end), len(step.valid.values), len(step.test.values))
        for name, value in zip(counts, values):
            counts[name].append(value)
    return counts
