"""Update ranks and worker slots on GPUs that exist only as numbers that Ray counts: two machines with two GPUs each."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from rheostat.infra.errors import ClusterFailed
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.placement_group import ReservedSlots
from rheostat.infra.pools.worker import PoolSpec
from tests.support.drivers import read_output
from tests.support.machines import machines, print_value, read_value

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RANK = "tests.support.placed_ranks:PlacedRank"
WAIT_SECONDS = 60
MACHINES = 2


@dataclass(frozen=True)
class Case:
    layout: GpuLayout
    slots: int
    is_killed: bool = False
    """Whether a rank is killed, so that all ranks are started again."""
    is_joined: bool = False
    """Whether the ranks are started like those of a process that has not reserved the slots."""


CASES = {
    "whole GPUs": Case(GpuLayout(1, 4, 1), 4),
    "halves": Case(GpuLayout(0.5, 4, 0.5), 4),
    "0.6 and 0.4": Case(GpuLayout(0.6, 4, 0.4), 4),
    "more ranks than slots": Case(GpuLayout(1, 4, 1), 2, is_killed=True),
    "two GPUs for each slot": Case(GpuLayout(2, 4, 1), 2, is_joined=True),
    "sequence-parallel pairs": Case(GpuLayout(1, 4, 1, ranks_per_node=2), 4),
    "a separate pair": Case(GpuLayout(1, 4, 1, ranks_per_node=2), 2),
    "dedicated GPUs": Case(GpuLayout(1, 2, 1, takes_turns=False), 2),
}
TOO_LARGE = Case(GpuLayout(1, 1, 1, takes_turns=False), 4)


async def place(cluster: RayCluster, name: str, case: Case, *, wait_seconds: float = WAIT_SECONDS) -> dict[str, object]:
    """Reserve the slots, start the ranks, and return the machine and GPUs of each worker and of each rank."""
    role = name.replace(" ", "-")
    fleet = await cluster.fleet(
        [PoolSpec(f"slots-{role}", RANK)],
        slots=SlotCount(case.slots, initial_slots=case.slots, wait_seconds=wait_seconds),
        gpus=case.layout,
    )
    ranks = None
    try:
        if case.is_joined:
            await fleet.reserve()
        spec = PoolSpec(role, RANK, size=case.layout.ranks, gpus=case.layout.per_rank)
        ranks = await cluster.ranks(
            spec, gpus=case.layout, fleet=None if case.is_joined else fleet, wait_seconds=wait_seconds
        )
        with tempfile.TemporaryDirectory() as folder:
            done = await ranks.run("report", (Path(folder), case.is_killed), returns=int)
            found = [(Path(folder) / f"rank-{rank}").read_text().split() for rank in range(case.layout.ranks)]
        slots = [
            [node, *devices] for node, devices in zip(fleet._launcher.nodes, fleet._launcher._devices, strict=True)
        ]
        return {"ranks": found, "slots": slots, "attempts": done.attempts}
    finally:
        if ranks is not None:
            await ranks.close()
        await fleet.close()


async def drive() -> None:
    """Place the ranks of all cases, and print the places."""
    with machines(os.environ) as computers:
        for _ in range(MACHINES):
            computers.join(8, gpus=2)
        async with RayCluster.open("gpus", address=computers.address) as cluster:
            places = {name: await place(cluster, name, case) for name, case in CASES.items()}
            try:
                await place(cluster, "too large", TOO_LARGE, wait_seconds=3)
            except ClusterFailed as error:
                places["too large"] = {"error": str(error)}
            slots = ReservedSlots(SlotCount(5), widest=1, gpus=GpuLayout(1), machines=Machines(is_single=True))
            try:
                await slots.reserve(WAIT_SECONDS)
            except ClusterFailed as error:
                places["one machine"] = {"error": str(error)}
            print_value(json.dumps(places))


@pytest.fixture(scope="module")
def places():
    program = f"import asyncio; from {__name__} import drive; asyncio.run(drive())"

    async def run() -> str:
        driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
        return await read_output(driver, seconds=900)

    return json.loads(read_value(asyncio.run(run()).splitlines()))


@pytest.mark.parametrize("name", CASES)
def test_no_two_ranks_have_one_gpu(places, name):
    found = [tuple(place) for place in places[name]["ranks"]]
    assert len(found) == len(set(found)) == CASES[name].layout.ranks
    assert places[name]["attempts"] == 1 + CASES[name].is_killed


@pytest.mark.parametrize("name", ["whole GPUs", "halves", "0.6 and 0.4", "two GPUs for each slot"])
def test_ranks_use_the_gpus_of_the_slots(places, name):
    slots = {(node, device) for node, *devices in places[name]["slots"] for device in devices}
    assert {tuple(place) for place in places[name]["ranks"]} == slots and len(slots) == 4


def test_dedicated_ranks_use_no_gpu_of_a_slot(places):
    found = places["dedicated GPUs"]
    assert not {tuple(place) for place in found["ranks"]} & {tuple(place) for place in found["slots"]}


@pytest.mark.parametrize("name", ["sequence-parallel pairs", "a separate pair"])
def test_ranks_of_a_sequence_parallel_pair_are_on_one_machine(places, name):
    nodes = [node for node, _ in places[name]["ranks"]]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_ranks_for_which_a_cluster_has_too_few_gpus_end_with_a_message(places):
    error = places["too large"]["error"]
    assert "1 of 1 update ranks need separate GPUs" in error and "has 4 in all" in error and "3 s" in error


def test_slots_for_which_the_only_machine_has_too_few_gpus_end_at_once_with_a_message(places):
    error = places["one machine"]["error"]
    assert "5 worker slots with 1 GPUs each need 5 GPUs, but this machine has 4" in error and "pools.workers" in error
