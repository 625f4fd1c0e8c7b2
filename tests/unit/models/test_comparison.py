"""New rewards and advantages beside stored ones, against numbers worked by hand."""

import numpy as np
import pyarrow as pa
import pytest

from models.credit.comparison import compare_advantages, compare_rewards, correlation

NAN = float("nan")


def samples(*rows):
    """A table of samples: prompt row, sample, advantages of its tokens."""
    prompts, numbers, advantages = zip(*rows, strict=True)
    return pa.table(
        {
            "prompt_row": pa.array(prompts, pa.int32()),
            "sample": pa.array(numbers, pa.int16()),
            "advantages": pa.array(advantages, pa.list_(pa.float32())),
        }
    )


def test_means_changes_and_correlation_of_rewards_are_those_worked_by_hand():
    stored, new = np.array([0.0, 1.0, 1.0, NAN, NAN]), np.array([0.0, 1.0, 0.5, NAN, 1.0])
    compared = compare_rewards(stored, new)
    # Of the three pairs the deviations are (-2, 1, 1) / 3 and (-1, 1, 0) / 2: (1/2) / sqrt(2/3 * 1/2) = sqrt(3) / 2.
    assert compared.pop("correlation") == pytest.approx(3**0.5 / 2)
    assert compared == {
        "completions": 5,
        "missing": 1,
        "changed_fraction": 2 / 5,
        "stored_reward_mean": pytest.approx(2 / 3),
        "reward_mean": pytest.approx(2.5 / 4),
    }


def test_a_side_that_does_not_vary_has_no_correlation_and_nothing_has_no_mean():
    assert correlation(np.ones(4), np.arange(4.0)) == {}
    assert correlation(np.array([1.0, NAN]), np.array([2.0, 3.0])) == {}
    assert compare_rewards(np.empty(0), np.empty(0)) == {"completions": 0, "missing": 0, "changed_fraction": 0}


def test_opposite_rewards_correlate_as_minus_one_whatever_their_scale():
    values = np.random.default_rng(3).normal(size=100)
    assert correlation(values, -1e-3 * values + 7)["correlation"] == pytest.approx(-1)


def test_advantages_are_compared_token_by_token_where_both_sides_have_the_completion():
    stored = samples((1, 0, [1.0, 2.0]), (1, 1, [3.0]), (2, 0, [9.0]), (4, 0, []))
    new = samples((4, 0, [5.0]), (1, 1, [-3.0]), (1, 0, [-1.0, -2.0]), (3, 1, [100.0]))
    compared = compare_advantages(stored, new)
    assert compared["coinciding"] == 2, "the fourth prompt's completion has no tokens on one side"
    assert compared["correlation"] == pytest.approx(-1)
    assert compared["advantage_size"] == pytest.approx((5 + 3 + 1 + 2 + 100) / 5)
