"""One place for a worker, over the generations of its processes; and how slots are dealt to roles.

A place is started, woken, put to sleep, given up. Dealing is pure: as few workers as possible move.
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
    """What the worker of a seat is at.

    ::

                  enter: start, wake, take           _take
        ┌───────┐ ─────────────────────► ┌────────┐ ─► ┌──────┐ ───────► ┌──────┐
        │ EMPTY │       _replace         │ COMING │    │ IDLE │          │ BUSY │
        └───────┘ ◄───────────────────── └────────┘    └──────┘ ◄─────── └──────┘
            ▲     failed                      ▲           │      answered    │
            │                           enter │           │ sleep            │
            │                            ┌────────┐    ┌───────┐             │
            ├─────────────────────────── │ ASLEEP │ ◄─ │ GOING │             │
            │  lose: it died             └────────┘    └───────┘             │
            └──────── lose: it died, stood still, or would not sleep ────────┘

    `enter`, `sleep`, `end` and `lose` are this module's; its pool makes an idle seat busy (`_take`) and back, and
    replaces a lost worker that is still wanted (`_replace`, at once COMING). A fleet drains a seat before its worker
    goes, so that BUSY is never left for GOING. IDLE, GOING and ASLEEP are lost to EMPTY as BUSY is.
    """

    EMPTY = enum.auto()
    """No worker."""
    COMING = enum.auto()
    """Starts, wakes or loads."""
    IDLE = enum.auto()
    BUSY = enum.auto()
    GOING = enum.auto()
    """Falls asleep."""
    ASLEEP = enum.auto()


class WorkerSlot:
    """One of a pool's places for a worker; a replacement gets the next generation's name.

    A name is never used twice, and processes that replace one worker agree on it.
    """

    def __init__(self, spec: PoolSpec, index: int, *, launcher: Launcher, shared: bool, generation: int = -1) -> None:
        """Make a seat without a worker; in the slots that a fleet shares, workers start asleep."""
        self.index = index
        self.generation = generation
        self.wanted = False
        """Whether its worker shall take work; one that is lost is then replaced."""
        self.took = False
        """Whether this process took a record before: its first time also pays for imports, which do not recur."""
        self.state = SlotState.EMPTY
        self.worker: Worker | None = None
        self.work: object = None
        """What a busy worker works on, since `began` (monotonic seconds)."""
        self.began = 0.0
        self.foreseen: asyncio.Future[tuple[WorkerSlot, Worker]] | None = None
        """Turn of the work that its busy worker was told of, which it gets next if it still waits."""
        self._spec = spec
        self._launcher = launcher
        self._shared = shared

    @property
    def awake(self) -> bool:
        """Whether it holds its slots' memory; a lost worker keeps them while it is replaced."""
        return self.state in (SlotState.IDLE, SlotState.BUSY, SlotState.GOING) or (
            self.wanted and self.state is SlotState.COMING
        )

    @property
    def usable(self) -> bool:
        """Whether its worker waits for work."""
        return self.wanted and self.state is SlotState.IDLE

    def use(self, worker: Worker) -> None:
        """Use a worker that another process has started."""
        self.worker, self.state, self.wanted = worker, SlotState.IDLE, True

    async def find(self) -> None:
        """Take over the worker that another process has started, or start one if it is gone."""
        self.state = SlotState.COMING
        try:
            self.use(await self._launcher.find(self._spec, self._name()))
        except WorkerLost:
            await self.enter(None)

    async def enter(self, record: object) -> None:
        """Start the worker, or wake it if it sleeps, and let it take a record; after a failure the seat is empty."""
        self.state = SlotState.COMING
        try:
            if self.worker is None:
                self.generation += 1
                slot = self.index if self._shared else None
                self.worker = await self._launcher.start(self._spec, self._name(), slot=slot)
            if self._shared:
                await self.worker.wake(record, stall_seconds=self._spec.stall_seconds)
                self.took = self.took or record is not None
        except RheostatError:
            await self.end()
            raise
        except BaseException:
            self.lose()
            raise
        self.state = SlotState.IDLE

    async def sleep(self) -> float:
        """Give the worker's memory back, if need be by its end; return the seconds that this alone took."""
        if self.worker is None:
            self.state = SlotState.EMPTY
            return 0.0
        self.state, began = SlotState.GOING, time.monotonic()
        try:
            seconds = await self.worker.sleep(stall_seconds=self._spec.stall_seconds)
        except RheostatError as error:
            logger.warning("%s; its process is ended instead", error)
            await self.end()
            return time.monotonic() - began
        except BaseException:
            self.lose()
            raise
        self.state = SlotState.ASLEEP
        return seconds

    async def end(self) -> None:
        """Kill what is left of the worker, and wait until its memory is free."""
        if self.worker is not None:
            self.worker.kill()
            await self.worker.gone()
        self.lose()

    def lose(self) -> None:
        """Kill what is left of the worker."""
        if self.worker is not None:
            self.worker.kill()
        self.worker, self.state, self.took = None, SlotState.EMPTY, False

    def _name(self) -> str:
        return f"{self._spec.role}-{self.index}-{self.generation}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's place: `width` slots from `first` on."""

    role: str
    first: int
    width: int

    @property
    def slots(self) -> range:
        """Slots that it takes."""
        return range(self.first, self.first + self.width)


@dataclass(frozen=True, slots=True)
class Change:
    """Workers that leave, and those that come to the same slots when all of them have left."""

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
    """Choose a post for every wanted worker; `nodes` names the node of each slot, and no post lies on two.

    No post lies on a `lost` slot.
    `current` lists the posts that are awake, those to be kept longest first. New ones go, the widest first, to free
    slots, where possible to a post where a worker sleeps. If no gap is wide enough, all are dealt anew.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if min(wanted.values(), default=0) < 0:
        raise BadInput(f"expected numbers of workers from 0 on, got {dict(wanted)}")
    if needed > len(nodes) - len(lost):
        raise BadInput(f"{dict(wanted)} needs {needed} slots, there are {len(nodes) - len(lost)}")
    left = Counter(wanted)
    kept: set[Assignment] = set()
    for post in current:
        if left[post.role] > 0 and not lost.intersection(post.slots):
            left[post.role] -= 1
            kept.add(post)
    free = [None if slot in lost else node for slot, node in enumerate(nodes)]
    dealt = _placed(left, kept, widths=widths, nodes=free, asleep=asleep)
    dealt = _placed(Counter(wanted), set(), widths=widths, nodes=free, asleep=set()) if dealt is None else dealt
    if dealt is None:
        raise BadInput(f"{dict(wanted)} with {dict(widths)} slots a worker does not fit the nodes {list(nodes)}")
    return dealt


def assign_fewer(
    current: Sequence[Assignment],
    wanted: Mapping[str, int],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str],
    asleep: Set[Assignment],
    lost: frozenset[int],
) -> set[Assignment] | None:
    """As `assign_slots` where slots are lost: roles that take most of them give up workers until the rest fit.

    None if not even one worker of every wanted role fits.
    """
    fewer = dict(wanted)
    while True:
        try:
            return assign_slots(current, fewer, widths=widths, nodes=nodes, asleep=asleep, lost=lost)
        except BadInput:
            giving = [role for role, count in fewer.items() if count > 1]
            if not lost or not giving:
                if lost:
                    return None
                raise
            fewer[max(giving, key=lambda role: (fewer[role] * widths[role], role))] -= 1


def changes(current: Set[Assignment], target: Set[Assignment]) -> list[Change]:
    """Split the way from one assignment to another into changes that have no slot in common."""
    groups: list[tuple[set[int], list[Assignment]]] = []
    for post in sorted(current ^ target, key=lambda post: post.first):
        taken, posts = set(post.slots), [post]
        for group in [group for group in groups if group[0] & taken]:
            groups.remove(group)
            taken, posts = taken | group[0], group[1] + posts
        groups.append((taken, posts))
    return [
        Change(tuple(post for post in posts if post in current), tuple(post for post in posts if post in target))
        for _, posts in groups
    ]


def _placed(
    left: Counter[str],
    kept: Set[Assignment],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str | None],
    asleep: Set[Assignment],
) -> set[Assignment] | None:
    """Add posts to those kept, the widest first; without any kept this leaves no gaps on a node."""
    dealt = set(kept)
    for role in sorted(left.elements(), key=lambda role: (-widths[role], role)):
        taken = {slot for post in dealt for slot in post.slots}
        gaps = [Assignment(role, first, widths[role]) for first in range(len(nodes) - widths[role] + 1)]
        free = [gap for gap in gaps if not taken.intersection(gap.slots) and _on_one({nodes[at] for at in gap.slots})]
        if not free:
            return None
        dealt.add(min(free, key=lambda gap: (gap not in asleep, gap.first)))
    return dealt


def _on_one(nodes: Set[str | None]) -> bool:
    return len(nodes) == 1 and None not in nodes
