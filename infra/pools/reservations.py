"""Reservations in a Ray cluster: placement groups, whose bundles (sets of reserved resources) are for single processes.

The placement groups of a run have names in the run's Ray namespace. Every process of the run can therefore find the
reservations of the other processes.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rheostat.infra.errors import ClusterFailed
from rheostat.infra.processes.watch import run_apart, start_apart

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Purpose = Literal["slots", "ranks"]
"""Purpose of a placement group: worker slots, or update ranks that use no GPU of a slot."""
QUERY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Reserved bundle of a placement group, and its machine."""

    group: "PlacementGroup"
    index: int
    node: str
    """Ray node id of the machine. If the machine was lost, this is the id of the lost machine, or empty."""
    gpus: float
    """Number of reserved GPUs."""


async def reserve_group(
    purpose: Purpose, number: int, bundles: Sequence[Mapping[str, float]], *, strategy: str
) -> "PlacementGroup":
    """Request a placement group with these bundles, without waiting for it. `number` is its position among the groups
    with the same purpose."""
    from ray.util.placement_group import placement_group

    def request() -> "PlacementGroup":
        name = f"{_prefix(purpose)}{number:06d}-{secrets.token_hex(4)}"
        return placement_group([*map(dict, bundles)], strategy=strategy, name=name)

    return await run_apart(request)


async def wait_for_groups(groups: Iterable["PlacementGroup"], seconds: float) -> bool:
    """Wait until all groups are reserved. Return False if this takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    return await run_apart(lambda: all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups))


async def find_bundles(purpose: Purpose) -> list[Bundle]:
    """Return the bundles of all reserved placement groups that this run has for a purpose, in the order of their
    numbers. The groups of other processes of the run are included."""
    from ray.util.placement_group import get_placement_group, placement_group_table

    def find() -> list[Bundle]:
        prefix = _prefix(purpose)
        tables = [table for table in placement_group_table().values() if table["name"].startswith(prefix)]
        found: list[Bundle] = []
        for table in sorted(tables, key=lambda table: str(table["name"])):
            if table["state"] not in ("CREATED", "RESCHEDULING"):
                continue
            try:
                group = get_placement_group(table["name"])
            except ValueError:  # it was removed in the meantime
                continue
            nodes = table["bundles_to_node_id"]
            found += [
                Bundle(group, index, str(nodes.get(index) or ""), float(resources.get("GPU", 0)))
                for index, resources in sorted(table["bundles"].items())
            ]
        return found

    return await run_apart(find)


def remove_groups(groups: Iterable["PlacementGroup"]) -> None:
    """Remove placement groups, without waiting. Processes in their bundles are killed."""
    from ray.util.placement_group import remove_placement_group

    removed = [*groups]
    if removed:
        start_apart(lambda: [remove_placement_group(group) for group in removed])


async def find_devices(bundles: Iterable[tuple["PlacementGroup", int, float]]) -> list[tuple[str, ...]]:
    """Return the ids of the GPUs of each bundle (group, index, number of GPUs). The ids do not change as long as the
    placement group has the bundle on its machine."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    query = ray.remote(num_cpus=0, max_calls=1)(_devices)
    queries = [
        query.options(num_gpus=gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for group, index, gpus in bundles
    ]
    try:
        async with asyncio.timeout(QUERY_SECONDS):
            return list(await asyncio.gather(*queries))
    except TimeoutError:
        raise ClusterFailed(
            f"the cluster did not report the GPUs of the worker slots within {QUERY_SECONDS:g} s. Run the same "
            "command again to continue."
        ) from None


async def count_cluster_gpus(*, available: bool = False) -> float:
    """Return the number of GPUs of the Ray cluster. With `available`, count only GPUs that are not reserved."""
    import ray

    resources = await run_apart(ray.available_resources if available else ray.cluster_resources)
    return float(resources.get("GPU", 0))


def _devices() -> tuple[str, ...]:
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))


def _prefix(purpose: Purpose) -> str:
    import ray

    return f"{ray.get_runtime_context().namespace}/{purpose}/"
