"""FCUCR: the numbers of its card, the knowledge base, its private head, and draws that belong to clients."""

import contextlib
import math
from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import build, threads
from hypothesis import given, settings
from session_oracle import ITEM

from fedcl_bench import SIZES, LocalSettings, UserError
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.evaluation.session_ranking import SessionTask, rank_sessions
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.plugin.method import Encoding, Method, NoSettings
from fedcl_bench.stats.clip_noise import Protection
from fedcl_bench.toolbox.prototypes import nearest
from fedcl_bench.testing import interference, properties
from fedcl_bench.testing.report import Inapplicable
from fedcl_bench.testing.trials import Pair
from fedcl_bench.testing.worlds import session_log, session_stream

N_ITEMS = 40


def federation(registry, rounds=2, backbone="sasrec", dropout=0.0, init="server", precision="float64", **settings):
    """FCUCR on the eight users of ``session_log``."""
    f = Federation(session_stream(session_log(N_ITEMS), N_ITEMS),
                   build(registry, "backbone", backbone, dim=6, max_length=5, dropout=dropout),
                   build(registry, "method", "fcucr", **{"head_size": 5, "neighbours": 3, **settings}),
                   LocalSettings("adam", adam_beta2=0.98, local_epochs=2, negatives=1),
                   FederationSettings(rounds=rounds, precision=precision, init=init, tested_round="last", patience=0),
                   EvaluationSettings(topk=(3,), valid_metric="hit@3", candidates="sampled", sampled_candidates=10), 5)
    f.check()
    return f


def after_each_round(f):
    return [progress for progress in run(f) if progress.round]


# The card's numbers.


def test_weight_where_nothing_differs(registry):
    """A client whose encoder is the teacher's has no distance to divide by."""
    method = build(registry, "method", "fcucr")
    assert method.weight(torch.tensor([1.2, 0.0]), torch.zeros(2)).tolist() == [10.0, 0.0]


# Finding prototypes.


def naive_nearest(query, owner, base, owners, k):
    """(cosine, position) of the k best of others, one by one."""
    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    found = [(cosine(query, row), i) for i, row in enumerate(base) if owners[i] != owner]
    return sorted(found, key=lambda pair: -pair[0])[:k]


@settings(max_examples=40)
@given(seed=st.integers(0, 10 ** 6), queries=st.integers(1, 9), size=st.integers(1, 40), clients=st.integers(1, 6),
       k=st.integers(1, 45), at_once=st.integers(1, 60), some=st.integers(1, 9))
def test_nearest_equals_a_naive_ranking(seed, queries, size, clients, k, at_once, some):
    """For any sizes of blocks; several prototypes are a client's own, and all of them are left out."""
    rng = np.random.default_rng(seed)
    query, base = (torch.from_numpy(rng.normal(size=(n, 3))) for n in (queries, size))
    owner, owners = (torch.from_numpy(rng.integers(0, clients, n)) for n in (queries, size))
    with patch.object(SIZES, "similarities", at_once), patch.object(SIZES, "queries", some):
        similarity, position = nearest(query, owner, base, base.norm(dim=1), owners, k)
    assert similarity.shape == position.shape == (queries, min(k, size))
    for q in range(queries):
        expected = naive_nearest(query[q].tolist(), int(owner[q]), base.tolist(), owners.tolist(), k)
        assert similarity[q, :len(expected)].tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
        assert position[q, :len(expected)].tolist() == [i for _, i in expected]
        assert (similarity[q, len(expected):] == -torch.inf).all()


# The knowledge base.


def test_transfer_interval(registry):
    """Between transfers clients keep the prototypes they have, while the base goes on growing."""
    rounds = after_each_round(federation(registry, rounds=5, transfer_interval=2))
    kept = [progress.client_state["prototype"] for progress in rounds]
    assert [torch.equal(a, b) for a, b in zip(kept, kept[1:])] == [True, False, True, False]
    assert [len(progress.server_state["prototypes"]) for progress in rounds] == [8, 14, 18, 20, 20]
    every = [progress.client_state["prototype"] for progress in after_each_round(federation(registry, rounds=2))]
    assert torch.equal(every[0], kept[0]) and not torch.equal(every[0], every[1])
    # Of the two prototypes sent and the one received, only the session's goes up in between.
    size, last = 5 * 6 * 8, rounds[-1].curve
    assert [row["bytes_up"] - last[1]["bytes_up"] for row in last] == [size, 0, size, 0, size]
    assert [row["bytes_down"] - last[1]["bytes_down"] for row in last] == [size, 0, size, 0, size]


def test_a_client_alone_receives_zeros(registry):
    method = build(registry, "method", "fcucr")
    method.remember(torch.ones(2, 30), torch.tensor([4, 4]), torch.tensor([0, 1]), 0)
    assert method.answers(torch.ones(2, 30), torch.tensor([4, 5])).tolist() == [[0.0] * 30, [1.0] * 30]


@pytest.mark.parametrize("without,uploads", [("iupr", 0), ("both", 0), ("tasd", 2), ("none", 2)])
def test_what_ablations_send(registry, without, uploads):
    f = federation(registry, rounds=1, without=without)
    last, = after_each_round(f)
    assert ("prototypes" in last.server_state) == bool(uploads)
    assert f.method.uploads(f.backbone, 0) == ({"prototype": (30,), "session": (), "query": (30,)} if uploads else {})
    numbers = sum(table.numel() for table in {**last.model.public, **last.model.dense}.values())
    assert last.curve[0]["bytes_up"] == 8 * (numbers + (61 if uploads else 0))
    assert not any(name.startswith("head") for name in {**last.model.public, **last.model.dense})


# Random numbers belong to clients.


@pytest.mark.parametrize("backbone, settings", [
    ("gru4rec", {"prototype_noise": 0.3, "teacher": "previous"}), ("tisasrec", {})], ids=str)
def test_dropout_does_not_depend_on_chunks_or_threads(registry, backbone, settings):
    """Two rounds with dropout: bit-identical for one and two threads, and equal for any chunks."""
    def last(chunk, at_once=64, count=1, dropout=0.2):
        with threads(count), patch.object(SIZES, "chunk_sessions", chunk), patch.object(
                SIZES, "session_users", at_once):
            return after_each_round(federation(registry, 2, backbone, dropout, "per_client", **settings))[-1]

    def numbers(progress):
        (_, _, scores), = progress.tests
        return {**progress.model.public, **progress.model.dense, **progress.model.private, **progress.client_state,
                **progress.server_state, **scores.values, "probability": progress.analysis[-1][3],
                "loss": torch.tensor([row["loss"] for row in progress.curve], dtype=torch.float64)}

    one, two = (numbers(last(3, 3, count)) for count in (1, 2))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    for chunk, at_once in ((1, 2), (64, 64)):
        other = numbers(last(chunk, at_once))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-8, msg=lambda m: f"{name}: {m}")
    assert not torch.allclose(one[ITEM], numbers(last(64, dropout=0.0))[ITEM], rtol=1e-3)


@pytest.mark.parametrize("prototype", ["positions", "mean"])
def test_noise_on_what_a_client_asks_with(registry, prototype):
    f = federation(registry, rounds=1, prototype=prototype)
    last, = after_each_round(f)
    step, asked = f.stream.steps[0], []

    def answered(queries, users):
        asked.append(queries)
        return torch.zeros_like(queries)
    for noise in (0.0, 0.5):
        rank_sessions(f.backbone, f.method, last.model,
                      SessionTask(step, "test", [3], None, DrawKey(0, 0, 0), answer_queries=answered),
                      Protection(0.0, noise, "gaussian"))
    assert float((asked[1] - asked[0]).std()) == pytest.approx(0.5, rel=0.2)


def test_noise_on_what_a_client_receives(registry):
    """N(0, std^2), anew in every batch, round, evaluation and for every client."""
    method = build(registry, "method", "fcucr", prototype_noise=0.5)
    method.client_state["prototype"] = torch.full((40, 750), 2.0)

    def received(users, **place):
        features = torch.zeros(len(users), 15, 50)
        return method.received(Encoding(users, {}, features, None, "train", DrawKey(0, 0, **place)))

    everybody = received(torch.arange(40), round=1)
    noise = (everybody - 2.0) / 0.5
    assert float(noise.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(30_000))
    assert float(noise.square().mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / 30_000))
    torch.testing.assert_close(received(torch.tensor([9, 2]), round=1), everybody[[9, 2]], rtol=0, atol=0)
    for place in ({"round": 2}, {"round": 1, "batch": 1}):
        assert (received(torch.arange(40), **place) != everybody).float().mean() > 0.99
    assert len(everybody.unique()) > 29_000


def test_transfer_before_training_keeps_to_clients_and_resumes(registry):
    """What a client sends first is its own, and the server answers from what is sent."""
    pair = Pair(registry, "fcucr", "sasrec", "sessions", {"transfer": "before", "teacher": "previous",
                                                          "prototype": "mean", "revisited": "added"})
    for check in (properties.one_by_one, properties.resumes, *(check for _, check in interference.OF_PAIRS)):
        with contextlib.suppress(Inapplicable):
            assert check(pair)


def test_uploads_before_training_are_for_sequential_backbones(registry):
    class Early(Method):
        name, uploads_first = "early", True

    f = replace(federation(registry), backbone=build(registry, "backbone", "fedmf"), method=Early(NoSettings()))
    with pytest.raises(UserError, match="method 'early' needs a sequential backbone .* found 'fedmf'"):
        f.check()
