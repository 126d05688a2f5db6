"""The cost model of docs/scaling.md against the measurements that are kept, and the numbers printed there."""

from __future__ import annotations

import re
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


def test_the_page_prints_what_is_fitted(model, rounds):
    page = (ROOT / "docs/scaling.md").read_text()
    assert re.findall(r"\b([abcgh]) (\d[\d.]*)(?: ns| us|,)", "".join(page.split("```")[::2])) == [
        (name, f"{value:.3g}") for name, value in zip("abcgh", model.fit(rounds), strict=True)]
    times = model.fit(rounds)
    ratios = [float(r.work() @ times) / r.seconds for r in rounds]
    assert f"the model gives {min(ratios):.2f} to {max(ratios):.2f} times" in " ".join(page.split())
    memory = [(r.data + r.memory()) / r.peak for r in rounds]
    assert f"this is {min(memory):.2f} to {max(memory):.2f} times" in " ".join(page.split())
