"""The minimum detectable effect against statsmodels, against simulated tests, and in its limits."""

from __future__ import annotations

import pytest
from statsmodels.stats.power import TTestPower

from fedcl_bench.stats.power import detectable, power_of_paired_t
from fedcl_bench.stats.significance import TooFew


@pytest.mark.parametrize("n", [3, 10, 34, 260, 714])
def test_power_and_effect_are_those_of_statsmodels(n):
    for effect in (0.0, 0.05, 0.3):
        expected = TTestPower().power(effect, n, 0.05, alternative="two-sided")
        assert power_of_paired_t(effect, n) == pytest.approx(expected, abs=1e-6)
    assert power_of_paired_t(20.0, n) == pytest.approx(1.0, abs=1e-6)  # where statsmodels gives nan
    effect = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8, alternative="two-sided")
    assert detectable(0.2, n) == pytest.approx(0.2 * effect, rel=1e-4)


def test_without_deviation_anything_is_seen_and_with_one_unit_nothing_is_tested():
    assert detectable(0.0, 10) == 0.0
    with pytest.raises(TooFew):
        detectable(0.1, 1)
