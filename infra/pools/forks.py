"""Fork the workers of an embedded cluster from one process that has already imported what they need.

Importing torch, transformers and DeepSpeed takes seconds of CPU in every worker. The `nursery` imports them once. Ray
starts each worker by the command of this file, which hands its arguments, environment and files to the nursery and ends
when a fork of it has taken them over: that runs Ray's own worker program. Ray knows a worker by the id among its
arguments and by the pid that it registers with, and ends its children by the process group that it was started in;
the fork joins that group.

What stands in the way (a dead nursery, a second thread in it, another environment) leaves the command to become the
worker itself, as without all this, and to say why in the worker's log. Libraries read some variables only when they are
imported: these must be the nursery's own. A worker that may see a GPU is never forked. The cluster's guard ends the
nursery. Run as a file, so this imports nothing of the house.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

READ_AT_IMPORT = ("_NUM_THREADS", "_PARALLELISM", "_OFFLINE", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
"""How the names of variables end that a worker has from its pool and its libraries read once."""
UNTHREADED = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Arrow's second allocator starts a thread when it is imported, unless told not to."""
THREADED = ("mlflow",)
"""Modules that workers do not use and that start threads. DeepSpeed's autotuner imports MLflow if MLflow is installed,
and MLflow imports polars."""
WORKER_PROGRAM = "ray._private.workers.default_worker"
PATIENCE_SECONDS = 30.0
"""How long a worker waits for imports under way; Ray gives it up when it has not registered after 60 s."""
LENGTH_BYTES, READY = 8, b"1"
BADNESS = Path("/proc/self/oom_score_adj")
"""By this Ray offers its workers first to a kernel that is short of memory."""


class Order(TypedDict):
    """What a worker takes over from the command that Ray has started."""

    arguments: list[str]
    variables: dict[str, str]
    directory: str
    group: int
    niceness: int
    badness: str
    blocked: list[int]


def start_nursery(
    directory: Path, modules: Sequence[str], *, packages: Sequence[str] = (), variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start to import the modules, in an environment with these variables; the caller's `sys.path` finds them.

    The packages, if they are installed, are imported before that path is set: it may end with folders of users.
    """
    environment = {**os.environ, **variables}
    command = [sys.executable, __file__, "nurse", str(_meeting_place(directory, environment))]
    with (directory / "nursery.log").open("ab") as log:
        return subprocess.Popen(
            [*command, json.dumps(sys.path), json.dumps(packages), *modules],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | UNTHREADED,
            process_group=0,  # neither a terminal's ^C nor the end of a worker's group is for it
        )


def worker_command(directory: Path) -> str:
    """Return what Ray is to start in place of Python: words for a shell, before the worker program's own."""
    return shlex.join([sys.executable, "-I", "-S", __file__, "start", str(directory)])


def _meeting_place(directory: Path, environment: Mapping[str, str]) -> Path:
    """Name the nursery's socket by what its children may not have otherwise."""
    read = sorted((name, value) for name, value in environment.items() if name.endswith(READ_AT_IMPORT))
    return directory / f"nursery-{hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]}"


# ---- the command that Ray starts


def _start(directory: Path, arguments: list[str]) -> None:
    """Have the worker forked, else become it."""
    try:
        _have_forked(directory, arguments)
    except OSError as error:
        sys.stderr.write(f"worker started without the nursery: {error}\n")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *arguments])


def _have_forked(directory: Path, arguments: list[str]) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise OSError("it may see a GPU")
    order: Order = {
        "arguments": arguments,
        "variables": dict(os.environ),
        "directory": str(Path.cwd()),
        "group": os.getpgrp(),
        "niceness": os.nice(0),
        "badness": BADNESS.read_text(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    body = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(_meeting_place(directory, os.environ)))
        socket.send_fds(connection, [len(body).to_bytes(LENGTH_BYTES)], [0, 1, 2])
        connection.sendall(body)
        if not connection.recv(1):
            raise OSError("the nursery forked nothing, for a reason in its log")
        connection.sendall(READY)


# ---- the nursery


def _nurse(place: Path, path: list[str], packages: Sequence[str], modules: Sequence[str]) -> None:
    """Import the modules, then fork a worker for every order; returns in none but the forks, at their end."""
    for package in packages:
        with contextlib.suppress(ImportError):  # the caller's path finds it
            importlib.import_module(package)
    own, sys.path = sys.path, path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(64)
        with hide_modules(*THREADED):
            for module in modules:
                _import(module)
        sys.path = own
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    order, files = _receive(connection)
                except (OSError, ValueError):  # the command was killed before it had said all
                    continue
                program = order["arguments"][0]
                if WORKER_PROGRAM not in sys.modules:  # Ray reads its variables now: they are the raylet's
                    os.environ.update(order["variables"])
                    sys.path.insert(0, str(Path(program).parent))
                    _import(WORKER_PROGRAM)
                if _fork() == 0:
                    listener.close()
                    _take_over(order, files)
                    connection.sendall(READY)
                    if not connection.recv(1):  # the command has lost patience, and is the worker itself
                        return
                    break
                for file in files:
                    os.close(file)
    runpy.run_path(program, run_name="__main__")


@contextlib.contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Let imports of these modules fail inside the block, unless they are imported already."""
    hidden = [name for name in names if sys.modules.setdefault(name, None) is None]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _import(module: str) -> None:
    """Import a module, if it can be: the worker that needs it says best why it cannot."""
    try:
        importlib.import_module(module)
    except Exception:
        traceback.print_exc()


def _receive(connection: socket.socket) -> tuple[Order, list[int]]:
    head, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(head))), files


def _fork() -> int:
    """Fork if this process has one thread: locks that another holds would stay locked in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the children; they learn of their own
    if os.fork() == 0:
        os._exit(0)  # OpenBLAS ends its threads before a fork, and starts them again when they have work
    threads = [Path(thread, "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        sys.stderr.write(f"forked nothing: threads {threads}\n")
        sys.stderr.flush()
        return -1
    gc.collect()
    gc.freeze()  # what is imported stays shared: the collector of a child does not write to it
    return os.fork()


def _take_over(order: Order, files: Sequence[int]) -> None:
    """Become what Python would be at the start of the worker program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    os.setpgid(0, order["group"])
    os.nice(order["niceness"] - os.nice(0))
    BADNESS.write_text(order["badness"])
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["variables"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if "numpy" in sys.modules:  # Python's own generator does this by itself
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    sys.argv = list(order["arguments"])


if __name__ == "__main__":
    if sys.argv[1] == "start":
        _start(Path(sys.argv[2]), sys.argv[3:])
    else:
        del sys.path[0]  # this file's directory; an option of Python would pass to the workers' children
        _nurse(Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:])
