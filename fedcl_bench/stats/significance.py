"""Tests of differences between methods, their power, and shares of the headroom above a reference, on plain arrays.

Two methods are compared on units that both were measured on: users (scores averaged over blocks and seeds first, so
that a user counts once and the units are independent), or seeds. Several methods are compared over a grid of datasets
and backbones. A test that has too few units raises ``TooFew``; no function returns a value that is not a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UserError

_Floats = NDArray[Any]
DRAWS = 9999  # of the bootstrap and of sign flips
LEVEL = 0.05  # of Friedman's test and Nemenyi's critical difference
POWER = 0.8  # how probable it is to be that the smallest effect is found
_AT_A_TIME = 256  # bootstrap samples of a share of headroom
_NUMBERS = 1 << 24  # that are sampled at once, at most


class TooFew(UserError):
    """A test was asked for with fewer units, rows or methods than it needs."""


ALIKE = 1e-4  # what no metric of a run that is FT in effect is away from FT's
FEW_USERS = 30  # a mean over fewer is shown with its interval


def interval_of_mean(mean: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a mean over n users whose scores lie in [0, 1].

    That of a share of n (Clopper & Pearson, Biometrika 26, 1934) with n times the mean as the count: exact for scores
    of 0 and 1, as HR, and wide for others, which vary less at the same mean. It needs no spread, so a single user has
    one.
    """
    from scipy import special  # scipy.stats takes half a second to import, and this a tenth

    count = min(max(mean, 0.0), 1.0) * n
    low = float(special.betaincinv(count, n - count + 1.0, 0.025)) if count > 0.0 else 0.0
    high = float(special.betaincinv(count + 1.0, n - count, 0.975)) if count < n else 1.0
    return low, high


LEAST_SAMPLED, LEAST_OTHERS = 30, 5  # users from which a normal approximation is shown; of them with other values


def interval_of_sample(values: _Floats) -> tuple[float, float] | None:
    """The 95 % interval of the mean over all users, given the values of a sample of them: normal approximation, as if
    the sample were of infinitely many, so somewhat wide. None for fewer than ``LEAST_SAMPLED``, and where fewer than
    ``LEAST_OTHERS`` differ from the value that most have: so few hits are far from normal."""
    from scipy import special

    if len(values) < LEAST_SAMPLED or len(values) - np.unique(values, return_counts=True)[1].max() < LEAST_OTHERS:
        return None
    mean, half = float(np.mean(values)), float(special.ndtri(0.975) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return mean - half, mean + half


@dataclass(frozen=True)
class PairedComparison:
    """Method a against method b."""

    n: int  # units
    difference: float  # mean of a - b
    low: float  # 95 % bootstrap interval of the difference (percentiles)
    high: float
    t: float  # of the two-sided paired t-test; infinite if all differences are the same and not 0
    p: float
    p_permutation: float  # of the two-sided sign-flip permutation test
    effect: float  # d_z, the mean difference over its standard deviation; infinite where t is


def compare_paired(a: Sequence[float], b: Sequence[float], draws: int = DRAWS, seed: int = 0,
                   unit: str = "unit") -> PairedComparison:
    """Compare two methods unit by unit.

    Args:
        a, b: one score per unit, in the same order. Two scores closer than rounding are a difference of 0.
        draws: bootstrap samples, and random sign flips where there are more than ``draws`` possible ones.
        seed: of both.
        unit: what a unit is, for the error.

    Raises:
        TooFew: for fewer than 2 units.
        ValueError: if the two differ in length or hold a score that is not finite.
    """
    from scipy import special

    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"expected two lists of the same length; found shapes {x.shape} and {y.shape}")
    if len(x) < 2:
        raise TooFew(f"a paired test needs at least 2 {unit}s that both methods have; found {len(x)}.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a score is not finite")
    d = np.where(np.isclose(x, y, rtol=1e-12, atol=0.0), 0.0, x - y)
    n, mean = len(d), float(d.mean())
    if np.ptp(d) <= 1e-12 * np.abs(d).max():  # the same difference everywhere, up to rounding
        endless = float(np.copysign(np.inf, mean)) if mean else 0.0
        return PairedComparison(n, mean, mean, mean, endless, 0.0 if mean else 1.0, 2.0 ** (1 - n) if mean else 1.0,
                                endless)
    effect = mean / float(d.std(ddof=1))
    t = effect * n ** 0.5
    rng = np.random.default_rng(seed)
    low, high = _interval(d, draws, rng)
    return PairedComparison(n, mean, low, high, t, float(2.0 * special.stdtr(n - 1, -abs(t))),
                            _sign_flips(d, draws, rng), effect)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of one value per unit, of which there is one at least, and its 95 % bootstrap interval (percentiles)."""
    measured = np.asarray(values, dtype=float)
    return float(measured.mean()), *_interval(measured, DRAWS, np.random.default_rng(0))


def _interval(values: _Floats, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    n = len(values)
    sampled = _in_parts(draws, n, lambda size: values[rng.integers(n, size=size)].mean(1))
    return _between(sampled)


def _in_parts(draws: int, n: int, sample: Callable[[tuple[int, int]], _Floats]) -> _Floats:
    """``sample((k, n))`` in pieces that bound the memory for many units."""
    at_once = max(1, min(500, _NUMBERS // n))
    return np.concatenate([sample((min(at_once, draws - start), n)) for start in range(0, draws, at_once)])


def _sign_flips(d: _Floats, draws: int, rng: np.random.Generator) -> float:
    """Two-sided p of the mean of ``d`` among its sign flips: all of them if they are few, else random ones."""
    enough = abs(d.mean()) * (1 - 1e-12)  # equal sums may round differently
    if 2 ** len(d) <= draws:
        signs = 1.0 - 2.0 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((np.abs((signs * d).mean(1)) >= enough).mean())
    flipped = _in_parts(draws, len(d), lambda size: (d * rng.choice((-1.0, 1.0), size=size)).mean(1))
    return (int((np.abs(flipped) >= enough).sum()) + 1) / (draws + 1)  # + 1: the observed signs are one of the flips


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    raw = np.asarray(p, dtype=float)
    order = np.argsort(raw)
    adjusted = np.minimum(1.0, np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1)))
    result = np.empty_like(raw)
    result[order] = adjusted
    return [float(value) for value in result]


@dataclass(frozen=True)
class FriedmanComparison:
    """k methods over n rows (Friedman's test, Nemenyi's post-hoc test; Demšar, JMLR 7, 2006)."""

    n: int  # rows: datasets, backbones or pairs of them
    ranks: tuple[float, ...]  # average rank of each method; 1 is the best, ties share their ranks' mean
    chi2: float  # Friedman's statistic with the correction for ties; p is of k - 1 degrees of freedom
    p: float
    critical_difference: float  # two methods whose average ranks are at least this far apart differ at 5 %
    # The largest sets of methods that lie within less than the critical difference, as indices in the order of their
    # ranks; sets of one are left out.
    groups: tuple[tuple[int, ...], ...]


def critical_difference(k: int, n: int) -> float:
    """Nemenyi's critical difference of average ranks at 5 % for k methods over n rows.

    q sqrt(k (k + 1) / (6 n)), with q the upper 5 % point of the studentized range for k means and infinitely many
    degrees of freedom, over sqrt(2) (Demšar, section 3.2.2).
    """
    from scipy import stats

    q = stats.studentized_range.ppf(1.0 - LEVEL, k, np.inf) / 2.0 ** 0.5
    return float(q * (k * (k + 1) / (6.0 * n)) ** 0.5)


def friedman(scores: Sequence[Sequence[float]]) -> FriedmanComparison:
    """Compare several methods over a grid, by scores of shape (n rows, k methods), of which higher ones are better.
    Raises TooFew for fewer than 2 rows or 3 methods, ValueError for no such table, or a score that is not finite."""
    table = np.asarray(scores, dtype=float)
    if table.ndim != 2:
        raise ValueError(f"expected a table of rows x methods; found shape {table.shape}")
    n, k = table.shape
    if n < 2 or k < 3:
        raise TooFew(f"Friedman's test needs at least 2 rows (datasets x backbones) and 3 methods; found {n} and {k}.")
    if not np.isfinite(table).all():
        raise ValueError("a score is not finite")
    from scipy import special
    from scipy.stats import rankdata

    ranked = rankdata(-table, axis=1)
    ranks = ranked.mean(0)
    spread = float(((ranked - (k + 1) / 2) ** 2).sum()) / (k - 1)  # n k (k + 1) / 12 less what ties take away
    chi2 = n * n * float(((ranks - (k + 1) / 2) ** 2).sum()) / spread if spread else 0.0  # 0: every row is one tie
    width = critical_difference(k, n)
    order = np.argsort(ranks, kind="stable")
    groups: list[tuple[int, ...]] = []
    for first in range(k):
        group = tuple(int(i) for i in order[first:] if ranks[i] - ranks[order[first]] < width)
        if len(group) > 1 and not (groups and set(group) <= set(groups[-1])):
            groups.append(group)
    return FriedmanComparison(n, tuple(ranks.tolist()), chi2, float(special.chdtrc(k - 1, chi2)), width, tuple(groups))


# What a test could have seen


def power_of_paired_t(effect: float, n: int) -> float:
    """How probable a two-sided paired t-test over n units is to be significant.

    With differences d_u ~ N(m, s²) and effect = m / s, t = mean(d) sqrt(n) / s follows the noncentral t distribution
    with n - 1 degrees of freedom and noncentrality effect sqrt(n) (Cohen, Statistical Power Analysis for the Behavioral
    Sciences, 2nd edition, 1988, section 2.2; Johnson & Welch, Biometrika 31, 1940). Raises TooFew for fewer than 2
    units."""
    if n < 2:
        raise TooFew(f"a paired test needs at least 2 units; found {n}.")
    from scipy import special

    bound, shift = special.stdtrit(n - 1, 1.0 - LEVEL / 2.0), effect * n ** 0.5
    below, not_above = np.nan_to_num(special.nctdtr(n - 1, shift, [-bound, bound]))  # scipy: nan where it is nearly 0
    return float(below + 1.0 - not_above)


def detectable(deviation: float, n: int) -> float:
    """The minimum detectable effect: the mean difference m, in the units of the scores, that a two-sided paired t-test
    over n units finds significant with probability ``POWER``; it solves ``power_of_paired_t(m / deviation, n)`` for m.
    ``deviation``: sample standard deviation of the units' differences. What m follows from is this estimate, so m is
    one too. Raises TooFew for fewer than 2 units."""
    low, high = 0.0, 1.0  # effects; power grows from the level at 0 to 1
    while power_of_paired_t(high, n) < POWER:
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if power_of_paired_t(middle, n) < POWER else (low, middle)
    return high * deviation


# How much of what there is to gain a method gains


@dataclass(frozen=True)
class Headroom:
    """Means over units and seeds, each with its 95 % bootstrap interval over both (percentiles)."""

    gain: tuple[float, float, float]  # of the method over the reference
    # The gain over the bound's own; None without headroom, where the interval of the bound's gain reaches down to 0.
    share: tuple[float, float, float] | None


def headroom(methods: Sequence[_Floats], reference: _Floats, bound: _Floats, draws: int = DRAWS) -> list[Headroom]:
    """(method - reference) / (bound - reference) of each method, from a score of each per seed and unit, (seeds,
    units), in the same order.

    Every bootstrap sample draws seeds and units with replacement, the same for gains and bound, so that the interval of
    a share has the uncertainty of its denominator too. Raises TooFew for fewer than 2 units.
    """
    seeds, units = bound.shape
    if units < 2:
        raise TooFew(f"a share of headroom needs at least 2 users that all methods have; found {units}.")
    gains = np.stack([bound, *methods]) - reference
    of_each = gains.reshape(-1, units).T
    rng, parts = np.random.default_rng(0), []
    at_once = max(1, min(_AT_A_TIME, _NUMBERS // units))
    for size in (min(at_once, draws - at) for at in range(0, draws, at_once)):
        of_seeds, of_units = _resampled(rng, size, seeds), _resampled(rng, size, units)
        parts.append(np.einsum("bms,bs->mb", (of_units @ of_each).reshape(size, -1, seeds), of_seeds))
    above, *samples = np.concatenate(parts, 1)
    has_room, some, found = _between(above)[0] > 0.0, above != 0.0, []  # a few samples may have nobody who gains
    for gained, sampled in zip(gains[1:], samples):
        share = (float(gained.mean() / gains[0].mean()), *_between(sampled[some] / above[some])) if has_room else None
        found.append(Headroom((float(gained.mean()), *_between(sampled)), share))
    return found


def _between(samples: _Floats) -> tuple[float, float]:
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def _resampled(rng: np.random.Generator, size: int, n: int) -> _Floats:
    """The weights of n things in ``size`` samples of n with replacement, (size, n)."""
    drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n) / n
