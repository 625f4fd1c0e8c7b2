"""Servers of a run that die or are suspended: the run ends and names the server, and the same command continues."""

import re
import signal
from dataclasses import dataclass

import pytest

from tests.support.jobs import Job, child_of, list_running, process_tree, wait_for
from tests.support.whole_runs import check_same_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

PATIENCE = 300.0
"""Seconds for a run to end. The message shows that the server's watchdog ended the run, and not a timeout."""


@dataclass(frozen=True)
class Failure:
    """Server that gets a signal at a moment of the run, and a second signal for the run, if any."""

    server: str
    number: int
    moment: str
    """Manifest that has just been committed. An empty text means the start of the job."""
    told: str
    """Regular expression for the message of the command."""
    interrupt: int | None = None


FAILURES = (
    Failure(
        "rheostat.flows.cli.server", signal.SIGSTOP, "", r"did not start: the job's own Prefect server .* is suspended"
    ),
    Failure("raylet", signal.SIGSTOP, "", r"raylet.* is suspended"),
    Failure("rheostat.flows.cli.server", signal.SIGSTOP, "it-0001/plan", r"API failed.* is suspended"),
    Failure("raylet", signal.SIGKILL, "it-0001/rollout/0000", r"raylet .* has died"),
    Failure("gcs_server", signal.SIGSTOP, "it-0001/credit", r"interrupted", interrupt=signal.SIGINT),
    Failure("rheostat.flows.cli.server", signal.SIGKILL, "it-0001/update", r"API failed.* has died"),
    Failure("raylet", signal.SIGSTOP, "it-0002/plan", r"interrupted", interrupt=signal.SIGTERM),
)


def strike(job: Job, failure: Failure) -> None:
    """Start the job, make the server fail at its moment, and check how the job ends."""
    reached = job.run / f"manifests/{failure.moment}.json"
    with job.started() as process:
        assert wait_for(lambda: not failure.moment or reached.exists() or process.poll() is not None)
        assert wait_for(lambda: child_of(process.pid, failure.server))
        server, family = child_of(process.pid, failure.server), process_tree(process.pid)
        server.send_signal(failure.number)
        if failure.interrupt is not None:
            process.send_signal(failure.interrupt)
        code = process.wait(PATIENCE)
    output = (job.home / "output").read_text()
    assert re.search(f"^rheostat: .*{failure.told}", output, re.MULTILINE), (failure, output)
    assert code == (1 if failure.interrupt is None else 128 + failure.interrupt)
    assert wait_for(lambda: not list_running(family), seconds=15), list_running(family)


def test_a_failed_server_ends_the_run_with_its_name_and_the_same_command_continues_the_run(reference, tmp_path):
    for failure in FAILURES:
        job = Job(tmp_path, ignores=(signal.SIGINT,) if failure.interrupt == signal.SIGTERM else ())
        strike(job, failure)
    resumed = Job(tmp_path, reference.api).train()
    assert resumed.code == 0, resumed.output
    check_same_run(job.run, reference.run)
