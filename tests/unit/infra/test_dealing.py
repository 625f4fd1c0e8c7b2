from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.infra.errors import BadInput
from rheostat.infra.pools.slot import Assignment, assign_fewer, assign_slots, changes

WIDTHS = {"rollout": 1, "judge": 2, "model": 3}


def slots_of(posts):
    return [slot for post in posts for slot in post.slots]


@st.composite
def counts(draw, slots):
    """Sample numbers of workers that fit, wide workers first."""
    left, chosen = slots, {}
    for role, width in reversed(WIDTHS.items()):
        chosen[role] = draw(st.integers(0, left // width))
        left -= chosen[role] * width
    return chosen


@given(st.data())
def test_successive_assignments_never_put_two_workers_into_one_slot(data):
    slots = data.draw(st.integers(1, 9))
    current = set()
    for _ in range(4):
        wanted = data.draw(counts(slots))
        order = data.draw(st.permutations(sorted(current, key=repr)))
        target = assign_slots(order, wanted, widths=WIDTHS, nodes=["one"] * slots, asleep=set())
        assert len(slots_of(target)) == len(set(slots_of(target)))
        assert set(slots_of(target)) <= set(range(slots))
        assert {role: sum(post.role == role for post in target) for role in WIDTHS} == wanted
        parts = changes(current, target)
        touched = [slot for part in parts for slot in {*slots_of(part.out), *slots_of(part.into)}]
        assert len(touched) == len(set(touched))  # so changes can be made, or undone, each by itself
        moved = {post for part in parts for post in part.out}
        assert current - moved | {post for part in parts for post in part.into} == target
        current = target


@given(st.integers(0, 6), st.integers(0, 6))
def test_an_assignment_moves_as_few_single_slot_workers_as_possible(before, after):
    widths = {"rollout": 1, "judge": 1}
    nodes = ["one"] * 6
    current = assign_slots([], {"rollout": before, "judge": 6 - before}, widths=widths, nodes=nodes, asleep=set())
    target = assign_slots(
        list(current), {"rollout": after, "judge": 6 - after}, widths=widths, nodes=nodes, asleep=set()
    )
    assert len(target - current) == abs(after - before)


def test_surplus_workers_leave_from_the_end_of_the_list_and_sleeping_workers_are_preferred():
    current = [Assignment("rollout", slot, 1) for slot in (2, 0, 3, 1)]
    free = assign_slots(current, {"rollout": 2}, widths=WIDTHS, nodes=["one"] * 4, asleep=set())
    assert free == {Assignment("rollout", 2, 1), Assignment("rollout", 0, 1)}
    asleep = {Assignment("rollout", 3, 1)}
    assert assign_slots([], {"rollout": 1}, widths=WIDTHS, nodes=["one"] * 4, asleep=asleep) == asleep


def test_no_worker_spans_two_nodes():
    nodes = ["one"] * 3 + ["two"] * 3
    dealt = assign_slots([], {"judge": 2, "rollout": 2}, widths=WIDTHS, nodes=nodes, asleep=set())
    judges = [post for post in dealt if post.role == "judge"]
    assert len(judges) == 2
    assert all(len(list(groupby(nodes[slot] for slot in post.slots))) == 1 for post in judges)


@given(st.data())
def test_after_a_loss_of_slots_every_role_keeps_a_worker_or_there_is_no_assignment(data):
    slots = data.draw(st.integers(1, 9))
    wanted = data.draw(counts(slots))
    current = assign_slots([], wanted, widths=WIDTHS, nodes=["one"] * slots, asleep=set())
    lost = data.draw(st.frozensets(st.integers(0, slots - 1)))
    order = sorted(current, key=repr)
    target = assign_fewer(order, wanted, widths=WIDTHS, nodes=["one"] * slots, asleep=set(), lost=lost)
    left = {role: sum(post.role == role for post in target or ()) for role in WIDTHS}
    if target is None:
        least = {role: min(count, 1) for role, count in wanted.items()}
        with pytest.raises(BadInput):
            assign_slots([], least, widths=WIDTHS, nodes=["one"] * slots, asleep=set(), lost=lost)
    else:
        assert not lost.intersection(slots_of(target))
        assert all(min(1, wanted[role]) <= left[role] <= wanted[role] for role in WIDTHS)
        assert lost or left == wanted
