"""Runs whose workers are threads of this process: the same runs as those on Ray."""

import shutil

import pytest

from infra.errors import BadInput
from tests.support.in_process import InProcessJob
from tests.support.jobs import leftovers_of, manifests_of, shards_of

pytestmark = pytest.mark.timeout(1200)


def test_a_run_in_threads_is_the_run_of_rays_processes_bit_for_bit(reference, tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train()
    assert manifests_of(job.run) == manifests_of(reference.run)
    assert shards_of(job.run) == shards_of(reference.run)
    assert leftovers_of(job.run) == []


def test_a_run_that_began_on_ray_goes_on_in_threads(reference, tmp_path, prefect_api):
    shutil.copytree(reference.run, tmp_path / "store" / "tiny")
    job = InProcessJob(tmp_path, prefect_api)
    job.train("iterations=4")
    manifests = manifests_of(job.run)
    assert manifests.items() > manifests_of(reference.run).items()
    assert "it-0004/seal" in manifests
    verified = job.command("verify")
    assert verified.code == 0, verified.output


def test_what_a_worker_refuses_ends_the_flow_and_the_next_in_this_process_is_none_the_worse(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    unknown = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:odd'}]"
    with pytest.raises(BadInput, match="odd"):
        job.train(unknown, "iterations=1", "name=refused")
    job.train("iterations=1")
    assert "it-0001/seal" in manifests_of(job.run)
