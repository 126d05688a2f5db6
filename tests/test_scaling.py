"""The cost model of docs/privacy.md against the measurements that are kept."""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import cost_model
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return cost_model


@pytest.fixture(scope="module")
def rounds(model):
    return model.read(sorted((ROOT / "benchmarks/results").glob("scale_*.md")))


def test_every_size_is_there(rounds):
    assert len(rounds) == 19
    assert {r.clients for r in rounds} == {1e3, 1e4, 3e4, 1e5, 1e6}
    assert {r.items for r in rounds} == {1e3, 1e4, 1e5, 1e6}
    assert {r.dim for r in rounds} == {16, 32, 64, 128, 256}
    assert {r.local_epochs for r in rounds} == {1, 2, 5}


def test_time_and_memory_within_30_per_cent(model, rounds):
    times = model.fit(rounds)
    for r in rounds:
        assert 0.7 <= float(r.work() @ times) / r.seconds <= 1.3, r
        assert 0.7 <= (r.data + r.memory()) / r.peak <= 1.3, r
