"""The guard: a process that outlives its owner to end everything that the owner has started.

Ray's own agents stay for more than a minute after their driver was killed, and children of a worker or of a server
longer. The owner holds the guard's stdin open; when that closes, by the owner's will or by its SIGKILL, every process
of the cluster or of the server is killed, and their directory removed. A server's command is started by the guard
itself, which adopts what the command leaves behind. The guard is a fork of another process, which waits for its end,
and if it was killed, adopts what it had and does the same. Run as a file, so this imports nothing of the house.

No library does this. psutil finds and kills a tree, but somebody must be alive to call it, and children of a dead
process hang in no tree; the kernel's signal at a parent's death (prctl) reaches one generation, when a thread ends;
supervisord and circus are daemons that are configured and outlive everybody; control groups and systemd's scopes end
all that is in them, but need rights that a container or a laptop's user does not have.
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
"""Environment variables that the processes of an embedded cluster, or of a server, inherit: its directory."""
LOG, ENDED = "log", "ended"
"""Files in a server's directory: what it writes, and its exit code once it has ended."""

POLL_SECONDS = 0.1
GIVE_UP_SECONDS = 30.0
TERMINATE_SECONDS = 3.0
"""How long a server may take to close what it holds before it is killed."""
TRACKER, TRACKER_SECONDS = "multiprocessing.resource_tracker", 2.0
"""Python's process that removes the shared memory of processes that were killed, and ends by itself after them."""


def start_guard(
    directory: Path, command: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a guard; it writes one line, the pid of the command, and closes its stdout when nothing is left.

    The environment goes through a pipe, as nobody may read keys in it; the guard itself carries no mark, and is no
    child of the owner: who ends a cluster, or the children of a worker, must not end the guard of a server there.
    """
    own = {name: value for name, value in os.environ.items() if name not in (CLUSTER, SERVER)}
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=own,
        start_new_session=True,
    )
    assert guard.stdin is not None, "it was asked for"
    variables = {**(os.environ if environment is None else environment), SERVER: str(directory)}
    order = {"command": list(command), "environment": variables if command else {}}
    guard.stdin.write(json.dumps(order).encode() + b"\n")
    guard.stdin.flush()
    return guard


@contextlib.contextmanager
def guarded_directory(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory that is gone afterwards, also where this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    guard = start_guard(directory)
    try:
        yield directory
    finally:
        guard.communicate()


def processes_of(directory: Path) -> list[psutil.Process]:
    """List the processes of a cluster or a server: those that inherited its mark.

    Some overwrite their environment when they rename themselves; they are known by their logs. Drivers, which log
    there too, are not of the cluster.
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
    """End the processes until none is left: by SIGTERM while there is time, then by SIGKILL. The owner is spared.

    The guard of a server also ends what it has `adopted`.
    """
    began, asked = time.monotonic(), set[psutil.Process]()
    while (spent := time.monotonic() - began) < GIVE_UP_SECONDS:
        alive = set(processes_of(directory))
        if adopted:
            _collect()
            alive |= set(psutil.Process().children(recursive=True))
        alive = {process for process in alive if process.pid not in (spared, os.getpid())}
        if not alive:
            return
        if spent < terminate_seconds:
            _each(alive - asked, psutil.Process.terminate)
            asked |= alive
        else:
            patient = spent < terminate_seconds + TRACKER_SECONDS
            _each({process for process in alive if not (patient and _tracks(process))}, psutil.Process.kill)
        time.sleep(0.05)


def _tracks(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(TRACKER in word for word in process.cmdline())
    return False


def _each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            act(process)


def _collect() -> dict[int, int]:
    """Take note of children that have ended, own and adopted: their exit codes."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parents die, whatever they call themselves (Linux)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _released(owner: psutil.Process) -> bool:
    """Wait a moment for the owner's word or its end; a fork of it may hold the pipe open for longer."""
    if select.select([0], [], [], POLL_SECONDS)[0]:
        return True
    with contextlib.suppress(psutil.Error):
        return not owner.is_running() or owner.status() == psutil.STATUS_ZOMBIE
    return True


def _serve(directory: Path, owner: psutil.Process, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command until it ends or its owner wants it no more; nothing of it is left then."""
    _adopt_orphans()
    with (directory / LOG).open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), cwd=directory
        )
    os.write(1, b"%d\n" % child.pid)
    while not _released(owner):
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
        signal.signal(name, lambda *_: None)  # the guard goes last; unlike SIG_IGN, this is not inherited
    if order.get("command") and os.fork():
        os._exit(0)  # the guard of a server is a child of init
    _adopt_orphans()
    if first := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0:
            return
        order = {}  # the command, if there was one, lives on as our child
    else:
        os.setsid()
    try:
        owning = psutil.Process(owner)
        if order.get("command"):
            _serve(directory, owning, order["command"], order["environment"])
        while not _released(owning):
            pass
    except psutil.NoSuchProcess:  # the owner died before all this
        pass
    except OSError as error:
        os.write(1, f"{error}\n".encode())
    finally:
        reap(directory, spared=owner, adopted=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), int(sys.argv[2]))
