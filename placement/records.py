"""Records of placement decisions and their inputs, and the interface that placement policies implement.

Placement decides which worker slots serve which role during a stage. The roles are `rollout` and `scoring`. Times are
in seconds, lengths in tokens. All records are stored as JSON. A decision is stored together with its inputs, so that
it can be reproduced later.
"""

from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rheostat.infra.config import Settings

Floats = NDArray[np.float64]


class Pace(Settings):
    """Speed of one worker. A decoding step with b sequences takes `base_seconds + per_sequence_seconds * b` seconds."""

    base_seconds: float
    """Part of a step's time that does not depend on the batch size, mainly reading the weights. Called A in
    formulas."""
    per_sequence_seconds: float
    """Additional time of a step for each sequence in the batch. Called C in formulas."""
    setup_seconds: float = 0.0
    """Time that each sequence takes before its first token, for prefill and for reading and writing data."""
    unit_seconds: float = 0.0
    """Constant time of each work unit, for sending it to a worker and committing its result."""


class Demand(Settings):
    """Expected work of one role in a stage, and the speed of a worker in this role."""

    units: int
    """Number of work units in the stage. Each unit produces one shard."""
    sequences: int
    """Number of sequences in each unit, which are decoded as one batch. Each vote of a judge model is a sequence."""
    lengths: tuple[float, ...]
    """Sorted random sample of recent sequence lengths in tokens, with at most 512 values."""
    likeness: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Correlation between the log lengths of two sequences of the same unit, such as two completions of one prompt."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """Typical change (standard deviation) of the logarithm of the mean length from one stage to the next."""
    pace: Pace
    """Measured speed of a worker, or an assumed speed before the first measurement."""
    slots: int = 1
    """Number of slots that one worker of the role needs. With several reward models, the mean over the models."""
    least_slots: int = 1
    """Minimum number of slots for the role. Every reward model needs the slots of one replica, or of its configured
    number of replicas."""
    units_at_once: int = 1
    """Number of units that one worker decodes at the same time (continuous batching), or 1 if units are decoded one
    after another."""
    busy_seconds: float = 0.0
    """Moving average of the worker-seconds per stage (weight 0.7 for the old value), or 0 before the first stage."""
    measured: bool = False
    """Whether lengths and speed were measured. If not, they are assumed values."""


class ResizeCost(Settings):
    """Time that it takes to move a worker from one role to the other."""

    mean_seconds: float = 2.0
    """Moving average of the seconds that it takes to move a worker."""
    p95_seconds: float = 4.0
    """95th percentile of the seconds that it takes to move a worker."""


class Plan(Settings):
    """Assignment of worker slots (places for one worker each) to roles during a stage."""

    mode: Literal["colocated", "split"]
    """Mode of the plan: "colocated" if the roles take turns on all slots, "split" if they run at the same time on
    separate slots."""
    rollout: Annotated[int, Field(ge=0)]
    """Number of slots for rollout. If roles take turns, all slots."""
    scoring: Annotated[int, Field(ge=0)]
    """Number of slots for scoring. If roles take turns, all slots."""


class Memory(Settings):
    """State of a placement policy, which the caller stores from one decision to the next."""

    wanted: Plan | None = None
    """Plan that is predicted to be faster than the current plan, but whose total gain so far does not exceed the cost
    of the change."""
    held: int = 0
    """Number of consecutive decisions for which `wanted` was predicted to be faster than the current plan. -1 right
    after a change of the plan."""
    gained_seconds: float = 0.0
    """Seconds that the plan `wanted` would have saved compared with the current plan, as predicted by the
    last `held` decisions."""
    misses: int = 0
    """Number of consecutive predictions in this stage with an error of at least 30%. After two of them, no more workers
    are moved in this stage."""
    moved_at: float = float("-1e9")
    """Time at which workers were last moved in this stage, in seconds after the start of the stage."""
    moved: int = 0
    """Number of workers moved in this stage."""
    predicted_seconds: float | None = None
    """End of the stage that the last decision predicted, in seconds after the start of the stage."""
    look_at: float = 0.0
    """Time of the next evaluation of the plan, in seconds after the start of the stage."""
    emptied: bool = False
    """Whether there were no waiting rollout units when the plan was last evaluated."""
    behind_seconds: float = 0.0
    """Total predicted seconds by which taking turns would have been faster than the chosen plans since the last change
    of the plan."""


class PlanInputs(Settings):
    """Inputs from which a placement policy computes the plan for the next stage."""

    workers: int
    """Total number of slots."""
    rollout: Demand
    """Expected rollout work in the stage, and the speed of a rollout worker."""
    scoring: Demand
    """Expected scoring work in the stage, and the speed of a scoring worker."""
    resize: ResizeCost = ResizeCost()
    """Time that it takes to move a worker from one role to the other."""
    current: Plan | None = None
    """Plan of the last stage, or None before the first stage."""
    memory: Memory = Memory()
    """State that the last decision returned."""
    seed: int = 0
    """Random seed for the bootstrap resamples."""


class InFlight(Settings):
    """Work unit that a worker is currently decoding."""

    elapsed_seconds: float
    """Seconds since the unit was started."""
    sequences: int
    """Number of sequences in the unit."""


class RoleProgress(Settings):
    """Progress of one role in a running stage."""

    demand: Demand
    """Expected work of the role in the whole stage, and the speed of a worker in this role."""
    slots: int
    """Number of slots that currently serve this role."""
    waiting: int
    """Number of units that are ready to be processed but have not been started."""
    coming: int = 0
    """Number of units that are not ready yet. A scoring unit becomes ready when rollout has finished the unit."""
    in_flight: tuple[InFlight, ...] = ()
    """Units that workers are currently decoding."""
    done: int = 0
    """Number of units finished in this stage."""


class DrainInputs(Settings):
    """Inputs from which a placement policy decides whether to move workers while a stage runs."""

    elapsed_seconds: float
    """Seconds since the start of the stage."""
    workers: int
    """Total number of slots."""
    plan: Plan
    """Current plan."""
    rollout: RoleProgress
    """Progress of rollout in this stage."""
    scoring: RoleProgress
    """Progress of scoring in this stage."""
    movable_rollout: int
    """Number of rollout slots that can still be moved in this stage. Each slot is moved at most once."""
    movable_scoring: int
    """Number of scoring slots that can still be moved in this stage. Each slot is moved at most once."""
    resize: ResizeCost = ResizeCost()
    """Time that it takes to move a worker from one role to the other."""
    memory: Memory = Memory()
    """State that the last decision returned."""
    seed: int = 0
    """Random seed for the bootstrap resamples."""


class Decision(Settings):
    """Plan that a placement policy has chosen, with the reason and the predicted times with and without the change."""

    plan: Plan
    """Chosen plan. Equal to the current plan if nothing changes."""
    predicted_seconds: float
    """Predicted seconds to the end of the stage with the chosen plan, including the time for moving workers."""
    unchanged_seconds: float
    """Predicted seconds to the end of the stage if the current plan is kept."""
    reason: str
    """Human-readable reason, such as "moved 2 of 8 workers from scoring to rollout: predicted 61 s instead of 84 s"."""
    memory: Memory
    """State that the caller must pass to the next decision."""


class Policy(Protocol):
    """Placement policy. Decisions must be deterministic: equal inputs lead to equal decisions.

    Policies are implemented in `rheostat.placement.policies` or by users. The controller of a run (the sub-flow that
    assigns work to the workers) calls them.
    """

    def plan(self, inputs: PlanInputs) -> Decision:
        """Return a decision with the plan for the next stage."""

    def drain(self, inputs: DrainInputs) -> Decision:
        """Return a decision while a stage runs. A policy that moves no workers during a stage returns the current
        plan."""


class MeasuredStage(Settings):
    """Work of a finished stage, with measured lengths and speeds."""

    rollout: Demand
    """Rollout work, and the speed of rollout workers."""
    scoring: Demand
    """Scoring work, and the speed of scoring workers."""


class MeasuredRun(Settings):
    """Measurements of a real run, from which the simulator samples workloads."""

    run: str
    """Name of the run."""
    workers: int
    """Total number of slots."""
    stages: tuple[MeasuredStage, ...]
    """Measurements of each stage, in chronological order."""


def describe_plan(plan: Plan) -> str:
    """Return a readable description of a plan.

    Examples are "8 workers for rollout and 4 for scoring" and "roles take turns on all 8 workers".
    """
    if plan.mode == "colocated":
        return f"roles take turns on all {plan.rollout} workers"
    return f"{plan.rollout} workers for rollout and {plan.scoring} for scoring"


def describe_change(current: Plan, plan: Plan) -> str:
    """Return a readable description of the change from one plan to another."""
    if plan.mode == "colocated" or current.mode == "colocated":
        return f"changed from {short_label(current)} to {short_label(plan)}"
    moved = plan.rollout - current.rollout
    source, target = ("scoring", "rollout") if moved > 0 else ("rollout", "scoring")
    return f"moved {abs(moved)} of {plan.rollout + plan.scoring} workers from {source} to {target}"


def short_label(plan: Plan) -> str:
    """Return a short label of a plan, such as "6/2" for 6 rollout and 2 scoring slots, or "taking turns"."""
    return "taking turns" if plan.mode == "colocated" else f"{plan.rollout}/{plan.scoring}"
