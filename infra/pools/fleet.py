"""Fleet of worker slots that several roles share. A slot is a reserved place for a worker, and serves at most one role
at a time."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from rheostat.infra.errors import BadInput, ClusterFailed, NodeLost, RheostatError, WorkerLost
from rheostat.infra.pools.launcher import SlotCount, SlotLauncher
from rheostat.infra.pools.moves import Move, RoleLoad, list_moves
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.slot import Assignment, Change, SlotState, WorkerSlot, assign_fewer, changes
from rheostat.infra.pools.worker import PoolSpec, gather_errors

logger = logging.getLogger(__name__)

_Arrangement = tuple[dict[str, int], dict[str, object]]
CHECK_SECONDS = 0.5
"""Interval in seconds between two checks for more worker slots, or for a worker of another process that this process
can use."""
FIND_SECONDS = 30.0
"""Maximum time in seconds that one check waits for the response of a worker of another process."""


@dataclass(frozen=True, slots=True)
class _ChangeResult:
    """Result of replacing the workers in some slots by other workers."""

    moves: list[Move]
    failed: dict[Assignment, RheostatError]
    """Errors of workers that could not be started, by slot assignment. If there are any, the change was undone."""


class Fleet:
    """Worker slots (places for one worker each) that several roles share, with a pool of workers per role. Use a fleet
    in one event loop only.

    The process that calls `arrange` owns the workers. Other processes can only use workers that are awake. A sleeping
    worker has freed its memory but keeps its process, and is woken when its slots are assigned to its role again.
    """

    def __init__(self, specs: Sequence[PoolSpec], launcher: SlotLauncher, slots: SlotCount) -> None:
        """Create a fleet without workers. `arrange` starts the workers."""
        self._launcher, self._wanted = launcher, slots
        self._pools = {
            spec.role: Pool(spec, launcher, find_workers=self._start_finding_workers, on_lost_slot=self._arrange_again)
            for spec in specs
        }
        self._widths = {spec.role: spec.slots for spec in specs}
        self._turn = asyncio.Lock()
        self._arranges = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._finding: asyncio.Task[None] | None = None
        self._closed = False
        self._arrangement: _Arrangement = ({}, {})
        self._lost: frozenset[int] = frozenset()
        """Slots whose machine has left the cluster or has not joined it yet."""
        self._few_since: float | None = None
        """Monotonic time since which there have been too few slots, or None if there are enough."""

    @property
    def slots(self) -> int:
        """Number of usable slots, as of the last check."""
        return len(self._launcher.nodes) - len(self._lost)

    async def reserve(self) -> None:
        """Reserve the slots without starting workers. Does nothing if they are reserved. Raises ClusterFailed if they
        are not available within `SlotCount.wait_seconds`."""
        await self._launcher.reserve(self._wanted.wait_seconds)

    async def check_slots(self) -> int:
        """Count the usable slots, and wait for more if there are too few. Return the number of slots. Raises
        ClusterFailed if there are still too few after `SlotCount.wait_seconds`."""
        async with self._turn:
            if self._closed:
                raise ClusterFailed("work was requested after the worker slots of this run were closed")
            await self._begin()
            await self._target({})
            return self.slots

    def role(self, role: str) -> Pool:
        """Return the pool of workers of a role. Work that is sent to the pool waits while no worker of the role is
        awake."""
        return self._pools[role]

    def load(self) -> dict[str, RoleLoad]:
        """Return the load of every role (waiting and running work, idle workers), by role. The values are known
        locally, so no worker is called."""
        return {role: self._load(role) for role in self._pools}

    def allocation(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the slots that the awake workers of each role occupy, by role. Slots whose worker was
        lost and is being replaced are included."""
        return {
            role: tuple(
                sorted(slot for assignment in self._awake() if assignment.role == role for slot in assignment.slots)
            )
            for role in self._pools
        }

    async def arrange(self, workers: Mapping[str, int], *, take: Mapping[str, object] = {}) -> tuple[Move, ...]:
        """Give each role the requested number of awake workers, and put all other workers to sleep. `workers` is the
        number of workers by role. Return a record of each changed slot.

        The least loaded workers are put to sleep first, after they finish their current work. `take` contains a record
        for each role, such as the model to load. A new worker must process this record with its method `take` before it
        receives work. A failed change is undone and reported in the result. If this leaves no worker of the role, the
        error is raised, because the work would wait forever. After a cancellation, the change continues in the
        background. Slots whose machine has left the cluster are not used. Raises ClusterFailed if there are too few
        slots for `wait_seconds`, and BadInput if a role is unknown.
        """
        unknown = sorted((set(workers) | set(take)) - set(self._pools))
        if unknown:
            raise BadInput(f"the worker slots have no roles {unknown}, only {sorted(self._pools)}")
        if self._closed:
            raise ClusterFailed("work was requested after the worker slots of this run were closed")
        task = self._start_arranging((dict(workers), dict(take)))
        await asyncio.wait({task})
        if task.cancelled():
            raise ClusterFailed("the worker slots of this run were closed while workers were moved to another role")
        return task.result()

    def _arrange_again(self) -> None:
        """Repeat the last `arrange` after a slot was lost, so that its workers get other slots."""
        if not self._closed:
            self._start_arranging(None)

    def _start_arranging(self, arrangement: _Arrangement | None) -> "asyncio.Task[tuple[Move, ...]]":
        task = asyncio.create_task(self._arrange(arrangement))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def close(self) -> None:
        """End all workers, both awake and asleep, and release the slots."""
        self._closed = True
        tasks = [*self._tasks] if self._finding is None else [*self._tasks, self._finding]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._launcher.release()

    def _start_finding_workers(self) -> None:
        """Start to look for awake workers of another process, unless this process assigns the slots itself."""
        if not self._arranges and self._finding is None and not self._closed:
            self._finding = asyncio.create_task(self._find_awake_workers())

    def _load(self, role: str) -> RoleLoad:
        pool, now = self._pools[role], time.monotonic()
        awake = [slot for slot in pool.slots.values() if slot.is_awake]
        busy = tuple((now - slot.began, slot.work) for slot in awake if slot.state is SlotState.BUSY)
        return RoleLoad(
            role=role,
            slots=len(awake) * self._widths[role],
            workers=len(awake),
            idle=sum(slot.is_available for slot in awake),
            waiting=pool.waiting,
            in_flight=busy,
            done=pool.done,
            busy_seconds=pool.busy_seconds,
        )

    def _awake(self, growing: Set[str] = frozenset()) -> list[Assignment]:
        """Return the assignments of awake workers, busy workers first. Within each group, assignments come last if a
        worker of a role in `growing` sleeps in the same slots."""
        order = {SlotState.BUSY: 0, SlotState.FALLING_ASLEEP: 0, SlotState.STARTING: 1, SlotState.IDLE: 2}
        assignments = [(assignment, slot) for assignment, slot in self._worker_slots() if slot.is_awake]
        asleep = {
            index
            for assignment, slot in self._worker_slots()
            if assignment.role in growing and slot.worker
            for index in assignment.slots
        }
        assignments.sort(key=lambda at: (order[at[1].state], bool(asleep & set(at[0].slots)), -at[1].began))
        return [assignment for assignment, _ in assignments]

    def _worker_slots(self) -> list[tuple[Assignment, WorkerSlot]]:
        return [
            (Assignment(role, index, self._widths[role]), slot)
            for role, pool in self._pools.items()
            for index, slot in pool.slots.items()
        ]

    async def _arrange(self, arrangement: _Arrangement | None) -> tuple[Move, ...]:
        async with self._turn:
            workers, take = arrangement or self._arrangement
            if not self._arranges and not any(workers.values()):
                return ()
            await self._begin()
            self._arrangement = (workers, take)
            for role, pool in self._pools.items():
                pool.record = take.get(role)
            moves: list[Move] = []
            while not await self._move_workers(workers, moves):
                pass  # repeat, because a machine was lost meanwhile
        return tuple(sorted(moves, key=lambda move: move.slot))

    async def _move_workers(self, workers: Mapping[str, int], moves: list[Move]) -> bool:
        """Start workers, wake them and put them to sleep until each role has the requested number, and append the
        changes to `moves`. Return False if a machine was lost in the meantime, so that the call must be repeated."""
        for _, slot in self._worker_slots():
            if slot.state is SlotState.EMPTY:
                slot.wanted = False  # tried again below if this slot is chosen again
        current, target = await self._target(workers)
        is_settled, parts = True, changes(set(current), target)
        results = await asyncio.gather(*(self._change(part) for part in parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
            moves += result.moves
            if any(isinstance(error, NodeLost) for error in result.failed.values()):
                is_settled = False
            else:
                self._require_serving(workers, result)
        return is_settled

    async def _target(self, workers: Mapping[str, int]) -> tuple[list[Assignment], set[Assignment]]:
        """Choose slots for the requested numbers of workers. Return the present assignments and the new ones. If there
        are too few slots, wait for more. Raises ClusterFailed if there are still too few after `wait_seconds`."""
        while True:
            self._lost = await self._launcher.list_lost_slots()
            for assignment, slot in self._worker_slots():
                if self._lost.intersection(assignment.slots):
                    slot.wanted = False
                    if slot.state in (SlotState.IDLE, SlotState.ASLEEP):
                        slot.lose()
            serving = Counter(assignment.role for assignment in self._awake())
            growing = {role for role, count in workers.items() if count > serving[role]}
            current, nodes = self._awake(growing), self._launcher.nodes
            asleep = {
                assignment for assignment, slot in self._worker_slots() if slot.worker is not None and not slot.is_awake
            }
            target = assign_fewer(current, workers, widths=self._widths, nodes=nodes, asleep=asleep, lost=self._lost)
            enough = target is not None and self.slots >= self._wanted.min_slots
            few = None if enough else self._too_few(workers)
            for pool in self._pools.values():
                pool.start_error = few
                pool.dispatch()
            if few is not None:
                raise few
            if target is not None and enough:
                self._few_since = None
                return current, target
            await asyncio.sleep(CHECK_SECONDS)

    def _too_few(self, workers: Mapping[str, int]) -> ClusterFailed | None:
        """Return a ClusterFailed error if the fleet has waited for more slots for longer than `wait_seconds`, otherwise
        None. The first call logs a warning that the fleet waits."""
        first, left = self._few_since is None, self._remaining_wait()
        have = f"only {self.slots} of {len(self._launcher.nodes)} worker slots are available"
        wanted = (
            f"at least {self._wanted.min_slots} are needed"
            if self.slots < self._wanted.min_slots
            else f"they are too few for the workers {dict(workers)}"
        )
        if first:
            logger.warning("%s, but %s. Waiting up to %.0f s for more machines.", have, wanted, left)
        if left > 0:
            return None
        waited = f"No more became available within {self._wanted.wait_seconds:g} s (pools.wait_seconds)."
        return ClusterFailed(f"{have}, but {wanted}. {waited} Run the same command again to continue.")

    def _remaining_wait(self) -> float:
        """Return the seconds for which the fleet may still wait for more slots. The first call starts the wait."""
        now = time.monotonic()
        self._few_since = now if self._few_since is None else self._few_since
        return self._few_since + self._wanted.wait_seconds - now

    def _require_serving(self, workers: Mapping[str, int], changed: "_ChangeResult") -> None:
        """Raise the error of a worker that could not be started if its role should have workers but now has none.
        `changed` is the result of the change that tried to start the worker."""
        for assignment, error in changed.failed.items():
            if workers.get(assignment.role) and not any(
                slot.wanted for slot in self._pools[assignment.role].slots.values()
            ):
                raise type(error)(
                    f"{error}. No other {assignment.role} worker is available. Run the same command again to continue."
                ) from error

    async def _begin(self) -> None:
        """Reserve the slots, when this is called for the first time. Also find out which worker names earlier processes
        have used, so that new workers get other names."""
        if self._arranges:
            return
        await self._launcher.reserve(max(CHECK_SECONDS, self._remaining_wait()))
        self._arranges = True
        for role, pool in self._pools.items():
            for index, generation in (await self._launcher.list_generations(role)).items():
                pool.get_slot(index, generation=generation)

    async def _change(self, change: Change) -> "_ChangeResult":
        """Carry out one change of slots: put the leaving workers to sleep, then start or wake the entering workers. If
        a worker cannot be started, undo the change."""
        began = time.monotonic()
        await asyncio.gather(*(self._pools[assignment.role].drain(assignment.first) for assignment in change.out))
        slept_seconds = max(await asyncio.gather(*(self._sleep(assignment) for assignment in change.out)), default=0.0)
        asleep = time.monotonic()
        woken = {
            assignment
            for assignment in change.into
            if self._pools[assignment.role].get_slot(assignment.first).has_taken_record
        }
        results = await asyncio.gather(
            *(self._activate(assignment) for assignment in change.into), return_exceptions=True
        )
        seconds = slept_seconds + time.monotonic() - asleep
        failures = {
            assignment: result for assignment, result in zip(change.into, results, strict=True) if result is not None
        }
        if failures:
            await self._undo(change)
        for failure in failures.values():
            if not isinstance(failure, RheostatError):
                raise failure
        failed = {assignment: failure for assignment, failure in failures.items() if isinstance(failure, RheostatError)}
        error = next((str(failure) for failure in failed.values()), None)
        return _ChangeResult(list_moves(change, woken, (seconds, asleep - began - slept_seconds), error), failed)

    async def _undo(self, change: Change) -> None:
        """Undo a failed change: restore the workers that were awake before it. A worker that cannot be restored
        immediately is started again when there is work for it."""
        for assignment in change.into:
            if self._pools[assignment.role].get_slot(assignment.first).is_awake:
                await self._pools[assignment.role].drain(assignment.first)
                await self._sleep(assignment)
        out = [assignment for assignment in change.out if not self._lost.intersection(assignment.slots)]
        for failure in await gather_errors([self._activate(assignment) for assignment in out]):
            logger.warning("%s. The slot of the worker stays empty.", failure)
        for assignment in out:
            pool = self._pools[assignment.role]
            pool.get_slot(assignment.first).wanted = True
            if pool.waiting:
                pool.start_missing()

    async def _activate(self, assignment: Assignment) -> None:
        """Start or wake a worker. If it dies meanwhile, try again up to `max_restarts` times within `start_seconds`."""
        pool = self._pools[assignment.role]
        deadline = time.monotonic() + pool.spec.start_seconds
        for attempt in range(1, pool.spec.max_restarts + 2):
            try:
                await pool.activate(assignment.first, pool.record)
                break
            except NodeLost:
                raise
            except WorkerLost as lost:
                if attempt > pool.spec.max_restarts or time.monotonic() > deadline:
                    raise
                attempts = pool.spec.max_restarts + 1
                logger.warning("%s. Attempt %d of %d failed, so a new worker is started.", lost, attempt, attempts)

    async def _sleep(self, assignment: Assignment) -> float:
        return await self._pools[assignment.role].get_slot(assignment.first).sleep()

    async def _find_awake_workers(self) -> None:
        """Look for awake workers of another process until no work waits. Each time the workers have twice as long to
        respond, so that a stopped worker delays the first checks only a little and slow workers are found later."""
        seconds = CHECK_SECONDS
        try:
            while not self._arranges and any(pool.waiting for pool in self._pools.values()):
                finding = [
                    self._find(pool, index, generation, seconds)
                    for role, pool in self._pools.items()
                    if pool.waiting
                    for index, generation in (await self._launcher.list_generations(role)).items()
                ]
                await asyncio.gather(*finding)
                await asyncio.sleep(CHECK_SECONDS)
                seconds = min(2 * seconds, FIND_SECONDS)
        finally:
            self._finding = None

    async def _find(self, pool: Pool, index: int, generation: int, seconds: float) -> None:
        """Add a worker of another process to a slot of the pool, if the worker is awake. If it does not respond in
        `seconds`, it is tried again at the next check."""
        slot = pool.get_slot(index)
        if slot.wanted:
            return
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(seconds):
                worker = slot.worker
                if worker is None or slot.generation != generation:
                    worker = await self._launcher.find(pool.spec, f"{pool.spec.role}-{index}-{generation}")
                if not await worker.asleep():
                    slot.generation = generation
                    slot.use(worker)
                    pool.dispatch()
