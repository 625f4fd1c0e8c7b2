"""Fleets of real processes on one embedded cluster. Most tests share a fleet of two slots and restore it."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
import pytest_asyncio

from rheostat.infra.errors import BadInput, ClusterFailed, WorkerFailed, WorkerLost
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.embedded import Preload
from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.placement_group import ReservedSlots
from rheostat.infra.pools.worker import PoolSpec
from tests.support.drivers import read_line, read_output, start_driver, until, wait_until_gone
from tests.support.fleet_workers import Served, holds_memory
from tests.support.jobs import is_alive

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.system]

FLEETS = iter(range(1000))


class Shared:
    """Fleet of two roles, rollout and judge, and the files that its workers write."""

    @classmethod
    async def of(cls, cluster, home, *, slots=2, widths=(1, 1), targets=("Turning", "Turning")):
        (home / "awake").mkdir(exist_ok=True)
        number = next(FLEETS)
        shared = cls()
        shared.home, shared.slots = home, slots
        shared.names = (f"rollout{number}", f"judge{number}")
        shared.widths = dict(zip(shared.names, widths, strict=True))
        shared.specs = [
            PoolSpec(
                role=role,
                target=f"tests.support.fleet_workers:{target}",
                options={"role": role, "home": home},
                slots=width,
            )
            for role, width, target in zip(shared.names, widths, targets, strict=True)
        ]
        shared.fleet = await cluster.fleet(shared.specs, slots=SlotCount(slots))
        shared.rollout, shared.judge = (shared.fleet.role(role) for role in shared.names)
        return shared

    async def arrange(self, rollout, judge):
        """Rearrange the fleet, and check the invariant of its slots until the rearrangement ends."""
        take = {role: Served("v1") for role in self.names}
        task = asyncio.create_task(self.fleet.arrange(dict(zip(self.names, (rollout, judge), strict=True)), take=take))
        while not task.done():
            self.check()
            await asyncio.sleep(0.01)
        return task.result()

    @property
    def awake(self):
        """Number of slots awake in each role."""
        return tuple(len(slots) for slots in self.fleet.allocation().values())

    @property
    def pids(self):
        """Process ids of all workers, awake and asleep."""
        seats = [seat for pool in (self.rollout, self.judge) for seat in pool.slots.values()]
        return {seat.worker.place.pid for seat in seats if seat.worker is not None}

    def check(self):
        """Check that each slot is awake in at most one role, according to the fleet and to its processes."""
        slots = [slot for some in self.fleet.allocation().values() for slot in some]
        assert len(slots) == len(set(slots)) <= self.slots
        assert set(slots) <= set(range(self.slots))
        holding = [path.name.rpartition("-")[0] for path in (self.home / "awake").iterdir() if holds_memory(path)]
        assert sum(self.widths[role] for role in holding) <= self.slots, f"{sorted(holding)}, awake {self.awake}"

    def tell(self, moment, role):
        """Write the file that makes the next worker of a role do what the file name states. Return its path."""
        path = self.home / moment.format(role=self.names[role])
        path.touch()
        return path

    def tell_to_wait(self, moment, role):
        """Make the next worker of a role wait at a moment.

        Return the file whose deletion ends the wait, and a condition that holds while a worker waits.
        """
        return self.tell(f"wait-{{role}}-{moment}", role), (self.home / f"reached-{self.names[role]}-{moment}").exists

    def done(self):
        path = self.home / "done"
        return [tuple(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []

    def works(self, pool, *seconds):
        return [
            asyncio.create_task(pool.run("work", (f"{index}", seconds), returns=tuple))
            for index, seconds in enumerate(seconds)
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with RayCluster.open("fleets", preload=Preload(("tests.support.fleet_workers",))) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(cluster, tmp_path_factory):
    """Fleet of two slots, one in each role. All four workers have processes."""
    shared = await Shared.of(cluster, tmp_path_factory.mktemp("pair"))
    for split in ((2, 0), (0, 2), (1, 1)):
        await shared.arrange(*split)
    yield shared
    await shared.fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def shared(pair):
    """The pair with one slot in each role, before and after the test."""
    assert pair.awake == (1, 1)
    yield pair
    assert not [
        path for path in pair.home.iterdir() if path.name.startswith(("die", "fail", "wait", "reached", "unbuildable"))
    ]
    await pair.arrange(1, 1)


async def test_slots_move_between_roles_and_queued_work_is_done_exactly_once(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=4)
    works = [work for pool in (shared.rollout, shared.judge) for work in shared.works(pool, *[0.02] * 40)]
    assert [(move.how, move.error) for move in await shared.arrange(2, 2)] == [("start", None)] * 4
    for split in ((3, 1), (4, 0), (0, 4), (2, 2)):
        await shared.arrange(*split)
        assert shared.awake == split
    assert {one.attempts for one in await asyncio.gather(*works)} == {1}
    assert len(shared.done()) == len(set(shared.done())) == 80
    assert [load.done for load in shared.fleet.load().values()] == [40, 40]
    pids = shared.pids
    assert len(pids) == 8
    await shared.fleet.close()
    assert await wait_until_gone(*pids)


async def test_a_worker_that_has_no_process_yet_is_started_and_later_woken(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=1)
    rollout = shared.names[0]
    await shared.fleet.arrange({rollout: 1})
    await shared.fleet.arrange({})
    there = await shared.arrange(1, 0)
    await shared.arrange(0, 0)
    again = await shared.arrange(1, 0)
    assert [move.how for move in (*there, *again)] == ["start", "wake"]
    await shared.fleet.close()


async def test_a_sleeping_worker_keeps_its_process_and_is_woken(shared):
    before = shared.pids
    (sleeping,) = shared.judge.pids
    there = await shared.arrange(2, 0)
    assert shared.judge.pids == ()
    assert is_alive(sleeping)
    back = await shared.arrange(1, 1)
    assert [move.how for move in (*there, *back)] == ["wake", "wake"]
    assert shared.pids == before


async def test_a_woken_worker_serves_the_version_of_its_role(shared):
    await shared.arrange(0, 2)
    await shared.arrange(2, 0)
    done = await asyncio.gather(*shared.works(shared.rollout, 0.1, 0.1))
    assert [one.result[1] for one in done] == ["v1", "v1"]


async def test_idle_workers_leave_first_and_busy_workers_end_their_work(shared):
    await shared.arrange(2, 0)
    held, reached = shared.tell_to_wait("work", 0)
    (work,) = shared.works(shared.rollout, 0)
    assert await until(lambda: reached() and shared.fleet.load()[shared.names[0]].idle == 1)
    (idle,) = [slot for slot, seat in shared.rollout.slots.items() if seat.is_available]
    (first,) = await shared.arrange(1, 1)
    assert (first.slot, first.before, first.after) == (idle, *shared.names)
    second = asyncio.create_task(shared.arrange(0, 2))
    assert await until(lambda: not any(slot.wanted for slot in shared.rollout.slots.values()))
    await asyncio.sleep(0.2)
    assert shared.awake == (1, 1)
    held.unlink()
    (move,) = await second
    assert (await work).attempts == 1
    assert move.drain_seconds > 0


async def test_the_load_reports_work_that_runs_and_work_that_waits(shared):
    held, reached = shared.tell_to_wait("work", 0)
    before = shared.fleet.load()[shared.names[0]]
    works = shared.works(shared.rollout, 0, 0)
    assert await until(reached)
    await asyncio.sleep(0.1)
    rollout, judge = shared.fleet.load().values()
    assert (rollout.slots, rollout.workers, rollout.idle, rollout.waiting) == (1, 1, 0, 1)
    ((seconds, work),) = rollout.in_flight
    assert work == ("0", 0)
    assert 0.1 <= seconds <= rollout.busy_seconds - before.busy_seconds + 0.001
    assert (judge.workers, judge.idle, judge.waiting, judge.in_flight) == (1, 1, 0, ())
    held.unlink()
    await asyncio.gather(*works)
    assert shared.fleet.load()[shared.names[0]].done == before.done + 2


@pytest.mark.parametrize(
    ("before", "trouble", "split", "awake", "error"),
    [
        ((1, 1), "die-{role}-sleep", (2, 0), (2, 0), None),
        ((1, 1), "fail-{role}-sleep", (2, 0), (2, 0), None),
        ((2, 0), "die-{role}-take", (1, 1), (1, 1), None),
        ((1, 1), "fail-{role}-take", (0, 2), (1, 1), "ValueError: judge.* cannot take"),
    ],
)
async def test_a_worker_that_fails_during_a_move_costs_no_other_worker(shared, before, trouble, split, awake, error):
    await shared.arrange(*before)
    pids = shared.judge.pids
    shared.tell(trouble, 1)
    (move,) = await shared.arrange(*split)
    assert re.search(error, move.error) if error else move.error is None
    assert shared.awake == awake
    assert "sleep" not in trouble or await wait_until_gone(*pids)
    works = shared.works(shared.judge if awake[1] else shared.rollout, 0, 0)
    assert len(await asyncio.gather(*works)) == 2


async def test_a_worker_that_cannot_load_frees_its_slot_and_raises_if_its_role_has_no_other_worker(shared):
    await shared.arrange(2, 0)
    before = set(shared.rollout.pids)
    shared.tell("fail-{role}-take", 1)
    with pytest.raises(WorkerFailed, match=r"ValueError: judge.* cannot take\. No other judge\d+ worker is available"):
        await shared.arrange(1, 1)
    assert shared.awake == (2, 0)
    assert set(shared.rollout.pids) == before


async def test_a_role_whose_workers_die_at_every_start_raises_an_error(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=1, targets=("Turning", "Doomed"))
    await shared.arrange(1, 0)
    with pytest.raises(WorkerLost, match=r"died.*\. No other judge\d+ worker is available"):
        await shared.arrange(0, 1)
    assert shared.awake == (1, 0)
    await shared.fleet.close()


async def test_a_worker_that_cannot_be_built_frees_its_slot(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=1, targets=("Turning", "Untrue"))
    await shared.arrange(1, 0)
    unbuildable = shared.tell("unbuildable-{role}", 1)
    with pytest.raises(WorkerFailed, match="FileNotFoundError: no weights"):
        await shared.arrange(0, 1)
    assert shared.awake == (1, 0)
    unbuildable.unlink()
    with pytest.raises(WorkerFailed, match="type str, but it returned NoneType"):
        await shared.arrange(0, 1)
    assert shared.awake == (1, 0)
    await shared.fleet.close()


async def test_a_slot_whose_worker_cannot_be_restored_is_retried_when_work_waits(shared):
    await shared.arrange(2, 0)
    for role in (0, 1):
        shared.tell("fail-{role}-take", role)
    with pytest.raises(WorkerFailed, match=r"judge.* cannot take"):
        await shared.arrange(1, 1)
    assert shared.awake == (1, 0)
    await asyncio.gather(*shared.works(shared.rollout, 0))
    assert await until(lambda: len(shared.rollout.pids) == 2)


async def test_waiting_work_retries_an_empty_slot_and_a_fleet_can_be_closed_during_a_move(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=1)
    await shared.arrange(0, 1)
    (work,) = shared.works(shared.judge, 0)
    await work
    for role in (0, 1):
        shared.tell("fail-{role}-take", role)
    held, reached = shared.tell_to_wait("sleep", 1)
    arranging = asyncio.create_task(shared.arrange(1, 0))
    assert await until(reached)
    (work,) = shared.works(shared.judge, 0)
    held.unlink()
    with pytest.raises(WorkerFailed, match=r"rollout.* cannot take"):
        await arranging
    assert (await work).attempts == 1
    assert shared.awake == (0, 1)
    held, reached = shared.tell_to_wait("take", 0)
    arranging = asyncio.create_task(shared.fleet.arrange({shared.names[0]: 1}, take={shared.names[0]: Served("v2")}))
    assert await until(lambda: reached() and shared.awake == (0, 0))
    pids = shared.pids
    await shared.fleet.close()
    assert await wait_until_gone(*pids)
    with pytest.raises(ClusterFailed, match="closed while workers were moved"):
        await arranging


async def test_a_sleeping_or_idle_worker_that_is_killed_is_started_again_when_it_is_needed(shared):
    await shared.arrange(2, 0)
    sleeping = [seat.worker.place.pid for seat in shared.judge.slots.values() if seat.worker is not None]
    idle = shared.rollout.pids[0]
    for pid in (*sleeping, idle):
        os.kill(pid, signal.SIGKILL)
    assert await until(lambda: len(shared.rollout.pids) == 2 and idle not in shared.rollout.pids)
    assert await until(lambda: not any(slot.worker for slot in shared.judge.slots.values()))
    moves = await shared.arrange(0, 2)
    assert [(move.how, move.error) for move in moves] == [("start", None)] * 2


async def test_a_worker_killed_at_work_is_replaced_in_its_slot(shared):
    slots = shared.fleet.allocation()
    shared.tell("die-{role}-work", 0)
    (work,) = shared.works(shared.rollout, 0)
    done = await work
    assert (done.attempts, done.result[1]) == (2, "v1")
    assert shared.fleet.allocation() == slots


async def test_a_worker_killed_at_its_last_work_leaves_and_its_work_waits_for_another(shared):
    held, reached = shared.tell_to_wait("work", 0)
    (work,) = shared.works(shared.rollout, 0)
    assert await until(reached)
    (slot,) = shared.fleet.allocation()[shared.names[0]]
    arranging = asyncio.create_task(shared.arrange(0, 2))
    assert await until(lambda: not shared.rollout.slots[slot].wanted)
    os.kill(shared.rollout.slots[slot].worker.place.pid, signal.SIGKILL)
    (move,) = await arranging
    assert (move.error, shared.awake) == (None, (0, 2))
    assert not work.done()
    held.unlink()
    (shared.home / f"reached-{shared.names[0]}-work").unlink()
    await shared.arrange(1, 1)
    assert (await work).attempts == 2


async def test_an_arrangement_waits_for_a_replacement_and_leaves_no_surplus_worker(shared):
    (before,) = shared.rollout.pids
    os.kill(before, signal.SIGKILL)
    assert await until(lambda: before not in shared.rollout.pids)
    await shared.arrange(0, 2)
    assert shared.awake == (0, 2)
    (move,) = await shared.arrange(1, 1)
    assert (move.how, move.error) == ("wake", None)


async def test_arrangements_run_one_after_another_and_a_cancelled_one_is_finished(shared):
    held, reached = shared.tell_to_wait("take", 1)
    first = asyncio.create_task(shared.arrange(0, 2))
    second = asyncio.create_task(shared.arrange(2, 0))
    assert await until(lambda: reached() and shared.awake == (0, 1))
    first.cancel()
    await asyncio.sleep(0.1)
    assert not second.done()
    held.unlink()
    moves = await second
    assert {move.before for move in moves} == {shared.names[1]}
    assert shared.awake == (2, 0)


async def test_an_arrangement_that_changes_nothing_needs_no_answer_of_a_worker(shared):
    for pid in (*shared.rollout.pids, *shared.judge.pids):
        os.kill(pid, signal.SIGSTOP)
    try:
        assert await shared.arrange(1, 1) == ()
    finally:
        for pid in (*shared.rollout.pids, *shared.judge.pids):
            os.kill(pid, signal.SIGCONT)


async def test_more_workers_than_slots_and_unknown_roles_are_refused(shared):
    with pytest.raises(BadInput, match=r"3 slots, .* 2"):
        await shared.arrange(2, 1)
    with pytest.raises(BadInput, match=r"no roles \['critic'\]"):
        await shared.fleet.arrange({"critic": 1})
    assert shared.awake == (1, 1)


async def test_a_worker_of_two_slots_takes_both_and_the_others_keep_the_rest(cluster, tmp_path):
    shared = await Shared.of(cluster, tmp_path, slots=3, widths=(1, 2))
    await shared.arrange(3, 0)
    moves = await shared.arrange(1, 1)
    assert [(move.before, move.after) for move in moves] == [shared.names] * 2
    assert shared.awake == (1, 2)
    assert len(shared.judge.pids) == 1
    shared.tell("fail-{role}-take", 0)
    moves = await shared.arrange(3, 0)
    assert [move.error is None for move in moves] == [False, False]
    assert shared.awake == (1, 2)
    await shared.fleet.close()


async def test_after_random_arrangements_and_kills_every_slot_has_one_role_and_all_work_is_done(shared):
    draw = random.Random(7)
    works = [work for pool in (shared.rollout, shared.judge) for work in shared.works(pool, *[0.02] * 30)]
    before = len(shared.done())
    for _ in range(8):
        rollout = draw.randint(0, 2)
        split = (rollout, draw.randint(0, 2 - rollout))
        arranging = asyncio.create_task(shared.arrange(*split))
        await asyncio.sleep(draw.random() * 0.1)
        if shared.pids and draw.random() < 0.4:
            with contextlib.suppress(ProcessLookupError):  # it is dead already, and the fleet has not noticed it
                os.kill(draw.choice(sorted(shared.pids)), signal.SIGKILL)
        moves = await arranging
        shared.check()
        undone = any(move.error for move in moves)
        assert shared.awake == split or undone
    await shared.arrange(1, 1)
    await asyncio.gather(*works)
    names = Counter(shared.done()[before:])
    assert len(names) == 60


async def test_another_process_uses_the_awake_workers_and_moves_no_worker(cluster, shared):
    await shared.arrange(2, 0)
    other = await start_driver(
        f"""
        fleet = await cluster.fleet({shared.specs!r}, slots=SlotCount(2))
        work = lambda role: fleet.role(role).run("work", ("other", 0.01), returns=tuple)
        rollout, judge = {shared.names!r}
        judged = asyncio.create_task(work(judge))
        print((await work(rollout)).pid, judged.done(), flush=True)
        print((await judged).pid, flush=True)
        again = await work(rollout)
        print(again.pid, again.attempts, flush=True)
        """,
        options=f"{cluster.namespace!r}, address={cluster.address!r}",
    )
    used, judged_early = (await read_line(other)).split()
    assert int(used) in shared.rollout.pids
    assert judged_early == "False"
    await shared.arrange(0, 2)
    assert int(await read_line(other)) in shared.judge.pids
    await asyncio.sleep(0.2)  # meanwhile it offers work to a worker that is asleep now
    await shared.arrange(1, 1)
    again, attempts = map(int, (await read_line(other)).split())
    assert await other.wait() == 0
    assert again in shared.rollout.pids
    assert attempts == 1


async def test_a_cluster_without_room_for_the_slots_is_a_named_error(cluster):
    reserved_slots = ReservedSlots(SlotCount(2, initial_slots=2), widest=1, gpus=GpuLayout(1), machines=Machines())
    with pytest.raises(ClusterFailed, match=r"could not reserve 2 worker slots with .*'GPU': 1.* each within"):
        await reserved_slots.reserve(0.3)


@pytest.mark.slow
async def test_workers_of_all_roles_have_access_to_the_gpus_of_their_slots():
    """The GPUs exist only as a number that Ray counts."""
    program = """
import asyncio, ray
from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.placement_group import SLOT, ReservedSlots
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.worker import PoolSpec
async def main():
    options = {"num_cpus": 0, "num_gpus": 4, "resources": {SLOT: 100}, "logging_level": "ERROR"}
    ray.init(address="local", namespace="gpus", include_dashboard=False, **options)
    for gpus, slots in ((1, 4), (2, 2), (0.5, 4)):
        roles = {f"narrow{slots}{gpus}": 1, f"wide{slots}{gpus}": 2}
        specs = [PoolSpec(role, "tests.support.workers:Counting", slots=width) for role, width in roles.items()]
        count = SlotCount(slots)
        reserved = ReservedSlots(count, widest=2, gpus=GpuLayout(gpus), machines=Machines(is_single=True))
        fleet = Fleet(specs, reserved, count)
        seen = []
        for (role, width) in roles.items():
            count = min(2, slots // width)
            await fleet.arrange({role: count})
            works = [fleet.role(role).run("environment", ("CUDA_VISIBLE_DEVICES",), returns=dict) for _ in range(count)]
            seen += sorted(done.result["CUDA_VISIBLE_DEVICES"] for done in await asyncio.gather(*works))
        print(*seen, flush=True)
        await fleet.close()
    ray.shutdown()
asyncio.run(main())
"""
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert (await read_output(other)).split("\n") == ["0 1 0,1 2,3", "0,1 2,3 0,1,2,3", "0 0 0 1", ""]


@pytest.mark.slow
async def test_every_slot_on_an_external_cluster_reserves_a_cpu():
    """One process keeps a cluster of two CPUs, and another process arranges two slots there."""
    keep = """
import os, tempfile
from rheostat.infra.pools.embedded import EMBEDDED_ENVIRONMENT
os.environ.update(EMBEDDED_ENVIRONMENT)
import ray
with tempfile.TemporaryDirectory(dir="/tmp") as directory:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
    ray.shutdown()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    keeper = await asyncio.create_subprocess_exec(sys.executable, "-c", keep, **pipes)
    try:
        address = (await read_line(keeper)).split()[-1]
        other = await start_driver(
            """
            specs = [PoolSpec(role, "tests.support.workers:Counting") for role in ("rollout", "judge")]
            fleet = await cluster.fleet(specs, slots=SlotCount(2))
            await fleet.arrange({"rollout": 1, "judge": 1})
            await fleet.arrange({"judge": 2})
            import ray
            done = [await fleet.role("judge").run("echo", 1, returns=int) for _ in range(2)]
            print(len(done), ray.available_resources().get("CPU", 0), flush=True)
            """,
            options=f'"others", address={address!r}',
        )
        assert (await read_output(other)).split() == ["2", "0"]
    finally:
        await asyncio.wait_for(keeper.communicate(b"\n"), 120)
