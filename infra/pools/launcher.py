"""Interfaces of workers and of launchers, which start workers. They do not depend on where the workers run.

Queueing, retries and changes of roles are the same everywhere. `Pool`, `Fleet` and `RankGroup` start each `Worker`
through a `Launcher`, and then call the worker. worker.py and placement_group.py implement the interfaces for Ray, and
threads.py implements them for threads of this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rheostat.infra.pools.host import ProcessPlace, Returned
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import PoolSpec


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Required number of worker slots in a fleet, and the time to wait for them. Slots are places for one worker each.
    Machines with slots may join and leave the cluster."""

    max_slots: int
    initial_slots: int = 1
    """Number of slots that must be reserved before any worker starts."""
    min_slots: int = 1
    """Minimum number of slots with which the run continues after machines have left."""
    wait_seconds: float = 180
    """Maximum time in seconds to wait while there are fewer than `min_slots` slots."""


class Worker(Protocol):
    """Live worker that runs one work unit at a time. This interface is implemented by `WorkerProcess` and
    `WorkerThread`, and used by pools."""

    @property
    def name(self) -> str:
        """Unique name of the worker: its role, its slot and its generation (the number of the worker process in this
        slot)."""
        ...

    @property
    def place(self) -> ProcessPlace:
        """Location of the process in which the worker runs."""
        ...

    @property
    def is_owned(self) -> bool:
        """Whether this process started the worker and must end it."""
        ...

    async def perform(self, method: str, *arguments: object, clock: StallClock) -> Returned:
        """Run a method of the worker and return its result. Raises the error that the method raised, or WorkerLost if
        the worker died or the clock has run out."""
        ...

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Make the worker accept work again. If the record is not None, the worker first processes it with its method
        `take`, for example to load a model."""

    async def sleep(self, *, stall_seconds: float) -> float:
        """Wait until the worker has finished its current work, and make it free its memory. Return the seconds that
        freeing the memory took."""
        ...

    async def asleep(self) -> bool:
        """Return whether the worker is asleep. A sleeping worker refuses work until it is woken."""
        ...

    def prefetch(self, record: object) -> None:
        """Send the worker a record of work that it may do next, so that it can download the inputs in advance. Returns
        without waiting for a response."""

    async def free_port(self) -> int:
        """Return an unused network port on the worker's machine."""
        ...

    async def stop(self) -> None:
        """Let a worker without work close its resources, and then end it."""

    def kill(self) -> None:
        """End the worker immediately, if this kind of worker can be killed. The result of its current work is lost."""

    async def await_exit(self) -> None:
        """Wait until a killed worker has released its memory. Return immediately if this process cannot find out."""

    async def wait_ended(self) -> None:
        """Return when the worker has ended."""


class Launcher(Protocol):
    """Object that starts workers, and finds workers that other processes have started. There is one
    implementation for Ray and one for threads."""

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> Worker:
        """Start a worker. `slot` is the index of the reserved slot in which it runs, or None. A worker in a slot is
        asleep until it is woken."""
        ...

    async def find(self, spec: PoolSpec, name: str) -> Worker:
        """Return the worker with this name, which another process has started. Raises WorkerLost if the worker no
        longer exists."""
        ...

    async def list_generations(self, role: str) -> Mapping[int, int]:
        """Return the latest generation of each worker of a role, by index of the worker. The generation counts the
        processes that have replaced the worker."""
        ...


class SlotLauncher(Launcher, Protocol):
    """Launcher for the workers of a fleet. It reserves slots (places for one worker each), and starts workers in
    them."""

    @property
    def nodes(self) -> Sequence[str]:
        """Name of the machine (node) of each slot, available after the slots are reserved. Slots on the same node have
        consecutive indices."""
        ...

    async def list_lost_slots(self) -> frozenset[int]:
        """Return the indices of the slots whose machine is not available. A slot that was moved to another machine is
        not lost."""
        ...

    async def reserve(self, wait_seconds: float) -> None:
        """Reserve the initial slots, and wait for them. Raises ClusterFailed if they are not available within
        `wait_seconds`."""

    def release(self) -> None:
        """Release the reserved slots."""
