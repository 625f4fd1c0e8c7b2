"""What a run needs of the place where its workers live."""

from collections.abc import Sequence
from typing import Protocol

from infra.pools.fleet import Fleet
from infra.pools.pool import Pool
from infra.pools.ranks import RankGroup
from infra.pools.worker import PoolSpec


class Cluster(Protocol):
    """Hosts the pools of one run, which end with its context: Ray's processes, or threads of this one."""

    @property
    def address(self) -> str | None:
        """Where other processes find the same pools; none where they cannot."""
        ...

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool whose workers have started."""
        ...

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: int, gpus_per_slot: float) -> Fleet:
        """Return worker slots that these roles share; nothing starts before they are arranged."""
        ...

    async def ranks(self, spec: PoolSpec) -> RankGroup:
        """Return a group of ranks that have met."""
        ...
