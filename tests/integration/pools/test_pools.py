"""Pools of worker processes on an embedded Ray cluster: work, failures, ranks, and the end of the cluster."""

import asyncio
import os
import re
import signal
import subprocess
import sysconfig
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rheostat.infra.errors import ClusterFailed, Damaged, WorkerFailed, WorkerLost, WorkerStalled
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.processes.guard import processes_of
from tests.support.drivers import COUNTING_POOL, read_line, read_output, start_driver, until, wait_until_gone
from tests.support.servers import guards_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.system]

ROLES = iter(range(1000))


def spec(target="Counting", **changes):
    return PoolSpec(role=f"role{next(ROLES)}", target=f"tests.support.workers:{target}", **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with RayCluster.open("tests") as opened:
        yield opened


async def test_an_idle_worker_that_dies_is_replaced_at_once(cluster):
    pool = await cluster.pool(spec(size=1))
    (before,) = pool.pids
    os.kill(before, signal.SIGKILL)
    assert await until(lambda: pool.pids not in ((), (before,)))
    assert (await pool.run("pid", 0, returns=int)).attempts == 1
    await pool.close()


async def test_a_worker_at_work_is_lost_as_soon_as_its_machine_has_left_the_cluster(cluster):
    pool = await cluster.pool(spec())
    worker = pool.slots[0].worker
    elsewhere = replace(worker, machines=Machines(), place=replace(worker.place, node="of no machine"))
    process = psutil.Process(worker.place.pid)
    process.suspend()
    try:
        with pytest.raises(WorkerLost, match="the machine of this worker has left the cluster"):
            await elsewhere.perform("echo", 1, clock=StallClock(300))
    finally:
        process.resume()
    await pool.close()


async def test_no_other_user_can_open_the_sockets_of_an_embedded_cluster(cluster):
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
    """Two workers that tests share. Every test leaves two workers that run."""
    yield await cluster.pool(spec(size=2, options={"start": 10}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(cluster):
    """Two ranks that tests share. After a failure the next work starts both again."""
    yield await cluster.ranks(spec("Ring", size=2))


async def test_a_result_comes_with_its_provenance(pair):
    done = await pair.run("echo", {"rows": (1, 2)}, returns=dict)
    assert done.result == {"rows": (1, 2)}
    assert done.pid in pair.pids
    assert done.attempts == 1
    assert done.seconds >= 0


async def test_a_pool_of_two_runs_two_pieces_of_work_at_once_and_queues_the_third(pair, tmp_path):
    released = tmp_path / "released"
    works = [
        asyncio.create_task(pair.run("hold", (tmp_path / f"began-{number}", released), returns=int))
        for number in range(3)
    ]
    assert await until(lambda: len([*tmp_path.glob("began-*")]) == 2)
    await asyncio.sleep(0.2)
    assert len([*tmp_path.glob("began-*")]) == 2
    released.touch()
    done = await asyncio.gather(*works)
    assert {one.result for one in done} == set(pair.pids)
    assert done[2].waited_seconds >= 0.2


async def test_workers_get_their_threads_and_the_drivers_directory(cluster):
    pool = await cluster.pool(spec(threads=3))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "DS_ACCELERATOR", "HF_HUB_OFFLINE")
    done = await pool.run("environment", names, returns=dict)
    assert tuple(done.result.values()) == ("3", "3", "false", "cpu", "1")
    directory, path = (await pool.run("where", None, returns=tuple)).result
    assert directory == str(Path.cwd())
    installed = sysconfig.get_paths()["purelib"]
    assert "" not in path
    if str(Path.cwd()) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        assert path.index(str(Path.cwd())) > path.index(installed), "a user's models.py would hide ours"
    await pool.close()


@pytest.mark.parametrize(
    ("method", "returns", "error", "message"),
    [
        (
            "raise_value_error",
            object,
            WorkerFailed,
            r"^role\d+\.raise_value_error raised ValueError: cannot digest 7\n",
        ),
        ("raise_damaged", object, Damaged, r"^shard 7 is torn\n"),
        ("echo", str, WorkerFailed, "type str, but it returned int"),
    ],
)
async def test_an_error_in_a_worker_is_raised_once_with_its_traceback(pair, method, returns, error, message):
    before = pair.restarts, pair.pids
    with pytest.raises(error, match=message) as caught:
        await pair.run(method, 7, returns=returns)
    assert method == "echo" or "support/workers.py" in "".join(caught.value.__notes__)
    assert (pair.restarts, pair.pids) == before


async def test_work_of_a_killed_worker_is_done_by_another(pair, tmp_path):
    before = set(pair.pids)
    done = await pair.run("die_once", tmp_path / "died", returns=int)
    assert done.attempts == 2
    assert await until(lambda: len(pair.pids) == 2)
    assert len(set(pair.pids) - before) == 1


async def test_work_that_kills_every_worker_is_given_up_after_the_allowed_restarts(cluster):
    pool = await cluster.pool(spec(max_restarts=1))
    with pytest.raises(WorkerLost, match=r"pid \d+.*role\d+\.die has failed in 2 attempts"):
        await pool.run("die", None, returns=object)
    assert (await pool.run("echo", 1, returns=int)).attempts == 1
    await pool.close()


@pytest.mark.parametrize("how", ["endless loop", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
async def test_a_worker_without_progress_is_killed_and_its_work_done_elsewhere(cluster, tmp_path, how):
    pool = await cluster.pool(spec(stall_seconds=3, max_restarts=100, size=2))
    if how == "SIGSTOP":
        stopped = pool.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        done = await pool.run("pid", 0, returns=int)
    else:
        done = await pool.run("hang_once", tmp_path / "hung", returns=int)
        stopped = int((tmp_path / "hung").read_text())
    assert done.attempts > 1, "on a slow machine the other worker may also be silent for three seconds"
    assert done.result != stopped
    assert await wait_until_gone(stopped)
    await pool.close()


async def test_work_that_stalls_again_after_its_restarts_is_reported_as_stalled(cluster):
    pool = await cluster.pool(spec(stall_seconds=0.5, max_restarts=0))
    with pytest.raises(WorkerStalled, match=r"no progress for 0\.5 s"):
        await pool.run("pid", 60, returns=int)
    await pool.close()


@pytest.mark.slow
async def test_a_worker_that_makes_progress_is_not_stalled_even_if_it_answers_late(cluster):
    pool = await cluster.pool(spec(stall_seconds=2, max_restarts=0))
    done = await pool.run("slow_but_steady", 4, returns=int)
    assert done.seconds > 3
    await pool.close()


async def test_a_cancelled_call_leaves_the_pool_usable(cluster, tmp_path):
    pool = await cluster.pool(spec())
    began, released = tmp_path / "began", tmp_path / "released"
    call = asyncio.create_task(pool.run("hold", (began, released), returns=int))
    assert await until(began.exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    following = asyncio.create_task(pool.run("pid", 0, returns=int))
    await asyncio.sleep(0)  # the task begins to wait
    await asyncio.sleep(0.2)
    assert not following.done(), "the abandoned work ends first"
    released.touch()
    assert (await following).waited_seconds >= 0.2
    assert pool.restarts == 0
    await pool.close()


async def test_closing_ends_every_process_of_the_pool(cluster):
    pool = await cluster.pool(spec(size=2))
    child = (await pool.run("spawn", None, returns=int)).result
    calls = [asyncio.create_task(pool.run("pid", 60, returns=int)) for _ in range(3)]
    await asyncio.sleep(0.1)
    pids = pool.pids
    await pool.close()
    assert await wait_until_gone(*pids, child)
    for call in calls:
        with pytest.raises(ClusterFailed, match="closed"):
            await call


async def test_a_killed_workers_children_die_too(cluster):
    pool = await cluster.pool(spec())
    done = await pool.run("spawn", None, returns=int)
    os.kill(done.pid, signal.SIGKILL)
    assert await wait_until_gone(done.result)
    await pool.close()


@pytest.mark.parametrize(
    ("target", "settings", "error", "message"),
    [
        (
            "Unbuildable",
            {"options": {"path": "/nowhere"}, "size": 2},
            WorkerFailed,
            r"Unbuildable.*no weights at /nowhere",
        ),
        ("Sleepy", {"start_seconds": 2}, WorkerLost, r"role\d+ worker .* did not start within 2 s"),
    ],
)
async def test_a_worker_that_does_not_start_is_named_with_the_reason(cluster, target, settings, error, message):
    with pytest.raises(error, match=message):
        await cluster.pool(spec(target, **settings))


async def test_ranks_start_again_together_when_one_dies(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before = ring.pids
    done = await ring.run("meet", tmp_path / "died", returns=tuple)
    assert done.attempts == 2
    assert done.result[0] == 0
    assert not set(before) & set(ring.pids)
    assert await wait_until_gone(*before)
    port = done.result[1]
    assert (await ring.run("meet", tmp_path / "died", returns=tuple)).result == (0, port)


async def test_an_error_of_one_rank_ends_its_peers_and_is_not_retried(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before, restarts = ring.pids, ring.restarts
    with pytest.raises(WorkerFailed, match="ValueError: loss is not finite"):
        await ring.run("fail_on_one", None, returns=tuple)
    assert await wait_until_gone(*before)
    assert ring.restarts == restarts


async def test_cancelled_work_ends_its_ranks_and_the_next_work_has_new_ranks(ring, tmp_path):
    await ring.run("meet", tmp_path, returns=tuple)
    before = ring.pids
    call = asyncio.create_task(ring.run("hang_on_one", tmp_path / "hung", returns=tuple))
    assert await until((tmp_path / "hung").exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await wait_until_gone(*before)
    assert (await ring.run("meet", tmp_path, returns=tuple)).attempts == 1


@pytest.mark.slow
async def test_a_rank_that_stalls_restarts_the_whole_group(cluster, tmp_path):
    group = await cluster.ranks(spec("Ring", size=2, stall_seconds=1.5))
    assert (await group.run("hang_on_one", tmp_path / "hung", returns=tuple)).attempts == 2
    await group.close()


@pytest.mark.slow
async def test_a_rank_may_wait_for_another_rank_that_makes_progress(cluster, tmp_path):
    group = await cluster.ranks(spec("Ring", size=2, stall_seconds=1.5))
    done = await group.run("wait_for_one", tmp_path / "written", returns=tuple)
    assert (done.attempts, done.seconds > 3) == (1, True)
    await group.close()


async def test_another_process_finds_the_pool_and_leaves_it_running(cluster):
    described = spec(size=2, options={"start": 5})
    pool = await cluster.pool(described)
    other = await start_driver(
        f"""
        pool = await cluster.pool(PoolSpec({described.role!r}, {described.target!r}, {described.options!r}, size=2))
        done = await pool.run("echo", 1, returns=int)
        print("used", done.pid, *sorted(pool.pids))
        """,
        options=f"{cluster.namespace!r}, address={cluster.address!r}",
    )
    used, *found = map(int, (await read_output(other)).split()[1:])
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
async def test_a_cluster_that_does_not_start_in_time_is_one_error(address):
    driver = await start_driver("pass", options=f'"nobody", address={address!r}, start_seconds=0.7')
    message = await read_output(driver)
    assert (str(address) if address else "embedded Ray cluster") in message
    assert "did not start within 0.7 s" in message


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("raylet", signal.SIGKILL, r"the raylet of .* \(pid \d+\) has died"),
        pytest.param("raylet", signal.SIGSTOP, r"the raylet of .* is suspended", marks=pytest.mark.slow),
        pytest.param("gcs_server", signal.SIGKILL, r"\(GCS\) of .* has died", marks=pytest.mark.slow),
        ("gcs_server", signal.SIGSTOP, r"\(GCS\) of .* is suspended"),
    ],
)
async def test_a_server_of_the_cluster_that_fails_ends_all_work_with_its_name(name, number, message):
    driver = await start_driver(
        f"""
        {COUNTING_POOL}
        server = next(child for child in psutil.Process().children() if child.name() == {name!r})
        print(pool.pids[0], flush=True)
        server.send_signal({int(number)})
        async with asyncio.TaskGroup() as group:  # work that runs, and work that has yet to start a worker
            group.create_task(pool.run("pid", 600, returns=int))
            group.create_task(cluster.pool(PoolSpec("other", "tests.support.workers:Counting", start_seconds=600)))
        """
    )
    worker = int(await read_line(driver))
    *_, error = (await read_output(driver)).splitlines()
    assert re.search(message, error)
    assert await wait_until_gone(worker)


@pytest.mark.slow
async def test_a_raylet_that_is_stopped_while_it_starts_is_named():
    driver = await start_driver(
        "pass",
        before="""
        def stop():
            while True:
                for child in psutil.Process().children():
                    if child.name() == "raylet":
                        return child.suspend()
        threading.Thread(target=stop, daemon=True).start()
        """,
    )
    message = await read_output(driver)
    assert re.search(r"ClusterFailed: the .* of the embedded Ray cluster .* is suspended", message)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
async def test_a_server_of_the_cluster_that_computes_slowly_is_waited_for(name):
    driver = await start_driver('print("started", flush=True)', options='"patient"')
    slowing = asyncio.create_task(asyncio.to_thread(slow_down, driver.pid, name))  # a driver's threads may have to wait
    output = await read_output(driver)
    await slowing
    assert output == "started\n"


def slow_down(driver: int, name: str) -> None:
    """Let a server of a driver's cluster run for 1 ms of each 0.8 s, for longer than Ray waits."""
    while not (found := [child for child in psutil.Process(driver).children() if child.name() == name]):
        time.sleep(0.001)
    until = time.monotonic() + 40  # Ray itself waits for 30 s
    with suppress(psutil.Error):
        while time.monotonic() < until:
            found[0].suspend()
            time.sleep(0.8)
            found[0].resume()
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("before", "preload"),
    [
        pytest.param((), None, id="alone"),
        pytest.param((0,), None, id="after its guard's parent"),
        pytest.param((1,), None, id="after its guard"),
        pytest.param((), 'Preload(("tests.support.workers",))', id="with a forked worker"),
    ],
)
async def test_no_process_survives_a_killed_driver(before, preload):
    driver = await start_driver(
        f"""
        {COUNTING_POOL}
        print((await pool.run("spawn", None, returns=int)).result, *pool.pids, flush=True)
        await asyncio.sleep(600)
        """,
        options=f'"doomed", preload={preload}',
    )
    child, worker = map(int, (await read_line(driver)).split())
    directory = Path(psutil.Process(worker).environ()["RHEOSTAT_CLUSTER"])
    pids = [process.pid for process in processes_of(directory)]
    assert {child, worker, psutil.Process(worker).ppid()} < {*pids}
    assert len(pids) >= 7  # gcs, raylet, agents, monitors, worker and its child
    assert await until(lambda: len(guards_of(directory)) == 2)
    guards = guards_of(directory)
    for number in before:
        guards[number].kill()
    driver.kill()
    await driver.wait()
    assert await wait_until_gone(*pids, *(guard.pid for guard in guards))
    assert await until(lambda: not directory.exists())


async def test_the_driver_and_its_workers_still_get_the_exit_codes_of_their_children(pair):
    assert subprocess.run(["false"], check=False).returncode == 1
    assert (await pair.run("child_ends", ["false"], returns=int)).result == 1


SLOW = """
import sys, time
if any(name.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for name in sys.orig_argv):
    time.sleep(20)  # a raylet aborts if it waits for the agents for more than 15 s
"""


async def test_a_cluster_opens_even_if_the_agents_of_its_raylet_start_late(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    driver = await start_driver(
        f'{COUNTING_POOL}\nprint((await pool.run("spawn", None, returns=int)).result)',
        options='"slow"',
        environment={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    output = await read_output(driver)
    assert driver.returncode == 0
    assert int(output) > 0
