"""What a worker is to the pools, wherever it lives, and who starts it.

Queueing, retries and moves are the same everywhere: `Pool`, `Fleet` and `RankGroup` speak to a `Worker`, and have a
`Launcher` start it. Those of Ray are in worker.py and placement_group.py, those of this process in threads.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.pools.host import ProcessPlace, Returned
from infra.pools.worker import PoolSpec


@dataclass(frozen=True, slots=True)
class SlotCount:
    """How many slots a fleet has, where machines come and go."""

    most: int
    first: int = 1
    """With how many it begins."""
    least: int = 1
    """With how many it goes on."""
    wait_seconds: float = 180
    """How long there may be fewer."""


class Worker(Protocol):
    """One live worker: it does one piece of work at a time."""

    @property
    def name(self) -> str:
        """Its role, place and generation; never used twice."""
        ...

    @property
    def place(self) -> ProcessPlace:
        """Where it runs."""
        ...

    @property
    def ours(self) -> bool:
        """Whether this process started it, and is to end it."""
        ...

    async def perform(self, method: str, *arguments: object, stall_seconds: float) -> Returned:
        """Run a method; raise what it raised, or `WorkerLost` when it died or stood still."""
        ...

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Let it take work again; it `take`s the record first, if there is one."""

    async def sleep(self, *, stall_seconds: float) -> float:
        """Let it give its memory back after the work under way; return the seconds that this alone took."""
        ...

    async def asleep(self) -> bool:
        """Ask whether it refuses work until its fleet wakes it."""
        ...

    def foresee(self, record: object) -> None:
        """Tell it of what may come next, so that what the record names is there by then; nothing is answered."""

    async def free_port(self) -> int:
        """Find a free port where it runs."""
        ...

    async def stop(self) -> None:
        """Let it close what it holds once it is idle, then end it."""

    def kill(self) -> None:
        """End it at once, as far as it can be; work that it holds is lost."""

    async def gone(self) -> None:
        """Wait until one that was killed has given back what it held, as far as this can be seen from here."""

    async def end(self) -> None:
        """Return when it has ended."""


class Launcher(Protocol):
    """Starts workers, and finds those that other processes have started."""

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> Worker:
        """Start a worker; in a slot of a fleet, it is asleep until it is woken."""
        ...

    async def find(self, spec: PoolSpec, name: str) -> Worker:
        """Find a worker that another process has started. Raises WorkerLost if it is gone."""
        ...

    async def found(self, role: str) -> Mapping[int, int]:
        """Look up a role's workers: index → newest generation."""
        ...


class SlotLauncher(Launcher, Protocol):
    """Starts workers in the slots of a fleet."""

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each slot, once they are reserved; slots of one node follow each other."""
        ...

    async def lost(self) -> frozenset[int]:
        """Tell which slots are on no machine that serves; where others have taken their place, they are."""
        ...

    async def reserve(self, wait_seconds: float) -> None:
        """Wait until slots are set aside, as many as the fleet begins with. Raises ClusterFailed if that takes long."""

    def remove(self) -> None:
        """Give the slots back."""
