"""Distribution of batches over controllers, and of scoring slots over reward models."""

from hypothesis import given
from hypothesis import strategies as st

from rheostat.placement.slots import assign_replicas, count_min_slots
from rheostat.tasks.run.batch import slice_shards, split_prompts


@given(st.integers(1, 500), st.integers(1, 64))
def test_shards_contain_every_prompt_once_and_in_order(num_prompts, shard_prompts):
    shards = split_prompts(num_prompts, shard_prompts=shard_prompts)
    assert [position for shard in shards for position in shard] == list(range(num_prompts))
    assert all(len(shard) == shard_prompts for shard in shards[:-1])


@given(st.integers(0, 200), st.integers(1, 16))
def test_controllers_get_disjoint_slices_of_nearly_equal_size(num_shards, controllers):
    slices = slice_shards(range(num_shards), controllers=controllers)
    assert [shard for own in slices for shard in own] == list(range(num_shards))
    assert len(slices) == min(controllers, num_shards)
    assert max(map(len, slices), default=0) - min(map(len, slices), default=0) <= 1


def test_slots_go_to_fixed_replicas_first_then_in_turn_to_the_largest_and_may_stay_empty():
    assert assign_replicas(16, {"small": 1, "big": 4, "fixed": 2}, fixed={"fixed": 3}) == {
        "small": 2,
        "big": 2,
        "fixed": 3,
    }
    assert assign_replicas(7, {"a": 3, "b": 3}, fixed={}) == {"a": 1, "b": 1}


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5), min_size=1),
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 3)),
    st.integers(0, 40),
)
def test_every_reward_model_has_a_replica_and_no_further_replica_would_fit(slots, fixed, extra):
    fixed = {term: count for term, count in fixed.items() if term in slots}
    total = count_min_slots(slots, fixed=fixed) + extra
    replicas = assign_replicas(total, slots, fixed=fixed)
    left = total - sum(slots[term] * count for term, count in replicas.items())
    assert min(replicas.values()) >= 1 and left >= 0
    assert all(replicas[term] == count for term, count in fixed.items())
    assert all(size > left for term, size in slots.items() if term not in fixed)
