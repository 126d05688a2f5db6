"""A knowledge base of prototypes that clients uploaded, as FCUCR has one: finding and fusing the nearest of others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.ops import highest
from ..core.tuning import SIZES


def nearest(queries: Tensor, owners: Tensor, prototypes: Tensor, lengths: Tensor, prototype_owners: Tensor,
            k: int) -> tuple[Tensor, Tensor]:
    """The k prototypes of other clients that are most similar to each query, by cosine. ``queries``: (Q, n);
    ``owners``: the client of each, (Q,); ``prototypes``: (N, n); ``lengths``: their Euclidean lengths, (N,);
    ``prototype_owners``: (N,). Returns (similarities, positions), each (Q, min(k, N)), the most similar first; -inf
    where fewer than that are of other clients."""
    unit = torch.nn.functional.normalize(queries, dim=1)
    k = min(k, len(prototypes))
    answers = []
    for piece, mine in zip(unit.split(SIZES.queries), owners.split(SIZES.queries)):
        best = piece.new_full((len(piece), 0), -torch.inf)
        where = torch.zeros(len(piece), 0, dtype=torch.int64, device=piece.device)
        size = max(k, SIZES.similarities // len(piece))
        for start in range(0, len(prototypes), size):
            block = slice(start, start + size)
            similarity = piece @ prototypes[block].T
            similarity /= lengths[block].clamp(min=1e-12)
            similarity.masked_fill_(mine[:, None] == prototype_owners[block], -torch.inf)
            position = highest(similarity, k)
            best = torch.cat([best, similarity.gather(1, position)], 1)
            where = torch.cat([where, position + start], 1)
            if best.shape[1] > k:
                order = highest(best, k)
                best, where = best.gather(1, order), where.gather(1, order)
        answers.append((best, where))
    return torch.cat([best for best, _ in answers]), torch.cat([where for _, where in answers])


def fuse(similarities: Tensor, prototypes: Tensor, how: str) -> Tensor:
    """One prototype from the nearest ones. ``similarities``: (Q, k), -inf where there is none; ``prototypes``: (Q, k,
    n); ``how``: ``softmax``: weighted by a softmax over the similarities; ``mean``; ``pca``: the mean of their
    projections onto their first principal direction, not centred (the released code centres them, and the mean of
    centred projections is zero). Returns (Q, n); zero for a query without any."""
    there = similarities > -torch.inf
    if how == "softmax":
        weights = torch.softmax(similarities, dim=1).nan_to_num(0.0)  # a row of -inf has no softmax
    else:
        weights = there.to(prototypes.dtype) / there.sum(1, keepdim=True).clamp(min=1)
    mean = torch.bmm(weights.to(prototypes.dtype).unsqueeze(1), prototypes).squeeze(1)
    if how != "pca":
        return mean
    kept = prototypes * there.unsqueeze(2)
    # The first right singular vector of the k rows, from the k x k matrix of their inner products.
    values, vectors = torch.linalg.eigh(kept @ kept.transpose(1, 2))
    direction = torch.bmm(vectors[..., -1:].transpose(1, 2), kept).squeeze(1)
    direction = torch.nn.functional.normalize(direction, dim=1)
    return (mean * direction).sum(1, keepdim=True) * direction


DELTA = 1e-5  # of the (epsilon, delta) that FCUCR states for its noise


def gaussian_epsilon(std: float, delta: float) -> float:
    """epsilon = sqrt(2 ln(1.25 / delta)) / std: what FCUCR states for Gaussian noise, taking the sensitivity as 1."""
    return math.sqrt(2.0 * math.log(1.25 / delta)) / std
