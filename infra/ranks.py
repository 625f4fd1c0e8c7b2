"""Workers that only work together: the ranks of a collective."""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TypeVar

from infra.actors import Returned
from infra.errors import WorkerFailed, WorkerLost
from infra.workers import Done, PoolSpec, Worker, checked, find_worker, start_worker, together

R = TypeVar("R")

logger = logging.getLogger(__name__)

PEER_SECONDS = 3.0
"""How long a rank that raised waits for its peers' fate: a lost peer explains a broken connection."""


async def _all_or_first_failure(calls: Sequence[Coroutine[object, object, Returned]]) -> list[Returned]:
    """Await all; when one fails, give its peers a moment: a loss explains what the others raise."""
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
    """Run work on all ranks at once. Belongs to one event loop.

    Ranks are given `join(rank, world_size, master_address, master_port)` when they start. When one is lost the others
    hang in a collective: all are killed, started afresh and the work is done again.
    """

    def __init__(self, spec: PoolSpec) -> None:
        """Make a group without processes."""
        self.spec = spec
        self.restarts = 0
        self.busy_seconds = 0.0
        self._generation = -1
        self._ranks: list[Worker] = []
        self._turn = asyncio.Lock()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, rank 0's first; none after a failure, until the next work."""
        return tuple(rank.place.pid for rank in self._ranks)

    async def open(self, found: Mapping[int, int]) -> None:
        """Take over the ranks found (rank → generation) if they are complete, else start all."""
        self._generation = max(found.values(), default=-1)
        whole = [rank for rank, generation in sorted(found.items()) if generation == self._generation]
        if whole == list(range(self.spec.size)):
            self._ranks = [await find_worker(self.spec, self._name(rank)) for rank in whole]
        else:
            await self._start()

    async def run(self, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Run one method on every rank; the result is rank 0's, and the time that of the slowest.

        Cancelling kills the ranks; the next work starts new ones.
        """
        asked = time.monotonic()
        async with self._turn:
            for attempt in itertools.count(1):
                try:
                    if not self._ranks:
                        await self._start()
                    first = self._ranks[0]
                    outcomes = await self._together(method, work)
                    break
                except WorkerLost as lost:
                    if attempt > self.spec.max_restarts:
                        message = f"{lost}; {self.spec.role}.{method} given up after attempt {attempt}"
                        raise type(lost)(message) from lost
                    self.restarts += 1
                    logger.warning("%s; attempt %d of %d was lost", lost, attempt, self.spec.max_restarts + 1)
        result = checked(outcomes[0], returns, what=f"{self.spec.role}.{method}")
        seconds = max(outcome.seconds for outcome in outcomes)
        waited, place = time.monotonic() - asked - seconds, first.place
        return Done(result, seconds, max(0.0, waited), attempt, first.name, place.pid, place.host)

    async def close(self) -> None:
        """End the ranks that this process started: idle ones may close what they hold, busy ones are killed."""
        ranks, self._ranks = self._ranks, []
        ranks = [rank for rank in ranks if rank.ours]
        if self._turn.locked():
            for rank in ranks:
                rank.kill()
        else:
            await asyncio.gather(*(rank.stop() for rank in ranks))

    def _name(self, rank: int) -> str:
        return f"{self.spec.role}-{rank}-{self._generation}"

    async def _start(self) -> None:
        """Start all ranks and let them join; a port taken meanwhile is a lost start, no fault of the work."""
        self._generation += 1
        starts = [start_worker(self.spec, self._name(rank)) for rank in range(self.spec.size)]
        self._ranks, failures = await together(starts)
        try:
            if failures:
                raise failures[0]
            address, port = self._ranks[0].place.address, await self._ranks[0].free_port()
            joins = [
                rank.perform("join", index, self.spec.size, address, port, stall_seconds=self.spec.start_seconds)
                for index, rank in enumerate(self._ranks)
            ]
            async with asyncio.timeout(self.spec.start_seconds):
                await _all_or_first_failure(joins)
        except WorkerFailed as error:
            self._kill()
            if failures:
                raise
            raise WorkerLost(f"{self.spec.role} ranks could not join at {address}:{port}: {error}") from error
        except TimeoutError:
            self._kill()
            raise WorkerLost(f"{self.spec.role} ranks did not join within {self.spec.start_seconds:g} s") from None
        except BaseException:
            self._kill()
            raise

    async def _together(self, method: str, work: object) -> list[Returned]:
        started = time.monotonic()
        try:
            return await _all_or_first_failure(
                [rank.perform(method, work, stall_seconds=self.spec.stall_seconds) for rank in self._ranks]
            )
        except BaseException:
            self._kill()
            raise
        finally:
            self.busy_seconds += (time.monotonic() - started) * self.spec.size

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
