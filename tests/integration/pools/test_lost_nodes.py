"""Machines that leave and join a Ray cluster: raylets on this machine, with a driver in a separate process."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rheostat.infra.errors import ClusterFailed
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.worker import PoolSpec
from tests.support.drivers import read_output, until
from tests.support.machines import Machines, lose_machine, machines, print_value, read_value

pytestmark = pytest.mark.system

WORKERS = "tests.support.workers"


async def lost_at_work(cluster: RayCluster, computers: Machines, folder: Path) -> object:
    """Lose one of two machines at work, start other workers next to the slots, and let another machine join."""
    raylets = [computers.join(2), computers.join(2)]
    fleet = await fleet_on(cluster, SlotCount(4, initial_slots=4))
    await fleet.arrange({"rollout": 4})
    works = await begin_works(fleet, folder)
    lose_machine(raylets[1])
    (folder / "released").touch()
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


async def all_lost(cluster: RayCluster, computers: Machines, folder: Path) -> object:
    """Lose every machine that has slots."""
    raylets = [computers.join(2), computers.join(2)]
    fleet = await fleet_on(cluster, SlotCount(4, wait_seconds=10))
    await fleet.arrange({"rollout": 4})
    works = await begin_works(fleet, folder)
    for raylet in raylets:
        lose_machine(raylet)
    try:
        await asyncio.gather(*works)
    except ClusterFailed as error:
        return str(error)
    return None


async def begin_works(fleet: Fleet, folder: Path) -> list[asyncio.Task]:
    """Give eight pieces of work, which end when the file `released` is there, to four workers that begin four."""
    works = [
        asyncio.create_task(
            fleet.role("rollout").run("hold", (folder / f"began-{number}", folder / "released"), returns=int)
        )
        for number in range(8)
    ]
    assert await until(lambda: len([*folder.glob("began-*")]) == 4)
    return works


async def yet_to_join(cluster: RayCluster, computers: Machines, folder: Path) -> object:
    """Begin with one machine. The machine that joins has room for a worker of two slots."""
    computers.join(2)
    fleet = await fleet_on(cluster, SlotCount(4, initial_slots=2), wide=2)
    await fleet.arrange({"rollout": 4})
    before = fleet.allocation()
    computers.join(2)
    while await fleet.check_slots() < 4:
        await asyncio.sleep(0.1)
    await fleet.arrange({"rollout": 2, "wide": 1})
    return [before["rollout"], fleet.allocation(), len(fleet.role("wide").pids)]


async def fleet_on(cluster: RayCluster, slots: SlotCount, **widths: int) -> Fleet:
    """Open a fleet."""
    roles = {"rollout": 1, "judge": 1, **widths}
    specs = [PoolSpec(role, f"{WORKERS}:Counting", start_seconds=600, slots=slots) for role, slots in roles.items()]
    return await cluster.fleet(specs, slots=slots)


async def drive(scenario: str) -> None:
    """Run a scenario and print its result."""
    with tempfile.TemporaryDirectory() as folder, machines(os.environ) as computers:
        async with RayCluster.open("machines", address=computers.address) as cluster:
            print_value(json.dumps(await globals()[scenario](cluster, computers, Path(folder))))


EXPECTED = {
    lost_at_work: [[1, 1, 1, 1, 1, 1, 2, 2], 2, {"rollout": 1, "judge": 1}, 3, 3, 4],
    all_lost: "only 0 of 4 worker slots are available, but at least 1 are needed. No more became available within "
    "10 s (pools.wait_seconds). Run the same command again to continue.",
    yet_to_join: [[0, 1], {"rollout": [0, 1], "judge": [], "wide": [2, 3]}, 1],
}


@pytest.mark.parametrize("scenario", EXPECTED)
async def test_slots_of_lost_machines_are_dropped_at_once_and_slots_of_new_machines_are_used(scenario):
    program = f"import asyncio; from {__name__} import drive; asyncio.run(drive({scenario.__name__!r}))"
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert json.loads(read_value((await read_output(driver)).splitlines())) == EXPECTED[scenario]
