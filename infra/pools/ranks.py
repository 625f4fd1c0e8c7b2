"""Group of workers that run every work unit together, as the ranks of a distributed process group."""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Protocol, TypeVar

from rheostat.infra.counts import format_count
from rheostat.infra.errors import ClusterFailed, WorkerFailed, WorkerLost
from rheostat.infra.pools.host import Returned
from rheostat.infra.pools.launcher import Launcher, Worker
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import Done, PoolSpec, check_result, gather_errors

R = TypeVar("R")

logger = logging.getLogger(__name__)

JOIN = "join"
"""Name of the worker method that adds a rank to the process group."""

PEER_SECONDS = 3.0
"""Maximum time in seconds to wait for the results of the other ranks after one rank has failed. Its failure is often a
broken connection to a rank that died, and the death is the better error to report."""


class RankPlaces(Protocol):
    """Places where the ranks of a group run, such as GPUs."""

    async def launchers(self) -> Sequence[Launcher]:
        """Choose a place for each rank, and return the launcher that starts the rank there."""
        ...

    def release(self) -> None:
        """Release reserved places that only the ranks use."""


async def _all_or_first_failure(calls: Sequence[Coroutine[object, object, Returned]]) -> list[Returned]:
    """Await all calls and return their results. If a call fails, wait up to `PEER_SECONDS` for the other calls. Then
    raise the first WorkerLost, or the first other error if there is no WorkerLost."""
    tasks = [asyncio.create_task(call) for call in calls]
    failures: list[BaseException] = []
    pending, deadline = set(tasks), float("inf")
    try:
        while pending and time.monotonic() < deadline and not any(isinstance(error, WorkerLost) for error in failures):
            patience = None if deadline == float("inf") else deadline - time.monotonic()
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors and not failures:
                deadline = time.monotonic() + PEER_SECONDS
            failures += errors
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    if failures:
        raise next((error for error in failures if isinstance(error, WorkerLost)), failures[0])
    return [task.result() for task in tasks]


class RankGroup:
    """Group of ranks (the worker processes of a distributed update). All ranks run each work unit at the same time. Use
    a group in one event loop only.

    When a rank starts, its method `join(rank, world_size, master_address, master_port)` is called. If a rank is lost,
    the other ranks wait forever in a collective operation. Then all ranks are killed and started again, and the work
    unit is repeated. The same happens if no rank makes progress for `stall_seconds`. A rank may wait longer than this
    for a rank that makes progress, for example while rank 0 writes a large model.
    """

    def __init__(self, spec: PoolSpec, launcher: Launcher, places: RankPlaces | None = None) -> None:
        """Create a group without starting any processes. If `places` is None, `launcher` starts all ranks."""
        self.spec = spec
        self._launcher = launcher
        self._places = places
        self.restarts = 0
        self.busy_seconds = 0.0
        self._generation = -1
        self._ranks: dict[int, Worker] = {}
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in the order of the ranks. After a failure this is empty until the next work unit starts new
        ranks."""
        return tuple(worker.place.pid for _, worker in sorted(self._ranks.items()))

    @property
    def has_reserved_places(self) -> bool:
        """Whether the ranks run in reserved places, such as GPUs."""
        return self._places is not None

    async def open(self) -> None:
        """Start the group. If another process has started all ranks, use these ranks. Otherwise start new ranks."""
        generations = await self._launcher.list_generations(self.spec.role)
        self._generation = max(generations.values(), default=-1)
        ranks = [rank for rank, generation in sorted(generations.items()) if generation == self._generation]
        if ranks == list(range(self.spec.size)):
            self._ranks = {rank: await self._launcher.find(self.spec, self._name(rank)) for rank in ranks}
        else:
            await self._start()

    async def run(self, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Run a method with the argument `work` on every rank. Return the result of rank 0, which must have the type
        `returns`, with the duration of the slowest rank.

        If the call is cancelled, the ranks are killed, and the next work unit starts new ranks. Raises WorkerLost if
        ranks were lost more than `max_restarts` times, WorkerFailed if the result does not have the type `returns`, and
        the errors that ranks raise.
        """
        began = time.monotonic()
        async with self._turn:
            for attempt in itertools.count(1):
                if self._closed:
                    raise ClusterFailed(f"work was requested after the {self.spec.role} ranks were closed")
                try:
                    if not self._ranks:
                        await self._start()
                    first = self._ranks[0]
                    outcomes = await self._together(method, work)
                    break
                except WorkerLost as lost:
                    if attempt > self.spec.max_restarts:
                        attempts = format_count(attempt, "attempt")
                        what = f"The work {self.spec.role}.{method} has failed in {attempts} and is not run again"
                        raise type(lost)(f"{lost}. {what}. Raise pools.max_restarts for more attempts.") from lost
                    self.restarts += 1
                    logger.warning(
                        "%s. Attempt %d of %d failed, so the work is run again.",
                        lost,
                        attempt,
                        self.spec.max_restarts + 1,
                    )
        result = check_result(outcomes[0], returns, what=f"{self.spec.role}.{method}")
        seconds = max(outcome.seconds for outcome in outcomes)
        waited, place = time.monotonic() - began - seconds, first.place
        return Done(result, seconds, max(0.0, waited), attempt, first.name, place.pid, place.host)

    async def close(self) -> None:
        """End the ranks that this process has started. Idle ranks close their resources first. Busy ranks are
        killed."""
        self._closed = True
        if self._turn.locked():
            self._kill()
        ranks, self._ranks = self._ranks, {}
        await asyncio.gather(*(worker.stop() for worker in ranks.values() if worker.is_owned))
        if self._places is not None:
            self._places.release()

    def _name(self, rank: int) -> str:
        return f"{self.spec.role}-{rank}-{self._generation}"

    async def _start(self) -> None:
        """Start all ranks and let them join the process group. If one of them fails, kill all ranks and raise the
        error."""
        self._generation += 1
        launchers = [self._launcher] * self.spec.size if self._places is None else await self._places.launchers()
        try:
            failures = await gather_errors([self._start_rank(rank, each) for rank, each in enumerate(launchers)])
            if failures:
                raise failures[0]
            async with asyncio.timeout(self.spec.start_seconds):
                await self._join()
        except TimeoutError:
            self._kill()
            raise WorkerLost(
                f"the {self.spec.role} ranks did not connect to each other within {self.spec.start_seconds:g} s. Raise "
                "pools.start_seconds if the machine is only slow"
            ) from None
        except BaseException:
            self._kill()
            raise

    async def _start_rank(self, rank: int, launcher: Launcher) -> None:
        self._ranks[rank] = await launcher.start(self.spec, self._name(rank), slot=None)

    async def _join(self) -> None:
        """Let the ranks join a process group, at an unused port on the machine of rank 0. Raises WorkerLost if another
        process has taken the port in the meantime."""
        address, port = self._ranks[0].place.address, await self._ranks[0].free_port()
        size, clock = self.spec.size, StallClock(self.spec.start_seconds)
        joins = [
            worker.perform(JOIN, rank, size, address, port, clock=clock) for rank, worker in sorted(self._ranks.items())
        ]
        try:
            await _all_or_first_failure(joins)
        except WorkerFailed as error:
            raise WorkerLost(
                f"the {self.spec.role} ranks could not connect to each other at {address}:{port}: {error}. Make this "
                "address reachable from the machines of all ranks"
            ) from error

    async def _together(self, method: str, work: object) -> list[Returned]:
        started, clock = time.monotonic(), StallClock(self.spec.stall_seconds)
        try:
            return await _all_or_first_failure(
                [worker.perform(method, work, clock=clock) for _, worker in sorted(self._ranks.items())]
            )
        except BaseException:
            self._kill()
            raise
        finally:
            self.busy_seconds += (time.monotonic() - started) * self.spec.size

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, {}
        for worker in ranks.values():
            worker.kill()
