"""Which difference a paired test could have seen: its power, and the smallest effect that it finds."""

from __future__ import annotations

import numpy as np
from scipy import special

from .significance import LEVEL, TooFew

POWER = 0.8  # how probable it is to be that the smallest effect is found


def power_of_paired_t(effect: float, n: int, level: float = LEVEL) -> float:
    """How probable a two-sided paired t-test over n units is to be significant.

    With differences d_u ~ N(m, s²) and effect = m / s, t = mean(d) sqrt(n) / s follows the noncentral t distribution
    with n - 1 degrees of freedom and noncentrality effect sqrt(n) (Cohen, Statistical Power Analysis for the Behavioral
    Sciences, 2nd edition, 1988, section 2.2; Johnson & Welch, Biometrika 31, 1940).

    Raises:
        TooFew: for fewer than 2 units.
    """
    if n < 2:
        raise TooFew(f"a paired test needs at least 2 units; found {n}.")
    bound, shift = special.stdtrit(n - 1, 1.0 - level / 2.0), effect * n ** 0.5
    below, not_above = np.nan_to_num(special.nctdtr(n - 1, shift, [-bound, bound]))  # scipy: nan where it is nearly 0
    return float(below + 1.0 - not_above)


def detectable(deviation: float, n: int, level: float = LEVEL, power: float = POWER) -> float:
    """The minimum detectable effect: the mean difference m, in the units of the scores, that a two-sided paired t-test
    over n units finds significant with probability ``power``; it solves ``power_of_paired_t(m / deviation, n)`` for m.

    Args:
        deviation: sample standard deviation of the units' differences. What m follows from is this estimate, so m is
            one too.

    Raises:
        TooFew: for fewer than 2 units.
    """
    low, high = 0.0, 1.0  # effects; power grows from the level at 0 to 1
    while power_of_paired_t(high, n, level) < power:
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if power_of_paired_t(middle, n, level) < power else (low, middle)
    return high * deviation
