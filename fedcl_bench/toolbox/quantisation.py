"""Product quantisation: a vector as a few small numbers, the codes of its parts (VQ-Rec, PFCR)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import rng
from .clustering import Lloyd, drawn, lloyd, threads
from ..core.errors import UserError
from ..core.parallel import in_order
from ..core.tuning import SIZES

_BEFORE, _AFTER = Lloyd(25, tolerance=None), Lloyd(10, tolerance=None)  # of the rotations
_ROTATIONS = 20


@dataclass(frozen=True)
class Quantiser:
    """Divides a rotated vector into m parts, each of which has k centroids; a part's code is the nearest one's number.
    """

    mean: Tensor  # subtracted from vectors, (d,)
    rotation: Tensor  # its rows are the axes of rotated vectors, orthonormal, (d, d)
    centroids: Tensor  # (m, k, d / m)

    def encode(self, vectors: Tensor) -> Tensor:
        """Codes, int64 (n, m), of vectors (n, d)."""
        with threads():
            return _clusters(_rotated(vectors - self.mean, self.rotation.T), self.centroids, Lloyd(0))[0]

    def decode(self, codes: Tensor) -> Tensor:
        """The vectors (n, d) that codes (n, m) stand for."""
        with threads():
            return _rotated(_joined(self.centroids, codes), self.rotation) + self.mean


def fit(vectors: Tensor, codes: int, centroids: int, key: int) -> Quantiser:
    """A quantiser whose squared errors on the vectors are a local minimum. K-means of each part, and then in turns the
    rotation that brings vectors nearest to what their codes stand for, an orthogonal Procrustes problem, and K-means
    (OPQ without assumptions: Ge et al. 2013, Algorithm 1). ``vectors``: (n, d) in floating point; ``codes``: m, into
    which d is divided; ``centroids``: of each part, k; there are at most n; ``key``: names the random numbers (see
    ``rng.key``). Raises UserError if m does not divide d."""
    d = vectors.shape[1]
    if d % codes:
        raise UserError(f"codes of vectors: found {codes} codes for vectors of {d} numbers, accepted: a number of "
                        f"codes that divides {d}.")
    with threads():
        mean = vectors.mean(0)
        centred = vectors - mean
        start = [drawn(part, centroids, rng.key(key, "codes", i)) for i, part in enumerate(_parts(centred, codes))]
        identity = torch.eye(d, dtype=vectors.dtype, device=vectors.device)
        quantiser = Quantiser(mean, identity, _clusters(centred, torch.stack(start), _BEFORE)[1])
        for _ in range(_ROTATIONS):
            quantiser = _turned(centred, quantiser)
        rotated = _rotated(centred, quantiser.rotation.T)
        return replace(quantiser, centroids=_clusters(rotated, quantiser.centroids, _AFTER)[1])


_fitted: dict[tuple[Any, ...], Quantiser] = {}  # in this process: it takes a minute, and all seeds have the same


def of_texts(vectors: Tensor, codes: int, centroids: int) -> Quantiser:
    """The rotated quantiser of these encodings of texts, whatever the run's seed; arguments as of ``fit``."""
    content = hashlib.blake2b(vectors.numpy().tobytes()).hexdigest(), vectors.shape, codes, centroids
    if content not in _fitted:
        _fitted[content] = fit(vectors, codes, min(centroids, len(vectors)), rng.key(0, "codes of texts"))
    return _fitted[content]


def _turned(centred: Tensor, quantiser: Quantiser) -> Quantiser:
    """After a step of K-means, and the best rotation for its clusters."""
    rotated = _rotated(centred, quantiser.rotation.T)
    codes, centroids = _clusters(rotated, quantiser.centroids, Lloyd(0, recomputed=True))
    near = _joined(centroids, codes)
    pairs = list(zip(centred.split(SIZES.clustered), near.split(SIZES.clustered)))
    products = in_order(lambda pair: (pair[1].T @ pair[0]).double(), pairs, centred.device)
    left, _, right = torch.linalg.svd(sum(products))
    return replace(quantiser, rotation=(left @ right).to(centred.dtype), centroids=centroids)


def _parts(vectors: Tensor, codes: int) -> list[Tensor]:
    """m times (n, d / m)."""
    return [part.contiguous() for part in vectors.chunk(codes, dim=1)]


def _clusters(vectors: Tensor, centroids: Tensor, how: Lloyd) -> tuple[Tensor, Tensor]:
    """K-means of each part from centroids (m, k, d / m): codes, (n, m), and centroids."""
    parts = zip(_parts(vectors, len(centroids)), centroids)
    codes, centroids = zip(*(lloyd(part, start, how) for part, start in parts))
    return torch.stack(codes, 1), torch.stack(centroids)


def _joined(centroids: Tensor, codes: Tensor) -> Tensor:
    """What codes stand for, (n, d)."""
    return torch.cat([of_part[code] for of_part, code in zip(centroids, codes.T)], 1)


def _rotated(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The product (n, d), by one thread per tile."""
    return torch.cat(list(in_order(lambda tile: tile @ matrix, vectors.split(SIZES.clustered), vectors.device)))
