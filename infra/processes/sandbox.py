"""Sandbox for untrusted functions, based on bubblewrap. infra/runner.py also sets resource limits inside the sandbox.

Code in the sandbox can read the programs of the system, its Python and its own folders, and has an empty /tmp. It has
no network, no Unix sockets and no environment variables, and cannot see other processes. Each call runs in a forked
process. After the call, all of its processes and files are removed.

If this process is root, sandboxed code must run as another user. Otherwise it could change files of root, such as
kernel settings and device nodes. In this case bubblewrap starts as root, because it must be able to read all folders,
and infra/sandbox_runner.py switches to the user NOBODY before it loads any code.
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rheostat.infra import runner
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.syscalls import build_filter, has_filter

MEMORY_BYTES: Final = 8 * 2**30
"""Maximum address space in bytes of each process in the sandbox."""
PROCESSES: Final = 64
"""Maximum number of processes that one call in the sandbox may have at the same time. They are counted every 0.02
seconds."""
FILE_BYTES: Final = 64 * 2**20
"""Maximum size in bytes of a single file that sandboxed code writes, and of all its files together in /tmp or in shared
memory."""
OUTPUT_BYTES: Final = 2**20
"""Maximum number of bytes that a sandboxed program may write to its output. A program that writes more is stopped."""
NOBODY: Final = 65534
"""User id and group id with which sandboxed code runs if this process is root."""
ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")},
}

_ISOLATION = (
    "--unshare-all",
    "--unshare-user",
    "--die-with-parent",
    "--new-session",
    "--cap-drop",
    "ALL",
    "--clearenv",
)
_PROC = ("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys")
"""Options of bubblewrap (the sandbox program) that mount /proc for the processes of the sandbox, with read-only kernel
settings."""
_CONFIGURATION = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "passwd",
    "group",
    "ssl/certs",
)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *(f"/etc/{name}" for name in _CONFIGURATION))
_RUNNERS = [str(path) for path in Path(runner.__file__).parent.glob("*.py") if path.name in runner.FILES]
_QUESTION = """
import json, sys
print(json.dumps([sys.version_info[:2], sys.executable, sys.prefix, sys.base_prefix, *sys.path]))
"""
_SECONDS = 60.0


def switches_user() -> bool:
    """Return whether sandboxed code runs as the user NOBODY instead of the current user. This is the case if this
    process is root.

    In a user namespace that does not contain NOBODY, root is actually an unprivileged user of the machine. In this case
    sandboxed code runs as the same user.
    """
    if os.geteuid() != 0:
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in ranges)


def start_sandboxed(
    command: Sequence[str], folders: Sequence[str], *, stderr: int | None, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a Python command in a sandbox, with pipes as its stdin and stdout. The command can only read `folders` and
    the folders of its Python. `stderr` is the target of its errors, as for Popen. The command inherits the open files
    `descriptors`.

    Raises OSError if the operating system refuses to start the command or to map the user NOBODY.
    """
    own = [folder for folder in query_python(command[0], where="python")[1:] if Path(folder).exists()]
    seen = sorted({*own, *(folder for folder in folders if Path(folder).exists()), *_RUNNERS})
    parents = sorted({str(parent) for place in seen for parent in Path(place).parents})
    here = str(Path.cwd())
    writable = [
        word
        for place in ("/tmp", "/dev/shm")
        for word in ("--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", place)
    ]
    arguments = [
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *(word for place in _SYSTEM for word in ("--ro-bind-try", place, place)),
        *(*_PROC, "--dev", "/dev", "--remount-ro", "/dev", *writable),
        # bubblewrap itself would make them accessible to root only
        *(word for place in parents if place != "/" for word in ("--perms", "755", "--dir", place)),
        *(word for place in seen if place != "/" for word in ("--ro-bind", place, place)),
        *("--remount-ro", "/", "--chdir", here if here in seen else "/tmp", "--"),
        *command,
    ]
    return _start(_bubblewrap() or "bwrap", arguments, stderr=stderr, descriptors=descriptors)


def _start(
    bubblewrap: str, arguments: Sequence[str], *, stderr: int | None, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start bubblewrap (the sandbox program) with a filter of system calls. If this process is root, the users root and
    NOBODY exist in the sandbox."""
    filter_file = os.memfd_create("filter")
    os.write(filter_file, build_filter())
    os.lseek(filter_file, 0, os.SEEK_SET)
    words, ours, theirs = ["--seccomp", str(filter_file)], list[int](), [filter_file]
    if is_root := switches_user():
        (read_info, write_info), (read_go, write_go) = os.pipe(), os.pipe()
        ours, theirs = [read_info, write_go], [filter_file, write_info, read_go]
        words += ["--info-fd", str(write_info), "--userns-block-fd", str(read_go)]
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # dropped by infra/sandbox_runner.py
    try:
        process = subprocess.Popen(
            [bubblewrap, *_ISOLATION, *words, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=ENVIRONMENT,
            bufsize=0,
            start_new_session=True,
            pass_fds=[*theirs, *descriptors],
        )
        while theirs:
            os.close(theirs.pop())  # only bubblewrap may have these ends, so that the pipes close if it dies
        if is_root:
            try:
                _map_users(*ours)
            except OSError:
                process.kill()
                process.communicate(timeout=_SECONDS)
                raise
        return process
    finally:
        for descriptor in (*ours, *theirs):
            os.close(descriptor)


def _map_users(info: int, go: int) -> None:
    """Add the users root and NOBODY to the user namespace of bubblewrap (the sandbox program). bubblewrap writes its
    process id to the pipe `info`, and continues after a byte arrives at the pipe `go`."""
    with open(os.dup(info), "rb") as pipe:  # noqa: PTH123 -- of a descriptor
        text = pipe.read()
    if not text:  # bubblewrap has ended; its output explains why
        return
    pid = json.loads(text)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    with suppress(BrokenPipeError):
        os.write(go, b"1")


def check_sandbox(where: str) -> None:
    """Raise BadInput if the sandbox does not work on this machine. `where` names the setting that requires the sandbox,
    for the message."""
    bubblewrap = _bubblewrap()
    if bubblewrap is None:
        raise BadInput(
            f"{where}: the sandbox needs bubblewrap, but its command bwrap is not on the PATH. Install it, for example "
            "with `apt install bubblewrap`."
        )
    if not has_filter():
        raise BadInput(
            f"{where}: the sandbox supports only the processors x86_64 and aarch64, but this machine has "
            f"{os.uname().machine}. Run the job on another machine."
        )
    try:
        arguments = ["--ro-bind", "/", "/", *_PROC, "--dev", "/dev", "true"]
        process = _start(bubblewrap, arguments, stderr=subprocess.PIPE)
    except OSError as error:
        raise BadInput(
            f"{where}: this job runs as root, and bubblewrap cannot run sandboxed code as user {NOBODY} ({error}). Run "
            "the job as another user, or give its container the capabilities CAP_SETUID and CAP_SETGID."
        ) from error
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    if process.returncode:
        why = " ".join(errors.decode(errors="replace").split()) or f"exit code {process.returncode}"
        raise BadInput(
            f"{where}: bubblewrap does not work on this machine ({why}). It needs user namespaces. Enable them in the "
            "kernel, and in the container if the job runs in one."
        )


@functools.cache
def query_python(python: str | Path, *, where: str) -> tuple[str, ...]:
    """Run a Python executable once, and return the paths of the executable, its installation prefixes and its module
    folders. `python` may be a script that starts another executable, and `where` names the setting that contains it.

    Raises BadInput if the Python does not run or is too old.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        version, *places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it does not run Python code"
        raise BadInput(
            f"{where} is {str(python)!r}, which is not a Python interpreter: {what}. Set it to the path of the Python "
            "of an environment, such as .venv/bin/python."
        ) from error
    if tuple(version) < runner.MIN_PYTHON:
        expected, actual = (".".join(map(str, numbers)) for numbers in (runner.MIN_PYTHON, version))
        raise BadInput(
            f"{where} is {str(python)!r} with Python {actual}, but Python {expected} or newer is needed. Set it to a "
            "newer Python."
        )
    return tuple(place for place in places if place)


def call_limits(seconds: float) -> Mapping[str, int]:
    """Return the resource limits for a call of a sandboxed function that may take `seconds`, with the keys that
    infra/runner.py expects."""
    return {"memory": MEMORY_BYTES, "processes": PROCESSES, "file": FILE_BYTES, "cpu": int(seconds) + 2}


def program_limits(seconds: float, *, memory_bytes: int) -> Mapping[str, int]:
    """Return the resource limits for running a program that a policy generated. The memory limit applies to each
    process, and to all processes of the program together."""
    return {**call_limits(seconds), "memory": memory_bytes, "held": memory_bytes, "output": OUTPUT_BYTES}


def _bubblewrap() -> str | None:
    return shutil.which("bwrap")
