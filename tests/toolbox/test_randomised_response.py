"""Randomised response: rates, budgets and estimates are those of the formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcl_bench import rng
from fedcl_bench.toolbox.randomised_response import budget, estimated, kept_share, randomise, shifted_share

N = 40_000
categories_ = st.integers(2, 300)
epsilons = st.floats(0.01, 12.0)


@pytest.mark.parametrize("categories, epsilon", [(2, 1.0), (5, 0.3), (256, 4.0)])
def test_rates_and_estimates(categories, epsilon):
    """Within 4 standard deviations: true reports, each of the others, and the mean of the estimates."""
    kept, true = kept_share(epsilon, categories), categories - 1
    reports = randomise(torch.full((N,), true), categories, kept, rng.key(1, "a", 2))
    counts = np.bincount(reports.numpy(), minlength=categories)
    assert len(counts) == categories
    for number in {0, 1 % true if true > 1 else 0, true}:
        share = kept if number == true else (1 - kept) / (categories - 1)
        assert abs(counts[number] / N - share) < 4 * math.sqrt(share * (1 - share) / N)
    estimates = estimated(reports, categories, kept)
    assert abs(estimates.mean() - true) < 4 * estimates.std() / math.sqrt(N)


@settings(max_examples=100, deadline=None)
@given(categories_, epsilons)
def test_the_budget_is_kept_and_used_up(categories, epsilon):
    """The largest ratio of a report's probabilities under any two numbers is e^eps."""
    kept = kept_share(epsilon, categories)
    assert kept == pytest.approx(math.exp(epsilon) / (math.exp(epsilon) + categories - 1))
    table = np.full((categories, categories), (1 - kept) / (categories - 1))
    np.fill_diagonal(table, kept)
    np.testing.assert_allclose(table.sum(1), 1.0)
    assert math.log((table.max(0) / table.min(0)).max()) == pytest.approx(epsilon, rel=1e-6)
    assert budget(kept, categories) == pytest.approx(epsilon, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(categories_, st.floats(0.02, 0.98))
def test_estimates_are_unbiased(categories, kept):
    """By the exact expectation over all reports; and expectations do not depend on the number for kept = 1 / k."""
    if abs(kept - 1 / categories) < 1e-3:
        return
    other = (1 - kept) / (categories - 1)
    estimates = estimated(torch.arange(categories), categories, kept)
    for true in {0, categories // 2, categories - 1}:
        probabilities = torch.full((categories,), other, dtype=torch.float64)
        probabilities[true] = kept
        assert float((probabilities * estimates).sum()) == pytest.approx(true, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2 ** 32), categories_, st.floats(0.0, 1.0))
def test_reports_are_in_range_and_keyed(seed, categories, kept):
    numbers = torch.randint(categories, (3, 50), generator=torch.Generator().manual_seed(seed))
    reports = randomise(numbers, categories, kept, seed)
    assert reports.shape == numbers.shape and reports.min() >= 0 and reports.max() < categories
    assert torch.equal(randomise(numbers, categories, kept, seed), reports)
    assert torch.equal(randomise(numbers, categories, 1.0, seed), numbers)
    assert (randomise(numbers, categories, 0.0, seed) != numbers).all()


def test_the_released_code_of_pfcr_spends_more_than_its_epsilon():
    """eps = .3 with 256 numbers: a number is shifted with probability .70, and a report's budget is 4.7."""
    shifted = (math.exp(0.3) + 1) / (math.exp(0.3) + 2)
    kept = shifted_share(shifted, 256)
    assert shifted == pytest.approx(0.7015, abs=1e-4)
    assert kept == pytest.approx(1 - shifted + shifted / 256)
    assert budget(kept, 256) == pytest.approx(math.log(1 + 256 / (math.exp(0.3) + 1)))
    assert budget(kept, 256) == pytest.approx(4.70, abs=0.01)
    assert budget(1.0, 256) == math.inf and budget(1 / 256, 256) == pytest.approx(0.0)
