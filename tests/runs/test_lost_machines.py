"""A whole run on a Ray cluster whose machines are lost and join."""

import json

import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import LOSE_MACHINE, Fault, Job, leftovers_of, manifests_of, shards_of, wait_for
from tests.support.judged import JUDGE
from tests.support.machines import machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = (JUDGE, "rollout.prompts=8", "rollout.shard_prompts=1", "evaluation.problems=4")
LOSSES = (
    Fault("rollout", "progress", "generate .*iteration=1", count=3, signal=LOSE_MACHINE),
    Fault("judge-judge", "progress", "judge .*iteration=2", signal=LOSE_MACHINE),
    Fault("update-0", "progress", "update .*iteration=3", signal=LOSE_MACHINE),
)


def slots_planned_with(job):
    """Worker slots that each batch was planned with."""
    entries = job.run.glob("journal/placement/*/plan.json")
    return {path.parent.name: json.loads(path.read_text())["inputs"]["workers"] for path in entries}


def test_machines_lost_in_rollout_in_judging_and_in_the_update_and_one_that_joins_change_nothing(tmp_path, prefect_api):
    undisturbed = InProcessJob(tmp_path / "undisturbed", prefect_api)
    undisturbed.train(*SMALL)
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
        with job.started(*SMALL, *cluster, faults=LOSSES) as process:
            assert wait_for(lambda: job.struck() or process.poll() is not None)
            computers.join(1, gpus=1)
            ended = job.ended(process)
    assert ended.code == 0, ended.output
    assert job.struck() == len(LOSSES)
    assert manifests_of(job.run) == manifests_of(undisturbed.run)
    assert shards_of(job.run) == shards_of(undisturbed.run)
    assert leftovers_of(job.run) == []
    assert slots_planned_with(job) == {"eval-0000": 3, "it-0001": 3, "it-0002": 3, "it-0003": 2, "eval-0003": 1}
    assert job.command("verify").code == 0
