"""Several datasets in one run, each of which is a domain with users and items of its own (FFMSR and its baselines).

Users are matched nowhere, also where two domains have the same id. In each domain a user's last interaction is for
testing and the one before it for validation; every beginning of what comes before them is a training sample.

With ``domain_blocks`` the interactions of each domain are cut in time, and the same is done in one of these blocks:
what comes before it is known, and only what is in it is trained on, validated and tested.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
import torch

from .. import rng
from ..core.errors import UserError
from .recbole_files import Interactions, core
from .settings import StreamSettings
from .stream import Sessions, Step, Stream, block_of_rows, places
from .tie_order import time_order

_TESTED = 3  # interactions of a user of whom something is validated and tested, two of them in the block
_HELD_OUT = {"train": 2, "valid": 1, "test": 0}  # of a user's last interactions, so many are not in a split's history


def build_domains(parts: Sequence[tuple[str, Interactions]], settings: StreamSettings) -> Stream:
    """A step per domain, in the order of ``parts``; its users and items are numbered after those of the ones before,
    by first appearance in the file.

    Rows of equal time stand as ``tie_order`` says. A user with fewer than 3 interactions, or with
    one in the block, trains alone. Every item of a domain can be found, also one that nobody trains on.

    Args:
        parts: name and rows of each dataset.

    Raises:
        UserError: if a pilot leaves nothing of a domain, or nobody of one can be tested or trained on.
    """
    steps: list[Step] = []
    users, items = [], []
    for name, data in parts:
        data = _pilot(name, data, settings) if settings.pilot_users else data
        before = (steps[-1].n_users, steps[-1].n_items) if steps else (0, 0)
        steps.append(_step(name, data, settings, len(steps), *before))
        users.append(np.char.add(f"{name}:", data.user_tokens.astype(str)))
        items.append(np.char.add(f"{name}:", data.item_tokens.astype(str)))
    return Stream(tuple(steps), np.concatenate(users), np.concatenate(items), domains=tuple(name for name, _ in parts))


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


def _step(name: str, data: Interactions, settings: StreamSettings, index: int, old_users: int, old_items: int) -> Step:
    """One domain's step after so many users and items of others."""
    order, now = time_order(data.time, settings.tie_order), settings.domain_block
    block = np.empty(len(order), np.int64)
    block[order] = block_of_rows(len(block), settings.domain_blocks, settings.base_share)
    order = order[np.argsort(data.user[order], kind="stable")]
    order = order[block[order] <= now]
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
    n_users, n_items = old_users + len(count), old_items + len(data.item_tokens)
    sessions = {split: _sessions(order[rows], user[rows], data, old_users, old_items) for split, rows in chosen.items()}
    step = Step.of_sessions(index, (n_users, n_items), (old_users, old_items), int(new.sum()), sessions)
    if not len(step.samples().end):
        raise UserError(f"{where}: nobody has 2 interactions to train on beside those that are held out.")
    return step


def _sessions(rows: np.ndarray, user: np.ndarray, data: Interactions, old_users: int, old_items: int) -> Sessions:
    """The chosen rows of each user, which stand together, as one session."""
    users, count = np.unique(user, return_counts=True)
    return Sessions.laid_out(old_users + users, count, old_items + data.item[rows], data.time[rows],
                             old_users + len(data.user_tokens))


def statistics(stream: Stream) -> dict[str, list[float]]:
    """Per domain: users, items, interactions and their mean per user (FFMSR, Table 2), training samples, and users who
    are validated and tested."""
    counts: dict[str, list[float]] = {name: [] for name in ("users", "items", "interactions", "average_length",
                                                            "samples", "valid", "test")}
    for step in stream.steps:
        users = step.n_users - step.old_users
        values = (users, step.n_items - step.old_items, step.interactions, round(step.interactions / users, 2),
                  len(step.samples().end), len(step.valid.values), len(step.test.values))
        for name, value in zip(counts, values):
            counts[name].append(value)
    return counts
