"""Shares of headroom: (method - reference) / (bound - reference), over users and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedcl_bench.stats.headroom import headroom
from fedcl_bench.stats.significance import TooFew

USERS = np.linspace(0.0, 0.1, 40)


def scores(gain, seeds=3, spread=0.01):
    random = np.random.default_rng(abs(round(1000 * gain)))
    return USERS + gain + spread * random.normal(size=(seeds, len(USERS)))


def test_a_share_is_that_of_the_means():
    found, = headroom([scores(0.02)], scores(0.0), scores(0.08))
    gained, above = (scores(gain).mean() - scores(0.0).mean() for gain in (0.02, 0.08))
    assert found.gain[0] == pytest.approx(gained) and found.share[0] == pytest.approx(gained / above)
    assert 0.15 < found.share[1] < found.share[0] < found.share[2] < 0.35


def test_exact_scores_leave_no_doubt():
    method, reference, bound = (scores(gain, spread=0.0) for gain in (0.03, 0.0, 0.06))
    found, other = headroom([method, bound], reference, bound)
    assert other.share == pytest.approx((1.0, 1.0, 1.0))
    assert found.share == pytest.approx((0.5, 0.5, 0.5)) and found.gain == pytest.approx((0.03, 0.03, 0.03))


@pytest.mark.parametrize("bound", [0.0, -0.05, 0.001])
def test_there_is_no_share_of_nothing(bound):
    assert headroom([scores(0.02)], scores(0.0), scores(bound) if bound else scores(0.0))[0].share is None


@given(st.integers(1, 4), st.integers(2, 12), st.integers(0, 99))
def test_the_bound_has_all_of_its_headroom(seeds, users, seed):
    random = np.random.default_rng(seed)
    reference = random.uniform(size=(seeds, users))
    found, = headroom([reference + 0.1], reference, reference + 0.1, draws=99)
    assert found.share == pytest.approx((1.0, 1.0, 1.0))


def test_seeds_count_as_well():
    """Where seeds differ and users do not, the interval is that of the seeds."""
    steady = np.zeros((5, 40))
    varying = np.linspace(0.0, 0.1, 5)[:, None] + steady
    _, low, high = headroom([varying], steady, steady + 1.0)[0].gain
    assert low == pytest.approx(0.02, abs=0.006) and high == pytest.approx(0.08, abs=0.006)


def test_one_user_is_too_few():
    with pytest.raises(TooFew, match="found 1"):
        headroom([np.zeros((2, 1))], *np.zeros((2, 2, 1)))
