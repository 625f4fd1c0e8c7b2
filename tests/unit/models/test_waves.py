"""Dynamic sampling: how large a wave is, how many there are, and what an iteration teaches about the next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.curriculum import DynamicSamplingState, another_wave, next_ema, wave_size


@pytest.mark.parametrize(
    ("gap", "ema", "margin", "size"),
    [
        (64, 1.0, 1.2, 77),  # 76.8
        (10, 1.0, 1.1, 11),  # 11, though 10 * 1.0 * 1.1 = 11.000000000000002 in binary
        (10, 2.5, 1.2, 30),
        (1, 1.0, 1.0, 1),
        (3, 1.9, 1.2, 7),  # 6.84
        (0, 4.0, 1.2, 0),
    ],
)
def test_a_wave_closes_the_gap_at_the_yield_so_far_with_a_margin(gap, ema, margin, size):
    assert wave_size(gap, ema, margin) == size


def test_the_first_wave_of_partial_rollout_stands_in_for_groups_that_are_cut():
    assert wave_size(16, 1.0, 1.2, over_dispatch=0.25) == 24  # 16 * 1.2 * 1.25
    assert wave_size(16, 1.0, 1.0, over_dispatch=0.25) == 20


def test_the_first_wave_and_so_many_extra_ones_are_all():
    assert [another_wave(wave, 5, max_extra_waves=3) for wave in (1, 2, 3, 4)] == [True, True, True, False]
    assert not another_wave(1, 5, max_extra_waves=0)
    assert not another_wave(1, 0, max_extra_waves=3)


def test_the_yield_is_smoothed_as_worked_by_hand():
    first = next_ema(1.0, 77, 35)  # 0.9 * 1.0 + 0.1 * 2.2
    assert first == pytest.approx(1.12)
    assert next_ema(first, 90, 60) == pytest.approx(1.158)  # 0.9 * 1.12 + 0.1 * 1.5


def test_an_iteration_that_teaches_little_or_nothing_counts_as_ten_prompts_for_a_group():
    assert next_ema(1.0, 100, 3) == pytest.approx(1.9)
    assert next_ema(1.0, 100, 0) == pytest.approx(1.9)


def test_an_iteration_without_a_group_tells_nothing():
    assert DynamicSamplingState(ema=2.0).after(0, 0) == DynamicSamplingState(ema=2.0)


def test_a_run_begins_with_a_prompt_for_a_group_and_the_state_survives_a_seal():
    assert DynamicSamplingState().ema == 1.0
    state = DynamicSamplingState().after(77, 35).after(3, 1)
    assert DynamicSamplingState.model_validate_json(state.model_dump_json()) == state


@settings(deadline=None)  # a busy machine is not wrong
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), max_size=60))
def test_no_history_asks_for_less_than_one_prompt_or_more_than_ten_for_a_group(history):
    state = DynamicSamplingState()
    for issued, share in history:
        state = state.after(issued, int(issued * share))
    assert 20 <= wave_size(20, state.ema, 1.0) <= 200
