"""Start a pipeline from the command line: check the input, find or start a Prefect API, run the flow here."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flows.cli.plan import find_run
from infra.errors import ApiFailed, BadInput, first_cause
from infra.store.runs import open_run
from models.config.policy import DirectoryPolicy
from tasks.config.run import RunConfig, load_config, override_config, require_part
from tasks.run.rescorings import Derived, sealed_numbers
from tasks.run.subprocesses import preflight

if TYPE_CHECKING:
    from tasks.reporting import RunSummary, TrainedPolicy, TrainedRewards
    from tasks.run.rescorings import Recredit, Rescoring
    from tasks.views.metrics import Accuracy


R = TypeVar("R")

logger = logging.getLogger(__name__)

UI_PORT = 4200  # Prefect's own default

SERVER_SECONDS = 120

# Prefect reads these when it is imported; what the user has set stays.
PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the UI gets the tracebacks, the terminal our one line
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,models,infra",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

for _name, _value in PREFECT_DEFAULTS.items():
    os.environ.setdefault(_name, _value)


@contextmanager
def watched(config: RunConfig) -> Iterator[None]:
    """Check a job, then have an API where it can be watched. Raises BadInput before anything is written or started."""
    check_unheld(config)
    asyncio.run(preflight(config))
    with prefect_api() as url:
        logger.info("run %s in %s; watch it at %s", config.name, config.store, url.removesuffix("/api"))
        yield


def train_here(config: RunConfig) -> "RunSummary":
    """Run or continue the job in this process. Raises BadInput before anything is written or started."""
    with watched(config):
        from flows.train import train

        return run_flow(train(config))


def evaluate_here(policy: Path, *, config_path: Path | None, overrides: Sequence[str]) -> "Accuracy":
    """Measure a policy directory on held-out problems; nothing stays behind."""
    with tempfile.TemporaryDirectory(prefix="rheostat-evaluate-") as scratch:
        config = _evaluation_config(policy, config_path, overrides).model_copy(update={"store": scratch})
        asyncio.run(preflight(config))
        with prefect_api():
            from flows.evaluation import evaluate

            return run_flow(evaluate(config))


def rescore_here(request: "Rescoring") -> None:
    """Score stored rollouts again in this process. Raises BadInput before anything is written or started."""
    config, run = request.config, open_run(request.config.store, request.config.name)
    if set(request.iterations) <= {*sealed_numbers(run, Derived("rescore", request.name))}:
        return
    run.check_free()
    asyncio.run(preflight(config, part="scoring"))
    with prefect_api() as url:
        from flows.rescoring import rescore

        logger.info("re-scoring %s of run %s; watch it at %s", request.name, config.name, url.removesuffix("/api"))
        run_flow(rescore(request))


def recredit_here(request: "Recredit") -> None:
    """Credit stored rollouts again in this process. Raises BadInput before anything is written or started."""
    config, run = request.config, open_run(request.config.store, request.config.name)
    if set(request.iterations) <= {*sealed_numbers(run, Derived("recredit", request.name))}:
        return
    run.check_free()
    with prefect_api() as url:
        from flows.rescoring import recredit

        logger.info("re-credit %s of run %s; watch it at %s", request.name, config.name, url.removesuffix("/api"))
        run_flow(recredit(request))


def check_unheld(config: RunConfig) -> None:
    """Refuse a run that was made otherwise or that another process holds, before anything starts."""
    run = find_run(config)
    if run is not None:
        run.check_free()


@contextmanager
def prefect_api() -> Iterator[str]:
    """Use the configured Prefect API, or serve one from this machine for as long as the context lasts."""
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
        _wait_healthy(server, url)
        with temporary_settings({PREFECT_API_URL: url}):
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


def _drain() -> None:
    """Send the logs and events that Prefect still holds back: after this the server goes."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=SERVER_SECONDS)


def run_flow(flow: "Coroutine[object, object, R]") -> R:
    """Run a flow to its end; of the errors that its controllers ended with together, raise the first of ours.

    SIGTERM cancels it as Ctrl-C does, and ends in a KeyboardInterrupt with the signal's number.
    """
    import httpx
    from prefect.exceptions import PrefectException
    from prefect.utilities import engine

    numbers: list[int] = []

    def interrupt(number: int, _: object) -> None:
        numbers.append(number)
        signal.raise_signal(signal.SIGINT)

    # Prefect's own raises wherever the process is at that moment, often inside a task that another waits for.
    engine._prefect_sigterm_handler = interrupt  # type: ignore[assignment]
    try:
        return asyncio.run(flow)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*numbers[:1]) from None
    except BaseException as error:
        leaf = first_cause(error)
        if isinstance(leaf, PrefectException | httpx.HTTPError):
            problem = f"{type(leaf).__name__}: {leaf}"
            raise ApiFailed(f"the Prefect API failed, the same command continues: {problem}") from error
        if leaf is error:
            raise
        raise leaf from error


def _evaluation_config(policy: Path, config_path: Path | None, overrides: Sequence[str]) -> RunConfig:
    if (policy / "run.json").is_file():
        raise BadInput(f"{policy} is a run, expected one of its policies: see `rheostat show {policy.resolve().name}`")
    if config_path is not None:
        config = load_config(config_path, overrides)
    else:
        home = next((p for p in policy.resolve().parents if (p / "run.json").is_file()), None)
        if home is None:
            raise BadInput(f"policy {policy} does not lie in a run: name its problems with --config CONFIG")
        record = open_run(str(home.parent), home.name).record
        config = override_config(record.config, overrides, source=f"run {home.name}")
    directory = DirectoryPolicy(path=policy)
    return config.model_copy(update={"name": "evaluate", "policy": directory, "warmup": None, "iterations": 0})


def _wait_healthy(server: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ApiFailed(f"the Prefect server ended with code {server.returncode}: try `rheostat server`")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
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


def run_part(command: str, config: RunConfig) -> "TrainedPolicy | TrainedRewards":
    """Run or continue the job as far as the command says. Raises BadInput before anything is written or started."""
    require_part(command, config)
    with watched(config):
        match command:
            case "sft":
                from flows.sft import sft

                return run_flow(sft(config))
            case "dpo":
                from flows.dpo import dpo

                return run_flow(dpo(config))
            case "reward-model":
                from flows.reward_modelling import reward_model

                return run_flow(reward_model(config))
    raise AssertionError(f"no part of a job is called {command!r}")
