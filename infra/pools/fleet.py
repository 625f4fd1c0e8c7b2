"""Worker slots that several roles share: at any moment each is awake in one of them."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from infra.errors import BadInput, ClusterFailed, NodeLost, RheostatError, WorkerLost
from infra.pools.launcher import SlotCount, SlotLauncher
from infra.pools.pool import Pool
from infra.pools.slot import Assignment, Change, SlotState, WorkerSlot, assign_fewer, changes
from infra.pools.worker import PoolSpec, together

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often a process that does not arrange the fleet looks for workers while work waits."""


@dataclass(frozen=True, slots=True)
class Move:
    """One slot's change."""

    slot: int
    before: str | None
    """Role; none is asleep."""
    after: str | None
    how: str
    """`start` where a process serves for the first time, `wake` where it did before, or `sleep`."""
    seconds: float
    """To put the old worker to sleep, and to wake or start the new one and let it take what it serves."""
    drain_seconds: float
    """Until the old worker had ended its work."""
    error: str | None
    """Why it was undone; none means that it stands."""


@dataclass(frozen=True, slots=True)
class _Changed:
    """What became of a change."""

    moves: list[Move]
    failed: dict[Assignment, RheostatError]
    """Why workers did not come; the change is then undone."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What a role has to do and has done, measured in this process."""

    role: str
    slots: int
    workers: int
    """Awake."""
    idle: int
    waiting: int
    """Works that wait for a worker."""
    in_flight: tuple[tuple[float, object], ...]
    """Seconds since it began, and the work, for each busy worker."""
    done: int
    """Works finished since the fleet was opened."""
    busy_seconds: float
    """Worker-seconds spent in works since then, those under way included."""


class Fleet:
    """Slots, and a pool for each role on them. Belongs to one event loop.

    The process that arranges the fleet has its workers; any other finds those that are awake, and uses them only.
    A worker that falls asleep keeps its process, and is woken when its role returns to its slots.
    """

    def __init__(self, specs: Sequence[PoolSpec], launcher: SlotLauncher, slots: SlotCount) -> None:
        """Describe a fleet. Nothing starts yet."""
        self._launcher, self._wanted = launcher, slots
        self._pools = {
            spec.role: Pool(spec, launcher, look=self._look_for_workers, lost=self._arrange_again) for spec in specs
        }
        self._widths = {spec.role: spec.slots for spec in specs}
        self._turn = asyncio.Lock()
        self._arranges = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._asked: tuple[dict[str, int], dict[str, object]] = ({}, {})
        self._lost: frozenset[int] = frozenset()
        """Slots whose machine has left the cluster, or is yet to join."""
        self._few_since: float | None = None
        """Since when there have been too few."""

    @property
    def slots(self) -> int:
        """Slots that there were when it was last looked."""
        return len(self._launcher.nodes) - len(self._lost)

    async def look(self) -> int:
        """Count the slots that there are now; where they are too few, others are waited for. Raises ClusterFailed."""
        async with self._turn:
            if self._closed:
                raise ClusterFailed("the fleet is closed")
            await self._begin()
            await self._target({})
            return self.slots

    def role(self, role: str) -> Pool:
        """Return the pool of a role; its works wait while none of its workers is awake."""
        return self._pools[role]

    def load(self) -> dict[str, RoleLoad]:
        """Measure every role, without asking any worker."""
        return {role: self._load(role) for role in self._pools}

    def allocation(self) -> dict[str, tuple[int, ...]]:
        """Tell which slots are awake in each role; a slot whose lost worker is being replaced is."""
        return {
            role: tuple(sorted(slot for post in self._awake() if post.role == role for slot in post.slots))
            for role in self._pools
        }

    async def arrange(self, workers: Mapping[str, int], *, take: Mapping[str, object] = {}) -> tuple[Move, ...]:
        """Have so many workers of each role awake, and all others asleep.

        Least loaded workers leave first, and end their work before. A worker `take`s its role's record before it
        counts as awake; one that is lost meanwhile is started again. What fails is undone, and told in its moves while
        other workers of the role serve; where none does, its error is raised, since work of the role would wait for
        ever. Cancelled, it is finished in the background. Slots whose machine has left the cluster are left out; where
        the rest is too few, or does not hold a worker of each role, others are waited for. Raises ClusterFailed then.
        """
        unknown = sorted((set(workers) | set(take)) - set(self._pools))
        if unknown:
            raise BadInput(f"the fleet has the roles {sorted(self._pools)}, not {unknown}")
        if self._closed:
            raise ClusterFailed("the fleet is closed")
        task = self._arranging((dict(workers), dict(take)))
        await asyncio.wait({task})
        if task.cancelled():
            raise ClusterFailed("the fleet was closed while it was arranged")
        return task.result()

    def _arrange_again(self) -> None:
        """Deal what was last asked for to the slots that are left."""
        if not self._closed:
            self._arranging(None)

    def _arranging(self, asked: tuple[dict[str, int], dict[str, object]] | None) -> "asyncio.Task[tuple[Move, ...]]":
        task = asyncio.create_task(self._arrange(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def close(self) -> None:
        """End all workers, awake and asleep."""
        self._closed = True
        tasks = [*self._tasks] if self._looking is None else [*self._tasks, self._looking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._launcher.remove()

    def _look_for_workers(self) -> None:
        """Look for awake workers while work waits, unless they are this process's own."""
        if not self._arranges and self._looking is None and not self._closed:
            self._looking = asyncio.create_task(self._look())

    def _load(self, role: str) -> RoleLoad:
        pool, now = self._pools[role], time.monotonic()
        awake = [seat for seat in pool.seats.values() if seat.awake]
        busy = tuple((now - seat.began, seat.work) for seat in awake if seat.state is SlotState.BUSY)
        return RoleLoad(
            role=role,
            slots=len(awake) * self._widths[role],
            workers=len(awake),
            idle=sum(seat.usable for seat in awake),
            waiting=pool.waiting,
            in_flight=busy,
            done=pool.done,
            busy_seconds=pool.busy_seconds,
        )

    def _awake(self, growing: Set[str] = frozenset()) -> list[Assignment]:
        """Posts that are awake, those with the most to do first; where a growing role has a process, last."""
        order = {SlotState.BUSY: 0, SlotState.GOING: 0, SlotState.COMING: 1, SlotState.IDLE: 2}
        posts = [(post, seat) for post, seat in self._seats() if seat.awake]
        asleep = {slot for post, seat in self._seats() if post.role in growing and seat.worker for slot in post.slots}
        posts.sort(key=lambda at: (order[at[1].state], bool(asleep & set(at[0].slots)), -at[1].began))
        return [post for post, _ in posts]

    def _seats(self) -> list[tuple[Assignment, WorkerSlot]]:
        return [
            (Assignment(role, slot, self._widths[role]), seat)
            for role, pool in self._pools.items()
            for slot, seat in pool.seats.items()
        ]

    async def _arrange(self, asked: tuple[dict[str, int], dict[str, object]] | None) -> tuple[Move, ...]:
        async with self._turn:
            workers, take = asked or self._asked
            if not self._arranges and not any(workers.values()):
                return ()
            await self._begin()
            self._asked = (workers, take)
            for role, pool in self._pools.items():
                pool.record = take.get(role)
            moves: list[Move] = []
            while not await self._settled(workers, moves):
                pass  # a machine was lost meanwhile
        return tuple(sorted(moves, key=lambda move: move.slot))

    async def _settled(self, workers: Mapping[str, int], moves: list[Move]) -> bool:
        """Move workers to where they are wanted, and note it; say whether no machine was lost meanwhile."""
        for _, seat in self._seats():
            if seat.state is SlotState.EMPTY:
                seat.wanted = False  # tried again below, if this place is chosen again
        current, target = await self._target(workers)
        whole, parts = True, changes(set(current), target)
        ended = await asyncio.gather(*(self._change(part) for part in parts), return_exceptions=True)
        for end in ended:
            if isinstance(end, BaseException):
                raise end
            moves += end.moves
            if any(isinstance(error, NodeLost) for error in end.failed.values()):
                whole = False
            else:
                self._require_serving(workers, end)
        return whole

    async def _target(self, workers: Mapping[str, int]) -> tuple[list[Assignment], set[Assignment]]:
        """Find which posts are awake, and which shall be, on machines that serve; wait for these if there are too few.

        Raises ClusterFailed, also in whoever waits for a worker, if none come in time.
        """
        while True:
            self._lost = await self._launcher.lost()
            for post, seat in self._seats():
                if self._lost.intersection(post.slots):
                    seat.wanted = False
                    if seat.state in (SlotState.IDLE, SlotState.ASLEEP):
                        seat.lose()
            serving = Counter(post.role for post in self._awake())
            growing = {role for role, count in workers.items() if count > serving[role]}
            current, nodes = self._awake(growing), self._launcher.nodes
            asleep = {post for post, seat in self._seats() if seat.worker is not None and not seat.awake}
            target = assign_fewer(current, workers, widths=self._widths, nodes=nodes, asleep=asleep, lost=self._lost)
            enough = target is not None and self.slots >= self._wanted.least
            few = None if enough else self._too_few(workers)
            for pool in self._pools.values():
                pool.broken = few
                pool.settle()
            if few is not None:
                raise few
            if target is not None and enough:
                self._few_since = None
                return current, target
            await asyncio.sleep(LOOK_SECONDS)

    def _too_few(self, workers: Mapping[str, int]) -> ClusterFailed | None:
        """Say that there have been too few slots for too long, if they have."""
        first, left = self._few_since is None, self._patience()
        have = f"{self.slots} of {len(self._launcher.nodes)} worker slots are left"
        wanted = (
            f"expected at least {self._wanted.least}"
            if self.slots < self._wanted.least
            else f"too few for {dict(workers)}"
        )
        if first:
            logger.warning("%s, %s: others are waited for, %.0f s at most", have, wanted, left)
        if left > 0:
            return None
        waited = f"for {self._wanted.wait_seconds:g} s (pools.wait_seconds)"
        return ClusterFailed(f"{have}, {wanted}, {waited}; the same command continues")

    def _patience(self) -> float:
        """Seconds for which too few slots may still be waited for."""
        now = time.monotonic()
        self._few_since = now if self._few_since is None else self._few_since
        return self._few_since + self._wanted.wait_seconds - now

    def _require_serving(self, workers: Mapping[str, int], changed: "_Changed") -> None:
        """Raise what kept a role's workers from coming if the role was to have some and has none."""
        for post, error in changed.failed.items():
            if workers.get(post.role) and not any(seat.wanted for seat in self._pools[post.role].seats.values()):
                raise type(error)(f"{error}; no other worker of {post.role} serves") from error

    async def _begin(self) -> None:
        """Set the slots aside; names of workers that an earlier process may have left are not used again."""
        if self._arranges:
            return
        await self._launcher.reserve(max(LOOK_SECONDS, self._patience()))
        self._arranges = True
        for role, pool in self._pools.items():
            for slot, generation in (await self._launcher.found(role)).items():
                pool.add(slot, generation=generation)

    async def _change(self, change: Change) -> "_Changed":
        """Let workers leave and others come to their slots; what fails is undone."""
        asked = time.monotonic()
        await asyncio.gather(*(self._pools[post.role].drain(post.first) for post in change.out))
        slept_seconds = max(await asyncio.gather(*(self._sleep(post) for post in change.out)), default=0.0)
        asleep = time.monotonic()
        woken = {post for post in change.into if self._pools[post.role].add(post.first).took}
        ended = await asyncio.gather(*(self._enter(post) for post in change.into), return_exceptions=True)
        seconds = slept_seconds + time.monotonic() - asleep
        failures = {post: end for post, end in zip(change.into, ended, strict=True) if end is not None}
        if failures:
            await self._undo(change)
        for failure in failures.values():
            if not isinstance(failure, RheostatError):
                raise failure
        failed = {post: failure for post, failure in failures.items() if isinstance(failure, RheostatError)}
        error = next((str(failure) for failure in failed.values()), None)
        return _Changed(_moves(change, woken, (seconds, asleep - asked - slept_seconds), error), failed)

    async def _undo(self, change: Change) -> None:
        """Have the slots as they were; a worker that cannot come back is tried again when work waits for it."""
        for post in change.into:
            if self._pools[post.role].add(post.first).awake:
                await self._pools[post.role].drain(post.first)
                await self._sleep(post)
        out = [post for post in change.out if not self._lost.intersection(post.slots)]
        for failure in await together([self._enter(post) for post in out]):
            logger.warning("%s; its slot stays empty", failure)
        for post in out:
            pool = self._pools[post.role]
            pool.add(post.first).wanted = True
            if pool.waiting:
                pool.fill()

    async def _enter(self, post: Assignment) -> None:
        """Start or wake a worker; one that dies on the way has others after it, as long as a start may take."""
        pool = self._pools[post.role]
        deadline = time.monotonic() + pool.spec.start_seconds
        for attempt in range(1, pool.spec.max_restarts + 2):
            try:
                await pool.enter(post.first, pool.record)
                break
            except NodeLost:
                raise
            except WorkerLost as lost:
                if attempt > pool.spec.max_restarts or time.monotonic() > deadline:
                    raise
                logger.warning("%s; attempt %d of %d was lost", lost, attempt, pool.spec.max_restarts + 1)

    async def _sleep(self, post: Assignment) -> float:
        return await self._pools[post.role].add(post.first).sleep()

    async def _look(self) -> None:
        try:
            while not self._arranges and any(pool.waiting for pool in self._pools.values()):
                finding = [
                    self._find(pool, slot, generation)
                    for role, pool in self._pools.items()
                    if pool.waiting
                    for slot, generation in (await self._launcher.found(role)).items()
                ]
                await asyncio.gather(*finding)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._looking = None

    async def _find(self, pool: Pool, slot: int, generation: int) -> None:
        """Use a worker if it is awake; one that does not say so at once is asked again at the next look."""
        seat = pool.add(slot)
        if seat.wanted:
            return
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                worker = seat.worker
                if worker is None or seat.generation != generation:
                    worker = await self._launcher.find(pool.spec, f"{pool.spec.role}-{slot}-{generation}")
                if not await worker.asleep():
                    seat.generation = generation
                    seat.use(worker)
                    pool.settle()


def _moves(change: Change, woken: Set[Assignment], took_seconds: tuple[float, float], error: str | None) -> list[Move]:
    """Tell a change slot by slot; `took_seconds` are those of moving and of draining."""
    before = {slot: post.role for post in change.out for slot in post.slots}
    after = {slot: post for post in change.into for slot in post.slots}
    seconds, drain_seconds = took_seconds
    return [
        Move(
            slot=slot,
            before=before.get(slot),
            after=after[slot].role if slot in after else None,
            how="sleep" if slot not in after else "wake" if after[slot] in woken else "start",
            seconds=seconds,
            drain_seconds=drain_seconds,
            error=error,
        )
        for slot in sorted({*before, *after})
    ]
