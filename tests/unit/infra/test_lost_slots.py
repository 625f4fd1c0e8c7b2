"""A fleet on machines that leave and join. Its workers are threads, so no machine is needed."""

import asyncio

import pytest

from rheostat.infra.errors import ClusterFailed, NodeLost
from rheostat.infra.pools.fleet import CHECK_SECONDS, Fleet
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.threads import ThreadLauncher
from rheostat.infra.pools.worker import PoolSpec, _first_cause


class Machines:
    """Two machines with two slots each, some of which are lost."""

    def __init__(self) -> None:
        self.nodes = ("one", "one", "two", "two")
        self.gone: set[str] = set()
        self._threads = ThreadLauncher()

    async def start(self, spec, name, *, slot):
        if slot in await self.list_lost_slots():
            raise NodeLost(f"{name}: its machine has left")
        return await self._threads.start(spec, name, slot=slot)

    async def find(self, spec, name):
        return await self._threads.find(spec, name)

    async def list_generations(self, role):
        return {}

    async def list_lost_slots(self):
        return frozenset(slot for slot, node in enumerate(self.nodes) if node in self.gone)

    async def reserve(self, wait_seconds):
        pass

    def release(self):
        pass


@pytest.fixture
async def opened():
    """Open fleets on such machines."""
    fleets = []

    def open_fleet(*, gone=(), least=1, wait_seconds=60.0):
        machines = Machines()
        machines.gone = {*gone}
        specs = [PoolSpec(role, "tests.support.workers:Counting", start_seconds=60) for role in ("rollout", "judge")]
        fleets.append(Fleet(specs, machines, SlotCount(4, min_slots=least, wait_seconds=wait_seconds)))
        fleets[-1].machines = machines
        return fleets[-1]

    yield open_fleet
    for fleet in fleets:
        await fleet.close()


class SlowToRespond(Machines):
    """Machines with a worker of another process, which takes longer to respond than the interval between two checks."""

    async def find(self, spec, name):
        await asyncio.sleep(1.5 * CHECK_SECONDS)
        worker = await self._threads.start(spec, name, slot=0)
        await worker.wake(None, stall_seconds=300)
        return worker

    async def list_generations(self, role):
        return {0: 0} if role == "rollout" else {}


async def test_a_worker_of_another_process_that_responds_slowly_is_found():
    specs = [PoolSpec(role, "tests.support.workers:Counting") for role in ("rollout", "judge")]
    fleet = Fleet(specs, SlowToRespond(), SlotCount(4))
    try:
        assert (await asyncio.wait_for(fleet.role("rollout").run("echo", 7, returns=int), 200)).result == 7
    finally:
        await fleet.close()


@pytest.fixture
def fleet(opened):
    return opened()


async def test_slots_of_a_lost_machine_are_not_assigned_until_it_is_back(fleet):
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


async def test_work_of_a_worker_whose_machine_is_gone_goes_to_the_remaining_slots(fleet):
    await fleet.arrange({"judge": 2})
    (first, second) = fleet.allocation()["judge"]
    fleet.machines.nodes = tuple("two" if slot in (first, second) else "one" for slot in range(4))
    fleet.machines.gone = {"two"}
    for slot in (first, second):
        fleet.role("judge").slots[slot].lose()  # as Ray reports a worker whose machine died
    done = await asyncio.wait_for(fleet.role("judge").run("echo", 7, returns=int), 200)
    assert done.result == 7
    assert not {first, second} & set(fleet.allocation()["judge"])


async def test_too_few_slots_fail_the_fleet_and_everything_that_waits_for_a_worker(opened):
    fleet = opened(wait_seconds=0.2)
    await fleet.arrange({"rollout": 4})
    fleet.machines.gone = {"one", "two"}
    told = r"only 0 of 4 worker slots are available, but at least 1 are needed\. .* within 0\.2 s"
    with pytest.raises(ClusterFailed, match=told):
        await fleet.arrange({"rollout": 4})
    with pytest.raises(ClusterFailed, match=told):
        await asyncio.wait_for(fleet.role("rollout").run("echo", 1, returns=int), 200)
    fleet.machines.gone = {"one"}
    await fleet.arrange({"rollout": 4})
    assert (await fleet.role("rollout").run("echo", 1, returns=int)).result == 1


async def test_fewer_slots_than_configured_fail_the_fleet_even_if_its_roles_need_no_more(opened):
    fleet = opened(least=3, wait_seconds=0.2)
    assert await fleet.check_slots() == 4
    fleet.machines.gone = {"two"}
    with pytest.raises(
        ClusterFailed, match=r"2 of 4 worker slots are available, but at least 3 are needed\. .* within 0\.2 s"
    ):
        await fleet.check_slots()
    with pytest.raises(ClusterFailed, match="2 of 4 worker slots are available"):
        await fleet.arrange({"rollout": 1})


async def test_a_fleet_without_enough_slots_waits_for_machines_and_continues_when_they_join(opened):
    fleet = opened(gone=["one", "two"], least=2)
    arranging = asyncio.create_task(fleet.arrange({"rollout": 4}))
    assert not (await asyncio.wait({arranging}, timeout=0.1))[0]
    fleet.machines.gone = {"two"}
    await asyncio.wait_for(arranging, 200)
    assert fleet.slots == 2
    assert len(fleet.allocation()["rollout"]) == 2
    fleet.machines.gone = set()
    assert await fleet.check_slots() == 4
    await fleet.arrange({"rollout": 4})
    assert len(fleet.allocation()["rollout"]) == 4


def test_a_shortened_reason_of_a_lost_worker_keeps_the_cause_and_the_advice():
    reason = _first_cause(RuntimeError(f"Ray's page\nWorker exit detail: out of memory {'because ' * 99}: set a limit"))
    assert len(reason) < 310 and reason.startswith("out of memory because") and reason.endswith("because : set a limit")
