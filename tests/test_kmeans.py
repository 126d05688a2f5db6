"""Clusters of item rows: they equal a plain loop's, on any number of threads."""

from __future__ import annotations

import pytest
import torch
from oracle import stream
from session_oracle import k_means as plain

from fedcl_bench import draws
from fedcl_bench.kmeans import k_means
from fedcl_bench.parallel import workers
from fedcl_bench.sizes import SIZES


@pytest.mark.parametrize("count, iterations", [(1, 1), (4, 3), (9, 30), (60, 2), (100, 2)])
def test_equals_a_plain_loop(count, iterations, monkeypatch):
    """In tiles of any size; 40 of the 60 points are one, so most clusters of 60 are empty."""
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points[20:] = points[20] if count >= 60 else points[20:]
    clusters, centroids = plain(points, count, iterations, stream(3, "a", 1, 0))
    for tile in (7, 100):
        monkeypatch.setattr(SIZES, "clustered", tile)
        found, means = k_means(points, count, iterations, draws.key(3, "a", 1))
        assert len(means) == min(count, 60)
        if count < 60:
            assert found.tolist() == clusters
        torch.testing.assert_close(means[found], torch.from_numpy(centroids)[clusters])


def test_numbers_do_not_depend_on_threads():
    points = torch.rand(6000, 20, generator=torch.Generator().manual_seed(1))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with workers():
                results.append(k_means(points, 50, 5, 4))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))
