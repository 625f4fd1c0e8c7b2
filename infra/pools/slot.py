"""One place for a worker, over the generations of its processes: start, wake, put to sleep, give up."""

import enum
import logging
import time
from collections.abc import Callable

from infra.errors import RheostatError, WorkerLost
from infra.pools.worker import PoolSpec, ReservedSlot, Worker, find_worker, start_worker

logger = logging.getLogger(__name__)


class SlotState(enum.Enum):
    """What the worker of a seat is at."""

    EMPTY = enum.auto()
    """No process."""
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

    def __init__(
        self, spec: PoolSpec, index: int, *, generation: int = -1, berth: Callable[[], ReservedSlot] | None = None
    ) -> None:
        """Make a seat without a process; in a `berth`, workers start asleep."""
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
        self._bundle = berth

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
            self.use(await find_worker(self._spec, self._name()))
        except WorkerLost:
            await self.enter(None)

    async def enter(self, record: object) -> None:
        """Start the worker, or wake it if it sleeps, and let it take a record; after a failure the seat is empty."""
        self.state = SlotState.COMING
        try:
            if self.worker is None:
                self.generation += 1
                berth = None if self._bundle is None else self._bundle()
                self.worker = await start_worker(self._spec, self._name(), berth=berth)
            if self._bundle is not None:
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
