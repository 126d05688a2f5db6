"""Whom and what the lists of a step serve."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ITEM, output_of, refused
from recbole.evaluator.metrics import AveragePopularity, ItemCoverage

from fedcl_bench.data.stream import Ragged
from fedcl_bench.evaluation import beyond_accuracy
from fedcl_bench.evaluation.beyond_accuracy import analyse_lists, catalogue_of, summarise
from fedcl_bench.evaluation.ranking import UserScores
from fedcl_bench.federation.loop import run
from fedcl_bench.plugin.state import Snapshot, score_users
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import growing_stream, session_log, session_stream


@pytest.fixture(scope="module")
def world():
    """Steps, a model, and random lists of 3 items for the users of step 1."""
    steps = growing_stream().steps[:2]
    generator = torch.Generator().manual_seed(0)
    users = (steps[-1].test.lengths > 0).nonzero().flatten()
    lists = torch.stack([torch.randperm(steps[-1].n_items, generator=generator)[:3] for _ in users])
    return steps, Snapshot({ITEM: torch.randn(steps[-1].n_items, 4, generator=generator)}, {}), users, lists


def by_kind(rows):
    return {kind: dict(zip(ids.tolist(), values.tolist())) for _, kind, ids, values in rows}


def counts_of(steps):
    counts = np.zeros(steps[-1].n_items)
    for step in steps:
        for user in range(step.n_users):
            for item in step.train.of(user).tolist():
                counts[item] += 1
    return counts


def test_against_plain_loops(world, monkeypatch):
    steps, model, users, lists = world
    kinds = by_kind(analyse_lists(steps, catalogue_of(steps, model.item_vectors), users, lists))
    counts, step = counts_of(steps), steps[-1]
    order = sorted(range(step.n_items), key=lambda item: (-counts[item], item))
    popular = {item for place, item in enumerate(order) if sum(counts[order[:place]]) < 0.8 * counts.sum()}
    kinds_of_items = {"new": lambda i: i >= step.old_items, "old": lambda i: i < step.old_items,
                      "popular": popular.__contains__, "rare": lambda i: i not in popular}
    vectors = model.public[ITEM].double()
    for user, items in zip(users.tolist(), lists.tolist()):
        assert kinds["popularity"][user] == pytest.approx(np.mean([counts[i] for i in items]))
        assert kinds["novelty"][user] == pytest.approx(np.mean(
            [-math.log2(max(counts[i], 0.5) / step.n_users) for i in items]))
        pairs = [1 - float(torch.cosine_similarity(vectors[a], vectors[b], dim=0))
                 for a in items for b in items if a != b]
        assert kinds["distance"][user] == pytest.approx(np.mean(pairs))
        assert kinds["interactions"][user] == len(step.train.of(user))
        known = any(user < s.n_users and sum(len(s.split(name).of(user)) for name in ("train", "valid", "test"))
                    for s in steps[:-1])
        assert kinds["known"][user] == known
        for name, belongs in kinds_of_items.items():
            wanted = [item for item in step.test.of(user).tolist() if belongs(item)]
            recall = kinds[f"recall {name}-items"]
            assert (user in recall) == bool(wanted)
            if wanted:
                assert recall[user] == pytest.approx(np.mean([item in items for item in wanted]))
    assert set(kinds["known"].values()) == {0.0, 1.0}  # the world has both
    some = dict(zip(users.tolist(), lists[:, :1].tolist()))  # of each list, to find beside what is there, once or twice
    found = []
    for times in (1, 2):
        tests = [test.tolist() * times + some.get(user, [])
                 for user, test in enumerate(map(step.test.of, range(step.n_users)))]
        starts = torch.tensor([0, *np.cumsum([len(test) for test in tests])])
        other = replace(step, test=Ragged(starts, torch.tensor([item for test in tests for item in test])))
        rows = by_kind(analyse_lists([*steps[:-1], other], catalogue_of(steps, model.item_vectors), users, lists))
        found.append([rows[f"recall {name}-items"] for name in kinds_of_items])
    assert found[0] == found[1] and 0.0 < min(max(recall.values()) for recall in found[0])
    steps, model, *_ = world
    whole = catalogue_of(steps, model.item_vectors).owners
    monkeypatch.setattr(beyond_accuracy, "_PAIRS", 2)
    assert torch.equal(catalogue_of(steps, model.item_vectors).owners, whole) and whole.max() > 1
    pairs = {(user, item) for step in steps for user in range(step.n_users) for item in step.train.of(user).tolist()}
    assert whole.tolist() == [sum(item == i for _, item in pairs) for i in range(steps[-1].n_items)]


def test_recboles_metrics(world):
    steps, model, users, lists = world
    kinds = by_kind(analyse_lists(steps, catalogue_of(steps, model.item_vectors), users, lists))
    config = {"topk": [3], "metric_decimal_place": 12}
    counts = {item: count for item, count in enumerate(counts_of(steps))}
    popularity = AveragePopularity.__new__(AveragePopularity)
    popularity.topk, popularity.decimal_place = config["topk"], 12
    expected = popularity.topk_result("p", popularity.metric_info(popularity.get_pop(lists.numpy(), counts)))["p@3"]
    assert np.mean(list(kinds["popularity"].values())) == pytest.approx(expected)
    coverage = ItemCoverage.__new__(ItemCoverage).get_coverage(lists.numpy(), steps[-1].n_items)
    assert np.mean([shown > 0 for shown in kinds[beyond_accuracy.RECOMMENDED].values()]) == pytest.approx(coverage)


def test_short_and_missing_lists(world):
    steps, model, users, lists = world
    cut = lists.clone()
    cut[0], cut[1, 1:] = -1, -1
    kinds = by_kind(analyse_lists(steps, catalogue_of(steps, model.item_vectors), users, cut))
    first, second = users[:2].tolist()
    assert kinds["distance"][first] == kinds["distance"][second] == kinds["popularity"][first] == 0.0
    assert kinds["popularity"][second] == counts_of(steps)[int(lists[1, 0])]
    nobody = by_kind(analyse_lists(steps, catalogue_of(steps, model.item_vectors), users[:0], lists[:0]))
    assert not nobody["novelty"] and not any(nobody[beyond_accuracy.RECOMMENDED].values())


def test_groups(world):
    steps, model, users, lists = world
    values = torch.linspace(0, 1, len(users), dtype=torch.float64)
    rows = analyse_lists(steps, catalogue_of(steps, model.item_vectors), users, lists)
    result = summarise([(1, 1, UserScores(users, {"ndcg@3": values, "rmse": values}))], rows, 3)
    kinds, groups = by_kind(rows), result["groups"]
    known = np.array([kinds["known"][u] for u in users.tolist()])
    mean = [pytest.approx(values[known == 0].mean().item())]
    assert groups["new-users"] == {"users": [int((known == 0).sum())], "ndcg@3": mean, "rmse": mean}
    tenth = -(-len(users) // 10)
    assert groups["worst-decile"]["ndcg@3"] == [pytest.approx(values[:tenth].mean().item())]
    assert groups["worst-decile"]["rmse"] == [pytest.approx(values[-tenth:].mean().item())]  # less is better
    activity = np.array([kinds["interactions"][u] for u in users.tolist()])
    quarter = -(-len(users) // 4)
    assert groups["least-active"]["users"] == [quarter] == groups["most-active"]["users"]
    least = np.argsort(activity, kind="stable")[:quarter]
    assert groups["least-active"]["ndcg@3"] == [pytest.approx(values.numpy()[least].mean())]
    assert set(groups) == set(beyond_accuracy.GROUPS) and result["lists"]["coverage@3"][0] <= 1.0
    assert summarise([(1, 1, UserScores(users, {"ndcg@3": values}))], [], 3) == {}


def test_by_group_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--set", "k_core=80", "--quiet"]
    out = output_of(capsys, *command, "--by", "new-users,rare-items")
    assert "ndcg@20 new-users" in out and "recall@20 rare-items" in out and "most-active" not in out
    content = json.loads(output_of(capsys, *command, "--json"))
    assert set(content["groups"]) == set(beyond_accuracy.GROUPS)
    assert {name.split("@")[0] for name in content["lists"]} == {"coverage", "novelty", "popularity", "distance"}
    assert "Did you mean 'new-users'" in refused(capsys, *command, "--by", "newusers")


# Streams of sessions


def session_run(registry, **settings):
    stream = session_stream(session_log(30), 30)
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[
        ("test", {"stream": "sessions", "rounds": 1, "topk": (3,), "valid_metric": "hit@3",
                  "precision": "float64", **settings})])
    f = config.federation(stream)
    *_, progress = run(f)
    return f, stream.steps[0], progress


@pytest.mark.parametrize("candidates", ["sampled", "all"])
def test_sessions_against_plain_loops(registry, candidates):
    """Lists under full ranking, of which nothing is masked, and who is popular by training interactions."""
    few = {"sampled_candidates": 8} if candidates == "sampled" else {}
    f, step, progress = session_run(registry, candidates=candidates, **few)
    model, kinds, counts = progress.best.model, by_kind(progress.analysis), counts_of([step])
    (_, _, scores), = progress.tests
    scores_of_all = score_users(f.backbone, model, scores.users)
    lists = scores_of_all.argsort(dim=1, descending=True, stable=True)[:, :3].tolist()
    order = sorted(range(step.n_items), key=lambda item: (-counts[item], item))
    popular = {item for place, item in enumerate(order) if sum(counts[order[:place]]) < 0.8 * counts.sum()}
    owners = [sum(item in step.train.of(user).tolist() for user in range(step.n_users)) for item in range(step.n_items)]
    full = "all:" if candidates == "sampled" else ""
    for row, (user, items) in enumerate(zip(scores.users.tolist(), lists)):
        target, = step.test.of(user).tolist()
        assert kinds["popularity"][user] == pytest.approx(np.mean([counts[i] for i in items]))
        assert kinds["novelty"][user] == pytest.approx(np.mean(
            [-math.log2(max(owners[i], 0.5) / step.n_users) for i in items]))
        assert kinds["interactions"][user] == len(step.train.of(user))
        assert scores.values[f"{full}hit@3"][row] == float(target in items)
        assert (user in kinds["recall popular-items"]) == (target in popular) != (user in kinds["recall rare-items"])
        name = "popular-items" if target in popular else "rare-items"
        for prefix in {"", full}:
            assert kinds[f"{prefix}recall {name}"][user] == float(scores.values[f"{prefix}recall@3"][row])
    assert sum(kinds[beyond_accuracy.RECOMMENDED].values()) == 3 * len(scores.users) and "known" not in kinds
