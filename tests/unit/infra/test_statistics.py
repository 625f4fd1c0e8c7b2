"""Intervals and quantiles, compared with textbook tables."""

import numpy as np
import pytest

from rheostat.infra.statistics import Z95, mean_interval, normal_cdf, normal_quantile, wilson_interval


def test_the_wilson_interval_equals_textbook_values():
    low, high = wilson_interval(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_reward_on_any_scale_has_the_normal_interval_of_its_mean():
    low, high = mean_interval(30, 5**2 + 10**2 + 15**2, 3)  # standard deviation 5, 1.96 * 5 / sqrt(3) = 5.658
    assert (round(low, 3), round(high, 3)) == (4.342, 15.658)
    assert mean_interval(8, 8, 10) == wilson_interval(8, 10)
    assert mean_interval(4.5, 4.5**2, 1) == (4.5, 4.5)
    assert mean_interval(0.5, 0.25, 1) == wilson_interval(0.5, 1)


def test_the_interval_of_a_perfect_score_contains_the_score():
    assert {wilson_interval(trials, trials)[1] for trials in range(1, 2000)} == {1.0}
    assert {wilson_interval(0, trials)[0] for trials in range(1, 2000)} == {0.0}


def test_quantiles_equal_published_tables():
    assert normal_quantile(0.975) == pytest.approx(Z95, abs=1e-15)


def test_the_normal_distribution_and_its_inverse_are_accurate_in_the_tails():
    assert normal_cdf(-6.0) == pytest.approx(9.8659e-10, rel=1e-4)
    z = np.linspace(-6, 4, 101)
    assert normal_quantile(normal_cdf(z)) == pytest.approx(z, abs=1e-9)
