"""Significance tests, power and headroom against scipy, statsmodels and published values, and their behaviour on
simulated data."""

import gc
import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats
from statsmodels.stats.power import TTestPower

from fedcl_bench.core.errors import UserError
from fedcl_bench.stats.significance import (TooFew, compare_paired, critical_difference, detectable, friedman, headroom,
                                            holm, interval_of_mean, power_of_paired_t)

score = st.floats(0, 1, allow_subnormal=False)


def binomial_range(trials, p):
    """Counts that a correct procedure leaves once in ten thousand times."""
    return stats.binom.ppf([0.00005, 0.99995], trials, p)


@given(st.lists(st.tuples(score, score), min_size=2, max_size=40))
@settings(max_examples=60)
def test_paired_t_agrees_with_scipy(pairs):
    a, b = np.array(pairs).T
    found = compare_paired(a, b, draws=99)
    if np.ptp(a - b) > 1e-9:  # scipy itself warns of nearly constant differences
        expected = stats.ttest_rel(a, b)
        assert found.t == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)
        assert found.effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1), rel=1e-6, abs=1e-9)
    assert not any(math.isnan(x) for x in astuple(found))
    assert 0 < found.p_permutation <= 1 and found.low <= found.high


def test_permutation_and_bootstrap_agree_with_scipy():
    rng = np.random.default_rng(0)
    a = rng.normal(0.1, 0.2, 60)
    b = a - rng.normal(0.01, 0.1, 60)
    found = compare_paired(a, b)
    permutation = stats.permutation_test((a, b), lambda x, y: np.mean(x - y), permutation_type="samples",
                                         n_resamples=9999, rng=np.random.default_rng(1))
    assert 0.1 < found.p_permutation < 0.3
    assert found.p_permutation == pytest.approx(permutation.pvalue, abs=0.02)  # five standard errors
    interval = stats.bootstrap(((a - b),), np.mean, method="percentile", rng=np.random.default_rng(1))
    assert found.low == pytest.approx(interval.confidence_interval.low, abs=0.005)
    assert found.high == pytest.approx(interval.confidence_interval.high, abs=0.005)
    a, b = np.array([0.4, 0.5, 0.7, 0.3, 0.6]), np.array([0.3, 0.45, 0.5, 0.35, 0.52])
    exact = stats.permutation_test((a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=10 ** 6)
    assert compare_paired(a, b).p_permutation == pytest.approx(exact.pvalue, abs=1e-12)
    assert compare_paired(b + 0.1 * np.arange(1, 6), b).p_permutation == 2 / 2 ** 5


def test_error_rate_without_an_effect_and_coverage_of_the_interval():
    rng = np.random.default_rng(1)
    found = [compare_paired(a, b, draws=99, seed=i)
             for i, (a, b) in enumerate(rng.exponential(size=(500, 2, 25)))]  # skewed scores; differences symmetric
    low, high = binomial_range(500, 0.05)
    assert low <= sum(f.p <= 0.05 for f in found) <= high
    assert low <= sum(f.p_permutation <= 0.05 for f in found) <= high
    rng = np.random.default_rng(3)
    found = [compare_paired(rng.normal(0.3, 1.0, 100), np.zeros(100), draws=499, seed=i) for i in range(300)]
    low, high = binomial_range(300, 0.945)  # percentile intervals are a little narrow with 100 units
    assert low <= sum(f.low <= 0.3 <= f.high for f in found) <= high


def test_identical_and_constant_differences():
    same = compare_paired([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert same.p == same.p_permutation == 1.0 and same.difference == same.effect == same.t == 0.0
    shifted = compare_paired([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    assert shifted.difference == 0.5 and shifted.p == 0.0 and shifted.p_permutation == 0.25
    assert shifted.t == shifted.effect == math.inf
    rounding = compare_paired([0.1 + 0.2, 0.7 + 0.1, 0.3], [0.3, 0.8, 0.3])
    assert rounding == same  # differences of rounding are none


def test_what_cannot_be_tested_is_refused():
    for a, b in (([1.0, 2.0], [1.0]), ([1.0, np.nan], [1.0, 2.0]), ([1.0, np.inf], [1.0, 2.0]), ([[1.0], [2.0]],) * 2):
        with pytest.raises(ValueError):
            compare_paired(a, b)
    for few in ([], [1.0]):
        with pytest.raises(TooFew, match=f"at least 2 users.*found {len(few)}"):
            compare_paired(few, few, unit="user")
    assert issubclass(TooFew, UserError)
    for shape in ((1, 4), (5, 2), (0, 3)):
        with pytest.raises(TooFew, match=f"2 rows .* 3 methods; found {shape[0]} and {shape[1]}"):
            friedman(np.zeros(shape))
    for no_table in ([1.0, 2.0, 3.0], [[1.0, 2.0, np.nan]] * 3):
        with pytest.raises(ValueError):
            friedman(no_table)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_agrees_with_statsmodels(p):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # which it calls every time, for a fifth of a second
        expected = multitest.multipletests(p, method="holm")[1].tolist()
    assert holm(p) == pytest.approx(expected)


tables = st.tuples(st.integers(2, 8), st.integers(3, 7)).flatmap(
    lambda shape: st.lists(st.lists(st.integers(0, 6), min_size=shape[1], max_size=shape[1]),
                           min_size=shape[0], max_size=shape[0]))


@settings(max_examples=40)
@given(tables)
def test_friedman_agrees_with_scipy(table):
    """Small whole numbers, so that most tables have ties."""
    scores = np.array(table, dtype=float)
    found = friedman(scores)
    assert sum(found.ranks) == pytest.approx(scores.shape[1] * (scores.shape[1] + 1) / 2)
    if (np.ptp(scores, axis=1) == 0).all():
        assert (found.chi2, found.p) == (0.0, 1.0)
    else:
        expected = stats.friedmanchisquare(*scores.T)
        assert found.chi2 == pytest.approx(expected.statistic, abs=1e-9)
        assert found.p == pytest.approx(expected.pvalue, abs=1e-9)


def test_friedman_of_the_textbook():
    """Demšar 2006, Table 6 and section 3.2.2: C4.5 and three variants on 14 data sets, ranks printed to 3 decimals; and
    the critical values of its Table 5(a)."""
    c45 = [.763, .599, .954, .628, .882, .936, .661, .583, .775, 1.0, .940, .619, .972, .957]
    m = [.768, .591, .971, .661, .888, .931, .668, .583, .838, 1.0, .962, .666, .981, .978]
    cf = [.771, .590, .968, .654, .886, .916, .609, .563, .866, 1.0, .965, .614, .9751, .946]
    mcf = [.798, .569, .967, .657, .898, .931, .685, .625, .875, 1.0, .962, .669, .975, .970]
    found = friedman(np.array([c45, m, cf, mcf]).T)
    assert found.ranks == pytest.approx((3.143, 2.000, 2.893, 1.964), abs=5e-4)
    assert found.critical_difference == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), abs=1e-3)
    for k, q in enumerate((1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164), start=2):
        assert critical_difference(k, 20) / math.sqrt(k * (k + 1) / 120) == pytest.approx(q, abs=1e-3)


def test_groups_that_do_not_differ():
    rng = np.random.default_rng(0)
    scores = np.array([0.4, 0.3, 0.2, 0.1]) + 0.001 * rng.normal(size=(12, 4))  # ranks 1, 2, 3, 4 in every row
    found = friedman(scores[:, [2, 0, 3, 1]])
    assert found.ranks == (3.0, 1.0, 4.0, 2.0) and found.p < 1e-6
    assert found.critical_difference == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 12)), abs=1e-3)  # of 12 rows
    assert found.groups == ((1, 3), (3, 0), (0, 2))  # neighbours overlap, as they are less than one CD apart
    assert friedman(scores[:3]).groups == ((0, 1, 2),) + ((1, 2, 3),)
    assert friedman(np.repeat(scores, 20, axis=0)).groups == ()


def test_the_interval_of_a_mean_is_that_of_a_share():
    """Of zeros and ones it is scipy's exact interval; it covers means of scores between 0 and 1 too."""
    for n in (1, 5, 29):
        for k in range(n + 1):
            expected = stats.binomtest(k, n).proportion_ci(0.95, "exact")
            assert interval_of_mean(k / n, n) == pytest.approx((expected.low, expected.high))
    assert interval_of_mean(1.0, 1) == pytest.approx((0.025, 1.0))
    rng = np.random.default_rng(0)
    scores = rng.beta(0.1, 0.9, (2000, 12))  # skewed, as N@20 of users is; the mean is .1
    inside = sum(low <= 0.1 <= high for low, high in (interval_of_mean(float(mean), 12) for mean in scores.mean(1)))
    assert inside >= 0.95 * 2000


USERS = np.linspace(0.0, 0.1, 40)


def scores(gain, seeds=3, spread=0.01):
    random = np.random.default_rng(abs(round(1000 * gain)))
    return USERS + gain + spread * random.normal(size=(seeds, len(USERS)))


def test_a_share_is_that_of_the_means_and_there_is_none_of_nothing():
    found, again = headroom([scores(0.02)] * 2, scores(0.0), scores(0.08))
    assert found == again
    gained, above = (scores(gain).mean() - scores(0.0).mean() for gain in (0.02, 0.08))
    assert found.gain[0] == pytest.approx(gained) and found.share[0] == pytest.approx(gained / above)
    assert 0.15 < found.share[1] < found.share[0] < found.share[2] < 0.35
    method, reference, bound = (scores(gain, spread=0.0) for gain in (0.03, 0.0, 0.06))  # exact: no doubt
    found, whole = headroom([method, bound], reference, bound)
    assert whole.share == pytest.approx((1.0, 1.0, 1.0))
    assert found.share == pytest.approx((0.5, 0.5, 0.5)) and found.gain == pytest.approx((0.03, 0.03, 0.03))
    few = np.zeros((1, 100))
    few[0, :4] = 1.0  # who gain, and are in nearly all samples
    found, = headroom([few / 2], np.zeros((1, 100)), few)
    assert found.share == pytest.approx((0.5, 0.5, 0.5))
    for bound in (0.0, -0.05, 0.001):
        assert headroom([scores(0.02)], scores(0.0), scores(bound) if bound else scores(0.0))[0].share is None


def test_seeds_count_as_well():
    """Where seeds differ and users do not, the interval is that of the seeds; one user is too few."""
    steady = np.zeros((5, 40))
    varying = np.linspace(0.0, 0.1, 5)[:, None] + steady
    _, low, high = headroom([varying], steady, steady + 1.0)[0].gain
    assert low == pytest.approx(0.02, abs=0.006) and high == pytest.approx(0.08, abs=0.006)
    with pytest.raises(TooFew, match="found 1"):
        headroom([np.zeros((2, 1))], *np.zeros((2, 2, 1)))


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
