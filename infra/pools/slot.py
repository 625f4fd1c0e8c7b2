"""State of worker slots, and assignment of slots to roles. A slot is a reserved place for one worker process.

The worker in a slot can be started, woken, put to sleep or dropped. If a worker is lost, a process with the next
generation number replaces it. Slots are assigned by a pure function that moves as few workers as possible.
"""

import asyncio
import enum
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, RheostatError, WorkerLost
from rheostat.infra.pools.launcher import Launcher, Worker
from rheostat.infra.pools.worker import PoolSpec

logger = logging.getLogger(__name__)


class SlotState(enum.Enum):
    """State of the worker in a slot.

    ::

             activate: start, wake, take              _take
        ┌───────┐ ───────────────────► ┌──────────┐ ─► ┌──────┐ ───────► ┌──────┐
        │ EMPTY │       _replace       │ STARTING │    │ IDLE │          │ BUSY │
        └───────┘ ◄─────────────────── └──────────┘    └──────┘ ◄─────── └──────┘
            ▲     failed                     ▲             │      finished   │
            │                       activate │             │ sleep           │
            │                           ┌────────┐    ┌────────────────┐     │
            ├────────────────────────── │ ASLEEP │ ◄─ │ FALLING_ASLEEP │     │
            │  lose: died               └────────┘    └────────────────┘     │
            └──────── lose: died, stalled, or could not sleep ───────────────┘

    `activate`, `sleep`, `end` and `lose` are methods of `WorkerSlot`. The pool makes an idle worker busy (`_take`) and
    idle again, and replaces a lost worker that is still wanted (`_replace`). A fleet waits until a
    worker is idle before it puts the worker to sleep, so there is no step from BUSY to FALLING_ASLEEP. IDLE,
    FALLING_ASLEEP and ASLEEP also change to EMPTY if the worker is lost.
    """

    EMPTY = enum.auto()
    """Slot without a worker."""
    STARTING = enum.auto()
    """Slot whose worker is starting, waking up, or loading model weights."""
    IDLE = enum.auto()
    BUSY = enum.auto()
    FALLING_ASLEEP = enum.auto()
    """Slot whose worker is freeing its memory, which is the last step before it is asleep."""
    ASLEEP = enum.auto()


class WorkerSlot:
    """Slot of a pool: a place for one worker process at a time. If a worker is lost, a new process takes its place.

    Each replacement gets the next generation number, so that no name is used twice. If several processes replace the
    same worker, they use the same name and therefore get the same worker.
    """

    def __init__(self, spec: PoolSpec, index: int, *, launcher: Launcher, shared: bool, generation: int = -1) -> None:
        """Create a slot without a worker. If the slot is shared by the roles of a fleet, new workers are asleep at
        first."""
        self.index = index
        self.generation = generation
        self.wanted = False
        """Whether the slot should have a worker that accepts work. In this case, a lost worker is replaced."""
        self.has_taken_record = False
        """Whether this worker has already run its method `take`. The first run is slower, because the worker imports
        modules."""
        self.state = SlotState.EMPTY
        self.worker: Worker | None = None
        self.work: object = None
        """Work unit that the worker is running since `began` (seconds of the monotonic clock)."""
        self.began = 0.0
        self.announced_turn: asyncio.Future[tuple[WorkerSlot, Worker]] | None = None
        """Waiting work unit that was announced to the busy worker, so that it downloads the inputs. If the unit is
        still waiting then, the worker runs it next."""
        self._spec = spec
        self._launcher = launcher
        self._shared = shared

    @property
    def is_awake(self) -> bool:
        """Whether the worker occupies the memory of its slots. This is also the case while a lost worker is being
        replaced."""
        return self.state in (SlotState.IDLE, SlotState.BUSY, SlotState.FALLING_ASLEEP) or (
            self.wanted and self.state is SlotState.STARTING
        )

    @property
    def is_available(self) -> bool:
        """Whether the worker is idle and may receive work."""
        return self.wanted and self.state is SlotState.IDLE

    def use(self, worker: Worker) -> None:
        """Put a worker that another process has started into this slot, as an idle worker."""
        self.worker, self.state, self.wanted = worker, SlotState.IDLE, True

    async def find(self) -> None:
        """Use the worker that another process has started for this slot. If it no longer exists, start a new worker."""
        self.state = SlotState.STARTING
        try:
            self.use(await self._launcher.find(self._spec, self._name()))
        except WorkerLost:
            await self.activate(None)

    async def activate(self, record: object) -> None:
        """Start the worker, or wake it if it is asleep. The worker first processes the record, for example by loading a
        model. If this fails, the slot is empty."""
        self.state = SlotState.STARTING
        try:
            if self.worker is None:
                self.generation += 1
                slot = self.index if self._shared else None
                self.worker = await self._launcher.start(self._spec, self._name(), slot=slot)
            if self._shared:
                await self.worker.wake(record, stall_seconds=self._spec.stall_seconds)
                self.has_taken_record = self.has_taken_record or record is not None
        except RheostatError:
            await self.end()
            raise
        except BaseException:
            self.lose()
            raise
        self.state = SlotState.IDLE

    async def sleep(self) -> float:
        """Make the worker free its memory. If it cannot do so, end its process. Return the seconds that this took."""
        if self.worker is None:
            self.state = SlotState.EMPTY
            return 0.0
        self.state, began = SlotState.FALLING_ASLEEP, time.monotonic()
        try:
            seconds = await self.worker.sleep(stall_seconds=self._spec.stall_seconds)
        except RheostatError as error:
            logger.warning("%s. The process of the worker is ended instead.", error)
            await self.end()
            return time.monotonic() - began
        except BaseException:
            self.lose()
            raise
        self.state = SlotState.ASLEEP
        return seconds

    async def end(self) -> None:
        """Kill the worker process, and wait until its memory is free."""
        if self.worker is not None:
            self.worker.kill()
            await self.worker.await_exit()
        self.lose()

    def lose(self) -> None:
        """Kill the worker process and mark the slot as empty."""
        if self.worker is not None:
            self.worker.kill()
        self.worker, self.state, self.has_taken_record = None, SlotState.EMPTY, False

    def _name(self) -> str:
        return f"{self._spec.role}-{self.index}-{self.generation}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of a worker of a role to `width` consecutive slots, which begin at the slot with the index `first`."""

    role: str
    first: int
    width: int

    @property
    def slots(self) -> range:
        """Indices of the slots that the worker occupies."""
        return range(self.first, self.first + self.width)


@dataclass(frozen=True, slots=True)
class Change:
    """Exchange of workers in a set of slots: the workers `out` leave the slots, and then the workers `into` enter
    them."""

    out: tuple[Assignment, ...]
    into: tuple[Assignment, ...]


def assign_slots(
    current: Sequence[Assignment],
    wanted: Mapping[str, int],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str],
    asleep: Set[Assignment],
    lost: frozenset[int] = frozenset(),
) -> set[Assignment]:
    """Choose slots for the requested number of workers of each role, and return the assignments. `widths` is the number
    of slots that a worker needs, by role, and `nodes` lists the machine of each slot. Awake workers (`current`) are
    kept if possible. New workers preferably get slots in which a worker of their role is `asleep`.

    A worker never gets slots on two machines or a slot in `lost`. The first assignments in `current` are kept first.
    New workers that need the most slots are placed first. If the new workers do not fit into the free slots, all
    workers are assigned again. Raises BadInput if the workers do not fit at all.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if min(wanted.values(), default=0) < 0:
        raise BadInput(f"the number of workers of a role must not be negative, got {dict(wanted)}")
    if needed > len(nodes) - len(lost):
        raise BadInput(
            f"the workers {dict(wanted)} need {format_count(needed, 'slot')}, but the number of available slots is "
            f"{len(nodes) - len(lost)}"
        )
    missing = Counter(wanted)
    kept: set[Assignment] = set()
    for assignment in current:
        if missing[assignment.role] > 0 and not lost.intersection(assignment.slots):
            missing[assignment.role] -= 1
            kept.add(assignment)
    free = [None if slot in lost else node for slot, node in enumerate(nodes)]
    assignments = _add_assignments(missing, kept, widths=widths, nodes=free, asleep=asleep)
    assignments = (
        _add_assignments(Counter(wanted), set(), widths=widths, nodes=free, asleep=set())
        if assignments is None
        else assignments
    )
    if assignments is None:
        raise BadInput(
            f"the workers {dict(wanted)} do not fit on the machines: each needs all of its slots ({dict(widths)}) on "
            f"one machine, and the slots are on {list(nodes)}"
        )
    return assignments


def assign_fewer(
    current: Sequence[Assignment],
    wanted: Mapping[str, int],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str],
    asleep: Set[Assignment],
    lost: frozenset[int],
) -> set[Assignment] | None:
    """Choose slots like `assign_slots`. If slots were lost and the requested workers do not fit, choose slots for fewer
    workers. Return None if not even one worker of each requested role fits.

    The role that uses the most slots loses one worker at a time until the workers fit.
    """
    fewer = dict(wanted)
    while True:
        try:
            return assign_slots(current, fewer, widths=widths, nodes=nodes, asleep=asleep, lost=lost)
        except BadInput:
            shrinkable = [role for role, count in fewer.items() if count > 1]
            if not lost or not shrinkable:
                if lost:
                    return None
                raise
            fewer[max(shrinkable, key=lambda role: (fewer[role] * widths[role], role))] -= 1


def changes(current: Set[Assignment], target: Set[Assignment]) -> list[Change]:
    """Split the difference between two sets of slot assignments into changes that affect different slots. The changes
    can therefore be carried out in parallel."""
    groups: list[tuple[set[int], list[Assignment]]] = []
    for assignment in sorted(current ^ target, key=lambda assignment: assignment.first):
        slots, assignments = set(assignment.slots), [assignment]
        for group in [group for group in groups if group[0] & slots]:
            groups.remove(group)
            slots, assignments = slots | group[0], group[1] + assignments
        groups.append((slots, assignments))
    return [
        Change(
            tuple(assignment for assignment in assignments if assignment in current),
            tuple(assignment for assignment in assignments if assignment in target),
        )
        for _, assignments in groups
    ]


def _add_assignments(
    missing: Counter[str],
    kept: Set[Assignment],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str | None],
    asleep: Set[Assignment],
) -> set[Assignment] | None:
    """Choose slots for the missing workers, next to the `kept` assignments, and return all assignments. Workers that
    need the most slots come first. `missing` is the number of workers by role.

    Return None if the workers do not fit. If no assignment is kept, the workers are placed without gaps.
    """
    assignments = set(kept)
    for role in sorted(missing.elements(), key=lambda role: (-widths[role], role)):
        taken = {slot for assignment in assignments for slot in assignment.slots}
        gaps = [Assignment(role, first, widths[role]) for first in range(len(nodes) - widths[role] + 1)]
        free = [
            gap for gap in gaps if not taken.intersection(gap.slots) and _is_one_node({nodes[at] for at in gap.slots})
        ]
        if not free:
            return None
        assignments.add(min(free, key=lambda gap: (gap not in asleep, gap.first)))
    return assignments


def _is_one_node(nodes: Set[str | None]) -> bool:
    return len(nodes) == 1 and None not in nodes
