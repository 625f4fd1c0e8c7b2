"""The cursor in the stream of prompts: nothing is skipped, nothing comes twice in an iteration."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.curriculum import Cursor, give_back, take


def consecutive(counts, *, num_prompts, seed=3):
    """Rows of iterations that each take so many prompts and give none back."""
    cursor, iterations = Cursor(), []
    for count in counts:
        rows, cursor = take(cursor, count, taken=(), num_prompts=num_prompts, seed=seed)
        iterations.append(rows)
    return iterations


def test_the_order_of_prompts_is_pinned():
    assert consecutive([4, 4, 4], num_prompts=8) == [(0, 3, 4, 2), (6, 5, 7, 1), (0, 2, 6, 3)]
    # Iterations of 7 cross the epochs' borders; a row that would come twice in one comes first in the next.
    assert consecutive([7] * 6, num_prompts=10) == [
        (0, 2, 7, 4, 3, 8, 6),
        (5, 9, 1, 2, 8, 0, 6),
        (9, 3, 4, 5, 1, 7, 2),
        (9, 7, 1, 3, 6, 4, 8),
        (0, 5, 1, 8, 9, 7, 2),
        (3, 5, 6, 4, 0, 9, 2),
    ]


@settings(deadline=None)  # a busy machine is not wrong
@given(st.integers(1, 40), st.data())
def test_every_epoch_visits_every_prompt_once_and_no_iteration_has_one_twice(num_prompts, data):
    count = data.draw(st.integers(1, num_prompts))
    iterations = consecutive([count] * (4 * num_prompts // count + 1), num_prompts=num_prompts)
    assert all(len(set(rows)) == count for rows in iterations)
    taken = [row for rows in iterations for row in rows]
    for epoch in range(len(taken) // num_prompts):
        assert sorted(taken[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


@settings(deadline=None)  # a busy machine is not wrong
@given(st.integers(2, 12), st.data())
def test_whatever_waves_take_and_give_back_each_row_is_issued_once_per_epoch_in_the_end(num_prompts, data):
    cursor, final = Cursor(), Counter()
    for _ in range(data.draw(st.integers(1, 12))):
        iteration = []
        for _ in range(data.draw(st.integers(1, 4))):
            room = num_prompts - len(iteration)
            if not room:
                break
            count = data.draw(st.integers(1, room))
            rows, cursor = take(cursor, count, taken=iteration, num_prompts=num_prompts, seed=7)
            assert len(rows) == count
            iteration += rows
        assert len(set(iteration)) == len(iteration)
        back = data.draw(st.lists(st.sampled_from(iteration), unique=True))
        cursor = give_back(cursor, back)
        final += Counter(iteration) - Counter(back)
        # What was consumed of the stream is either issued for good or waiting: nothing lost, nothing doubled.
        epochs, rest = divmod(cursor.position, num_prompts)
        accounted = final + Counter(cursor.returned)
        assert sum(accounted.values()) == cursor.position
        assert all(accounted[row] in ((epochs, epochs + 1) if rest else (epochs,)) for row in range(num_prompts))


@settings(deadline=None)  # a busy machine is not wrong
@given(st.integers(3, 12), st.data())
def test_two_waves_take_what_one_of_their_size_would(num_prompts, data):
    whole = data.draw(st.integers(2, num_prompts))
    first = data.draw(st.integers(1, whole - 1))
    cursor = Cursor(position=data.draw(st.integers(0, 3 * num_prompts)), returned=(1,))
    rows, after = take(cursor, whole, taken=(), num_prompts=num_prompts, seed=1)
    head, between = take(cursor, first, taken=(), num_prompts=num_prompts, seed=1)
    tail, last = take(between, whole - first, taken=head, num_prompts=num_prompts, seed=1)
    assert (head + tail, last.position) == (rows, after.position)
    assert sorted(last.returned) == sorted(after.returned)


def test_returned_rows_come_first_and_in_order():
    cursor = give_back(Cursor(position=8), [5, 1])
    rows, after = take(cursor, 3, taken=(), num_prompts=8, seed=3)
    assert rows == (5, 1, 0)
    assert after == Cursor(position=9, returned=())


def test_a_row_that_the_iteration_already_has_waits_and_is_not_lost():
    rows, after = take(Cursor(position=8), 3, taken=(0, 6), num_prompts=8, seed=3)  # the stream: 0, 2, 6, 3, …
    assert (rows[:2], after.returned) == ((2, 3), (0, 6))
    following, _ = take(after, 2, taken=(), num_prompts=8, seed=3)
    assert following == (0, 6)


def test_a_returned_row_that_the_iteration_already_has_stays_where_it_waits():
    rows, after = take(Cursor(position=8, returned=(4, 6, 4)), 2, taken=(6,), num_prompts=8, seed=3)
    assert rows == (4, 0)
    assert after.returned == (6, 4)


@pytest.mark.parametrize(("count", "taken"), [(-1, ()), (9, ()), (7, (0, 1))])
def test_more_prompts_than_the_iteration_can_have_are_refused(count, taken):
    with pytest.raises(ValueError, match="expected at most"):
        take(Cursor(), count, taken=taken, num_prompts=8, seed=3)


def test_a_wave_of_no_prompts_moves_nothing():
    cursor = Cursor(position=5, returned=(2,))
    assert take(cursor, 0, taken=(), num_prompts=8, seed=3) == ((), cursor)


def test_epochs_and_seeds_give_different_orders():
    [first, second] = consecutive([100, 100], num_prompts=100)
    [other] = consecutive([100], num_prompts=100, seed=4)
    assert first != second
    assert first != other
