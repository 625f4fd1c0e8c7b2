"""A fleet on machines that come and go; its workers are threads, so no machine is needed."""

import asyncio
from dataclasses import replace

import pytest

from infra.errors import ClusterFailed, NodeLost
from infra.pools.fleet import Fleet
from infra.pools.threads import ThreadLauncher
from infra.pools.worker import PoolSpec


class Machines:
    """Two machines with two slots each, of which some are gone."""

    def __init__(self) -> None:
        self.nodes = ("one", "one", "two", "two")
        self.gone: set[str] = set()
        self._threads = ThreadLauncher()

    async def start(self, spec, name, *, slot):
        if slot in await self.lost():
            raise NodeLost(f"{name}: its machine has left")
        return await self._threads.start(spec, name, slot=slot)

    async def find(self, spec, name):
        return await self._threads.find(spec, name)

    async def found(self, role):
        return {}

    async def lost(self):
        return frozenset(slot for slot, node in enumerate(self.nodes) if node in self.gone)

    async def reserve(self):
        pass

    def remove(self):
        pass


@pytest.fixture
async def fleet():
    machines = Machines()
    specs = [PoolSpec(role, "tests.support.workers:Counting", start_seconds=60) for role in ("rollout", "judge")]
    opened = Fleet(specs, machines)
    opened.machines = machines
    yield opened
    await opened.close()


async def test_slots_of_a_machine_that_has_left_are_not_dealt_and_come_back_with_it(fleet):
    await fleet.arrange({"rollout": 4})
    fleet.machines.gone = {"two"}
    await fleet.arrange({"rollout": 4})
    assert fleet.allocation() == {"rollout": (0, 1), "judge": ()}
    await fleet.arrange({"rollout": 1, "judge": 3})
    assert {role: len(slots) for role, slots in fleet.allocation().items()} == {"rollout": 1, "judge": 1}
    assert not {2, 3} & {slot for slots in fleet.allocation().values() for slot in slots}
    fleet.machines.gone = set()
    await fleet.arrange({"rollout": 4})
    assert fleet.allocation()["rollout"] == (0, 1, 2, 3)


async def test_a_replacement_that_finds_its_machine_gone_has_the_work_dealt_to_those_left(fleet):
    await fleet.arrange({"judge": 2})
    (first, second) = fleet.allocation()["judge"]
    fleet.machines.nodes = tuple("two" if slot in (first, second) else "one" for slot in range(4))
    fleet.machines.gone = {"two"}
    for slot in (first, second):
        seat = fleet.role("judge").seats[slot]
        seat.lose()  # as Ray tells of a worker whose machine died
    done = await asyncio.wait_for(fleet.role("judge").run("echo", 7, returns=int), 20)
    assert done.result == 7
    assert not {first, second} & set(fleet.allocation()["judge"])


async def test_too_few_slots_end_the_fleet_by_name_and_also_who_waits_for_a_worker(fleet):
    await fleet.arrange({"rollout": 4})
    fleet.machines.gone = {"one", "two"}
    for role in ("rollout", "judge"):  # have started: now nobody waits that long
        fleet.role(role).spec = replace(fleet.role(role).spec, start_seconds=0.2)
    told = r"0 of 4 worker slots are left, too few for \{'rollout': 4\}"
    with pytest.raises(ClusterFailed, match=told):
        await fleet.arrange({"rollout": 4})
    with pytest.raises(ClusterFailed, match=told):
        await asyncio.wait_for(fleet.role("rollout").run("echo", 1, returns=int), 20)
    fleet.machines.gone = {"one"}
    await fleet.arrange({"rollout": 4})
    assert (await fleet.role("rollout").run("echo", 1, returns=int)).result == 1
