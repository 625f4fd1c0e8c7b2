"""Group-relative advantages against numbers worked by hand, and their laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.algorithms.grpo import EPSILON, Floats, Integers, group_relative, group_statistics

NAN = float("nan")


def relative(rewards: list[float], groups: list[int] | None = None, *, normalise_std: bool = True) -> Floats:
    return group_relative(np.array(rewards), np.array(groups or [0] * len(rewards)), normalise_std)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Floats, Integers]:
    """Draw small batches of groups that interleave, with rewards on a grid that floats hold exactly, some missing."""
    ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=24))
    reward = st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda eighths: eighths / 8))
    rewards = draw(st.lists(reward, min_size=len(ids), max_size=len(ids)))
    return np.array(rewards), np.array(ids)


def test_grpo_gives_the_advantages_worked_by_hand():
    # mean 1/4, variance (9/16 + 3 · 1/16) / 4 = 3/16: (1 - 1/4) / √(3/16) = √3, (0 - 1/4) / √(3/16) = -1/√3
    expected = np.array([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    np.testing.assert_allclose(relative([1, 0, 0, 0]), expected * (3**0.5 / 4) / (3**0.5 / 4 + EPSILON), rtol=1e-12)


def test_dr_grpo_only_centres():
    np.testing.assert_array_equal(relative([1, 0, 0, 0], normalise_std=False), [0.75, -0.25, -0.25, -0.25])


def test_groups_that_interleave_do_not_mix():
    advantages = relative([1, 10, 0, 30], [5, 2, 5, 2], normalise_std=False)
    np.testing.assert_array_equal(advantages, [0.5, -10, -0.5, 10])


@pytest.mark.parametrize("normalise_std", [True, False])
def test_a_group_of_equal_rewards_teaches_nothing(normalise_std: bool):
    # 0.1 + 0.1 + 0.1 is not 3 · 0.1 in floats: the mean misses, and the deviation must not blow that up
    np.testing.assert_array_equal(relative([0.1, 0.1, 0.1], normalise_std=normalise_std), [0, 0, 0])


def test_a_group_with_one_reward_teaches_nothing():
    np.testing.assert_array_equal(relative([5, NAN, 1, 0], [0, 0, 1, 1], normalise_std=False), [0, NAN, 0.5, -0.5])


def test_a_missing_reward_is_not_a_zero():
    np.testing.assert_array_equal(relative([1, 3, NAN], normalise_std=False), [-1, 1, NAN])


def test_statistics_are_those_of_the_population():
    groups = group_statistics(np.array([1.0, 3.0, 4.0, NAN, NAN]), np.array([7, 7, 9, 9, 8]))
    np.testing.assert_array_equal(groups.group_N, [0, 0, 2, 2, 1])
    np.testing.assert_array_equal(groups.count_G, [2, 0, 1])
    np.testing.assert_array_equal(groups.mean_G, [2, 0, 4])
    np.testing.assert_array_equal(groups.std_G, [1, 0, 0])
    np.testing.assert_array_equal(groups.informative_G, [True, False, False])


def test_no_completions_give_no_advantages():
    assert group_relative(np.empty(0), np.empty(0, np.int64), True).shape == (0,)


@given(batches(), st.booleans(), st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(batch: tuple[Floats, Integers], std: bool, shift: int):
    rewards_N, ids_N = batch
    shifted_N = group_relative(rewards_N + shift, ids_N, std)
    np.testing.assert_allclose(shifted_N, group_relative(rewards_N, ids_N, std), atol=1e-9)


@given(batches(), st.integers(1, 64))
def test_with_the_deviation_the_scale_of_rewards_does_not_matter(batch: tuple[Floats, Integers], scale: int):
    rewards_N, ids_N = batch
    scaled_N = group_relative(rewards_N * scale, ids_N, True)
    np.testing.assert_allclose(scaled_N, group_relative(rewards_N, ids_N, True), rtol=1e-4)  # up to EPSILON


@given(batches(), st.booleans())
def test_advantages_sum_to_zero_in_every_group(batch: tuple[Floats, Integers], std: bool):
    rewards_N, ids_N = batch
    advantages_N = np.nan_to_num(group_relative(rewards_N, ids_N, std))
    np.testing.assert_allclose(np.bincount(ids_N, weights=advantages_N), 0, atol=1e-9)


@given(batches(), st.booleans())
def test_advantages_are_missing_exactly_where_rewards_are(batch: tuple[Floats, Integers], std: bool):
    rewards_N, ids_N = batch
    advantages_N = group_relative(rewards_N, ids_N, std)
    np.testing.assert_array_equal(np.isnan(advantages_N), np.isnan(rewards_N))
