"""Paired comparison of two methods on the same users.

The unit is the user: scores are averaged over seeds (and over the blocks a user is tested in) first, so that a user
counts once and the units are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class PairedComparison:
    """Method a against method b over n units.

    Attributes:
        n: number of units.
        difference: mean of a - b.
        low, high: 95 % bootstrap interval of the difference (percentiles).
        t, p: two-sided paired t-test.
        p_permutation: two-sided sign-flip permutation test.
        effect: d_z, the mean difference over its standard deviation.
    """

    n: int
    difference: float
    low: float
    high: float
    t: float
    p: float
    p_permutation: float
    effect: float


def compare_paired(a: Sequence[float], b: Sequence[float], draws: int = 9999, seed: int = 0) -> PairedComparison:
    """Compare two methods unit by unit.

    Args:
        a, b: one score per unit, in the same order.
        draws: bootstrap samples and random sign flips.
        seed: of both.

    Raises:
        ValueError: if the two differ in length, have fewer than 2 units, or hold a score that is not finite.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(f"expected two lists of the same length, at least 2; found {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a score is not finite")
    d = a - b
    mean, deviation = float(d.mean()), float(d.std(ddof=1))
    if deviation == 0.0:
        same = mean == 0.0
        return PairedComparison(len(d), mean, mean, mean, 0.0 if same else float(np.copysign(np.inf, mean)),
                                1.0 if same else 0.0, 1.0 if same else 2.0 ** (1 - len(d)),
                                0.0 if same else float(np.copysign(np.inf, mean)))
    test = stats.ttest_rel(a, b)
    rng = np.random.default_rng(seed)
    bootstrap, flipped = np.empty(draws), np.empty(draws)
    for start in range(0, draws, 500):  # bounds the memory for many units
        some = slice(start, min(start + 500, draws))
        size = (some.stop - some.start, len(d))
        bootstrap[some] = d[rng.integers(len(d), size=size)].mean(1)
        flipped[some] = (d * rng.choice((-1.0, 1.0), size=size)).mean(1)
    # The observed labelling is one of the permutations, hence the + 1. The slack is for rounding in equal sums.
    as_extreme = int((np.abs(flipped) >= abs(mean) * (1 - 1e-12)).sum())
    low, high = np.percentile(bootstrap, [2.5, 97.5])
    return PairedComparison(len(d), mean, float(low), float(high), float(test.statistic), float(test.pvalue),
                            (as_extreme + 1) / (draws + 1), mean / deviation)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    p = np.asarray(p, dtype=float)
    order = np.argsort(p)
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    result = np.empty_like(p)
    result[order] = adjusted
    return result.tolist()
