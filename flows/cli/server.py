"""Prefect server with a password, protection against other web pages, and a fix for SQLite.

`python -m rheostat.flows.cli.server SOCKET PARENT` serves one job and ends with the process PARENT. It reads the
password from its environment.

Prefect checks the password, also for websockets. Pages of other sites that are open in the user's browser are rejected
before that: by their `Origin` header, or by their `Host` header if their host name was made to resolve to this machine
(DNS rebinding).

Prefect starts write transactions on SQLite as DEFERRED, so two that overlap fail at once ("database is locked", 503),
and the client waits 2, 4, 7 s. Parallel sub-flows then take seconds to start (PrefectHQ/prefect#10188, #19771). This
server starts them as IMMEDIATE, so the second transaction waits some milliseconds. PostgreSQL is not affected.
"""

import contextlib
import os
import socket
import sys
from urllib.parse import urlsplit

import sqlalchemy as sa
import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.settings import (
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_UI_API_URL,
    temporary_settings,
)
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rheostat.infra.http_guard import restrict_hosts
from rheostat.infra.runner import die_with_parent

ORIGINS_REMEDY = "Add it to PREFECT_SERVER_CORS_ALLOWED_ORIGINS."

DEFAULTS = {
    PREFECT_SERVER_ANALYTICS_ENABLED: False,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS: "",
    # By default the UI calls port 4200. With a path it calls the server that served the page, also through a tunnel.
    PREFECT_UI_API_URL: "/api",
}


def _begin_transaction(_: AioSqliteConfiguration, connection: sa.Connection) -> None:
    if SQLITE_BEGIN_MODE.get() is not None:  # reads have no mode and need no transaction
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def serve(port: int, *, password: str, listener: socket.socket | None = None) -> None:
    """Serve Prefect's API and UI until the process is stopped. The server listens on this port of the loopback
    interface, or on `listener`, a socket that is already bound."""
    AioSqliteConfiguration.begin_sqlite_stmt = _begin_transaction  # type: ignore[method-assign, assignment]
    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: password}, set_defaults=DEFAULTS) as settings:
        origins = settings.server.api.cors_allowed_origins.split(",")
        app = restrict_hosts(create_app(final=True), origins, remedy=ORIGINS_REMEDY)
        if not settings.server.analytics_enabled:
            app = block_telemetry(app, settings.server.ui.api_url or "")
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=None if listener is None else [listener])


def block_telemetry(app: ASGIApp, api_url: str) -> ASGIApp:
    """Wrap an app with a content security policy, so that its pages can connect only to this server and its API.
    Otherwise Prefect's UI would send usage statistics to another server."""
    place = urlsplit(api_url)
    allowed = f"{place.scheme}://{place.netloc} wss://{place.netloc} ws://{place.netloc}" if place.netloc else ""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = f"connect-src 'self' {allowed}".strip()
            await send(message)

        await app(scope, receive, tell)

    return answer


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(
        0,
        password=os.environ["PREFECT_SERVER_API_AUTH_STRING"],
        listener=socket.socket(fileno=int(sys.argv[1])),
    )
