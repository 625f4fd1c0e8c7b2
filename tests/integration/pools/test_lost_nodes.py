"""Machines that leave a Ray cluster and join it: several raylets of this one, with a driver in a process of its own."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from infra.errors import ClusterFailed
from infra.pools.cluster import RayCluster
from infra.pools.fleet import Fleet
from infra.pools.worker import PoolSpec
from tests.support.machines import Machines, lose_machine, machines, tell, told

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

WORKERS = "tests.support.workers"


async def lost_at_work(fleet: Fleet, cluster: RayCluster, computers: Machines, raylets: list[int]) -> object:
    """Lose one machine of two under work, start others beside the slots, and have another join."""
    works = [asyncio.create_task(fleet.role("rollout").run("pid", 2, returns=int)) for _ in range(8)]
    await asyncio.sleep(1)
    lose_machine(raylets[1])
    attempts = [(await work).attempts for work in works]
    await fleet.arrange({"rollout": 4})
    left = len(fleet.allocation()["rollout"])
    await fleet.arrange({"rollout": 1, "judge": 3})
    both = {role: len(slots) for role, slots in fleet.allocation().items()}
    ranks = await cluster.ranks(PoolSpec("update", f"{WORKERS}:Ring", size=3))
    beside = await cluster.pool(PoolSpec("scoring", f"{WORKERS}:Counting", size=3))
    computers.join(2)
    while len(fleet.allocation()["rollout"]) < 4:
        await fleet.arrange({"rollout": 4})
    await asyncio.gather(*(fleet.role("rollout").run("pid", 1, returns=int) for _ in range(4)))
    return [sorted(attempts), left, both, len(ranks.pids), len(beside.pids), len(set(fleet.role("rollout").pids))]


async def all_lost(fleet: Fleet, cluster: RayCluster, computers: Machines, raylets: list[int]) -> object:
    """Lose every machine that has slots."""
    works = [asyncio.create_task(fleet.role("rollout").run("pid", 2, returns=int)) for _ in range(8)]
    await asyncio.sleep(1)
    for raylet in raylets:
        lose_machine(raylet)
    try:
        await asyncio.gather(*works)
    except ClusterFailed as error:
        return str(error)
    return None


async def drive(scene: str, start_seconds: float) -> None:
    """Arrange four workers on two machines, and print what becomes of them."""
    with machines(os.environ) as computers:
        raylets = [computers.join(2), computers.join(2)]
        async with RayCluster.open("machines", address=computers.address) as cluster:
            roles = ("rollout", "judge")
            specs = [PoolSpec(role, f"{WORKERS}:Counting", start_seconds=start_seconds) for role in roles]
            fleet = await cluster.fleet(specs, slots=4, gpus_per_slot=0)
            await fleet.arrange({"rollout": 4})
            tell(json.dumps(await globals()[scene](fleet, cluster, computers, raylets)))


@pytest.mark.parametrize(
    ("scene", "start_seconds", "expected"),
    [
        (lost_at_work, 600, [[1, 1, 1, 1, 1, 1, 2, 2], 2, {"rollout": 1, "judge": 1}, 3, 3, 4]),
        (all_lost, 10, "0 of 4 worker slots are left, too few for {'rollout': 4}; the same command continues"),
    ],
)
async def test_slots_of_a_lost_machine_are_out_at_once_and_their_work_goes_to_those_left(
    scene, start_seconds, expected
):
    program = f"import asyncio; from {__name__} import drive; asyncio.run(drive({scene.__name__!r}, {start_seconds}))"
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(driver.communicate(), 250)
    assert json.loads(told(out.decode().splitlines())) == expected
