"""Cluster that consists of threads in this process. It runs the same workers as a Ray cluster, without starting
processes.

This cluster is meant for notebooks and tests. Each worker has a thread, which creates the worker and runs its work
units one after another. A worker's progress counter can be read while the worker is busy. A thread cannot be killed.
Therefore a stalled worker is reported but not replaced, and a busy worker finishes its work when the cluster closes.
Workers start faster than on Ray but do not compute faster, because Python runs one thread at a time. If a worker
changes global state of the process, all workers are affected.
"""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from rheostat.infra.errors import BadInput, WorkerFailed, WorkerLost
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.gpu_layout import NO_GPUS, GpuLayout
from rheostat.infra.pools.host import (
    Host,
    ProcessPlace,
    Raised,
    Returned,
    environment,
    start_seconds,
    thread_variables,
)
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.ranks import JOIN, RankGroup
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import PoolSpec, check_result, unwrap_result

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STARTING = threading.Lock()
"""Lock that is held while a worker is created or joins a process group. Parallel imports of modules that import each
other could fail."""


class WorkerThread:
    """Worker that runs in a thread of this process."""

    is_owned = True

    def __init__(self, spec: PoolSpec, name: str, *, asleep: bool) -> None:
        """Start the thread without creating the worker. With `asleep`, no work is accepted until `wake` is called."""
        self.role = spec.role
        self.name = name
        self.place = _here()
        self._spec = spec
        self._stalled = False
        self._host = Host(asleep=asleep, shares_gpu=spec.shares_gpu)
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def construct(self) -> None:
        """Create the worker object in the worker's thread. Raises WorkerLost if this takes longer than
        `start_seconds`."""
        spec = self._spec
        constructing = self._begin(lambda: self._host.construct(spec.target, spec.options), alone=True)
        try:
            outcome = await asyncio.wait_for(constructing, spec.start_seconds)
            unwrap_result(outcome, f"{spec.role}: {spec.target}(...)", self.place.pid)
        except TimeoutError:
            self._stalled = True
            self.kill()
            what = f"{spec.role} worker {self.name}"
            seconds = f"{spec.start_seconds:g} s. Raise pools.start_seconds if it only needs more time"
            raise WorkerLost(f"{what} ({spec.target}) did not start within {seconds}") from None
        except BaseException:
            self.kill()
            raise

    async def perform(self, method: str, *arguments: object, clock: StallClock) -> Returned:
        """Run a method of the worker and return its result. Raises the error that the method raised, or WorkerFailed if
        the clock has run out."""
        return await self._answer(lambda: self._host.run(method, arguments), method, clock)

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Make the worker accept work again. If the record is not None, the worker first processes it with its method
        `take`, for example to load a model."""
        outcome = await self._answer(lambda: self._host.wake(record), "take", StallClock(stall_seconds))
        if record is not None:
            check_result(outcome, str, what=f"{self.role}.take")

    async def sleep(self, *, stall_seconds: float) -> float:
        """Wait until the worker has finished its current work, and make it free its memory. Return the seconds that
        freeing the memory took."""
        return (await self._answer(self._host.sleep, "sleep", StallClock(stall_seconds))).seconds

    async def asleep(self) -> bool:
        """Return whether the worker is asleep. A sleeping worker refuses work until it is woken."""
        return self._host.asleep()

    def prefetch(self, record: object) -> None:
        """Send the worker a record of work that it may do next, so that it can download the inputs in advance."""
        self._host.prefetch(record)

    async def free_port(self) -> int:
        """Return an unused port on this machine."""
        return self._host.free_port()

    async def stop(self) -> None:
        """Let the worker finish its work and close its resources, then wait until its thread has ended."""
        self.kill()
        await self.leave()

    async def leave(self) -> None:
        """Wait until the worker's thread has ended. Give up if the worker's current work makes no more progress."""
        with contextlib.suppress(WorkerFailed):
            if not self._stalled:
                clock = StallClock(self._spec.stall_seconds)
                await self._watch(asyncio.wrap_future(self._ended), f"worker {self.name}", clock)
                self._thread.join(POLL_SECONDS)  # only the thread's return is left

    def kill(self) -> None:
        """Stop accepting work. The current work continues, because a thread cannot be killed, but its result is
        discarded."""
        self._works.put(None)

    async def await_exit(self) -> None:
        """Return immediately. A thread cannot be killed, so waiting for a busy worker might never end."""

    async def wait_ended(self) -> None:
        """Return when the worker's thread has ended."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work()
        try:
            self._host.stop()
        except Exception as error:  # the thread ends here, so no caller can get this error
            logger.warning("worker %s raised an error when it was closed: %s", self.name, error)
        self._host = Host(asleep=True)  # frees the worker's memory even if other objects refer to its thread
        self._ended.set_result(None)

    def _begin(self, body: Callable[[], T], *, alone: bool) -> "asyncio.Future[T]":
        """Queue a call for the worker's thread, and return a future with its result. If `alone` is true, no other
        worker is created and none joins a process group during the call."""
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

    async def _answer(self, body: Callable[[], Returned | Raised], method: str, clock: StallClock) -> Returned:
        answer = self._begin(body, alone=method == JOIN)
        try:
            await self._watch(answer, f"{self.role}.{method} (thread {self.name})", clock)
            return unwrap_result(answer.result(), f"{self.role}.{method}", self.place.pid)
        finally:
            answer.cancel()

    async def _watch(self, answer: "asyncio.Future[T]", what: str, clock: StallClock) -> None:
        """Wait for the result of a call. Raises WorkerFailed if the clock has run out. `what` names the call in the
        message."""
        while not (await asyncio.wait({answer}, timeout=min(POLL_SECONDS, clock.seconds / 4)))[0]:
            count = self._host.progress()
            clock.report(self.name, count)
            if clock.remaining <= 0:
                self._stalled = True
                raise WorkerFailed(
                    f"{what} made no progress for {clock.seconds:g} s (progress counter: {count}). A thread cannot be "
                    "killed. End this process and start it again. If one step of the work takes longer, raise "
                    "pools.stall_seconds."
                )


@dataclass(frozen=True, slots=True)
class ThreadLauncher:
    """Launcher that starts workers as threads of this process. All slots are on one node, this machine."""

    slots: int = 0
    started: list[WorkerThread] = field(default_factory=list)

    @property
    def nodes(self) -> Sequence[str]:
        """Node of each slot. All slots have the same node, because they are in this process."""
        return ["here"] * self.slots

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerThread:
        """Start a thread with a worker. `slot` is the index of the slot in which it runs, or None. A worker in a slot
        is asleep until it is woken."""
        worker = WorkerThread(spec, name, asleep=slot is not None)
        self.started.append(worker)
        await worker.construct()
        return worker

    async def find(self, spec: PoolSpec, name: str) -> WorkerThread:
        """Raise WorkerLost. There is nothing to find, because no other process can start workers in this process."""
        raise WorkerLost(
            f"the {spec.role} worker {name} was requested from another process, but workers of pools.cluster = "
            "'threads' exist only in the process that started them"
        )

    async def list_generations(self, role: str) -> dict[int, int]:
        """Return an empty mapping, because no other process can start workers in this process."""
        return {}

    async def list_lost_slots(self) -> frozenset[int]:
        """Return an empty set, because slots in this process cannot be lost."""
        return frozenset()

    async def reserve(self, wait_seconds: float) -> None:
        """Do nothing, because threads need no reservation."""

    def release(self) -> None:
        """Do nothing, because no slots were reserved."""


@dataclass(frozen=True, slots=True)
class ThreadCluster:
    """Worker pools of one run, with workers that are threads of this process. Used in notebooks and tests."""

    address: None = None
    """Address of the cluster for other processes. It is always None, because other processes cannot use threads of this
    process."""
    _members: list[Pool | Fleet | RankGroup] = field(default_factory=list)
    _started: list[WorkerThread] = field(default_factory=list)

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(*, threads: int) -> "AsyncIterator[ThreadCluster]":
        """Open the worker pools and run the block. Each worker computes with `threads` CPU threads. All workers are
        ended afterwards."""
        cluster = ThreadCluster()
        with environment(thread_variables(threads, gpus=0, devices=())):
            try:
                yield cluster
            finally:
                await asyncio.gather(*(member.close() for member in cluster._members))
                await asyncio.gather(*(worker.leave() for worker in cluster._started))

    async def pool(self, spec: PoolSpec) -> Pool:
        """Start the workers of one role, and return their pool."""
        pool = Pool(spec, self._launcher())
        await pool.open()
        self._members.append(pool)
        return pool

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus: GpuLayout = NO_GPUS) -> Fleet:
        """Return a fleet: worker slots (places for one worker each) that several roles share. Workers start when
        `Fleet.arrange` assigns slots to their role. Raises BadInput if the slots require GPUs."""
        if gpus.per_slot:
            raise BadInput(
                f"pools.gpus_per_worker is {gpus.per_slot:g}, but the workers of pools.cluster = 'threads' cannot "
                "reserve GPUs. Set it to 0, or set pools.cluster = 'ray'."
            )
        fleet = Fleet(specs, self._launcher(slots.max_slots), slots)
        self._members.append(fleet)
        return fleet

    async def ranks(
        self, spec: PoolSpec, *, gpus: GpuLayout = NO_GPUS, fleet: Fleet | None = None, wait_seconds: float = 180
    ) -> RankGroup:
        """Return a group with one rank for the update. Raises BadInput if `spec` requires several ranks, because each
        rank needs a separate process."""
        if spec.size > 1:
            raise BadInput(
                f"pools.update_ranks is {spec.size}, and {spec.role} ranks are separate processes, but pools.cluster "
                "= 'threads' has only one process. Set pools.update_ranks = 1, or pools.cluster = 'ray'."
            )
        group = RankGroup(spec, self._launcher())
        await group.open()
        self._members.append(group)
        return group

    def _launcher(self, slots: int = 0) -> ThreadLauncher:
        return ThreadLauncher(slots, self._started)


def _here() -> ProcessPlace:
    process, host = psutil.Process(), socket.gethostname()
    return ProcessPlace(os.getpid(), start_seconds(process), node="here", host=host, address="127.0.0.1", job="here")
