"""A whole run on a Ray cluster whose machines are lost and join."""

import json

import pytest

from tests.support.jobs import LOSE_MACHINE, Fault, Job, wait_for
from tests.support.machines import machines
from tests.support.whole_runs import check_same_run, read_families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LOSSES = (
    Fault("rollout", "progress", "generate .*iteration=1", count=3, signal=LOSE_MACHINE),
    Fault("judge-judge", "progress", "judge .*iteration=2", signal=LOSE_MACHINE),
    Fault("update-0", "progress", "update .*iteration=3", signal=LOSE_MACHINE),
)


def slots_planned_with(job):
    """Return the worker slots with which each batch was planned."""
    entries = job.run.glob("journal/placement/*/plan.json")
    return {path.parent.name: json.loads(path.read_text())["inputs"]["workers"] for path in entries}


def test_lost_and_added_machines_change_no_bit(undisturbed, tmp_path, together, prefect_api):
    small = read_families()["lost machines"].settings(together)
    job = Job(tmp_path / "lost", prefect_api, counts_works=True)
    with machines(job.environment()) as computers:
        for _ in range(3):
            computers.join(1, gpus=1)
        # A rank with a GPU runs on one of these machines, never on the driver's.
        cluster = (
            f"pools.ray_address={computers.address}",
            "pools.workers={min=1,max=4}",
            "pools.gpus_per_update_rank=1",
        )
        with job.started(*small, *cluster, faults=LOSSES) as process:
            assert wait_for(lambda: job.struck() or process.poll() is not None)
            computers.join(1, gpus=1)
            ended = job.ended(process)
    assert ended.code == 0, ended.output
    assert job.struck() == len(LOSSES)
    check_same_run(job.run, undisturbed("lost machines").run)
    assert slots_planned_with(job) == {"eval-0000": 3, "it-0001": 3, "it-0002": 3, "it-0003": 2, "eval-0003": 1}
