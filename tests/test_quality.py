"""Golden values of a short run, and (marked long) the quality of full runs on the authors' split."""

import numpy as np
import pytest

from fedcl_bench.data.datasets import load_stream
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.runner import execute

# N@20 on blocks 0-3 after 12 rounds each, seed 0, default stream. The tolerance covers other processors' rounding.
GOLDEN = {"ft": [0.1601, 0.0580, 0.0493, 0.0880], "reg": [0.1601, 0.0593, 0.0493, 0.0879],
          "kd": [0.1601, 0.0567, 0.0451, 0.0838], "f3crec": [0.1601, 0.0652, 0.0550, 0.0608]}


@pytest.mark.parametrize("method", GOLDEN)
def test_golden_values(registry, ml100k, tmp_path, method):
    config = make_config(registry, method, "fedmf", "ml-100k", overrides=[("test", {"rounds": 12})])
    found = execute(config, lambda: ml100k, tmp_path)["metrics"]["ndcg@20"]["per_block"]
    assert found == pytest.approx(GOLDEN[method], abs=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("method,low,high", [("ft", 0.091, 0.097), ("f3crec", 0.095, 0.108)])
def test_five_seed_means(registry, shared, tmp_path, method, low, high):
    """Ranges of the authors' script and of an independent implementation on the same split and settings."""
    split = shared / "data" / "splits" / "ml-100k.f3crec_authors.tsv"
    base, average, stream = [], [], None
    for seed in range(5):
        config = make_config(registry, method, "fedmf", "ml-100k", seed, [("test", {"split_file": str(split)})])
        stream = stream or load_stream(config.source, config.stream)
        values = execute(config, lambda: stream, tmp_path)["metrics"]["ndcg@20"]
        base.append(values["per_block"][0])
        average.append(values["avg_incremental"])
    assert 0.27 <= np.mean(base) <= 0.285
    assert low <= np.mean(average) <= high
