"""Simulation of a placement policy over all iterations of a workload.

The policy gets only inputs that a real run can measure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bench.simulator.stage import RoleView, SimulatedRole, Stage, StageResult, UnitDone, View
from bench.simulator.workload import StageWork, Workload
from rheostat.placement.measurements import MAX_LENGTHS, Measurements, UnitObservation
from rheostat.placement.records import (
    Decision,
    Demand,
    DrainInputs,
    InFlight,
    Memory,
    Plan,
    PlanInputs,
    Policy,
    RoleProgress,
)

ORDER_STATISTICS = 64
"""Number of sequence lengths that are recorded for each unit, as evenly spaced quantiles."""
MIN_POLL_SECONDS = 0.5
"""Minimum seconds between two evaluations of the plan during a stage."""
OBSERVED = 2048
"""Maximum number of units that are measured per role and stage. If there are more units, only every k-th unit is
measured, which makes the simulation much faster."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Results of simulating a policy on a workload. Tuples have one entry for each iteration."""

    seconds: tuple[float, ...]
    """Duration of the stage in each iteration, in seconds."""
    moves: tuple[int, ...]
    """Number of slots that the policy moved during each stage, plus the slots that started the stage in another role
    than the previous stage."""
    handovers: tuple[int, ...]
    """Number of slots that moved to the other role because their own role had no more units."""
    plans: tuple[Plan, ...]
    """Plan at the end of each stage."""
    decisions: int
    """Total number of decisions that the policy made."""
    slowest_decision: float
    """Seconds that the slowest decision took, measured with the given clock."""


@dataclass(slots=True)
class _Player:
    policy: Policy
    workload: Workload
    resize_seconds: float
    clock: Callable[[], float]
    measurements: Measurements = field(default_factory=Measurements)
    memory: Memory = field(default_factory=Memory)
    first: tuple[SimulatedRole, ...] = ()
    """Role of each slot at the start of the last stage."""
    current: Plan | None = None
    decisions: int = 0
    slowest: float = 0.0

    def plan(self, number: int) -> PlanInputs:
        """Get the plan for a stage from the policy, and return the inputs that the policy received."""
        work = self.workload.stages[number]
        inputs = PlanInputs(
            workers=self.workload.workers,
            rollout=self._demand("rollout", work),
            scoring=self._demand("scoring", work),
            resize=self.measurements.resize(),
            current=self.current,
            memory=self.memory,
            seed=number,
        )
        self.current = self._take(lambda: self.policy.plan(inputs)).plan
        return inputs

    def drain(self, inputs: PlanInputs, view: View) -> Plan:
        """Call the policy during a stage, and return its plan."""
        drain = DrainInputs(
            elapsed_seconds=view.elapsed,
            workers=inputs.workers,
            plan=view.plan,
            rollout=_progress(view.rollout, inputs.rollout),
            scoring=_progress(view.scoring, inputs.scoring),
            movable_rollout=view.rollout.movable,
            movable_scoring=view.scoring.movable,
            resize=inputs.resize,
            memory=self.memory,
            seed=inputs.seed + 1000 * self.decisions,
        )
        return self._take(lambda: self.policy.drain(drain)).plan

    def _take(self, decide: Callable[[], Decision]) -> Decision:
        begin = self.clock()
        decision = decide()
        self.slowest = max(self.slowest, self.clock() - begin)
        self.decisions += 1
        self.memory = decision.memory
        return decision

    def _demand(self, role: SimulatedRole, work: StageWork) -> Demand:
        lengths_US = (work.rollout if role == "rollout" else work.scoring).lengths_US
        units, sequences = lengths_US.shape
        return self.measurements.demand(role, units=units, sequences=sequences, units_at_once=work.units_at_once)


def simulate_run(
    policy: Policy, workload: Workload, *, resize_seconds: float, clock: Callable[[], float]
) -> SimulatedRun:
    """Simulate all iterations of a workload under a placement policy.

    Between iterations all slots sleep during the update and wake up in their planned roles. This takes the same time
    for every policy and is not counted. Slots whose role changes between two stages need `resize_seconds` for the move.
    The policy knows this time from the first stage, as in real runs, where every worker has been started once.
    """
    player = _Player(policy, workload, resize_seconds, clock)
    player.measurements = Measurements().observe((), moves=(resize_seconds,))
    seconds, moves, handovers, plans = [], [], [], []
    for number, work in enumerate(workload.stages):
        inputs = player.plan(number)
        assert player.current is not None
        result, changed = _play_stage(player, inputs, work, number)
        player.measurements = _add_measurements(player.measurements, work, result, resize_seconds, changed=changed)
        seconds.append(result.seconds)
        moves.append(result.corrections + changed)
        handovers.append(result.handovers)
        plans.append(player.current)
    return SimulatedRun(
        seconds=tuple(seconds),
        moves=tuple(moves),
        handovers=tuple(handovers),
        plans=tuple(plans),
        decisions=player.decisions,
        slowest_decision=player.slowest,
    )


def _play_stage(player: _Player, inputs: PlanInputs, work: StageWork, number: int) -> tuple[StageResult, int]:
    plan = player.current
    assert plan is not None
    roles = _first_roles(player.first or None, plan, inputs.workers)
    late = frozenset(slot for slot, before in enumerate(player.first) if before != roles[slot])
    player.first = roles
    stage = Stage(
        work, player.workload.slowness_N, plan=plan, roles=roles, late=late, move_seconds=player.resize_seconds
    )
    result = stage.run(
        absences=player.workload.absences[number],
        drain=lambda view: player.drain(inputs, view),
        poll_seconds=max(player.resize_seconds / 4, MIN_POLL_SECONDS),
    )
    return result, len(late)


def _first_roles(before: tuple[SimulatedRole, ...] | None, plan: Plan, workers: int) -> tuple[SimulatedRole, ...]:
    """Return the role in which each slot starts, such that as few slots as possible change their roles."""
    roles: list[SimulatedRole] = list(before) if before else ["rollout"] * workers
    wanted = plan.rollout - roles.count("rollout")
    source: SimulatedRole = "scoring" if wanted > 0 else "rollout"
    # In a split the slots with the lowest indices generate, also after changes of the split.
    order = range(workers) if wanted > 0 else range(workers - 1, -1, -1)
    for slot in [slot for slot in order if roles[slot] == source][: abs(wanted)]:
        roles[slot] = "rollout" if wanted > 0 else "scoring"
    return tuple(roles)


def _progress(view: RoleView, demand: Demand) -> RoleProgress:
    sequences = demand.sequences
    return RoleProgress(
        demand=demand,
        slots=view.slots,
        waiting=view.waiting,
        coming=view.coming,
        in_flight=tuple(InFlight(elapsed_seconds=elapsed, sequences=sequences) for elapsed in view.in_flight),
        done=view.done,
    )


def _add_measurements(
    measurements: Measurements, work: StageWork, result: StageResult, resize_seconds: float, *, changed: int
) -> Measurements:
    """Return the measurements after a simulated stage, in the form that a real run reads from the manifests of its
    units."""
    step = -(-len(work.rollout.seconds_U) // OBSERVED)
    units = [_observation(done, work) for done in result.done if done.unit % step == 0]
    moved = result.corrections + result.handovers + changed
    return measurements.observe(units, moves=(resize_seconds,) * min(moved, MAX_LENGTHS))


def _observation(done: UnitDone, work: StageWork) -> UnitObservation:
    lengths_S = np.sort((work.rollout if done.role == "rollout" else work.scoring).lengths_US[done.unit])
    ranks = np.linspace(0, lengths_S.size - 1, min(ORDER_STATISTICS, lengths_S.size)).round().astype(int)
    return UnitObservation(
        role=done.role,
        sequences=lengths_S.size,
        seconds=done.end - done.begin,
        steps=done.steps.steps,
        step_sequences=done.steps.sequences,
        step_sequences_squared=done.steps.sequences_squared,
        step_seconds=done.steps.seconds,
        step_sequence_seconds=done.steps.sequence_seconds,
        lengths=tuple(lengths_S[ranks].tolist()),
    )
