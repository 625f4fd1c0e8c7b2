"""The cursor in the stream of prompts skips no prompt and never repeats a prompt within an iteration."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.data.curriculum import Cursor, Part, PromptOrder, give_back, take_rows


def take_iterations(counts, *, num_prompts, seed=3):
    """Return the rows of consecutive iterations that take this number of prompts and give none back."""
    cursor, iterations = Cursor(), []
    for count in counts:
        rows, cursor = take_rows(cursor, count, PromptOrder(num_prompts, seed), taken=())
        iterations.append(rows)
    return iterations


def test_epochs_have_different_orders_which_are_stable_between_versions_and_depend_on_the_seed():
    assert take_iterations([4, 4, 4], num_prompts=8) == [(0, 3, 4, 2), (6, 5, 7, 1), (0, 2, 6, 3)]
    assert take_iterations([8], num_prompts=8, seed=4) != [(0, 3, 4, 2, 6, 5, 7, 1)]
    # Iterations of 7 cross the end of an epoch; a row that is in the iteration already comes first in the next one.
    assert take_iterations([7] * 6, num_prompts=10) == [
        (0, 2, 7, 4, 3, 8, 6),
        (5, 9, 1, 2, 8, 0, 6),
        (9, 3, 4, 5, 1, 7, 2),
        (9, 7, 1, 3, 6, 4, 8),
        (0, 5, 1, 8, 9, 7, 2),
        (3, 5, 6, 4, 0, 9, 2),
    ]


@given(st.integers(1, 40), st.data())
def test_every_epoch_has_every_prompt_once_and_no_iteration_repeats_a_prompt(num_prompts, data):
    count = data.draw(st.integers(1, num_prompts))
    iterations = take_iterations([count] * (4 * num_prompts // count + 1), num_prompts=num_prompts)
    assert all(len(set(rows)) == count for rows in iterations)
    taken = [row for rows in iterations for row in rows]
    for epoch in range(len(taken) // num_prompts):
        assert sorted(taken[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


@given(st.integers(2, 12), st.data())
def test_each_prompt_is_used_once_per_epoch_for_any_number_of_waves_and_returned_prompts(num_prompts, data):
    cursor, used = Cursor(), Counter()
    for _ in range(data.draw(st.integers(1, 12))):
        iteration = []
        for _ in range(data.draw(st.integers(1, 4))):
            available = num_prompts - len(iteration)
            if not available:
                break
            count = data.draw(st.integers(1, available))
            rows, cursor = take_rows(cursor, count, PromptOrder(num_prompts, 7), taken=iteration)
            assert len(rows) == count
            iteration += rows
        assert len(set(iteration)) == len(iteration)
        returned = data.draw(st.lists(st.sampled_from(iteration), unique=True))
        cursor = give_back(cursor, returned)
        used += Counter(iteration) - Counter(returned)
        # Every row that the stream has issued is either used or waiting; none is lost or duplicated.
        epochs, rest = divmod(cursor.position, num_prompts)
        issued = used + Counter(cursor.returned)
        assert sum(issued.values()) == cursor.position
        assert all(issued[row] in ((epochs, epochs + 1) if rest else (epochs,)) for row in range(num_prompts))


@given(st.integers(3, 12), st.data())
def test_two_waves_take_the_same_prompts_as_one_wave_of_their_total_size(num_prompts, data):
    total = data.draw(st.integers(2, num_prompts))
    size = data.draw(st.integers(1, total - 1))
    cursor = Cursor(position=data.draw(st.integers(0, 3 * num_prompts)), returned=(1,))
    rows, after = take_rows(cursor, total, PromptOrder(num_prompts, 1), taken=())
    first, between = take_rows(cursor, size, PromptOrder(num_prompts, 1), taken=())
    second, last = take_rows(between, total - size, PromptOrder(num_prompts, 1), taken=first)
    assert (first + second, last.position) == (rows, after.position)
    assert sorted(last.returned) == sorted(after.returned)


# The stream of 8 prompts with seed 3 has rows 0, 2, 6, 3, … from position 8 on.
@pytest.mark.parametrize(
    ("cursor", "count", "taken", "rows", "after"),
    [
        pytest.param((8, (5, 1)), 3, (), (5, 1, 0), (9, ()), id="returned rows come first"),
        pytest.param((8, ()), 2, (0, 6), (2, 3), (12, (0, 6)), id="rows of the iteration wait"),
        pytest.param((12, (0, 6)), 2, (), (0, 6), (12, ()), id="waiting rows come next"),
        pytest.param((8, (4, 6, 4)), 2, (6,), (4, 0), (9, (6, 4)), id="a returned row waits again"),
        pytest.param((5, (2,)), 0, (), (), (5, (2,)), id="no prompts"),
    ],
)
def test_returned_and_repeated_rows_wait_in_order(cursor, count, taken, rows, after):
    result = take_rows(give_back(Cursor(position=cursor[0]), cursor[1]), count, PromptOrder(8, 3), taken=taken)
    assert result == (rows, Cursor(position=after[0], returned=after[1]))


@pytest.mark.parametrize(("count", "taken"), [(-1, ()), (9, ()), (7, (0, 1))])
def test_more_prompts_than_an_iteration_can_have_are_refused(count, taken):
    with pytest.raises(ValueError, match="at most"):
        take_rows(Cursor(), count, PromptOrder(8, 3), taken=taken)


@pytest.mark.parametrize("parts", [(), (Part(range(10), 1.0), Part(range(10, 30), 2.0))])
def test_other_prompts_take_the_places_of_excluded_ones_and_all_others_keep_their_places(parts):
    order, cursor = PromptOrder(30, 5, parts), give_back(Cursor(), (7, 4))
    excluded, used = (7, 12, 3), set[int]()
    for count in (8, *[6] * 11):
        rows, after = take_rows(cursor, count, order, taken=(), excluded=excluded)
        plain, cursor = take_rows(cursor, count, order, taken=())
        assert len({*rows}) == count and {*rows}.isdisjoint(excluded)
        assert [row for row in plain if row not in excluded] == [
            row for row, before in zip(rows, plain, strict=True) if before not in excluded
        ]
        assert not parts or [row < 10 for row in rows] == [row < 10 for row in plain], "replaced from the same part"
        assert after.position == cursor.position
        assert after.returned == tuple(row for row in cursor.returned if row not in excluded)
        used |= {*rows}
    assert used == {*range(30)} - {*excluded}


def test_excluded_prompts_of_a_part_without_others_are_replaced_from_another_part():
    order = PromptOrder(4, 5, (Part(range(2), 1.0), Part(range(2, 4), 1.0)))
    rows, after = take_rows(Cursor(), 2, order, taken=(), excluded=(0, 1))
    assert {*rows} == {2, 3}
    with pytest.raises(ValueError, match="only 2 of 4"):
        take_rows(after, 3, order, taken=(), excluded=(0, 1))
