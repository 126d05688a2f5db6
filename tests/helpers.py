"""Parts of a federation put together by hand, for tests that look at one of them."""

from __future__ import annotations

import sys

import numpy as np
import torch

from fedcl_bench.evaluation import EvaluationSettings
from fedcl_bench.federation import Federation, FederationSettings, run
from fedcl_bench.rounds import train_round
from fedcl_bench.method import Method, NoSettings
from fedcl_bench.recbole_adapter import Interactions
from fedcl_bench.sampling import LocalSettings, draw_negatives, make_chunks
from fedcl_bench.stream import Ragged, Sessions, Step, Stream, StreamSettings, build_blocks

USER, ITEM = "user_embedding.weight", "item_embedding.weight"


class TableBackbone:
    """Scores are given outright, as the private table ``scores``."""

    scores_local_tables = False

    def score_all(self, private, public):
        return private["scores"].clone()


def build(registry, kind, name, **settings):
    cls = registry.get(kind, name).cls
    return cls(cls.Settings(**settings))


def module_of(registry, kind, name):
    return sys.modules[registry.get(kind, name).cls.__module__]


def ragged(*lists):
    lengths = torch.tensor([0, *map(len, lists)])
    return Ragged(lengths.cumsum(0), torch.tensor([i for items in lists for i in items], dtype=torch.int64))


def one_step(train, n_items, valid=None, test=None, index=0, old_users=0, old_items=0):
    """A step with this training data and, unless given, nothing to validate or test."""
    none = ragged(*[[] for _ in train.lengths])
    return Step(index, len(train.lengths), n_items, old_users, old_items, len(train.values), train, valid or none,
                test or none)


def federation(registry, stream, method, backbone=None, seed=0, rounds=4, local=LocalSettings(),
               evaluation=EvaluationSettings(), **server):
    return Federation(stream, backbone or build(registry, "backbone", "fedmf"), method, local,
                      FederationSettings(rounds=rounds, **server), evaluation, seed)


def finish(f):
    for progress in run(f):
        pass
    return progress


def train_once(backbone, model, train, settings=LocalSettings(), round_=0, weights=None, step=None):
    """One local round of the clients with items in ``train`` (or in that of ``step``), under FT with seed 0.

    Returns:
        (snapshot after it, mean loss, each client's negatives by user).
    """
    step = step or one_step(train, model.n_items)
    users = (train.lengths > 0).nonzero().flatten()
    chunks = make_chunks(step, users, settings, 2, backbone.pairwise, backbone.whole_tables)
    after, loss, _ = train_round(chunks, model, backbone, Method(NoSettings()), settings, 0, 0, round_, weights)
    negatives = {}
    for chunk in chunks:
        drawn = draw_negatives(chunk, settings, 0, 0, round_)
        for user, items, count in zip(chunk.users.tolist(), drawn.tolist(), chunk.count.tolist()):
            negatives[user] = items[:settings.negatives * count]
    return after, loss, negatives


def small_interactions(seed=0, users=40, items=60, each=(6, 25)):
    """Random rows in random order of time; no user has an item twice."""
    rng = np.random.default_rng(seed)
    lists = [rng.choice(items, rng.integers(*each), replace=False) for _ in range(users)]
    user = np.repeat(np.arange(users), [len(some) for some in lists])
    return Interactions(user, np.concatenate(lists), rng.permutation(len(user)).astype(float),
                        np.array([f"u{u}" for u in range(users)]), np.array([f"i{i}" for i in range(items)]))


def small_stream(seed=0, blocks=4, **shape):
    """Blocks of few users and items, for whole runs in a moment."""
    return build_blocks(small_interactions(seed, **shape), StreamSettings(blocks=blocks), "small")


def session_log(n_items):
    """8 users with 1 to 4 training sessions of 2 to 9 items, then one to validate and one to test on; two users have no
    validation session, one no test session.

    Returns:
        For each user (training sessions, validation session or None, test session or None), a session as a list of
        (item, time).
    """
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


def sessions_of(lists):
    """Sessions from those of each user, each a list of (item, time)."""
    of_user = np.cumsum([0, *(len(sessions) for sessions in lists)])
    every = [session for sessions in lists for session in sessions]
    flat = [pair for session in every for pair in session]
    return Sessions(torch.tensor(of_user), torch.tensor(np.cumsum([0, *map(len, every)])),
                    torch.tensor([item for item, _ in flat]),
                    torch.tensor([time for _, time in flat], dtype=torch.float64))


def session_stream(log, n_items):
    """The stream of a log as ``session_log`` makes it."""
    sessions = {"train": sessions_of([train for train, _, _ in log])}
    splits = {"train": ragged(*[[item for session in train for item, _ in session] for train, _, _ in log])}
    for k, name in ((1, "valid"), (2, "test")):
        chosen = [[entry[k]] if entry[k] else [] for entry in log]
        sessions[name] = sessions_of(chosen)
        splits[name] = ragged(*[[session[-1][0] for session in some] for some in chosen])
    step = Step(0, len(log), n_items, 0, 0, len(splits["train"].values), **splits, sessions=sessions)
    return Stream((step,), np.arange(len(log)).astype(str), np.arange(n_items).astype(str))
