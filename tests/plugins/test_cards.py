"""The numeric checks of the papers' method cards, one test each."""

import math

import pytest
import torch
from helpers import ITEM, USER, build, federation, finish, one_step
from synthetic import small_stream

from fedcl_bench import Snapshot
from fedcl_bench.toolbox.distillation import distillation_loss, ranks_of, refresh_teacher
from fedcl_bench.rng import DrawKey
from fedcl_bench.federation.loop import run
from fedcl_bench.kernels import ops
from fedcl_bench.testing.worlds import ragged


@pytest.fixture(scope="module")
def stream():
    return small_stream()


# FedMF -------------------------------------------------------------------------------------------------------------


def test_fedmf_starts_small(registry):
    """Rows are N(0, .01^2)."""
    public, private = build(registry, "backbone", "fedmf").new_rows(5, range(0, 900), range(0, 1100))
    for table in (public[ITEM], private[USER]):
        assert float(table.std()) == pytest.approx(0.01, rel=0.02) and abs(float(table.mean())) < 2e-4
    assert not torch.equal(public[ITEM][:900], private[USER])


# KD ----------------------------------------------------------------------------------------------------------------


def test_kd_reductions():
    scores, teacher = torch.zeros(1, 4), torch.full((1, 4), 0.5)
    chosen = torch.tensor([[True, True, False, False]])
    assert float(distillation_loss(scores, teacher, chosen, "mean")) == pytest.approx(math.log(2))
    assert float(distillation_loss(scores, teacher, chosen, "sum")) == pytest.approx(2 * math.log(2))
    assert float(distillation_loss(scores, teacher, torch.zeros_like(chosen), "mean")) == 0.0


def test_kd_teacher_refresh(registry):
    """All users get the new model's probabilities; only refreshed users get a new list; lists are ordered top-N."""
    backbone = build(registry, "backbone", "fedmf", dim=3)
    torch.manual_seed(2)
    first = Snapshot({ITEM: torch.randn(9, 3)}, {USER: torch.randn(4, 3)})
    second = Snapshot({ITEM: torch.randn(12, 3)}, {USER: torch.randn(6, 3)})
    state = {}
    refresh_teacher(state, first, backbone, 4, torch.arange(4))
    scores = first.private[USER] @ first.public[ITEM].T
    assert torch.equal(state["lists"], scores.argsort(1, descending=True)[:, :4])
    old = state["lists"].clone()
    refresh_teacher(state, second, backbone, 4, torch.tensor([1, 4, 5]))
    scores = second.private[USER] @ second.public[ITEM].T
    for user in range(6):
        expected = old[user] if user in (0, 2, 3) else scores[user].argsort(descending=True)[:4]
        assert torch.equal(state["lists"][user], expected)
        torch.testing.assert_close(state["teacher"][user], torch.sigmoid(scores[user][expected]))
    assert set(state) == {"lists", "teacher"}


@pytest.mark.parametrize("method", ["kd", "f3crec"])
def test_who_has_not_trained_yet_has_no_list(registry, method):
    """Nothing is distilled at a user who was new without training data, until its list has been made."""
    backbone, method = build(registry, "backbone", "fedmf", dim=3), build(registry, "method", method, top_n=4)
    model = Snapshot({ITEM: torch.randn(12, 3)}, {USER: torch.randn(3, 3)})
    for trained, listed in (([0], [True, False, False]), ([2], [True, False, True]), ([1], [True, True, True])):
        method.end_step(one_step(ragged([0], [1], [2]), 12), model, backbone, torch.tensor(trained), None)
        chosen = method.soft_targets().chosen
        assert (chosen is None) == all(listed)
        assert chosen is None or torch.equal(chosen, torch.tensor(listed)[:, None].expand(3, 4))


# F3CRec ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f3crec_ranks_match_sorting(monkeypatch, dtype):
    torch.manual_seed(4)
    scores = torch.randn(20, 300, dtype=dtype)
    items = torch.stack([torch.randperm(300)[:30] for _ in range(20)])
    expected = scores.argsort(1, descending=True).argsort(1).gather(1, items) + 1
    some_equal = (4 * scores).round()
    found = ranks_of(scores, items), ranks_of(some_equal, items)
    monkeypatch.setattr(ops, "why_not", lambda: "switched off")
    assert torch.equal(found[0], expected) and torch.equal(ranks_of(scores, items), expected)
    assert torch.equal(found[1], ranks_of(some_equal, items))


def f3crec_after_block(registry, table, **settings):
    method = build(registry, "method", "f3crec", **settings)
    method.server_state = {ITEM: table}
    return method


def test_f3crec_ablations(registry, stream):
    """cc and sc switch a part off, itm weighs every old item alike, arm replays whole lists."""
    previous, mean = torch.randn(3, 4), torch.randn(5, 4)
    uniform = f3crec_after_block(registry, previous, without="itm").aggregate({ITEM: mean})[ITEM]
    torch.testing.assert_close(uniform[:3], 0.1 * mean[:3] + 0.9 * previous)
    assert f3crec_after_block(registry, previous, without="sc").aggregate({ITEM: mean})[ITEM] is mean
    assert build(registry, "method", "f3crec", without="cc").replayed_items(torch.arange(3), DrawKey(0, 1)) is None
    runs = {without: finish(federation(registry, stream, build(registry, "method", "f3crec", without=without),
                                       rounds=3))
            for without in ("none", "cc", "arm", "sc", "itm")}
    tables = [p.model.public[ITEM] for p in runs.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])
    kd = finish(federation(registry, stream, build(registry, "method", "kd"), rounds=3))
    arm_only = finish(federation(registry, stream, build(registry, "method", "f3crec", without="arm", beta=0.0),
                                 rounds=3))
    assert torch.equal(kd.model.public[ITEM], arm_only.model.public[ITEM])  # whole lists, plain mean: KD


def test_f3crec_teacher_is_the_best_round_and_start_is_the_last(registry, ml100k):
    """Teacher and Q^{t-1} are the best validation round's; the next block starts from the last one (or the best)."""
    for init_from in ("last", "best"):
        method = build(registry, "method", "f3crec")
        f = federation(registry, ml100k, method, rounds=100, patience=1, init_from=init_from)
        progress = iter(run(f))
        base = next(p for p in progress if p.trained)
        assert base.round == base.best.round + 2
        assert not torch.equal(base.model.public[ITEM], base.best.model.public[ITEM])
        after = next(progress)
        assert torch.equal(after.server_state[ITEM], base.best.model.public[ITEM])
        assert after.previous is after.best.model  # no other is held while the next block begins
        assert (after.model is after.best.model) == (init_from == "best")
        first = next(progress)
        assert first.step == 1 and first.round == 1
        start = base.model if init_from == "last" else base.best.model
        absent = (ml100k.steps[1].train.lengths[:587] == 0).nonzero().flatten()
        assert torch.equal(first.model.private[USER][absent], start.private[USER][absent])
