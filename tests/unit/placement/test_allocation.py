"""Batches are cut into shards and dealt to controllers."""

from hypothesis import given
from hypothesis import strategies as st

from infra.statistics import mean_interval, wilson_interval
from placement.shards import cut, slice_shards


@given(st.integers(1, 500), st.integers(1, 64))
def test_shards_hold_every_prompt_once_and_in_order(num_prompts, shard_prompts):
    shards = cut(num_prompts, shard_prompts=shard_prompts)
    assert [position for shard in shards for position in shard] == list(range(num_prompts))
    assert all(len(shard) == shard_prompts for shard in shards[:-1])


@given(st.integers(0, 200), st.integers(1, 16))
def test_controllers_get_disjoint_slices_of_nearly_equal_size(num_shards, controllers):
    slices = slice_shards(range(num_shards), controllers=controllers)
    assert [shard for own in slices for shard in own] == list(range(num_shards))
    assert len(slices) == min(controllers, num_shards)
    assert max(map(len, slices), default=0) - min(map(len, slices), default=0) <= 1


def test_wilson_interval_is_that_of_the_textbook():
    low, high = wilson_interval(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_reward_on_any_scale_has_the_normal_interval_of_its_mean():
    low, high = mean_interval(30, 5**2 + 10**2 + 15**2, 3)  # standard deviation 5, 1.96 * 5 / sqrt(3) = 5.658
    assert (round(low, 3), round(high, 3)) == (4.342, 15.658)
    assert mean_interval(8, 8, 10) == wilson_interval(8, 10)


def test_the_interval_of_a_perfect_score_holds_it():
    assert {wilson_interval(trials, trials)[1] for trials in range(1, 2000)} == {1.0}
    assert {wilson_interval(0, trials)[0] for trials in range(1, 2000)} == {0.0}
