"""Synthetic interactions of any size: skewed, learnable, drifting.

What is in them, for a log of N users, M items, K interactions per user and B blocks:

- How many interactions a user has is log-normal with mean K, rounded, at least 1 and at most M / 2; or any number
  between two with equal probability.
- Popularity is Zipf: the item of rank r is proposed with a probability in proportion to r^-exponent. Which item has
  which rank follows a score per item.
- A user's taste u and an item's properties v are vectors of f standard normal numbers; a proposed item is taken with
  probability sigmoid(taste (u.v / sqrt(f) - 1)), else another one is proposed. No user has an item twice, unless
  repeats are asked for.
- From one block to the next the items' popularity scores and the users' tastes move:
  x <- sqrt(1 - drift^2) x + drift N(0, 1), so that neither gets larger or smaller.
- Half of the users are there from the beginning, the others begin at a random time, and all stay. Times are scaled so
  that the whole stream has equally many interactions at any time; blocks by count are then those of the drift.

Every number is keyed by user or item (see ``rng``), so rows do not depend on how many users are made at once.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv

from ... import rng
from ...core.errors import UserError
from ...core.files import folder_beside, free_bytes, made_folder
from ...core.parallel import in_order, workers
from ..settings import StreamSettings
from ..stream import Ragged, Step

FACTORS = 4  # length f of the vectors of tastes and properties
LATE = 0.5  # share of the users who are not there from the beginning
START, SPAN = 1577836800, 366 * 86400  # the year 2020, in seconds since 1970
ROWS_AT_ONCE = 1 << 17
_TASTEFUL = 100  # proposals for a place before anything that the user does not have yet is taken
_ROW = np.dtype([("user", np.int64), ("item", np.int64), ("second", np.int64)])


@dataclass(frozen=True)
class SyntheticLog:
    """What is to be made; see the module's description."""

    users: int
    items: int  # at most; an item that nobody takes is in no row
    per_user: float = 50.0  # interactions per user, the mean of what the log-normal distribution gives
    blocks: int = StreamSettings.blocks  # when popularity and tastes move; as the stream's settings of these names
    base_share: float = StreamSettings.base_share
    exponent: float = 1.0  # of Zipf's law
    activity: float = 1.0  # standard deviation of the logarithm of a user's interactions; 0: all have equally many
    taste: float = 3.0  # how much vectors decide; 0: nothing but popularity does
    drift: float = 0.3  # in [0, 1]; 0: nothing moves, 1: all is new in every block
    seed: int = 0
    counts: tuple[int, ...] = ()  # fewest and most interactions of a user, all numbers alike; empty: log-normal
    repeats: bool = False  # a user may have an item several times

    def check(self) -> None:
        """Raise UserError for numbers that no stream can have, naming the option of `data synth`."""
        for name, low, high, text in (
                ("users", 1, 10**8, "1 to 100,000,000"), ("items", 2, 10**8, "2 to 100,000,000"),
                ("blocks", 1, 1000, "1 to 1,000"), ("exponent", 0.0, 10.0, "0 to 10"),
                ("activity", 0.0, 5.0, "0 to 5"), ("taste", 0.0, 100.0, "0 to 100"), ("drift", 0.0, 1.0, "0 to 1"),
                ("base_share", 1e-9, 1.0, "above 0, at most 1")):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"--{name.replace('_', '-')}: found {getattr(self, name):g}, accepted: {text}.")
        if self.blocks > 1 and self.base_share == 1.0:
            raise UserError("--base-share: found 1, accepted: below 1, so that no block is empty; or --blocks 1.")
        if self.items * self.blocks > 10**9:
            raise UserError(f"--items, --blocks: found {self.items:,} items in {self.blocks:,} blocks, accepted: at "
                            f"most 1,000,000,000 of both multiplied.")
        if self.counts and not 1 <= self.counts[0] <= self.counts[1] <= self.items // 2:
            raise UserError(f"--counts: found {'-'.join(map(str, self.counts))}, accepted: LOW-HIGH from 1 to "
                            f"{self.items // 2:,}, half of the items.")
        if not 1.0 <= self.per_user <= self.items / 2:
            raise UserError(f"--interactions-per-user: found {self.per_user:g}, accepted: 1 to {self.items / 2:g}, "
                            f"half of the {self.items:,} items.")


@dataclass(frozen=True)
class SyntheticItems:
    """What all users choose from."""

    cumulative: torch.Tensor  # probability of a rank up to each, float64, shape (items,)
    ranked: torch.Tensor  # the item of each rank in each block, int64, shape (blocks, items)
    properties: torch.Tensor  # float32, shape (items, FACTORS)


def catalogue(log: SyntheticLog) -> SyntheticItems:
    """The items of a log: memory grows with items x blocks."""
    weight = torch.arange(1, log.items + 1, dtype=torch.float64) ** -log.exponent
    score = _drifting(rng.normal_rows(log.seed, "synth popularity", 0, log.items, log.blocks).T, log.drift)
    properties = rng.normal_rows(log.seed, "synth properties", 0, log.items, FACTORS).float()
    return SyntheticItems(weight.cumsum(0) / weight.sum(), score.argsort(dim=1, descending=True, stable=True),
                          properties)


def _drifting(noise: torch.Tensor, drift: float) -> torch.Tensor:
    """The process whose changes are ``noise``, shape (blocks, ...): standard normal in every block."""
    states = [noise[0]]
    for change in noise[1:]:
        states.append(math.sqrt(1.0 - drift ** 2) * states[-1] + drift * change)
    return torch.stack(states)


def activity(log: SyntheticLog, users: range) -> torch.Tensor:
    """How many interactions some users have, int64, shape (n,)."""
    if log.counts:
        low, high = log.counts
        keys = rng.client_keys(rng.key(log.seed, "synth counts"), torch.arange(users.start, users.stop))
        return low + rng.integers(rng.bits(keys, torch.zeros_like(keys)), high - low + 1)
    z = rng.normal_rows(log.seed, "synth activity", users.start, len(users), 1)[:, 0]
    mean = log.per_user * torch.exp(log.activity * z - log.activity ** 2 / 2.0)
    return mean.round().long().clamp(1, max(1, log.items // 2))


def interactions(log: SyntheticLog, items: SyntheticItems, users: range) -> np.ndarray:
    """All of some users, by user and time, whatever other users do: ``user``, ``item`` and ``second``, int64."""
    count = activity(log, users)
    of_row = torch.repeat_interleave(torch.arange(len(users)), count)
    position = torch.arange(len(of_row)) - (count.cumsum(0) - count)[of_row]
    ids = torch.arange(users.start, users.stop)
    at = _times(log, ids, of_row, position)
    ends = torch.cat([torch.tensor([log.base_share], dtype=torch.float64),
                      torch.full((log.blocks,), (1.0 - log.base_share) / max(log.blocks - 1, 1),
                                 dtype=torch.float64)]).cumsum(0)[:log.blocks - 1]
    block = torch.searchsorted(ends, at, right=True)
    noise = rng.normal_rows(log.seed, "synth taste", users.start, len(users), log.blocks * FACTORS)
    tastes = _drifting(noise.float().view(-1, log.blocks, FACTORS).transpose(0, 1), log.drift)
    item = _choices(log, items, ids, of_row, position, block, tastes)
    rows = np.empty(len(of_row), dtype=_ROW)
    rows["user"], rows["item"], rows["second"] = ids[of_row], item, START + (at * SPAN).long()
    return rows[np.lexsort((rows["second"], rows["user"]))]


def _times(log: SyntheticLog, ids: torch.Tensor, of_row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The time of each row on [0, 1), float64: uniform over all users' rows together.

    A user that begins at a has uniform times on [a, 1). With a = 0 for a share 1 - L of the users and uniform for the
    others, a time is below t with probability t + L (1 - t) ln(1 - t): that is what a time is replaced by.
    """
    pattern = rng.bits(rng.client_keys(rng.key(log.seed, "synth begin"), ids)[:, None], torch.arange(2))
    late, begin = rng.uniform(pattern).unbind(1)
    begin = torch.where(late < LATE, begin, 0.0)[of_row]
    keys = rng.client_keys(rng.key(log.seed, "synth time"), ids)
    t = begin + (1.0 - begin) * rng.uniform(rng.bits(keys[of_row], position))
    left = 1.0 - t
    return (t + LATE * torch.special.xlogy(left, left)).clamp_(0.0, math.nextafter(1.0, 0.0))


def _choices(log: SyntheticLog, items: SyntheticItems, ids: torch.Tensor, of_row: torch.Tensor,
             position: torch.Tensor, block: torch.Tensor, tastes: torch.Tensor) -> torch.Tensor:
    """The item of each row: proposals are made for all rows at once until each has one.

    Where several rows of a user would take one item, the one that comes first among the user's rows gets it.
    """
    chosen = torch.empty(len(of_row), dtype=torch.int64)
    taken = np.empty(0, dtype=np.int64)  # user x items + item, ascending
    open_, attempt = torch.arange(len(of_row)), 0
    while len(open_):
        user, when = of_row[open_], block[open_]
        keys = rng.client_keys(rng.key(log.seed, "synth proposal", attempt), ids)[user]
        first, coin = (rng.bits(keys, 2 * position[open_] + side) for side in (0, 1))
        if attempt < _TASTEFUL:
            rank = torch.searchsorted(items.cumulative, rng.uniform(first)).clamp_(max=log.items - 1)
            item = items.ranked[when, rank]
            fit = (tastes[when, user] * items.properties[item]).sum(1).double() / math.sqrt(FACTORS)
            willing = rng.uniform(coin) < torch.sigmoid(log.taste * (fit - 1.0))
        else:  # a user who has nearly all that is popular and to its taste
            item = rng.integers(first, log.items)
            willing = torch.ones_like(item, dtype=torch.bool)
        pair = (user * log.items + item).numpy()
        candidates = np.flatnonzero(willing.numpy())
        if log.repeats:
            filled = candidates
        else:
            filled, taken = _untaken(pair, candidates, taken)
        chosen[open_[filled]] = item[filled]
        rest = np.ones(len(open_), dtype=bool)
        rest[filled] = False
        open_, attempt = open_[torch.from_numpy(rest)], attempt + 1
    return chosen


def _untaken(pair: np.ndarray, candidates: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the candidates whose pair is not taken, each pair once; and what is taken then, ascending."""
    if len(taken):
        nearest = np.minimum(np.searchsorted(taken, pair[candidates]), len(taken) - 1)
        candidates = candidates[taken[nearest] != pair[candidates]]
    new, lowest = np.unique(pair[candidates], return_index=True)  # rows are in order of user and position
    return candidates[lowest], np.sort(np.concatenate([taken, new]), kind="stable")  # merges the two


def all_interactions(log: SyntheticLog, rows_at_once: int = ROWS_AT_ONCE) -> Iterator[tuple[range, np.ndarray]]:
    """All users in ascending order, in groups of about so many interactions, and theirs."""
    items = catalogue(log)
    size = max(1, int(rows_at_once / log.per_user))
    groups = [range(start, min(start + size, log.users)) for start in range(0, log.users, size)]
    with workers():
        yield from zip(groups, in_order(partial(interactions, log, items), groups, torch.device("cpu")))


def step_of(log: SyntheticLog) -> Step:
    """All interactions of a log as the training data of one step, in memory (16 bytes each while it is made)."""
    lengths, values = [], []
    for users, rows in all_interactions(log):
        lengths.append(np.bincount(rows["user"] - users.start, minlength=len(users)))
        values.append(rows["item"])
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    train = Ragged(torch.from_numpy(indptr), torch.from_numpy(np.concatenate(values)))
    none = Ragged(torch.zeros_like(train.indptr), train.values[:0])
    return Step(0, log.users, log.items, 0, 0, len(train.values), train, none, none)


def _require_room(log: SyntheticLog, path: Path) -> None:
    """Raise UserError if a log's file, and its parts while it is made, are larger than what the disk has left."""
    needed = int(log.users * log.per_user * (24 + 20))  # bytes of a row in the parts, and about those in the file
    free = free_bytes(path)
    if needed > free:
        raise UserError(f"{path}: would need about {needed / 1e9:,.0f} GB, {free / 1e9:,.0f} GB are free; make fewer "
                        f"--users, at most {log.users * free // needed:,}, or choose another disk with --out DIR.")


def write(log: SyntheticLog, path: Path, rows_at_once: int = ROWS_AT_ONCE,
          done: Callable[[int], None] = lambda rows: None) -> tuple[int, int]:
    """Write a log as a RecBole atomic file, rows in order of time, then user, whole or not at all; gives its rows, and
    how many different items are in them. Raises UserError if it cannot be written, or there is not enough room for it.

    Memory is bounded by ``rows_at_once``, which changes no byte of the file: rows are kept on disk by parts of the time
    (24 bytes each, beside the file, until it is whole), and each part is sorted on its own. ``done`` is called with
    numbers of rows: each row counts once when it is made and once when it is written.
    """
    log.check()
    _require_room(log, path)
    parts = max(1, math.ceil(log.users * log.per_user / (8 * rows_at_once)))
    total, seen = 0, np.zeros(log.items, dtype=bool)
    try:
        with made_folder(path.parent), folder_beside(path) as folder:
            for _, rows in all_interactions(log, rows_at_once):
                _sort_in(rows, folder, parts)
                total += len(rows)
                seen[rows["item"]] = True
                done(len(rows))
            whole = folder / path.name
            with open(whole, "wb") as file:
                file.write(b"user_id:token\titem_id:token\ttimestamp:float\n")
                for part in range(parts):
                    done(_write_part(folder / str(part), file))
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder with --out "
                        f"DIR.") from None
    return total, int(seen.sum())


def _sort_in(rows: np.ndarray, folder: Path, parts: int) -> None:
    """Append each row to the file of its part of the time, in the order they are in."""
    part = (rows["second"] - START) * parts // SPAN
    for number in np.unique(part):
        with open(folder / str(number), "ab") as file:
            file.write(rows[part == number].tobytes())


def _write_part(part: Path, file) -> int:
    """Append the rows of a part, sorted, as text; returns how many."""
    if not part.exists():
        return 0
    records = np.fromfile(part, dtype=_ROW)
    part.unlink()
    records = records[np.argsort(records["second"], kind="stable")]  # users ascend within a part
    table = pa.table({name: np.ascontiguousarray(records[name]) for name in _ROW.names})
    csv.write_csv(table, file, csv.WriteOptions(include_header=False, delimiter="\t"))
    return len(records)
