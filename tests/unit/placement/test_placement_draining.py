"""Corrections during a stage: workers move to the role that needs them, once, and only if the gain pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.placement.config import AdaptivePlacement, ColocatedPlacement, FixedPlacement, ProportionalPlacement
from rheostat.placement.forecast.remaining import estimate_stage_factor, predict_remaining, sample_residuals
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision, DrainInputs, Memory
from tests.support.placements import demand, drain_inputs, lognormal, split, turns

ADAPTIVE = build_policy(AdaptivePlacement())


def starved_rollout(**others):
    """Build inputs in which six units wait for two workers while four scoring workers have nearly no work."""
    scoring = demand(lengths=lognormal(20, 0.3), base=0.001, slope=0.0)
    given = {"waiting": 30, "coming": 32, "flying": (5.0, 5.0), "plan": split(2, 6), "scoring": scoring}
    return drain_inputs(**{**given, **others})


def test_workers_move_to_the_role_that_would_end_late():
    decision = ADAPTIVE.drain(starved_rollout())
    assert decision.plan.rollout > 2
    assert decision.plan.rollout + decision.plan.scoring == 8
    assert decision.predicted_seconds < 0.9 * decision.unchanged_seconds
    assert decision.reason.startswith(
        f"moved {decision.plan.rollout - 2} of 8 workers from scoring to rollout: predicted"
    )
    assert decision.memory.moved == decision.plan.rollout - 2 and decision.memory.moved_at == 10.0


def test_workers_of_a_role_without_further_work_move_to_the_other_role():
    # Rollout is done except for one long unit, so its idle workers score.
    inputs = drain_inputs(
        plan=split(6, 2), waiting=0, coming=1, flying=(9.0,), scoring_waiting=20, scoring_flying=(1, 1)
    )
    decision = ADAPTIVE.drain(inputs)
    assert decision.plan.scoring >= 6


def test_a_role_that_still_has_work_keeps_its_minimum_of_slots():
    inputs = starved_rollout(scoring=demand(lengths=(1.0,), base=0.0, slope=0.0, least_slots=4))
    assert ADAPTIVE.drain(inputs).plan.scoring == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cost": 90.0}, "less than the required 90.0 s"),
        ({"movable": (0, 0)}, "no move is predicted to save time"),
        ({"memory": Memory(moved_at=9.0, moved=1)}, "workers were moved 1.0 s ago"),
        ({"memory": Memory(misses=2)}, "two predictions were wrong by more than 30%"),
    ],
)
def test_a_rejected_move_has_a_reason(change, reason):
    decision = ADAPTIVE.drain(starved_rollout(**change))
    assert decision.plan == split(2, 6)
    assert reason in decision.reason


def test_two_wrong_predictions_in_a_row_freeze_the_plan_and_one_does_not():
    memory = Memory(predicted_seconds=1.0, moved=1)
    once = ADAPTIVE.drain(starved_rollout(memory=memory, movable=(0, 0)))
    assert once.memory.misses == 1
    later = once.memory.model_copy(update={"look_at": 10.0})
    hit = ADAPTIVE.drain(starved_rollout(memory=later, movable=(0, 0)))
    assert hit.memory.misses == 0
    twice = ADAPTIVE.drain(starved_rollout(memory=later.model_copy(update={"predicted_seconds": 1.0})))
    assert twice.memory.misses == 2 and twice.plan == split(2, 6)


def test_a_stage_is_not_evaluated_again_before_it_can_have_changed():
    first = ADAPTIVE.drain(starved_rollout(movable=(0, 0)))
    assert first.memory.look_at > 10
    again = ADAPTIVE.drain(starved_rollout(memory=first.memory))
    assert again.plan == split(2, 6) and "next evaluation" in again.reason
    emptied = ADAPTIVE.drain(starved_rollout(memory=first.memory, waiting=0))
    assert "next evaluation" not in emptied.reason


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (ColocatedPlacement(), split(2, 6)),
        (FixedPlacement(), split(2, 6)),
        (ProportionalPlacement(), split(2, 6)),
        (AdaptivePlacement(drain=False), split(2, 6)),
        (AdaptivePlacement(), turns(8)),
    ],
)
def test_other_policies_and_roles_that_take_turns_are_not_corrected_during_a_stage(config, plan):
    assert build_policy(config).drain(starved_rollout().model_copy(update={"plan": plan})).plan == plan


def test_a_correction_is_reproducible_from_its_inputs():
    inputs = starved_rollout()
    first, second = ADAPTIVE.drain(inputs), ADAPTIVE.drain(DrainInputs.model_validate_json(inputs.model_dump_json()))
    assert first == second == Decision.model_validate_json(first.model_dump_json())


@given(
    rollout=st.integers(1, 7), movable=st.tuples(st.integers(0, 7), st.integers(0, 7)), waiting=st.integers(0, 20),
    coming=st.integers(0, 20), longer=st.sampled_from([0.1, 1, 8]), elapsed=st.floats(0.1, 100),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_only_workers_that_may_still_move_are_moved(rollout, movable, waiting, coming, longer, elapsed):
    plan = split(rollout, 8 - rollout)
    inputs = drain_inputs(
        plan=plan, waiting=waiting, coming=coming, flying=(elapsed,) * rollout, elapsed=elapsed, movable=movable,
        cost=0.1, scoring=demand(lengths=lognormal(200 * longer, 0.5)),
    )  # fmt: skip
    decision = ADAPTIVE.drain(inputs)
    moved = plan.rollout - decision.plan.rollout
    assert -min(movable[1], plan.scoring) <= moved <= min(movable[0], plan.rollout)
    assert decision.plan.rollout + decision.plan.scoring == 8
    if moved == 0:
        assert decision.memory.moved == 0
    else:
        assert decision.predicted_seconds < decision.unchanged_seconds


def test_the_remaining_time_of_a_unit_is_sampled_from_units_that_took_longer():
    pool_BP = np.array([[1.0, 1.0, 1.0, 10.0]])
    young, old = (sample_residuals(pool_BP, np.full(2000, elapsed), seed=(0,)) for elapsed in (0.5, 2.0))
    assert young.mean() == pytest.approx((3 * 0.5 + 9.5) / 4, rel=0.1)
    assert (old == 8.0).all()
    older_than_all = sample_residuals(np.array([[1.0, 2.0]]), np.full(1000, 8.0), seed=(0,))
    assert older_than_all.min() > 0 and older_than_all.mean() == pytest.approx(2.0, rel=0.15)


def test_a_longer_stage_is_detected_before_its_first_unit_ends():
    pool_BP = np.exp(0.3 * np.random.default_rng(0).standard_normal((4, 200)))
    assert estimate_stage_factor(pool_BP, np.full(8, 0.1), done=0, done_seconds=0) == pytest.approx(1, abs=0.15)
    assert estimate_stage_factor(pool_BP, np.full(8, 3.0), done=0, done_seconds=0) > 2
    assert estimate_stage_factor(pool_BP, np.array([]), done=50, done_seconds=4.0) == pytest.approx(3.8, rel=0.1)


def test_units_that_finish_first_do_not_bias_the_estimate_of_a_stage():
    """Eight workers with one unit each: units that end after 0.8 s are shorter than those that still run."""
    seconds = np.sort(np.exp(0.5 * np.random.default_rng(3).standard_normal(4000)).reshape(500, 8), axis=1)
    factors = []
    for unit in seconds:
        done = int((unit < 0.8).sum())
        mean = float(unit[:done].mean()) if done else 0.0
        factors.append(estimate_stage_factor(seconds, np.full(8 - done, 0.8), done=done, done_seconds=mean))
    assert np.mean(factors) == pytest.approx(1, abs=0.1)


def test_workers_that_are_moving_count_in_their_new_role():
    settled = drain_inputs(plan=split(4, 4), waiting=20, coming=24, flying=(1.0,) * 4, cost=0.01)
    leaving = settled.rollout.model_copy(update={"slots": 6})
    way = settled.model_copy(update={"rollout": leaving, "scoring": settled.scoring.model_copy(update={"slots": 2})})
    seconds = [predict_remaining(inputs, [0], bootstraps=16).mean() for inputs in (settled, way)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_a_large_pool_is_predicted_like_a_small_one_of_the_same_shape():
    rollout, scoring = demand(units=512), demand(units=512, lengths=lognormal(200, 0.5))
    seconds = []
    for scale in (1, 8):
        inputs = drain_inputs(
            plan=split(16 * scale, 16 * scale), waiting=48 * scale, coming=64 * scale, flying=(4.0,) * 16 * scale,
            rollout=rollout, scoring=scoring,
        )  # fmt: skip
        seconds.append(predict_remaining(inputs, [0], bootstraps=32).mean())
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)
