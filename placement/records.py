"""What placement decides from, what it decides, and who decides.

Roles are `rollout` and `scoring`; times in seconds, lengths in tokens.

Everything here crosses the store's edge as JSON: a decision is kept with its inputs, and can be made again from them.
"""

from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from infra.config import Settings

Floats = NDArray[np.float64]


class Pace(Settings):
    """How fast one worker of a role is: a decoding step over b sequences takes `base + per_sequence * b` seconds."""

    base_seconds: float
    """A: the weights are read once per step."""
    per_sequence_seconds: float
    """C: what each sequence of the batch adds."""
    setup_seconds: float = 0.0
    """Per sequence, before its first token: prefill, reading and writing."""
    unit_seconds: float = 0.0
    """Per unit of work: dispatch, commit."""


class Demand(Settings):
    """What one role has to do in a stage, and how fast its workers are."""

    units: int
    """Units of work: shards."""
    sequences: int
    """Sequences per unit (votes of a judge counted each), decoded as one batch."""
    lengths: tuple[float, ...]
    """Recent lengths in tokens: the empirical distribution, as a sorted sample of at most 512."""
    likeness: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How alike a unit's lengths are: the correlation of two log lengths of one unit (completions of one prompt)."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """How much lengths change from stage to stage: standard deviation of the logarithm of their mean."""
    pace: Pace
    """Measured, or a prior before the first measurement."""
    slots: int = 1
    """Worker slots that one worker of the role takes (of several reward models: the mean)."""
    least_slots: int = 1
    """Fewest slots the role can work with (of several reward models: one replica each, or what is fixed)."""
    units_at_once: int = 1
    """Units that one worker decodes together (continuous batching), or 1."""
    busy_seconds: float = 0.0
    """Worker-seconds of work per stage, EMA 0.7; 0 before the first."""
    measured: bool = False
    """Whether lengths and pace come from measurements."""


class ResizeCost(Settings):
    """What it costs to move a worker from one role to another."""

    mean_seconds: float = 2.0
    """EMA."""
    p95_seconds: float = 4.0


class Plan(Settings):
    """Which slots serve which role during a stage."""

    mode: Literal["colocated", "split"]
    """In turns on all slots, or side by side."""
    rollout: Annotated[int, Field(ge=0)]
    """Slots that generate; all of them where roles take turns."""
    scoring: Annotated[int, Field(ge=0)]
    """Slots that score; all of them where roles take turns."""


class Memory(Settings):
    """What a policy remembers from one decision to the next; whoever asks for decisions carries it."""

    wanted: Plan | None = None
    """A change that would have been faster, but has not paid for itself yet."""
    held: int = 0
    """How often in a row it would have been faster."""
    gained_seconds: float = 0.0
    """What it would have gained in all of these stages."""
    misses: int = 0
    """Predictions inside this stage that were off by 30% in a row; after two the plan stands."""
    moved_at: float = float("-1e9")
    """When workers were last moved inside this stage, in seconds after its begin."""
    moved: int = 0
    """Workers moved inside this stage."""
    predicted_seconds: float | None = None
    """When the last decision expected the stage to end, in seconds after its begin."""
    look_at: float = 0.0
    """When the stage is worth another look, in seconds after its begin."""
    emptied: bool = False
    """Whether rollout's queue was empty at the last look."""
    behind_seconds: float = 0.0
    """By how much stages since the last change were expected to be slower than taking turns, in all."""


class PlanInputs(Settings):
    """All that a plan between stages is made from."""

    workers: int
    """Slots in all."""
    rollout: Demand
    scoring: Demand
    resize: ResizeCost = ResizeCost()
    current: Plan | None = None
    """How the slots were last dealt; none at the start."""
    memory: Memory = Memory()
    seed: int = 0
    """Of the bootstraps."""


class InFlight(Settings):
    """A unit that a worker is decoding."""

    elapsed_seconds: float
    sequences: int


class RoleProgress(Settings):
    """Where a role stands inside a stage."""

    demand: Demand
    slots: int
    """Slots awake in this role now."""
    waiting: int
    """Units ready and not begun."""
    coming: int = 0
    """Units that are not there yet (for scoring: those that rollout has still to finish)."""
    in_flight: tuple[InFlight, ...] = ()
    """Units under way, one each for busy workers."""
    done: int = 0
    """Units finished in this stage."""


class DrainInputs(Settings):
    """All that a correction inside a stage is made from."""

    elapsed_seconds: float
    """Since the stage began."""
    workers: int
    plan: Plan
    """As the slots are dealt now."""
    rollout: RoleProgress
    scoring: RoleProgress
    movable_rollout: int
    """Slots of rollout that have not been moved in this stage and may still be."""
    movable_scoring: int
    resize: ResizeCost = ResizeCost()
    memory: Memory = Memory()
    seed: int = 0


class Decision(Settings):
    """What to do, why, and what it is expected to gain."""

    plan: Plan
    """As the slots shall be dealt; equal to the current plan when nothing changes."""
    predicted_seconds: float
    """Expected time to the end of the stage, cost of moving included."""
    unchanged_seconds: float
    """The same if nothing were changed."""
    reason: str
    """One sentence for people: "moved 2 of 8 workers from scoring to rollout: predicted 61 s instead of 84 s"."""
    memory: Memory
    """To be handed in with the next inputs."""


class Policy(Protocol):
    """Decides from its inputs alone: the same inputs give the same decision."""

    def plan(self, inputs: PlanInputs) -> Decision:
        """Deal the slots for the coming stage."""

    def drain(self, inputs: DrainInputs) -> Decision:
        """Correct the deal inside a stage; policies that do not return the plan as it is."""


class MeasuredStage(Settings):
    """What a finished stage had to do, with the lengths and paces that it measured of itself."""

    rollout: Demand
    scoring: Demand


class MeasuredRun(Settings):
    """What the stages of a run measured, as the simulator reads it."""

    run: str
    """Name."""
    workers: int
    """Slots in all."""
    stages: tuple[MeasuredStage, ...]
    """In order."""


def described(plan: Plan) -> str:
    """A plan as a clause: "8 workers generate and 4 score", or "roles take turns on all 8 workers"."""
    if plan.mode == "colocated":
        return f"roles take turns on all {plan.rollout} workers"
    return f"{plan.rollout}/{plan.scoring} between rollout and scoring"


def changed(current: Plan, plan: Plan) -> str:
    """What a change does to the workers."""
    if plan.mode == "colocated" or current.mode == "colocated":
        return f"changed from {short(current)} to {short(plan)}"
    moved = plan.rollout - current.rollout
    source, target = ("scoring", "rollout") if moved > 0 else ("rollout", "scoring")
    return f"moved {abs(moved)} of {plan.rollout + plan.scoring} workers from {source} to {target}"


def short(plan: Plan) -> str:
    """A plan in a word: "6/2", or "turns"."""
    return "turns" if plan.mode == "colocated" else f"{plan.rollout}/{plan.scoring}"
