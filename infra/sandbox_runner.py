"""Part of infra/runner.py that only runs in a sandbox. It runs calls and programs in forked processes, and removes all
processes and files that they leave.

It imports nothing from Rheostat, and runs on CPython 3.9 or newer.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

KILLED = "its process was killed by "
"""Start of the message about a call whose process was killed. It is followed by the name of the signal."""
STOPPED = "it was stopped"
"""Message about a program that was stopped because its time limit was exceeded."""
WATCH_SECONDS = 0.02
FOLDER = "/tmp"
"""Working directory of sandboxed programs. All files in it are deleted after each call."""
_PR_SET_DUMPABLE = 4  # linux/prctl.h


def isolate(outside: str, user: int | None, folders: Iterable[str]) -> str:
    """Prepare this process to run sandboxed code: switch to `user` if it is not None, and prevent other processes from
    reading or changing this process. `outside` identifies the process namespace outside the sandbox, and `folders`
    contain users' code.

    Return the end of an error message that lists the folders of code that this user cannot read, or an empty string.
    Raises ValueError if this process is not in a sandbox.
    """
    if str(Path("/proc/self/ns/pid").readlink()) == outside or os.getppid() != 1:
        raise ValueError("the process is not isolated: it must run in a sandbox with its own process ids")
    unreadable = []
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        unreadable = [each for each in folders if os.path.exists(each) and not os.access(each, os.R_OK | os.X_OK)]  # noqa: PTH110 -- raises nothing
    protect_process()
    if not unreadable:
        return ""
    return (
        f". This job runs as root, so sandboxed code runs as user {user}, which cannot read "
        f"{', '.join(unreadable)}. Let every user read these folders (chmod -R o+rX {unreadable[0]}), "
        "or run the job as another user."
    )


def protect_process() -> None:
    """Prevent other processes of the same user from reading or changing this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)


def limit(limits: Mapping[str, int], *, lasts: bool = False) -> None:
    """Set the resource limits of this process and its descendants. `limits` contains the maximum memory and file size
    in bytes and the CPU time in seconds, with the keys "memory", "file" and "cpu". If `lasts` is true, CPU time is not
    limited, because the process serves many calls."""
    import resource

    for name, kind in {"memory": resource.RLIMIT_AS, "file": resource.RLIMIT_FSIZE}.items():
        resource.setrlimit(kind, (limits[name], limits[name]))
    if not lasts:
        resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu"], limits["cpu"] + 1))  # SIGXCPU first: a clear reason
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # under a fork bomb, the process that ends it still gets CPU time


def run_program(order: Mapping[str, Any], limits: Mapping[str, int], hidden: Iterable[int]) -> dict[str, str]:
    """Run Python with the arguments, files and stdin in `order`. Return a dict with the "output" of the program and its
    "ending", which is a description of the failure or an empty string. `hidden` are pipes that the program cannot
    access."""
    for name, text in order["files"].items():
        Path(FOLDER, name).write_text(text, encoding="utf-8", errors="replace")
    input_file = os.memfd_create("input")
    with open(os.dup(input_file), "wb") as file:  # noqa: PTH123 -- of a descriptor
        file.write(order["input"].encode("utf-8", "replace"))
    os.lseek(input_file, 0, os.SEEK_SET)

    def body(write: int) -> None:
        errors = write if order["shows_errors"] else os.open(os.devnull, os.O_WRONLY)
        for number, descriptor in enumerate((input_file, write, errors)):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 12)
        os.chdir(FOLDER)
        variables = {**os.environ, "PYTHONHASHSEED": "0"}  # sets then have the same order in every process
        os.execve(sys.executable, [sys.executable, "-s", "-B", "-X", "utf8", *order["arguments"]], variables)

    try:
        limits = {**limits, "cpu": order["cpu"]}
        output, status, reason = run_in_fork(body, limits, max_bytes=limits["output"], hidden=hidden)
    finally:
        os.close(input_file)
    return {
        "output": output[: limits["output"]].decode("utf-8", "replace"),
        "ending": reason or ("" if status == 0 else describe_end(status or 0)),
    }


def run_in_fork(
    body: Callable[[int], None], limits: Mapping[str, int], *, max_bytes: int, hidden: Iterable[int]
) -> tuple[bytes, int | None, str | None]:
    """Call a function in a forked process, where it writes its result to a pipe. Return the written bytes, the exit
    status (None if the process was stopped early), and the reason for stopping it early, or None. Afterwards, all its
    processes and files are removed.

    The process is stopped early if it writes more than `max_bytes` bytes, if it exceeds the limits, or if a message
    arrives at the first of the `hidden` pipes, which the function cannot access.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for pipe in (*hidden, read):
                os.close(pipe)
            limit(limits)
            body(write)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    os.set_blocking(read, False)
    written, status, reason = b"", None, None
    orders = [*hidden][:1]
    while status is None and reason is None:
        ready, _, _ = select.select([read, *orders], [], [], WATCH_SECONDS)
        ended, code = os.waitpid(child, os.WNOHANG)  # before reading, so that all output before the end is read below
        while len(written) <= max_bytes and (more := _read(read)):
            written += more
        status = code if ended else None
        if len(written) > max_bytes:
            reason = f"its process wrote more than {max_bytes} bytes"
        elif not ended:
            reason = STOPPED if set(orders) & set(ready) else _describe_excess(limits)
    os.close(read)
    clean()
    return written, status, reason


def _describe_excess(limits: Mapping[str, int]) -> str | None:
    """Describe the limit (number of processes, or memory) that all processes of a call together exceed. Return None if
    they exceed no limit."""
    others = _others()
    if len(others) > limits["processes"]:
        return f"its process started more than {limits['processes']}"
    if "held" in limits and sum(map(_memory_of, others)) > limits["held"]:
        return f"its processes took more than {limits['held'] >> 20} MiB of memory"
    return None


def _memory_of(pid: int) -> int:
    """Return the memory that a process uses, in bytes. Memory that is backed by files is not counted. Return 0 if the
    process has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def decode_result(written: bytes, status: int | None, reason: str | None) -> list[Any]:
    """Decode the output of `run_in_fork` for a call of a user's function. Return [value, None, None] if the call
    succeeded, [None, message, None] if the function failed, and [None, None, description] if its process ended
    early."""
    try:
        answer = json.loads(written)
        return [*answer, None] if reason is None and len(answer) == 2 else [None, None, reason]
    except (ValueError, TypeError, RecursionError):
        return [None, None, reason or describe_end(status or 0)]


def describe_end(status: int) -> str:
    """Describe how a process ended, from its exit status as returned by `os.waitpid`."""
    if os.WIFSIGNALED(status):
        return f"{KILLED}{signal_name(os.WTERMSIG(status))}"
    return f"its process ended with exit code {os.WEXITSTATUS(status)}"


def signal_name(number: int) -> str:
    """Return the name of a signal such as SIGKILL, or `signal N` if the signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- cleaning up


def _others() -> list[int]:
    """Return the ids of all processes in the sandbox except this process and process 1, which started the sandbox."""
    return [pid for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()) if pid not in (1, os.getpid())]  # noqa: PTH208


def clean() -> None:
    """Kill all other processes in the sandbox, and delete all files that sandboxed code can write."""
    while _others():
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError):
            pass
    for folder in (FOLDER, "/dev/shm"):
        for entry in Path(folder).iterdir():
            _remove(entry)


def _remove(path: Path) -> None:
    """Delete a file or folder that sandboxed code may have created. Mount points and their parent folders are kept.

    Raises SystemExit, which ends the sandbox, if the file cannot be deleted.
    """
    try:
        if path.lstat().st_uid != os.geteuid():
            return
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        path.chmod(0o700)
        for entry in path.iterdir():
            _remove(entry)
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EBUSY, errno.ENOTEMPTY):
            raise SystemExit(f"{path}: {error}") from error
