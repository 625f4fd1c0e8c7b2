"""Worker slots with their worker processes, and assignment of slots to roles.

A worker in a slot can be started, woken, put to sleep or dropped. If a worker is lost, a process with the next
generation number replaces it. The assignment is a pure function that moves as few workers as possible.
"""

import asyncio
import enum
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from infra.errors import BadInput, RheostatError, WorkerLost
from infra.pools.launcher import Launcher, Worker
from infra.pools.worker import PoolSpec

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
    """Slot whose worker is starting, waking up or loading weights."""
    IDLE = enum.auto()
    BUSY = enum.auto()
    FALLING_ASLEEP = enum.auto()
    """Slot whose worker is falling asleep."""
    ASLEEP = enum.auto()


class WorkerSlot:
    """Slot of a pool, which has one worker at a time. The name of a worker contains its generation number.

    Each replacement gets the next generation number, so no name is used twice. If several processes replace the same
    worker, they use the same name.
    """

    def __init__(self, spec: PoolSpec, index: int, *, launcher: Launcher, shared: bool, generation: int = -1) -> None:
        """Create a slot without a worker. In slots that a fleet shares, workers start asleep."""
        self.index = index
        self.generation = generation
        self.wanted = False
        """Whether the worker should accept work. A wanted worker is replaced if it is lost."""
        self.has_taken_record = False
        """Whether this worker has taken a record before. The first `take` is slower, because the worker imports
        modules."""
        self.state = SlotState.EMPTY
        self.worker: Worker | None = None
        self.work: object = None
        """Work unit of a busy worker, since `began` (monotonic seconds)."""
        self.began = 0.0
        self.announced_turn: asyncio.Future[tuple[WorkerSlot, Worker]] | None = None
        """Waiting work unit that was announced to the busy worker. The worker runs it next if it is still waiting."""
        self._spec = spec
        self._launcher = launcher
        self._shared = shared

    @property
    def is_awake(self) -> bool:
        """Whether the worker uses the memory of its slots. A lost worker counts as awake while it is being replaced."""
        return self.state in (SlotState.IDLE, SlotState.BUSY, SlotState.FALLING_ASLEEP) or (
            self.wanted and self.state is SlotState.STARTING
        )

    @property
    def is_available(self) -> bool:
        """Whether the worker is idle and accepts work."""
        return self.wanted and self.state is SlotState.IDLE

    def use(self, worker: Worker) -> None:
        """Use a worker that another process has started."""
        self.worker, self.state, self.wanted = worker, SlotState.IDLE, True

    async def find(self) -> None:
        """Take over the worker that another process has started, or start one if it is gone."""
        self.state = SlotState.STARTING
        try:
            self.use(await self._launcher.find(self._spec, self._name()))
        except WorkerLost:
            await self.activate(None)

    async def activate(self, record: object) -> None:
        """Start the worker, or wake it if it sleeps, and let it take a record. After an error the slot is empty."""
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
        """Free the worker's memory, if necessary by ending its process. Return the seconds that this took."""
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
        """Kill the worker's process and wait until its memory is free."""
        if self.worker is not None:
            self.worker.kill()
            await self.worker.await_exit()
        self.lose()

    def lose(self) -> None:
        """Kill the worker's process and mark the slot as empty."""
        if self.worker is not None:
            self.worker.kill()
        self.worker, self.state, self.has_taken_record = None, SlotState.EMPTY, False

    def _name(self) -> str:
        return f"{self._spec.role}-{self.index}-{self.generation}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Slots of one worker: `width` consecutive slots, starting at `first`."""

    role: str
    first: int
    width: int

    @property
    def slots(self) -> range:
        """Slots of the worker."""
        return range(self.first, self.first + self.width)


@dataclass(frozen=True, slots=True)
class Change:
    """Workers that leave some slots, and workers that enter the same slots after all leaving workers are asleep."""

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
    """Assign slots to all wanted workers and return the assignments.

    `nodes` names the node of each slot. An assignment never spans two nodes and uses no `lost` slot. `current` lists
    the awake assignments in the order in which to keep them. New workers go to free slots, widest first, and if
    possible to slots where a worker of the role sleeps. If the free slots do not fit, all workers are assigned again.
    Raises BadInput if the workers do not fit.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if min(wanted.values(), default=0) < 0:
        raise BadInput(f"numbers of workers must not be negative, got {dict(wanted)}")
    if needed > len(nodes) - len(lost):
        raise BadInput(
            f"the workers {dict(wanted)} need {needed} slots, but only {len(nodes) - len(lost)} are available"
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
            f"the workers {dict(wanted)} with {dict(widths)} slots each do not fit on the nodes {list(nodes)}"
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
    """Assign slots like `assign_slots`, but with fewer workers if slots are lost.

    The role that uses the most slots gives up a worker until the rest fits. Returns None if not even one worker of
    every wanted role fits.
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
    """Split the difference between two sets of assignments into changes that have no slot in common."""
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
    """Add the missing assignments to the kept assignments, widest first. Return None if the assignments do not fit. If
    no assignment is kept, no gaps remain between the assignments."""
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
