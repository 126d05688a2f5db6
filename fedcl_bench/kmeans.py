"""K-means of item rows, whose numbers do not depend on threads."""

from __future__ import annotations

import torch
from torch import Tensor

from . import draws
from .parallel import in_order
from .sizes import SIZES


def k_means(points: Tensor, count: int, iterations: int, key: int) -> tuple[Tensor, Tensor]:
    """Lloyd's iterations from some of the points, which are drawn.

    A cluster that becomes empty keeps its centroid. Of equally near centroids the first is taken.

    Args:
        points: (n, d).
        count: of clusters; there are at most as many as points.
        key: names the random numbers (see ``draws.key``).

    Returns:
        (the number of each point's cluster, int64 (n,); centroids (k, d)).
    """
    order = draws.sort_keys(draws.bits(draws.row_keys(key, torch.zeros(1, dtype=torch.int64, device=points.device)),
                                       torch.arange(len(points), device=points.device))).argsort()
    centroids, tiles = points[order[:count]], points.split(SIZES.clustered)
    for _ in range(iterations):
        _, sums, counts = _assigned(tiles, centroids)
        centroids = (sums / counts.unsqueeze(1)).where(counts.unsqueeze(1) > 0, centroids)
    return _assigned(tiles, centroids)[0], centroids


def _assigned(tiles: tuple[Tensor, ...], centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest centroid of each point, (n,), and sums and numbers of each one's points, (k, d) and (k,)."""
    half = -0.5 * centroids.square().sum(1)

    def of_tile(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.addmm(half, points, centroids.T).max(1).indices
        if points.device.type == "cpu":
            sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
            return nearest, sums, torch.bincount(nearest, minlength=len(centroids))
        # Where additions come in no fixed order, and the largest number would be waited for.
        member = (nearest.unsqueeze(1) == torch.arange(len(centroids), device=nearest.device)).to(points)
        return nearest, member.T @ points, member.sum(0)

    nearest, sums, counts = zip(*in_order(of_tile, tiles, centroids.device))
    return torch.cat(nearest), torch.stack(sums).sum(0), torch.stack(counts).sum(0)
