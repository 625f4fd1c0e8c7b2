"""GPUs that worker slots reserve, and the GPU that each update rank uses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.infra.pools.gpu_layout import GpuLayout, assign_ranks
from rheostat.infra.pools.placement_group import split_bundles

DEDICATED = {"takes_turns": False}


@pytest.mark.parametrize(
    ("layout", "slots", "gpus"),
    [
        (GpuLayout(1, 8, 1), 8, 8),
        (GpuLayout(0.5, 8, 0.5), 8, 8),  # a slot and a rank on each GPU
        (GpuLayout(0.6, 8, 0.4), 8, 8),
        (GpuLayout(0.5, 8, 1), 16, 8),
        (GpuLayout(0.5, 1, 0.5), 1, 1),
        (GpuLayout(0.5, 1, 1), 8, 4),  # the rank shares one of four GPUs
        (GpuLayout(1, 8, 1), 4, 8),  # four ranks have separate GPUs
        (GpuLayout(2, 4, 1), 4, 8),
        (GpuLayout(2, 8, 1), 4, 8),
        (GpuLayout(8, 8, 1), 1, 8),
        (GpuLayout(1, 4, 1, ranks_per_node=2), 3, 5),  # two ranks have separate GPUs
        (GpuLayout(0, 3, 1), 8, 3),
        (GpuLayout(1, 8, 0), 2, 2),
        (GpuLayout(), 8, 0),
        (GpuLayout(1, 8, 1, **DEDICATED), 8, 16),
        (GpuLayout(0.5, 8, 0.5, **DEDICATED), 8, 12),
        (GpuLayout(0.5, 1, 0.5, **DEDICATED), 1, 1),  # only one rank, so Ray may put both on one GPU
        (GpuLayout(0.5, 1, 0.5, **DEDICATED), 2, 2),
        (GpuLayout(0.6, 1, 0.5, **DEDICATED), 1, 2),
    ],
)
def test_the_number_of_gpus_of_a_run_counts_shared_gpus_once(layout, slots, gpus):
    assert layout.count_gpus(slots) == gpus


@pytest.mark.parametrize(
    ("layout", "slots", "is_shared"),
    [
        (GpuLayout(1, 8, 1), 8, True),
        (GpuLayout(0.5, 8, 0.5), 8, True),
        (GpuLayout(1, 8, 1, **DEDICATED), 8, False),
        (GpuLayout(0.5, 1, 0.5, **DEDICATED), 1, True),
        (GpuLayout(0.6, 1, 0.5, **DEDICATED), 1, False),
        (GpuLayout(0, 8, 1), 8, False),
        (GpuLayout(1, 8, 0), 8, False),
        (GpuLayout(), 1, False),
    ],
)
def test_a_rank_may_share_a_gpu_with_slots_in_turn_or_as_a_fraction(layout, slots, is_shared):
    assert layout.may_share_gpus(slots) is is_shared


@pytest.mark.parametrize(
    ("layout", "slots", "bundles"),
    [
        (GpuLayout(0.5, 8, 0.5), 8, [(1, 1.0)] * 8),
        (GpuLayout(0.5, 2, 0.5), 8, [(2, 1.0)] * 4),
        (GpuLayout(0.25, 3, 1), 8, [(3, 1.0), (3, 1.0), (2, 1.0)]),
        (GpuLayout(0.25, 1, 0.25), 2, [(2, 0.75)]),
        (GpuLayout(0.5, 8, 0), 8, [(1, 0.5)] * 8),
        (GpuLayout(0.5, 8, 0.5, **DEDICATED), 2, [(1, 0.5)] * 2),
        (GpuLayout(2, 8, 1), 3, [(1, 2)] * 3),
        (GpuLayout(), 3, [(1, 0)] * 3),
    ],
)
def test_slots_with_fractions_are_spread_over_the_gpus_of_the_ranks(layout, slots, bundles):
    assert [(count, layout.gpus_per_bundle(count)) for count in layout.slots_per_bundle(slots)] == bundles


@pytest.mark.parametrize(
    ("nodes", "devices", "ranks", "expected"),
    [
        ("aa", ["0", "1"], 2, [(0, "0"), (1, "1")]),
        ("aaaa", ["0", "0", "1", "1"], 2, [(0, "0"), (2, "1")]),  # slots with half a GPU
        ("aaaa", ["01", "23", "45", "67"], 6, [(0, "0"), (0, "1"), (1, "2"), (1, "3"), (2, "4"), (2, "5")]),
        ("ab", ["0", "0"], 2, [(0, "0"), (1, "0")]),  # the same id on two machines
        ("a", ["0"], 3, [(0, "0"), None, None]),
        ("abbb", ["0", "0", "1", "2"], 3, [(1, "0"), (2, "1"), (3, "2")]),  # one machine has room for all
        (["a", None], ["0", "1"], 2, [(0, "0"), None]),  # a lost machine
        ([], [], 1, [None]),
    ],
)
def test_each_rank_gets_a_gpu_of_the_slots_until_there_are_none_left(nodes, devices, ranks, expected):
    assert assign_ranks([*nodes], devices, ranks=ranks) == expected


def test_ranks_of_a_sequence_parallel_group_get_gpus_on_one_machine():
    places = assign_ranks([*"aaabbb"], [*"012012"], ranks=6, ranks_per_node=2)
    assert places == [(0, "0"), (1, "1"), (3, "0"), (4, "1"), None, None]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.sets(st.sampled_from("0123"), max_size=3)), max_size=9
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_no_two_ranks_get_one_gpu_and_no_group_is_split_over_machines(bundles, groups, size):
    nodes, devices = [node for node, _ in bundles], [sorted(ids) for _, ids in bundles]
    places = assign_ranks(nodes, devices, ranks=groups * size, ranks_per_node=size)
    assert len(places) == groups * size
    found = [(nodes[place[0]], place[1]) for place in places if place is not None]
    assert places[len(found) :] == [None] * (len(places) - len(found))
    assert len(found) == len(set(found)) and len(found) % size == 0
    assert all(device in devices[bundle] for bundle, device in places[: len(found)])
    assert all(len({node for node, _ in found[first : first + size]}) == 1 for first in range(0, len(found), size))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 4))
def test_placement_groups_have_room_for_the_first_slots_and_for_the_widest_worker(counts, first, widest):
    groups = split_bundles(counts, first=first, widest=widest)
    assert [count for group in groups for count in group] == counts
    assert sum(groups[0]) >= min(first, sum(counts))
    assert all(sum(group) >= widest for group in groups[1:-1])
