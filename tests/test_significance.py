"""Significance tests against scipy and statsmodels, and their error rate on data without an effect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from fedcl_bench.significance import compare_paired, holm


def test_agrees_with_scipy():
    rng = np.random.default_rng(0)
    a = rng.normal(0.1, 0.2, 60)
    b = a - rng.normal(0.05, 0.1, 60)
    found = compare_paired(a, b)
    expected = stats.ttest_rel(a, b)
    assert (found.t, found.p) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
    permutation = stats.permutation_test((a, b), lambda x, y: np.mean(x - y), permutation_type="samples",
                                         n_resamples=9999, rng=np.random.default_rng(1))
    assert found.p_permutation == pytest.approx(permutation.pvalue, abs=0.01)
    assert found.effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1))
    assert found.low < found.difference < found.high
    interval = stats.bootstrap(((a - b),), np.mean, method="percentile", rng=np.random.default_rng(1))
    assert found.low == pytest.approx(interval.confidence_interval.low, abs=0.005)
    assert found.high == pytest.approx(interval.confidence_interval.high, abs=0.005)


def test_error_rate_without_an_effect():
    rng = np.random.default_rng(1)
    found = [compare_paired(rng.normal(size=30), rng.normal(size=30), draws=199, seed=i) for i in range(300)]
    for p in ([f.p for f in found], [f.p_permutation for f in found]):
        assert 0.02 <= np.mean(np.array(p) <= 0.05) <= 0.09
    assert 0.9 <= np.mean([f.low <= 0.0 <= f.high for f in found]) <= 0.98


def test_identical_and_constant_differences():
    same = compare_paired([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert same.p == same.p_permutation == 1.0 and same.difference == same.effect == 0.0
    shifted = compare_paired([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    assert shifted.difference == 0.5 and shifted.p == 0.0 and shifted.p_permutation == 0.25


@pytest.mark.parametrize("a,b", [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, np.nan], [1.0, 2.0])])
def test_refuses_what_cannot_be_paired(a, b):
    with pytest.raises(ValueError):
        compare_paired(a, b)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_agrees_with_statsmodels(p):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    assert holm(p) == pytest.approx(multitest.multipletests(p, method="holm")[1].tolist())
