"""k-ary randomised response: a number of 0..k-1 is reported, or with a known probability one of the others.

Each report is then epsilon-locally differentially private for a number on which the reports of others do not depend.
A table of N reports about one user's data has the budget N epsilon.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import rng


def kept_share(epsilon: float, categories: int) -> float:
    """The largest probability of a true report under the budget: e^eps / (e^eps + k - 1) (Kairouz et al. 2016)."""
    return 1.0 / (1.0 + (categories - 1) * math.exp(-epsilon))


def shifted_share(shifted: float, categories: int) -> float:
    """The probability of a true report where a uniform number of 0..k-1 is added modulo k with probability ``shifted``:
    that number may be 0. PFCR's released code has shifted = (e^eps + 1) / (e^eps + 2)."""
    return 1.0 - shifted * (1.0 - 1.0 / categories)


def budget(kept: float, categories: int) -> float:
    """epsilon of one report: the logarithm of the largest ratio of a report's probabilities under two numbers."""
    other = (1.0 - kept) / (categories - 1)
    return math.inf if min(kept, other) == 0.0 else abs(math.log(kept / other))


def randomise(numbers: Tensor, categories: int, kept: float, key: int) -> Tensor:
    """Reports: each number with probability ``kept``, else one of the others, all equally likely. ``numbers``: of
    0..k-1, int64 of any shape; ``categories``: k, at least 2; ``key``: names the random numbers (see ``rng.key``), one
    per entry."""
    index = 2 * torch.arange(numbers.numel(), device=numbers.device).view(numbers.shape)
    keys = rng.row_keys(key, torch.zeros(1, dtype=torch.int64, device=numbers.device))
    shift = 1 + rng.integers(rng.bits(keys, index + 1), categories - 1)
    return (numbers + shift.where(rng.uniform(rng.bits(keys, index)) >= kept, 0)) % categories


def estimated(reports: Tensor, categories: int, kept: float) -> Tensor:
    """Numbers whose expectations are the true ones, float64 of the reports' shape; not for kept = 1 / k, where reports
    say nothing. A report's expectation is linear in the number: (kept - other) x + other k (k - 1) / 2."""
    other = (1.0 - kept) / (categories - 1)
    return (reports.double() - other * categories * (categories - 1) / 2) / (kept - other)
