"""Guard process, which outlives the process that started it (its owner) and then ends all processes that the owner has
started.

After a driver is killed, Ray's agents continue for more than a minute, and children of workers or servers even longer.
The owner keeps the guard's stdin open. When stdin closes, on purpose or because the owner was killed, the guard kills
every process of the cluster or server and removes its directory. The guard itself starts the command of a server, and
adopts the processes that the command leaves behind. The guard has a parent process that waits for it. If the guard is
killed, the parent adopts the guard's children and ends them in the same way. This file is run directly, so it imports
nothing from this repository.

No library provides this. psutil can kill a process tree, but only while a process is alive to call psutil, and it does
not find children of dead processes. The kernel's signal at a parent's death (prctl) is only sent to direct children,
and already when the thread that started them ends. supervisord and circus are daemons that need configuration and keep
running. Control groups and systemd scopes need rights that users of a container or laptop do not have.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

CLUSTER, SERVER = "RHEOSTAT_CLUSTER", "RHEOSTAT_SERVER"
"""Names of the environment variables that contain the directory of an embedded cluster or of a server. All processes of
the cluster or server inherit the variable."""
LOG, ENDED = "log", "ended"
"""Names of the files in a server's directory that contain its output, and its exit code once it has ended."""

POLL_SECONDS = 0.1
GIVE_UP_SECONDS = 30.0
TERMINATE_SECONDS = 3.0
"""Maximum time in seconds for a server to close its resources, before it is killed."""
TRACKER, TRACKER_SECONDS = "multiprocessing.resource_tracker", 30.0
"""Name of Python's helper process that removes the shared memory of killed processes, and the maximum seconds in which
it ends by itself."""


def start_guard(
    directory: Path, command: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a guard: a separate process that ends all processes of a server or embedded cluster when this process ends,
    even if this process is killed. With `command`, the guard also starts the server. `directory` contains the server's
    files and is deleted at the end.

    The guard prints one line with the process id of the command, and closes its stdout when all processes have ended.
    The environment is sent through a pipe, because it may contain secret keys. The guard does not inherit the
    environment variable that marks processes of a cluster or server, and it is not a child of the owner. Therefore the
    guard of a server keeps running when the surrounding cluster, or the worker that owns the server, is ended.
    """
    own = {name: value for name, value in os.environ.items() if name not in (CLUSTER, SERVER)}
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=own,
        start_new_session=True,
    )
    assert guard.stdin is not None, "stdin is a pipe"
    variables = {**(os.environ if environment is None else environment), SERVER: str(directory)}
    order = {"command": list(command), "environment": variables if command else {}}
    guard.stdin.write(json.dumps(order).encode() + b"\n")
    guard.stdin.flush()
    return guard


@contextlib.contextmanager
def guarded_directory(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Run the block with a temporary directory. It is deleted after the block, even if this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    guard = start_guard(directory)
    try:
        yield directory
    finally:
        guard.communicate()


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the running processes of an embedded cluster or server, given its directory. They are recognized by an
    environment variable with this directory, which all of them inherit.

    Processes that overwrite their environment when they rename themselves are identified by their open log files. The
    drivers of a cluster also have log files in the directory, but are not returned.
    """
    return [process for process in psutil.process_iter() if _belongs(process, directory)]


def _belongs(process: psutil.Process, directory: Path) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        variables = process.environ()
        marks = (variables.get(CLUSTER), variables.get(SERVER))
        return str(directory) in marks or (not variables and _writes_under(directory, process))
    return False


def _writes_under(directory: Path, process: psutil.Process) -> bool:
    return any(Path(opened.path).is_relative_to(directory) for opened in process.open_files())


def reap(directory: Path, *, spared: int, adopted: bool = False, terminate_seconds: float = 0.0) -> None:
    """End all processes of an embedded cluster or server, given its `directory`, except the process with the id
    `spared`. They get SIGTERM and `terminate_seconds` to end by themselves, and then SIGKILL. If `adopted` is true, all
    descendants of this process are ended too.

    Repeats SIGKILL until no process is left, but gives up after `GIVE_UP_SECONDS`.
    """
    began, terminated = time.monotonic(), set[psutil.Process]()
    while (spent := time.monotonic() - began) < GIVE_UP_SECONDS:
        alive = set(processes_of(directory))
        if adopted:
            _collect()
            alive |= set(psutil.Process().children(recursive=True))
        alive = {process for process in alive if process.pid not in (spared, os.getpid())}
        if not alive:
            return
        if spent < terminate_seconds:
            _apply_to_each(alive - terminated, psutil.Process.terminate)
            terminated |= alive
        else:
            patient = spent < terminate_seconds + TRACKER_SECONDS
            _apply_to_each(
                {process for process in alive if not (patient and _is_tracker(process))}, psutil.Process.kill
            )
        time.sleep(0.05)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(TRACKER in word for word in process.cmdline())
    return False


def _apply_to_each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            act(process)


def _collect() -> dict[int, int]:
    """Collect the exit codes of all children that have ended, including adopted children, and return them by process
    id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _adopt_orphans() -> None:
    """Make this process adopt its descendants when their own parents end (Linux only)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _is_released(owner: psutil.Process) -> bool:
    """Return whether the owner, the process that started the guard, has ended or has closed its pipe to the guard. Wait
    up to `POLL_SECONDS` for this.

    Checking the pipe is not enough, because a forked child of the owner may keep it open.
    """
    if select.select([0], [], [], POLL_SECONDS)[0]:
        return True
    with contextlib.suppress(psutil.Error):
        return not owner.is_running() or owner.status() == psutil.STATUS_ZOMBIE
    return True


def _serve(directory: Path, owner: psutil.Process, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the command of a server until it ends or the owner (the process that started the guard) releases it. Then end
    all processes that the command has started."""
    _adopt_orphans()
    with (directory / LOG).open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), cwd=directory
        )
    os.write(1, b"%d\n" % child.pid)
    while not _is_released(owner):
        codes = _collect()
        if child.pid in codes:
            child.returncode = codes[child.pid]
            (directory / ENDED).write_text(f"{child.returncode}\n")
            reap(directory, spared=owner.pid, adopted=True)
    reap(directory, spared=owner.pid, adopted=True, terminate_seconds=TERMINATE_SECONDS)


def _guard(directory: Path, owner: int) -> None:
    with open(0, "rb", buffering=0, closefd=False) as orders:
        order = json.loads(orders.readline() or b"{}")
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)  # the guard must end last; unlike SIG_IGN, this is not inherited
    if order.get("command") and os.fork():
        os._exit(0)  # the guard of a server is a child of init
    _adopt_orphans()
    if first := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0:
            return
        order = {}  # this process has adopted the command
    else:
        os.setsid()
    try:
        owning = psutil.Process(owner)
        if order.get("command"):
            _serve(directory, owning, order["command"], order["environment"])
        while not _is_released(owning):
            pass
    except psutil.NoSuchProcess:  # the owner died before this point
        pass
    except OSError as error:
        os.write(1, f"{error}\n".encode())
    finally:
        reap(directory, spared=owner, adopted=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), int(sys.argv[2]))
