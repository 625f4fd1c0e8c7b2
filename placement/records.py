"""Records of placement: the inputs of a decision, the decision, and the interface of placement policies.

Placement decides which worker slots serve which role during a stage. The roles are `rollout` and `scoring`. Times are
in seconds, lengths in tokens. All records are stored as JSON: a decision is stored with its inputs, so that it can be
computed again from them.
"""

from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from infra.config import Settings

Floats = NDArray[np.float64]


class Pace(Settings):
    """Speed of one worker of a role. A decoding step over b sequences takes `base + per_sequence * b` seconds."""

    base_seconds: float
    """Constant part A of a step's time, in which the weights are read once."""
    per_sequence_seconds: float
    """Additional time C of a step for each sequence of the batch."""
    setup_seconds: float = 0.0
    """Time of each sequence before its first token: prefill, reading and writing."""
    unit_seconds: float = 0.0
    """Time of each work unit for dispatch and commit."""


class Demand(Settings):
    """Work of one role in a stage, and the speed of its workers."""

    units: int
    """Number of work units, which are shards."""
    sequences: int
    """Number of sequences in each unit, decoded as one batch. Each vote of a judge is one sequence."""
    lengths: tuple[float, ...]
    """Recent lengths in tokens, as a sorted sample of at most 512 from their distribution."""
    likeness: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Correlation between the log lengths of two sequences of one unit (completions of one prompt)."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm of the mean length, from stage to stage."""
    pace: Pace
    """Measured speed, or an assumption before the first measurement."""
    slots: int = 1
    """Number of slots of one worker of the role. For several reward models, their mean."""
    least_slots: int = 1
    """Minimum number of slots with which the role can work. For several reward models: one replica of each, or the
    fixed number."""
    units_at_once: int = 1
    """Number of units that one worker decodes together (continuous batching), else 1."""
    busy_seconds: float = 0.0
    """Worker-seconds of work in a stage, as a moving average (EMA 0.7). 0 before the first stage."""
    measured: bool = False
    """Whether lengths and speed come from measurements."""


class ResizeCost(Settings):
    """Time needed to move a worker from one role to the other."""

    mean_seconds: float = 2.0
    """Moving average of the time."""
    p95_seconds: float = 4.0
    """95th percentile of the time."""


class Plan(Settings):
    """Assignment of worker slots to roles during a stage."""

    mode: Literal["colocated", "split"]
    """Whether the roles take turns on all slots ("colocated") or run at the same time on separate slots ("split")."""
    rollout: Annotated[int, Field(ge=0)]
    """Number of slots for rollout. All slots if roles take turns."""
    scoring: Annotated[int, Field(ge=0)]
    """Number of slots for scoring. All slots if roles take turns."""


class Memory(Settings):
    """State that a placement policy passes from one decision to the next. The caller of the policy stores it."""

    wanted: Plan | None = None
    """Plan that was predicted to be faster, but has not yet gained enough to pay for the change."""
    held: int = 0
    """Number of consecutive decisions at which the wanted plan was predicted to be faster, or -1 right after a
    change."""
    gained_seconds: float = 0.0
    """Seconds that the wanted plan would have gained in all these stages together."""
    misses: int = 0
    """Number of consecutive predictions in this stage that were off by 30%. After two the plan is no longer changed."""
    moved_at: float = float("-1e9")
    """Time of the last move of workers in this stage, in seconds after the start of the stage."""
    moved: int = 0
    """Number of workers moved in this stage."""
    predicted_seconds: float | None = None
    """End of the stage as predicted by the last decision, in seconds after its start."""
    look_at: float = 0.0
    """Time of the next evaluation of this stage, in seconds after its start."""
    emptied: bool = False
    """Whether the queue of rollout was empty at the last evaluation."""
    behind_seconds: float = 0.0
    """Seconds by which stages since the last change were predicted to be slower than taking turns, in total."""


class PlanInputs(Settings):
    """Inputs of a plan between stages."""

    workers: int
    """Total number of slots."""
    rollout: Demand
    """Work of rollout."""
    scoring: Demand
    """Work of scoring."""
    resize: ResizeCost = ResizeCost()
    """Time needed to move a worker."""
    current: Plan | None = None
    """Plan of the last stage. None at the start."""
    memory: Memory = Memory()
    """State from the last decision."""
    seed: int = 0
    """Seed of the bootstrap resamples."""


class InFlight(Settings):
    """Unit that a worker is decoding."""

    elapsed_seconds: float
    """Time since the unit was started."""
    sequences: int
    """Number of sequences of the unit."""


class RoleProgress(Settings):
    """Progress of a role in a running stage."""

    demand: Demand
    """Work of the role in the whole stage."""
    slots: int
    """Number of slots that serve this role now."""
    waiting: int
    """Number of units that are ready but not started."""
    coming: int = 0
    """Number of units that do not exist yet. For scoring these are the units that rollout has not finished."""
    in_flight: tuple[InFlight, ...] = ()
    """Units being decoded."""
    done: int = 0
    """Number of units finished in this stage."""


class DrainInputs(Settings):
    """Inputs of a correction in a running stage."""

    elapsed_seconds: float
    """Time since the start of the stage."""
    workers: int
    """Total number of slots."""
    plan: Plan
    """Current plan."""
    rollout: RoleProgress
    """Progress of rollout."""
    scoring: RoleProgress
    """Progress of scoring."""
    movable_rollout: int
    """Number of rollout slots that may still be moved in this stage. Each slot is moved at most once."""
    movable_scoring: int
    """Number of scoring slots that may still be moved in this stage."""
    resize: ResizeCost = ResizeCost()
    """Time needed to move a worker."""
    memory: Memory = Memory()
    """State from the last decision."""
    seed: int = 0
    """Seed of the bootstrap resamples."""


class Decision(Settings):
    """Decision about the slots, with its reason and its expected gain."""

    plan: Plan
    """Plan to follow. Equal to the current plan if nothing changes."""
    predicted_seconds: float
    """Expected time to the end of the stage, including the cost of moving."""
    unchanged_seconds: float
    """Expected time to the end of the stage with the current plan."""
    reason: str
    """One sentence for people: "moved 2 of 8 workers from scoring to rollout: predicted 61 s instead of 84 s"."""
    memory: Memory
    """State to pass with the next inputs."""


class Policy(Protocol):
    """Placement policy, which decides from its inputs alone: equal inputs lead to equal decisions.

    Implemented in `placement.policies` or by users, and called by the run's controller.
    """

    def plan(self, inputs: PlanInputs) -> Decision:
        """Return the plan for the coming stage."""

    def drain(self, inputs: DrainInputs) -> Decision:
        """Return a corrected plan in a running stage. Policies without corrections return the current plan."""


class MeasuredStage(Settings):
    """Work of a finished stage, with the lengths and speeds measured in this stage."""

    rollout: Demand
    """Work and speed of rollout."""
    scoring: Demand
    """Work and speed of scoring."""


class MeasuredRun(Settings):
    """Measurements of a run's stages, as input of the simulator."""

    run: str
    """Name of the run."""
    workers: int
    """Total number of slots."""
    stages: tuple[MeasuredStage, ...]
    """Measurements of the stages, in order."""


def describe_plan(plan: Plan) -> str:
    """Return a description: "8 workers for rollout and 4 for scoring", or "roles take turns on all 8 workers"."""
    if plan.mode == "colocated":
        return f"roles take turns on all {plan.rollout} workers"
    return f"{plan.rollout} workers for rollout and {plan.scoring} for scoring"


def describe_change(current: Plan, plan: Plan) -> str:
    """Return a description of the change from one plan to another."""
    if plan.mode == "colocated" or current.mode == "colocated":
        return f"changed from {short_label(current)} to {short_label(plan)}"
    moved = plan.rollout - current.rollout
    source, target = ("scoring", "rollout") if moved > 0 else ("rollout", "scoring")
    return f"moved {abs(moved)} of {plan.rollout + plan.scoring} workers from {source} to {target}"


def short_label(plan: Plan) -> str:
    """Return a short description of a plan: "6/2", or "taking turns"."""
    return "taking turns" if plan.mode == "colocated" else f"{plan.rollout}/{plan.scoring}"
