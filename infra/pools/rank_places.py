"""Places of update ranks on the GPUs of a Ray cluster: GPUs of worker slots, and separate GPUs if these are too few."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rheostat.infra.errors import ClusterFailed, NodeLost
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.gpu_layout import GpuLayout, assign_ranks
from rheostat.infra.pools.launcher import Launcher
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.placement_group import RayLauncher
from rheostat.infra.pools.reservations import (
    Bundle,
    count_cluster_gpus,
    find_bundles,
    find_devices,
    remove_groups,
    reserve_group,
    wait_for_groups,
)
from rheostat.infra.pools.worker import ReservedSlot

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)


class GpuRankPlaces:
    """Places of the ranks of one group, each on a GPU that no other rank of the group uses.

    Ranks run in the bundles of worker slots if both use the GPUs in turn. A rank requests no GPU from Ray, like the
    workers in slots, but gets the id of its GPU. Ranks for which the slots have too few GPUs, or ranks that train while
    workers generate, get separate bundles.
    """

    def __init__(self, layout: GpuLayout, *, fleet: Fleet | None, wait_seconds: float, machines: Machines) -> None:
        """Prepare the places without reserving any. `fleet` has the worker slots of this process, or is None if another
        process of the run reserves the slots."""
        self._layout, self._fleet, self._wait_seconds, self._machines = layout, fleet, wait_seconds, machines
        self._reserved: list[PlacementGroup] = []

    async def launchers(self) -> Sequence[Launcher]:
        """Choose a GPU for each rank, and return a launcher for each rank. Worker slots with GPUs are reserved first.
        Raises ClusterFailed if the cluster has too few GPUs for the ranks, and NodeLost if a machine leaves the cluster
        meanwhile."""
        if self._layout.per_slot and self._fleet is not None:
            await self._fleet.reserve()
        slots = await find_bundles("slots")
        shared = await self._assign(slots if self._layout.shares_gpus else [], self._layout.ranks)
        missing = self._layout.ranks - len(shared)
        if not missing:
            return shared
        if shared:
            logger.info("%d update ranks get GPUs that no worker slot has", missing)
        separate = await self._reserve_separate(missing, slot_gpus=sum(bundle.gpus for bundle in slots))
        others = await self._assign(separate, missing)
        if len(others) < missing:
            raise NodeLost("a machine with GPUs of update ranks has left the cluster while the ranks started")
        return [*shared, *others]

    def release(self) -> None:
        """Release the separate GPUs that this process has reserved for the ranks."""
        remove_groups(self._reserved)
        self._reserved = []

    async def _assign(self, bundles: Sequence[Bundle], ranks: int) -> list[RayLauncher]:
        """Choose GPUs in these bundles for up to `ranks` ranks, and return their launchers. Machines that are not
        reachable are not used."""
        bundles = await self._reachable(bundles)
        devices = await find_devices((bundle.group, bundle.index, bundle.gpus) for bundle in bundles)
        nodes = [bundle.node for bundle in bundles]
        places = assign_ranks(nodes, devices, ranks=ranks, ranks_per_node=self._layout.ranks_per_node)
        return [
            RayLauncher(
                self._machines, reservation=ReservedSlot(bundle.group, bundle.index, (device,)), node=bundle.node
            )
            for bundle, device in ((bundles[place[0]], place[1]) for place in places if place is not None)
        ]

    async def _reachable(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        nodes = await self._machines.check_nodes(*{bundle.node for bundle in bundles if bundle.node})
        return [bundle for bundle in bundles if nodes.get(bundle.node)]

    async def _reserve_separate(self, ranks: int, *, slot_gpus: float) -> list[Bundle]:
        """Reserve a GPU for each of these ranks, and return the bundles. Reservations of an earlier start are used
        again, except on machines that are lost. `slot_gpus` is the number of GPUs of the worker slots."""
        size, gpus = self._layout.ranks_per_node, self._layout.per_separate_rank
        found = await find_bundles("ranks")
        lost = set(found) - set(await self._reachable(found))
        groups = dict.fromkeys(bundle.group for bundle in found)
        kept = [group for group in groups if group not in {bundle.group for bundle in lost}][: ranks // size]
        remove_groups(group for group in groups if group not in kept)
        if self._machines.is_single and slot_gpus + ranks * gpus > (total := await count_cluster_gpus()):
            raise self._too_few(ranks, f"this machine has {total:g}, of which worker slots have {slot_gpus:g}")
        new = [
            await reserve_group("ranks", number, [{"GPU": gpus}] * size, strategy="STRICT_PACK")
            for number in range(len(kept), ranks // size)
        ]
        self._reserved = [*(group for group in self._reserved if group in kept), *new]
        if not await wait_for_groups(new, self._wait_seconds):
            self.release()
            total = await count_cluster_gpus()
            raise self._too_few(
                ranks,
                f"the cluster, which has {total:g} in all, could not reserve them within {self._wait_seconds:g} s "
                "(pools.wait_seconds)",
            )
        return [bundle for bundle in await find_bundles("ranks") if bundle.group in {*kept, *new}]

    def _too_few(self, ranks: int, found: str) -> ClusterFailed:
        together = f", {self._layout.ranks_per_node} on each machine" if self._layout.ranks_per_node > 1 else ""
        whole = " Two ranks cannot share a GPU." if self._layout.ranks > 1 else ""
        return ClusterFailed(
            f"{ranks} of {self._layout.ranks} update ranks need separate GPUs{together}, but {found}.{whole} Lower "
            "pools.update_ranks, add GPUs, or let ranks use the GPUs of worker slots (pools.gpus_per_worker, "
            "pools.dedicated_update_resources)."
        )
