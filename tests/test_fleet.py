import asyncio
import time
from collections import Counter

import psutil
import pytest
import pytest_asyncio

from infra.cluster import Cluster
from infra.workers import PoolSpec
from tests.workers_for_fleets import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLEETS = iter(range(1000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with Cluster.open("fleets") as opened:
        yield opened


class Shared:
    """A fleet of two roles, rollout and judge, and what its workers tell on disk."""

    def __init__(self, cluster, home, *, slots=2, widths=(1, 1), targets=("Turning", "Turning"), **options):
        (home / "awake").mkdir(exist_ok=True)
        number = next(FLEETS)
        self.home, self.slots = home, slots
        self.names = (f"rollout{number}", f"judge{number}")
        fields = {"start_seconds": 60, "stall_seconds": 30} | options
        specs = [
            PoolSpec(role, f"tests.workers_for_fleets:{target}", {"role": role, "home": home}, slots=width, **fields)
            for role, width, target in zip(self.names, widths, targets, strict=True)
        ]
        self.fleet = cluster.fleet(specs, slots=slots, gpus_per_slot=0)
        self.rollout, self.judge = (self.fleet.role(role) for role in self.names)
        self.polls = 0

    async def arrange(self, rollout, judge, version="v1"):
        take = {role: Served(version) for role in self.names}
        moves = await self.fleet.arrange(dict(zip(self.names, (rollout, judge), strict=True)), take=take)
        self.check()
        return moves

    def awake(self):
        """Numbers of slots awake in each role."""
        self.check()
        return tuple(len(slots) for slots in self.fleet.allocation().values())

    def check(self):
        """Each slot is awake in at most one role, by the fleet's account and by its processes'."""
        slots = [slot for some in self.fleet.allocation().values() for slot in some]
        assert len(slots) == len(set(slots)) <= self.slots
        assert set(slots) <= set(range(self.slots))
        holding = [path.name for path in (self.home / "awake").iterdir() if alive(int(path.name.rpartition("-")[2]))]
        assert len(holding) <= self.slots
        self.polls += 1

    async def watch(self, task):
        while not task.done():
            self.check()
            await asyncio.sleep(0.01)
        return task.result()

    def tell(self, what):
        (self.home / what).touch()

    def done(self):
        path = self.home / "done"
        return [line.split()[:2] for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self):
        return {process.pid for process in psutil.process_iter() if self.holds(process)}


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def gone(pids, seconds=10):
    return await until(lambda: not any(alive(pid) for pid in pids), seconds=seconds)


async def until(holds, *, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return holds()


async def test_slots_pass_between_roles_and_queued_works_are_done_exactly_once(cluster, tmp_path):
    shared = Shared(cluster, tmp_path, slots=4)
    works = [
        asyncio.create_task(pool.run("work", (f"{index}", 0.02), returns=tuple))
        for pool in (shared.rollout, shared.judge)
        for index in range(40)
    ]
    assert [(move.how, move.error) for move in await shared.arrange(2, 2)] == [("start", None)] * 4
    for rollout, judge in ((3, 1), (4, 0), (0, 4), (2, 2)):
        await shared.watch(asyncio.create_task(shared.arrange(rollout, judge)))
        assert shared.awake() == (rollout, judge)
    assert {one.attempts for one in await asyncio.gather(*works)} == {1}
    assert set(Counter(map(tuple, shared.done())).values()) == {1}
    assert len(shared.done()) == 80
    assert [load.done for load in shared.fleet.load().values()] == [40, 40]
    await shared.fleet.close()
