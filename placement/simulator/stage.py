"""Discrete-event simulation of one rollout-and-scoring stage: units, workers, moves, turns and deaths."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from placement.records import Floats, Plan
from placement.simulator.workers import Decoder, DecodeSteps, SharedBatch, WholeUnits
from placement.simulator.workload import Absence, StageWork

SimulatedRole = Literal["rollout", "scoring"]
ROLES: tuple[SimulatedRole, SimulatedRole] = ("rollout", "scoring")


@dataclass(frozen=True, slots=True)
class UnitDone:
    """Finished unit, with its slot, its times and its decoding steps."""

    role: SimulatedRole
    """Role that finished the unit."""
    unit: int
    """Index of the unit."""
    slot: int
    """Index of the slot."""
    begin: float
    """Start of the unit, in seconds after the start of the stage."""
    end: float
    """End of the unit, in seconds after the start of the stage."""
    steps: DecodeSteps
    """Sums over the unit's decoding steps."""


@dataclass(frozen=True, slots=True)
class RoleView:
    """Progress of a role, as a controller can observe it."""

    slots: int
    """Number of slots assigned to the role, including dead ones."""
    waiting: int
    """Number of units that are ready but not started."""
    coming: int
    """Number of units that rollout has not finished, for scoring. 0 for rollout."""
    in_flight: tuple[float, ...]
    """Seconds since the start of each unit in progress."""
    done: int
    """Number of finished units."""
    movable: int
    """Number of slots that may still be moved in this stage."""


@dataclass(frozen=True, slots=True)
class View:
    """State of a running stage, as a controller can observe it."""

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
    """Seconds of the stage."""
    done: tuple[UnitDone, ...]
    """Finished units of both roles, in the order of their ends."""
    corrections: int
    """Number of workers moved while their own role still had units waiting or coming."""
    handovers: int
    """Number of workers moved after their own role ran out of units, which replaces a turn."""
    roles: tuple[SimulatedRole, ...]
    """Role of each slot at the end, or its new role if it was being moved."""
    plan: Plan
    """Plan at the end of the stage."""


Drain = Callable[[View], Plan]
"""Function that returns a corrected plan for a running stage."""


@dataclass(slots=True)
class _Slot:
    role: SimulatedRole
    decoders: dict[SimulatedRole, Decoder]
    here: bool = True
    """Whether the worker is in its role, not on the way to the role."""
    alive: bool = True
    noticed: bool = False
    """Whether the worker has been notified of a preemption and takes no more units."""
    leaving: bool = False
    """Whether the worker takes no more units, because it moves to the other role when its units are done."""
    moved: bool = False
    since: float = 0.0
    """Time at which the worker last became free."""
    units: dict[int, float] = field(default_factory=dict)
    """Units in progress, with their start times."""
    stamp: int = 0
    """Version of the slot. Scheduled offers and ends with an older version are ignored."""


class Stage:
    """Simulation of one stage.

    Units are taken in order, each by the worker with the fewest units in progress, and among these by the one that has
    waited longest.
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
        """Initialize the stage. Slots in `late` come from another role and arrive after `move_seconds`."""
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
        """Simulate until every unit is scored, and return the result.

        `absences` are deaths and preemptions of workers. `drain` is called every `poll_seconds` for a correction of the
        plan.
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
        """Schedule an event. Ends of units at the same time are ordered by unit."""
        heappush(self._events, (when, unit, next(self._order), event))

    # ---- units

    def _offer(self, index: int) -> None:
        """Register a worker as ready to take a unit, if it is."""
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
        """Invalidate the scheduled events of a worker, and schedule them again."""
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
        """Move workers towards a plan, if they may still move: idle ones first, then those that worked longest."""
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
        """React to the end of generation: if no worker is assigned to scoring, all workers switch to scoring."""
        for slot in self._slots:
            if slot.role == "scoring":
                slot.leaving = False  # nothing is left to move for
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
        slot.here = True  # a worker that returns starts in the role to which its slot is assigned
        self._changed(index)

    def _return(self, index: int, now: float) -> None:
        slot = self._slots[index]
        slot.alive, slot.noticed, slot.since = True, False, now
        self._changed(index)

    # ---- control

    def _poll(self, drain: Drain, every: float, now: float) -> None:
        # Real pools, too, evaluate the plan again only after all moved workers have arrived.
        if not any(slot.leaving or not slot.here for slot in self._slots):
            plan = drain(self.view(now))
            if plan != self._plan:
                self._arrange(plan, now)
        self._at(now + every, partial(self._poll, drain, every))

    def view(self, now: float) -> View:
        """Return the state of the stage as a controller can observe it."""
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
