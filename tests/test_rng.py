"""Counter-based random numbers: the published generator, independence, uniformity."""

import numpy as np
import oracle
import pytest
import torch
from helpers import one_step
from hypothesis import given, strategies as st
from scipy import stats

from fedcl_bench import SIZES, LocalSettings, UserError, draw_negatives, make_chunks, rng
from fedcl_bench.training import chunk_trainer
from fedcl_bench.kernels import ops
from fedcl_bench.testing.worlds import ragged


def test_splitmix64_reference_values():
    """The first outputs of SplitMix64 seeded with 1234567, as published with the generator."""
    found = rng.bits(torch.tensor(1234567), torch.arange(5))
    unsigned = [int(x) % (1 << 64) for x in found]
    assert unsigned == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                        16408922859458223821]


@given(st.integers(0, 2 ** 63 - 1), st.text(max_size=8), st.lists(st.integers(0, 2 ** 40), max_size=3),
       st.integers(0, 10 ** 6), st.integers(0, 10 ** 6))
def test_tensors_equal_python_integers(seed, purpose, counters, client, index):
    keys = rng.client_keys(rng.key(seed, purpose, *counters), torch.tensor([client]))
    assert int(rng.bits(keys, torch.tensor([index]))) % (1 << 64) == \
        oracle.stream(seed, purpose, *counters, client)(index)


def test_purposes_rounds_and_clients_are_independent():
    index = torch.arange(4000)
    streams = [rng.uniform(rng.bits(torch.tensor(rng._signed(rng.key(0, purpose, step, round_, client))),
                                        index))
               for purpose, step, round_, client in
               [("a", 0, 0, 0), ("b", 0, 0, 0), ("a", 1, 0, 0), ("a", 0, 1, 0), ("a", 0, 0, 1), ("a", 0, 0, 2)]]
    correlation = np.corrcoef(np.stack([s.numpy() for s in streams]))
    assert np.abs(correlation - np.eye(len(streams))).max() < 0.07
    for s in streams:
        assert stats.kstest(s.numpy(), "uniform").pvalue > 1e-4


def test_normal_rows_are_normal():
    rows = rng.normal_rows(0, "init", 0, 400, 32).numpy().ravel()
    assert stats.kstest(rows, "norm").pvalue > 1e-4


def one_chunk(lists, n_items):
    chunks = make_chunks(one_step(ragged(*lists), n_items), torch.arange(len(lists)),
                         LocalSettings(batch_size=10 ** 6), 1)
    assert len(chunks) == 1
    return chunks[0]


def test_negatives_are_uniform_over_the_other_items():
    """Chi-square over all items that are no positives; positives never; repeated positives count once."""
    chunk = one_chunk([[1, 4, 4, 9, 0], [2]], 12)
    counts = np.zeros((2, 12), dtype=int)
    for round_ in range(600):
        found = draw_negatives(chunk, LocalSettings(negatives=4), 0, 0, round_)
        for c in range(2):
            own = found[c, :4 * int(chunk.count[c])].numpy()
            counts[c] += np.bincount(own, minlength=12)
    assert counts[0, [0, 1, 4, 9]].sum() == 0 and counts[1, 2] == 0
    for c, positives in ((0, [0, 1, 4, 9]), (1, [2])):
        others = np.delete(counts[c], positives)
        assert (others > 0).all() and stats.chisquare(others).pvalue > 1e-4


@pytest.mark.parametrize("high", [1, 2, 1136, 2 ** 31 - 1])
def test_integers_stay_in_range(high):
    found = rng.integers(rng.bits(torch.tensor(5), torch.arange(20000)), high)
    assert int(found.min()) >= 0 and int(found.max()) < high


@pytest.mark.parametrize("table", [0, 1 << 22, None])
def test_first_slots(monkeypatch, table):
    """By a table, by sorting and by kernel alike: the first slot of the same client that holds the same item."""
    if table is not None:
        monkeypatch.setattr(ops, "why_not", lambda: "switched off")
        monkeypatch.setattr(SIZES, "slot_table", table)
    items = torch.randint(7, (30, 16), generator=torch.Generator().manual_seed(0))
    items[0] = 6
    kept = items.clone()
    found, is_first = chunk_trainer.first_slots(items, 7)
    assert found.tolist() == [[row.index(item) for item in row] for row in items.tolist()]
    assert torch.equal(is_first, found == torch.arange(16))
    assert torch.equal(items, kept)
    assert chunk_trainer.first_slots(torch.zeros(2, 1, dtype=torch.int64), 1)[0].tolist() == [[0], [0]]


def test_a_client_with_all_items_is_told():
    """There is no negative for it; reading on would take another client's."""
    step = one_step(ragged([0, 1], [2, 0, 1], [1]), 3)
    with pytest.raises(UserError, match=r"block 0: client 1 .* all 3 items"):
        make_chunks(step, torch.arange(3), LocalSettings(), 8)
    with pytest.raises(UserError, match=r"client 2 .* all but 1 of the 2 items known, and 4 must be left"):
        make_chunks(one_step(ragged([], [], [1]), 2), torch.tensor([2]), LocalSettings(negative_draw="distinct"), 8)
