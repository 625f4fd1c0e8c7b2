"""Layout of GPUs: how many GPUs worker slots and update ranks need, and which of them they share.

By default, the workers in the slots sleep while the update ranks train. The ranks can then use the GPUs of the slots.
This module decides which GPU each rank uses. Two ranks never use the same GPU, because NCCL does not support two ranks
of a process group on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rheostat.infra.config import PoolsConfig

ROUNDING = 1e-6
"""Tolerance for sums of fractions of a GPU."""


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """GPUs of a run's worker slots and update ranks, and whether both use the same GPUs in turn."""

    per_slot: float = 0
    """Number of GPUs of each worker slot. With a fraction, several slots share a GPU."""
    ranks: int = 1
    """Number of update ranks."""
    per_rank: float = 0
    """Number of GPUs of each update rank: 0, 1, or a fraction."""
    ranks_per_node: int = 1
    """Number of consecutive ranks that must be on one machine (the size of a sequence-parallel group)."""
    takes_turns: bool = True
    """Whether the workers in the slots sleep while the ranks train."""

    @staticmethod
    def of(pools: PoolsConfig, *, ranks_per_node: int) -> "GpuLayout":
        """Return the layout that the settings of the worker pools select."""
        return GpuLayout(
            per_slot=pools.gpus_per_worker,
            ranks=pools.update_ranks,
            per_rank=pools.gpus_per_update_rank,
            ranks_per_node=ranks_per_node,
            takes_turns=not pools.dedicated_update_resources,
        )

    @property
    def shares_gpus(self) -> bool:
        """Whether the ranks use the GPUs of the worker slots."""
        return self.takes_turns and self.per_slot > 0 and self.per_rank > 0

    def may_share_gpus(self, slots: int) -> bool:
        """Return whether a rank can be on a GPU that one of `slots` worker slots also uses: if the ranks use the GPUs
        of the slots, or if Ray may put a single rank with a fraction of a GPU next to slots."""
        fits_gap = self.ranks == 1 and 0 < self.per_rank <= self._largest_gap(slots) + ROUNDING
        return self.shares_gpus or fits_gap

    @property
    def per_separate_rank(self) -> float:
        """Number of GPUs to reserve for a rank that uses no GPU of a slot. If there are several ranks, this is 1,
        because Ray could put two fractions on the same GPU."""
        return 1.0 if self.ranks > 1 else self.per_rank

    def slots_per_bundle(self, slots: int) -> tuple[int, ...]:
        """Return the number of slots in each bundle (a set of resources that Ray reserves on one machine).

        A bundle contains one slot, except if ranks share GPUs with slots that have less than one GPU. In this case a
        bundle is a GPU. The slots are spread evenly over the GPUs, which are as many as the slots need, or as many as
        there are ranks if these are more.
        """
        if not self._shares_fractions:
            return (1,) * slots
        bundles = max(self._count_required_gpus(slots), min(slots, self.ranks))
        return tuple(slots // bundles + (bundle < slots % bundles) for bundle in range(bundles))

    def gpus_per_bundle(self, slots: int) -> float:
        """Return the number of GPUs to reserve for a bundle with this number of slots. If several ranks share GPUs with
        the slots, the number is whole, so that no GPU belongs to two bundles."""
        if not self._shares_fractions:
            return self.per_slot
        return 1.0 if self.ranks > 1 else min(1.0, round(slots * self.per_slot + self.per_rank, 4))

    def max_slots_per_gpu(self, slots: int) -> int:
        """Return the largest number of slots on one GPU."""
        if not 0 < self.per_slot < 1:
            return 1
        return max(self.slots_per_bundle(slots)) if self._shares_fractions else min(slots, self._slots_per_gpu)

    def count_gpus(self, slots: int) -> int:
        """Return the number of GPUs that `slots` worker slots and the ranks need together on one machine."""
        if self.shares_gpus:
            slot_gpus = self.count_slot_gpus(slots)
            usable = slot_gpus // self.ranks_per_node * self.ranks_per_node
            return slot_gpus + max(0, self.ranks - usable)
        slot_gpus, rank_gpus = self.count_slot_gpus(slots), self.ranks if self.per_rank else 0
        if self.may_share_gpus(slots):
            rank_gpus = 0
        return slot_gpus + rank_gpus

    def count_slot_gpus(self, slots: int) -> int:
        """Return the number of GPUs that `slots` worker slots have on one machine."""
        if self._shares_fractions:
            return len(self.slots_per_bundle(slots))
        return self._count_required_gpus(slots)

    @property
    def _shares_fractions(self) -> bool:
        return self.shares_gpus and self.per_slot < 1

    @property
    def _slots_per_gpu(self) -> int:
        return int(1 / self.per_slot + ROUNDING)

    def _count_required_gpus(self, slots: int) -> int:
        """Return the number of GPUs that the slots would need without ranks."""
        if not self.per_slot:
            return 0
        return round(slots * self.per_slot) if self.per_slot >= 1 else -(-slots // self._slots_per_gpu)

    def _largest_gap(self, slots: int) -> float:
        """Return the largest free fraction of a GPU that Ray has given to slots."""
        if not slots or not 0 < self.per_slot < 1:
            return 0.0
        return 1 - (slots % self._slots_per_gpu or self._slots_per_gpu) * self.per_slot


NO_GPUS = GpuLayout()
"""Layout of a run without GPUs."""


def assign_ranks(
    nodes: Sequence[str | None], devices: Sequence[Sequence[str]], *, ranks: int, ranks_per_node: int = 1
) -> list[tuple[int, str] | None]:
    """Choose a GPU for each rank among the GPUs of the bundles. `nodes` is the machine of each bundle, or None if the
    machine is lost, and `devices` are the ids of the bundle's GPUs on this machine.

    Return (index of the bundle, id of the GPU) for each rank, or None for each rank that needs a separate GPU. No GPU
    is assigned twice. Each `ranks_per_node` consecutive ranks are on one machine, and machines with more GPUs are used
    first. Ranks without a GPU are the last ones.
    """
    free: dict[str, dict[str, int]] = {}
    for bundle, (node, ids) in enumerate(zip(nodes, devices, strict=True)):
        if node is not None:
            for device in ids:
                free.setdefault(node, {}).setdefault(device, bundle)
    places: list[tuple[int, str] | None] = []
    for bundle_of in sorted(free.values(), key=lambda bundle_of: -len(bundle_of)):
        usable = len(bundle_of) // ranks_per_node * ranks_per_node
        places += [(bundle, device) for device, bundle in list(bundle_of.items())[:usable]]
    return (places + [None] * ranks)[:ranks]
