"""Servers of the tests, with a family of processes."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import psutil

from rheostat.infra.processes import guard
from rheostat.infra.processes.server import Launch
from tests.support.jobs import PATIENCE

SERVE = """
import http.server, sys
class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Quiet)
print("serving", flush=True)
server.serve_forever()
"""

# An orphan and its child that left session, environment and log behind, as vLLM's processes that rename themselves.
FAMILY = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        nothing = {"env": {}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "close_fds": True}
        sleep = subprocess.Popen(["sleep", "1000"], start_new_session=True, **nothing)
        with open("family", "w") as told:
            told.write(f"{os.getpid()} {sleep.pid}\\n")
        for descriptor in (1, 2):
            os.dup2(0, descriptor)
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"], {})
    os._exit(0)
"""


@contextmanager
def serve_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests by a handler in threads of this process; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of the loopback interface for a server that is yet to start.

    The kernel gives a port that is bound to no other process. Servers that set SO_REUSEADDR can still listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def is_answering(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}", timeout=1, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def launch(program, *, start_seconds=PATIENCE, **changes):
    fields = {
        "what": "the small server",
        "command": lambda port: [sys.executable, "-c", program, str(port)],
        "environment": dict(os.environ),
        "ready": is_answering,
        "start_seconds": start_seconds,
    }
    return Launch(**(fields | changes))


def guards_of(directory: Path) -> list[psutil.Process]:
    """Return the guard of a cluster or a server, which ends after the process that it waits for."""
    words = [guard.__file__, str(directory)]
    found = [process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[2:4] == words]
    return sorted(found, key=psutil.Process.create_time)
