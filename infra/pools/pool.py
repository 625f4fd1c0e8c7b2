"""Pool of the workers of one role, with a queue, retries and replacement of lost workers."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from infra.errors import ClusterFailed, NodeLost, RheostatError, WorkerAsleep, WorkerLost
from infra.pools.host import Returned
from infra.pools.launcher import Launcher, Worker
from infra.pools.slot import SlotState, WorkerSlot
from infra.pools.worker import Done, PoolSpec, check_result, gather_errors

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)

Turn = asyncio.Future[tuple[WorkerSlot, Worker]]
"""Future of a waiting work unit. Its result is the slot and the worker that will run the work unit."""


class Pool:
    """Pool that runs work units on interchangeable workers. Use a pool in one event loop only.

    The pool replaces a lost worker and runs its work unit again on another worker. Errors that a worker raises are not
    retried. If the pool belongs to a fleet, the fleet starts and stops the workers, and work units wait for an awake
    worker. Otherwise the pool always has `spec.size` workers.
    """

    def __init__(
        self,
        spec: PoolSpec,
        launcher: Launcher,
        *,
        look: Callable[[], None] | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a pool without workers. `look` is called when work waits for a worker, and `lost` when a
        slot is lost."""
        self.spec = spec
        self.restarts = 0
        self.done = 0
        self.record: object = None
        """Record that is passed to the `take` method of a replacement worker before its first work unit."""
        self._ended_seconds = 0.0
        self._launcher = launcher
        self._look = look
        self._slot_lost = lost
        self._seats: dict[int, WorkerSlot] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._queue: OrderedDict[Turn, object] = OrderedDict()
        """Work units that wait for a worker, in the order of their arrival."""
        self._changed = asyncio.Event()
        self._fault: RheostatError | None = None
        self.broken: RheostatError | None = None
        """Error that prevents every start of a worker for the waiting work, or None."""
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that accept work."""
        seats = (seat for _, seat in sorted(self._seats.items()) if seat.wanted)
        return tuple(seat.worker.place.pid for seat in seats if seat.worker is not None)

    @property
    def seats(self) -> Mapping[int, WorkerSlot]:
        """Worker slots by index. In a fleet, the index is the first slot of a worker."""
        return self._seats

    @property
    def waiting(self) -> int:
        """Number of work units that wait for a worker."""
        return len(self._queue)

    @property
    def busy_seconds(self) -> float:
        """Worker-seconds spent on work units, including units in progress."""
        now = time.monotonic()
        under_way = sum(now - seat.began for seat in self._seats.values() if seat.state is SlotState.BUSY)
        return self._ended_seconds + under_way

    async def open(self) -> None:
        """Take over the workers that other processes have started, and start the missing ones. If one fails, close the
        pool."""
        generations = await self._launcher.found(self.spec.role)
        for index, generation in generations.items():
            self.add(index, generation=generation)
        starts = []
        for index in range(self.spec.size):
            seat = self.add(index)
            seat.wanted = True
            starts.append(seat.find() if index in generations else seat.enter(None))
        try:
            failures = await gather_errors(starts)
            if failures:
                raise failures[0]
        except BaseException:
            await self.close()
            raise
        for seat in self._seats.values():
            self._watch(seat)

    def add(self, index: int, *, generation: int = -1) -> WorkerSlot:
        """Return the slot with this index. A new slot has no process. Its first process gets number `generation +
        1`."""
        if index not in self._seats:
            self._seats[index] = WorkerSlot(
                self.spec, index, launcher=self._launcher, shared=self._look is not None, generation=generation
            )
        return self._seats[index]

    async def run(self, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Run one method on an idle worker and return the result, which must be of the type `returns`.

        Work units are served in the order of arrival. If the awaiting task is cancelled, the worker finishes the work
        unit, its result is dropped, and the worker is idle again. Raises WorkerLost after `max_restarts` repetitions,
        WorkerFailed for a wrong type, ClusterFailed if the pool is closed, and the worker's own errors.
        """
        began, attempt = time.monotonic(), 1
        while True:
            seat, worker = await self._take(work)
            use = self._spawn(self._use(seat, worker, method=method, work=work))
            await asyncio.wait({use})  # waiting can be cancelled without the call itself
            if use.cancelled():
                raise ClusterFailed(f"the pool of {self.spec.role} workers was closed while it ran {method}")
            try:
                outcome = use.result()
            except WorkerAsleep:
                continue
            except WorkerLost as lost:
                if attempt > self.spec.max_restarts:
                    what = f"{self.spec.role}.{method} is not run again after attempt {attempt}"
                    raise type(lost)(f"{lost}. {what} (pools.max_restarts)") from lost
                logger.warning(
                    "%s. Attempt %d of %d failed, so the work is run again.", lost, attempt, self.spec.max_restarts + 1
                )
                attempt += 1
                continue
            result = check_result(outcome, returns, what=f"{self.spec.role}.{method}")
            waited = time.monotonic() - began - outcome.seconds
            place = worker.place
            return Done(result, outcome.seconds, max(0.0, waited), attempt, worker.name, place.pid, place.host)

    async def drain(self, index: int) -> None:
        """Give a worker no more work, and wait until its current work has ended."""
        seat = self._seats[index]
        seat.wanted = False
        while seat.state in (SlotState.BUSY, SlotState.COMING):
            await self._changed.wait()

    async def enter(self, index: int, record: object) -> None:
        """Start or wake the worker of a slot. The worker takes the record before it accepts work."""
        seat = self.add(index)
        before = seat.worker
        await seat.enter(record)
        seat.wanted = True
        if seat.worker is not before:
            self._watch(seat)
        self.settle()

    async def close(self) -> None:
        """End the workers that this process started. Idle and sleeping workers may close their resources first. Busy
        workers are killed."""
        self._closed = True
        self.settle()
        seats, self._seats = list(self._seats.values()), {}
        resting = [seat.worker for seat in seats if seat.state in (SlotState.IDLE, SlotState.ASLEEP) and seat.worker]
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seat in seats:
            if seat.worker is not None and seat.worker.ours and seat.worker not in resting:
                seat.lose()
        await asyncio.gather(*(worker.stop() for worker in resting if worker.ours))

    def settle(self) -> None:
        """Assign idle workers to waiting work in the order of arrival, and wake the tasks that wait for a worker to
        finish.

        A task that waits for a worker is woken only if it gets a worker, or an error because no worker can be started.
        """
        self._changed.set()
        self._changed.clear()
        idle = (seat for seat in self._seats.values() if seat.usable and not self._closed)
        while self._queue and (seat := next(idle, None)) is not None:
            self._hand_over(seat)
        if self.spec.looks_ahead:
            self._look_ahead()
        if self._queue and (hopeless := self._find_fatal_error()) is not None:
            for turn in self._queue:
                if not turn.done():
                    turn.set_exception(hopeless)
            self._queue.clear()
        if self._queue and self._look is not None:
            self._look()

    def foresee(self, record: object) -> None:
        """Announce a record that workers may need next to all workers, including sleeping workers."""
        for seat in self._seats.values():
            if seat.worker is not None:
                seat.worker.foresee(record)

    def fill(self) -> None:
        """Try again to start wanted workers that could not be started."""
        for seat in self._seats.values():
            if seat.wanted and seat.state is SlotState.EMPTY:
                self._replace(seat)

    async def _take(self, work: object) -> tuple[WorkerSlot, Worker]:
        self.fill()
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queue[turn] = work
        self.settle()
        try:
            seat, worker = await turn
        except asyncio.CancelledError:
            self._queue.pop(turn, None)
            if not turn.cancelled() and turn.exception() is None:  # the work got a worker just then
                self._rest(turn.result()[0])
            raise
        if self._closed:
            raise self._closed_error()
        return seat, worker

    def _hand_over(self, seat: WorkerSlot) -> None:
        """Assign an idle worker to the work unit that has waited longest, and skip work units that were cancelled."""
        turn, work = self._next_for(seat)
        while turn.done() and self._queue:
            turn, work = self._next_for(seat)
        if seat.worker is not None and not turn.done():
            seat.state, seat.work, seat.began = SlotState.BUSY, work, time.monotonic()
            turn.set_result((seat, seat.worker))

    def _next_for(self, seat: WorkerSlot) -> tuple[Turn, object]:
        """Remove and return the next work unit for a worker, with its future.

        A work unit that was announced to this worker comes first, then the oldest work unit that was announced to no
        worker, then the oldest work unit.
        """
        announced = self._announced_turns()
        turn = next((turn for turn in self._queue if turn not in announced), next(iter(self._queue)))
        if seat.foreseen is not None and seat.foreseen in self._queue:
            turn = seat.foreseen
        return turn, self._queue.pop(turn)

    def _announced_turns(self) -> set[Turn]:
        """Return the waiting work units that were announced to busy workers."""
        turns = (seat.foreseen for seat in self._seats.values() if seat.state is SlotState.BUSY)
        return {turn for turn in turns if turn is not None and turn in self._queue}

    def _look_ahead(self) -> None:
        """Announce one waiting work unit to each busy worker, so that its inputs are downloaded before it begins."""
        announced = self._announced_turns()
        others = (turn for turn in self._queue if turn not in announced)
        for seat in self._seats.values():
            if seat.state is SlotState.BUSY and seat.worker is not None and seat.foreseen not in announced:
                seat.foreseen = next(others, None)
                if seat.foreseen is not None:
                    seat.worker.foresee(self._queue[seat.foreseen])

    def _rest(self, seat: WorkerSlot) -> None:
        """Mark a slot's busy worker as idle and assign waiting work."""
        if seat.state is SlotState.BUSY:
            seat.state = SlotState.IDLE
        seat.work = None
        self.settle()

    def _closed_error(self) -> ClusterFailed:
        return ClusterFailed(f"the pool of {self.spec.role} workers is closed")

    def _find_fatal_error(self) -> RheostatError | None:
        """Return the error that prevents every start of a worker, or None if workers can be started."""
        if self._closed:
            return self._closed_error()
        wanted = [seat for seat in self._seats.values() if seat.wanted]
        if self._fault is not None and wanted and all(seat.state is SlotState.EMPTY for seat in wanted):
            return self._fault
        return self.broken

    async def _use(self, seat: WorkerSlot, worker: Worker, *, method: str, work: object) -> Returned:
        try:
            outcome = await worker.perform(method, work, stall_seconds=self.spec.stall_seconds)
            self.done += 1
            return outcome
        except WorkerLost:
            worker.kill()
            await worker.gone()
            self._lose(seat)
            raise
        except WorkerAsleep:
            seat.wanted = False
            raise
        finally:
            self._ended_seconds += time.monotonic() - seat.began
            self._rest(seat)

    def _lose(self, seat: WorkerSlot) -> None:
        """Drop a lost worker, and replace it if it is still wanted."""
        ours = self._look is None or (seat.worker is not None and seat.worker.ours)
        seat.lose()
        self.restarts += 1
        seat.wanted = seat.wanted and ours  # the fleet replaces other workers
        if seat.wanted:
            self._replace(seat)

    def _replace(self, seat: WorkerSlot) -> None:
        """Start a slot's worker. A failure is stored, and is raised in calls that find no other worker. The next call
        tries to start the worker again."""

        async def start() -> None:
            try:
                await seat.enter(self.record)
                self._watch(seat)
            except RheostatError as error:
                logger.warning("%s", error)
                self._fault = error
                if isinstance(error, NodeLost):
                    seat.wanted = False
                    self._slot_lost()
            self.settle()

        seat.state = SlotState.COMING
        self._spawn(start())

    def _watch(self, seat: WorkerSlot) -> None:
        """Notice immediately if a worker dies while it is idle or asleep."""
        worker = seat.worker
        if worker is None or not worker.ours:
            return

        async def watch() -> None:
            await worker.end()
            await worker.gone()
            if seat.worker is worker and seat.state in (SlotState.IDLE, SlotState.ASLEEP):
                logger.warning("%s worker %s (pid %d) died", self.spec.role, worker.name, worker.place.pid)
                self._lose(seat)
                self.settle()

        self._spawn(watch())

    def _spawn(self, body: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the caller may be cancelled
        return task
