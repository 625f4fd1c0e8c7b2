"""Forked workers behave like started workers, for Ray and for their pools."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.embedded import Preload
from rheostat.infra.pools.forks import start_forkserver, worker_command
from rheostat.infra.pools.host import thread_variables
from rheostat.infra.pools.worker import PoolSpec
from tests.support.drivers import until
from tests.support.jobs import wait_for

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]

ROLES = iter(range(1000))
MODULES = ("torch", "deepspeed", "tests.support.workers", "no.such.module")
"""DeepSpeed imports MLflow, whose import would start a thread, if it is installed, as it is for the tests."""
PROGRAM = "import os, sys; print(os.getpid(), os.getppid(), *sys.argv[1:], flush=True)\n"


def spec(**changes):
    return PoolSpec(role=f"role{next(ROLES)}", target="tests.support.workers:Counting", **changes)


def forkserver_of(pid):
    """Return the forkserver that forked a worker, or None if the worker was started."""
    parent = psutil.Process(pid).parent()
    return parent if "forkserver" in parent.cmdline() else None


async def reaped(*pids):
    """Wait until no process exists, not even as a zombie. Return False if one still exists at the end."""
    return await until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with RayCluster.open("forks", preload=Preload(MODULES)) as opened:
        [forkserver] = [child for child in psutil.Process().children() if "forkserver" in child.cmdline()]
        log = Path(forkserver.cmdline()[3]).with_name("forkserver.log")
        # A worker that has waited for 30 s starts without the forkserver. The import of the last module fails.
        assert await until(lambda: MODULES[-1].partition(".")[0] in log.read_text())
        yield opened


# ---- under Ray; the last test kills the forkserver


@pytest.mark.system
async def test_forked_workers_have_different_random_states(cluster):
    pool = await cluster.pool(spec(size=2))
    first, second = pool.pids
    assert forkserver_of(first) == forkserver_of(second) is not None
    drawn = await asyncio.gather(*(pool.run("draw", 1.0, returns=tuple) for _ in range(2)))
    assert {done.pid for done in drawn} == {first, second}
    for one, other in zip(*(done.result for done in drawn), strict=True):
        assert one != other
    await pool.close()
    assert await reaped(first, second)


@pytest.mark.system
async def test_a_killed_fork_is_replaced_by_another_fork_and_its_children_die(cluster, tmp_path):
    pool = await cluster.pool(spec())
    done = await pool.run("spawn", None, returns=int)
    work = asyncio.create_task(pool.run("hold", (tmp_path / "began", tmp_path / "released"), returns=int))
    assert await until((tmp_path / "began").exists)
    os.kill(done.pid, signal.SIGKILL)
    assert await reaped(done.pid, done.result)
    (tmp_path / "released").touch()
    again = await work
    assert (again.attempts, again.pid == done.pid) == (2, False)
    assert forkserver_of(again.pid) is not None
    await pool.close()


@pytest.mark.system
async def test_forks_use_jemalloc_and_do_not_pass_it_to_their_children(cluster):
    pool = await cluster.pool(spec())
    assert "libjemalloc" in Path(f"/proc/{pool.pids[0]}/maps").read_text()
    assert (await pool.run("environment", ("LD_PRELOAD", "MALLOC_CONF"), returns=dict)).result == dict.fromkeys(
        ("LD_PRELOAD", "MALLOC_CONF")
    )
    await pool.close()


@pytest.mark.system
async def test_a_pool_with_a_separate_number_of_threads_is_not_forked(cluster):
    pool = await cluster.pool(spec(threads=2))
    assert forkserver_of(pool.pids[0]) is None
    assert (await pool.run("environment", ("OMP_NUM_THREADS",), returns=dict)).result == {"OMP_NUM_THREADS": "2"}
    await pool.close()


@pytest.mark.system
async def test_a_fork_equals_a_started_worker_and_pools_start_workers_after_the_forkserver_died(cluster):
    forked = await cluster.pool(spec())
    forkserver = forkserver_of(forked.pids[0])
    forkserver.kill()
    forkserver.wait()
    started = await cluster.pool(spec())
    assert forkserver_of(started.pids[0]) is None
    facts = [(await pool.run("facts", None, returns=dict)).result for pool in (forked, started)]
    assert facts[0] == facts[1]
    await asyncio.gather(forked.close(), started.close())


# ---- the command alone


@contextmanager
def forkserver(*modules):
    """Run a forkserver without a cluster. Yield it, a function that requests a process, and its directory."""
    with tempfile.TemporaryDirectory(prefix="rheostat-", dir="/tmp") as name:
        directory = Path(name)
        (directory / "program.py").write_text(PROGRAM)
        variables = thread_variables(1, gpus=0, devices=())
        process = start_forkserver(directory, modules, variables=variables)

        def ask(**changes):
            command = f"exec {worker_command(directory)} {directory / 'program.py'} 'a b'"
            environment = {**os.environ, **variables, **changes}
            return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)

        try:
            assert wait_for(lambda: list(directory.glob("forkserver-*")))
            yield process, ask, directory
        finally:
            process.kill()
            process.wait()


def parent_in(answer):
    assert answer.returncode == 0
    assert answer.stdout.endswith(" a b\n")
    return int(answer.stdout.split()[1])


async def test_a_worker_with_access_to_a_gpu_is_never_forked():
    with forkserver() as (process, ask, _):
        assert parent_in(ask()) == process.pid
        for visible in ("0", "0,1"):
            answer = ask(CUDA_VISIBLE_DEVICES=visible)
            assert parent_in(answer) == os.getpid()
            assert "a worker that may use a GPU cannot be forked" in answer.stderr


async def test_a_process_with_a_second_thread_does_not_fork():
    with forkserver("tests.support.thread") as (_, ask, directory):
        answer = ask()
        assert parent_in(answer) == os.getpid()
        assert "the fork server created no process" in answer.stderr
        assert "no worker was forked" in (directory / "forkserver.log").read_text()


async def test_an_abandoned_request_is_not_forked_later():
    with forkserver() as (process, ask, directory):
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
