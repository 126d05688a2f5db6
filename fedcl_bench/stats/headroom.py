"""How much of what there is to gain a method gains: its share of the headroom between a reference and a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
from numpy.typing import NDArray

from .significance import TooFew

_Floats = NDArray[np.float64]
_AT_A_TIME = 256  # bootstrap samples


@dataclass(frozen=True)
class Headroom:
    """Means over units and seeds, with 95 % bootstrap intervals over both (percentiles).

    Attributes:
        gain: of the method over the reference, and its interval.
        share: the gain over the bound's own, and its interval; None without headroom, which is where the interval of
            the bound's gain reaches down to 0.
    """

    gain: tuple[float, float, float]
    share: tuple[float, float, float] | None


def headroom(methods: Sequence[_Floats], reference: _Floats, bound: _Floats, draws: int = 9999,
             seed: int = 0) -> list[Headroom]:
    """(method - reference) / (bound - reference) of each method.

    Every bootstrap sample draws seeds and units with replacement, the same for all, so that the interval of the share
    has the uncertainty of its denominator too.

    Args:
        methods, reference, bound: a score per seed and unit, (seeds, units), in the same order.

    Raises:
        TooFew: for fewer than 2 units.
    """
    gains, above = [method - reference for method in methods], bound - reference
    seeds, units = above.shape
    if units < 2:
        raise TooFew(f"a share of headroom needs at least 2 users that all methods have; found {units}.")
    rng, parts = np.random.default_rng(seed), []
    for size in (min(_AT_A_TIME, draws - at) for at in range(0, draws, _AT_A_TIME)):
        of_seeds, of_units = _resampled(rng, size, seeds), _resampled(rng, size, units)
        parts.append(np.stack([((of_seeds @ scores) * of_units).sum(1) for scores in (*gains, above)], 1))
    samples = np.concatenate(parts)
    return [_of_samples(gained, above, samples[:, [number, -1]]) for number, gained in enumerate(gains)]


def _of_samples(gained: _Floats, above: _Floats, samples: _Floats) -> Headroom:
    """One method's, from the means of its gain and the bound's in each sample, (draws, 2)."""
    low, high = np.percentile(samples, [2.5, 97.5], axis=0)
    gain = float(gained.mean()), float(low[0]), float(high[0])
    if not low[1] > 0.0:
        return Headroom(gain, None)
    of_share = np.percentile(samples[:, 0] / samples[:, 1], [2.5, 97.5])
    return Headroom(gain, (float(gained.mean() / above.mean()), float(of_share[0]), float(of_share[1])))


def _resampled(rng: np.random.Generator, size: int, n: int) -> _Floats:
    """The weights of n things in ``size`` samples of n with replacement, (size, n)."""
    drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n) / n
