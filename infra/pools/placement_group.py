"""The places on the cluster that a fleet's slots stand for: bundles of one Ray placement group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.errors import BadInput, ClusterFailed, NodeLost
from infra.pools.worker import PoolSpec, ReservedSlot, WorkerProcess, find_worker, found_workers, start_worker
from infra.processes.watch import apart, aside

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SLOT = "rheostat_slot"
"""Resource of an embedded cluster of which there is always enough: slots there are bounded by memory alone."""


LOOK_SECONDS = 1.0
PROBES, PROBE_SECONDS = 3, 2.0


@dataclass(frozen=True, slots=True)
class Machines:
    """Which machines of the cluster serve.

    Ray itself takes 15 s and more to see that one is gone; the port of its raylet tells at once.
    """

    alone: bool = False
    """Whether there is only this one, whose raylet is watched elsewhere."""
    within_reach: bool = True
    """Whether this process can connect to them: a `ray://` client cannot, and believes Ray."""

    async def serving(self) -> dict[str, bool]:
        """Tell of every node that Ray takes for alive whether it serves."""
        import ray

        if self.alone:
            return {}
        nodes = [node for node in await apart(ray.nodes) if node["Alive"]]
        ports = [(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in nodes]
        serve = await asyncio.gather(*(_listens(*port) for port in ports)) if self.within_reach else [True] * len(nodes)
        return {str(node["NodeID"]): serves for node, serves in zip(nodes, serve, strict=True)}


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Start workers as actors of the Ray cluster that this process is connected to."""

    machines: Machines

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker that no fleet puts to sleep."""
        assert slot is None, "slots are reserved first"
        gone = [node for node, serves in (await self.machines.serving()).items() if not serves]
        return await start_worker(spec, name, avoided=gone)

    async def find(self, spec: PoolSpec, name: str) -> WorkerProcess:
        """Find a worker that another process has started."""
        return await find_worker(spec, name)

    async def found(self, role: str) -> dict[int, int]:
        """Look up the newest generation of each of a role's workers."""
        return await found_workers(role)


class ReservedSlots:
    """Start workers in slots. One bundle per slot, numbered so that those of one node follow each other.

    Processes of all roles share a bundle's GPUs, of which Ray can hand each only a part; so they ask Ray for none and
    are told which they are.
    """

    def __init__(self, slots: int, *, gpus: float, machines: Machines, start_seconds: float) -> None:
        """Describe the places; none is reserved yet."""
        if gpus > 1 and gpus != int(gpus):
            raise BadInput(f"a worker slot has a part of one GPU or whole ones, not {gpus:g}")
        self.slots = slots
        self.nodes: tuple[str, ...] = ()
        """The node of each slot, once they are reserved."""
        self._gpus = gpus
        self._needs = {SLOT if machines.alone else "CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        self._start_seconds = start_seconds
        self._group: PlacementGroup | None = None
        self._bundles: list[int] = []
        self._devices: list[tuple[str, ...]] = []
        self._machines = machines

    async def start(self, spec: PoolSpec, name: str, *, slot: int | None) -> WorkerProcess:
        """Start a worker in the slots from this one on; it is asleep until it is woken."""
        assert slot is not None and self._group is not None, "reserve() comes first"
        devices = [device for held in self._devices[slot : slot + spec.slots] for device in held]
        berth = ReservedSlot(self._group, self._bundles[slot], tuple(dict.fromkeys(devices)))
        starting = asyncio.ensure_future(start_worker(spec, name, berth=berth))
        try:
            while not (await asyncio.wait({starting}, timeout=LOOK_SECONDS))[0]:
                if slot in await self.lost():
                    raise NodeLost(f"{spec.role} worker {name}: the node of its slot has left the cluster")
            return starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def find(self, spec: PoolSpec, name: str) -> WorkerProcess:
        """Find a worker that another process has started."""
        return await find_worker(spec, name)

    async def found(self, role: str) -> dict[int, int]:
        """Look up the newest generation of each of a role's workers."""
        return await found_workers(role)

    async def reserve(self) -> None:
        """Wait until the cluster has set the places aside."""
        from ray.util.placement_group import placement_group, placement_group_table

        if self._group is not None:
            return
        bundles = [dict(self._needs) for _ in range(self.slots)]
        self._group = group = await apart(lambda: placement_group(bundles, strategy="PACK"))
        try:
            if not await apart(lambda: group.wait(self._start_seconds)):
                raise ClusterFailed(
                    f"the cluster did not set {self.slots} worker slots of {self._needs} aside within"
                    f" {self._start_seconds:g} s"
                )
            nodes = (await apart(lambda: placement_group_table(group)))["bundles_to_node_id"]
            self._bundles = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
            self._devices = await self._held(self._bundles) if self._gpus else [()] * self.slots
            self.nodes = tuple(nodes[bundle] for bundle in self._bundles)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            aside(lambda: remove_placement_group(group))

    async def lost(self) -> frozenset[int]:
        """Tell which slots are on machines that serve no more; Ray moves their bundles to machines that join."""
        from ray.util.placement_group import placement_group_table

        group = self._group
        if self._machines.alone or group is None:
            return frozenset()
        placed = (await apart(lambda: placement_group_table(group)))["bundles_to_node_id"]
        serving = await self._machines.serving()
        lost = frozenset(slot for slot, bundle in enumerate(self._bundles) if not serving.get(placed[bundle]))
        moved = [
            slot for slot, bundle in enumerate(self._bundles) if slot not in lost and placed[bundle] != self.nodes[slot]
        ]
        if moved:
            held = await self._held([self._bundles[slot] for slot in moved]) if self._gpus else [()] * len(moved)
            for slot, devices in zip(moved, held, strict=True):
                self._devices[slot] = devices
            self.nodes = tuple(
                placed[bundle] if slot in moved else self.nodes[slot] for slot, bundle in enumerate(self._bundles)
            )
        return lost

    async def _held(self, bundles: Sequence[int]) -> list[tuple[str, ...]]:
        """Ask each bundle for the ids of its GPUs: they stay the same as long as it stands."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        asking = ray.remote(num_cpus=0, num_gpus=self._gpus, max_calls=1)(_devices)
        places = [PlacementGroupSchedulingStrategy(self._group, bundle) for bundle in bundles]
        try:
            async with asyncio.timeout(self._start_seconds):
                return list(await asyncio.gather(*(asking.options(scheduling_strategy=at).remote() for at in places)))
        except TimeoutError:
            raise ClusterFailed(f"the GPUs of the worker slots are not known after {self._start_seconds:g} s") from None


async def _listens(address: str, port: int) -> bool:
    """Whether a raylet takes connections."""
    for _ in range(PROBES):
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return True
        except (OSError, TimeoutError):
            await asyncio.sleep(PROBE_SECONDS / 10)
    return False


def _devices() -> tuple[str, ...]:
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))
