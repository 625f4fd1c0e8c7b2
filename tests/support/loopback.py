"""Processes of servers on loopback."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.processes import die_with_parent

START_SECONDS = 60


def free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(command: list[str], log: Path, *, directory: Path | None = None) -> Iterator[None]:
    """Run a server during the block, with its output in a file."""
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, cwd=directory, preexec_fn=die_with_parent) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def await_server(endpoint: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(endpoint, trust_env=False)
            return
        except httpx.TransportError as error:
            assert time.monotonic() < deadline, f"{endpoint}: {error}"
            time.sleep(0.1)
