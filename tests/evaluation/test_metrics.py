"""Ranking metrics against RecBole's metric classes, rank_all against plain Python, continual summaries by hand."""

from __future__ import annotations

import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ITEM, USER, TableBackbone, build
from hypothesis import given, settings, strategies as st

from fedcl_bench.core.errors import UserError
from fedcl_bench.evaluation.continual import summaries
from fedcl_bench.evaluation.metrics import measure
from fedcl_bench.evaluation.metrics import DEFAULT, parse_metric
from fedcl_bench.evaluation.ranking import RankingTask, is_product, rank_all, users_at_once
from fedcl_bench.plugin.metric import RankedLists
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.kernels import ops
from fedcl_bench.kernels.ops import highest
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.testing.worlds import ragged


@settings(max_examples=60)
@given(st.integers(0, 10 ** 6), st.integers(1, 12), st.sampled_from([[1], [5, 10], [20], [3, 20]]))
def test_metrics_equal_recboles(seed, users, topk):
    """RecBole's own Recall, NDCG, Hit, Precision and MRR on random rankings."""
    from recbole.evaluator import metrics as recbole_metrics
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


def test_masked_target_is_never_a_hit():
    """With fewer unmasked candidates than K, a masked item at the end of the list does not count."""
    model = Snapshot({"items": torch.zeros(4, 1)}, {"scores": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    result = rank_all(TableBackbone(), None, model, RankingTask(ragged([0, 1]), [ragged([0, 2, 3])], [4]))
    assert result.values["recall@4"].tolist() == [0.5]


def test_lists_longer_than_the_items_are_refused():
    model = Snapshot({"items": torch.zeros(4, 1)}, {"scores": torch.zeros(1, 4)})
    with pytest.raises(UserError, match="at most the number of items, 4"):
        rank_all(TableBackbone(), None, model, RankingTask(ragged([0]), [], [5]))


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


def test_of_equal_scores_the_smaller_item_comes_first():
    model = Snapshot({"items": torch.zeros(50, 1)}, {"scores": torch.zeros(3, 50)})
    result = rank_all(TableBackbone(), None, model, RankingTask(ragged([0], [4], [7]), [ragged([], [0, 2], [])], [3]))
    assert result.values["mrr@3"].tolist() == [1.0, 1 / 3, 0.0]


def test_an_item_to_find_twice_counts_once():
    model = Snapshot({"items": torch.zeros(4, 1)}, {"scores": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    result = rank_all(TableBackbone(), None, model, RankingTask(ragged([0, 3, 0]), [], [2]))
    assert result.values["recall@2"].tolist() == [0.5]


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


def test_metric_names():
    assert parse_metric("recall@50") == ("recall", 50)
    for bad in ("recall", "recall@", "recall@0", "recall@-1", "@5", "recall@x"):
        with pytest.raises(UserError):
            parse_metric(bad)


def test_continual_summaries_by_hand():
    r = np.array([[0.5, np.nan, np.nan], [0.4, 0.6, np.nan], [0.45, 0.3, 0.9]])
    found = summaries(r)
    la, ra = (0.5 + 0.6 + 0.9) / 3, (0.45 + 0.3 + 0.9) / 3
    assert found["LA"] == pytest.approx(la) and found["RA"] == pytest.approx(ra)
    assert found["HM"] == pytest.approx(2 * la * ra / (la + ra))
    assert found["BWT"] == pytest.approx(((0.45 - 0.5) + (0.3 - 0.6)) / 2)
    assert found["forgetting"] == pytest.approx(((0.5 - 0.45) + (0.6 - 0.3)) / 2)
    single = summaries(np.array([[0.2]]))
    assert single["BWT"] is None and single["forgetting"] is None and single["LA"] == 0.2
