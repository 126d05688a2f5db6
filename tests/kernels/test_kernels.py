"""Compiled kernels against PyTorch's operations, and what happens where there are none."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, build, grown, training
from hypothesis import given, settings, strategies as st

from fedcl_bench import LocalSettings, rng
from fedcl_bench.training.list_trainer import ListTrainer
from fedcl_bench.data.stream import Step
from fedcl_bench.data.streams.synth import SyntheticLog, step_of
from fedcl_bench.rng import DrawKey
from fedcl_bench.kernels.functional import nearest_entries, weighted_bce
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.kernels import ops, library
from fedcl_bench.training.sampling import Needs, Others, draw_negatives, make_chunks, padded
from fedcl_bench.testing.worlds import ragged

compiled = pytest.mark.skipif(ops.why_not() is not None, reason=f"no compiled kernels: {ops.why_not()}")


@pytest.fixture(scope="module")
def step():
    return step_of(SyntheticLog(200, 150, per_user=40.0, activity=1.0))


@pytest.fixture
def without(monkeypatch):
    """Runs a function without kernels."""
    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "why_not", lambda: "switched off")
            return function()
    return run


@compiled
@pytest.mark.parametrize("pool", ["untrained", "untouched"])
@pytest.mark.parametrize("draw, negatives", [("repeated", 4), ("distinct", 1), ("distinct", 9)])
def test_negatives_to_the_bit(step, without, pool, draw, negatives):
    users = torch.arange(step.n_users)
    local = LocalSettings(negative_pool=pool, negative_draw=draw, negatives=negatives)
    theirs = without(lambda: make_chunks(step, users, local, 8))
    for chunk, other in zip(make_chunks(step, users, local, 8), theirs, strict=True):
        expected = without(lambda: draw_negatives(other, local, 1, 2, 3))
        assert torch.equal(draw_negatives(chunk, local, 1, 2, 3), expected)


@compiled
@pytest.mark.parametrize("own", [1, 15, 16, 17, 63, 64, 65, 80, 129, 700, 2100])
def test_negatives_of_clients_of_any_size(without, own):
    """Compared with all gaps, with one of each sixteen, or searched."""
    generator = torch.Generator().manual_seed(own)
    lists = [torch.randperm(2300, generator=generator)[:n].tolist() for n in (own, max(own - 3, 1), own)]
    train, nobody = ragged(*lists), ragged(*[[] for _ in lists])
    step = Step(0, 3, 2300, 0, 0, sum(map(len, lists)), train=train, valid=nobody, test=nobody)
    users = torch.arange(3)
    for local in (LocalSettings(), LocalSettings(negative_draw="distinct")):
        theirs = without(lambda: make_chunks(step, users, local, 8))
        for chunk, other in zip(make_chunks(step, users, local, 8), theirs, strict=True):
            drawn = without(lambda: draw_negatives(other, local, 1, 2, 3))
            assert torch.equal(draw_negatives(chunk, local, 1, 2, 3), drawn)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=5), st.data())
def test_lists_as_matrices(lists, data):
    """With repeated items, with another client's fill, and what is left to draw."""
    order = data.draw(st.permutations(range(len(lists))))
    users, longest, n_items = torch.tensor(order), max(map(len, lists)), 11
    found = padded(ragged(*lists), users)
    assert found.tolist() == [lists[u] + lists[u][:1] * (longest - len(lists[u])) for u in order]
    filled = padded(ragged(*lists), users, users[:, None])
    assert filled.tolist() == [lists[u] + [u] * (longest - len(lists[u])) for u in order]
    others = Others.of(found, n_items)
    for place, user in enumerate(order):
        left = [item for item in range(n_items) if item not in lists[user]]
        assert int(others.count[place]) == len(left)
        position = torch.arange(len(left)).expand(len(lists), -1)
        assert others.at(position)[place].tolist() == left


@compiled
@pytest.mark.parametrize("backbone", ["fedmf", "biasmf"])  # pointwise, pairwise
@pytest.mark.parametrize("size", [1, 7, 40, 10 ** 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_local_batches_to_the_bit(registry, step, without, backbone, size, dtype):
    backbone, local = build(registry, "backbone", backbone, dim=4), LocalSettings(batch_size=size)
    model = grown(backbone, step, dtype=dtype)
    users = torch.arange(0, step.n_users, 1 if size > 1 else 40)
    for chunk in make_chunks(step, users, local, 8, Needs(backbone.pairwise)):
        trainer = ListTrainer(chunk, model, training(backbone, Method(NoSettings()), model, local), DrawKey(3, 1, 2))

        def weights(trainer=trainer):
            return [view.members.weights() for view in trainer._covering(1)]

        found, expected = weights(), without(weights)
        assert len(found) == len(expected) == chunk.batches
        for one, other in zip(found, expected):
            assert torch.equal(one, other)
        # Every sample is in one local batch: its share times the batch's size adds up to 1.
        total = sum(weights.double() * (trainer.samples - batch * size).clamp(max=size)
                    for batch, weights in enumerate(found))
        torch.testing.assert_close(total.sum(1, keepdim=True), trainer.samples.double(), atol=1e-3, rtol=0.0)


@compiled
@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.integers(0, 60), st.integers(1, 300), st.integers(1, 320), st.data())
def test_local_batches_follow_the_order_of_keys(clients, head, tail, size, data):
    """The b-th ``size`` smallest keys, of the columns that are a client's own, in the order of columns."""
    seed = data.draw(st.integers(0, 2 ** 31))
    generator = torch.Generator().manual_seed(seed)
    head_own = torch.randint(head + 1, (clients,), generator=generator)
    tail_own = torch.randint(tail + 1, (clients,), generator=generator)
    slots = torch.randint(10 ** 6, (clients, head + tail), generator=generator)
    keys = rng.client_keys(seed, torch.arange(clients))
    found = ops.group(keys, head, head_own, tail_own, slots, head + tail, size)
    for client, row in enumerate(found.tolist()):
        columns = [*range(int(head_own[client])), *(head + j for j in range(int(tail_own[client])))]
        order_key = rng.sort_keys(rng.bits(keys[client], torch.arange(len(columns)))).tolist()
        ranked = sorted(range(len(columns)), key=lambda i: (order_key[i], i))
        expected = [int(slots[client, columns[i]]) for start in range(0, len(columns), size)
                    for i in sorted(ranked[start:start + size])]
        assert row == expected + [-1] * (head + tail - len(columns))
    alone = ops.group(keys, 0, None, tail_own, None, tail, 10 ** 9)
    assert alone.tolist() == [[*range(n)] + [-1] * (tail - n) for n in tail_own.tolist()]


@compiled
def test_cross_entropy_and_slopes():
    """Against double precision, for logits from vanishing to overflowing; entries beyond a multiple of 16 too."""
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 16, 37, 1000):
        scores = torch.randn(5, columns, generator=generator) * torch.tensor([[1e-4], [1.0], [10.0], [60.0], [1e4]])
        targets, weights = (torch.rand(5, columns, generator=generator) for _ in range(2))
        targets[:, ::2] = (targets[:, ::2] > 0.5).float()
        scores.requires_grad_()
        loss = weighted_bce(scores, targets, weights)
        slopes, = torch.autograd.grad((loss * torch.arange(1.0, 6.0)).sum(), scores)
        exact = scores.detach().double().requires_grad_()
        expected = (torch.nn.functional.binary_cross_entropy_with_logits(exact, targets.double(), reduction="none")
                    * weights).sum(1)
        steep, = torch.autograd.grad((expected * torch.arange(1.0, 6.0)).sum(), exact)
        torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=1e-7)
        torch.testing.assert_close(slopes.double(), steep, rtol=0.0, atol=1e-6)


@compiled
def test_gradients_of_slopes_and_packed_constants(without):
    """As plugins' losses and factors may have them."""
    def curvature():
        scores = torch.tensor([[0.3, -0.2]], requires_grad=True)
        slopes, = torch.autograd.grad(weighted_bce(scores, torch.tensor([[1.0, 0.0]]), torch.ones(1, 2)).sum(), scores,
                                      create_graph=True)
        return torch.autograd.grad((slopes * scores).sum(), scores)[0]
    torch.testing.assert_close(curvature(), without(curvature))
    packed = torch.arange(6.0).view(2, 3)
    found = ops.row_products(torch.eye(2), torch.tensor([[0], [1]]), packed[:, :-1], packed[:, -1:])
    assert found.tolist() == [[2.0], [9.0]]


@compiled
def test_numbers_that_are_none_stay_so():
    """A diverged client has to show."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        scores = torch.zeros(2, 40)
        scores[1, 3] = bad
        loss, slopes = ops.weighted_bce(scores, torch.full_like(scores, 0.5), torch.ones_like(scores))
        assert loss[0].isfinite() and not loss[1].isfinite()
        assert slopes[1, 3].isnan() == (bad is torch.nan)
        assert slopes.isfinite().sum() == 80 - (bad is torch.nan)


@compiled
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_with_rows_read_in_place(dim, dtype):
    generator = torch.Generator().manual_seed(dim)
    table, vectors = (torch.randn(n, dim, generator=generator, dtype=dtype) for n in (50, 4))
    items = torch.randint(50, (4, 30), generator=generator)
    factors = torch.randn(4, 30, generator=generator, dtype=dtype).masked_fill_(items % 5 == 0, 0.0)
    constants = torch.randn(4, 1, generator=generator, dtype=dtype)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    expected = torch.einsum("cd,cnd->cn", vectors, table[items])
    torch.testing.assert_close(ops.row_products(table, items, vectors, None), expected, **near)
    torch.testing.assert_close(ops.row_products(table, items, vectors, constants), expected + constants, **near)
    torch.testing.assert_close(ops.row_sums(table, items, factors),
                               torch.einsum("cn,cnd->cd", factors, table[items]), **near)
    steps, past = torch.stack([factors, factors.flip(0)], 2), torch.stack([vectors, constants * vectors], 1)
    held = torch.tensor([30, 0, 7, 29])
    for some in (None, held):
        total, by_client = table.clone(), (steps @ past)
        ops.add_outer(total, items, some, steps, past)
        if some is not None:
            by_client *= (torch.arange(30) < held[:, None])[:, :, None]
        torch.testing.assert_close(total, table.index_add(0, items.flatten(), by_client.flatten(0, 1)), **near)
        untouched = ~torch.isin(torch.arange(50), items)
        assert torch.equal(total[untouched], table[untouched])


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("items, entries, k", [(1, 1, 1), (63, 5, 5), (64, 9, 2), (200, 70, 12)])
def test_nearest_entries_to_the_bit(without, dtype, items, entries, k):
    generator = torch.Generator().manual_seed(items)
    queries, keys = (torch.randn(3, n, 4, generator=generator, dtype=dtype) for n in (items, entries))
    filled = torch.rand(3, entries, generator=generator) < 0.7
    filled[0], filled[1] = True, False  # and a client with nothing
    queries[0, 0] = keys[0, -1]  # a distance that rounding may make negative
    keys[:, entries // 2] = keys[:, 0]  # of equal ones the first
    found, expected = nearest_entries(queries, keys, filled, k), without(lambda: nearest_entries(
        queries, keys, filled, k))
    assert torch.equal(found[0], expected[0]) and found[0].shape == found[1].shape == (3, k, items)
    there = found[0].isfinite()
    assert torch.equal(found[1][there], expected[1][there]) and not there[1].any() and (found[0] >= 0.0).all()
    alike = queries[:1].expand(3, -1, -1)
    assert all(map(torch.equal, *(nearest_entries(same, keys, filled, k) for same in (alike, alike.contiguous()))))
    by_hand = (queries[2, :, None] - keys[2][filled[2]]).square().sum(2).sort(1).values[:, :k].T
    torch.testing.assert_close(found[0][2, :len(by_hand)], by_hand, rtol=1e-4, atol=1e-4)


@compiled
def test_keys_to_the_bit(without):
    def drawn():
        keys = rng.client_keys(5, torch.arange(40))
        return keys, rng.bits(keys[:, None], torch.arange(12))

    assert all(map(torch.equal, drawn(), without(drawn)))
    assert rng.client_keys(rng.key(5, "x"), torch.tensor([7])).item() % 2 ** 64 == rng.key(5, "x", 7)


@compiled
@pytest.mark.parametrize("bad", [-1, 5])
def test_what_is_looked_up_has_to_be_there(bad):
    """Every kernel that reads or writes a row, or a column, by its number."""
    items, table, vectors = torch.tensor([[0, bad, 4]]), torch.zeros(5, 3), torch.zeros(1, 3)
    order, steps, past = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, 2), torch.zeros(1, 2, 3)
    calls = {
        "row_products": lambda: ops.row_products(table, items, vectors, None),
        "row_sums": lambda: ops.row_sums(table, items, torch.zeros(1, 3)),
        "add_outer": lambda: ops.add_outer(table, items, None, steps, past),
        "nearest": lambda: ops.nearest(torch.zeros(1, 4, 2), torch.zeros(1, 2), torch.ones(1, 4, dtype=torch.bool),
                                       max(bad, 0)),
        "ranks: items": lambda: ops.ranks(torch.zeros(1, 5), torch.zeros_like(items[0]), items[0]),
        "ranks: rows": lambda: ops.ranks(torch.zeros(5, 1), items[0], torch.zeros_like(items[0])),
        "inner_batch": lambda: ops.inner_batch(
            ops.MovedRows(table, items, steps, past, 0), vectors, None,
            ops.InnerSamples(order, 0, 3, torch.ones(1, 1), torch.ones(3, dtype=torch.bool)), (True, False, True))}
    for name, look_up in calls.items():
        with pytest.raises(ValueError, match=f"kernels: {name}.* are .*, expected "):
            look_up()
    assert not table.any()


@compiled
@pytest.mark.parametrize("call, message", [
    (lambda: ops.ranks(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)),
     "ranks_float: items is torch.int32 on cpu, expected torch.int64"),
    (lambda: library.call("row_sums_float", torch.zeros(2, 3), None, torch.zeros(1, 1), 1, 1, 3, torch.zeros(1, 3)),
     "row_sums_float: items is None, expected a tensor"),
    (lambda: ops.row_sums(torch.zeros(4, 3), torch.zeros(6, 2, dtype=torch.int64).T, torch.zeros(2, 6)),
     "row_sums_float: items, a tensor of shape .* is not contiguous"),
    (lambda: ops.add_outer(torch.zeros(4, 3), None, None, torch.zeros(2, 4, 5), torch.zeros(2, 1, 3)),
     r"vectors has shape \(2, 1, 3\), expected \(C, K, d\) with .*'K': 5")])
def test_arguments_that_a_kernel_cannot_read(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@compiled
@pytest.mark.long
@pytest.mark.parametrize("processor", [[], ["-march=native"]], ids=str)
def test_kernels_stay_within_their_memory(tmp_path, processor):
    """In all that tests give them, under the sanitizers of the compiler."""
    built, compiler = tmp_path / "kernels.so", os.environ.get("CC", "cc").split()
    made = subprocess.run([*compiler, "-g", "-O1", "-fPIC", "-shared", "-fsanitize=address,undefined",
                           "-fno-sanitize-recover", "-ffp-contract=off", "-Wno-psabi", '-DSOURCES=""', *processor,
                           str(ROOT / "fedcl_bench/kernels/kernels.c"), "-o", str(built), "-lm"],
                          capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the compiler has no sanitizers: {made.stderr[-200:]}")
    sanitizers = [subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
                  for name in ("libasan.so", "libubsan.so")]
    program = f"""
import ctypes, sys, pytest
from fedcl_bench.kernels import library
loaded = dict(library.functions(ctypes.CDLL({str(built)!r})))
library._loaded = lambda: loaded
sys.exit(pytest.main(["-q", "-s", "-n0", "tests/kernels/test_kernels.py", "tests/evaluation/test_metrics.py",
                      "tests/training/test_compiled_softmax.py", "tests/training/test_inner_round.py",
                      "-k", "kernels or compiled or all_ranks or one_call_equals or distilled"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env={
        **os.environ, "LD_PRELOAD": " ".join(sanitizers), "ASAN_OPTIONS": "detect_leaks=0"})
    assert done.returncode == 0, done.stderr[:3000] + done.stdout[-2000:]
