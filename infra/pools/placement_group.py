"""Slots of a fleet on a Ray cluster. Each slot is a bundle (a set of reserved resources) of a Ray placement group."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, ClusterFailed, NodeLost
from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.reservations import (
    count_cluster_gpus,
    find_devices,
    remove_groups,
    reserve_group,
    wait_for_groups,
)
from rheostat.infra.pools.worker import PoolSpec, ReservedSlot, WorkerProcess, find_worker, list_workers, start_worker
from rheostat.infra.processes.watch import run_apart

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SLOT = "rheostat_slot"
"""Name of the custom Ray resource that each worker slot requests. An embedded cluster offers more of this resource than
needed, so that only memory limits the number of slots."""


CHECK_SECONDS = 1.0
MORE_SECONDS = 2.0
"""Maximum time in seconds to wait for additional worker slots after the required slots are available. Slots that become
available later are found at the next check."""


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Launcher that starts workers as actors of the Ray cluster to which this process is connected."""

    machines: Machines
    reservation: ReservedSlot | None = None
    """Reserved bundle in which the workers run, or None to let Ray choose the machine."""
    node: str = ""
    """Ray node id of the machine of the reserved bundle."""

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker as a Ray actor. A worker without a slot is always awake."""
        assert slot is None, "workers in slots are started by ReservedSlots"
        worker = start_worker(spec, name, machines=self.machines, reservation=self.reservation)
        if self.reservation is None:
            return await worker

        async def is_lost() -> bool:
            return not (await self.machines.check_nodes(self.node)).get(self.node)

        return await start_unless_lost(worker, is_lost, f"the {spec.role} worker {name}")

    async def find(self, spec: PoolSpec, name: str) -> WorkerProcess:
        """Return the worker with this name, which another process has started. Raises WorkerLost if the worker no
        longer exists."""
        return await find_worker(spec, name, machines=self.machines)

    async def list_generations(self, role: str) -> dict[int, int]:
        """Return the latest generation of each worker of a role, by index of the worker. The generation counts the
        processes that have replaced the worker."""
        return await list_workers(role)


class ReservedSlots:
    """Launcher that starts workers in reserved slots. Each slot is a bundle (set of reserved resources) of a Ray
    placement group, or a part of a bundle if slots with fractions of a GPU share it with an update rank.

    The initial slots of the fleet are one placement group, ordered by node. Slots that machines may add later are
    separate placement groups. Each of them is large enough for the worker that needs the most slots, and is reserved as
    soon as Ray finds room for it.

    The processes of all roles in a slot use the same GPUs one after another. Ray would give each process only a
    fraction of a GPU. Therefore the processes request no GPU from Ray, and this class passes the ids of the slot's GPUs
    to them.
    """

    def __init__(self, slots: SlotCount, *, widest: int, gpus: GpuLayout, machines: Machines) -> None:
        """Create the launcher. No slots are reserved yet. `widest` is the largest number of slots that a worker needs.

        Raises BadInput unless the number of GPUs per slot is a whole number or at most 1.
        """
        if gpus.per_slot > 1 and gpus.per_slot != int(gpus.per_slot):
            raise BadInput(
                f"pools.gpus_per_worker is {gpus.per_slot:g}, but a worker can have only a fraction of one GPU or a "
                "whole number of GPUs. Set it to a number up to 1, or to a whole number."
            )
        self.nodes: tuple[str, ...] = ()
        """Node of each slot, once the slots are reserved. A lost slot keeps its last node, or an empty name if it never
        had a node."""
        self._first = slots.max_slots if machines.is_single else slots.initial_slots
        self._most, self._widest, self._gpus = slots.max_slots, widest, gpus
        self._places: list[tuple[PlacementGroup, int]] = []
        """Placement group and bundle of each slot."""
        self._devices: list[tuple[str, ...]] = []
        self._machines = machines
        self._reserving = asyncio.Lock()

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker whose first slot is `slot`. The worker stays asleep until it is woken.

        Raises NodeLost if the slot's machine leaves the cluster.
        """
        assert slot is not None and self._places, "reserve() was called"
        devices = [device for slot_devices in self._devices[slot : slot + spec.slots] for device in slot_devices]
        reservation = ReservedSlot(*self._places[slot], tuple(dict.fromkeys(devices)))

        async def is_lost() -> bool:
            return slot in await self.list_lost_slots()

        worker = start_worker(spec, name, machines=self._machines, reservation=reservation, asleep=True)
        return await start_unless_lost(worker, is_lost, f"the {spec.role} worker {name}")

    async def find(self, spec: PoolSpec, name: str) -> WorkerProcess:
        """Return the worker with this name, which another process has started. Raises WorkerLost if the worker no
        longer exists."""
        return await find_worker(spec, name, machines=self._machines)

    async def list_generations(self, role: str) -> dict[int, int]:
        """Return the latest generation of each worker of a role, by index of the worker. The generation counts the
        processes that have replaced the worker."""
        return await list_workers(role)

    async def reserve(self, wait_seconds: float) -> None:
        """Reserve the required slots and wait until they are available. Request the additional slots without waiting.

        Does nothing if the slots are reserved already. Raises ClusterFailed if the required slots are not available
        within `wait_seconds`, or if this machine is the whole cluster and has too few GPUs.
        """
        async with self._reserving:
            if self._places:
                return
            counts = self._gpus.slots_per_bundle(self._most)
            await self._check_gpus(counts)
            runs = split_bundles(counts, first=self._first, widest=self._widest)
            try:
                first = await self._request(0, runs[0], "PACK")
                if not await wait_for_groups([first], wait_seconds):
                    raise ClusterFailed(
                        f"the cluster could not reserve {format_count(sum(runs[0]), 'worker slot')} with "
                        f"{self._describe_slot()} each within {wait_seconds:.0f} s (pools.wait_seconds)."
                        f"{await self._describe_total()} Add machines, lower pools.workers, or raise "
                        "pools.wait_seconds."
                    )
                nodes = await self._nodes()
                self._places = [self._places[slot] for slot in sorted(range(len(nodes)), key=lambda slot: nodes[slot])]
                more = [await self._request(number, run, "STRICT_PACK") for number, run in enumerate(runs[1:], start=1)]
                await wait_for_groups(more, MORE_SECONDS)
                self.nodes, self._devices = ("",) * self._most, [()] * self._most
                await self.list_lost_slots()
            except BaseException:
                self.release()
                raise

    async def _request(self, number: int, counts: Sequence[int], strategy: str) -> "PlacementGroup":
        """Request a placement group with one bundle for each number of slots in `counts`, without waiting for it."""
        bundles = [self._needs(count) for count in counts]
        group = await reserve_group("slots", number, bundles, strategy=strategy)
        self._places += [(group, bundle) for bundle, count in enumerate(counts) for _ in range(count)]
        return group

    def _needs(self, slots: int) -> dict[str, float]:
        """Return the resources of a bundle with this number of slots."""
        gpus = self._gpus.gpus_per_bundle(slots)
        return {SLOT if self._machines.is_single else "CPU": float(slots), **({"GPU": gpus} if gpus else {})}

    def _describe_slot(self) -> dict[str, float]:
        return self._needs(1) | ({"GPU": self._gpus.per_slot} if self._gpus.per_slot else {})

    async def _describe_total(self) -> str:
        return f" The cluster has {await count_cluster_gpus():g} GPUs in all." if self._gpus.per_slot else ""

    async def _check_gpus(self, counts: Sequence[int]) -> None:
        """Raise ClusterFailed if this machine is the whole cluster and has too few GPUs for the slots."""
        gpus = sum(map(self._gpus.gpus_per_bundle, counts))
        if gpus and self._machines.is_single and gpus > (found := await count_cluster_gpus()):
            raise ClusterFailed(
                f"{format_count(self._most, 'worker slot')} with {self._gpus.per_slot:g} GPUs each need {gpus:g} GPUs, "
                f"but this machine has {found:g}. Lower pools.workers or pools.gpus_per_worker, or set "
                "pools.ray_address to a cluster with enough GPUs."
            )

    def release(self) -> None:
        """Release the reserved slots."""
        remove_groups({group for group, _ in self._places})
        self._places = []

    async def list_lost_slots(self) -> frozenset[int]:
        """Return the indices of the slots whose machine is not available. Ray moves these slots to machines that join
        later."""
        if not self._places or (self._machines.is_single and all(self.nodes)):
            return frozenset()
        nodes, serving = await self._nodes(), await self._machines.check_nodes()
        lost = frozenset(slot for slot, node in enumerate(nodes) if not serving.get(node, self._machines.is_single))
        moved = [slot for slot, node in enumerate(nodes) if slot not in lost and node != self.nodes[slot]]
        if moved:
            await self._update_devices(moved)
            self.nodes = tuple(node if slot in moved else self.nodes[slot] for slot, node in enumerate(nodes))
        return lost

    async def _nodes(self) -> list[str]:
        """Return the Ray node id of each slot. A slot whose node was lost keeps the id of this node. A slot that never
        had a node has an empty id."""
        from ray.util.placement_group import placement_group_table

        groups = {group for group, _ in self._places}
        tables = await run_apart(lambda: {group: placement_group_table(group) for group in groups})
        return [str(tables[group]["bundles_to_node_id"].get(bundle) or "") for group, bundle in self._places]

    async def _update_devices(self, slots: Sequence[int]) -> None:
        """Read the ids of the GPUs of these slots from the cluster."""
        if not self._gpus.per_slot:
            return
        counts, places = Counter(self._places), [*dict.fromkeys(self._places[slot] for slot in slots)]
        found = await find_devices((*place, self._gpus.gpus_per_bundle(counts[place])) for place in places)
        devices = dict(zip(places, found, strict=True))
        for slot in slots:
            self._devices[slot] = devices[self._places[slot]]


def split_bundles(counts: Sequence[int], *, first: int, widest: int) -> list[tuple[int, ...]]:
    """Split bundles into the placement groups that are reserved separately. `counts` is the number of slots in each
    bundle. The first group has at least `first` slots, and each other group has at least `widest` slots, except
    possibly the last one."""
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    for count in counts:
        current.append(count)
        if sum(current) >= (widest if groups else first):
            groups.append(tuple(current))
            current = []
    return [*groups, tuple(current)] if current else groups


async def start_unless_lost(
    worker: Awaitable[WorkerProcess], is_lost: Callable[[], Awaitable[bool]], what: str
) -> WorkerProcess:
    """Wait until a worker has started. Raises NodeLost if the machine of its bundle leaves the cluster meanwhile.
    `what` names the worker in the message."""
    starting = asyncio.ensure_future(worker)
    try:
        while not (await asyncio.wait({starting}, timeout=CHECK_SECONDS))[0]:
            if await is_lost():
                raise NodeLost(f"{what} cannot start, because its machine has left the cluster")
        return starting.result()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
