"""Processes of workers on this machine: how they are recognized, and how long the fleet waits for their end."""

import asyncio
import os
import subprocess

import psutil
import pytest

from rheostat.infra.pools import host, worker
from rheostat.infra.pools.host import ProcessPlace, find_process, start_seconds
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.worker import WorkerProcess


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_is_found_although_the_clock_of_the_machine_was_set(sleeper, monkeypatch):
    born = start_seconds(psutil.Process(sleeper.pid))
    module = psutil.Process.create_time.__globals__["_psplatform"]
    booted = module.boot_time()
    monkeypatch.setattr(module, "boot_time", lambda: booted + 3600)
    assert psutil.Process(sleeper.pid).create_time() > booted + 3600, "psutil adds the time of the boot"
    assert find_process(sleeper.pid, born) == psutil.Process(sleeper.pid)


def test_the_start_time_of_a_process_is_read_again_if_the_clock_is_set_meanwhile(monkeypatch):
    module = psutil.Process.create_time.__globals__["_psplatform"]
    expected, booted = start_seconds(psutil.Process()), module.boot_time()
    times = iter([booted, booted + 9])
    monkeypatch.setattr(module, "boot_time", lambda: next(times, booted + 9))
    assert start_seconds(psutil.Process()) == expected


def test_neither_an_ended_process_nor_another_process_of_its_id_is_found(sleeper):
    born = start_seconds(psutil.Process(sleeper.pid))
    assert find_process(sleeper.pid, born + 1) is None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert find_process(sleeper.pid, born) is None, "nobody has collected it, but it holds no memory"
    sleeper.wait()
    assert find_process(sleeper.pid, born) is None


async def test_a_slot_is_not_free_before_the_process_of_its_worker_has_ended(sleeper, monkeypatch):
    """A large process ends long after it was killed. Its slot may not have a second worker until then."""
    place = ProcessPlace(sleeper.pid, start_seconds(psutil.Process(sleeper.pid)), "node", "host", "127.0.0.1", "job")
    process = WorkerProcess("rollout", "rollout-0-0", None, place, Machines(is_single=True))
    monkeypatch.setattr(WorkerProcess, "_process", lambda self: host.find_process(self.place.pid, self.place.born))
    monkeypatch.setattr(worker, "STOP_SECONDS", 0.02)
    waiting = asyncio.create_task(process.await_exit())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    sleeper.kill()
    await asyncio.wait_for(waiting, 10)
