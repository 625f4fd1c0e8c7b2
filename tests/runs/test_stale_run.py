"""Iterations that overlap: an older policy generates the next rollouts while the policy is trained."""

import pytest

from rheostat.models.workers.update import UpdateWorker
from rheostat.tasks.run.iteration import Iteration
from tests.support.in_process import InProcessJob
from tests.support.jobs import wait_for
from tests.support.stored_runs import open_tiny
from tests.support.whole_runs import check_same_run, read_families


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory, together, prefect_api):
    """Run whose updates wait until there are rollouts of the next iteration."""
    home, update = tmp_path_factory.mktemp("overlapped"), UpdateWorker.update

    def late(worker, work):
        following = f"it-{work.iteration + 1:04d}"
        if work.iteration < 3:
            assert wait_for((home / f"store/tiny/manifests/{following}/rollout/0000.json").exists)
            (home / "waited").open("a").write(f"{following}\n")
        return update(worker, work)

    job = InProcessJob(home, prefect_api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateWorker, "update", late)
        job.train(*read_families()["stale rollouts"].settings(together), "pools.dedicated_update_resources=true")
    return job


def waited_for(job):
    return (job.home / "waited").read_text().split()


@pytest.mark.system
def test_overlapping_iterations_change_no_bit(overlapped, undisturbed):
    check_same_run(overlapped.run, undisturbed("stale rollouts").run)


@pytest.mark.system
def test_rollouts_are_generated_during_the_update_if_it_has_separate_workers(overlapped):
    assert waited_for(overlapped) == ["it-0002", "it-0003"], "each update began when there were rollouts of the next"


@pytest.mark.system
def test_rollouts_are_one_policy_version_older_than_the_policy_that_they_train(overlapped):
    run = open_tiny(overlapped)
    iterations = [Iteration(run, number) for number in (1, 2, 3)]
    assert [iteration.batches[0].plan.policy for iteration in iterations] == [
        "policy/initial",
        "policy/initial",
        "it-0001/update",
    ]
    assert [iteration.policy.key for iteration in iterations] == ["policy/initial", "it-0001/update", "it-0002/update"]
    assert [iteration.update.metrics["stale_fraction"] for iteration in iterations] == [0, 1, 1]


@pytest.mark.system
def test_no_prompt_is_skipped_or_repeated(overlapped):
    run = open_tiny(overlapped)
    rows = [row for number in (1, 2, 3) for row in Iteration(run, number).batches[0].plan.rows]
    assert len(rows) == len(set(rows)) == 18
