"""A run whose update ranks read every pass together, each a slice of it."""

import pytest

from tests.support.jobs import Fault, Job, leftovers_of, manifests_of, shards_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.system]

SLICED = ("pools.update_ranks=2", "update.sequence_parallel=2", "update.zero_stage=2", "iterations=2")


def test_a_run_in_slices_whose_ranks_are_lost_makes_the_same_policy(prefect_api, tmp_path):
    whole = Job(tmp_path / "whole", prefect_api, counts_works=True)
    ended = whole.train(*SLICED)
    assert ended.code == 0, ended.output
    job = Job(tmp_path / "killed", prefect_api, counts_works=True)
    faults = [Fault("update-1", "progress", "warmup", count=3), Fault("update-1", "progress", "update", count=2)]
    ended = job.train(*SLICED, faults=faults)
    assert ended.code == 0, ended.output
    assert job.struck() == len(faults)
    assert manifests_of(job.run) == manifests_of(whole.run)
    assert shards_of(job.run) == shards_of(whole.run)
    assert leftovers_of(job.run) == []
    verified = job.command("verify")
    assert verified.code == 0, verified.output
