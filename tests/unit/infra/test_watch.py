"""The watch of servers that a run depends on, and the end of a command on signals, with real processes."""

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from rheostat.infra.errors import WorkerFailed
from rheostat.infra.processes import watch
from rheostat.infra.processes.watch import CHECK_SECONDS, Watch, WatchedServer, run_watched
from tests.support.jobs import wait_for

IDLE = "import time; time.sleep(600)"
BUSY = "while True: pass"


@pytest.fixture
def started():
    """Start programs, which are killed afterwards."""
    processes = []

    def start(program: str) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", program]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def server(process, *, answers=True, silent_seconds=20.0):
    return WatchedServer("the server", psutil.Process(process.pid), lambda: answers, silent_seconds=silent_seconds)


def test_a_dead_server_has_failed(started):
    process = started(IDLE)
    here = server(process)
    assert here.failure() is None
    process.kill()
    assert wait_for(lambda: here.failure() == f"the server (pid {process.pid}) has died")


def test_a_server_that_stays_suspended_has_failed_and_a_server_that_resumes_has_not(started):
    process = started(IDLE)
    here = server(process)
    process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: here.process.status() == psutil.STATUS_STOPPED)
    assert here.failure() is None
    process.send_signal(signal.SIGCONT)
    assert wait_for(lambda: here.process.status() != psutil.STATUS_STOPPED)
    assert here.failure() is None
    process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: here.failure() == f"the server (pid {process.pid}) is suspended")


def test_a_server_that_runs_between_its_stops_is_not_stopped(started):
    process = started(IDLE)
    here = server(process)
    for _ in range(12):  # each look sees it stopped
        process.send_signal(signal.SIGSTOP)
        assert wait_for(lambda: here.process.status() == psutil.STATUS_STOPPED)
        assert here.failure() is None
        time.sleep(CHECK_SECONDS)
        switches = here.process.num_ctx_switches()
        process.send_signal(signal.SIGCONT)
        assert wait_for(lambda before=switches: here.process.num_ctx_switches() != before), "it has run again"


def test_a_silent_server_has_failed_unless_it_computes(started, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(watch, "QUERY_SECONDS", 0.0)
    idle, busy = (server(started(program), answers=False, silent_seconds=0.5) for program in (IDLE, BUSY))
    answering = server(started(IDLE), silent_seconds=0.5)
    for _ in range(3):
        now[0] += 1
        used = busy.process.cpu_times()
        assert wait_for(lambda before=used: busy.process.cpu_times() != before)
        assert busy.failure() is answering.failure() is None

    def failure_after_a_second():
        now[0] += 1
        return idle.failure() or ""

    assert wait_for(lambda: "neither responded nor used CPU time" in failure_after_a_second())


def test_a_watch_reports_a_failure_once(started):
    process, told, heard = started(IDLE), [], threading.Event()
    here = server(process)

    def failed(problem: str) -> None:
        told.append(problem)
        heard.set()

    looking = Watch(lambda: [here], failed)
    process.kill()
    assert heard.wait(600)
    assert told == [looking.problem] == [f"the server (pid {process.pid}) has died"]


def test_a_signal_ends_a_process_whose_main_thread_waits_inside_a_library():
    program = """
import ctypes, signal
from rheostat.infra.processes import watch
watch.END_SECONDS = 0.2
signal.signal(signal.SIGTERM, lambda *_: None)
ending = watch.ForcedExit()
with watch.on_signals(lambda number: ending.begin(128 + number, "interrupted")):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("waits", flush=True)
    lock(mutex)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"waits\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, b"interrupted\n")


def test_a_command_whose_main_thread_has_ended_still_returns_its_output():
    """While a process with threads ends, it is dead for a moment but cannot be waited for yet."""
    program = f"""
import ctypes, os, threading, time

def answer():
    time.sleep({3 * CHECK_SECONDS})
    os.write(1, b"done")
    os._exit(3)

threading.Thread(target=answer).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    assert run_watched("the command", [sys.executable, "-S", "-c", program], b"") == (3, b"done", b"")


@pytest.mark.thorough
def test_a_command_that_is_stopped_has_failed():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    with pytest.raises(WorkerFailed, match=r"the command \(pid \d+\) is suspended"):
        run_watched("the command", [sys.executable, "-S", "-c", program], b"")


KILLING = """
import asyncio
from asyncio.subprocess import PIPE
from rheostat.infra.processes.watch import kill_and_wait

async def main():
    process = await asyncio.create_subprocess_exec("sleep", "99", stdin=PIPE, stdout=PIPE, stderr=PIPE)
    await kill_and_wait(process)
    assert process.returncode == -9

asyncio.run(main())
"""


def test_the_event_loop_closes_without_an_error_after_a_child_process_was_killed():
    ended = subprocess.run([sys.executable, "-c", KILLING], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
