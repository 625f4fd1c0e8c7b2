"""Dynamic sampling: sizes and number of waves, and the yield that one iteration passes to the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.data.curriculum import DynamicSamplingState, another_wave, next_ema, wave_size


@pytest.mark.parametrize(
    ("gap", "ema", "margin", "over_dispatch", "size"),
    [
        (64, 1.0, 1.2, 0, 77),  # 76.8
        (10, 1.0, 1.1, 0, 11),  # 11, though 10 * 1.0 * 1.1 = 11.000000000000002 in binary
        (10, 2.5, 1.2, 0, 30),
        (1, 1.0, 1.0, 0, 1),
        (3, 1.9, 1.2, 0, 7),  # 6.84
        (0, 4.0, 1.2, 0, 0),
        (16, 1.0, 1.2, 0.25, 24),  # 16 * 1.2 * 1.25: the first wave of a partial rollout replaces groups that are cut
        (16, 1.0, 1.0, 0.25, 20),
    ],
)
def test_a_wave_closes_the_gap_at_the_yield_so_far_with_a_margin(gap, ema, margin, over_dispatch, size):
    assert wave_size(gap, ema, margin, over_dispatch=over_dispatch) == size
    assert over_dispatch or wave_size(gap, ema, margin) == size


def test_there_are_at_most_the_first_wave_and_the_allowed_extra_waves():
    assert [another_wave(wave, 5, max_extra_waves=3) for wave in (1, 2, 3, 4)] == [True, True, True, False]
    assert not another_wave(1, 5, max_extra_waves=0)
    assert not another_wave(1, 0, max_extra_waves=3)


@pytest.mark.parametrize(
    ("ema", "issued", "informative", "expected"),
    [
        (1.0, 77, 35, 1.12),  # 0.9 * 1.0 + 0.1 * 2.2
        (1.12, 90, 60, 1.158),  # 0.9 * 1.12 + 0.1 * 1.5
        (1.0, 100, 3, 1.9),  # few or no informative groups count as ten prompts for one
        (1.0, 100, 0, 1.9),
    ],
)
def test_the_yield_is_smoothed_as_worked_by_hand(ema, issued, informative, expected):
    assert next_ema(ema, issued, informative) == pytest.approx(expected)


def test_the_state_starts_at_one_prompt_per_group_and_round_trips_through_json():
    assert DynamicSamplingState().ema == 1.0
    assert DynamicSamplingState(ema=2.0).after(0, 0) == DynamicSamplingState(ema=2.0)
    state = DynamicSamplingState().after(77, 35).after(3, 1)
    assert DynamicSamplingState.model_validate_json(state.model_dump_json()) == state


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), max_size=60))
def test_a_wave_has_from_one_to_ten_prompts_per_group_after_every_history(history):
    state = DynamicSamplingState()
    for issued, share in history:
        state = state.after(issued, int(issued * share))
    assert 20 <= wave_size(20, state.ema, 1.0) <= 200
