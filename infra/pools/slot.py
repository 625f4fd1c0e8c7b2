"""One place for a worker, over the generations of its processes: start, wake, put to sleep, give up."""

import enum
import logging
import time

from infra.errors import RheostatError, WorkerLost
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
