"""Ranking metrics against RecBole's metric classes, rank_all against plain Python, continual summaries by hand; changes
of ranks; what costs most is done once for all batches of a ranking."""

import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ITEM, USER, TableBackbone, build
from hypothesis import given, settings, strategies as st
from recbole.evaluator import metrics as recbole_metrics
from torch import nn

from fedcl_bench.core.errors import UserError
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.evaluation import drift
from fedcl_bench.evaluation.continual import summaries
from fedcl_bench.evaluation.drift import item_movement, item_rank_change
from fedcl_bench.evaluation.metrics import DEFAULT, measure, parse_metric
from fedcl_bench.evaluation.ranking import RankingTask, is_product, rank_all, users_at_once
from fedcl_bench.evaluation.session_ranking import Ranking, rank_by_module
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.kernels import ops
from fedcl_bench.kernels.functional import all_ranks
from fedcl_bench.kernels.ops import highest
from fedcl_bench.plugin.metric import RankedLists
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing.trials import Pair
from fedcl_bench.testing.worlds import ragged
from fedcl_bench.toolbox.transformer import MoEAdapter
from fedcl_bench.training.silo_modules import histories


@settings(max_examples=60)
@given(st.integers(0, 10 ** 6), st.integers(1, 12), st.sampled_from([[1], [5, 10], [20], [3, 20]]))
def test_metrics_equal_recboles(seed, users, topk):
    """RecBole's own Recall, NDCG, Hit, Precision and MRR on random rankings."""
    rng = np.random.default_rng(seed)
    length = max(topk)
    relevant = rng.integers(1, 30, users)
    hits = np.zeros((users, length), dtype=bool)
    for u in range(users):
        found = rng.integers(0, min(relevant[u], length) + 1)
        hits[u, rng.choice(length, found, replace=False)] = True
    ours = measure(DEFAULT, RankedLists(torch.from_numpy(hits), torch.from_numpy(relevant)), topk)
    config = {"topk": topk, "metric_decimal_place": 12}
    data = {"rec.topk": torch.from_numpy(np.concatenate([hits, relevant[:, None]], axis=1).astype(np.int64))}
    np.float = np.float64  # RecBole's MRR uses the old name
    try:
        for name, cls in (("recall", "Recall"), ("ndcg", "NDCG"), ("hit", "Hit"), ("precision", "Precision"),
                          ("mrr", "MRR")):
            theirs = getattr(recbole_metrics, cls)(config).calculate_metric(data)
            for k in topk:
                assert float(ours[f"{name}@{k}"].mean()) == pytest.approx(theirs[f"{name}@{k}"], abs=1e-9)
    finally:
        del np.float


@settings(max_examples=40)
@given(st.integers(0, 10 ** 6), st.booleans())
def test_rank_all_equals_plain_python(seed, compiled):
    """Masks, candidates and users, some of equal scores, against sorting each user's list in Python."""
    rng = np.random.default_rng(seed)
    users, items, k = 9, 25, 5
    scores = torch.from_numpy(rng.integers(0, 60, (users, items)).astype(np.float32))
    target = [rng.choice(items, rng.integers(0, 6), replace=False).tolist() for _ in range(users)]
    masks = [[rng.choice(items, rng.integers(0, 8), replace=False).tolist() for _ in range(users)] for _ in range(2)]
    if not any(target):
        target[0] = [1]
    with mock.patch.object(ops, "why_not", ops.why_not if compiled else lambda: "switched off"):
        result = rank_all(TableBackbone(), None, Snapshot({"items": torch.zeros(items, 1)}, {"scores": scores}),
                          RankingTask(ragged(*target), [ragged(*m) for m in masks], [k]))
    expected = []
    for u in range(users):
        if not target[u]:
            continue
        allowed = [i for i in range(items) if i not in masks[0][u] and i not in masks[1][u]]
        ranked = sorted(allowed, key=lambda i: -float(scores[u, i]))[:k]
        gains = [1 / math.log2(r + 2) for r, i in enumerate(ranked) if i in target[u]]
        ideal = sum(1 / math.log2(r + 2) for r in range(min(len(target[u]), k)))
        expected.append((u, len(gains) / len(target[u]), sum(gains) / ideal))
    assert result.users.tolist() == [u for u, _, _ in expected]
    assert result.values[f"recall@{k}"].tolist() == pytest.approx([r for _, r, _ in expected])
    assert result.values[f"ndcg@{k}"].tolist() == pytest.approx([n for _, _, n in expected])


def test_rules_of_single_lists():
    """With fewer unmasked candidates than K, a masked item at the end of the list is no hit; an item to find twice
    counts once; of equal scores the smaller item comes first; and no list is longer than the items."""
    def ranked(scores, *task):
        model = Snapshot({"items": torch.zeros(scores.shape[1], 1)}, {"scores": scores})
        return rank_all(TableBackbone(), None, model, RankingTask(*task)).values
    falling = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert ranked(falling, ragged([0, 1]), [ragged([0, 2, 3])], [4])["recall@4"].tolist() == [0.5]
    assert ranked(falling, ragged([0, 3, 0]), [], [2])["recall@2"].tolist() == [0.5]
    equal = ranked(torch.zeros(3, 50), ragged([0], [4], [7]), [ragged([], [0, 2], [])], [3])
    assert equal["mrr@3"].tolist() == [1.0, 1 / 3, 0.0]
    with pytest.raises(UserError, match="at most the number of items, 4"):
        ranked(torch.zeros(1, 4), ragged([0]), [], [5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 40, 319, 320, 2047, 2048, 50001])
@pytest.mark.parametrize("k", [1, 150])
def test_highest_are_those_of_a_stable_sort(columns, k, dtype):
    """Few different values, so that nearly all are equal to others; some are not numbers, infinite or -0."""
    generator = torch.Generator().manual_seed(columns)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan], dtype=dtype)
    for values in (special, torch.arange(-3.0, 4.0, dtype=dtype), torch.randn(10 ** 5, generator=generator).to(dtype)):
        scores = values[torch.randint(len(values), (5, columns), generator=generator)]
        expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(highest(scores, k), expected)


def fedmf_of(registry, users, items, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return build(registry, "backbone", "fedmf"), Snapshot(
        {ITEM: torch.randn(items, 32, generator=generator)}, {USER: torch.randn(users, 32, generator=generator)})


@pytest.mark.parametrize("users", [1, 130])
def test_many_items_are_ranked_in_large_pieces(registry, users):
    """FedMF on 20,000 items against sorting the whole product; the pieces hold more users than fit into 2 MiB."""
    backbone, model = fedmf_of(registry, users, 20000)
    scores = model.private[USER] @ model.public[ITEM].T
    order = scores.argsort(1, descending=True)
    target, mask = order[:, [3, 9, 50]], order[:, [0, 5]]
    found = rank_all(backbone, None, model, RankingTask(ragged(*target.tolist()), [ragged(*mask.tolist())], [10]))
    assert (users_at_once(20000, False), users_at_once(20000, is_product(backbone, model))) == (26, 64)
    assert found.values["mrr@10"].tolist() == [1 / 3] * users  # one of the three items before it is masked
    assert found.values["recall@10"].tolist() == pytest.approx([2 / 3] * users)


def test_sampled_candidates_alone_rank_as_among_all_items(registry, monkeypatch):
    """Masks, lists with gaps, items to find that are candidates or masked, and more places than candidates."""
    users, items, m = 60, 700, 9
    backbone, model = fedmf_of(registry, users, items)
    rng = np.random.default_rng(0)
    candidates = torch.from_numpy(rng.integers(-1, items, (users, m)))
    target = [[int(candidates[u, 0].clamp(min=0)), *rng.integers(0, items, u % 3).tolist()] for u in range(users)]
    masks = [ragged(*([int(candidates[u, 1].clamp(min=0)), *target[u][:u % 2]] for u in range(users)))]

    def scored_items():
        sizes = []
        monkeypatch.setattr("fedcl_bench.evaluation.ranking.score_pairs",
                            lambda *a: sizes.append(a[3].shape) or pairs(*a))
        return sizes, rank_all(backbone, None, model, RankingTask(ragged(*target), masks, [5, 20], candidates))

    pairs = sys.modules["fedcl_bench.evaluation.ranking"].score_pairs
    sizes, alone = scored_items()
    assert sizes == [(users, m + 3)]
    monkeypatch.setattr(SIZES, "items_per_candidate", 100)
    sizes, whole = scored_items()
    assert sizes == []
    assert set(alone.values["hit@5"].tolist()) == {0.0, 1.0}
    for name in whole.values:
        assert torch.equal(alone.values[name], whole.values[name])


def test_continual_summaries_by_hand_and_names_of_metrics():
    r = np.array([[0.5, np.nan, np.nan], [0.4, 0.6, np.nan], [0.45, 0.3, 0.9]])
    found = summaries(r)
    la, ra = (0.5 + 0.6 + 0.9) / 3, (0.45 + 0.3 + 0.9) / 3
    assert found["LA"] == pytest.approx(la) and found["RA"] == pytest.approx(ra)
    assert found["HM"] == pytest.approx(2 * la * ra / (la + ra))
    assert found["BWT"] == pytest.approx(((0.45 - 0.5) + (0.3 - 0.6)) / 2)
    assert found["forgetting"] == pytest.approx(((0.5 - 0.45) + (0.6 - 0.3)) / 2)
    error = summaries(r, error=True)
    assert error["BWT"] == found["BWT"] and error["forgetting"] == pytest.approx(((0.45 - 0.4) + (0.3 - 0.6)) / 2)
    single = summaries(np.array([[0.2]]))
    assert single["BWT"] is None and single["forgetting"] is None and single["LA"] == 0.2
    assert parse_metric("recall@50") == ("recall", 50)
    for bad in ("recall", "recall@", "recall@0", "recall@-1", "@5", "recall@x"):
        with pytest.raises(UserError):
            parse_metric(bad)


def ranks_by_definition(scores):
    """A stable sort of each row, highest first."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(1, scores.shape[1] + 1).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 319, 5000])
@pytest.mark.parametrize("compiled", [True, False])
def test_all_ranks_are_those_of_a_stable_sort(columns, dtype, compiled, monkeypatch):
    """Many different numbers; few, so that nearly all are equal to others; and all that are special."""
    if compiled and ops.why_not():
        pytest.skip(ops.why_not())
    if not compiled:
        monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    generator = torch.Generator().manual_seed(columns)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45], dtype=dtype)
    for values in (special, torch.arange(-3.0, 4.0, dtype=dtype), torch.randn(10 ** 5, generator=generator).to(dtype),
                   10.0 ** torch.arange(-30, 30, dtype=dtype)):
        scores = values[torch.randint(len(values), (4, columns), generator=generator)]
        assert torch.equal(all_ranks(scores).long(), ranks_by_definition(scores))
        assert torch.equal(all_ranks(scores[:, ::2]).long(), ranks_by_definition(scores[:, ::2]))


@pytest.mark.parametrize("compiled", [True, False])
def test_rank_change_is_its_definition_to_the_bit(compiled, monkeypatch):
    """Over several pieces of users; items new since are not ranked, and users are those asked for."""
    if not compiled:
        monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    monkeypatch.setattr(drift, "in_pieces", lambda users, n_items: iter(users.split(30)))
    generator, users = torch.Generator().manual_seed(0), torch.arange(0, 200, 2)
    before, now = torch.randn(200, 600, generator=generator), torch.randn(200, 610, generator=generator)
    models = [Snapshot({"items": torch.zeros(scores.shape[1], 1)}, {"scores": scores}) for scores in (before, now)]
    expected = torch.zeros(600, dtype=torch.float64)
    for piece in users.split(30):
        a, b = (ranks_by_definition(scores[piece][:, :600]).double() for scores in (before, now))
        expected += ((a - b).abs() / a).sum(0)
    assert torch.equal(item_rank_change(TableBackbone(), *models, users), expected / 100)
    assert item_rank_change(TableBackbone(), *models, users[:0]).isnan().all()


@pytest.mark.parametrize("d, expected", [(4, [2.0, 0.0]), (0, [0.0, 0.0])])
def test_movement_of_items(d, expected):
    before, now = torch.zeros(2, d), torch.zeros(3, d)
    now[0] = 1.0
    assert item_movement(Snapshot({ITEM: before}, {}), Snapshot({ITEM: now}, {})).tolist() == expected


@pytest.mark.parametrize("method, backbone, costly, settings", [
    ("ffmsr", "ffmsr", "adapter", {}), ("ft", "vqrec", "embedding_bag", {}), ("ft", "ccdr", "sparse", {}),
    ("ffmsr", "recbole:FDSA", "adapter", {"semantics": True})])
def test_ranks_are_those_of_each_batch_alone(monkeypatch, method, backbone, costly, settings):
    """After items have changed too; and what costs most is done once for all batches."""
    f = Pair(discover(), method, backbone, "domains", settings).federation()
    domain = CrossSilo(f).domains[0]
    module, sessions, done = domain.module.eval(), domain.step.sessions["test"], []

    def counted(name, operation):
        def call(*args, **options):
            done.append(name)
            return operation(*args, **options)
        return call

    monkeypatch.setattr(MoEAdapter, "forward", counted("adapter", MoEAdapter.forward))
    monkeypatch.setattr(torch.sparse, "mm", counted("sparse", torch.sparse.mm))
    monkeypatch.setattr(nn.functional, "embedding_bag", counted("embedding_bag", nn.functional.embedding_bag))
    for _ in range(2):
        with torch.no_grad():
            for value in module.parameters():
                value += 0.1 * torch.randn_like(value)
            everybody = torch.arange(len(sessions.lengths))
            batch, wanted = histories(sessions, everybody, f.backbone.settings.max_length, fixed=True)
            scores = module.scores(batch)
        ranks = (scores >= scores.gather(1, wanted[:, None])).sum(1)
        expected = (1.0 / ranks).where(ranks <= 5, 0.0)
        counts = []
        for at_once in (len(wanted), 2):
            done.clear()
            monkeypatch.setattr(SIZES, "central_ranked", at_once)
            metric, = (each for each in f.metrics if each.name == "mrr")
            scored = rank_by_module(f.backbone, module, domain.step, "test", Ranking([5], [metric]))
            torch.testing.assert_close(scored.values["mrr@5"][scored.users.argsort()], expected.double())
            counts.append(done.count(costly))
        assert len(wanted) > 4 and counts[0] == counts[1] > 0
