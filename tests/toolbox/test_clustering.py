"""Clusters of vectors: they equal plain loops', have the properties that define them, and depend on no threads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import threads
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import stream
from session_oracle import k_means as plain

from fedcl_bench import SIZES, rng
from fedcl_bench.toolbox import clustering
from fedcl_bench.toolbox.clustering import (ALGORITHMS, Lloyd, agglomerative, birch, cluster, drawn_with_replacement,
                                            far_apart, k_means, lloyd)
from fedcl_bench.core.errors import OutOfMemory
from fedcl_bench.kernels.memory import Available
from fedcl_bench.core.parallel import workers

worlds = st.tuples(st.integers(0, 2 ** 32), st.integers(1, 40), st.integers(1, 4), st.integers(1, 8))


def random_points(seed: int, n: int, d: int) -> torch.Tensor:
    """Float64 points on a coarse grid, so that there are equal points and equal distances."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-4, 5, (n, d))).double()


def blobs(count: int, each: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around centres that are 50 from each other or more, and the centre of each."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count).repeat(each)
    return 50.0 * torch.eye(count)[label] + 0.1 * torch.randn(len(label), count, generator=generator), label


def same_parts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a[:, None] == a, b[:, None] == b)


@pytest.mark.parametrize("count, iterations", [(1, 1), (4, 3), (9, 30), (60, 2), (100, 2)])
def test_k_means_equals_a_plain_loop(count, iterations, monkeypatch):
    """In tiles of any size; 40 of the 60 points are one, so most clusters of 60 are empty."""
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points[20:] = points[20] if count >= 60 else points[20:]
    clusters, centroids = plain(points, count, iterations, stream(3, "a", 1, 0))
    for tile in (7, 100):
        monkeypatch.setattr(SIZES, "clustered", tile)
        found, means = k_means(points, count, iterations, rng.key(3, "a", 1))
        assert len(means) == min(count, 60)
        if count < 60:
            assert found.tolist() == clusters
        torch.testing.assert_close(means[found], torch.from_numpy(centroids)[clusters])


def plain_lloyd(points: np.ndarray, centroids: np.ndarray, how: Lloyd) -> tuple[list[int], np.ndarray]:
    """FFMSR's Algorithm 1 from line "repeat", point by point."""
    centroids = centroids.copy()
    spread = np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean())

    def nearest(x):
        return int(np.argmin([((x - c) ** 2).sum() for c in centroids]))

    for _ in range(how.iterations):
        before, of = centroids.copy(), [nearest(x) for x in points]
        for j in range(len(centroids)):
            members = [x for x, k in zip(points, of) if k == j]
            weights = [1 / (np.sqrt(((x - before[j]) ** 2).sum()) + how.epsilon * spread) if how.weighted else 1.0
                       for x in members]
            if members:
                centroids[j] = sum(w * x for w, x in zip(weights, members)) / sum(weights)
        if sum(np.sqrt(((a - b) ** 2).sum()) for a, b in zip(before, centroids)) <= how.tolerance:
            break
    of = [nearest(x) for x in points]
    if how.recomputed:
        for j in set(of):
            centroids[j] = np.mean([x for x, k in zip(points, of) if k == j], axis=0)
    return of, centroids


@pytest.mark.parametrize("how", [Lloyd(), Lloyd(weighted=True, epsilon=0.5), Lloyd(3, 0.0, True, 0.1, True),
                                 Lloyd(weighted=True, epsilon=0.5, tolerance=2.0, recomputed=True)])
def test_lloyd_equals_a_plain_loop(how):
    points = torch.randn(80, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found, centroids = lloyd(points, points[:6], how)
    of, expected = plain_lloyd(points.numpy(), points[:6].numpy(), how)
    assert found.tolist() == of
    torch.testing.assert_close(centroids, torch.from_numpy(expected))


@settings(max_examples=30, deadline=None)
@given(worlds, st.sampled_from(ALGORITHMS), st.booleans())
def test_clusters_are_those_of_the_nearest_centroids(world, algorithm, weighted):
    """For K-means; and every algorithm's numbers are in range, and its means are those of its clusters if asked for."""
    seed, n, d, count = world
    points = random_points(seed, n, d)
    how = Lloyd(20, weighted=weighted, epsilon=0.1)
    found, centroids = cluster(points, count, seed, algorithm, how)
    assert found.shape == (n,) and centroids.shape[1] == d and len(centroids) <= min(count, n)
    assert 0 <= found.min() and found.max() < len(centroids)
    if algorithm.startswith("kmeans"):
        distance = torch.cdist(points, centroids, compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(distance.gather(1, found[:, None])[:, 0], distance.min(1).values)
        again, centroids = cluster(points, count, seed, algorithm, replace(how, recomputed=True))
        assert torch.equal(again, found)
    for j in found.unique():
        torch.testing.assert_close(centroids[j], points[found == j].mean(0))


@pytest.mark.parametrize("how", [("kmeans++",), ("agglomerative",), ("birch",), ("kmeans++", Lloyd(weighted=True))])
def test_blobs_are_told_apart(how):
    """K-means++ begins in each of them, as all others are 50 times as far as a blob is wide."""
    points, label = blobs(6, 30)
    found, centroids = cluster(points, 6, 5, *how)
    assert same_parts(found, label) and len(centroids) == 6


def test_k_means_plus_plus_draws_by_squared_distance():
    """Of the points 0, 1 and 3, the second after 0 is 3 nine times in ten; the first is each as often."""
    points = torch.tensor([[0.0], [1.0], [3.0]])
    pairs = [far_apart(points, 2, rng.key(1, "a", i))[:, 0].tolist() for i in range(800)]
    first = [a for a, _ in pairs]
    assert all(abs(first.count(value) / 800 - 1 / 3) < 0.05 for value in (0.0, 1.0, 3.0))
    after = [b for a, b in pairs if a == 0.0]
    assert abs(after.count(3.0) / len(after) - 0.9) < 0.05 and 0.0 not in after


def test_first_centroids_of_the_released_code_are_drawn_with_replacement():
    points = torch.arange(10.0)[:, None]
    drawn = [drawn_with_replacement(points, 10, rng.key(1, "a", i))[:, 0].tolist() for i in range(300)]
    assert any(len(set(each)) < 10 for each in drawn)
    counts = np.bincount(np.array(drawn, dtype=int).ravel(), minlength=10)
    assert counts.min() > 240 and counts.max() < 360


@pytest.mark.parametrize("how", [("kmeans++", Lloyd(8, weighted=True)), ("kmeans", Lloyd(5)), None])
def test_numbers_do_not_depend_on_threads(how):
    points = torch.rand(6000, 20, generator=torch.Generator().manual_seed(1))
    results = []
    for count in (1, 3):
        with threads(count), nullcontext() if how else workers():
            results.append(cluster(points, 50, 4, *how) if how else k_means(points, 50, 5, 4))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_birch_clusters_no_more_than_its_subclusters():
    points, label = blobs(4, 20)
    found, centroids = birch(points, 10, threshold=5.0)
    assert len(centroids) == 4 and same_parts(found, label)


def test_distances_of_all_pairs_that_do_not_fit_are_refused(monkeypatch):
    points = torch.rand(200, 2)
    monkeypatch.setattr(clustering, "available", lambda device: Available(200_000, "available on this machine"))
    with pytest.raises(OutOfMemory, match="of 200 vectors need 0.0 GiB [^\n]*\nTake K-means"):
        agglomerative(points, 3)
    with pytest.raises(OutOfMemory, match="with Birch, a larger threshold"):
        birch(points, 3, threshold=1e-6)
    assert len(birch(points, 3, threshold=0.3)[1]) == 3
