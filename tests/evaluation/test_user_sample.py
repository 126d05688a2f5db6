"""Validation, tests and changes of ranks on keyed samples of users."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import build, executed, federation, finish
from scipy import stats

from fedcl_bench.cli.show import sampling_notes
from fedcl_bench.core.errors import UserError
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.evaluation.drift import item_rank_change
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.evaluation.ranking import in_sample
from fedcl_bench.rng import global_client_ids
from fedcl_bench.runs.config import make_config
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.stats.significance import interval_of_sample

CPU = torch.device("cpu")
SMALL = {"k_core": 70, "rounds": 1, "dim": 4}


def test_membership_is_of_the_user_alone(monkeypatch):
    """Not of how many are asked about, of who else is here, or of the order; another purpose and seed have others."""
    sample = in_sample(3, "some", 5000, 1000, 5000, CPU)
    assert abs(int(sample.sum()) - 1000) < 150
    assert torch.equal(in_sample(3, "some", 700, 1000, 5000, CPU), sample[:700])
    monkeypatch.setattr(SIZES, "normals", 64)  # users that are looked at together
    assert torch.equal(in_sample(3, "some", 5000, 1000, 5000, CPU), sample)
    here = torch.arange(4999, 0, -7).flip(0)
    with global_client_ids(here):
        assert torch.equal(in_sample(3, "some", len(here), 1000, 5000, CPU), sample[here])
    assert all(in_sample(3, "some", 40, about, 40, CPU).all() for about in (40, 41))
    for other in (in_sample(4, "some", 5000, 1000, 5000, CPU), in_sample(3, "others", 5000, 1000, 5000, CPU)):
        assert abs(int((other & sample).sum()) - 200) < 100


@pytest.fixture(scope="module")
def stream(registry):
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", SMALL)])
    return load_stream(config.source, config.stream)


def last(registry, stream, **evaluation):
    evaluation = EvaluationSettings(topk=(5,), valid_metric="ndcg@5", **evaluation)
    f = federation(registry, stream, build(registry, "method", "ft"), build(registry, "backbone", "fedmf", dim=4),
                   rounds=1, evaluation=evaluation)
    return f, finish(f)


@pytest.mark.parametrize("candidates", ["all", "sampled"])
def test_sampled_users_score_as_among_all(registry, stream, candidates):
    """Theirs are the numbers of a run that evaluates all, in every block's tests; nobody else is in them."""
    more = {"candidates": candidates, "sampled_candidates": 20}
    (f, found), (_, every) = (last(registry, stream, evaluate_users=n, **more) for n in (60, 0))
    clients = stream.steps[-1].n_users
    sample = in_sample(0, "evaluated users", clients, 60, clients, CPU)
    assert [test[:2] for test in found.tests] == [test[:2] for test in every.tests]
    for (_, _, some), (_, _, scores) in zip(found.tests, every.tests):
        kept = sample[scores.users]
        assert torch.equal(some.users, scores.users[kept]) and 0 < len(some.users) < len(scores.users)
        for metric, values in some.values.items():
            assert torch.equal(values, scores.values[metric][kept])
    assert found.curve[0]["valid"] != every.curve[0]["valid"] and found.curve[0]["loss"] == every.curve[0]["loss"]
    _, whole = last(registry, stream, evaluate_users=clients, **more)
    assert all(torch.equal(a[2].values["ndcg@5"], b[2].values["ndcg@5"]) for a, b in zip(whole.tests, every.tests))


def test_candidates_are_drawn_for_evaluated_users_alone(registry, stream, monkeypatch):
    from fedcl_bench.federation import protocols

    drawn, draw = [], protocols.draw_candidates
    monkeypatch.setattr(protocols, "draw_candidates", lambda *a: drawn.append(len(a[3])) or draw(*a))
    _, found = last(registry, stream, evaluate_users=60, candidates="sampled", sampled_candidates=20)
    assert drawn[1] == len(found.tests[0][2].users) and max(drawn) < 90


def test_changes_of_ranks_of_some_users_or_none(registry, stream):
    """Sampled users' shifts are those among all, the change of items' ranks is its definition over the sample, and what
    is of items alone stays."""
    runs = {n: {(t, kind): (ids, values) for t, kind, ids, values in last(registry, stream, drift_users=n)[1].analysis}
            for n in (10_000, 50, 0)}
    every, some, none = runs.values()
    shifts = {(t, kind) for t in (1, 2, 3) for kind in ("user_shift", "item_rank_change")}
    assert every.keys() - none.keys() == shifts and some.keys() == every.keys()
    clients = stream.steps[-1].n_users
    sample = in_sample(0, "users of drift", clients, 50, clients, CPU)
    for key, (ids, values) in every.items():
        kept = sample[ids] if key[1] == "user_shift" else torch.ones(len(ids), dtype=torch.bool)
        if key[1] != "item_rank_change":
            assert torch.equal(some[key][0], ids[kept]) and torch.equal(some[key][1], values[kept])
    (f, one), (_, two) = (last(registry, replace(stream, steps=stream.steps[:n]), drift_users=50) for n in (1, 2))
    before, now = (step.train.lengths[:stream.steps[0].n_users] > 0 for step in stream.steps[:2])
    clients = stream.steps[1].n_users
    sample = in_sample(0, "users of drift", clients, 50, clients, CPU)[:len(before)]
    users = (before & ~now & sample).nonzero().flatten()
    (changes,) = [values for _, kind, _, values in two.analysis if kind == "item_rank_change"]
    assert torch.equal(changes, item_rank_change(f.backbone, one.best.model, two.best.model, users)) and len(users)


def test_records_and_text_say_it(registry, tmp_path):
    """With intervals of the means; a run without has neither, nor the settings in its hash."""
    configs = [make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {**SMALL, **more})])
               for more in ({}, {"evaluate_users": 100, "drift_users": 50})]
    assert not {"evaluate_users", "drift_users"} & configs[0].settings.keys()
    plain, done = (executed(config, tmp_path) for config in configs)
    assert "sampled" not in plain and not sampling_notes(plain)
    sampled = done["sampled"]
    assert sampled["settings"] == {"evaluate_users": 100, "drift_users": 50}
    assert sampled["to_find"] == plain["tested"]["users"] and done["tested"]["users"] < plain["tested"]["users"]
    assert done["tested"]["interactions"] < plain["tested"]["interactions"]
    low, high = sampled["intervals"]["ndcg@20"][0]
    assert low < done["metrics"]["ndcg@20"]["per_block"][0] < high
    said = sampling_notes(done)
    assert f"block 0 {done['tested']['users'][0]} of {plain['tested']['users'][0]}" in said[0]
    assert f"ndcg@20 {low:.4f} to {high:.4f}" in said[1] and "about 50 of" in said[-1]
    few = {**done, "sampled": {**sampled, "intervals": {name: [None] * 4 for name in sampled["intervals"]}}}
    assert "too few users" in sampling_notes(few)[1]


def test_interval_is_the_normal_one():
    values = np.random.default_rng(0).random(50)
    assert interval_of_sample(values) == pytest.approx(stats.norm.interval(0.95, values.mean(), stats.sem(values)))
    hits = np.eye(50).cumsum(0)  # of one user, two, ...
    assert all(interval_of_sample(few) is None for few in (values[:1], values[:29], np.zeros(50), hits[3]))
    assert interval_of_sample(hits[4])[0] > 0.0


def test_a_sample_without_anybody_to_find_something_is_refused(registry, stream):
    f = federation(registry, stream, build(registry, "method", "ft"), evaluation=EvaluationSettings(evaluate_users=1))
    with pytest.raises(UserError, match="'evaluate_users': found 1, accepted: 0, or more: .* in block 0 .* has none"):
        f.check()
