"""The same command resumes a job: after kills of the driver and of a worker the run equals the undisturbed run."""

import json
import signal
from dataclasses import dataclass
from ipaddress import ip_address

import psutil
import pytest

from tests.support.in_process import InProcessJob, copy_job
from tests.support.jobs import (
    CommandResult,
    Fault,
    Job,
    copy_prefect_database,
    kill,
    list_running,
    manifests_of,
    process_tree,
    wait_for,
    workers_of,
)
from tests.support.whole_runs import check_same_run, read_families

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]  # the fixtures are whole jobs
FAMILY = "small text"


@dataclass(frozen=True)
class Interrupted:
    """Observations of a job that was stopped, killed and resumed."""

    job: Job
    listening: set[str]
    """Addresses at which processes of the stopped job listened."""
    left: list[str]
    """Processes that outlived their driver."""
    resumed: CommandResult
    struck: int


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, together, prefect_api):
    """Kill a driver between two shards and, in the resumed job, a rollout worker within a shard."""
    home = tmp_path_factory.mktemp("interrupted")
    settings = read_families()["small text"].settings(together)
    alone = Job(home, counts_works=True)  # its own Prefect server, to see that one end
    copy_prefect_database(together / "prefect", home / "prefect")
    stop = Fault("driver", "after", "/manifests/it-0001/rollout/", signal=signal.SIGSTOP)
    with alone.started(*settings, faults=[stop]) as process:
        wait_for(lambda: process.poll() is not None or alone.struck())
        assert process.poll() is None, alone.ended(process).output
        family = process_tree(process.pid)
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")  # how a socket of both kinds spells an IPv4 address
            for member in family
            for connection in member.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        kill(process)
    wait_for(lambda: not list_running(family), seconds=250)  # less than one on an idle machine
    left = list_running(family)
    job = Job(home, prefect_api, counts_works=True)
    resumed = job.train(*settings, faults=[Fault("rollout", "progress", "generate", count=3)])
    return Interrupted(job, listening, left, resumed, job.struck())


def test_a_killed_job_ends_with_the_same_run_as_an_undisturbed_job(interrupted, whole):
    assert interrupted.resumed.code == 0, interrupted.resumed.output
    assert interrupted.struck == 1
    check_same_run(interrupted.job.run, whole.run)


def test_a_job_listens_on_loopback_alone(interrupted):
    assert interrupted.listening  # Prefect's API, Ray, the update's ranks
    assert {address for address in interrupted.listening if not ip_address(address).is_loopback} == set()


def test_workers_are_threads_of_one_process_or_separate_processes_of_ray(interrupted, whole):
    [in_threads, on_ray] = [
        [workers_of(run, role) for role in ("rollout", "scoring")] for run in (whole.run, interrupted.job.run)
    ]
    assert in_threads[0] == in_threads[1] != set()
    assert on_ray[0].isdisjoint(on_ray[1])


def test_a_run_that_began_on_ray_continues_in_threads(interrupted, tmp_path, together, prefect_api):
    job = copy_job(InProcessJob(interrupted.job.home, prefect_api), tmp_path / "job")
    job.train(*read_families()["small text"].settings(together), "iterations=3")
    manifests = manifests_of(job.run)
    assert manifests.items() > manifests_of(interrupted.job.run).items()
    assert "it-0003/seal" in manifests
    verified = job.command("verify")
    assert verified.code == 0, verified.output


def test_at_most_one_shard_per_worker_is_generated_again_after_a_kill(interrupted, whole):
    works = interrupted.job.works()
    assert works.keys() == whole.works().keys()
    again = {work.split("(")[0]: works[work] - 1 for work in works if works[work] > 1}
    generated = sum(count - 1 for work, count in works.items() if work.startswith("generate"))
    assert generated <= 2 + 1, again  # two workers had a shard each when their driver died, and one died itself


@pytest.mark.parametrize(("family", "count"), [("text", 3), ("small text", 2)])
def test_every_iteration_changes_the_policy_so_that_comparisons_can_fail(undisturbed, family, count):
    shown = undisturbed(family).command("show", "--json")
    iterations = json.loads(shown.output)["iterations"]
    assert len({iteration["policy"] for iteration in iterations}) == len(iterations) == count


def test_nothing_of_a_killed_job_keeps_running(interrupted):
    assert interrupted.left == []


def test_nobody_else_can_read_what_a_job_writes(interrupted):
    written = [*interrupted.job.run.rglob("*"), *(interrupted.job.home / "prefect").rglob("*")]
    assert len(written) > 40
    assert [path for path in written if path.lstat().st_mode & 0o077] == []


@pytest.mark.slow
def test_a_finished_job_run_again_changes_no_manifest(interrupted, whole, together):
    again = interrupted.job.train(*read_families()["small text"].settings(together))
    assert again.code == 0, again.output
    assert manifests_of(interrupted.job.run) == manifests_of(whole.run)
