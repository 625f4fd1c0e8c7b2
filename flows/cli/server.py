"""The Prefect server with one repair for SQLite.

`python -m flows.cli.server SOCKET PARENT` serves a job and ends with it.

Prefect's write transactions on SQLite begin DEFERRED, so two that overlap fail at once ("database is locked", 503) and
the client sleeps 2, 4, 7 s: parallel sub-flows then take seconds to start (PrefectHQ/prefect#10188, #19771). Begun
IMMEDIATE, the second waits its turn, some milliseconds. PostgreSQL is not affected.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys

import sqlalchemy as sa
import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.settings import PREFECT_UI_API_URL, temporary_settings


def _begin(_: AioSqliteConfiguration, connection: sa.Connection) -> None:
    if SQLITE_BEGIN_MODE.get() is not None:  # reads carry no mode and stay outside transactions
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def serve(port: int, *, listener: socket.socket | None = None) -> None:
    """Serve API and UI on a port of loopback, or on a socket that listens already, until stopped."""
    AioSqliteConfiguration.begin_sqlite_stmt = _begin  # type: ignore[method-assign, assignment]
    # The UI asks port 4200 whatever the port is; a path alone asks where the page came from, also through a tunnel.
    with temporary_settings(set_defaults={PREFECT_UI_API_URL: "/api"}):
        app = create_app(final=True)
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=None if listener is None else [listener])


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the one that started it dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(0)


if __name__ == "__main__":
    _die_with(int(sys.argv[2]))
    serve(0, listener=socket.socket(fileno=int(sys.argv[1])))
