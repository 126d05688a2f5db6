"""Federations on sessions: the engine equals a plain loop over clients with full models and torch.optim."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import build, grown
from oracle import GAMMA, MASK, mix, stream
from session_oracle import Oracle

from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.plugin.sequential import ITEM, OUTPUT
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.rng import DrawKey
from fedcl_bench.testing.worlds import session_log, session_stream

N_ITEMS, SEED = 40, 5
USERS = 4  # two of whom have no validation or no test session
BACKBONES = {"sasrec": {}, "gru4rec": {"hidden_size": 4}, "tisasrec": {"time_span": 12},
             "sasrec, private": {"output_embedding": "private"},
             "gru4rec, private": {"hidden_size": 4, "output_embedding": "private"},
             "sasrec, recbole": {"architecture": "recbole", "layers": 2, "heads": 2, "inner_size": 7}}
_MIASREC = {"layers": 2, "heads": 2, "inner_size": 7, "session_dropout": 0.0, "item_dropout": 0.0}
SESSION_BACKBONES = {"miasrec": _MIASREC, "miasrec, bce": {**_MIASREC, "loss": "bce", "layers": 1,
                                                           "mean_token": "apart", "max_repeat": 3},
                     "miasrec, sparsemax": {**_MIASREC, "selection": "sparsemax", "loss": "bce"},
                     "dmi-gnn, no graph": {"global_dropout": 0.0, "graph_neighbours": 0, "loss": "bce"},
                     "hearint, no views": {"p": 0.0, "clusters": 5, "graph_neighbours": 0, "kmeans_iterations": 4},
                     "dmi-gnn": {"global_dropout": 0.0, "graph_neighbours": 3, "long_session": 2.0, "diversity": 0.5},
                     "dmi-gnn, bce": {"global_dropout": 0.0, "graph_neighbours": 3, "loss": "bce", "interests": 1,
                                      "patterns": "extractors"},
                     "hearint": {"p": 1.0, "clusters": 5, "graph_neighbours": 3, "kmeans_iterations": 4},
                     "hearint, bce": {"p": 1.0, "clusters": 90, "loss": "bce", "long_view": "items",
                                      "temporal_positions": False, "buckets": "quarters"},
                     "session-transformer": {"heads": 2}, "session-transformer, bce": {"heads": 2, "loss": "bce"},
                     "session-transformer, tied": {"heads": 3, "output_embedding": "tied", "gradient_norm": 0.3},
                     "miasrec, entmax": {**_MIASREC, "selection": "entmax", "mean_token": "apart"}}


PAPER = {"transfer": "before", "prototype": "mean", "revisited": "added", "fusion": "mean", "teacher": "previous",
         "distillation": "fixed", "neighbours": 3}


def both(registry, name, init="server", weighting="uniform", method=None, optimiser="adam", rounds=2):
    """The engine's federation and the oracle's, ready to run."""
    log, more = session_log(N_ITEMS)[:USERS], {**BACKBONES, **SESSION_BACKBONES}[name]
    stream, name = session_stream(log, N_ITEMS), name.split(",")[0]
    backbone = build(registry, "backbone", name, dim=6, max_length=5, dropout=0.0, lr=0.05, **more)
    plugin = build(registry, "method", "ft") if method is None else build(registry, "method", "fcucr", head_size=5,
                                                                          **method)
    f = Federation(stream, backbone, plugin, LocalSettings(optimiser, adam_beta2=0.98, local_epochs=2, negatives=1),
                   FederationSettings(rounds=rounds, precision="float64", init=init, weighting=weighting,
                                      tested_round="last"),
                   EvaluationSettings(topk=(3,), valid_metric="hit@3", candidates="sampled", sampled_candidates=10,
                                      early_session=True), SEED)
    f.check()
    start = grown(backbone, stream.steps[0], SEED, method=plugin)
    starts = {**backbone.item_starts(N_ITEMS), **backbone.dense_starts()}
    weights = None
    oracle = Oracle(log, N_ITEMS, name, backbone.settings, seed=SEED, public=start.public, dense=start.dense,
                    starts=starts, init=init, lr=0.05, epochs=2, weights=weights, optimiser=optimiser,
                    private=start.private, **({} if method is None else {"head": 5, "method": Facts(plugin)}))
    return f, oracle


class Facts:
    """The method's settings as the oracle reads them."""

    def __init__(self, plugin):
        self.encodes_next_session = plugin.encodes_next_session
        self.__dict__.update(vars(plugin.settings))


def compare(f, oracle, weighting="uniform", near=(1e-6, 1e-8)):
    rtol, atol = near
    for progress in run(f):
        if not progress.round:
            break
        round_ = progress.round - 1
        if weighting == "interactions":
            oracle.weights = [len(oracle.session(user, round_)) for user in range(len(oracle.log))]
        oracle.round(round_)
        theirs = oracle.module.tables()
        for name, value in {**progress.model.public, **progress.model.dense}.items():
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda m: f"{round_} {name} {m}")
        if oracle.outputs[0]:
            expected = torch.stack([torch.cat([layer.weight, layer.bias[:, None]], 1) for layer in oracle.outputs])
            torch.testing.assert_close(progress.model.private[OUTPUT], expected.detach(), rtol=rtol, atol=atol)
        if oracle.heads:
            for ours, parameter in oracle.heads[0].names.items():
                expected = torch.stack([head.get_parameter(parameter) for head in oracle.heads]).detach()
                torch.testing.assert_close(progress.model.private[ours], expected, rtol=1e-6, atol=1e-8)
            for ours in ("mean", "var") if "head.alpha" in progress.model.private else ():
                expected = torch.stack([getattr(head.norm, f"running_{ours}") for head in oracle.heads])
                torch.testing.assert_close(progress.client_state[f"head.norm.{ours}"], expected, rtol=1e-6, atol=1e-8)
        if "prototypes" in progress.server_state:
            width = progress.server_state["prototypes"].shape[1]  # all positions, or what is alike at all of them
            expected = torch.stack([features.flatten() for _, _, features in oracle.base.values()])
            torch.testing.assert_close(progress.server_state["prototypes"], expected[:, :width], rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(progress.client_state["prototype"],
                                       torch.stack(oracle.rho).flatten(1)[:, :width], rtol=1e-6, atol=1e-8)
        ranks = oracle.ranks("valid")
        assert progress.curve[-1]["valid"] == round(np.mean([rank < 3 for rank, *_ in ranks.values()]), 5)
        ranks = oracle.ranks("early")
        assert progress.curve[-1]["early_hit@3"] == pytest.approx(np.mean([r < 3 for r, *_ in ranks.values()]),
                                                                  abs=1e-12)
    assert round_ == f.server.rounds - 1
    ranks = oracle.ranks("test")
    (_, _, scores), = progress.tests
    assert scores.users.tolist() == list(ranks)
    for metric, place in (("hit@3", 0), ("all:hit@3", 1)):
        assert scores.values[metric].tolist() == [float(rank[place] < 3) for rank in ranks.values()]
    probability, = (values for _, kind, _, values in progress.analysis if kind == "target_probability")
    expected = torch.sigmoid(torch.tensor([logit for _, _, logit, _ in ranks.values()], dtype=torch.float64))
    torch.testing.assert_close(probability, expected, rtol=1e-6, atol=1e-8)
    negative, = (values for _, kind, _, values in progress.analysis if kind == "negative_probability")
    expected = torch.sigmoid(torch.tensor([logit for *_, logit in ranks.values()], dtype=torch.float64))
    torch.testing.assert_close(negative, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name, init", list(zip(sorted(BACKBONES), ["server", "per_client"] * 3)))
def test_plain_averaging_equals_oracle(registry, name, init):
    compare(*both(registry, name, init))


@pytest.mark.parametrize("name, init", [("gru4rec", "server"), ("sasrec", "per_client"), ("miasrec", "server")])
def test_fedprox_equals_oracle(registry, name, init):
    f, oracle = both(registry, name, init, optimiser="sgd")
    oracle.prox_mu = 3.0
    compare(replace(f, method=build(registry, "method", "fedprox", prox_mu=3.0)), oracle, near=(1e-9, 1e-9))


@pytest.mark.parametrize("name, init, changed", [
    ("sasrec", "per_client", {"kd_reduction": "sum"}), ("gru4rec, private", "server", {}),
    ("session-transformer", "server", {"exemplars": 2}),
    pytest.param("tisasrec", "server", {}, marks=pytest.mark.long)])
def test_ader_equals_oracle(registry, name, init, changed):
    """Past the round in which sessions are revisited, with more samples than exemplars."""
    f, oracle = both(registry, name, init, optimiser="sgd", rounds=3)
    method = build(registry, "method", "ader", **{"lambda_kd": 0.5, "exemplars": 6, **changed})
    oracle.ader = method.settings
    compare(replace(f, method=method), oracle, near=(1e-9, 1e-9))
    kept = torch.stack([method.client_state[name] for name in ("session", "position")], 2).tolist()
    assert [[(number, place) for number, place in of_user if number >= 0] for of_user in kept] == [
        *map(sorted, oracle.exemplars)]


@pytest.mark.parametrize("name", ["sasrec", "miasrec"])  # of looked-up rows, and of whole tables
def test_bounded_updates_equal_oracle(registry, name):
    f, oracle = both(registry, name, weighting="interactions", optimiser="sgd")
    oracle.norm_bound = 0.7
    compare(replace(f, server=replace(f.server, aggregator="norm_bound", norm_bound=0.7)), oracle, "interactions",
            (1e-9, 1e-9))


@pytest.mark.parametrize("name, init, optimiser, near", [
    *((name, "server", "sgd", (1e-9, 1e-11)) for name in sorted(SESSION_BACKBONES)),
    *((name, "per_client", "adam", (1e-5, 1e-6)) for name in ("dmi-gnn", "hearint, bce", "miasrec"))])
def test_backbones_of_whole_sessions_equal_oracle(registry, name, init, optimiser, near):
    """Adam's first step divides gradients by their size, so it makes rounding of the smallest large."""
    compare(*both(registry, name, init, optimiser=optimiser), near=near)


@pytest.mark.parametrize("name, init", list(zip(sorted(BACKBONES), ["per_client", "server"] * 3)))
def test_fcucr_equals_oracle(registry, name, init):
    compare(*both(registry, name, init, method={"neighbours": 3}))


@pytest.mark.parametrize("changed", [
    {"distillation": "fixed"}, {"teacher": "previous"}, {"teacher": "previous", "without": "iupr"}, {"fusion": "mean"},
    {"fusion": "pca"}, {"window": 1}, {"window": 2, "window_rule": "entries"}, {"transfer_interval": 2},
    {"without": "tasd"}, {"without": "iupr"}, {"without": "both"}, {"neighbours": 500}, {"transfer": "before"},
    {"transfer": "before", "teacher": "previous", "transfer_interval": 2}, {"prototype": "mean"},
    {"revisited": "added", "window": 2}], ids=str)
def test_every_choice_of_fcucr_equals_oracle(registry, changed):
    rounds = 3 if {"window", "transfer_interval"} & changed.keys() else 2
    compare(*both(registry, "sasrec", "per_client", method={"neighbours": 3, **changed}, rounds=rounds))


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_fcucr_as_its_paper_prints_it_equals_oracle(registry, name):
    """All of Algorithm 1 at once, past the round in which sessions are revisited."""
    compare(*both(registry, name, "server", "interactions", method=PAPER, rounds=3), "interactions")


def test_fcucr_of_the_article_equals_oracle(registry):
    """On its own encoder, with its head over all items."""
    compare(*both(registry, "session-transformer", method=PAPER, rounds=3), near=(1e-5, 1e-6))


@pytest.mark.parametrize("init", ["server", "per_client"])
def test_weights_by_interactions_equal_oracle(registry, init):
    compare(*both(registry, "sasrec", init, "interactions", {"neighbours": 3}), "interactions")


@pytest.mark.parametrize("name", ["gru4rec", "sasrec", "tisasrec"])
def test_central_training_is_one_module_s(registry, name):
    """On all sessions in mini-batches of 7, the order of which is the method's."""
    f, oracle = both(registry, name)
    f = replace(f, method=build(registry, "method", "central", central_batch=7 * 5, central_lr=0.01))
    step, module, table = f.stream.steps[0], oracle.module, oracle.module.get_parameter(oracle.module.names[ITEM][0])
    of_user = step.sessions["train"].of_user.tolist()
    places = [(user, place) for user in range(len(of_user) - 1) for place in range(of_user[user + 1] - of_user[user])]
    adam = torch.optim.Adam(module.parameters(), lr=0.01)

    def loss(round_, session):
        key = stream(SEED, "negatives of sessions", 0, round_)(session)
        seq, times, *targets = oracle.samples(*places[session], lambda i: mix((key + GAMMA * (i + 1)) & MASK))
        return module.loss(module(seq, times), *targets)

    for progress in run(f):
        if progress.round and not progress.trained:
            round_ = progress.round - 1
            order = f.method._order(len(places), step.training, DrawKey(SEED, 0, round_))
            for chosen in order.split(7):
                adam.zero_grad()
                torch.stack([*map(partial(loss, round_), chosen.tolist())]).mean().backward()
                table.grad[0] = 0.0  # padding
                adam.step()
            theirs = module.tables()
            for ours, value in {**progress.model.public, **progress.model.dense}.items():
                torch.testing.assert_close(value, theirs[ours], rtol=1e-9, atol=1e-9)
