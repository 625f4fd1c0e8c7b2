"""Slots of a fleet on a Ray cluster. Each slot is a bundle (a set of reserved resources) of a Ray placement group."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.counts import format_count
from infra.errors import BadInput, ClusterFailed, NodeLost
from infra.pools.launcher import SlotCount
from infra.pools.machines import Machines
from infra.pools.worker import PoolSpec, ReservedSlot, WorkerProcess, find_worker, list_workers, start_worker
from infra.processes.watch import run_apart, start_apart

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SLOT = "rheostat_slot"
"""Name of the custom Ray resource that each worker slot requests. An embedded cluster offers more of this resource than
needed, so that only memory limits the number of slots."""


CHECK_SECONDS = 1.0
MORE_SECONDS = 2.0
"""Maximum time in seconds to wait for additional worker slots after the required slots are available. Slots that become
available later are found at the next check."""
QUERY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Launcher that starts workers as actors of the Ray cluster to which this process is connected."""

    machines: Machines

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker as a Ray actor. A worker without a slot is always awake."""
        assert slot is None, "workers in slots are started by ReservedSlots"
        return await start_worker(spec, name, machines=self.machines)

    async def find(self, spec: PoolSpec, name: str) -> WorkerProcess:
        """Return the worker with this name, which another process has started. Raises WorkerLost if the worker no
        longer exists."""
        return await find_worker(spec, name, machines=self.machines)

    async def list_generations(self, role: str) -> dict[int, int]:
        """Return the latest generation of each worker of a role, by index of the worker. The generation counts the
        processes that have replaced the worker."""
        return await list_workers(role)


class ReservedSlots:
    """Launcher that starts workers in reserved slots. Each slot is one bundle (set of reserved resources) of a Ray
    placement group.

    The initial slots of the fleet are one placement group, ordered by node. Slots that machines may add later are
    separate placement groups. Each of them is large enough for the worker that needs the most slots, and is reserved as
    soon as Ray finds room for it.

    The processes of all roles in a slot use the same GPUs one after another. Ray would give each process only a
    fraction of a GPU. Therefore the processes request no GPU from Ray, and this class passes the ids of the slot's GPUs
    to them.
    """

    def __init__(self, slots: SlotCount, *, widest: int, gpus: float, machines: Machines) -> None:
        """Create the launcher. No slots are reserved yet. `widest` is the largest number of slots that a worker needs.

        Raises BadInput unless the number of GPUs per slot (`gpus`) is a whole number or at most 1.
        """
        if gpus > 1 and gpus != int(gpus):
            raise BadInput(
                f"pools.gpus_per_worker is {gpus:g}, but a worker can have only a fraction of one GPU or a whole "
                "number of GPUs. Set it to a number up to 1, or to a whole number."
            )
        self.nodes: tuple[str, ...] = ()
        """Node of each slot, once the slots are reserved. A lost slot keeps its last node, or an empty name if it never
        had a node."""
        self._first = slots.max_slots if machines.is_single else slots.initial_slots
        self._most, self._widest, self._gpus = slots.max_slots, widest, gpus
        self._needs = {SLOT if machines.is_single else "CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        self._places: list[tuple[PlacementGroup, int]] = []
        self._devices: list[tuple[str, ...]] = []
        self._machines = machines

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker whose first slot is `slot`. The worker stays asleep until it is woken.

        Raises NodeLost if the slot's machine leaves the cluster.
        """
        assert slot is not None and self._places, "reserve() was called"
        devices = [device for slot_devices in self._devices[slot : slot + spec.slots] for device in slot_devices]
        reservation = ReservedSlot(*self._places[slot], tuple(dict.fromkeys(devices)))
        starting = asyncio.ensure_future(start_worker(spec, name, machines=self._machines, reservation=reservation))
        try:
            while not (await asyncio.wait({starting}, timeout=CHECK_SECONDS))[0]:
                if slot in await self.list_lost_slots():
                    raise NodeLost(
                        f"the {spec.role} worker {name} cannot start, because the machine of its slot has left the "
                        "cluster"
                    )
            return starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

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
        Raises ClusterFailed if the required slots are not available within `wait_seconds`.

        Raises ClusterFailed if the initial slots are not available within `wait_seconds`.
        """
        from ray.util.placement_group import PlacementGroup, placement_group

        if self._places:
            return

        def group(slots: int, strategy: str) -> PlacementGroup:
            reserved = placement_group([dict(self._needs) for _ in range(slots)], strategy=strategy)
            self._places += [(reserved, bundle) for bundle in range(slots)]
            return reserved

        try:
            first = await run_apart(lambda: group(self._first, "PACK"))
            if not await run_apart(lambda: first.wait(wait_seconds)):
                raise ClusterFailed(
                    f"the cluster could not reserve {format_count(self._first, 'worker slot')} with {self._needs} each "
                    f"within {wait_seconds:.0f} s (pools.wait_seconds). Add machines, lower pools.workers, or raise "
                    "pools.wait_seconds."
                )
            nodes = await self._nodes()
            self._places = [self._places[slot] for slot in sorted(range(self._first), key=lambda slot: nodes[slot])]
            sizes = [min(self._widest, self._most - begin) for begin in range(self._first, self._most, self._widest)]
            more = await run_apart(lambda: [group(size, "STRICT_PACK") for size in sizes])
            deadline = time.monotonic() + MORE_SECONDS
            await run_apart(lambda: all(one.wait(max(0.0, deadline - time.monotonic())) for one in more))
            self.nodes, self._devices = ("",) * self._most, [()] * self._most
            await self.list_lost_slots()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the reserved slots."""
        from ray.util.placement_group import remove_placement_group

        groups = {group for group, _ in self._places}
        self._places = []
        if groups:
            start_apart(lambda: [remove_placement_group(group) for group in groups])

    async def list_lost_slots(self) -> frozenset[int]:
        """Return the indices of the slots whose machine is not available. Ray moves these slots to machines that join
        later."""
        if not self._places or (self._machines.is_single and all(self.nodes)):
            return frozenset()
        nodes, serving = await self._nodes(), await self._machines.check_nodes()
        lost = frozenset(slot for slot, node in enumerate(nodes) if not serving.get(node, self._machines.is_single))
        moved = [slot for slot, node in enumerate(nodes) if slot not in lost and node != self.nodes[slot]]
        if moved:
            device_lists = await self._device_ids(moved) if self._gpus else [()] * len(moved)
            for slot, devices in zip(moved, device_lists, strict=True):
                self._devices[slot] = devices
            self.nodes = tuple(node if slot in moved else self.nodes[slot] for slot, node in enumerate(nodes))
        return lost

    async def _nodes(self) -> list[str]:
        """Return the Ray node id of each slot. A slot whose node was lost keeps the id of this node. A slot that never
        had a node has an empty id."""
        from ray.util.placement_group import placement_group_table

        groups = {group for group, _ in self._places}
        tables = await run_apart(lambda: {group: placement_group_table(group) for group in groups})
        return [str(tables[group]["bundles_to_node_id"].get(bundle) or "") for group, bundle in self._places]

    async def _device_ids(self, slots: Sequence[int]) -> list[tuple[str, ...]]:
        """Return the ids of the GPUs of each slot. The ids do not change as long as the placement group has this
        slot."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        query = ray.remote(num_cpus=0, num_gpus=self._gpus, max_calls=1)(_devices)
        places = [PlacementGroupSchedulingStrategy(*self._places[slot]) for slot in slots]
        try:
            async with asyncio.timeout(QUERY_SECONDS):
                return list(await asyncio.gather(*(query.options(scheduling_strategy=at).remote() for at in places)))
        except TimeoutError:
            raise ClusterFailed(
                f"the cluster did not report the GPUs of the worker slots within {QUERY_SECONDS:g} s. Run the same "
                "command again to continue."
            ) from None


def _devices() -> tuple[str, ...]:
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))
