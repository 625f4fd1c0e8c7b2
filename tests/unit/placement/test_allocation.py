"""Batches are cut into shards and dealt to controllers."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.run.batch import cut, slice_shards


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
