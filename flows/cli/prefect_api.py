"""Prefect as a command uses it: an API, found or served for as long as the command lasts, and a flow that runs here.

Two privates of Prefect are replaced, and nothing else; its version is pinned exactly because of them:

- `AioSqliteConfiguration.begin_sqlite_stmt`, by flows/cli/server.py: write transactions wait for each other;
- `prefect.utilities.engine._prefect_sigterm_handler`, by `run_flow` below: SIGTERM cancels a flow as Ctrl-C does.
"""

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from flows.cli.options import PACKAGES
from infra.errors import ApiFailed, first_cause
from infra.terminal import write

R = TypeVar("R")

UI_PORT = 4200  # Prefect's own default

SERVER_SECONDS = 120

DEFAULTS: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the UI gets the tracebacks, the terminal our one line
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(PACKAGES),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def server(*, port: Annotated[int, Parameter(help="port on loopback")] = UI_PORT) -> None:
    """Serve Prefect's API and UI on this machine."""
    from flows.cli.server import serve

    write(f"Prefect UI at http://127.0.0.1:{port} (stop with Ctrl-C)")
    serve(port)


def set_defaults() -> None:
    """Tell Prefect, which reads its environment when it is imported; what the user has set stays."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def prefect_api(*modules: str) -> Iterator[str]:
    """Use the configured Prefect API, or serve one from this machine for as long as the context lasts.

    The modules, which need Prefect, are imported while the server starts: both take seconds.
    """
    set_defaults()
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured = PREFECT_API_URL.value()
    if configured:
        yield str(configured)
        return
    with _listen(UI_PORT) as listener:  # bound here: of two jobs that start at once, neither finds the other's server
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.server", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the flow first, which needs the API to end well
        )
    try:
        with temporary_settings({PREFECT_API_URL: url}):
            for module in modules:
                importlib.import_module(module)
            _wait_healthy(server, url)
            try:
                yield url
            finally:
                _drain()
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def run_flow(flow: "Coroutine[object, object, R]") -> R:
    """Run a flow to its end; of the errors that its controllers ended with together, raise the first of ours.

    SIGTERM cancels it as Ctrl-C does, also where SIGINT is ignored, as by `rheostat train … &` in a script; it ends in
    a KeyboardInterrupt with the signal's number.
    """
    import httpx
    from prefect.exceptions import PrefectException
    from prefect.utilities import engine

    numbers: list[int] = []

    async def cancellable() -> R:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: int, _: object) -> None:
            numbers.append(number)
            loop.call_soon_threadsafe(task.cancel)

        # Prefect's own raises wherever the process is at that moment, often inside a task that another waits for.
        engine._prefect_sigterm_handler = interrupt  # type: ignore[assignment]
        return await flow

    try:
        return asyncio.run(cancellable())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*numbers[:1]) from None
    except BaseException as error:
        if numbers:
            raise KeyboardInterrupt(numbers[0]) from None
        leaf = first_cause(error)
        if isinstance(leaf, PrefectException | httpx.HTTPError):
            problem = f"{type(leaf).__name__}: {leaf}"
            raise ApiFailed(f"the Prefect API failed, the same command continues: {problem}") from error
        if leaf is error:
            raise
        raise leaf from error


def _drain() -> None:
    """Send the logs and events that Prefect still holds back: after this the server goes."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=SERVER_SECONDS)


def _wait_healthy(server: "subprocess.Popen[bytes]", url: str) -> None:
    import httpx

    deadline = time.monotonic() + SERVER_SECONDS
    with httpx.Client(timeout=2, trust_env=False) as client:  # no proxy stands between us and our own server
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise ApiFailed(f"the Prefect server ended with code {server.returncode}: try `rheostat server`")
            try:
                if client.get(f"{url}/health").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    raise ApiFailed(f"the Prefect server did not answer at {url} within {SERVER_SECONDS} s")


def _listen(preferred: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", preferred))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen(2048)  # uvicorn's own backlog
    return listener
