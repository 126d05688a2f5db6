"""Federations on sessions: the engine equals a plain loop over clients with full models and torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import build
from session_oracle import ITEM, Oracle

from fedcl_bench.evaluation import EvaluationSettings
from fedcl_bench.federation import Federation, FederationSettings, run
from fedcl_bench.growth import grow
from fedcl_bench.model import Snapshot
from fedcl_bench.sampling import LocalSettings
from fedcl_bench.stream import Ragged, Sessions, Step, Stream

N_ITEMS, SEED, ROUNDS = 40, 5, 3
BACKBONES = {"sasrec": {}, "gru4rec": {"hidden_size": 4}, "tisasrec": {"time_span": 12},
             "sasrec, recbole": {"architecture": "recbole", "layers": 2, "heads": 2, "inner_size": 7}}


def make_log():
    """8 users with 1 to 4 training sessions of 2 to 9 items, some shorter and some longer than max_length; two users
    have no validation session, one no test session."""
    generator = np.random.default_rng(3)
    log, clock = [], 0.0
    for user in range(8):
        sessions = []
        for _ in range(1 + user % 4 + 2):
            size = int(generator.integers(2, 10))
            times = clock + np.cumsum(generator.integers(0, 30, size))
            sessions.append(list(zip(generator.integers(0, N_ITEMS, size).tolist(), times.astype(float).tolist())))
            clock = float(times[-1]) + 4000.0
        *train, valid, test = sessions
        log.append((train, None if user in (2, 5) else valid, None if user == 3 else test))
    return log


def as_sessions(lists):
    of_user = np.cumsum([0, *(len(sessions) for sessions in lists)])
    every = [session for sessions in lists for session in sessions]
    start = np.cumsum([0, *map(len, every)])
    flat = [pair for session in every for pair in session]
    return Sessions(torch.tensor(of_user), torch.tensor(start), torch.tensor([item for item, _ in flat]),
                    torch.tensor([time for _, time in flat], dtype=torch.float64))


def as_stream(log):
    def ragged(lists):
        return Ragged(torch.tensor(np.cumsum([0, *map(len, lists)])),
                      torch.tensor([item for items in lists for item in items], dtype=torch.int64))
    sessions = {"train": as_sessions([train for train, _, _ in log])}
    splits = {"train": ragged([[item for session in train for item, _ in session] for train, _, _ in log])}
    for k, name in ((1, "valid"), (2, "test")):
        chosen = [[entry[k]] if entry[k] else [] for entry in log]
        sessions[name] = as_sessions(chosen)
        splits[name] = ragged([[session[-1][0] for session in some] for some in chosen])
    step = Step(0, len(log), N_ITEMS, 0, 0, sum(len(s) for train, _, _ in log for s in train), **splits,
                sessions=sessions)
    return Stream((step,), np.arange(len(log)).astype(str), np.arange(N_ITEMS).astype(str))


def both(registry, name, init="server", weighting="uniform", method=None):
    """The engine's federation and the oracle's, ready to run."""
    log, more = make_log(), BACKBONES[name]
    stream, name = as_stream(log), name.split(",")[0]
    backbone = build(registry, "backbone", name, dim=6, max_length=5, dropout=0.0, lr=0.05, **more)
    plugin = build(registry, "method", "ft") if method is None else build(registry, "method", "fcucr", head_size=5,
                                                                          **method)
    f = Federation(stream, backbone, plugin, LocalSettings("adam", adam_beta2=0.98, local_epochs=3, negatives=1),
                   FederationSettings(rounds=ROUNDS, precision="float64", init=init, weighting=weighting,
                                      tested_round="last"),
                   EvaluationSettings(topk=(3,), valid_metric="hit@3", candidates="sampled", sampled_candidates=10,
                                      early_session=True), SEED)
    f.check()
    start = grow(Snapshot({}, {}), backbone, SEED, stream.steps[0], torch.float64, torch.device("cpu"), plugin)
    starts = {**backbone.item_starts(N_ITEMS), **backbone.dense_starts()}
    weights = None
    oracle = Oracle(log, N_ITEMS, name, backbone.settings, seed=SEED, public=start.public, dense=start.dense,
                    starts=starts, init=init, lr=0.05, epochs=3, weights=weights,
                    **({} if method is None else {"head": 5, "private": start.private, "method": Facts(plugin)}))
    return f, oracle


class Facts:
    """The method's settings as the oracle reads them."""

    def __init__(self, plugin):
        self.encodes_next_session = plugin.encodes_next_session
        self.__dict__.update(vars(plugin.settings))


def compare(f, oracle, weighting="uniform"):
    for progress in run(f):
        if not progress.round:
            break
        round_ = progress.round - 1
        if weighting == "interactions":
            oracle.weights = [len(oracle.session(user, round_)) for user in range(len(oracle.log))]
        oracle.round(round_)
        theirs = oracle.module.tables()
        for name, value in {**progress.model.public, **progress.model.dense}.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-8, msg=lambda m: f"{round_} {name} {m}")
        if oracle.heads:
            for ours, parameter in oracle.heads[0].names.items():
                expected = torch.stack([head.get_parameter(parameter) for head in oracle.heads]).detach()
                torch.testing.assert_close(progress.model.private[ours], expected, rtol=1e-6, atol=1e-8)
            for ours in ("mean", "var"):
                expected = torch.stack([getattr(head.norm, f"running_{ours}") for head in oracle.heads])
                torch.testing.assert_close(progress.client_state[f"head.norm.{ours}"], expected, rtol=1e-6, atol=1e-8)
        if "prototypes" in progress.server_state:
            expected = torch.stack([features.flatten() for _, _, features in oracle.base.values()])
            torch.testing.assert_close(progress.server_state["prototypes"], expected, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(progress.client_state["prototype"],
                                       torch.stack(oracle.rho).flatten(1), rtol=1e-6, atol=1e-8)
        ranks = oracle.ranks("valid")
        assert progress.curve[-1]["valid"] == round(np.mean([rank < 3 for rank, _, _ in ranks.values()]), 5)
        ranks = oracle.ranks("early")
        assert progress.curve[-1]["early_hit@3"] == pytest.approx(np.mean([r < 3 for r, _, _ in ranks.values()]), abs=1e-12)
    assert round_ == ROUNDS - 1
    ranks = oracle.ranks("test")
    (_, _, scores), = progress.tests
    assert scores.users.tolist() == list(ranks)
    for metric, place in (("hit@3", 0), ("all:hit@3", 1)):
        assert scores.values[metric].tolist() == [float(rank[place] < 3) for rank in ranks.values()]
    probability, = (values for _, kind, _, values in progress.analysis if kind == "target_probability")
    expected = torch.sigmoid(torch.tensor([logit for _, _, logit in ranks.values()], dtype=torch.float64))
    torch.testing.assert_close(probability, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("init", ["server", "per_client"])
@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_plain_averaging_equals_oracle(registry, name, init):
    compare(*both(registry, name, init))


@pytest.mark.parametrize("init", ["server", "per_client"])
@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_fcucr_equals_oracle(registry, name, init):
    compare(*both(registry, name, init, method={"neighbours": 3}))


@pytest.mark.parametrize("changed", [
    {"distillation": "fixed"}, {"teacher": "previous"}, {"teacher": "previous", "without": "iupr"}, {"fusion": "mean"},
    {"fusion": "pca"}, {"window": 1}, {"window": 2, "window_rule": "entries"}, {"transfer_interval": 2},
    {"without": "tasd"}, {"without": "iupr"}, {"without": "both"}, {"neighbours": 500}], ids=str)
def test_every_choice_of_fcucr_equals_oracle(registry, changed):
    compare(*both(registry, "sasrec", "per_client", method={"neighbours": 3, **changed}))


@pytest.mark.parametrize("init", ["server", "per_client"])
def test_weights_by_interactions_equal_oracle(registry, init):
    compare(*both(registry, "sasrec", init, "interactions", {"neighbours": 3}), "interactions")
