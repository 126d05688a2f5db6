"""Clusters of vectors: K-means, whose numbers do not depend on threads, and scikit-learn's Agglomerative and Birch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..core.errors import OutOfMemory
from ..kernels.memory import available
from ..core.parallel import in_order, workers
from ..core.tuning import SIZES

Clusters = tuple[Tensor, Tensor]  # the number of each point's cluster, int64 (n,); centroids (k, d)


@dataclass(frozen=True)
class Lloyd:
    """How K-means goes on from its first centroids."""

    iterations: int = 300  # at most so many
    # It ends when the lengths that the centroids moved add up to no more; None: after all iterations.
    tolerance: float | None = 1e-4
    # A new centroid is the mean with weights 1 / (||x - c|| + epsilon s), c being the last centroid (FFMSR, Algorithm
    # 1), and s the root mean square distance of all points from their mean.
    weighted: bool = False
    # Of those weights. The first centroids are points, whose own weights are 1 / (epsilon s): a very small one leaves
    # each there for ever.
    epsilon: float = 0.1
    recomputed: bool = False  # the centroids that are returned are plain means of the last clusters


# The first begins with points that are drawn with replacement, as FFMSR's released code, the second with points that
# are far from each other; the others are scikit-learn's.
ALGORITHMS = ("kmeans", "kmeans++", "agglomerative", "birch")


def cluster(points: Tensor, count: int, key: int, algorithm: str = "kmeans++", how: Lloyd = Lloyd()) -> Clusters:
    """Clusters of points; equally near centroids count in order, and a cluster that is empty keeps its centroid.
    ``points``: (n, d), not empty; ``count``: of clusters; there are at most as many as points; ``key``: names the
    random numbers (see ``rng.key``); ``algorithm``: of ``ALGORITHMS``; ``how``: for the two kinds of K-means. Returns
    (the number of each point's cluster, int64 (n,); centroids (k, d)). Raises OutOfMemory if the distances of all pairs
    do not fit, which the two of scikit-learn need."""
    if algorithm == "agglomerative":
        return agglomerative(points, count)
    if algorithm == "birch":
        return birch(points, count)
    with threads():
        first = drawn_with_replacement if algorithm == "kmeans" else far_apart
        return lloyd(points, first(points, min(count, len(points)), key), how)


def k_means(points: Tensor, count: int, iterations: int, key: int) -> Clusters:
    """Lloyd's iterations from distinct points that are drawn; arguments and results as of ``cluster``."""
    return lloyd(points, drawn(points, count, key), Lloyd(iterations, tolerance=None))


def threads() -> AbstractContextManager:
    """Threads for ``in_order``, unless somebody has given them already."""
    return workers() if torch.get_num_threads() > 1 else nullcontext()


# K-means.

def _patterns(key: int, count: int, device: torch.device) -> Tensor:
    """Random bits, int64 (count,)."""
    return rng.bits(rng.row_keys(key, torch.zeros(1, dtype=torch.int64, device=device)),
                      torch.arange(count, device=device))


def drawn(points: Tensor, count: int, key: int) -> Tensor:
    """Distinct points, all equally likely, (at most count, d)."""
    return points[rng.sort_keys(_patterns(key, len(points), points.device)).argsort()[:count]]


def drawn_with_replacement(points: Tensor, count: int, key: int) -> Tensor:
    """Points, all equally likely each time, (count, d)."""
    return points[rng.integers(_patterns(key, count, points.device), len(points))]


def far_apart(points: Tensor, count: int, key: int) -> Tensor:
    """K-means++: each next point is drawn with a probability proportional to its squared distance from the nearest of
    those before it (Arthur and Vassilvitskii 2007), (count, d). Where all are 0, all are equally likely."""
    uniform = rng.uniform(_patterns(key, count, points.device))
    tiles = points.split(SIZES.clustered)
    nearest = torch.ones(len(points), dtype=torch.float64, device=points.device)
    chosen = points.new_empty(count, points.shape[1])
    for i in range(count):
        upto = (nearest if nearest.any() else torch.ones_like(nearest)).cumsum(0)
        position = torch.searchsorted(upto, uniform[i] * upto[-1], right=True).clamp(max=len(points) - 1)
        chosen[i] = points[position]
        distances = in_order(lambda tile: (tile - chosen[i]).double().square().sum(1), tiles, points.device)
        nearest = torch.minimum(nearest, torch.cat(list(distances))) if i else torch.cat(list(distances))
    return chosen


def lloyd(points: Tensor, centroids: Tensor, how: Lloyd) -> Clusters:
    """K-means from given centroids (k, d)."""
    tiles = points.split(SIZES.clustered)
    epsilon = how.epsilon * _spread(points) if how.weighted else None
    for _ in range(how.iterations):
        _, sums, weights = _assigned(tiles, centroids, epsilon)
        before, centroids = centroids, _means(sums, weights, centroids)
        if how.tolerance is not None and float((centroids - before).norm(dim=1).sum()) <= how.tolerance:
            break
    nearest, sums, counts = _assigned(tiles, centroids, None)
    return nearest, _means(sums, counts, centroids) if how.recomputed else centroids


def _spread(points: Tensor) -> float:
    """The root mean square distance of points from their mean; 1 if they are all the same."""
    return float(points.var(0, correction=0).sum().sqrt()) or 1.0


def _means(sums: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    return (sums / weights.unsqueeze(1)).where(weights.unsqueeze(1) > 0, before)


def _assigned(tiles: tuple[Tensor, ...], centroids: Tensor, epsilon: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest centroid of each point, (n,), and each one's weighted sum of points and sum of weights, (k, d) and
    (k,). ``epsilon``: of the weights, in units of distances; None: all weights are 1."""
    half = -0.5 * centroids.square().sum(1)

    def of_tile(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.addmm(half, points, centroids.T).max(1).indices
        weights = None
        if epsilon is not None:
            weights = 1.0 / ((points - centroids[nearest]).norm(dim=1) + epsilon)
        if points.device.type == "cpu":
            weighted = points if weights is None else points * weights.unsqueeze(1)
            sums = torch.zeros_like(centroids).index_add_(0, nearest, weighted)
            return nearest, sums, torch.bincount(nearest, weights, minlength=len(centroids))
        # Where additions come in no fixed order, and the largest number would be waited for.
        member = (nearest.unsqueeze(1) == torch.arange(len(centroids), device=nearest.device)).to(points)
        member = member if weights is None else member * weights.unsqueeze(1)
        return nearest, member.T @ points, member.sum(0)

    nearest, sums, weights = zip(*in_order(of_tile, tiles, centroids.device))
    return torch.cat(nearest), torch.stack(sums).sum(0), torch.stack(weights).sum(0)


# Of scikit-learn, on the CPU.

def agglomerative(points: Tensor, count: int) -> Clusters:
    """Ward's hierarchical clusters, each with the mean of its points; see ``cluster``."""
    from sklearn.cluster import AgglomerativeClustering

    _check_pairs(len(points))
    if (count := min(count, len(points))) == len(points):  # scikit-learn asks for two points
        return torch.arange(count, device=points.device), points.clone()
    labels = AgglomerativeClustering(count).fit_predict(points.cpu().numpy())
    return _with_means(points, torch.from_numpy(labels).long().to(points.device), count)


def birch(points: Tensor, count: int, threshold: float = 0.5) -> Clusters:
    """Ward's hierarchical clusters of Birch's subclusters, each with the mean of its points; see ``cluster``. There are
    at most as many as subclusters. ``threshold``: the radius up to which a subcluster takes up points."""
    from sklearn.cluster import Birch
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # so that sums do not depend on threads
        tree = Birch(threshold=threshold, n_clusters=None).fit(points.cpu().numpy())
    group, means = agglomerative(torch.from_numpy(tree.subcluster_centers_), count)
    of_point = group[torch.from_numpy(tree.labels_).long()].to(points.device)
    return _with_means(points, of_point, len(means))


def _check_pairs(n: int) -> None:
    """Raise OutOfMemory unless two copies of the distances of all pairs of n points fit, float64, as SciPy makes."""
    needed, memory = 8 * n * (n - 1), available(torch.device("cpu"))
    if memory is not None and needed > memory.bytes:
        raise OutOfMemory(f"hierarchical clusters of {n:,} vectors need {needed / (1 << 30):.1f} GiB for the distances "
                          f"of all pairs, but {memory.bytes / (1 << 30):.1f} GiB are {memory.limit}.\nTake K-means, "
                          f"which needs none of them; with Birch, a larger threshold; or fewer items.")


def _with_means(points: Tensor, cluster: Tensor, count: int) -> Clusters:
    sums = points.new_zeros(count, points.shape[1]).index_add_(0, cluster, points)
    return cluster, sums / torch.bincount(cluster, minlength=count).clamp(min=1).unsqueeze(1)
