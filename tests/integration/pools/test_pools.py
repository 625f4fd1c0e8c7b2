import asyncio
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from infra.errors import ClusterFailed, Damaged, WorkerFailed, WorkerLost, WorkerStalled
from infra.pools.cluster import RayCluster
from infra.pools.worker import Machines, PoolSpec
from infra.processes.guard import processes_of
from tests.support.jobs import is_alive
from tests.support.servers import guards_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.system]

ROLES = iter(range(1000))


def spec(target="Counting", **changes):
    fields = {"size": 1, "start_seconds": 60, "stall_seconds": 30, "max_restarts": 3} | changes
    return PoolSpec(role=f"role{next(ROLES)}", target=f"tests.support.workers:{target}", **fields)


async def gone(*pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with RayCluster.open("tests") as opened:
        yield opened


async def test_an_idle_worker_that_dies_is_replaced_at_once(cluster):
    pool = await cluster.pool(spec(size=1))
    (before,) = pool.pids
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while pool.pids in ((), (before,)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert (await pool.run("pid", 0, returns=int)).attempts == 1
    await pool.close()


async def test_a_worker_that_owes_an_answer_is_lost_as_soon_as_its_machine_serves_no_more(cluster):
    pool = await cluster.pool(spec())
    worker = pool.seats[0].worker
    elsewhere = replace(worker, machines=Machines(), place=replace(worker.place, node="of no machine"))
    process = psutil.Process(worker.place.pid)
    process.suspend()
    try:
        with pytest.raises(WorkerLost, match="its machine has left the cluster"):
            await elsewhere.perform("echo", 1, stall_seconds=20)
    finally:
        process.resume()
    await pool.close()


async def test_no_other_user_gets_at_the_sockets_of_an_embedded_cluster(cluster):
    import ray

    (node,) = ray.nodes()
    socket = Path(node["ObjectStoreSocketName"])
    assert socket.exists()
    private = [folder for folder in socket.parents if folder.stat().st_mode & 0o777 == 0o700]
    assert [folder.name[:9] for folder in private] == ["rheostat-"]


async def test_ray_kills_no_worker_for_the_memory_of_other_programs(cluster):
    import ray

    (node,) = ray.nodes()
    session = Path(node["ObjectStoreSocketName"]).parents[1]
    raylet = "".join(log.read_text() for log in session.glob("logs/raylet.*"))
    assert "MemoryMonitor" in raylet
    assert re.search(r"MemoryMonitor.* disabled", raylet)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(cluster):
    """Two workers that tests share; every test leaves them whole."""
    yield await cluster.pool(spec(size=2, options={"start": 10}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(cluster):
    """Two ranks that tests share; after a failure the next work starts them again."""
    yield await cluster.ranks(spec("Ring", size=2))


async def test_a_result_comes_with_its_provenance(pair):
    done = await pair.run("echo", {"rows": (1, 2)}, returns=dict)
    assert done.result == {"rows": (1, 2)}
    assert done.pid in pair.pids
    assert done.attempts == 1
    assert 0 <= done.seconds < 5


async def test_a_pool_of_two_runs_two_at_once_and_queues_the_third(pair):
    done = await asyncio.gather(*(pair.run("pid", 0.4, returns=int) for _ in range(3)))
    assert {one.result for one in done} == set(pair.pids)
    assert abs(done[0].waited_seconds - done[1].waited_seconds) < 0.4, "one after the other"
    assert done[2].waited_seconds - min(done[0].waited_seconds, done[1].waited_seconds) >= 0.3


async def test_workers_get_their_threads_and_the_drivers_directory(cluster):
    pool = await cluster.pool(spec(threads=3))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "DS_ACCELERATOR", "HF_HUB_OFFLINE")
    done = await pool.run("environment", names, returns=dict)
    assert tuple(done.result.values()) == ("3", "3", "false", "cpu", "1")
    directory, path = (await pool.run("where", None, returns=tuple)).result
    assert directory == str(Path.cwd())
    installed = sysconfig.get_paths()["purelib"]
    assert "" not in path
    assert path.index(str(Path.cwd())) > path.index(installed), "a user's models.py would hide ours"
    await pool.close()


async def test_what_a_worker_raises_is_told_once_with_its_traceback(pair):
    with pytest.raises(
        WorkerFailed, match=r"^role\d+\.raise_value_error raised ValueError: cannot digest 7\n"
    ) as caught:
        await pair.run("raise_value_error", 7, returns=object)
    assert "support/workers.py" in "".join(caught.value.__notes__)
    assert pair.restarts == 0


async def test_an_error_of_ours_is_raised_as_itself(pair):
    with pytest.raises(Damaged, match=r"^shard 7 is torn\n"):
        await pair.run("raise_damaged", 7, returns=object)


async def test_a_result_of_another_type_is_refused(pair):
    with pytest.raises(WorkerFailed, match="expected it to return str, it returned int"):
        await pair.run("echo", 1, returns=str)


async def test_work_of_a_killed_worker_is_done_by_another(pair, tmp_path):
    before = set(pair.pids)
    done = await pair.run("die_once", tmp_path / "died", returns=int)
    assert done.attempts == 2
    deadline = time.monotonic() + 30
    while len(pair.pids) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert len(set(pair.pids) - before) == 1
    assert len(pair.pids) == 2


async def test_work_that_kills_every_worker_ends_after_its_restarts(cluster):
    pool = await cluster.pool(spec(max_restarts=1))
    with pytest.raises(WorkerLost, match=r"role\d+\.die.*pid \d+.*given up after attempt 2"):
        await pool.run("die", None, returns=object)
    assert (await pool.run("echo", 1, returns=int)).attempts == 1
    await pool.close()


@pytest.mark.parametrize("how", ["endless loop", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
async def test_a_worker_without_progress_is_killed_and_its_work_done_elsewhere(cluster, tmp_path, how):
    pool = await cluster.pool(spec(stall_seconds=1, size=2))
    if how == "SIGSTOP":
        stopped = pool.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        done = await pool.run("pid", 0, returns=int)
    else:
        done = await pool.run("hang_once", tmp_path / "hung", returns=int)
        stopped = int((tmp_path / "hung").read_text())
    assert done.attempts == 2
    assert done.result != stopped
    assert await gone(stopped)
    await pool.close()


async def test_a_stall_that_repeats_is_named_so(cluster):
    pool = await cluster.pool(spec(stall_seconds=0.5, max_restarts=0))
    with pytest.raises(WorkerStalled, match=r"no (sign of )?progress for 0\.5 s"):
        await pool.run("pid", 60, returns=int)
    await pool.close()


@pytest.mark.slow
async def test_a_worker_that_counts_is_not_stalled_however_late_it_answers(cluster):
    pool = await cluster.pool(spec(stall_seconds=2, max_restarts=0))
    done = await pool.run("slow_but_steady", 4, returns=int)
    assert done.seconds > 3
    await pool.close()


async def test_a_cancelled_call_leaves_the_pool_usable(cluster):
    pool = await cluster.pool(spec())
    call = asyncio.create_task(pool.run("pid", 0.5, returns=int))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    done = await pool.run("pid", 0, returns=int)
    assert done.waited_seconds > 0.2  # the abandoned work ended first
    assert pool.restarts == 0
    await pool.close()


async def test_closing_ends_every_process_of_the_pool(cluster):
    pool = await cluster.pool(spec(size=2))
    child = (await pool.run("spawn", None, returns=int)).result
    calls = [asyncio.create_task(pool.run("pid", 60, returns=int)) for _ in range(3)]
    await asyncio.sleep(0.1)
    pids = pool.pids
    await pool.close()
    assert await gone(*pids, child)
    for call in calls:
        with pytest.raises(ClusterFailed, match="closed"):
            await call


async def test_a_killed_workers_children_die_too(cluster):
    pool = await cluster.pool(spec())
    done = await pool.run("spawn", None, returns=int)
    os.kill(done.pid, signal.SIGKILL)
    assert await gone(done.result)
    await pool.close()


async def test_a_worker_that_cannot_be_built_says_why(cluster):
    with pytest.raises(WorkerFailed, match=r"Unbuildable.*FileNotFoundError: no weights at /nowhere"):
        await cluster.pool(spec("Unbuildable", options={"path": "/nowhere"}, size=2))


async def test_a_worker_that_is_not_ready_in_time_is_lost(cluster):
    with pytest.raises(WorkerLost, match=r"role\d+ worker .* not ready within 2 s"):
        await cluster.pool(spec("Sleepy", start_seconds=2))


async def test_ranks_start_again_together_when_one_dies(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before = ring.pids
    done = await ring.run("meet", tmp_path / "died", returns=tuple)
    assert done.attempts == 2
    assert done.result[0] == 0
    assert not set(before) & set(ring.pids)
    assert await gone(*before, seconds=5)
    port = done.result[1]
    assert (await ring.run("meet", tmp_path / "died", returns=tuple)).result == (0, port)


async def test_what_one_rank_raises_ends_its_peers_and_is_not_tried_again(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before, restarts = ring.pids, ring.restarts
    with pytest.raises(WorkerFailed, match="ValueError: loss is not finite"):
        await ring.run("fail_on_one", None, returns=tuple)
    assert await gone(*before)
    assert ring.restarts == restarts


async def test_work_cancelled_on_ranks_ends_them_and_the_next_work_has_new_ones(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before = ring.pids
    call = asyncio.create_task(ring.run("hang_on_one", tmp_path / "hung", returns=tuple))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await gone(*before)
    assert (await ring.run("meet", tmp_path, returns=tuple)).attempts == 1


@pytest.mark.slow
async def test_a_rank_that_stands_still_takes_the_group_with_it(cluster, tmp_path):
    group = await cluster.ranks(spec("Ring", size=2, stall_seconds=1.5))
    assert (await group.run("hang_on_one", tmp_path / "hung", returns=tuple)).attempts == 2
    await group.close()


async def test_another_process_finds_the_pool_and_leaves_it_running(cluster):
    described = spec(size=2, options={"start": 5})
    pool = await cluster.pool(described)
    program = f"""
import asyncio
from infra.pools.cluster import RayCluster
from infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open({cluster.namespace!r}, address={cluster.address!r}) as cluster:
        pool = await cluster.pool(PoolSpec({described.role!r}, {described.target!r}, {described.options!r}, size=2))
        done = await pool.run("echo", 1, returns=int)
        print("used", done.pid, *sorted(pool.pids))
asyncio.run(main())
"""
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(other.communicate(), 60)
    used, *found = map(int, out.decode().split()[1:])
    assert found == sorted(pool.pids)
    assert used in pool.pids
    totals = await asyncio.gather(*(pool.run("total", None, returns=int) for _ in range(2)))
    assert sorted(one.result for one in totals) == [5, 6]
    await pool.close()


async def test_one_process_has_one_cluster(cluster):
    with pytest.raises(ClusterFailed, match="embedded Ray cluster did not start"):
        async with RayCluster.open("second"):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:9", pytest.param(None, marks=pytest.mark.slow)])
async def test_a_cluster_that_is_not_there_in_time_is_one_error(address):
    program = f"""
import asyncio
from infra.pools.cluster import RayCluster
async def main():
    async with RayCluster.open("nobody", address={address!r}, start_seconds=0.7):
        pass
asyncio.run(main())
"""
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(other.communicate(), 60)
    what = "an embedded Ray cluster" if address is None else f"the Ray cluster at {address!r}"
    assert f"infra.errors.ClusterFailed: {what} did not start within 0.7 s" in errors.decode()


@pytest.mark.parametrize(
    ("name", "number", "told"),
    [
        ("raylet", signal.SIGKILL, r"the raylet of .* \(pid \d+\) has died"),
        pytest.param("raylet", signal.SIGSTOP, r"the raylet of .* is stopped", marks=pytest.mark.slow),
        pytest.param("gcs_server", signal.SIGKILL, r"\(GCS\) of .* has died", marks=pytest.mark.slow),
        ("gcs_server", signal.SIGSTOP, r"\(GCS\) of .* is stopped"),
    ],
)
async def test_a_server_of_the_cluster_that_fails_ends_who_works_there_by_its_name(name, number, told):
    program = f"""
import asyncio, os, psutil
from infra.errors import ClusterFailed
from infra.pools.cluster import RayCluster
from infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open("doomed") as cluster:
        pool = await cluster.pool(PoolSpec("role", "tests.support.workers:Counting"))
        server = next(child for child in psutil.Process().children() if child.name() == {name!r})
        print(pool.pids[0], flush=True)
        server.send_signal({int(number)})
        async with asyncio.TaskGroup() as group:  # work that runs, and work that has yet to start a worker
            group.create_task(pool.run("pid", 600, returns=int))
            group.create_task(cluster.pool(PoolSpec("other", "tests.support.workers:Counting", start_seconds=600)))
try:
    asyncio.run(main())
except ClusterFailed as error:
    print(error, flush=True)
"""
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = await asyncio.wait_for(driver.communicate(), 50)  # Ray's own patience is 60 s and more
    worker, *_, error = out.decode().splitlines()  # between them Ray tells what its raylet logged
    assert re.search(told, error)
    assert await gone(int(worker))


@pytest.mark.slow
async def test_a_raylet_that_is_stopped_while_it_starts_is_named():
    program = """
import asyncio, psutil, threading
from infra.pools.cluster import RayCluster
def stop():
    while True:
        for child in psutil.Process().children():
            if child.name() == "raylet":
                return child.suspend()
async def main():
    threading.Thread(target=stop, daemon=True).start()
    async with RayCluster.open("doomed"):
        pass
asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(driver.communicate(), 50)
    assert re.search(r"infra\.errors\.ClusterFailed: the .* of the embedded Ray cluster .* is stopped", errors.decode())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
async def test_a_server_of_the_cluster_that_computes_slowly_is_waited_for(name):
    program = """
import asyncio
from infra.pools.cluster import RayCluster
async def main():
    async with RayCluster.open("patient"):
        print("started", flush=True)
asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    slowing = asyncio.create_task(asyncio.to_thread(slow_down, driver.pid, name))  # a driver's threads may have to wait
    out, _ = await asyncio.wait_for(driver.communicate(), 240)
    await slowing
    assert out == b"started\n"


def slow_down(driver: int, name: str) -> None:
    """Leave a server of a driver's cluster 1 ms of each 0.8 s, for longer than Ray has patience."""
    while not (found := [child for child in psutil.Process(driver).children() if child.name() == name]):
        time.sleep(0.001)
    until = time.monotonic() + 40  # Ray's own patience is 30 s
    with suppress(psutil.Error):
        while time.monotonic() < until:
            found[0].suspend()
            time.sleep(0.8)
            found[0].resume()
            time.sleep(0.001)


@pytest.mark.parametrize("before", [(), (0,), (1,)], ids=["alone", "after its guard's parent", "after its guard"])
async def test_nothing_survives_a_killed_driver(before):
    program = """
import asyncio, os, sys
from infra.pools.cluster import RayCluster
from infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open("doomed") as cluster:
        pool = await cluster.pool(PoolSpec("role", "tests.support.workers:Counting"))
        child = (await pool.run("spawn", None, returns=int)).result
        print(child, *pool.pids, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    child, worker = map(int, (await asyncio.wait_for(driver.stdout.readline(), 60)).split())
    directory = Path(psutil.Process(worker).environ()["RHEOSTAT_CLUSTER"])
    pids = [process.pid for process in processes_of(directory)]
    assert {child, worker} < set(pids)
    assert len(pids) >= 7  # gcs, raylet, agents, monitors, worker and its child
    guards = guards_of(directory)
    assert len(guards) == 2
    for number in before:
        guards[number].kill()
    driver.kill()
    await driver.wait()
    assert await gone(*pids, *(guard.pid for guard in guards))
    deadline = time.monotonic() + 10
    while directory.exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not directory.exists()


async def test_a_process_with_a_cluster_and_its_workers_still_learn_how_their_children_end(pair):
    assert subprocess.run(["false"], check=False).returncode == 1
    assert (await pair.run("child_ends", ["false"], returns=int)).result == 1


SLOW = """
import sys, time
if any(name.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for name in sys.orig_argv):
    time.sleep(20)  # more than the 15 s after which a raylet that waits for them aborts
"""
PROGRAM = """
import asyncio
from infra.pools.cluster import RayCluster
from infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open("slow") as cluster:
        pool = await cluster.pool(PoolSpec("role", "tests.support.workers:Counting"))
        print((await pool.run("spawn", None, returns=int)).result)
asyncio.run(main())
"""


@pytest.mark.system
async def test_a_cluster_opens_however_late_the_processes_beside_its_raylet_are(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    opened = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, env=environment, **pipes)
    out, errors = await opened.communicate()
    assert opened.returncode == 0, errors.decode()
    assert int(out) > 0
