"""Parts of a federation put together by hand, for tests that look at one of them."""

from __future__ import annotations

import sys

import torch

from fedcl_bench.data.stream import Step
from fedcl_bench.evaluation.ranking import EvaluationSettings
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.federation.round import train_round
from fedcl_bench.method import Method, NoSettings
from fedcl_bench.sampling import LocalSettings, draw_negatives, make_chunks
from fedcl_bench.testing.worlds import ragged

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
