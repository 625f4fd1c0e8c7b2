"""Runs in a bucket whose drivers die or are suspended, or whose server is down: equal bits, and named errors."""

import os
import signal
from dataclasses import replace

import pytest

from tests.support.jobs import Job, manifests_of, wait_for
from tests.support.s3_proxy import Fault, s3_proxy
from tests.support.whole_runs import read_families

pytestmark = [pytest.mark.s3, pytest.mark.timeout(1200)]

THREADS = "pools.cluster=threads"
MOMENTS = (
    ("after", "/manifests/it-0001/rollout/"),
    ("before", r"/policies/\w+/bundle.json"),
    ("before", "/manifests/it-0002/seal"),
)
"""Writes of a run before or after which its driver is killed, each in a separate start."""


@pytest.fixture
def far(s3_servers):
    """Address of a run's store behind a proxy with faults, set in the environment of this process."""
    before = dict(os.environ)
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        place.open()
        os.environ["RHEOSTAT_LEASE_SECONDS"] = "8"
        yield place, weather
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def job(far, prefect_api, tmp_path):
    return Job(tmp_path / "first", prefect_api, address=far[0].uri)


@pytest.mark.smoke
def test_a_run_in_a_bucket_with_a_killed_driver_ends_as_the_run_on_disk(far, job, undisturbed, together):
    place, weather = far
    small = (*read_families()["small text"].settings(together), THREADS)
    with job.started(*small) as process:
        weather.faults = [Fault("before", "^PUT .*/manifests/it-0002/update", times=1, does=process.kill)]
        assert process.wait(300) == -signal.SIGKILL, job.ended(process).output
    ended = job.train(*small)
    assert ended.code == 0, ended.output
    assert place.manifests() == manifests_of(undisturbed("small text").run)


def test_a_driver_killed_at_any_write_and_an_unavailable_server_lose_no_results(far, job, reference):
    place, weather = far
    for when, write in MOMENTS:
        with job.started(THREADS) as process:
            weather.faults = [moment := Fault(when, f"^PUT .*{write}", times=1, does=process.kill)]
            assert process.wait(300) == -signal.SIGKILL, job.ended(process).output
            assert not moment.times
    weather.faults = [
        Fault("before", "^PUT .*/manifests/it-0003/rollout", times=1, does=lambda: weather.faults.append(Fault("503")))
    ]
    os.environ["RHEOSTAT_S3_SECONDS"] = "4"
    ended = job.train(THREADS)
    assert ended.code == 1 and f"store {place.uri}/tiny: cannot" in ended.output and "503" in ended.output
    weather.faults = []
    ended = job.train(THREADS)
    assert ended.code == 0, ended.output
    assert place.manifests() == manifests_of(reference.run)
    assert job.command("verify").code == 0


def test_a_suspended_driver_fails_after_another_driver_has_finished_the_run(far, job, reference):
    place, weather = far
    second = replace(job, home=job.home.parent / "second")
    with job.started(THREADS) as process:
        stopped = []

        def stop() -> None:
            process.send_signal(signal.SIGSTOP)
            stopped.append(process.pid)

        weather.faults = [Fault("before", "^PUT .*/manifests/it-0002/rollout", times=1, does=stop)]
        assert wait_for(lambda: stopped or process.poll() is not None) and stopped
        ended = second.train(THREADS)
        assert ended.code == 0, ended.output
        process.send_signal(signal.SIGCONT)
        woken = job.ended(process)
    assert woken.code == 1 and (
        "has lost its lock" in woken.output or "another process has locked the run" in woken.output
    )
    assert place.manifests() == manifests_of(reference.run)
