"""Placement policies depend only on their inputs, state reasons, and lose little compared with taking turns."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.infra.errors import BadInput
from rheostat.placement.config import (
    AdaptivePlacement,
    ColocatedPlacement,
    FixedPlacement,
    ProportionalPlacement,
    TargetPlacement,
)
from rheostat.placement.forecast.stage import forecast, score_plans
from rheostat.placement.policies import simple
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision, Memory, PlanInputs
from rheostat.placement.slots import list_candidates
from tests.support.placements import demand, lognormal, plan_inputs, split, turns

ADAPTIVE = build_policy(AdaptivePlacement())

KINDS = (ColocatedPlacement(), FixedPlacement(rollout=0.7), ProportionalPlacement(), AdaptivePlacement())


class Stubborn:
    """Policy of a user that always returns the same split."""

    def __init__(self, rollout):
        self.rollout = rollout

    def plan(self, inputs):
        plan = split(self.rollout, inputs.workers - self.rollout)
        return Decision(plan=plan, predicted_seconds=1, unchanged_seconds=1, reason="because", memory=inputs.memory)

    def drain(self, inputs):
        return Decision(plan=inputs.plan, predicted_seconds=1, unchanged_seconds=1, reason="-", memory=inputs.memory)


class Planner:
    """Class that is no policy, because it cannot drain."""

    def plan(self, inputs):
        return None

    def drian(self, inputs):
        return None


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_the_same_inputs_give_the_same_decision_also_after_a_round_trip_through_json(config):
    inputs = plan_inputs(current=split(4, 4))
    again = PlanInputs.model_validate_json(inputs.model_dump_json())
    first, second = build_policy(config).plan(inputs), build_policy(config).plan(again)
    assert first == second == Decision.model_validate_json(first.model_dump_json())
    assert first.reason


def test_fixed_splits_are_rounded_to_whole_workers():
    fixed = build_policy(FixedPlacement(rollout=0.6))
    inputs = plan_inputs(workers=16, rollout=demand(slots=2), scoring=demand(slots=4, least_slots=4))
    assert fixed.plan(inputs).plan == split(8, 8)
    with pytest.raises(BadInput, match="rollout needs at least 2 and scoring at least 4"):
        fixed.plan(plan_inputs(workers=5, rollout=demand(slots=2), scoring=demand(slots=4, least_slots=4)))


def test_proportional_gives_the_worked_example_and_moves_only_for_more_than_a_tenth():
    # 16 workers, 8/8; 60 s and 20 s busy per worker; 2 workers per replica: 12/4, which takes 40 s.
    rollout, scoring = demand(busy_seconds=8 * 60, slots=2), demand(busy_seconds=8 * 20, slots=2)
    inputs = plan_inputs(workers=16, rollout=rollout, scoring=scoring, current=split(8, 8))
    decision = build_policy(ProportionalPlacement()).plan(inputs)
    assert decision.plan == split(12, 4)
    assert decision.predicted_seconds == pytest.approx(40)
    assert decision.reason == "moved 4 of 16 workers from scoring to rollout: predicted 40.0 s instead of 60.0 s"
    even = {"rollout": demand(busy_seconds=450), "scoring": demand(busy_seconds=400)}
    assert build_policy(ProportionalPlacement()).plan(inputs.model_copy(update=even)).plan == split(8, 8)


def test_roles_take_turns_until_there_are_measurements():
    guessed = demand().model_copy(update={"measured": False})
    decision = ADAPTIVE.plan(plan_inputs(rollout=guessed))
    assert decision.plan == turns(8)
    assert "nothing is measured yet" in decision.reason


def test_a_predicted_gain_of_a_quarter_changes_the_plan_at_once():
    decision = ADAPTIVE.plan(plan_inputs(rollout=demand(units=64), scoring=demand(base=0.0001), current=split(2, 6)))
    assert decision.plan != split(2, 6)
    assert decision.predicted_seconds < 0.75 * decision.unchanged_seconds
    assert "instead of" in decision.reason


def test_a_smaller_gain_changes_the_plan_if_two_predictions_agree():
    # Turning costs 40 s per stage here: the best split gains about 20 of 200 s, more than a quarter of 40 s.
    policy = build_policy(AdaptivePlacement(threshold=0.25))
    inputs = plan_inputs(rollout=demand(base=0.02), scoring=demand(base=0.02), cost=40.0, current=turns(8))
    first = policy.plan(inputs)
    assert first.plan == turns(8) and "is used if the next prediction agrees" in first.reason
    second = policy.plan(inputs.model_copy(update={"memory": first.memory, "seed": 1}))
    assert second.plan.mode == "split"
    assert second.reason.startswith("changed from taking turns to 4/4: predicted")


def test_right_after_a_change_no_gain_changes_the_plan_at_once():
    policy = build_policy(AdaptivePlacement(threshold=0.1))
    inputs = plan_inputs(rollout=demand(base=0.02), scoring=demand(base=0.02), cost=100.0, current=turns(8))
    settled, changed = (policy.plan(inputs.model_copy(update={"memory": Memory(held=held)})) for held in (0, -1))
    assert settled.plan.mode == "split"
    assert changed.plan == turns(8) and changed.memory.held == 1


def test_a_gain_below_the_cost_of_moving_does_not_change_the_plan():
    inputs = plan_inputs(cost=1000.0, current=split(4, 4))
    decision = ADAPTIVE.plan(inputs.model_copy(update={"memory": Memory(wanted=split(5, 3), held=5)}))
    assert decision.plan == split(4, 4)


def test_a_plan_for_another_number_of_workers_is_discarded():
    assert ADAPTIVE.plan(plan_inputs(workers=4, current=split(6, 2))).plan in list_candidates(plan_inputs(workers=4))
    handed_over = ADAPTIVE.plan(plan_inputs(current=split(0, 8)))
    assert handed_over.plan in list_candidates(plan_inputs()) and "predicted" in handed_over.reason


def histories():
    """Random sequences of stages with longer or shorter completions and verdicts."""
    return st.lists(
        st.tuples(st.sampled_from([0.25, 0.5, 1, 2, 4]), st.sampled_from([0.25, 1, 4])), min_size=2, max_size=10
    )


@given(histories(), st.floats(0.1, 20), st.sampled_from([0.5, 1.0, 2.0]), st.integers(2, 8), st.integers(0, 8))
@settings(max_examples=25, deadline=None)
def test_the_loss_against_taking_turns_is_bounded_per_change(history, cost, threshold, workers, start):
    """The guard: in predicted seconds, sum(chosen) <= sum(turns) + threshold × S × (changes + 1), at every stage."""
    policy = build_policy(AdaptivePlacement(threshold=threshold, bootstraps=8))
    current = list_candidates(plan_inputs(workers=workers))[start % workers]
    memory, behind, changes = Memory(), 0.0, 0
    for seed, (longer, wordier) in enumerate(history):
        inputs = plan_inputs(
            workers=workers,
            rollout=demand(lengths=lognormal(300 * longer, 0.6, size=32)),
            scoring=demand(lengths=lognormal(200 * wordier, 0.6, size=32)),
            cost=cost,
            current=current,
            memory=memory,
            seed=seed,
        )
        decision = policy.plan(inputs)
        plans = list_candidates(inputs)
        scores_K = score_plans(forecast(inputs, plans, bootstraps=8, handover=True).seconds_KB, risk=0.25)
        behind += float(scores_K[plans.index(decision.plan)] - scores_K[0])
        changes += decision.plan != current
        assert behind <= threshold * cost * (changes + 1) + 1e-6
        current, memory = decision.plan, decision.memory


@given(st.integers(0, 50))
@settings(max_examples=5, deadline=None)
def test_alternating_lengths_move_workers_at_most_in_every_second_stage(seed):
    current, memory, changed = turns(8), Memory(), []
    for stage in range(12):
        long_rollout = stage % 2 == 0
        inputs = plan_inputs(
            rollout=demand(units=32, lengths=lognormal(1600 if long_rollout else 100, 0.6)),
            scoring=demand(units=32, lengths=lognormal(100 if long_rollout else 1600, 0.6)),
            current=current,
            memory=memory,
            cost=0.1,
            seed=seed + stage,
        )
        decision = ADAPTIVE.plan(inputs)
        changed.append(decision.plan != current)
        current, memory = decision.plan, decision.memory
    assert not any(first and second for first, second in pairwise(changed))


def test_constant_measurements_change_the_plan_at_most_once():
    current, memory, changes = split(1, 7), Memory(), 0
    for _ in range(10):
        decision = ADAPTIVE.plan(plan_inputs(current=current, memory=memory, rollout=demand(units=64)))
        changes += decision.plan != current
        current, memory = decision.plan, decision.memory
    assert changes == 1


def test_a_users_policy_is_built_from_its_name():
    policy = build_policy(TargetPlacement(target=f"{__name__}:Stubborn", options={"rollout": 3}))
    assert policy.plan(plan_inputs()).plan == split(3, 5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (f"{__name__}:Stuborn", "'Stubborn'"),
        (f"{__name__[:-8]}olices:Stubborn", repr(__name__)),
        (f"{__name__}:Stubborn", "'rollout'"),
        (f"{__name__}:Planner", "drain.inputs.*'drian'"),
        (f"{__name__}:ADAPTIVE", "a class"),
    ],
)
def test_a_target_that_is_no_policy_is_refused_in_one_line(target, message):
    with pytest.raises(BadInput, match=message) as caught:
        build_policy(TargetPlacement(target=target))
    assert "\n" not in str(caught.value)


def test_reasons_are_sentences_with_numbers():
    reasons = {build_policy(config).plan(plan_inputs(current=split(4, 4))).reason for config in KINDS}
    assert len(reasons) == len(KINDS)
    assert all(any(letter.isdigit() for letter in reason) for reason in reasons)


def test_users_policies_may_import_functions_by_their_former_names():
    for name, function in (("as_configured", simple.decide_configured), ("unchanged", simple.keep_plan)):
        with pytest.warns(FutureWarning, match=f"{name} is deprecated .* Use {function.__name__}"):
            assert getattr(simple, name) is function
