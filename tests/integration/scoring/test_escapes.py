"""Attempts of a program to escape from the sandbox (escapes.toml), in jobs that run as root and as another user."""

import json
import os
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from rheostat.infra.processes.child import Child, Interpreter
from rheostat.infra.processes.programs import Program
from rheostat.infra.processes.sandbox import program_limits
from rheostat.infra.processes.syscalls import NUMBERS
from tests.support.sandboxes import needs_sandbox

PYTHON = "/usr/bin/python3"
NOBODY = 65534
MARK = str(100000 + os.getpid())
ATTEMPTS = {
    f"{group}.{name}": code
    for group, attempts in tomllib.loads(Path(__file__).with_name("escapes.toml").read_text()).items()
    for name, code in attempts.items()
}
ATTEMPTING = """
import ctypes, fcntl, json, os, resource, socket, subprocess, sys, termios, time
attempts, numbers, names = json.load(sys.stdin)

def libc(name, *arguments):
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result

def call(name, *arguments):
    return libc("syscall", ctypes.c_long(numbers[name]), *arguments)

succeeded = []
for name, code in attempts.items():
    try:
        exec(code, {**globals(), **names})
        succeeded.append(name)
    except Exception:
        pass
print(json.dumps([len(attempts), succeeded]), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", names["MARK"]], {})
    os._exit(0)
"""


@pytest.fixture
def names() -> Iterator[dict[str, str | int]]:
    """Targets of the attempts. Their file modes let every user of the machine open them."""
    with TemporaryDirectory(prefix="rheostat-escapes-") as place:
        yield from open_targets(Path(place))


def open_targets(place: Path) -> Iterator[dict[str, str | int]]:
    """Write files and open sockets below a directory that every user may use."""
    folder, abstract = place / "shown", f"rheostat-{MARK}"
    secret = place / "hidden/secret"
    for path in (folder / "seen", secret):
        path.parent.mkdir()
        path.write_text("canary")
        path.chmod(0o666)
    for path in (folder, secret.parent, place):
        path.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
    ):
        for each, address in (
            (stream, f"{folder}/socket"),
            (hidden, f"\0{abstract}"),
            (datagram, f"{folder}/datagram"),
        ):
            each.bind(address)
        stream.listen()
        hidden.listen()
        for name in ("socket", "datagram"):
            (folder / name).chmod(0o777)
        yield {
            "SECRET": str(secret),
            "FOLDER": str(folder),
            "PORT": server.getsockname()[1],
            "ABSTRACT": abstract,
            "MARK": MARK,
        }


def attempt_all(names: dict[str, str | int]) -> list[object]:
    """Run all attempts in a sandbox and return their number and the names of those that succeed."""
    limits = program_limits(20, memory_bytes=1 << 30)
    interpreter = Interpreter(PYTHON, (str(names["FOLDER"]),), (), sandboxed=True)
    child = Child({"programs": True, "limits": dict(limits)}, interpreter, what="escapes", seconds=20)
    try:
        child.ready()
        program = Program(("-c", ATTEMPTING), input=json.dumps([ATTEMPTS, NUMBERS, names]), shows_errors=True)
        [_, ran, _, _], _ = child.exchange({"token": "0", "cpu": 20, **asdict(program)}, 30)
    finally:
        child.kill()
    return json.loads(ran["output"])


def as_user(user: int, names: dict[str, str | int]) -> list[object]:
    """Run all attempts from a process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.write(write, json.dumps(attempt_all(names)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return json.loads(found)


def is_usable(python: str) -> bool:
    """Return whether every user of the machine can run this Python."""
    return Path(python).exists() and not subprocess.run([python, "-c", "import json"], check=False).returncode


@needs_sandbox
@pytest.mark.skipif(not is_usable(PYTHON), reason=f"{PYTHON} is not there")
@pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "nobody"])
def test_no_attempt_to_get_out_of_the_sandbox_succeeds(user: int, names):
    if os.geteuid() not in (0, user):
        pytest.skip("this needs root")
    found = as_user(user, names) if os.geteuid() != user else attempt_all(names)
    assert found == [len(ATTEMPTS), []]
    assert [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", MARK]] == []
