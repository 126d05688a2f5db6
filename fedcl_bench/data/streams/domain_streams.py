"""Several datasets in one run, each of which is a domain with users and items of its own (FFMSR and its baselines).

Users are matched nowhere, also where two domains have the same id. In each domain a user's last interaction is for
testing and the one before it for validation; every beginning of what comes before them is a training sample.

With ``domain_blocks`` the interactions of each domain are cut in time, and the same is done in each of these blocks:
what comes before it is known, and samples, validation and test end in it. FedDCSR, RecGURU and CCDR, and what BERT4Rec
and S3Rec do first, train on all of a history, where earlier blocks' tests are.
"""

from __future__ import annotations

import itertools
from typing import Sequence

import numpy as np
import torch

from ... import rng
from ...core.errors import UserError
from ..files.recbole_files import Interactions, core
from ..settings import StreamSettings
from ..stream import DomainPart, Sessions, Step, Stream, block_of_rows, places
from .tie_order import time_order

_TESTED = 3  # interactions of a user of whom something is validated and tested, two of them in the block
_HELD_OUT = {"train": 2, "valid": 1, "test": 0}  # of a user's last interactions, so many are not in a split's history


def build_domains(parts: Sequence[tuple[str, Interactions]], settings: StreamSettings) -> Stream:
    """A step per block of time. The users and items of a domain are numbered after those of the ones before, in the
    order of ``parts``, by first appearance in the file.

    Rows of equal time stand as ``tie_order`` says. A user with fewer than 3 interactions, or with one in the block,
    trains alone. Every item of a domain can be found, also one that nobody trains on. Raises UserError if a pilot
    leaves nothing of a domain, or nobody of one can be tested or trained on.
    """
    if settings.pilot_users:
        parts = [(name, _pilot(name, data, settings)) for name, data in parts]
    domains: list[DomainPart] = []
    orders, blocks, rows, users, items = [], [], 0, 0, 0
    for name, data in parts:
        order, block = time_order(data.time, settings.tie_order), np.empty(len(data.time), np.int64)
        block[order] = block_of_rows(len(block), settings.domain_blocks, settings.base_share)
        orders.append(rows + order[np.argsort(data.user[order], kind="stable")])
        blocks.append(block)
        domains.append(DomainPart(name, range(users, users + len(data.user_tokens)),
                                  range(items, items + len(data.item_tokens)),
                                  tuple(np.bincount(block, minlength=settings.domain_blocks).tolist())))
        rows, users, items = rows + len(block), domains[-1].users.stop, domains[-1].items.stop
    joined = Interactions(*map(np.concatenate, zip(*(
        (data.user.astype(np.int64) + domain.users.start, data.item.astype(np.int64) + domain.items.start, data.time,
         *(np.char.add(f"{name}:", tokens.astype(str)) for tokens in (data.user_tokens, data.item_tokens)))
        for (name, data), domain in zip(parts, domains)))))
    order, block = np.concatenate(orders), np.concatenate(blocks)
    steps = [_step(joined, order[block[order] <= now], block, now) for now in range(settings.domain_blocks)]
    for domain, step in itertools.product(domains, steps):
        of_block = np.bincount(joined.user[block == step.index], minlength=users)[domain.users]
        _require_samples(domain, domain.of(step), int(of_block.max()), settings)
    return Stream(tuple(steps), joined.user_tokens, joined.item_tokens, domains=tuple(domains))


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


def _step(data: Interactions, order: np.ndarray, block: np.ndarray, now: int) -> Step:
    """A block's step, given all domains' rows, the order by user and time up to the block, and each row's block."""
    user, new = data.user[order], block[order] == now
    count, of_block = (np.bincount(users, minlength=len(data.user_tokens)) for users in (user, user[new]))
    later = count[user] - 1 - places(user)
    tested = ((count >= _TESTED) & (of_block >= _TESTED - 1))[user]
    chosen = {split: (tested & (later >= held_out)) | (~tested if split == "train" else False)
              for split, held_out in _HELD_OUT.items()} | ({"known": ~new} if now else {})
    sessions = {split: _sessions(order[rows], user[rows], data) for split, rows in chosen.items()}
    size = len(count), len(data.item_tokens)
    old = size if now else (0, 0)  # all are known from the start
    return Step.of_sessions(now, size, old, int(new.sum()), sessions)


def _require_samples(domain: DomainPart, step: Step, most: int, settings: StreamSettings) -> None:
    """Raise UserError if nobody of a domain can be tested or trained on in its step of a block, in which a user has at
    most so many interactions."""
    where, of_these = f"domain '{domain.name}'", ""
    if settings.domain_blocks > 1:
        where, of_these = f"{where}, block {step.index}", ", two of them in the block"
    if not len(step.test.values):
        raise UserError(f"{where}: no user has {_TESTED} interactions{of_these}, of which the last is for testing and "
                        f"the one before it for validation; found at most {most}.")
    if not len(step.samples().end):
        raise UserError(f"{where}: nobody has 2 interactions to train on beside those that are held out.")


def _sessions(rows: np.ndarray, user: np.ndarray, data: Interactions) -> Sessions:
    """The chosen rows of each user, which stand together, as one session."""
    users, count = np.unique(user, return_counts=True)
    return Sessions.laid_out(users, count, data.item[rows], data.time[rows], len(data.user_tokens))


def statistics(stream: Stream) -> dict[str, list[float]]:
    """Per domain, step by step: the columns of FFMSR's Table 2, samples, and users who are validated and tested."""
    rows = [(step.n_users, step.n_items, step.interactions, round(step.interactions / step.n_users, 2),
             len(step.samples().end), len(step.valid.values), len(step.test.values)) for step in stream.units()]
    names = ("users", "items", "interactions", "average_length", "samples", "valid", "test")
    return {name: list(values) for name, values in zip(names, zip(*rows))}
