"""Fork the workers of an embedded cluster from one process that has already imported their modules.

Importing torch, transformers and DeepSpeed takes seconds of CPU in every worker. The fork server imports them
once. Ray starts each worker with the command in this file. The command passes its arguments, environment and open
files to the fork server. The fork server forks a worker, which runs Ray's worker program, and the command ends. Ray
identifies a worker by the id in its arguments and by the pid that it registers, and ends the worker's children by their
process group. Therefore the fork joins the process group of the command.

If forking is not possible (the fork server is dead, has a second thread or a different environment), the command
becomes the worker itself and writes the reason to the worker's log. Some libraries read environment variables only when
they are imported, so these variables must be equal in the worker and the fork server. A worker that may use a GPU is
never forked.
The cluster's guard ends the fork server. This file is run directly, so it imports nothing from this repository.
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
"""Suffixes of the names of environment variables that libraries read only when they are imported. Each pool sets these
variables for its workers, so they must be the same in the fork server."""
UNTHREADED_VARIABLES = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment variable that prevents Arrow's second memory allocator from starting a thread when Arrow is imported."""
THREADED_MODULES = ("mlflow",)
"""Modules that start threads when they are imported and that workers do not need. DeepSpeed's autotuner imports MLflow
if it is installed, and MLflow imports polars."""
WORKER_PROGRAM = "ray._private.workers.default_worker"
IMPORT_SECONDS = 30.0
"""Maximum time in seconds that a worker waits for the fork server to import its modules. Ray gives up on a worker after
60 s."""
LENGTH_BYTES, READY = 8, b"1"
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""File with the priority at which the kernel kills this process if memory runs out. Ray sets the priority so that
workers are killed before other processes."""


class ForkRequest(TypedDict):
    """State of the command with which Ray starts a worker: arguments, environment variables, directory and process
    settings. The forked worker takes over this state."""

    arguments: list[str]
    variables: dict[str, str]
    directory: str
    group: int
    niceness: int
    badness: str
    blocked: list[int]


def start_forkserver(
    directory: Path, modules: Sequence[str], *, packages: Sequence[str] = (), variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a fork server: a process that imports `modules` once, and then forks a worker process for each request.
    `variables` are environment variables for it, and its socket and log are in `directory`.

    Modules are searched on the caller's `sys.path`. Installed `packages` are imported before this path is set, because
    the path may contain users' folders.
    """
    environment = {**os.environ, **variables}
    command = [sys.executable, __file__, "forkserver", str(_socket_path(directory, environment))]
    with (directory / "forkserver.log").open("ab") as log:
        return subprocess.Popen(
            [*command, json.dumps(sys.path), json.dumps(packages), *modules],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | UNTHREADED_VARIABLES,
            process_group=0,  # neither ^C in a terminal nor the end of a worker's process group ends the server
        )


def worker_command(directory: Path) -> str:
    """Return the shell command that Ray uses instead of `python` to start a worker. The command lets the fork server
    fork the worker. Ray appends the arguments of its worker program."""
    return shlex.join([sys.executable, "-I", "-S", __file__, "start", str(directory)])


def _socket_path(directory: Path, environment: Mapping[str, str]) -> Path:
    """Return the path of the fork server's socket. The name contains a hash of the environment variables that must have
    the same values in the worker and in the fork server."""
    read = sorted((name, value) for name, value in environment.items() if name.endswith(READ_AT_IMPORT))
    return directory / f"forkserver-{hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]}"


# ---- the command that Ray starts


def _start(directory: Path, arguments: list[str]) -> None:
    """Ask the fork server to fork the worker process. If this fails, run the worker program in this process instead."""
    try:
        _have_forked(directory, arguments)
    except OSError as error:
        sys.stderr.write(f"worker started without the fork server: {error}\n")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *arguments])


def _have_forked(directory: Path, arguments: list[str]) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise OSError("a worker that may use a GPU cannot be forked from the fork server")
    order: ForkRequest = {
        "arguments": arguments,
        "variables": dict(os.environ),
        "directory": str(Path.cwd()),
        "group": os.getpgrp(),
        "niceness": os.nice(0),
        "badness": OOM_SCORE.read_text(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    body = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(IMPORT_SECONDS)
        connection.connect(str(_socket_path(directory, os.environ)))
        socket.send_fds(connection, [len(body).to_bytes(LENGTH_BYTES)], [0, 1, 2])
        connection.sendall(body)
        if not connection.recv(1):
            raise OSError("the fork server created no process; forkserver.log contains the reason")
        connection.sendall(READY)


# ---- the fork server


def _serve_forks(place: Path, path: list[str], packages: Sequence[str], modules: Sequence[str]) -> None:
    """Run the fork server: import the modules, then fork a worker for every request that arrives at the socket `place`.
    The fork server never returns. In a forked worker, this function runs the worker program and then returns."""
    for package in packages:
        with contextlib.suppress(ImportError):  # then the caller's path finds the package
            importlib.import_module(package)
    own, sys.path = sys.path, path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(64)
        with hide_modules(*THREADED_MODULES):
            for module in modules:
                _import(module)
        sys.path = own
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    order, files = _receive(connection)
                except (OSError, ValueError):  # the command was killed before the request was complete
                    continue
                program = order["arguments"][0]
                if WORKER_PROGRAM not in sys.modules:  # Ray reads its variables at import, so they must be the raylet's
                    os.environ.update(order["variables"])
                    sys.path.insert(0, str(Path(program).parent))
                    _import(WORKER_PROGRAM)
                if _fork() == 0:
                    listener.close()
                    _take_over(order, files)
                    connection.sendall(READY)
                    if not connection.recv(1):  # the command has timed out and is the worker itself
                        return
                    break
                for file in files:
                    os.close(file)
    runpy.run_path(program, run_name="__main__")


@contextlib.contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Run the block while imports of these modules raise ImportError. Modules that are already imported stay
    available."""
    hidden = [name for name in names if sys.modules.setdefault(name, None) is None]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _import(module: str) -> None:
    """Import a module. If the import fails, only print the traceback. A worker that needs the module will raise the
    error again."""
    try:
        importlib.import_module(module)
    except Exception:
        traceback.print_exc()


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]]:
    head, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(head))), files


def _fork() -> int:
    """Fork this process and return the result of `os.fork`. If the process has more than one thread, return -1 without
    forking, because locks of other threads would stay locked in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the ended children
    if os.fork() == 0:
        os._exit(0)  # this fork makes OpenBLAS end its threads, which start again when needed
    threads = [Path(thread, "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        sys.stderr.write(f"no worker was forked, because the fork server has several threads: {threads}\n")
        sys.stderr.flush()
        return -1
    gc.collect()
    gc.freeze()  # a child's garbage collector then does not write to imported objects, so their memory stays shared
    return os.fork()


def _take_over(order: ForkRequest, files: Sequence[int]) -> None:
    """Give this forked process the state of a new Python process that runs the worker program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    os.setpgid(0, order["group"])
    os.nice(order["niceness"] - os.nice(0))
    OOM_SCORE.write_text(order["badness"])
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["variables"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if "numpy" in sys.modules:  # Python's own generator is reseeded automatically after a fork
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    sys.argv = list(order["arguments"])


if __name__ == "__main__":
    if sys.argv[1] == "start":
        _start(Path(sys.argv[2]), sys.argv[3:])
    else:
        del sys.path[0]  # drop this file's directory; a Python option would reach the workers' children
        _serve_forks(Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:])
