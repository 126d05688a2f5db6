"""Streams: what arrives at which client when.

A stream is a list of steps of time (blocks D^0, D^1, ... of the interactions in time order, or one step of sessions),
each with every client's train, valid and test items. Ids are numbered by first appearance, so the users and items known
before a block always have smaller ids than those new in it; but for domains, each of which has a range of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Mapping

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..core.errors import UserError
from .files.recbole_files import SPLITS, Interactions, pieces, read_table, splits_of
from .settings import StreamSettings
from .streams.tie_order import time_order


def starts_of(lengths: Tensor) -> Tensor:
    """Where lists of these lengths begin that are laid end to end, and where the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclass(frozen=True)
class Ragged:
    """Lists of item ids, one per user: user ``u`` has ``values[indptr[u]:indptr[u + 1]]`` (both int64 tensors).

    ``ratings`` are those of the items, float64 and as long as ``values``, if they were asked for.
    """

    indptr: Tensor
    values: Tensor
    ratings: Tensor | None = None

    @property
    def rated(self) -> "Ragged":
        """The ratings in the place of the items."""
        return Ragged(self.indptr, self.ratings)

    def _of(self, lengths: Tensor, chosen: Tensor) -> "Ragged":
        """Lists of these lengths, of some of the items."""
        return Ragged(starts_of(lengths), self.values[chosen], None if self.ratings is None else self.ratings[chosen])

    @property
    def owners(self) -> Tensor:
        """The user of each of the ``values``."""
        return torch.arange(len(self.lengths), device=self.values.device).repeat_interleave(self.lengths)

    def where(self, chosen: Tensor) -> "Ragged":
        """The lists without the items that are not ``chosen``, bool of the shape of ``values``."""
        return self._of(torch.bincount(self.owners[chosen], minlength=len(self.lengths)), chosen)

    @property
    def lengths(self) -> Tensor:
        """How many items each user has, shape (users,)."""
        return self.indptr[1:] - self.indptr[:-1]

    def counts(self, users: Tensor) -> Tensor:
        """How many items some users have, without a look at the others."""
        return self.indptr[users + 1] - self.indptr[users]

    def of(self, user: int) -> Tensor:
        """The items of one user."""
        return self.values[self.indptr[user]:self.indptr[user + 1]]

    def select(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """All (row, item) pairs of ``users``, where ``row`` is the position in ``users``."""
        length = self.counts(users)
        row = torch.repeat_interleave(torch.arange(len(users), device=users.device), length)
        shift = self.indptr[users] - (torch.cumsum(length, 0) - length)
        return row, self.values[shift[row] + torch.arange(len(row), device=users.device)]

    def part(self, users: Tensor) -> "Ragged":
        """The lists of some users, numbered in their order."""
        ratings = None if self.ratings is None else self.rated.select(users)[1]
        return Ragged(starts_of(self.counts(users)), self.select(users)[1], ratings)

    def at_most(self, counts: Tensor) -> "Ragged":
        """The first ``counts`` items of each user, shape (users,)."""
        lengths = torch.minimum(self.lengths, counts)
        number = torch.arange(len(self.values), device=counts.device) - self.indptr[:-1].repeat_interleave(self.lengths)
        return self._of(lengths, number < lengths.repeat_interleave(self.lengths))

    def before(self, later: "Ragged") -> "Ragged":
        """Each user's items and then those that it has ``later``, where there may be more users."""
        lists = self, later
        user = torch.cat([each.owners for each in lists])
        joined = replace(later, values=torch.cat([each.values for each in lists]),
                         ratings=None if later.ratings is None else torch.cat([each.ratings for each in lists]))
        return joined._of(torch.bincount(user, minlength=len(later.lengths)), user.argsort(stable=True))

    def distinct(self) -> "Ragged":
        """Of items that a user has several times the first, in the order of the lists."""
        user = self.owners
        above = 1 + int(self.values.max()) if len(self.values) else 1
        key, order = (user * above + self.values).sort(stable=True)
        first = torch.ones_like(key, dtype=torch.bool)
        first[1:] = key[1:] != key[:-1]
        keep = torch.zeros_like(first).index_put_((order[first],), first.new_ones(()))
        return self.where(keep)

    def to(self, device: torch.device) -> "Ragged":
        ratings = None if self.ratings is None else self.ratings.to(device)
        return Ragged(self.indptr.to(device), self.values.to(device), ratings)


@dataclass(frozen=True)
class Sessions:
    """Sessions of every user, each in time order, laid end to end."""

    of_user: Tensor  # user ``u`` has the sessions ``of_user[u]:of_user[u + 1]``, in time order; int64, (users + 1,)
    start: Tensor  # session ``s`` has the interactions ``start[s]:start[s + 1]``; int64, (sessions + 1,)
    items: Tensor  # int64 ids
    times: Tensor  # float64, in the dataset's unit (seconds in all shipped ones)

    @property
    def count(self) -> Tensor:
        """How many sessions each user has, shape (users,)."""
        return self.of_user[1:] - self.of_user[:-1]

    @property
    def lengths(self) -> Tensor:
        """How many interactions each session has, shape (sessions,)."""
        return self.start[1:] - self.start[:-1]

    def in_round(self, users: Tensor, round_: int) -> Tensor:
        """The session that each of ``users`` trains on in a round: the first in round 0, then the next, and after the
        last the first again. Every user must have one."""
        return self.of_user[users] + round_ % self.count[users]

    def tail(self, sessions: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last interactions of some sessions, given by their numbers (C,), left-padded to a length L: items, times
        and real, each (C, L). Where ``real`` is False the session is shorter, and the item and time are those of its
        first interaction."""
        return self._up_to(self.start[sessions], self.start[sessions + 1], length)

    def _up_to(self, first: Tensor, end: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``tail``, of the interactions from ``first`` to before ``end``."""
        position = end[:, None] + torch.arange(length, device=end.device) - length
        real = position >= first[:, None]
        position = torch.maximum(position, first[:, None])
        return self.items[position], self.times[position], real

    def as_lists(self, sessions: Tensor, n_users: int, users: Tensor) -> "Ragged":
        """The items of one session for each of ``users`` (ascending), as lists of all ``n_users``."""
        chosen = Ragged(self.start, self.items).part(sessions)
        lengths = torch.zeros(n_users, dtype=torch.int64, device=sessions.device)
        lengths[users] = chosen.lengths
        return Ragged(starts_of(lengths), chosen.values)

    def joined(self) -> "Ragged":
        """The items of all sessions of each user."""
        return Ragged(self.start[self.of_user], self.items)

    def numbers(self) -> "Ragged":
        """The numbers of each user's sessions."""
        return Ragged(self.of_user, torch.arange(len(self.lengths)))

    def rows(self) -> "Ragged":
        """The numbers of each session's interactions."""
        return Ragged(self.start, torch.arange(len(self.items), device=self.items.device))

    def part(self, numbers: "Ragged") -> "Sessions":
        """Some of the sessions, given each user's by their numbers."""
        rows = self.rows().part(numbers.values)
        return Sessions(numbers.indptr, rows.indptr, self.items[rows.values], self.times[rows.values])

    def targets(self) -> "Ragged":
        """The last item of each session of each user."""
        return Ragged(self.of_user, self.items[self.start[1:] - 1])

    def prefixes(self) -> "Prefixes":
        """Every beginning of a session of at least 2 interactions, by session and length."""
        count = self.lengths - 1
        first = self.start[:-1].repeat_interleave(count)
        before = (count.cumsum(0) - count).repeat_interleave(count)
        number = torch.arange(len(first), device=first.device) - before
        return Prefixes(self, first, first + number + 2)

    @staticmethod
    def laid_out(user: np.ndarray, lengths: np.ndarray, items: np.ndarray, times: np.ndarray, n_users: int
                 ) -> "Sessions":
        """Sessions from their users and lengths, in the order of the users, and their rows."""
        of_user = torch.from_numpy(np.bincount(user, minlength=n_users))
        return Sessions(starts_of(of_user), starts_of(torch.tensor(lengths)), torch.tensor(items), torch.tensor(times))

    def to(self, device: torch.device) -> "Sessions":
        return Sessions(*(getattr(self, name).to(device) for name in ("of_user", "start", "items", "times")))


@dataclass(frozen=True)
class Prefixes:
    """Beginnings of sessions, each of which predicts its last item: the samples of session recommenders."""

    sessions: Sessions
    first: Tensor  # prefix ``i`` has the interactions ``first[i]:end[i]``; int64, (prefixes,)
    end: Tensor

    def tail(self, chosen: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Sessions.tail``, of some of the prefixes."""
        return self.sessions._up_to(self.first[chosen], self.end[chosen], length)

    def written_out(self) -> Sessions:
        """The prefixes as sessions of one user, which holds them all."""
        lengths = self.end - self.first
        start = starts_of(lengths)
        shift = (self.first - start[:-1]).repeat_interleave(lengths)
        row = torch.arange(int(start[-1])) + shift
        return Sessions(torch.tensor([0, len(lengths)]), start, self.sessions.items[row], self.sessions.times[row])


@dataclass(frozen=True)
class TrainingStep:
    """What plugins see of a ``Step``, whose attributes these are: what trains, and nothing to validate or test on."""

    index: int
    n_users: int
    n_items: int
    old_users: int
    old_items: int
    train: Ragged
    sessions: Mapping[str, Sessions]  # those of ``train``, and with domains of ``known``


@dataclass(frozen=True)
class Step:
    """One step of a stream: a block, or all of it."""

    index: int  # t
    n_users: int  # seen in blocks 0..t (accumulated); of domains, all there are
    n_items: int
    old_users: int  # the same before block t (0 for t = 0)
    old_items: int
    interactions: int  # rows of the block
    # Items of each accumulated user in this block. In a stream of sessions: all items of its training sessions; the
    # last item of its validation and of its test session, if it has one.
    train: Ragged
    valid: Ragged
    test: Ragged
    # In a stream of sessions, those of ``train``, ``valid`` and ``test``; each user has at most one session in each of
    # the last two, which includes the item to find. With ``topology=central`` the one user there is has all of them.
    # With domains, a user's session for each is all up to that item; after the first block there are also those of
    # ``known``, what each user did in the blocks before.
    sessions: Mapping[str, Sessions] = field(default_factory=dict)

    def split(self, name: str) -> Ragged:
        return getattr(self, name)

    @property
    def training(self) -> TrainingStep:
        """What plugins see of it."""
        return TrainingStep(self.index, self.n_users, self.n_items, self.old_users, self.old_items, self.train,
                            {name: self.sessions[name] for name in ("train", "known") if name in self.sessions})

    @property
    def trained_rows(self) -> int:
        """Interactions to train on in this step, without those of earlier ones that are only known."""
        return len(self.train.values) - (len(self.sessions["known"].items) if "known" in self.sessions else 0)

    def samples(self) -> Prefixes:
        """Every beginning of a training session whose last item is of this step."""
        train, prefixes = self.sessions["train"], self.sessions["train"].prefixes()
        if "known" not in self.sessions:
            return prefixes
        known = self.sessions["known"]
        user_of_known = torch.arange(len(known.count), device=known.start.device).repeat_interleave(known.count)
        known_items = torch.zeros_like(known.count).index_add_(0, user_of_known, known.lengths)  # of each user
        session = torch.searchsorted(train.start, prefixes.first, right=True) - 1  # that a prefix begins
        known_in_session = known_items.repeat_interleave(train.count)[session]
        new = prefixes.end - prefixes.first > known_in_session
        return Prefixes(train, prefixes.first[new], prefixes.end[new])

    @staticmethod
    def of_sessions(index: int, size: tuple[int, int], old: tuple[int, int], interactions: int,
                    sessions: Mapping[str, Sessions]) -> "Step":
        """A step of sessions, with so many users and items and so many old ones."""
        targets = (sessions[split].targets() for split in ("valid", "test"))
        return Step(index, *size, *old, interactions, sessions["train"].joined(), *targets, sessions)

    def to(self, device: torch.device) -> "Step":
        moved = {name: self.split(name).to(device) for name in ("train", "valid", "test")}
        sessions = {name: split.to(device) for name, split in self.sessions.items()}
        return Step(**{**self.__dict__, **moved, "sessions": sessions})


@dataclass(frozen=True)
class DomainPart:
    """A domain of a stream."""

    name: str
    users: range  # ids, which are no other domain's
    items: range
    interactions: tuple[int, ...]  # rows in each step

    def of(self, step: Step) -> Step:
        """What of a step is the domain's, with users and items numbered from 0."""
        users, first = slice(self.users.start, self.users.stop + 1), self.items.start

        def lists(of_all: Ragged) -> Ragged:
            ends = of_all.indptr[users]
            return Ragged(ends - ends[0], of_all.values[ends[0]:ends[-1]] - first)

        def histories(of_all: Sessions) -> Sessions:
            of_user = of_all.of_user[users]
            start = of_all.start[of_user[0]:of_user[-1] + 1]
            rows = slice(start[0], start[-1])
            return Sessions(of_user - of_user[0], start - start[0], of_all.items[rows] - first, of_all.times[rows])
        return Step(step.index, len(self.users), len(self.items), 0, 0, self.interactions[step.index],
                    *(lists(step.split(name)) for name in SPLITS),
                    {name: histories(sessions) for name, sessions in step.sessions.items()})


@dataclass(frozen=True)
class Stream:
    """All steps, and the publisher's ids of users and items in the order of ours."""

    steps: tuple[Step, ...]
    user_tokens: np.ndarray
    item_tokens: np.ndarray
    # For sessions of which the last ones are for testing, ``users``, ``items``, ``sessions`` and ``average_length``
    # before items without training session are left out, as the paper's Table 1 counts them.
    unfiltered: Mapping[str, float] = field(default_factory=dict)
    domains: tuple[DomainPart, ...] = ()  # the clients, if these are domains; ids then begin with the domain's name
    # What the texts of each domain's items say, each (items, layers, d_W), for backbones that need them; or, where new
    # items are likened to others by their texts, those of all items, (items, d).
    features: tuple[Tensor, ...] = ()
    # With ``known_users``, of each two domains, by their numbers, which of their users are the same: int64 (users, 2),
    # each numbered from 0 in its domain.
    known: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    item_features: Tensor | None = None  # of a stream of users, (items, d), for plugins that need them

    @property
    def per_step(self) -> int:
        """How many tests of its own a step has. Records number them all as ``units`` does, and call them blocks."""
        return len(self.domains) or 1

    def units(self) -> list[Step]:
        """What is validated and tested by itself: every step, or in every step each domain's part."""
        return [domain.of(step) for step in self.steps for domain in self.domains] or list(self.steps)

    def name_of(self, unit: int) -> str:
        """What messages call one of ``units``."""
        step, number = divmod(unit, self.per_step)
        domain = [f"domain '{part.name}'" for part in self.domains[number:number + 1]]
        return ", ".join([*domain, *([f"block {step}"] if not domain or len(self.steps) > 1 else [])])


def by_user(user: np.ndarray) -> np.ndarray:
    """Rows in the order of their users, those of a user in their own order: int64, 8 bytes a row and no more."""
    bits = len(user).bit_length()
    if int(user.max(initial=0)).bit_length() + bits > 63:
        raise OverflowError(f"{len(user):,} rows of users up to {user.max():,} are more than can be sorted")
    order = user.astype(np.int64)
    order <<= bits
    for part in pieces(len(order)):
        order[part] |= np.arange(part.start, part.stop)
    order.sort()  # no two are equal
    order &= (1 << bits) - 1
    return order


def places(user: np.ndarray) -> np.ndarray:
    """How many of the same user's rows come before each row."""
    count = np.bincount(user)
    place = np.empty(len(user), dtype=np.int64)
    place[by_user(user)] = np.arange(len(user)) - np.repeat(np.cumsum(count) - count, count)
    return place


def block_of_rows(n: int, blocks: int, base_share: float) -> np.ndarray:
    """Block of each of ``n`` rows in time order: int(base_share n) rows, then equal blocks, the rest in the last."""
    base = int(base_share * n) if blocks > 1 else n
    later = int((1.0 - base_share) * n / max(blocks - 1, 1))
    ends = np.minimum(base + later * np.arange(blocks), n)
    ends[-1] = n
    return np.repeat(np.arange(blocks, dtype=np.int16), np.diff(ends, prepend=0))


def split_of_rows(user: np.ndarray, how: str, seed: int, block: int) -> np.ndarray:
    """Train (0), valid (1) or test (2) of each row of one block, which are in time order, per user 80/10/10.

    Of a user's n rows, test takes ceil(n / 10) and valid ceil((n - test) / 9); fewer than 3 rows all train. They are
    the latest (``chronological``) or ``random``, by a key of seed and block.
    """
    count = np.bincount(user)
    test = np.where(count < 3, 0, -(-count // 10))
    valid = np.where(count < 3, 0, -(-(count - test) // 9))
    return _held_out(user, count, test, valid, rng.key(seed, "split", block) if how == "random" else None)


def _held_out(user: np.ndarray, count: np.ndarray, test: np.ndarray, valid: np.ndarray, key: int | None) -> np.ndarray:
    """Train (0), valid (1) or test (2) of each row, given how many rows each user has, and how many of them, the last
    ones, are for what. Rows of a user are in a random order by ``key``; None: in their own."""
    order, split, later = by_user(user), np.empty(len(user), np.int8), test + valid
    start = np.append(0, np.cumsum(count))  # of each user's rows in the order
    first = np.searchsorted(start[:-1], [part.start for part in pieces(len(user))])
    for u, end in zip(first, [*first[1:], len(count)]):
        rows = order[start[u]:start[end]]
        owner = user[rows].astype(np.int64)
        place = np.arange(start[u], start[end]) - start[owner]
        if key is not None:
            drawn = rng.bits(rng.client_keys(key, torch.from_numpy(owner)), torch.from_numpy(place))
            rows = rows[np.lexsort((rng.sort_keys(drawn).numpy(), owner))]
        left = count[owner] - place
        split[rows] = (left <= later[owner]).astype(np.int8) + (left <= test[owner])
    return split


def _assemble(rows: Interactions, block: np.ndarray, blocks: int, name: str, cure: str = "") -> Stream:
    """A stream of rows that have a split; users and items are numbered in the order of their blocks. Raises UserError
    for a block without training interaction, of which ``cure`` says what to do about it."""
    steps = []
    n_users = n_items = 0
    for t in range(blocks):
        now = block == t
        user, item, split = (each[now] for each in (rows.user, rows.item, rows.split))
        rating = None if rows.rating is None else rows.rating[now]
        old = n_users, n_items
        if not (split == 0).any():
            raise UserError(f"{name}: block {t} has no training interaction ({len(user)} rows in all){cure}.")
        n_users = max(n_users, int(user.max()) + 1)
        n_items = max(n_items, int(item.max()) + 1)
        order = by_user(user)
        lists = []
        for s in range(len(SPLITS)):
            chosen = order[split[order] == s]
            lengths = torch.bincount(torch.from_numpy(user[chosen]), minlength=n_users)
            lists.append(Ragged(starts_of(lengths), torch.from_numpy(item[chosen].astype(np.int64)),
                                None if rating is None else torch.from_numpy(rating[chosen])))
        steps.append(Step(t, n_users, n_items, *old, len(user), *lists))
    return Stream(tuple(steps), rows.user_tokens, rows.item_tokens)


def rows_of_blocks(data: Interactions, settings: StreamSettings) -> tuple[Interactions, np.ndarray]:
    """The rows in time order with their splits, and each one's block (see ``build_blocks``)."""
    return _with_splits(data.of_rows(time_order(data.time, settings.tie_order)), settings)


def _with_splits(data: Interactions, settings: StreamSettings) -> tuple[Interactions, np.ndarray]:
    """Rows that are in time order with their splits, and each one's block."""
    block = block_of_rows(len(data.user), settings.blocks, settings.base_share)
    split = np.empty(len(block), dtype=np.int8)
    for t in range(settings.blocks):
        how = settings.base_split if t == 0 else settings.inc_split
        split[block == t] = split_of_rows(data.user[block == t], how, settings.split_seed, t)
    return replace(data, split=split), block


def build_blocks(data: Interactions, settings: StreamSettings, name: str) -> Stream:
    """Cut interactions into blocks by count in time order and split each block per user (F3CRec, section 5.1).

    Rows of equal time stand as ``tie_order`` says. Raises UserError if a block has no training interaction.
    """
    order = time_order(data.time, settings.tie_order)
    data = replace(data, time=np.zeros(0))  # which frees 8 bytes a row, as the next lines do
    data = data.of_rows(order)
    del order
    return _assemble(*_with_splits(data, settings), settings.blocks, name,
                     "; use fewer blocks (--set blocks=N) or a smaller k_core")


def rows_of_static(data: Interactions, settings: StreamSettings, name: str) -> tuple[Interactions, np.ndarray]:
    """The rows in time order with their splits, all of block 0 (see ``build_static``)."""
    rows = np.flatnonzero((np.bincount(data.user) >= settings.min_interactions)[data.user])
    if len(rows) == 0:
        raise UserError(f"{name}: no user has {settings.min_interactions} interactions; lower it with "
                        f"--set min_interactions=N.")
    data = data.of_rows(rows[time_order(data.time[rows], settings.tie_order)])
    count = np.bincount(data.user)
    one = (count >= 3).astype(np.int64)
    return replace(data, split=_held_out(data.user, count, one, one, None)), np.zeros(len(data.user), np.int16)


def build_static(data: Interactions, settings: StreamSettings, name: str) -> Stream:
    """One step with a leave-one-out split per user: the latest interaction is test, the one before it valid.

    Rows of equal time stand as ``tie_order`` says. Users with fewer than 3 interactions only train. Raises UserError if
    nobody is left.
    """
    return _assemble(*rows_of_static(data, settings, name), 1, name)


def read_split_file(path: Path) -> Stream:
    """A stream from a file with the columns block, user, item, split (train|valid|test), in any row order.

    Users and items are numbered by the block they first appear in; within a block by their number if all ids are whole
    numbers, else by first appearance in the file. Raises UserError for a bad file, a block that is not 0, 1, 2, ... or
    an unknown split.
    """
    import pandas as pd

    table = read_table(path, {"block": "float", "user": "token", "item": "token", "split": "token"})
    frame, split = table.to_pandas(), splits_of(path, "split", table.column("split"))
    block = frame["block"].to_numpy()
    blocks = np.unique(block)
    if not np.array_equal(blocks, np.arange(len(blocks))):
        raise UserError(f"{path}: column 'block' has {', '.join(f'{b:g}' for b in blocks[:8])}, "
                        f"expected 0, 1, 2, ... without gaps.")
    ids, tokens = [], []
    for column in ("user", "item"):
        text = frame[column].to_numpy(str)
        within = np.arange(len(text))
        if np.char.isdecimal(text).all():  # of one length texts have the order of their numbers, which may be huge
            longest = int(np.char.str_len(text).max())
            within = text.astype(np.int64) if longest < 19 else np.char.zfill(text, longest)
        order = np.lexsort((within, block))
        number = np.empty(len(text), dtype=np.int64)
        number[order], token = pd.factorize(text[order].astype(object))
        ids.append(number)
        tokens.append(token.astype(str))
    return _assemble(Interactions(*ids, block, *tokens, split=split), block, len(blocks), str(path))


def statistics(stream: Stream) -> dict[str, list[float]]:
    """The rows of F3CRec's Table 1, one value per block, and the sizes of the splits.

    Sparsity is 100 (1 - interactions of the block / (accumulated users x accumulated items)).
    """
    steps = stream.steps
    return {
        "accumulated_users": [s.n_users for s in steps],
        "accumulated_items": [s.n_items for s in steps],
        "interactions": [s.interactions for s in steps],
        "sparsity": [round(100.0 * (1.0 - s.interactions / (s.n_users * s.n_items)), 2) for s in steps],
        **{name: [len(s.split(name).values) for s in steps] for name in ("train", "valid", "test")},
        "train_users": [int((s.train.lengths > 0).sum()) for s in steps],
        "test_users": [int((s.test.lengths > 0).sum()) for s in steps],
    }
