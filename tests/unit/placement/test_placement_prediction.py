"""Predictions of stages agree with simulations of every sequence, and change in the right direction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.placement.forecast import stage
from rheostat.placement.forecast.lengths import sample_units
from rheostat.placement.forecast.stage import forecast, list_schedule, unit_seconds
from rheostat.placement.records import Pace
from rheostat.placement.slots import list_candidates
from tests.support.placements import demand, draw_seconds, finish, lognormal, plan_inputs, split, stage_seconds, turns


def predict_seconds(inputs, *plans, bootstraps=16, handover=False):
    return forecast(inputs, plans, bootstraps=bootstraps, handover=handover).seconds_KB.mean(axis=1)


def simulate_seconds(inputs, *plans, stages=60, handover=False):
    """Return the mean seconds of stages whose sequences are sampled individually."""
    rng = np.random.default_rng(7)
    seconds = []
    for _ in range(stages):
        rollout_U, scoring_U = draw_seconds(inputs.rollout, rng), draw_seconds(inputs.scoring, rng)
        turn = inputs.resize.mean_seconds
        seconds.append([stage_seconds(plan, rollout_U, scoring_U, turn=turn, handover=handover) for plan in plans])
    return np.mean(seconds, axis=0)


@pytest.mark.parametrize(("workers", "units"), [(4, 8), (4, 32), (8, 8), (8, 64)])
def test_small_pools_are_predicted_within_a_tenth(workers, units):
    inputs = plan_inputs(
        workers=workers,
        rollout=demand(units=units),
        scoring=demand(units=units, lengths=lognormal(200, 0.5), base=0.01),
    )
    plans = list_candidates(inputs)
    assert predict_seconds(inputs, *plans) == pytest.approx(simulate_seconds(inputs, *plans), rel=0.10)


def test_tables_for_large_pools_agree_with_simulation():
    inputs = plan_inputs(workers=256, rollout=demand(units=768), scoring=demand(units=768, base=0.01))
    plans = (turns(256), split(96, 160), split(128, 128), split(192, 64))
    assert stage._exact_work(inputs, plans, 16) > stage.EXACT_WORK
    assert predict_seconds(inputs, *plans) == pytest.approx(simulate_seconds(inputs, *plans, stages=8), rel=0.12)


@pytest.mark.parametrize(("workers", "units"), [(8, 64), (256, 768)])
def test_a_handover_of_workers_is_predicted(workers, units):
    inputs = plan_inputs(workers=workers, rollout=demand(units=units), scoring=demand(units=units, base=0.01), cost=2.0)
    plans = [split(workers * share // 8, workers - workers * share // 8) for share in (3, 5, 7)]
    seconds = predict_seconds(inputs, *plans, handover=True)
    assert seconds == pytest.approx(simulate_seconds(inputs, *plans, stages=10, handover=True), rel=0.12)
    assert seconds[2] < 0.5 * predict_seconds(inputs, *plans)[2]


def test_drifting_lengths_widen_the_prediction_and_keep_its_mean():
    steady, drifting = (
        forecast(plan_inputs(rollout=demand(units=64, drift=drift)), (turns(8),), bootstraps=32).seconds_KB
        for drift in (0.0, 0.5)
    )
    assert drifting.std() > 5 * steady.std()
    assert drifting.mean() == pytest.approx(steady.mean(), rel=0.05)


def test_the_time_of_a_unit_depends_on_its_longest_sequence_and_on_all_its_tokens():
    # Lengths 10, 20, 30: 30 steps of 2 s, 60 sequence-steps of 0.1 s, 3 × 0.5 s of setup, 4 s for the unit.
    pace = Pace(base_seconds=2.0, per_sequence_seconds=0.1, setup_seconds=0.5, unit_seconds=4.0)
    role = demand(sequences=3).model_copy(update={"pace": pace})
    assert float(unit_seconds(role, np.array(30.0), np.array(60.0))) == pytest.approx(60 + 6 + 1.5 + 4)


def test_units_of_similar_lengths_differ_more_and_have_shorter_tails():
    free, alike = (
        sample_units(demand(sequences=32, likeness=likeness), 512, bootstraps=8, seed=(0,)) for likeness in (0.0, 0.5)
    )
    assert alike.tokens_BU.std() > 1.5 * free.tokens_BU.std()
    assert alike.longest_BU.mean() < free.longest_BU.mean()
    assert alike.tokens_BU.mean() == pytest.approx(free.tokens_BU.mean(), rel=0.1)


def test_ignoring_the_tail_of_the_judge_picks_a_worse_split():
    judged = (20.0,) * 95 + (800.0,) * 5  # one verdict in twenty is long: most units have one
    flat = (float(np.mean(judged)),) * 100  # as many tokens, no tail
    rollout, scoring = demand(units=16), demand(units=16, lengths=judged, base=0.02, slope=0.0001)
    aware = plan_inputs(rollout=rollout, scoring=scoring)
    forgetful = plan_inputs(rollout=rollout, scoring=scoring.model_copy(update={"lengths": flat}))
    splits = [plan for plan in list_candidates(aware) if plan.mode == "split"]
    chosen, worse = (splits[int(predict_seconds(inputs, *splits).argmin())] for inputs in (aware, forgetful))
    assert worse.scoring < chosen.scoring
    seconds = simulate_seconds(aware, chosen, worse)
    assert seconds[1] > 1.15 * seconds[0]


@given(
    factor=st.floats(1.1, 8),
    units=st.integers(1, 24),
    field=st.sampled_from(["base_seconds", "per_sequence_seconds", "setup_seconds", "unit_seconds"]),
)
@settings(max_examples=30, deadline=None)
def test_slower_workers_longer_answers_and_more_units_never_make_a_stage_shorter(factor, units, field):
    pace = Pace(base_seconds=0.005, per_sequence_seconds=0.0002, setup_seconds=0.01, unit_seconds=0.5)
    role = demand(units=units).model_copy(update={"pace": pace})
    slower = pace.model_copy(update={field: factor * getattr(pace, field)})
    longer = tuple(factor * length for length in role.lengths)
    plans = list_candidates(plan_inputs())
    before = predict_seconds(plan_inputs(rollout=role, scoring=role), *plans)
    for update in ({"pace": slower}, {"lengths": longer}):
        after = role.model_copy(update=update)
        assert (predict_seconds(plan_inputs(rollout=after, scoring=role), *plans) >= before - 1e-9).all()
        assert (predict_seconds(plan_inputs(rollout=role, scoring=after), *plans) >= before - 1e-9).all()


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20), st.integers(1, 8), st.integers(0, 4))
def test_one_more_worker_never_delays_a_schedule(seconds, workers, gap):
    seconds_XU = np.array([seconds])
    ready_XU = np.cumsum(np.full_like(seconds_XU, gap), axis=1)
    ends = [list_schedule(np.zeros((1, n)), seconds_XU, ready_XU=ready_XU)[0].max() for n in (workers, workers + 1)]
    assert ends[1] <= ends[0] + 1e-9
    assert ends[0] == pytest.approx(max(finish(seconds, list(ready_XU[0]), [0.0] * workers)))


@given(
    st.lists(st.tuples(st.floats(0.01, 50), st.floats(0.01, 50)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.floats(0, 10),
)
def test_taking_turns_ends_within_the_bound_of_list_scheduling(units, workers, turn):
    """Graham (1966), once for each role: a stage in turns ends by W/N + (1 - 1/N)(max r + max s) + S; and a unit's own
    way through both roles, T_crit = max(r + s), is at least each of the two maxima: W/N + 2 T_crit + S."""
    rollout, scoring = zip(*units, strict=True)
    seconds = stage_seconds(turns(workers), rollout, scoring, turn=turn)
    work, tails = sum(rollout) + sum(scoring), max(rollout) + max(scoring)
    assert seconds <= work / workers + (1 - 1 / workers) * tails + turn + 1e-9
    assert seconds <= work / workers + 2 * max(r + s for r, s in units) + turn + 1e-9


@given(st.integers(1, 32), st.integers(1, 32), st.integers(2, 8), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_every_predicted_stage_with_roles_in_turns_is_within_the_bound_of_list_scheduling(
    rollout_units, scoring_units, workers, seed
):
    rollout, scoring = demand(units=rollout_units), demand(units=scoring_units, base=0.01)
    inputs = plan_inputs(workers=workers, rollout=rollout, scoring=scoring, seed=seed, cost=3.0)
    seconds_B = forecast(inputs, (turns(workers),), bootstraps=8).seconds_KB[0]
    bound_B = np.full(8, 3.0)
    for index, role in enumerate((rollout, scoring)):
        drawn = sample_units(role, role.units, bootstraps=8, seed=(seed, index))
        seconds_BU = unit_seconds(role, drawn.longest_BU, drawn.tokens_BU)
        bound_B += seconds_BU.sum(axis=1) / workers + seconds_BU.max(axis=1)
    assert (seconds_B <= bound_B + 1e-9).all()


def test_units_that_are_decoded_together_share_the_base_time_of_each_step():
    alone, together = demand(units=32, slope=0.0), demand(units=32, slope=0.0, units_at_once=4)
    scoring = demand(units=32, base=0.0, slope=0.0)
    seconds = [
        predict_seconds(plan_inputs(rollout=role, scoring=scoring, cost=0.0), turns(8))[0] for role in (alone, together)
    ]
    assert 2.5 < seconds[0] / seconds[1] < 4.5
