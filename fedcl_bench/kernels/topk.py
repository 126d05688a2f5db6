"""The highest scores of each row, in an order that depends on nothing but the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops

# Columns in a group, and the number of columns from which the larger size is the faster.
_SMALL_GROUPS, _LARGE_GROUPS, _MANY_COLUMNS = 8, 32, 2048
_LOW = (1 << 31) - 1


def highest(scores: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores in each row, highest first, of equal ones the first: int64, (n, min(k, columns)).

    What is no number counts as higher than any. Without kernels: the k highest are in the k groups of neighbouring
    columns with the highest maxima (of equal ones the first), so only those are looked at closely; the maxima are one
    pass over the scores, several times as fast as ``torch.topk``.
    """
    if ops.serve_highest(scores, k):
        return ops.highest(scores, k)
    columns = scores.shape[1]
    size = _SMALL_GROUPS if columns < _MANY_COLUMNS else _LARGE_GROUPS
    while size * size * k < columns:
        size *= 2
    groups = columns // size
    if groups < 2 * k:
        return _first(scores, torch.arange(columns, device=scores.device), k)
    maxima = scores[:, :groups * size].unflatten(1, (groups, size)).amax(2)
    chosen = _first(maxima, torch.arange(groups, device=scores.device), k)
    column = (chosen[:, :, None] * size + torch.arange(size, device=scores.device)).flatten(1)
    rest = torch.arange(groups * size, columns, device=scores.device).expand(len(scores), -1)
    column = torch.cat([column, rest], 1)
    return _first(scores.gather(1, column), column, k)


def _first(scores: Tensor, number: Tensor, k: int) -> Tensor:
    """The numbers of the k highest scores in each row, highest first, of equal ones the smallest number first.

    Args:
        number: whole numbers below 2^31 that differ within a row, of the scores' shape (n, m) or (m,).
    """
    k = min(k, scores.shape[1])
    if scores.dtype == torch.float64:  # too long for the keys below
        number, order = number.expand_as(scores).sort(1)
        best = scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices[:, :k]
        return number.gather(1, best)
    bits = (scores.float() + 0.0).masked_fill_(scores.isnan(), torch.nan).view(torch.int32)  # neither -0 nor -nan
    ascending = bits.bitwise_xor_((bits >> 31) & _LOW)  # as whole numbers in the order of the scores
    key = (ascending.long() << 32) | (_LOW - number)
    return _LOW - (key.topk(k, 1).values & _LOW)
