"""Prefect's API as a command uses it: found, or served behind a password for as long as the command lasts.

Here, too, is how a command runs a flow to its end: what signals and a dead server do to it, and which error is told.

Two privates of Prefect are replaced, and nothing else; its version is pinned exactly because of them:

- `AioSqliteConfiguration.begin_sqlite_stmt`, by flows/cli/server.py: write transactions wait for each other;
- `prefect.utilities.engine._prefect_sigterm_handler`, by `run_flow`: SIGTERM cancels a flow as Ctrl-C does.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import psutil
from cyclopts import Parameter

from infra.errors import ApiFailed, BadInput, first_cause
from infra.plugins import PACKAGES
from infra.processes.watch import ASK_SECONDS, END_SECONDS, LOOK_SECONDS, Ending, Watch, WatchedServer, on_signals
from infra.terminal import parse_port, write

if TYPE_CHECKING:
    from prefect.settings.legacy import Setting

logger = logging.getLogger(__name__)
R = TypeVar("R")


PROFILE: Final = "rheostat"
"""Profile of Prefect that names the server which `rheostat server` started last, and its password."""

UI_PORT = 4200  # Prefect's own default

SERVER_SECONDS = 120

_SERVING: ContextVar[WatchedServer | None] = ContextVar("_SERVING", default=None)

DEFAULTS: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the UI gets the tracebacks, the terminal our one line
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(PACKAGES),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; the automation in infra/automations.yaml waits for three
}


def server(*, port: Annotated[int, Parameter(converter=parse_port, help="port on loopback")] = UI_PORT) -> None:
    """Serve Prefect's API and UI on this machine to those who know its password.

    Address and password stand in Prefect's profile "rheostat", in a file of yours
    alone: with PREFECT_PROFILE=rheostat your workers and commands find them. A
    worker elsewhere needs PREFECT_API_URL, through a tunnel or a proxy, and
    PREFECT_API_AUTH_STRING, the password as NAME:PASSWORD. To choose it yourself,
    set PREFECT_SERVER_API_AUTH_STRING for the server.
    """
    from flows.cli.server import serve

    own = own_password()
    password = own or keep_password(port)
    write(f"Prefect UI at http://127.0.0.1:{port} (stop with Ctrl-C)")
    if own:
        write("password   your own: PREFECT_SERVER_API_AUTH_STRING, else PREFECT_API_AUTH_STRING")
    else:
        write(f"password   `prefect --profile {PROFILE} config view --show-secrets` shows it")
        write(f"workers    PREFECT_PROFILE={PROFILE} prefect worker start --pool rheostat")
    serve(port, password=password)


def set_defaults() -> None:
    """Tell Prefect, which reads its environment when it is imported; what the user has set stays."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def configured_api() -> Iterator[str | None]:
    """Use the Prefect API that is configured, with the password that is kept for it; none where there is none."""
    set_defaults()
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if not (url := PREFECT_API_URL.value()):
        yield None
        return
    with temporary_settings(set_defaults={PREFECT_API_AUTH_STRING: kept_password(str(url))}):
        yield str(url)


@contextmanager
def prefect_api(*modules: str, port: int | None = None) -> Iterator[str]:
    """Use the configured Prefect API, or serve one from this machine for as long as the context lasts.

    The modules, which need Prefect, are imported while the server starts: both take seconds. Raises BadInput where a
    port that was asked for is not to be had.
    """
    set_defaults()  # which Prefect reads when it is imported
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
                raise BadInput(f"--port {port}: nothing is served here, since PREFECT_API_URL is {configured}")
            _check_reachable(configured)
            yield configured
            return
    own = own_password()
    password = own or _new_password()
    with _listen(port) as listener:  # bound here: of two jobs that start at once, neither finds the other's server
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.cli.server", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PREFECT_SERVER_API_AUTH_STRING": password},
            start_new_session=True,  # Ctrl-C reaches the flow first, which needs the API to end well
        )
    serving = WatchedServer(
        "the job's own Prefect server", psutil.Process(server.pid), lambda: _answer(url) is not None
    )
    try:
        told = {
            PREFECT_API_URL: url,
            PREFECT_API_AUTH_STRING: password,
            # Otherwise each client first asks for a token that this server does not give.
            PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: PREFECT_SERVER_CSRF_PROTECTION_ENABLED.value(),
        }
        with temporary_settings(told):
            for module in modules:
                importlib.import_module(module)
            _wait_healthy(serving, url)
            if own is None:
                tell_password(password)
            before = _SERVING.set(serving)
            try:
                yield url
            finally:
                _SERVING.reset(before)
                _drain(serving)
    finally:
        if serving.problem is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_SECONDS / 2)
        server.kill()  # also one that is stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_SECONDS / 2)


def _check_reachable(url: str) -> None:
    """Raise ApiFailed if no Prefect server answers at the configured address."""
    import httpx
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if isinstance(error, httpx.TransportError):  # a refused password gets its own message later
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApiFailed(
            f"no Prefect server answers at {url}, which PREFECT_API_URL or the Prefect profile names ({reason}): "
            "start that server, or unset PREFECT_API_URL to let this command start one"
        )


def own_server() -> WatchedServer | None:
    """Return the server that this process has started, while it serves."""
    return _SERVING.get()


def own_password() -> str | None:
    """Return the `NAME:PASSWORD` that the user has told Prefect for its server, else for its clients."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_SERVER_API_AUTH_STRING

    own = PREFECT_SERVER_API_AUTH_STRING.value() or PREFECT_API_AUTH_STRING.value() or None
    return None if own == _profile().get(PREFECT_API_AUTH_STRING) else own


def keep_password(port: int) -> str:
    """Name the server on this port in Prefect's profile `PROFILE`; return the password in it, made the first time."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, load_profiles
    from prefect.settings.profiles import save_profiles

    kept = _profile()
    password = kept.get(PREFECT_API_AUTH_STRING) or _new_password()
    wanted = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_API_AUTH_STRING: password}
    if kept != wanted:
        profiles = load_profiles()
        profiles.update_profile(PROFILE, wanted)
        path = get_current_settings().profiles_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)  # before the password is in it
        save_profiles(profiles)
    return password


def kept_password(url: str) -> str | None:
    """Return the password of the server that `PROFILE` names, for the URL of that server and no other."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    kept = _profile()
    same = url.rstrip("/").replace("//localhost:", "//127.0.0.1:") == kept.get(PREFECT_API_URL)
    return kept.get(PREFECT_API_AUTH_STRING) if same else None


def tell_password(password: str) -> None:
    """Show a password that ends with this command to the one who sits at its terminal; no log gets it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"the password of Prefect's UI is {password}\n")
    else:
        logger.info("Prefect's UI asks for a password: to know it, set PREFECT_API_AUTH_STRING=NAME:PASSWORD before")


def _profile() -> "dict[Setting, str]":
    """Settings of our profile; none before a server was started."""
    from prefect.settings import load_profiles

    profiles = load_profiles()
    return profiles[PROFILE].settings if PROFILE in profiles.names else {}


def _new_password() -> str:
    return f"rheostat:{secrets.token_urlsafe(24)}"


def _drain(serving: WatchedServer) -> None:
    """Send the logs and events that Prefect still holds back: after this the server goes."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    def drain() -> None:
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=SERVER_SECONDS)

    draining = threading.Thread(target=drain, daemon=True)
    draining.start()
    while draining.is_alive() and serving.failure() is None:
        draining.join(LOOK_SECONDS)


def _wait_healthy(serving: WatchedServer, url: str) -> None:
    """Wait for a server that starts, however slowly the machine lets it compute."""
    while (status := _answer(url)) is None or status >= 400:
        if (problem := serving.failure()) is not None:
            raise ApiFailed(f"{problem} while it started: try `rheostat server`")
        if serving.cpu_seconds > SERVER_SECONDS:
            raise ApiFailed(f"the Prefect server did not answer at {url} within {SERVER_SECONDS} s of computing")
        time.sleep(0.1)


def _answer(url: str) -> int | None:
    """Return the HTTP status of a server's health; none where it says nothing."""
    import httpx

    try:  # no proxy stands between us and our own server, which has no certificate
        return httpx.get(f"{url}/health", timeout=ASK_SECONDS, trust_env=False, verify=False).status_code
    except httpx.HTTPError:
        return None


def _listen(asked: int | None) -> socket.socket:
    """Take the port that was asked for, or Prefect's own, or another one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", UI_PORT if asked is None else asked))
    except (OSError, OverflowError) as error:
        if asked is not None:
            raise BadInput(f"--port {asked}: expected a free port of this machine: {error}") from None
        listener.bind(("127.0.0.1", 0))
    listener.listen(2048)  # uvicorn's own backlog
    return listener


CANCEL_SECONDS = 1.0


def run_flow(flow: "Coroutine[object, object, R]") -> R:
    """Run a flow to its end; of the errors that its controllers ended with together, raise the first of ours.

    SIGTERM cancels it as Ctrl-C does; it ends in a KeyboardInterrupt with the signal's number.
    """
    numbers: list[int] = []
    ending, serving = Ending(), own_server()

    def signalled(number: int) -> None:
        numbers.append(number)
        ending.begin(128 + number, "rheostat: interrupted; the same command continues")

    def failed(problem: str) -> None:
        ending.begin(1, f"rheostat: {_api_failed(problem)}")

    try:
        with on_signals(signalled):
            return asyncio.run(_cancellable(flow, serving, signalled=signalled, failed=failed))
    except BaseException as error:
        if numbers or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(*(numbers[:1] or error.args)) from None
        named = _named(error, serving)
        if named is error:
            raise
        raise named from error
    finally:
        ending.over()


async def _cancellable(
    flow: "Coroutine[object, object, R]",
    serving: WatchedServer | None,
    *,
    signalled: Callable[[int], None],
    failed: Callable[[str], None],
) -> R:
    """Await a flow until SIGTERM or the failure of the job's own server cancels it."""
    from prefect.utilities import engine

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.done():
            task.cancel()
            if serving is not None and serving.problem is not None:  # flows tell their end to nobody, one by one
                loop.call_later(CANCEL_SECONDS, cancel)

    def interrupt(number: int, _: object) -> None:
        signalled(number)
        loop.call_soon_threadsafe(cancel)

    def end(problem: str) -> None:
        failed(problem)
        loop.call_soon_threadsafe(cancel)

    # Prefect's own raises wherever the process is at that moment, often inside a task that another waits for.
    engine._prefect_sigterm_handler = interrupt  # type: ignore[assignment]
    watch = Watch(lambda: [] if serving is None else [serving], end)
    try:
        return await flow
    finally:
        watch.stop()


def _named(error: BaseException, serving: WatchedServer | None) -> BaseException:
    """The error that a command tells: the API's where that has failed, else the first cause."""
    import httpx
    from prefect.exceptions import PrefectException

    if serving is not None and serving.failure() is not None:
        return _api_failed(str(serving.problem))
    leaf = first_cause(error)
    if isinstance(leaf, httpx.HTTPStatusError) and leaf.response.status_code == httpx.codes.UNAUTHORIZED:
        told = f"{leaf.request.url.copy_with(path='/api', query=None)} asks for a password"
        return ApiFailed(f"the Prefect API {told}: set PREFECT_API_AUTH_STRING=NAME:PASSWORD")
    is_unreachable = isinstance(leaf, RuntimeError) and str(leaf).startswith("Failed to reach API")  # Prefect's words
    if is_unreachable or isinstance(leaf, PrefectException | httpx.HTTPError):
        return _api_failed(f"{type(leaf).__name__}: {leaf}")
    return leaf


def _api_failed(problem: str) -> ApiFailed:
    return ApiFailed(f"the Prefect API failed, the same command continues: {problem}")
