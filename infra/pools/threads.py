"""A cluster of threads in this process: the same workers, without Ray and without a process to start.

For notebooks and tests. Each worker is an object that a thread of its own constructs and asks, one piece of work after
another; its counter is read meanwhile. A thread cannot be killed: a worker that stands still is reported and not
replaced, and one that is busy when the cluster closes ends its work first. Nothing is gained in speed but the starts:
Python runs one thread at a time, and what a worker changes in the process, all see.
"""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from infra.errors import BadInput, WorkerFailed, WorkerLost
from infra.pools.fleet import Fleet
from infra.pools.host import Host, ProcessPlace, Raised, Returned, environment, thread_variables
from infra.pools.launcher import SlotCount
from infra.pools.pool import Pool
from infra.pools.ranks import JOIN, RankGroup
from infra.pools.worker import PoolSpec, checked, unwrapped

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STARTING = threading.Lock()
"""Held while a worker is constructed or joins: it imports then, and modules that import each other do not bear two."""


class WorkerThread:
    """One worker in a thread of this process."""

    ours = True

    def __init__(self, spec: PoolSpec, name: str, *, asleep: bool) -> None:
        """Start the thread, without a worker yet; `asleep` it takes no work until `wake`."""
        self.role = spec.role
        self.name = name
        self.place = _here()
        self._spec = spec
        self._stalled = False
        self._host = Host(asleep=asleep)
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def construct(self) -> None:
        """Construct the worker in its thread. Raises WorkerLost if it is not ready in time."""
        spec = self._spec
        constructing = self._begin(lambda: self._host.construct(spec.target, spec.options), alone=True)
        try:
            outcome = await asyncio.wait_for(constructing, spec.start_seconds)
            unwrapped(outcome, f"{spec.role}: {spec.target}(...)", self.place.pid)
        except TimeoutError:
            self._stalled = True
            self.kill()
            what = f"{spec.role} worker {self.name}"
            raise WorkerLost(f"{what} was not ready within {spec.start_seconds:g} s ({spec.target})") from None
        except BaseException:
            self.kill()
            raise

    async def perform(self, method: str, *arguments: object, stall_seconds: float) -> Returned:
        """Run a method; raise what it raised, or `WorkerFailed` when it stood still."""
        return await self._answer(lambda: self._host.run(method, arguments), method, stall_seconds)

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Let it take work again; it `take`s the record first, if there is one."""
        outcome = await self._answer(lambda: self._host.wake(record), "take", stall_seconds)
        if record is not None:
            checked(outcome, str, what=f"{self.role}.take")

    async def sleep(self, *, stall_seconds: float) -> float:
        """Let it give its memory back after the work under way; return the seconds that this alone took."""
        return (await self._answer(self._host.sleep, "sleep", stall_seconds)).seconds

    async def asleep(self) -> bool:
        """Ask whether it refuses work until its fleet wakes it."""
        return self._host.asleep()

    def foresee(self, record: object) -> None:
        """Tell it of what may come next."""
        self._host.foresee(record)

    async def free_port(self) -> int:
        """Find a free port of this machine."""
        return self._host.free_port()

    async def stop(self) -> None:
        """Let it close what it holds after the work under way, and wait for its thread."""
        self.kill()
        await self.leave()

    async def leave(self) -> None:
        """Wait for its thread as long as the work under way advances."""
        with contextlib.suppress(WorkerFailed):
            if not self._stalled:
                await self._watch(asyncio.wrap_future(self._ended), f"worker {self.name}", self._spec.stall_seconds)
                self._thread.join(POLL_SECONDS)  # it has nothing left to do but to return

    def kill(self) -> None:
        """Take no more work; what is under way goes on, and nobody gets its result."""
        self._works.put(None)

    async def gone(self) -> None:
        """Return at once: a thread that still works cannot be waited for without an end."""

    async def end(self) -> None:
        """Return when its thread has ended."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work()
        try:
            self._host.stop()
        except Exception as error:  # its thread ends here: nobody else could be told
            logger.warning("worker %s did not close in order: %s", self.name, error)
        self._host = Host(asleep=True)  # the worker's memory is free, whoever still knows its thread
        self._ended.set_result(None)

    def _begin(self, body: Callable[[], T], *, alone: bool) -> "asyncio.Future[T]":
        """Have the thread do something after all that it was given before; `alone`, while no other worker starts."""
        answer: Future[T] = Future()

        def work() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    with STARTING if alone else contextlib.nullcontext():
                        answer.set_result(body())
                except BaseException as error:
                    answer.set_exception(error)

        self._works.put(work)
        return asyncio.wrap_future(answer)

    async def _answer(self, body: Callable[[], Returned | Raised], method: str, stall_seconds: float) -> Returned:
        answer = self._begin(body, alone=method == JOIN)
        try:
            await self._watch(answer, f"{self.role}.{method} (thread {self.name})", stall_seconds)
            return unwrapped(answer.result(), f"{self.role}.{method}", self.place.pid)
        finally:
            answer.cancel()

    async def _watch(self, answer: "asyncio.Future[T]", what: str, stall_seconds: float) -> None:
        """Wait for the answer as long as the counter moves."""
        count, moved = self._host.progress(), time.monotonic()
        while not (await asyncio.wait({answer}, timeout=min(POLL_SECONDS, stall_seconds / 4)))[0]:
            seen = self._host.progress()
            if seen != count:
                count, moved = seen, time.monotonic()
            elif time.monotonic() - moved >= stall_seconds:
                self._stalled = True
                raise WorkerFailed(
                    f"{what} made no progress for {stall_seconds:g} s: its counter stands at {count}; a thread cannot "
                    "be killed, so end this process and start it again"
                )


@dataclass(frozen=True, slots=True)
class ThreadLauncher:
    """Start workers as threads of this process; all slots are on one node."""

    slots: int = 0
    started: list[WorkerThread] = field(default_factory=list)

    @property
    def nodes(self) -> Sequence[str]:
        """This process, for each slot."""
        return ["here"] * self.slots

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerThread:
        """Start a thread with its worker; in a slot, it is asleep until it is woken."""
        worker = WorkerThread(spec, name, asleep=slot is not None)
        self.started.append(worker)
        await worker.construct()
        return worker

    async def find(self, spec: PoolSpec, name: str) -> WorkerThread:
        """Find nothing: no other process has workers here."""
        raise WorkerLost(f"{spec.role} worker {name} is in no thread of this process")

    async def found(self, role: str) -> dict[int, int]:
        """Look up what other processes have started: nothing."""
        return {}

    async def lost(self) -> frozenset[int]:
        """Tell which slots have gone with their machine: none without this process."""
        return frozenset()

    async def reserve(self, wait_seconds: float) -> None:
        """Set nothing aside: there are always as many threads as it takes."""

    def remove(self) -> None:
        """Give nothing back."""


@dataclass(frozen=True, slots=True)
class ThreadCluster:
    """The pools of one run, in threads of this process."""

    address: None = None
    """No other process finds them."""
    _members: list[Pool | Fleet | RankGroup] = field(default_factory=list)
    _started: list[WorkerThread] = field(default_factory=list)

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(*, threads: int) -> "AsyncIterator[ThreadCluster]":
        """Host workers in threads, each of which computes with so many; all have ended with the context."""
        cluster = ThreadCluster()
        with environment(thread_variables(threads, gpus=0, devices=())):
            try:
                yield cluster
            finally:
                await asyncio.gather(*(member.close() for member in cluster._members))
                await asyncio.gather(*(worker.leave() for worker in cluster._started))

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool whose workers have started."""
        pool = Pool(spec, self._launcher())
        await pool.open()
        self._members.append(pool)
        return pool

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus_per_slot: float) -> Fleet:
        """Return worker slots that these roles share; nothing starts before they are arranged."""
        if gpus_per_slot:
            raise BadInput(f"threads have no GPUs of their own, expected 0 per worker slot, got {gpus_per_slot:g}")
        fleet = Fleet(specs, self._launcher(slots.most), slots)
        self._members.append(fleet)
        return fleet

    async def ranks(self, spec: PoolSpec) -> RankGroup:
        """Return a group of one rank. Raises BadInput for more: ranks of a collective are processes."""
        if spec.size > 1:
            raise BadInput(f"{spec.role}: {spec.size} ranks are as many processes, and threads are in one: expected 1")
        group = RankGroup(spec, self._launcher())
        await group.open()
        self._members.append(group)
        return group

    def _launcher(self, slots: int = 0) -> ThreadLauncher:
        return ThreadLauncher(slots, self._started)


def _here() -> ProcessPlace:
    process, host = psutil.Process(), socket.gethostname()
    return ProcessPlace(os.getpid(), process.create_time(), node="here", host=host, address="127.0.0.1", job="here")
