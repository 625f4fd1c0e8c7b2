"""Advantages whose baseline is the group (GRPO, Dr. GRPO, RLOO) against numbers worked by hand, and their laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.algorithms.group_relative import EPSILON, dr_grpo, grpo, grpo_over_batch, rloo
from models.algorithms.ragged import group_statistics
from models.records.columns import Floats, Integers

busy = settings(deadline=None)  # a busy machine is not wrong
NAN = float("nan")
RELATIVE = {"grpo": grpo, "grpo_over_batch": grpo_over_batch, "dr_grpo": dr_grpo, "rloo": rloo}
STANDARDISED = ("grpo", "grpo_over_batch")
every_algorithm = pytest.mark.parametrize("kind", RELATIVE)


def relative(kind: str, rewards: list[float], groups: list[int] | None = None) -> Floats:
    groups = groups or [0] * len(rewards)
    return RELATIVE[kind](np.array(rewards, np.float64), np.array(groups), max(groups) + 1)


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
    found = relative("grpo", [1, 0, 0, 0])
    np.testing.assert_allclose(found, expected * (3**0.5 / 4) / (3**0.5 / 4 + EPSILON), rtol=1e-12)


def test_over_the_batch_a_group_that_differs_little_counts_little():
    # all four: mean 5, variance (16 + 9 + 9 + 16) / 4 = 12.5; the missing one counts nowhere
    found = relative("grpo_over_batch", [1, 2, NAN, 8, 9], [0, 0, 0, 1, 1])
    np.testing.assert_allclose(found, np.array([-0.5, 0.5, NAN, -0.5, 0.5]) / (12.5**0.5 + EPSILON), rtol=1e-12)
    # a group of equal rewards has no advantage, and is of the batch: mean 1/2, variance (3 · 1/4 + 1/4) / 4 = 1/4
    found = relative("grpo_over_batch", [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 2])
    np.testing.assert_allclose(found, np.array([1, -1, 1, -1, 0, 0]) * 0.5 / (0.5 + EPSILON), rtol=1e-12)


def test_dr_grpo_only_centres():
    np.testing.assert_array_equal(relative("dr_grpo", [1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25])


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - (0 + 0 + 2)/3 = 1/3; 0 - (1 + 0 + 2)/3 = -1; 2 - (1 + 0 + 0)/3 = 5/3
    np.testing.assert_allclose(relative("rloo", [1, 0, 0, 2]), [1 / 3, -1, -1, 5 / 3], rtol=1e-12)


def test_groups_that_interleave_do_not_mix():
    np.testing.assert_array_equal(relative("dr_grpo", [1, 10, 0, 30], [5, 2, 5, 2]), [0.5, -10, -0.5, 10])


@every_algorithm
def test_a_group_of_equal_rewards_teaches_nothing(kind: str):
    # 0.1 + 0.1 + 0.1 is not 3 · 0.1 in floats: the mean misses, and the deviation must not blow that up
    np.testing.assert_array_equal(relative(kind, [0.1, 0.1, 0.1]), [0, 0, 0])


@every_algorithm
def test_a_group_with_one_reward_teaches_nothing(kind: str):
    np.testing.assert_array_equal(relative(kind, [5, NAN, 3, 3], [0, 0, 1, 1]), [0, NAN, 0, 0])


def test_a_missing_reward_is_not_a_zero():
    np.testing.assert_array_equal(relative("dr_grpo", [1, 3, NAN]), [-1, 1, NAN])
    np.testing.assert_array_equal(relative("rloo", [1, 3, NAN]), [-2, 2, NAN])


def test_statistics_are_those_of_the_population():
    groups = group_statistics(np.array([1.0, 3.0, 4.0, NAN, NAN]), np.array([0, 0, 2, 2, 1]), 3)
    np.testing.assert_array_equal(groups.count_G, [2, 0, 1])
    np.testing.assert_array_equal(groups.mean_G, [2, 0, 4])
    np.testing.assert_array_equal(groups.std_G, [1, 0, 0])
    np.testing.assert_array_equal(groups.differ, [True, False, False])


@every_algorithm
def test_no_completions_give_no_advantages(kind: str):
    assert RELATIVE[kind](np.empty(0), np.empty(0, np.int64), 0).shape == (0,)


@every_algorithm
@busy
@given(batch=batches(), shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(kind: str, batch: tuple[Floats, Integers], shift: int):
    rewards_N, ids_N = batch
    np.testing.assert_allclose(
        RELATIVE[kind](rewards_N + shift, ids_N, 4), RELATIVE[kind](rewards_N, ids_N, 4), atol=1e-9
    )


@every_algorithm
@busy
@given(batch=batches(), scale=st.integers(1, 64))
def test_the_scale_of_rewards_matters_only_without_the_deviation(kind: str, batch: tuple[Floats, Integers], scale: int):
    rewards_N, ids_N = batch
    plain_N, scaled_N = (RELATIVE[kind](rewards_N * factor, ids_N, 4) for factor in (1, scale))
    expected_N = plain_N if kind in STANDARDISED else plain_N * scale
    tolerance = 1e-4 if kind in STANDARDISED else 1e-12  # EPSILON
    np.testing.assert_allclose(scaled_N, expected_N, rtol=tolerance, atol=1e-9)


@every_algorithm
@busy
@given(batch=batches())
def test_advantages_sum_to_zero_in_every_group(kind: str, batch: tuple[Floats, Integers]):
    rewards_N, ids_N = batch
    advantages_N = np.nan_to_num(RELATIVE[kind](rewards_N, ids_N, 4))
    np.testing.assert_allclose(np.bincount(ids_N, weights=advantages_N), 0, atol=1e-9)


@every_algorithm
@busy
@given(batch=batches())
def test_advantages_are_missing_exactly_where_rewards_are(kind: str, batch: tuple[Floats, Integers]):
    rewards_N, ids_N = batch
    advantages_N = RELATIVE[kind](rewards_N, ids_N, 4)
    np.testing.assert_array_equal(np.isnan(advantages_N), np.isnan(rewards_N))


@every_algorithm
@busy
@given(batch=batches(), data=st.data())
def test_the_order_of_completions_does_not_matter(kind: str, batch: tuple[Floats, Integers], data: st.DataObject):
    rewards_N, ids_N = batch
    order_N = np.array(data.draw(st.permutations(range(len(ids_N)))))
    shuffled_N = RELATIVE[kind](rewards_N[order_N], ids_N[order_N], 4)
    np.testing.assert_allclose(shuffled_N, RELATIVE[kind](rewards_N, ids_N, 4)[order_N], atol=1e-9)
