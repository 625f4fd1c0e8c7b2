"""Discrete-event simulation of one stage of rollout and scoring, including moves of workers and failures."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from bench.simulator.workers import Decoder, DecodeSteps, SharedBatch, WholeUnits
from bench.simulator.workload import Absence, StageWork
from rheostat.placement.records import Floats, Plan

SimulatedRole = Literal["rollout", "scoring"]
ROLES: tuple[SimulatedRole, SimulatedRole] = ("rollout", "scoring")


@dataclass(frozen=True, slots=True)
class UnitDone:
    """Finished work unit: the slot that processed it, its start and end, and its decoding steps."""

    role: SimulatedRole
    """Role in which the unit was processed: rollout or scoring."""
    unit: int
    """Index of the unit."""
    slot: int
    """Index of the slot that processed the unit."""
    begin: float
    """Start of the unit, in seconds after the start of the stage."""
    end: float
    """End of the unit, in seconds after the start of the stage."""
    steps: DecodeSteps
    """Sums over the decoding steps of this unit."""


@dataclass(frozen=True, slots=True)
class RoleView:
    """Progress of a role, limited to what a real run can observe."""

    slots: int
    """Number of slots assigned to the role, including slots whose worker has died."""
    waiting: int
    """Number of units that are ready to be processed but have not been started."""
    coming: int
    """Number of units that are not ready yet. For scoring, these are the units that rollout has not finished. Always 0
    for rollout."""
    in_flight: tuple[float, ...]
    """Seconds since the start of each unit in progress."""
    done: int
    """Number of finished units."""
    movable: int
    """Number of slots that can still be moved in this stage."""


@dataclass(frozen=True, slots=True)
class View:
    """State of a running stage, limited to what a real run can observe."""

    elapsed: float
    """Seconds since the start of the stage."""
    plan: Plan
    """Current plan."""
    rollout: RoleView
    """Progress of rollout."""
    scoring: RoleView
    """Progress of scoring."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of a simulated stage."""

    seconds: float
    """Duration of the stage in seconds."""
    done: tuple[UnitDone, ...]
    """Finished units of both roles, sorted by the time at which they ended."""
    corrections: int
    """Number of workers that were moved while their own role still had units to start."""
    handovers: int
    """Number of workers that were moved because their own role had no units left."""
    roles: tuple[SimulatedRole, ...]
    """Role of each slot at the end of the stage. A slot that is being moved has its new role."""
    plan: Plan
    """Plan at the end of the stage."""


Drain = Callable[[View], Plan]
"""Function that is called while a stage runs and returns the plan, which it may have changed."""


@dataclass(slots=True)
class _Slot:
    role: SimulatedRole
    decoders: dict[SimulatedRole, Decoder]
    here: bool = True
    """Whether the worker is available in its role. False during a move and after a failure."""
    alive: bool = True
    noticed: bool = False
    """Whether the worker was notified that it will be preempted (taken away). From then on it takes no more units."""
    leaving: bool = False
    """Whether the worker moves to the other role when its units in progress are finished. Until then it takes no more
    units."""
    moved: bool = False
    since: float = 0.0
    """Time at which the worker last became free."""
    units: dict[int, float] = field(default_factory=dict)
    """Start times of the units in progress, by index of the unit."""
    stamp: int = 0
    """Version number of the slot's state. Scheduled events with an older version number are ignored."""


class Stage:
    """Simulation of one stage.

    Each unit, in order, is assigned to the worker with the fewest units in progress. If several workers have equally
    few, the worker that has been waiting longest gets the unit.
    """

    def __init__(
        self,
        work: StageWork,
        slowness_N: Floats,
        *,
        plan: Plan,
        roles: Sequence[SimulatedRole],
        late: frozenset[int] = frozenset(),
        move_seconds: float,
    ) -> None:
        """Initialize the stage. Slots in `late` come from the other role and are available after `move_seconds`."""
        kind = WholeUnits if work.units_at_once == 1 else SharedBatch
        pair = {"rollout": work.rollout, "scoring": work.scoring}
        self._slots = [
            _Slot(role=role, decoders={name: kind(pair[name], slowness) for name in ROLES})
            for role, slowness in zip(roles, slowness_N.tolist(), strict=True)
        ]
        self._at_once, self._move_seconds, self._plan = work.units_at_once, move_seconds, plan
        self._units = len(work.rollout.seconds_U)
        self._waiting: dict[SimulatedRole, deque[int]] = {"rollout": deque(range(self._units)), "scoring": deque()}
        self._offers: dict[SimulatedRole, list[tuple[int, float, int, int]]] = {"rollout": [], "scoring": []}
        self._finished: dict[SimulatedRole, int] = {"rollout": 0, "scoring": 0}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()
        self._done: list[UnitDone] = []
        self._moves = {"corrections": 0, "handovers": 0}
        for index in range(len(self._slots)):
            if index in late:
                self._travel(index, 0.0)
            else:
                self._offer(index)

    def run(
        self, *, absences: Sequence[Absence] = (), drain: Drain | None = None, poll_seconds: float = 1.0
    ) -> StageResult:
        """Simulate the stage until every unit is scored, and return the result.

        `absences` contains failures and preemptions of workers. `drain` is called every `poll_seconds`, and can return
        a changed plan.
        """
        for absence in absences:
            self._at(absence.notice, partial(self._notice, absence.slot))
            self._at(absence.until, partial(self._die, absence.slot))
            self._at(absence.back, partial(self._return, absence.slot))
        if drain is not None:
            self._at(poll_seconds, partial(self._poll, drain, poll_seconds))
        now = 0.0
        self._dispatch(now)
        while self._finished["scoring"] < self._units:
            now, _, _, event = heappop(self._events)
            event(now)
            self._dispatch(now)
        return StageResult(
            seconds=now,
            done=tuple(self._done),
            corrections=self._moves["corrections"],
            handovers=self._moves["handovers"],
            roles=tuple(slot.role for slot in self._slots),
            plan=self._plan,
        )

    def _at(self, when: float, event: Callable[[float], None], *, unit: int = -1) -> None:
        """Schedule an event at the time `when`. Units that end at the same time are handled in the order of their
        indices."""
        heappush(self._events, (when, unit, next(self._order), event))

    # ---- units

    def _offer(self, index: int) -> None:
        """Mark the worker of a slot as ready if it can take another unit."""
        slot = self._slots[index]
        if slot.here and slot.alive and not slot.noticed and not slot.leaving and len(slot.units) < self._at_once:
            heappush(self._offers[slot.role], (len(slot.units), slot.since, index, slot.stamp))

    def _dispatch(self, now: float) -> None:
        for role in ROLES:
            waiting, offers = self._waiting[role], self._offers[role]
            while waiting and offers:
                _, _, index, stamp = heappop(offers)
                if self._slots[index].stamp == stamp:
                    self._begin(index, waiting.popleft(), now)

    def _begin(self, index: int, unit: int, now: float) -> None:
        slot = self._slots[index]
        slot.decoders[slot.role].begin(unit, now)
        slot.units[unit] = now
        self._changed(index)

    def _changed(self, index: int) -> None:
        """Cancel the scheduled events of a worker whose state has changed, and schedule new events."""
        slot = self._slots[index]
        slot.stamp += 1
        if slot.units:
            when, unit = slot.decoders[slot.role].next_end()
            self._at(when, partial(self._end, index, unit, slot.stamp), unit=unit)
        self._offer(index)

    def _end(self, index: int, unit: int, stamp: int, now: float) -> None:
        slot = self._slots[index]
        if slot.stamp != stamp:
            return
        role, steps = slot.role, slot.decoders[slot.role].end(unit, now)
        begin = slot.units.pop(unit)
        self._done.append(UnitDone(role=role, unit=unit, slot=index, begin=begin, end=now, steps=steps))
        self._finished[role] += 1
        slot.since = now
        self._changed(index)
        if slot.leaving and not slot.units:
            self._leave(index, now)
        if role == "rollout":
            self._waiting["scoring"].append(unit)
            if self._finished["rollout"] == self._units:
                self._turn(now)

    # ---- moves

    def _arrange(self, plan: Plan, now: float) -> None:
        """Move workers to the other role until the plan is reached, or no more workers may move.

        Idle workers are moved first, then the workers with the longest-running units.
        """
        wanted = plan.rollout - sum(self._assigned_role(slot) == "rollout" for slot in self._slots)
        if wanted > 0 and self._finished["rollout"] == self._units:
            return
        giver: SimulatedRole = "scoring" if wanted > 0 else "rollout"
        movable = [index for index, slot in enumerate(self._slots) if self._movable(slot, giver)]
        movable.sort(
            key=lambda index: (len(self._slots[index].units), min(self._slots[index].units.values(), default=0))
        )
        for index in movable[: abs(wanted)]:
            slot = self._slots[index]
            slot.moved = slot.leaving = True
            self._moves["handovers" if self._is_out_of_work(giver) else "corrections"] += 1
            self._changed(index)
            if not slot.units:
                self._leave(index, now)
        rollout = sum(self._assigned_role(slot) == "rollout" for slot in self._slots)
        self._plan = plan.model_copy(update={"rollout": rollout, "scoring": len(self._slots) - rollout})

    def _is_out_of_work(self, role: SimulatedRole) -> bool:
        coming = role == "scoring" and self._finished["rollout"] < self._units
        return not self._waiting[role] and not coming

    def _assigned_role(self, slot: _Slot) -> SimulatedRole:
        return _other(slot.role) if slot.leaving else slot.role

    def _movable(self, slot: _Slot, giver: SimulatedRole) -> bool:
        return slot.role == giver and slot.alive and slot.here and not slot.moved and not slot.noticed

    def _leave(self, index: int, now: float) -> None:
        slot = self._slots[index]
        slot.role, slot.leaving = _other(slot.role), False
        self._travel(index, now)

    def _travel(self, index: int, now: float) -> None:
        slot = self._slots[index]
        slot.here = False
        slot.stamp += 1
        self._at(now + self._move_seconds, partial(self._arrive, index, slot.stamp))

    def _arrive(self, index: int, stamp: int, now: float) -> None:
        slot = self._slots[index]
        if slot.stamp != stamp:
            return
        slot.here, slot.since = True, now
        self._changed(index)
        if slot.role == "rollout" and self._finished["rollout"] == self._units:
            self._turn(now)  # arrived too late to generate

    def _turn(self, now: float) -> None:
        """Switch all workers to scoring when rollout has ended, if all of them are still assigned to rollout."""
        for slot in self._slots:
            if slot.role == "scoring":
                slot.leaving = False  # the other role has no work left
        if all(slot.role == "rollout" and slot.here for slot in self._slots):
            for index in range(len(self._slots)):
                self._leave(index, now)

    # ---- failures

    def _notice(self, index: int, now: float) -> None:
        self._slots[index].noticed = True
        self._changed(index)

    def _die(self, index: int, now: float) -> None:
        slot = self._slots[index]
        slot.alive = False
        for unit in reversed(slot.units):
            slot.decoders[slot.role].drop(unit)
            self._waiting[slot.role].appendleft(unit)
        slot.units.clear()
        if slot.leaving:
            slot.role, slot.leaving = _other(slot.role), False
        slot.here = True  # a restarted worker gets the role that is assigned to its slot
        self._changed(index)

    def _return(self, index: int, now: float) -> None:
        slot = self._slots[index]
        slot.alive, slot.noticed, slot.since = True, False, now
        self._changed(index)

    # ---- control

    def _poll(self, drain: Drain, every: float, now: float) -> None:
        # As in real pools, the plan is evaluated again only after all moved workers have arrived.
        if not any(slot.leaving or not slot.here for slot in self._slots):
            plan = drain(self.view(now))
            if plan != self._plan:
                self._arrange(plan, now)
        self._at(now + every, partial(self._poll, drain, every))

    def view(self, now: float) -> View:
        """Return the state of the stage, limited to what a real run can observe."""
        return View(
            elapsed=now,
            plan=self._plan,
            rollout=self._role_view("rollout", now),
            scoring=self._role_view("scoring", now),
        )

    def _role_view(self, role: SimulatedRole, now: float) -> RoleView:
        present = [slot for slot in self._slots if slot.role == role]
        return RoleView(
            slots=len(present),
            waiting=len(self._waiting[role]),
            coming=self._units - self._finished["rollout"] if role == "scoring" else 0,
            in_flight=tuple(now - begin for slot in present for begin in slot.units.values()),
            done=self._finished[role],
            movable=sum(self._movable(slot, role) for slot in present),
        )


def _other(role: SimulatedRole) -> SimulatedRole:
    return "scoring" if role == "rollout" else "rollout"
