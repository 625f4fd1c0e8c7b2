"""A pool of workers of one role: queueing, retries, replacements, resizing."""

import asyncio
import enum
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar

from infra.actors import Returned
from infra.errors import ClusterFailed, RheostatError, WorkerLost
from infra.workers import Done, PoolSpec, Worker, checked, find_worker, start_worker, together

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    STARTING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()


@dataclass(slots=True, eq=False)
class _Slot:
    """One of a pool's places for a worker; a replacement gets the next generation's name."""

    index: int
    generation: int
    worker: Worker | None = None
    state: _State = _State.STARTING

    def name(self, role: str) -> str:
        return f"{role}-{self.index}-{self.generation}"


class Pool:
    """Run work on interchangeable workers. Belongs to one event loop.

    A lost worker is replaced and its work done again elsewhere; what a worker raises is not tried again.
    """

    def __init__(self, spec: PoolSpec) -> None:
        """Make an empty pool."""
        self.spec = spec
        self.size = spec.size
        self.restarts = 0
        self.busy_seconds = 0.0
        self._slots: list[_Slot] = []
        self._generations: dict[int, int] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._fault: RheostatError | None = None
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are ready."""
        return tuple(slot.worker.place.pid for slot in self._slots if slot.worker is not None)

    async def open(self, found: Mapping[int, int]) -> None:
        """Take over the workers found (index → generation) and start those that are missing; all or nothing."""
        self._generations = dict(found)
        self._slots = [
            _Slot(index, found[index] if index in found else self._next_generation(index)) for index in range(self.size)
        ]
        try:
            failures = await together([self._launch(slot, find=slot.index in found) for slot in self._slots])
            if failures:
                raise failures[0]
        except BaseException:
            await self.close()
            raise

    async def run(self, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Run one method on an idle worker, first come first served; its result must be a `returns`.

        When the awaiting task is cancelled, the worker ends its work, which nobody gets, and is idle again.
        """
        asked = time.monotonic()
        for attempt in itertools.count(1):
            try:
                slot, worker = await self._take()
                use = self._spawn(self._use(slot, worker, method=method, work=work))
                await asyncio.wait({use})  # unlike the call itself, waiting for it can be cancelled alone
                if use.cancelled():
                    raise ClusterFailed(f"pool {self.spec.role} was closed while it ran {method}")
                outcome = use.result()
            except WorkerLost as lost:
                if attempt > self.spec.max_restarts:
                    message = f"{lost}; {self.spec.role}.{method} given up after attempt {attempt}"
                    raise type(lost)(message) from lost
                logger.warning("%s; attempt %d of %d was lost", lost, attempt, self.spec.max_restarts + 1)
                continue
            result = checked(outcome, returns, what=f"{self.spec.role}.{method}")
            waited = time.monotonic() - asked - outcome.seconds
            place = worker.place
            return Done(result, outcome.seconds, max(0.0, waited), attempt, worker.name, place.pid, place.host)
        raise AssertionError("unreachable")

    async def resize(self, size: int) -> None:
        """Grow or shrink; busy workers finish first. Returns when the pool has `size` workers."""
        self.size, self._fault = size, None
        self._settle()
        self._fill()
        while len(self._slots) > self.size or any(slot.state is _State.STARTING for slot in self._slots):
            await self._changed.wait()
        await asyncio.gather(*self._leaving)
        if len(self._slots) < self.size and self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        """End the workers that this process started: idle ones may close what they hold, the others are killed."""
        self.size, self._closed = 0, True
        slots, self._slots = self._slots, []
        self._settle()
        busy = {slot.index for slot in slots if slot.state is _State.BUSY}
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ready = [(slot.index, slot.worker) for slot in slots if slot.worker is not None and slot.worker.ours]
        for index, worker in ready:
            if index in busy:
                worker.kill()
        await asyncio.gather(*(worker.stop() for index, worker in ready if index not in busy))

    async def _take(self) -> tuple[_Slot, Worker]:
        self._fill()
        while True:
            for slot in self._slots:
                if slot.state is _State.IDLE and slot.worker is not None:
                    slot.state = _State.BUSY
                    return slot, slot.worker
            if self._closed:
                raise ClusterFailed(f"pool {self.spec.role} is closed")
            if not self._slots:
                raise self._fault or ValueError(f"pool {self.spec.role!r} has no workers: resize it before its use")
            await self._changed.wait()

    async def _use(self, slot: _Slot, worker: Worker, *, method: str, work: object) -> Returned:
        started = time.monotonic()
        try:
            return await worker.perform(method, work, stall_seconds=self.spec.stall_seconds)
        except WorkerLost:
            worker.kill()
            slot.worker, slot.state = None, _State.STARTING
            slot.generation = self._next_generation(slot.index)
            self.restarts += 1
            self._spawn(self._replace(slot))
            raise
        finally:
            self.busy_seconds += time.monotonic() - started
            if slot.state is _State.BUSY:
                slot.state = _State.IDLE
            self._settle()

    async def _replace(self, slot: _Slot) -> None:
        """Start a slot's worker; a failure is raised to whoever finds the pool empty, and tried again by the next."""
        try:
            await self._launch(slot, find=False)
        except RheostatError as error:
            logger.warning("%s", error)
            self._fault = error
            if slot in self._slots:
                self._slots.remove(slot)
        self._settle()

    async def _launch(self, slot: _Slot, *, find: bool) -> None:
        if find:
            try:
                slot.worker = await find_worker(self.spec, slot.name(self.spec.role))
            except WorkerLost:
                slot.generation = self._next_generation(slot.index)
        if slot.worker is None:
            slot.worker = await start_worker(self.spec, slot.name(self.spec.role))
        slot.state = _State.IDLE

    def _fill(self) -> None:
        taken = {slot.index for slot in self._slots}
        free = (index for index in itertools.count() if index not in taken)
        for index in list(itertools.islice(free, max(0, self.size - len(self._slots)))):
            slot = _Slot(index, self._next_generation(index))
            self._slots.append(slot)
            self._spawn(self._replace(slot))

    def _next_generation(self, index: int) -> int:
        """Number an index's workers: a name is never used twice, and processes that replace one worker agree on it."""
        self._generations[index] = self._generations.get(index, -1) + 1
        return self._generations[index]

    def _settle(self) -> None:
        """Let surplus idle workers go, and wake who waits for a worker or for the size."""
        idle = [slot for slot in self._slots if slot.state is _State.IDLE]
        for slot in idle[::-1][: max(0, len(self._slots) - self.size)]:
            self._slots.remove(slot)
            if slot.worker is not None:
                task = self._spawn(slot.worker.stop())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        self._changed.set()
        self._changed.clear()

    def _spawn(self, body: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may be cancelled
        return task
