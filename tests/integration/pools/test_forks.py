"""Forked workers: to Ray and to their pools the same as started ones, and never in the way of those."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from infra.pools.cluster import Preload, RayCluster
from infra.pools.forks import start_nursery, worker_command
from infra.pools.host import thread_variables
from infra.pools.worker import PoolSpec
from infra.processes.guard import processes_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]

ROLES = iter(range(1000))
MODULES = ("torch", "tests.support.workers", "no.such.module")
PROGRAM = "import os, sys; print(os.getpid(), os.getppid(), *sys.argv[1:], flush=True)\n"


def spec(**changes):
    return PoolSpec(role=f"role{next(ROLES)}", target="tests.support.workers:Counting", **changes)


def nursery_of(pid):
    """The process that a worker is a fork of, or nothing."""
    parent = psutil.Process(pid).parent()
    return parent if "nurse" in parent.cmdline() else None


async def gone(*pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with RayCluster.open("forks", preload=Preload(MODULES)) as opened:
        yield opened


# ---- under Ray; the last test takes the nursery away


@pytest.mark.system
async def test_workers_are_forked_and_do_not_share_their_randomness(cluster):
    pool = await cluster.pool(spec(size=2))
    first, second = pool.pids
    assert nursery_of(first) == nursery_of(second) is not None
    drawn = await asyncio.gather(*(pool.run("draw", 1.0, returns=tuple) for _ in range(2)))
    assert {done.pid for done in drawn} == {first, second}
    for one, other in zip(*(done.result for done in drawn), strict=True):
        assert one != other
    await pool.close()
    assert await gone(first, second)


@pytest.mark.system
async def test_a_killed_fork_is_replaced_at_once_and_its_children_die(cluster):
    pool = await cluster.pool(spec())
    done = await pool.run("spawn", None, returns=int)
    under_way = asyncio.create_task(pool.run("pid", 1.0, returns=int))
    await asyncio.sleep(0.2)
    os.kill(done.pid, signal.SIGKILL)
    assert await gone(done.pid, done.result)
    again = await under_way
    assert (again.attempts, again.pid == done.pid) == (2, False)
    assert nursery_of(again.pid) is not None
    await pool.close()


@pytest.mark.system
async def test_forks_take_their_memory_from_jemalloc_and_have_nobody_else_do_so(cluster):
    pool = await cluster.pool(spec())
    assert "libjemalloc" in Path(f"/proc/{pool.pids[0]}/maps").read_text()
    assert (await pool.run("environment", ("LD_PRELOAD", "MALLOC_CONF"), returns=dict)).result == dict.fromkeys(
        ("LD_PRELOAD", "MALLOC_CONF")
    )
    await pool.close()


@pytest.mark.system
async def test_libraries_read_the_pools_own_number_of_threads(cluster):
    pool = await cluster.pool(spec(threads=2))
    assert nursery_of(pool.pids[0]) is None
    assert (await pool.run("environment", ("OMP_NUM_THREADS",), returns=dict)).result == {"OMP_NUM_THREADS": "2"}
    await pool.close()


@pytest.mark.system
async def test_a_fork_is_what_a_started_worker_is_and_follows_where_the_nursery_has_died(cluster):
    forked = await cluster.pool(spec())
    nursery = nursery_of(forked.pids[0])
    nursery.kill()
    nursery.wait(10)
    started = await cluster.pool(spec())
    assert nursery_of(started.pids[0]) is None
    facts = [(await pool.run("facts", None, returns=dict)).result for pool in (forked, started)]
    assert facts[0] == facts[1]
    await asyncio.gather(forked.close(), started.close())


@pytest.mark.system
async def test_no_fork_and_no_nursery_survives_a_killed_driver():
    program = """
import asyncio
from infra.pools.cluster import Preload, RayCluster
from infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open("doomed", preload=Preload(("tests.support.workers",))) as cluster:
        pool = await cluster.pool(PoolSpec("role", "tests.support.workers:Counting"))
        print((await pool.run("spawn", None, returns=int)).result, *pool.pids, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    child, worker = map(int, (await asyncio.wait_for(driver.stdout.readline(), 60)).split())
    nursery = nursery_of(worker)
    directory = Path(psutil.Process(worker).environ()["RHEOSTAT_CLUSTER"])
    pids = [process.pid for process in processes_of(directory)]
    assert {child, worker, nursery.pid} < set(pids)
    driver.kill()
    await driver.wait()
    assert await gone(*pids)


# ---- the command alone


@contextmanager
def nursery(*modules):
    """A nursery without a cluster, and the command that asks it for a process."""
    with tempfile.TemporaryDirectory(prefix="rheostat-", dir="/tmp") as name:
        directory = Path(name)
        (directory / "program.py").write_text(PROGRAM)
        variables = thread_variables(1, gpus=0, devices=())
        process = start_nursery(directory, modules, variables=variables)

        def ask(**changes):
            command = f"exec {worker_command(directory)} {directory / 'program.py'} 'a b'"
            environment = {**os.environ, **variables, **changes}
            return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)

        try:
            while not list(directory.glob("nursery-*")):
                time.sleep(0.01)
            yield process, ask, directory
        finally:
            process.kill()
            process.wait()


def parent_in(answer):
    assert answer.returncode == 0
    assert answer.stdout.endswith(" a b\n")
    return int(answer.stdout.split()[1])


async def test_a_worker_that_may_see_a_gpu_is_never_forked():
    with nursery() as (process, ask, _):
        assert parent_in(ask()) == process.pid
        for visible in ("0", "0,1"):
            answer = ask(CUDA_VISIBLE_DEVICES=visible)
            assert parent_in(answer) == os.getpid()
            assert "it may see a GPU" in answer.stderr


async def test_a_process_with_a_second_thread_forks_nothing():
    with nursery("tests.support.thread") as (_, ask, directory):
        answer = ask()
        assert parent_in(answer) == os.getpid()
        assert "the nursery forked nothing" in answer.stderr
        assert "forked nothing: threads" in (directory / "nursery.log").read_text()


async def test_a_worker_that_was_given_up_is_not_forked_later():
    with nursery() as (process, ask, directory):
        parent_in(ask())
        process.send_signal(signal.SIGSTOP)
        given_up = await asyncio.create_subprocess_shell(
            f"exec {worker_command(directory)} {directory / 'program.py'} late",
            env={**os.environ, **thread_variables(1, gpus=0, devices=())},
            stdout=subprocess.PIPE,
        )
        await asyncio.sleep(0.5)
        given_up.kill()
        process.send_signal(signal.SIGCONT)
        assert await given_up.stdout.read() == b""
        assert parent_in(ask()) == process.pid
