"""Interfaces of workers and of the launchers that start them, independent of where workers run.

Queueing, retries and changes of roles are the same everywhere: `Pool`, `Fleet` and `RankGroup` let a `Launcher` start
each `Worker`, and then call the worker. The implementations for Ray are in worker.py and placement_group.py. The
implementations for threads of this process are in threads.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.pools.host import ProcessPlace, Returned
from infra.pools.worker import PoolSpec


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Number of slots of a fleet whose machines may join and leave."""

    max_slots: int
    initial_slots: int = 1
    """Number of slots that the fleet reserves before it starts."""
    min_slots: int = 1
    """Minimum number of slots that the fleet needs to continue after machines have left."""
    wait_seconds: float = 180
    """Seconds for which the fleet waits for more slots if it has fewer than this minimum."""


class Worker(Protocol):
    """Live worker that runs one work unit at a time, as seen by a pool."""

    @property
    def name(self) -> str:
        """Unique name of the worker, which contains its role, its slot and its generation (number of replacements)."""
        ...

    @property
    def place(self) -> ProcessPlace:
        """Location of the worker's process."""
        ...

    @property
    def is_owned(self) -> bool:
        """Whether this process started the worker and must end it."""
        ...

    async def perform(self, method: str, *arguments: object, stall_seconds: float) -> Returned:
        """Run a method of the worker. Raises the method's error, or WorkerLost if the worker died or stalled."""
        ...

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Let the worker accept work again. Before, its method `take` is called with the record unless it is None."""

    async def sleep(self, *, stall_seconds: float) -> float:
        """Let the worker free its memory after its current work. Return the seconds that freeing the memory took."""
        ...

    async def asleep(self) -> bool:
        """Return whether the worker refuses work until its fleet wakes it."""
        ...

    def prefetch(self, record: object) -> None:
        """Announce a record that the worker may need next, so that it can download inputs. The call does not wait for a
        response."""

    async def free_port(self) -> int:
        """Return a free port on the worker's machine."""
        ...

    async def stop(self) -> None:
        """Let an idle worker close its resources, then end it."""

    def kill(self) -> None:
        """End the worker immediately if the worker can be killed. Its current work is lost."""

    async def await_exit(self) -> None:
        """Wait until a killed worker has released its memory, if this process can observe that."""

    async def wait_ended(self) -> None:
        """Return when the worker has ended."""


class Launcher(Protocol):
    """Launcher of new workers, which also finds workers that other processes have started."""

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> Worker:
        """Start a worker. In a slot of a fleet, the worker is asleep until it is woken."""
        ...

    async def find(self, spec: PoolSpec, name: str) -> Worker:
        """Return a worker that another process has started. Raises WorkerLost if it is gone."""
        ...

    async def list_generations(self, role: str) -> Mapping[int, int]:
        """Return the newest generation (number of replacements) of each worker of a role, by index of the worker."""
        ...


class SlotLauncher(Launcher, Protocol):
    """Launcher of workers in the slots of a fleet."""

    @property
    def nodes(self) -> Sequence[str]:
        """Node of each slot, known after the reservation. Slots on the same node are adjacent."""
        ...

    async def list_lost_slots(self) -> frozenset[int]:
        """Return the slots whose machine is not available. Slots that were moved to another machine are not
        included."""
        ...

    async def reserve(self, wait_seconds: float) -> None:
        """Wait until the initial slots of the fleet are reserved. Raises ClusterFailed after `wait_seconds`."""

    def release(self) -> None:
        """Release the reserved slots."""
