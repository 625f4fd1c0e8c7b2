"""Prefect's API for commands: the configured one, or a server with a password that runs as long as the command.

This module also runs flows for commands: it handles signals and a dead server, and selects the error to report.

Three functions of Prefect that are not part of its public interface are replaced. Its version is pinned exactly because
of them:

- `AioSqliteConfiguration.begin_sqlite_stmt`, in flows/cli/server.py: write transactions wait for each other;
- `prefect.utilities.engine._prefect_sigterm_handler`, in `run_flow` for commands and in flows/prefect_states.py for
  deployed runs: SIGTERM cancels a flow like Ctrl-C;
- `exception_to_crashed_state` of the flow and task engines, in flows/prefect_states.py: a cancellation is no crash.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Final, TypeVar

import psutil
from cyclopts import Parameter

from rheostat.flows.cli.passwords import (
    PROFILE,
    configured_password,
    create_password,
    print_password,
    read_password,
    store_password,
)
from rheostat.infra.errors import ApiFailed, BadInput, first_cause
from rheostat.infra.former_names import PACKAGE
from rheostat.infra.processes.watch import (
    CHECK_SECONDS,
    END_SECONDS,
    QUERY_SECONDS,
    ForcedExit,
    Watch,
    WatchedServer,
    on_signals,
)
from rheostat.infra.terminal import parse_port, write

logger = logging.getLogger(__name__)
R = TypeVar("R")


UI_PORT = 4200  # Prefect's default

SERVER_SECONDS = 120

_SERVING: ContextVar[WatchedServer | None] = ContextVar("_SERVING", default=None)

DEFAULTS: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # tracebacks go to the UI, a one-line error to the terminal
    "PREFECT_LOGGING_EXTRA_LOGGERS": PACKAGE,
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; infra/automations.yaml waits for 90
}


def server(*, port: Annotated[int, Parameter(converter=parse_port, help="local port to listen on")] = UI_PORT) -> None:
    """Serve Prefect's API and UI on this machine, protected by a password.

    Address and password are stored in the Prefect profile "rheostat", in a file
    that only you can read. Workers and commands find them if you set
    PREFECT_PROFILE=rheostat. A worker on another machine needs PREFECT_API_URL
    (through a tunnel or a proxy) and PREFECT_API_AUTH_STRING, the password as
    NAME:PASSWORD. To choose the password yourself, set
    PREFECT_SERVER_API_AUTH_STRING for the server.
    """
    from rheostat.flows.cli.server import serve

    own = configured_password()
    password = own or store_password(port)
    write(f"Prefect UI at http://127.0.0.1:{port} (stop with Ctrl-C)")
    if own:
        write("password   the value of PREFECT_SERVER_API_AUTH_STRING, else of PREFECT_API_AUTH_STRING")
    else:
        write(f"password   run `prefect --profile {PROFILE} config view --show-secrets` to see it")
        write(f"workers    PREFECT_PROFILE={PROFILE} prefect worker start --pool rheostat")
    serve(port, password=password)


def set_defaults() -> None:
    """Set default environment variables for Prefect, without changing variables that the user has set. Call this before
    importing Prefect, which reads the variables on import."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def configured_api() -> Iterator[str | None]:
    """Run the block with the Prefect API that the user has configured, using the stored password if Rheostat has
    started that server. Yields the URL of the API, or None if no API is configured."""
    set_defaults()
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if not (url := PREFECT_API_URL.value()):
        yield None
        return
    with temporary_settings(set_defaults={PREFECT_API_AUTH_STRING: read_password(str(url))}):
        yield str(url)


@contextmanager
def prefect_api(*modules: str, port: int | None = None) -> Iterator[str]:
    """Run the block with the Prefect API that the user has configured, or else with a new local server. Yields the URL
    of the API. `modules` are imported while the server starts, because both take seconds.

    Raises BadInput if the requested port is not free or a configured API makes it useless, ApiFailed if the API does
    not answer.
    """
    set_defaults()  # before the import of Prefect, which reads them
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
        PREFECT_SERVER_CSRF_PROTECTION_ENABLED,
        temporary_settings,
    )

    with configured_api() as configured:
        if configured:
            if port is not None:
                raise BadInput(
                    f"--port {port} selects the port of a local Prefect server, but PREFECT_API_URL is {configured}, "
                    "so no local server is started. Remove --port, or unset PREFECT_API_URL."
                )
            _check_reachable(configured)
            yield configured
            return
    own = configured_password()
    password = own or create_password()
    with _open_listener(port) as listener:  # bound here, so that two jobs cannot use the same server
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "rheostat.flows.cli.server", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PREFECT_SERVER_API_AUTH_STRING": password},
            start_new_session=True,  # Ctrl-C must not end the server before the flow, which needs the API
        )
    serving = WatchedServer(
        "the job's own Prefect server", psutil.Process(server.pid), lambda: _query_health(url) is not None
    )
    try:
        api_settings = {
            PREFECT_API_URL: url,
            PREFECT_API_AUTH_STRING: password,
            # Otherwise each client first requests a CSRF token, which this server does not provide.
            PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: PREFECT_SERVER_CSRF_PROTECTION_ENABLED.value(),
        }
        with temporary_settings(api_settings):
            for module in modules:
                importlib.import_module(module)
            _wait_healthy(serving, url)
            if own is None:
                print_password(password)
            token = _SERVING.set(serving)
            try:
                yield url
            finally:
                _SERVING.reset(token)
                _drain(serving)
    finally:
        if serving.problem is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_SECONDS / 2)
        server.kill()  # also ends a suspended process
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_SECONDS / 2)


def _check_reachable(url: str) -> None:
    """Raise ApiFailed if no Prefect server responds at the configured URL."""
    import httpx
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if isinstance(error, httpx.TransportError):  # a rejected password is reported later
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApiFailed(
            f"No Prefect server responds at {url} ({reason}). The address comes from PREFECT_API_URL or the Prefect "
            "profile. Start that server, or unset PREFECT_API_URL to let this command start a server."
        )


def find_own_server() -> WatchedServer | None:
    """Return the Prefect server that this process has started, or None if this process uses a server that the user has
    configured."""
    return _SERVING.get()


def _drain(serving: WatchedServer) -> None:
    """Send the logs and events that Prefect has buffered in this process to its server. Call this before stopping the
    server."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    def drain() -> None:
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=SERVER_SECONDS)

    draining = threading.Thread(target=drain, daemon=True)
    draining.start()
    while draining.is_alive() and serving.failure() is None:
        draining.join(CHECK_SECONDS)


def _wait_healthy(serving: WatchedServer, url: str) -> None:
    """Wait until the new Prefect server responds at its URL. Raises ApiFailed if the server ends or uses too much CPU
    time before it responds."""
    while (status := _query_health(url)) is None or status >= 400:
        if (problem := serving.failure()) is not None:
            raise ApiFailed(
                f"The local Prefect server did not start: {problem}. Run `rheostat server` to see its output."
            )
        if serving.cpu_seconds > SERVER_SECONDS:
            raise ApiFailed(
                f"The Prefect server used {SERVER_SECONDS} s of CPU time but did not respond at {url}. Run `rheostat "
                "server` to see its output."
            )
        time.sleep(0.1)


def _query_health(url: str) -> int | None:
    """Return the HTTP status code of the health check of a Prefect server, or None if the server does not respond."""
    import httpx

    try:  # this is a local server, without proxy and certificate
        return httpx.get(f"{url}/health", timeout=QUERY_SECONDS, trust_env=False, verify=False).status_code
    except httpx.HTTPError:
        return None


def _open_listener(port: int | None) -> socket.socket:
    """Return a socket that listens on the requested port. Without a requested port, try Prefect's default port, and
    then any free port.

    Raises BadInput if the requested port is not free.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", UI_PORT if port is None else port))
    except (OSError, OverflowError) as error:
        if port is not None:
            raise BadInput(f"--port {port} cannot be used: {error}. Choose a free port.") from None
        listener.bind(("127.0.0.1", 0))
    listener.listen(2048)  # backlog of uvicorn
    return listener


CANCEL_SECONDS = 1.0


def run_flow(flow: "Coroutine[object, object, R]") -> R:
    """Run a flow to its end and return its result. SIGTERM cancels the flow like Ctrl-C, and both then raise
    KeyboardInterrupt with the signal's number.

    If several controllers fail together, the first cause is raised.
    """
    numbers: list[int] = []
    ending, serving = ForcedExit(), find_own_server()

    def on_signal(number: int) -> None:
        numbers.append(number)
        ending.begin(128 + number, "rheostat: interrupted; run the same command again to continue")

    def failed(problem: str) -> None:
        ending.begin(1, f"rheostat: {_build_api_error(problem)}")

    try:
        with on_signals(on_signal):
            return asyncio.run(_run_cancellable(flow, serving, on_signal=on_signal, failed=failed))
    except BaseException as error:
        if numbers or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(*(numbers[:1] or error.args)) from None
        cause = _find_cause(error, serving)
        if cause is error:
            raise
        raise cause from error
    finally:
        ending.finish()


async def _run_cancellable(
    flow: "Coroutine[object, object, R]",
    serving: WatchedServer | None,
    *,
    on_signal: Callable[[int], None],
    failed: Callable[[str], None],
) -> R:
    """Await a flow, and cancel it on SIGTERM or if the Prefect server of this process fails. `on_signal` is called with
    the signal's number, and `failed` with a description of the server's failure, before the flow is canceled."""
    from prefect.utilities import engine

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.done():
            task.cancel()
            if serving is not None and serving.problem is not None:  # each nested flow must be canceled separately
                loop.call_later(CANCEL_SECONDS, cancel)

    def interrupt(number: int, _: object) -> None:
        on_signal(number)
        loop.call_soon_threadsafe(cancel)

    def end(problem: str) -> None:
        failed(problem)
        loop.call_soon_threadsafe(cancel)

    # Prefect's handler raises at an arbitrary point of the program, often inside a task that another task awaits.
    engine._prefect_sigterm_handler = interrupt  # type: ignore[assignment]
    watch = Watch(lambda: [] if serving is None else [serving], end)
    try:
        return await flow
    finally:
        watch.stop()


def _find_cause(error: BaseException, serving: WatchedServer | None) -> BaseException:
    """Return the error that explains a failed flow to the user. If the Prefect API has failed, this is an ApiFailed.
    Otherwise it is the first error that was raised."""
    import httpx
    from prefect.exceptions import PrefectException

    if serving is not None and serving.failure() is not None:
        return _build_api_error(str(serving.problem))
    leaf = first_cause(error)
    if isinstance(leaf, httpx.HTTPStatusError) and leaf.response.status_code == httpx.codes.UNAUTHORIZED:
        url = leaf.request.url.copy_with(path="/api", query=None)
        return ApiFailed(f"The Prefect API at {url} requires a password. Set PREFECT_API_AUTH_STRING=NAME:PASSWORD.")
    is_unreachable = isinstance(leaf, RuntimeError) and str(leaf).startswith(
        "Failed to reach API"
    )  # message of Prefect
    if is_unreachable or isinstance(leaf, PrefectException | httpx.HTTPError):
        return _build_api_error(f"{type(leaf).__name__}: {leaf}")
    return leaf


def _build_api_error(problem: str) -> ApiFailed:
    return ApiFailed(f"A request to the Prefect API failed: {problem}. Run the same command again to continue.")
