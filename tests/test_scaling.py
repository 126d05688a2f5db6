"""The cost model of docs/privacy.md against the measurements that are kept."""

from helpers import ROOT, script


def test_time_and_memory_within_30_per_cent():
    model = script("benchmarks/cost_model")
    rounds = model.read(sorted((ROOT / "benchmarks/results").glob("scale_*.md")))
    assert len(rounds) == 19
    assert {r.clients for r in rounds} == {1e3, 1e4, 3e4, 1e5, 1e6}
    assert {r.items for r in rounds} == {1e3, 1e4, 1e5, 1e6}
    assert {r.dim for r in rounds} == {16, 32, 64, 128, 256}
    assert {r.local_epochs for r in rounds} == {1, 2, 5}
    times = model.fit(rounds)
    for r in rounds:
        assert 0.7 <= float(r.work() @ times) / r.seconds <= 1.3, r
        assert 0.7 <= (r.data + r.memory()) / r.peak <= 1.3, r
