"""Processes of servers: how they start, what their owner learns, and that no process outlives the owner."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import psutil
import pytest

from rheostat.infra.errors import WorkerFailed, WorkerLost
from rheostat.infra.processes.server import OwnedProcess, free_ports, start
from tests.support.jobs import is_alive, kill, list_running, wait_for
from tests.support.servers import FAMILY, SERVE, guards_of, is_answering, launch

pytestmark = pytest.mark.system

SLOW = """
import pathlib, sys, time
for step in range(1, 6):
    print("step", step, "of a long start" if step == 5 else "", flush=True)
pathlib.Path(sys.argv[2]).touch()
time.sleep(1000)
"""

OBEDIENT = """
import pathlib, time
print("waits", flush=True)
while not pathlib.Path("write").exists():
    sum(range(10_000))  # some CPU, as servers use that look at their queues
    time.sleep(0.02)
print("wrote", flush=True)
while not pathlib.Path("busy").exists():
    time.sleep(0.02)
while pathlib.Path("busy").exists():
    pass
time.sleep(1000)
"""


def serve(program, *, ports=None, on_progress=lambda: None, **changes):
    return start(launch(program, **changes), on_progress=on_progress, ports=free_ports() if ports is None else ports)


def family(pid):
    """Return the guard, the server, and an orphan with its child, whose pids are in a file in the server's folder."""
    root = psutil.Process(pid)
    written = Path(root.cwd(), "family")
    assert wait_for(lambda: written.exists() and written.read_text().endswith("\n"))
    return [root.parent(), root, *(psutil.Process(int(other)) for other in written.read_text().split())]


def are_gone(processes) -> bool:
    """Wait until processes have ended."""
    return wait_for(lambda: not list_running(processes), every=0.05)


@contextmanager
def python(program: str) -> "Iterator[tuple[subprocess.Popen[str], list[str]]]":
    """Start a Python program and yield its process and the words of its first line. Then kill the process."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().split()
    finally:
        kill(process)


def test_a_server_is_started_answers_and_is_stopped():
    process, port = serve(SERVE)
    assert wait_for(lambda: is_answering(port))
    assert process.alive()
    assert process.tail(3) == ("serving",)
    process.stop()
    assert not process.alive()
    assert not is_answering(port)
    assert process.tail(3) == ("serving",)
    assert not process.directory.exists()
    process.stop()  # again


def test_stop_ends_the_whole_tree():
    process, _ = serve(FAMILY + SERVE)
    members = family(process.pid)
    process.stop()
    assert are_gone(members)


def test_a_server_that_ignores_sigterm_is_killed_and_its_shared_memory_removed():
    program = """
import signal
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = shared_memory.SharedMemory(create=True, size=1000)
print(block.name, flush=True)
"""
    process, _ = serve(program + SERVE)
    block = Path("/dev/shm") / process.tail(5)[0]
    assert block.exists()
    process.stop()
    assert not process.alive()
    assert not block.exists()


OWNER = """
import os, time
from rheostat.infra.processes.server import free_ports, start
from tests.support.jobs import kill
from tests.support.servers import FAMILY, SERVE, launch
process, port = start(launch(FAMILY + SERVE), on_progress=lambda: None, ports=free_ports())
if {forks} and os.fork() == 0:
    time.sleep(1000)
print(process.pid, process.directory, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork that keeps its pipes open"])
def test_nothing_of_a_server_survives_the_sigkill_of_its_owner(forks):
    with python(OWNER.format(forks=forks)) as (owner, (pid, directory)):
        members, forked = family(int(pid)), psutil.Process(owner.pid).children()
        assert directory in {process.environ().get("RHEOSTAT_SERVER") for process in members}
        try:
            kill(owner)
            assert are_gone(members)
            assert not Path(directory).exists()
        finally:
            for process in forked:
                process.kill()


@pytest.mark.parametrize("number", [0, 1], ids=["its parent", "itself"])
def test_nothing_of_a_server_survives_a_guard_and_then_an_owner_that_are_killed(number):
    with python(OWNER.format(forks=False)) as (owner, (pid, directory)):
        members, guards = family(int(pid)), guards_of(Path(directory))
        assert members[0] == guards[1]
        guards[number].kill()
        assert are_gone([guards[number]])
        assert list_running(members[1:2]), "the server keeps serving"
        kill(owner)
        assert are_gone([*members, *guards])
        assert not Path(directory).exists()


DRIVER = """
import os, subprocess, tempfile, time
from pathlib import Path
from rheostat.infra.processes.guard import CLUSTER, start_guard
directory = Path(tempfile.mkdtemp(prefix="rheostat-", dir="/tmp"))
guard = start_guard(directory)
marked = {**os.environ, CLUSTER: str(directory)}
agents = [subprocess.Popen(["sleep", "1000"], env=marked, start_new_session=True) for _ in range(2)]
print(directory, *(agent.pid for agent in agents), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("killed", [(), (0,), (1,)], ids=["no guard", "its parent", "itself"])
def test_nothing_of_a_cluster_survives_a_guard_and_then_a_driver_that_are_killed(killed):
    with python(DRIVER) as (driver, (directory, *pids)):
        assert wait_for(lambda: len(guards_of(Path(directory))) == 2)
        agents, guards = [psutil.Process(int(pid)) for pid in pids], guards_of(Path(directory))
        for number in killed:
            guards[number].kill()
            assert are_gone([guards[number]])
        assert len(list_running(agents)) == 2
        kill(driver)
        assert are_gone([*agents, *guards])
        assert not Path(directory).exists()


HOLDER = """
import time
from pathlib import Path
from rheostat.infra.processes.guard import guarded_directory
with guarded_directory("rheostat-test-") as directory:
    (directory / "weights").write_bytes(b"large")
    print(directory, flush=True)
    if not {stays}:
        raise SystemExit
    time.sleep(1000)
"""


@pytest.mark.parametrize("stays", [False, True])
def test_a_guarded_directory_is_deleted_however_its_process_ends(stays):
    with python(HOLDER.format(stays=stays)) as (holder, [directory]):
        guards = guards_of(Path(directory))
        if stays:
            assert Path(directory, "weights").exists()
            kill(holder)
        holder.wait()
    assert are_gone(guards)
    assert wait_for(lambda: not Path(directory).exists())  # the guard may have been too young to be found


class Serving:
    """Worker that owns a server."""

    def progress(self):
        return 0

    def serve(self, work):
        self._process, _ = serve(FAMILY + SERVE)
        return self._process.pid, os.getpid()


WITH_WORKER = """
import asyncio, sys
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.worker import PoolSpec
async def main():
    async with RayCluster.open("servers") as cluster:
        for role in ("let go", "killed"):
            pool = await cluster.pool(PoolSpec(role, "tests.integration.processes.test_servers:Serving"))
            print("pids", *(await pool.run("serve", None, returns=tuple)).result, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await pool.close()
        pool = await cluster.pool(PoolSpec("with the driver", "tests.integration.processes.test_servers:Serving"))
        print("pids", *(await pool.run("serve", None, returns=tuple)).result, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_the_server_of_a_worker_ends_with_the_worker_however_the_worker_ends():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    driver = subprocess.Popen([sys.executable, "-c", WITH_WORKER], text=True, **pipes)
    try:
        for end in ("let go", "killed", "with the driver"):
            line = next(line for line in driver.stdout if line.startswith("pids "))  # Ray writes there too
            server, worker = map(int, line.split()[1:])
            members, directory = family(server), Path(psutil.Process(server).cwd())
            assert directory.is_relative_to(psutil.Process(server).environ()["RHEOSTAT_CLUSTER"])
            if end != "let go":
                os.kill(worker if end == "killed" else driver.pid, signal.SIGKILL)
            if end != "with the driver":
                driver.stdin.write("go on\n")
                driver.stdin.flush()
            assert are_gone(members)
            assert not directory.exists()
    finally:
        driver.kill()
        driver.communicate()


def test_the_children_of_a_killed_server_are_killed():
    process, _ = serve(FAMILY + SERVE)
    guard, root, *others = family(process.pid)
    root.kill()
    assert are_gone(others)
    assert not process.alive()
    assert process.exit_code() == -signal.SIGKILL
    assert process.tail(1) == ("serving",)
    process.stop()
    assert are_gone([guard])


def test_stop_ends_a_server_whose_guard_was_killed():
    process, port = serve(SERVE)
    guard = psutil.Process(process.pid).parent()
    guard.kill()
    assert are_gone([guard])
    process.stop()
    assert not process.alive()
    assert not is_answering(port)
    assert not process.directory.exists()


def test_a_server_that_fails_to_start_is_reported_with_exit_code_and_last_lines():
    program = "import sys; print('loads'); sys.exit('no such model: tiny')"
    expected = r"^the small server ended with exit code 1 before it was ready: .*no such model: tiny"
    with pytest.raises(WorkerFailed, match=expected) as caught:
        serve(program)
    assert "loads" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_killed_during_its_start_is_reported_with_the_signal():
    with pytest.raises(WorkerLost, match="ended by SIGKILL before it was ready"):
        serve("import os; os.kill(os.getpid(), 9)")


def test_the_signal_that_ended_a_server_is_reported_even_if_the_guard_notices_the_end_late(tmp_path):
    def kill_while_the_guard_is_stopped(port):
        def find():
            return [process for process in psutil.process_iter() if str(tmp_path) in _words(process)]

        assert wait_for(find), "a new process has the arguments of the server only after a moment"
        [server] = find()
        guard = server.parent()
        guard.suspend()
        server.kill()
        assert wait_for(lambda: not is_alive(server.pid))
        Timer(2, guard.resume).start()
        return False

    command = [sys.executable, "-c", "import time; time.sleep(1000)", str(tmp_path)]
    with pytest.raises(WorkerLost, match="ended by SIGKILL before it was ready"):
        serve("", command=lambda port: command, ready=kill_while_the_guard_is_stopped)


def test_a_server_that_starts_too_slowly_is_ended_and_its_last_lines_are_reported(tmp_path):
    printed = tmp_path / "printed"
    expected = r"^the small server was not ready within 0\.5 s\. The log ends with: .*step 4 \| step 5 of a long start$"
    with pytest.raises(WorkerFailed, match=expected):
        serve(
            "",
            command=lambda port: [sys.executable, "-uc", SLOW, str(port), str(printed)],
            ready=lambda port: not wait_for(printed.exists),
            start_seconds=0.5,
        )
    assert not [process for process in psutil.process_iter() if str(printed) in _words(process)]


def test_a_missing_program_is_reported():
    with pytest.raises(WorkerFailed, match=r"/no/such/python did not start: .*No such file or directory"):
        serve("", command=lambda port: ["/no/such/python"])


def test_a_growing_log_or_a_busy_core_counts_as_progress():
    process = OwnedProcess([sys.executable, "-c", OBEDIENT], environment=dict(os.environ))
    assert wait_for(lambda: process.tail(1) == ("waits",))
    write, busy = process.directory / "write", process.directory / "busy"
    assert process.was_active()
    assert not stirs_within(process, seconds=1)
    write.touch()
    assert wait_for(lambda: process.tail(1) == ("wrote",))
    assert process.was_active()
    assert not stirs_within(process)
    busy.touch()
    assert wait_for(process.was_active, every=0.5)
    busy.unlink()
    assert wait_for(lambda: not stirs_within(process))
    process.stop()


def stirs_within(process, *, seconds=0.5):
    time.sleep(seconds)
    return process.was_active()


@pytest.mark.parametrize("works", [True, False])
def test_a_start_reports_progress_only_while_the_server_is_active(works, tmp_path):
    begun, beats, looks = tmp_path / "begun", [], itertools.count()
    program = f"""
import pathlib, time
pathlib.Path({str(begun)!r}).touch()
while True:
    time.sleep(0.1 if {works} else 1000)
    print("works", flush=True)
"""

    def has_seen_enough(port):
        wait_for(begun.exists)
        return len(beats) > 2 if works else next(looks) > 10

    process, _ = serve(program, ready=has_seen_enough, on_progress=lambda: beats.append(True))
    process.stop()
    assert works or len(beats) <= 1, "the first look also counts the start of the interpreter"


def test_a_port_that_is_no_longer_free_is_replaced_by_the_next_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        process, port = serve(
            SERVE, ports=[first, *free_ports()], ready=lambda port: port != first and is_answering(port)
        )
        assert port != first
        process.stop()
        with pytest.raises(WorkerFailed, match="Address already in use"):
            serve(SERVE, ports=[first], ready=lambda port: False)


def test_a_server_gets_only_the_environment_variables_that_are_passed(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "1")
    program = "import os; print(sorted(os.environ)); print(os.environ['TMPDIR'] == os.getcwd())" + SERVE
    process, _ = serve(program, environment={"KEY": "k", "PATH": os.environ["PATH"]})
    names, own = process.tail(5)[:2]
    process.stop()
    assert "'KEY'" in names
    assert "SECRET_OF_THE_OWNER" not in names
    assert own == "True"


def test_a_key_is_on_no_command_line():
    process, _ = serve(SERVE, environment={**os.environ, "KEY": "secret-of-this-test"})
    assert not [other for other in psutil.process_iter() if "secret-of-this-test" in _words(other)]
    process.stop()


def _words(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
