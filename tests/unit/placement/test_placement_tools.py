"""Placement with tools: a slot that waits for tools is occupied although its engine does no work.

There are twelve units of four sequences of 100 tokens: 100 steps of 0.01 s + 4 x 0.001 s take 1.4 s. A rollout unit
also waits 6 s for its environments, a scoring unit takes another 0.6 s: 7.4 and 2 s. There are eight slots.
"""

import numpy as np
import pytest

from bench.simulator.baselines import colocated_seconds, split_seconds
from bench.simulator.workload import RoleWork, StageWork
from rheostat.placement.forecast.stage import forecast, unit_seconds
from rheostat.placement.measurements import Measurements, UnitObservation
from rheostat.placement.policies.simple import Proportional
from rheostat.placement.records import Pace, Plan, PlanInputs, ResizeCost

UNITS, SLOTS, SWITCH = 12, 8, 10.0
WAITING = {"rollout": 6.0, "scoring": 0.6}


def observed(role):
    """Observation of a unit as its manifest has it. The seconds of a rollout unit include those of its environments."""
    steps, batch, step = 100, 4, 0.014
    return UnitObservation(
        role=role,
        sequences=batch,
        seconds=steps * step + WAITING[role],
        steps=steps,
        step_sequences=steps * batch,
        step_sequences_squared=steps * batch**2,
        step_seconds=steps * step,
        step_sequence_seconds=steps * step * batch,
        lengths=(100.0,) * batch,
    )


@pytest.fixture
def inputs():
    known = Measurements().observe([observed(role) for role in WAITING for _ in range(UNITS)])
    rollout, scoring = (known.demand(role, units=UNITS, sequences=4) for role in WAITING)
    cost = ResizeCost(mean_seconds=SWITCH, p95_seconds=SWITCH)
    return PlanInputs(workers=SLOTS, rollout=rollout, scoring=scoring, resize=cost)


@pytest.fixture
def work():
    lengths_US = np.full((UNITS, 4), 100.0)
    rollout, scoring = (
        RoleWork(
            pace=Pace(base_seconds=0.01, per_sequence_seconds=0.001),
            lengths_US=lengths_US,
            setup_U=np.full(UNITS, waits),
            seconds_U=np.full(UNITS, 1.4 + waits),
        )
        for waits in WAITING.values()
    )
    return StageWork(rollout=rollout, scoring=scoring, units_at_once=1)


def test_waiting_for_tools_is_outside_of_steps_and_does_not_grow_with_the_tokens(inputs):
    pace = inputs.rollout.pace
    assert pace.base_seconds + 4 * pace.per_sequence_seconds == pytest.approx(0.014)
    assert pace.unit_seconds + 4 * pace.setup_seconds == pytest.approx(6.0)
    twice = unit_seconds(inputs.rollout, np.array(200.0), np.array(800.0))
    assert twice == pytest.approx(2.8 + 6.0)  # and not 2 x 7.4


def test_proportional_splits_slots_by_occupied_time_which_ends_the_stage_soonest(inputs, work):
    slowness_N = np.ones(SLOTS)
    ends = {rollout: split_seconds(work, slowness_N, rollout) for rollout in range(1, SLOTS)}
    # 6 slots: units end at 7.4 and 14.8 s, of which two slots score the last six by 14.8 + 3 x 2 s.
    assert ends[6] == pytest.approx(20.8) == min(ends.values())
    # By the work of the engines alone rollout would have 12 x 1.4 of 12 x 3.4 s, so 3 slots: 4 x 7.4 + 2 s.
    assert round(SLOTS * 1.4 / (1.4 + 2.0)) == 3
    assert ends[3] == pytest.approx(31.6)
    # By the seconds of the slots, 12 x 7.4 of 12 x 9.4: 6.3.
    assert inputs.rollout.busy_seconds == pytest.approx(12 * 7.4)
    assert Proportional().plan(inputs).plan == Plan(mode="split", rollout=6, scoring=2)


def test_predictions_for_overlapping_and_alternating_roles_equal_the_simulator(inputs, work):
    slowness_N = np.ones(SLOTS)
    plans = (
        Plan(mode="colocated", rollout=8, scoring=8),
        *(Plan(mode="split", rollout=n, scoring=8 - n) for n in (3, 6)),
    )
    predicted = forecast(inputs, plans, bootstraps=8).seconds_KB.mean(axis=1)
    # In turns: two rounds of 7.4 s, the switch, two rounds of 2 s.
    assert colocated_seconds(work, slowness_N, SWITCH) == pytest.approx(14.8 + SWITCH + 4)
    assert predicted == pytest.approx([28.8, 31.6, 20.8], rel=0.05)  # resampled lengths drift, too
