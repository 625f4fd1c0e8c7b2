"""The tiny job as a flow of this process, with real workers in threads, a real store and no subprocesses."""

import contextlib
import functools
import gc
import io
import json
import os
import shutil
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from unittest.mock import patch

import certifi

from rheostat.flows.cli.app import main
from rheostat.flows.cli.train import run_flow
from rheostat.models.config.checks import CheckResult
from rheostat.tasks.config.run import RunConfig, override_config
from rheostat.tasks.run.preflight import unset_keys
from tests.support.jobs import PASSWORD, TINY, CommandResult, works_of


@dataclass(frozen=True)
class InProcessJob:
    """Working directory of one run, like `Job`, whose workers are threads. Errors are raised."""

    home: Path
    api: str
    """Prefect API that several jobs share."""
    counts_works: bool = False
    """Log every piece of work that workers begin."""
    address: str = ""
    """Address of the store. If not set, the store is in the home."""
    sends_events: bool = False
    """Send Prefect's events, hundreds per run, which few tests need."""

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return self.store / "tiny"

    def train(self, *overrides: str, accept_change: bool = False) -> None:
        """Run the job to its end."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "tiny.toml").write_text(TINY)
        here = (f"store={self.address or self.store}", "pools.cluster=threads")
        config = override_config(tomllib.loads(TINY), [*overrides, *here], source="tiny")
        with self.prefect(), self._counted():
            from rheostat.flows.train import train

            gc.freeze()  # trainers collect garbage: what is there already need not be looked through each time
            run_flow(train(config, accept_change=accept_change))

    def command(self, name: str, *arguments: str) -> CommandResult:
        """Run a command on the run. Commands that start workers get `pools.cluster=threads`."""
        with self.prefect(), patch.dict(os.environ):  # the command has defaults for Prefect
            return run_command(name, "tiny", *arguments, "--store", self.address or str(self.store))

    def works(self) -> Counter[str]:
        """Return how often each piece of work was begun by any worker."""
        return works_of(self.home)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self.counts_works:
            yield
            return
        from tests.support.faults import planted

        (self.home / "faults.json").write_text(json.dumps([]))
        with planted(self.home):
            yield

    @contextmanager
    def prefect(self) -> Iterator[None]:
        """Make flows of this process use the job's Prefect API."""
        from prefect.events.clients import NullEventsClient
        from prefect.events.worker import EventsWorker
        from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

        settings = {PREFECT_RESULTS_LOCAL_STORAGE_PATH: str(self.home / "results")}
        with prefect_at(self.api), temporary_settings(settings), check_in_process():
            EventsWorker.set_client_override(None if self.sends_events else NullEventsClient)
            try:
                yield
            finally:
                EventsWorker.set_client_override(None)


@contextmanager
def check_in_process() -> Iterator[None]:
    """Make flows check their inputs in this process, because a process for each check takes seconds to import torch."""
    import rheostat.tasks.preparation
    from rheostat.models.commands.preflight import Inputs, check, check_scoring

    async def preflight(config: RunConfig, *, part: str = "run") -> CheckResult:
        inputs = Inputs.model_validate({**config.model_dump(mode="json"), "giving_way": unset_keys(config)})
        return check_scoring(inputs) if part == "scoring" else check(inputs)

    with patch.object(rheostat.tasks.preparation, "preflight", preflight):
        yield


def run_command(*arguments: str) -> CommandResult:
    """Run a `rheostat` command in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([*arguments])
    return CommandResult(code, output.getvalue())


@contextmanager
def prefect_at(api: str) -> Iterator[None]:
    """Make flows of this process use only this Prefect API. The client that sends events would keep the first API."""
    from prefect.events.worker import EventsWorker
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_SSL_CERT_FILE,
        PREFECT_API_URL,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    settings = {
        PREFECT_API_URL: api,
        PREFECT_API_AUTH_STRING: ":".join(PASSWORD),
        PREFECT_API_SSL_CERT_FILE: one_authority().name,
        PREFECT_LOGGING_TO_API_ENABLED: False,  # nobody reads the logs of these flows there
    }
    with temporary_settings(settings):
        try:
            yield
        finally:
            with ThreadPoolExecutor(1) as aside:  # a loop that runs here would be given something to await
                aside.submit(EventsWorker.drain_all, 30).result()


@functools.cache
def one_authority() -> IO[str]:
    """Write a file with one certificate. Each of the many clients of a run would take 50 ms to load all authorities."""
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 -- it goes with this process
    end = "-----END CERTIFICATE-----\n"
    file.write(Path(certifi.where()).read_text().partition(end)[0] + end)
    file.flush()
    return file


def copy_job(job: InProcessJob, home: Path, **options: bool) -> InProcessJob:
    """Copy a job with its store and its document, so that a test may change the run."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.copytree(job.store, home / "store")
    shutil.copy(job.home / "tiny.toml", home)
    return InProcessJob(home, job.api, **options)


def own_store(job: InProcessJob, home: Path) -> str:
    """Copy a job's store, so that a command that locks the run does not disturb other tests. Return the address."""
    return str(shutil.copytree(job.store, home / "own-store"))
