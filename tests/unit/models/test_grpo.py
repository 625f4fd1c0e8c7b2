"""Group-relative advantages (GRPO, Dr. GRPO, RLOO) against values computed by hand, and their invariants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.algorithms.group_relative import EPSILON, dr_grpo, grpo, grpo_over_batch, rloo
from rheostat.models.algorithms.ragged import group_statistics

NAN = float("nan")
ALGORITHMS = {"grpo": grpo, "grpo_over_batch": grpo_over_batch, "dr_grpo": dr_grpo, "rloo": rloo}
STANDARDIZED = ("grpo", "grpo_over_batch")
every_algorithm = pytest.mark.parametrize("kind", ALGORITHMS)


def compute_advantages(kind, rewards, groups=None):
    groups = [0] * len(rewards) if groups is None else groups
    return ALGORITHMS[kind](np.array(rewards, np.float64), np.array(groups, np.int64), max(groups, default=-1) + 1)


def standardize(deviations, std):
    return np.array(deviations) / (std + EPSILON)


@pytest.mark.parametrize(
    ("kind", "rewards", "groups", "expected"),
    [
        # mean 1/4, variance (9/16 + 3 * 1/16) / 4 = 3/16
        ("grpo", [1, 0, 0, 0], [0] * 4, standardize([3 / 4, -1 / 4, -1 / 4, -1 / 4], 3**0.5 / 4)),
        # over all four rewards: mean 5, variance (16 + 9 + 9 + 16) / 4 = 12.5; a missing reward does not count
        ("grpo_over_batch", [1, 2, NAN, 8, 9], [0, 0, 0, 1, 1], standardize([-0.5, 0.5, NAN, -0.5, 0.5], 12.5**0.5)),
        # groups of one reward count in the batch: mean 1/2, variance (3 * 1/4 + 1/4) / 4 = 1/4
        ("grpo_over_batch", [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 2], standardize([0.5, -0.5, 0.5, -0.5, 0, 0], 0.5)),
        ("dr_grpo", [1, 0, 0, 0], [0] * 4, [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", [1, 10, 0, 30], [5, 2, 5, 2], [0.5, -10, -0.5, 10]),
        ("dr_grpo", [1, 3, NAN], [0] * 3, [-1, 1, NAN]),
        # 1 - (0 + 0 + 2) / 3 = 1/3; 0 - (1 + 0 + 2) / 3 = -1; 2 - (1 + 0 + 0) / 3 = 5/3
        ("rloo", [1, 0, 0, 2], [0] * 4, [1 / 3, -1, -1, 5 / 3]),
        ("rloo", [1, 3, NAN], [0] * 3, [-2, 2, NAN]),
    ],
)
def test_advantages_are_the_values_computed_by_hand(kind, rewards, groups, expected):
    np.testing.assert_allclose(compute_advantages(kind, rewards, groups), expected, rtol=1e-12)


@every_algorithm
@pytest.mark.parametrize(
    ("rewards", "groups", "expected"),
    [
        # 0.1 + 0.1 + 0.1 is not 3 * 0.1 in floats: the mean is off by rounding, which the deviation must not amplify
        ([0.1, 0.1, 0.1], [0, 0, 0], [0, 0, 0]),
        ([5, NAN, 3, 3], [0, 0, 1, 1], [0, NAN, 0, 0]),
        ([], [], []),
    ],
    ids=["equal rewards", "a single reward", "no completions"],
)
def test_a_group_without_different_rewards_has_advantages_of_zero(kind, rewards, groups, expected):
    np.testing.assert_array_equal(compute_advantages(kind, rewards, groups), expected)


def test_statistics_of_groups_are_population_statistics():
    groups = group_statistics(np.array([1.0, 3.0, 4.0, NAN, NAN]), np.array([0, 0, 2, 2, 1]), 3)
    np.testing.assert_array_equal(groups.count_G, [2, 0, 1])
    np.testing.assert_array_equal(groups.mean_G, [2, 0, 4])
    np.testing.assert_array_equal(groups.std_G, [1, 0, 0])
    np.testing.assert_array_equal(groups.differ, [True, False, False])


@st.composite
def batches(draw):
    """Draw a small batch of interleaved groups with rewards that floats represent exactly; some are missing."""
    ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=24))
    reward = st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda eighths: eighths / 8))
    rewards = draw(st.lists(reward, min_size=len(ids), max_size=len(ids)))
    return np.array(rewards), np.array(ids)


@every_algorithm
@given(batch=batches(), shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(kind, batch, shift):
    rewards_N, ids_N = batch
    shifted_N, plain_N = (ALGORITHMS[kind](rewards_N + constant, ids_N, 4) for constant in (shift, 0))
    np.testing.assert_allclose(shifted_N, plain_N, atol=1e-9)


@every_algorithm
@given(batch=batches(), scale=st.integers(1, 64))
def test_the_scale_of_rewards_matters_only_without_standardization(kind, batch, scale):
    rewards_N, ids_N = batch
    plain_N, scaled_N = (ALGORITHMS[kind](rewards_N * factor, ids_N, 4) for factor in (1, scale))
    expected_N = plain_N if kind in STANDARDIZED else plain_N * scale
    tolerance = 1e-4 if kind in STANDARDIZED else 1e-12  # EPSILON is added to the deviation
    np.testing.assert_allclose(scaled_N, expected_N, rtol=tolerance, atol=1e-9)


@every_algorithm
@given(batch=batches())
def test_advantages_are_missing_exactly_if_rewards_are_and_sum_to_zero_in_every_group(kind, batch):
    rewards_N, ids_N = batch
    advantages_N = ALGORITHMS[kind](rewards_N, ids_N, 4)
    np.testing.assert_array_equal(np.isnan(advantages_N), np.isnan(rewards_N))
    np.testing.assert_allclose(np.bincount(ids_N, weights=np.nan_to_num(advantages_N)), 0, atol=1e-9)


@every_algorithm
@given(batch=batches(), data=st.data())
def test_the_order_of_completions_does_not_matter(kind, batch, data):
    rewards_N, ids_N = batch
    order_N = np.array(data.draw(st.permutations(range(len(ids_N)))))
    shuffled_N = ALGORITHMS[kind](rewards_N[order_N], ids_N[order_N], 4)
    np.testing.assert_allclose(shuffled_N, ALGORITHMS[kind](rewards_N, ids_N, 4)[order_N], atol=1e-9)
