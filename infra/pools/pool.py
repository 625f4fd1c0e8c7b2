"""Pool of the workers of one role. The pool has a queue of work units, retries work units, and replaces lost
workers."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from rheostat.infra.counts import format_count
from rheostat.infra.errors import ClusterFailed, NodeLost, RheostatError, WorkerAsleep, WorkerLost
from rheostat.infra.pools.host import Returned
from rheostat.infra.pools.launcher import Launcher, Worker
from rheostat.infra.pools.slot import SlotState, WorkerSlot
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import Done, PoolSpec, check_result, gather_errors

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)

Turn = asyncio.Future[tuple[WorkerSlot, Worker]]
"""Future of a work unit that waits in a pool's queue. Its result is the worker that will run the work unit, and the
worker's slot."""


class Pool:
    """Pool of interchangeable workers that run work units (requests to do some work). Use a pool in one event loop
    only. If a worker is lost, the pool replaces it, and another worker runs its work unit. If a worker raises an error,
    the work unit is not run again.

    If the pool belongs to a fleet, the fleet starts and stops the workers, and work units wait until a worker is awake.
    Otherwise the pool always has `spec.size` workers.
    """

    def __init__(
        self,
        spec: PoolSpec,
        launcher: Launcher,
        *,
        find_workers: Callable[[], None] | None = None,
        on_lost_slot: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a pool without workers. `find_workers` is called whenever work waits for a worker. `on_lost_slot` is
        called whenever the machine of a slot is lost."""
        self.spec = spec
        self.restarts = 0
        self.done = 0
        self.record: object = None
        """Record, such as the model to load, that a replacement worker must process with its method `take` before its
        first work unit."""
        self._ended_seconds = 0.0
        self._launcher = launcher
        self._find_workers = find_workers
        self._on_lost_slot = on_lost_slot
        self._slots: dict[int, WorkerSlot] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._queue: OrderedDict[Turn, object] = OrderedDict()
        """Work units that wait for a worker, in order of arrival."""
        self._changed = asyncio.Event()
        self._fault: RheostatError | None = None
        self.start_error: RheostatError | None = None
        """Error that prevents all workers from starting, so that waiting work cannot be done. None if there is no such
        error."""
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that currently accept work."""
        slots = (slot for _, slot in sorted(self._slots.items()) if slot.wanted)
        return tuple(slot.worker.place.pid for slot in slots if slot.worker is not None)

    @property
    def slots(self) -> Mapping[int, WorkerSlot]:
        """Slots of the pool's workers, by index. In a fleet, where a worker may occupy several slots, the index is that
        of its first slot."""
        return self._slots

    @property
    def waiting(self) -> int:
        """Number of work units that are waiting for a worker."""
        return len(self._queue)

    @property
    def busy_seconds(self) -> float:
        """Total seconds that workers have spent on work units, including units in progress."""
        now = time.monotonic()
        under_way = sum(now - slot.began for slot in self._slots.values() if slot.state is SlotState.BUSY)
        return self._ended_seconds + under_way

    async def open(self) -> None:
        """Start the pool: use workers that other processes have started, and start the missing workers. If a worker
        cannot be started, close the pool and raise the error."""
        generations = await self._launcher.list_generations(self.spec.role)
        for index, generation in generations.items():
            self.get_slot(index, generation=generation)
        starts = []
        for index in range(self.spec.size):
            slot = self.get_slot(index)
            slot.wanted = True
            starts.append(slot.find() if index in generations else slot.activate(None))
        try:
            failures = await gather_errors(starts)
            if failures:
                raise failures[0]
        except BaseException:
            await self.close()
            raise
        for slot in self._slots.values():
            self._watch(slot)

    def get_slot(self, index: int, *, generation: int = -1) -> WorkerSlot:
        """Return the slot with this index, and create it without a worker if it does not exist. `generation` is the
        number of the last worker process that existed in a new slot, or -1 if there was none."""
        if index not in self._slots:
            self._slots[index] = WorkerSlot(
                self.spec, index, launcher=self._launcher, shared=self._find_workers is not None, generation=generation
            )
        return self._slots[index]

    async def run(self, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Run a method of an idle worker with the argument `work`, and return the result, which must have the type
        `returns`. Wait if no worker is idle.

        Work units are started in order of arrival. If the awaiting task is cancelled, the worker still finishes the
        work unit, but the result is discarded. Raises WorkerLost if the worker was lost more than `max_restarts` times,
        WorkerFailed if the result has the wrong type, ClusterFailed if the pool is closed, and the errors that the
        worker raises.
        """
        began, attempt = time.monotonic(), 1
        while True:
            slot, worker = await self._take(work)
            use = self._spawn(self._use(slot, worker, method=method, work=work))
            await asyncio.wait({use})  # waiting can be cancelled without the call itself
            if use.cancelled():
                raise ClusterFailed(f"the pool of {self.spec.role} workers was closed while a worker ran {method}")
            try:
                outcome = use.result()
            except WorkerAsleep:
                continue
            except WorkerLost as lost:
                if attempt > self.spec.max_restarts:
                    attempts = format_count(attempt, "attempt")
                    what = f"The work {self.spec.role}.{method} has failed in {attempts} and is not run again"
                    raise type(lost)(f"{lost}. {what}. Raise pools.max_restarts for more attempts.") from lost
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
        """Send no more work to the worker in the slot `index`, and wait until it has finished its current work."""
        slot = self._slots[index]
        slot.wanted = False
        while slot.state in (SlotState.BUSY, SlotState.STARTING):
            await self._changed.wait()

    async def activate(self, index: int, record: object) -> None:
        """Start or wake the worker in the slot `index`. It processes the record with its method `take` (for example, it
        loads a model) before it accepts work."""
        slot = self.get_slot(index)
        before = slot.worker
        await slot.activate(record)
        slot.wanted = True
        if slot.worker is not before:
            self._watch(slot)
        self.dispatch()

    async def close(self) -> None:
        """End the workers that this process has started. Idle and sleeping workers close their resources first. Busy
        workers are killed."""
        self._closed = True
        self.dispatch()
        slots, self._slots = list(self._slots.values()), {}
        resting = [slot.worker for slot in slots if slot.state in (SlotState.IDLE, SlotState.ASLEEP) and slot.worker]
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in slots:
            if slot.worker is not None and slot.worker.is_owned and slot.worker not in resting:
                slot.lose()
        await asyncio.gather(*(worker.stop() for worker in resting if worker.is_owned))

    def dispatch(self) -> None:
        """Assign idle workers to waiting work units, in order of arrival. Also wake up tasks that wait in `drain`.

        A task that waits for a worker continues once it has a worker. It fails if no worker can be started.
        """
        self._changed.set()
        self._changed.clear()
        idle = (slot for slot in self._slots.values() if slot.is_available and not self._closed)
        while self._queue and (slot := next(idle, None)) is not None:
            self._hand_over(slot)
        if self.spec.prefetches:
            self._look_ahead()
        if self._queue and (hopeless := self._find_fatal_error()) is not None:
            for turn in self._queue:
                if not turn.done():
                    turn.set_exception(hopeless)
            self._queue.clear()
        if self._queue and self._find_workers is not None:
            self._find_workers()

    def prefetch(self, record: object) -> None:
        """Send all workers, including sleeping workers, a record of work that they may do next, so that they can
        download the inputs in advance."""
        for slot in self._slots.values():
            if slot.worker is not None:
                slot.worker.prefetch(record)

    def start_missing(self) -> None:
        """Try again to start required workers whose earlier start failed."""
        for slot in self._slots.values():
            if slot.wanted and slot.state is SlotState.EMPTY:
                self._replace(slot)

    async def _take(self, work: object) -> tuple[WorkerSlot, Worker]:
        self.start_missing()
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queue[turn] = work
        self.dispatch()
        try:
            slot, worker = await turn
        except asyncio.CancelledError:
            self._queue.pop(turn, None)
            if not turn.cancelled() and turn.exception() is None:  # it got a worker just before the cancellation
                self._rest(turn.result()[0])
            raise
        if self._closed:
            raise self._closed_error()
        return slot, worker

    def _hand_over(self, slot: WorkerSlot) -> None:
        """Give the idle worker of a slot the next waiting work unit. Cancelled work units are skipped."""
        turn, work = self._next_for(slot)
        while turn.done() and self._queue:
            turn, work = self._next_for(slot)
        if slot.worker is not None and not turn.done():
            slot.state, slot.work, slot.began = SlotState.BUSY, work, time.monotonic()
            turn.set_result((slot, slot.worker))

    def _next_for(self, slot: WorkerSlot) -> tuple[Turn, object]:
        """Remove the next work unit for a worker from the queue, and return it with its future. Work whose inputs the
        worker has already downloaded comes first.

        The first choice is a work unit that was announced to this worker, so that it has downloaded the inputs. The
        second choice is the oldest work unit that was announced to no worker, and the last choice is the oldest work
        unit.
        """
        announced = self._announced_turns()
        turn = next((turn for turn in self._queue if turn not in announced), next(iter(self._queue)))
        if slot.announced_turn is not None and slot.announced_turn in self._queue:
            turn = slot.announced_turn
        return turn, self._queue.pop(turn)

    def _announced_turns(self) -> set[Turn]:
        """Return the waiting work units that were announced to busy workers. Announced work units are likely to run on
        these workers next, so the workers download their inputs in advance."""
        turns = (slot.announced_turn for slot in self._slots.values() if slot.state is SlotState.BUSY)
        return {turn for turn in turns if turn is not None and turn in self._queue}

    def _look_ahead(self) -> None:
        """Announce one waiting work unit to each busy worker, so that the worker can download the inputs of its next
        work in advance."""
        announced = self._announced_turns()
        others = (turn for turn in self._queue if turn not in announced)
        for slot in self._slots.values():
            if slot.state is SlotState.BUSY and slot.worker is not None and slot.announced_turn not in announced:
                slot.announced_turn = next(others, None)
                if slot.announced_turn is not None:
                    slot.worker.prefetch(self._queue[slot.announced_turn])

    def _rest(self, slot: WorkerSlot) -> None:
        """Mark the worker of a slot as idle, and assign it the next waiting work unit."""
        if slot.state is SlotState.BUSY:
            slot.state = SlotState.IDLE
        slot.work = None
        self.dispatch()

    def _closed_error(self) -> ClusterFailed:
        return ClusterFailed(f"work was requested after the pool of {self.spec.role} workers was closed")

    def _find_fatal_error(self) -> RheostatError | None:
        """Return the error because of which no worker can be started, or None if there is no such error. Waiting work
        units then fail with this error."""
        if self._closed:
            return self._closed_error()
        wanted = [slot for slot in self._slots.values() if slot.wanted]
        if self._fault is not None and wanted and all(slot.state is SlotState.EMPTY for slot in wanted):
            return self._fault
        return self.start_error

    async def _use(self, slot: WorkerSlot, worker: Worker, *, method: str, work: object) -> Returned:
        try:
            outcome = await worker.perform(method, work, clock=StallClock(self.spec.stall_seconds))
            self.done += 1
            return outcome
        except WorkerLost:
            worker.kill()
            await worker.await_exit()
            self._lose(slot)
            raise
        except WorkerAsleep:
            slot.wanted = False
            raise
        finally:
            self._ended_seconds += time.monotonic() - slot.began
            self._rest(slot)

    def _lose(self, slot: WorkerSlot) -> None:
        """Remove a lost worker from its slot, and start a replacement if the slot still needs a worker."""
        ours = self._find_workers is None or (slot.worker is not None and slot.worker.is_owned)
        slot.lose()
        self.restarts += 1
        slot.wanted = slot.wanted and ours  # the fleet replaces other workers
        if slot.wanted:
            self._replace(slot)

    def _replace(self, slot: WorkerSlot) -> None:
        """Start a new worker in a slot, in the background. If this fails and the pool has no other worker, waiting
        calls of `run` raise the error. The next call tries again."""

        async def start() -> None:
            try:
                await slot.activate(self.record)
                self._watch(slot)
            except RheostatError as error:
                logger.warning("%s", error)
                self._fault = error
                if isinstance(error, NodeLost):
                    slot.wanted = False
                    self._on_lost_slot()
            self.dispatch()

        slot.state = SlotState.STARTING
        self._spawn(start())

    def _watch(self, slot: WorkerSlot) -> None:
        """Wait in the background until the worker of a slot has ended, so that the pool immediately notices when an
        idle or sleeping worker dies."""
        worker = slot.worker
        if worker is None or not worker.is_owned:
            return

        async def watch() -> None:
            await worker.wait_ended()
            await worker.await_exit()
            if slot.worker is worker and slot.state in (SlotState.IDLE, SlotState.ASLEEP):
                logger.warning("%s worker %s (pid %d) died", self.spec.role, worker.name, worker.place.pid)
                self._lose(slot)
                self.dispatch()

        self._spawn(watch())

    def _spawn(self, body: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the caller may be cancelled
        return task
