"""The places on the cluster that a fleet's slots stand for: bundles of one Ray placement group."""

import asyncio
from typing import TYPE_CHECKING

from infra.errors import ClusterFailed
from infra.workers import Berth

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SLOT = "rheostat_slot"
"""Resource of an embedded cluster of which there is always enough: slots there are bounded by memory alone."""


class Berths:
    """One bundle per slot, in which a process of every role fits."""

    def __init__(self, slots: int, *, gpus: float, roles: int, embedded: bool, start_seconds: float) -> None:
        """Describe the places; none is reserved yet."""
        self.slots = slots
        self._needs = {SLOT if embedded else "CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        self._gpus = gpus / roles if gpus <= 1 else gpus
        self._start_seconds = start_seconds
        self._group: PlacementGroup | None = None

    def __getitem__(self, slot: int) -> Berth:
        assert self._group is not None, "reserve() comes first"
        return Berth(self._group, slot, self._gpus)

    async def reserve(self) -> None:
        """Wait until the cluster has set the places aside."""
        from ray.util.placement_group import placement_group

        if self._group is not None:
            return
        group = placement_group([dict(self._needs) for _ in range(self.slots)], strategy="PACK")
        if not await asyncio.to_thread(group.wait, self._start_seconds):
            self._group = group
            self.remove()
            raise ClusterFailed(
                f"the cluster did not set {self.slots} worker slots of {self._needs} aside within"
                f" {self._start_seconds:g} s"
            )
        self._group = group

    def remove(self) -> None:
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._group = None
