"""Small synthetic streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import numpy as np
import torch

from ..data.streams.domain_streams import build_domains
from ..data.files.recbole_files import SPLITS, Interactions
from ..data.settings import StreamSettings
from ..data.stream import Ragged, Sessions, Step, Stream, build_blocks


def ragged(*lists) -> Ragged:
    """Lists of item ids, one per user."""
    lengths = torch.tensor([0, *map(len, lists)])
    return Ragged(lengths.cumsum(0), torch.tensor([i for items in lists for i in items], dtype=torch.int64))


def growing_stream(users: int = 22, items: int = 45, blocks: int = 3) -> Stream:
    """60 % of the interactions, then equal parts of the rest: of three blocks the second and the third bring two new
    users and items each, of two the second brings four."""
    rng = np.random.default_rng(1)
    rows = []
    for user in range(users):
        for item in rng.permutation(items)[:rng.integers(12, 24)]:
            latest = max(user - users, item - items)
            since = 0.0 if latest < -4 else 0.84 if latest < -2 else 0.97
            rows.append((user, item, rng.uniform(since, 1.0)))
    user, item, time = map(np.array, zip(*rows))
    data = Interactions(user, item, time.astype(float), np.array([f"u{u}" for u in range(users)]),
                        np.array([f"i{i}" for i in range(items)]))
    return build_blocks(data, StreamSettings(blocks=blocks), "growing")


def session_log(n_items: int) -> list:
    """8 users with 1 to 4 training sessions of 2 to 9 items, then one to validate and one to test on; two users have no
    validation session, one no test session. Returns for each user (training sessions, validation session or None, test
    session or None), a session as a list of (item, time)."""
    generator = np.random.default_rng(3)
    log, clock = [], 0.0
    for user in range(8):
        sessions = []
        for _ in range(1 + user % 4 + 2):
            size = int(generator.integers(2, 10))
            times = clock + np.cumsum(generator.integers(0, 30, size))
            sessions.append(list(zip(generator.integers(0, n_items, size).tolist(), times.astype(float).tolist())))
            clock = float(times[-1]) + 4000.0
        *train, valid, test = sessions
        log.append((train, None if user in (2, 5) else valid, None if user == 3 else test))
    return log


def sessions_of(lists) -> Sessions:
    """Sessions from those of each user, each a list of (item, time)."""
    every = [session for sessions in lists for session in sessions]
    items, times = zip(*(pair for session in every for pair in session))
    return Sessions.laid_out(np.repeat(range(len(lists)), list(map(len, lists))), np.array(list(map(len, every))),
                             np.array(items), np.array(times, float), len(lists))


def session_stream(log: list, n_items: int) -> Stream:
    lists = [[train for train, _, _ in log], *([[entry[k]] if entry[k] else [] for entry in log] for k in (1, 2))]
    sessions = dict(zip(SPLITS, map(sessions_of, lists)))
    step = Step.of_sessions(0, (len(log), n_items), (0, 0), len(sessions["train"].items), sessions)
    return Stream((step,), np.arange(len(log)).astype(str), np.arange(n_items).astype(str))


def domain_stream(seeds: Sequence[int], other_ends: int = 0, more_users: int = 0) -> Stream:
    """Domains of 13, 17 and 19 users and as many items and more, each of its own seed, with features of items.

    Args:
        other_ends: so many of each user's last items are others: 1, those to find in the test; 2, in validation too.
        more_users: the first domain has so many more, the second twice and the third three times as many.
    """
    parts, features = [], []
    for number, seed in enumerate(seeds):
        rng, items = np.random.default_rng([seed, number]), (23, 20, 29)[number]
        users = (13, 17, 19)[number] + more_users * (number + 1)
        lists = [rng.integers(0, items, rng.integers(3, 9)) for _ in range(users)]
        lists[0] = np.concatenate([rng.permutation(items), lists[0][:2]])  # all items are there
        if other_ends:
            lists = [np.concatenate([each[:-other_ends], rng.integers(0, items, other_ends)]) for each in lists]
        user, item = np.repeat(np.arange(users), list(map(len, lists))), np.concatenate(lists)
        tokens = (np.array([f"{what}{i}" for i in range(count)]) for what, count in (("u", users), ("i", items)))
        parts.append((f"d{number}", Interactions(user, item, np.arange(len(user), dtype=float), *tokens)))
        normal = np.random.default_rng([seed, number, 1]).normal(size=(items, 2, 8))
        features.append(torch.from_numpy(normal.astype(np.float32)))
    return replace(build_domains(parts, StreamSettings(stream="domains")), features=tuple(features))


def with_item_features(stream: Stream, since: int = 0, seed: int = 4) -> Stream:
    """The stream with features of its items, drawn at random, of all or of those from a number on."""
    drawn = np.random.default_rng(seed).normal(size=(len(stream.item_tokens), 5)).astype(np.float32)
    features = torch.from_numpy(drawn)
    return replace(stream, item_features=features if not since else torch.cat([stream.item_features[:since],
                                                                               features[since:]]))
