"""Comparison of new rewards and advantages with stored ones, against values computed by hand."""

import numpy as np
import pyarrow as pa
import pytest

from rheostat.models.credit.comparison import compare_advantages, compare_rewards, correlation

NAN = float("nan")
SCHEMA = pa.schema([("prompt_row", pa.int32()), ("sample", pa.int16()), ("advantages", pa.list_(pa.float32()))])


def build_samples(*rows):
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=SCHEMA)


def test_rewards_are_compared_by_mean_changes_and_correlation():
    stored, new = np.array([0.0, 1.0, 1.0, NAN, NAN]), np.array([0.0, 1.0, 0.5, NAN, 1.0])
    # Deviations of the three pairs: (-2, 1, 1) / 3 and (-1, 1, 0) / 2, so (1/2) / sqrt(2/3 * 1/2) = sqrt(3) / 2.
    assert compare_rewards(stored, new) == {
        "completions": 5,
        "missing": 1,
        "changed_fraction": 2 / 5,
        "stored_reward_mean": pytest.approx(2 / 3),
        "reward_mean": pytest.approx(2.5 / 4),
        "correlation": pytest.approx(3**0.5 / 2),
    }


def test_rewards_without_variance_have_no_correlation_and_no_rewards_have_no_mean():
    assert correlation(np.ones(4), np.arange(4.0)) == {}
    assert correlation(np.array([1.0, NAN]), np.array([2.0, 3.0])) == {}
    assert compare_rewards(np.empty(0), np.empty(0)) == {"completions": 0, "missing": 0, "changed_fraction": 0}


def test_opposite_rewards_have_correlation_minus_one_at_any_scale():
    values = np.random.default_rng(3).normal(size=100)
    assert correlation(values, -1e-3 * values + 7)["correlation"] == pytest.approx(-1)


def test_advantages_are_compared_token_by_token_for_completions_of_both_sides():
    stored = build_samples((1, 0, [1.0, 2.0]), (1, 1, [3.0]), (2, 0, [9.0]), (4, 0, []))
    new = build_samples((4, 0, [5.0]), (1, 1, [-3.0]), (1, 0, [-1.0, -2.0]), (3, 1, [100.0]))
    compared = compare_advantages(stored, new)
    assert compared["coinciding"] == 2, "the completion of prompt 4 has no tokens on one side"
    assert compared["correlation"] == pytest.approx(-1)
    assert compared["advantage_size"] == pytest.approx((5 + 3 + 1 + 2 + 100) / 5)
