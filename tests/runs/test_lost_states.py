"""Runs whose optimizer's state is lost, or kept by few updates: what is missing is learnt again to the same bits."""

import json
import shutil

import pytest

from tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.in_process import InProcessJob
from tests.support.jobs import leftovers_of, manifests_of, shards_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]

KEPT = "retention.keep_last=4"
SPARSE = ("iterations=5", "update.state_every=3")


def manifest(run, key):
    return json.loads((run / f"manifests/{key}.json").read_text())


def stopped_after(whole, home, number, *, api):
    """Copy a run as it was when an update was committed and the kill came before its state was there."""
    job = InProcessJob(home, api, counts_works=True)
    shutil.copytree(whole.store, job.store)
    later = [f"it-{later:04d}" for later in range(number + 1, 9)]
    gone = [f"it-{number:04d}/seal", "retention/*", *(f"{part}/**/*" for part in (*later, "eval-0003"))]
    for pattern in gone:
        for path in job.run.glob(f"manifests/{pattern}.json"):
            path.unlink()
    shutil.rmtree(job.run / manifest(job.run, f"it-{number:04d}/update")["bundles"]["state"]["key"])
    for path in (job.run / "chain").glob("*.json"):
        if int(path.name.partition("-")[0]) > number:
            path.unlink()
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api):
    """The tiny job with all its versions, never disturbed."""
    job = InProcessJob(tmp_path_factory.mktemp("whole"), prefect_api)
    job.train(KEPT)
    return job


def test_a_run_killed_between_a_policy_and_its_state_ends_with_the_same_bits(whole, tmp_path, prefect_api):
    job = stopped_after(whole, tmp_path, 2, api=prefect_api)
    assert checker.problems_of(job.run) == []
    assert verify_run(str(job.store), "tiny") == []
    job.train(KEPT)
    assert manifests_of(job.run) == manifests_of(whole.run)
    assert shards_of(job.run) == shards_of(whole.run)
    assert leftovers_of(job.run) == []
    assert checker.problems_of(job.run) == []
    assert verify_run(str(job.store), "tiny") == []


@pytest.fixture(scope="module")
def sparse(tmp_path_factory, prefect_api):
    """A run of five iterations, of which the third alone keeps its state; never disturbed."""
    home = tmp_path_factory.mktemp("sparse")
    assert run_once(home, prefect_api, None, SPARSE) == 0
    return home


def test_every_third_update_keeps_its_state(sparse):
    run = sparse / "store/tiny"
    named = ["state" in manifest(run, f"it-{number:04d}/update")["bundles"] for number in range(1, 6)]
    assert named == [False, False, True, False, False]
    kept = manifest(run, "it-0003/update")["bundles"]
    assert all((run / bundle["key"] / "bundle.json").exists() for bundle in kept.values()), "what resumes needs it"


@pytest.mark.parametrize(
    ("number", "moment"), [(1, "after"), (2, "before"), (3, "before"), (3, "after"), (4, "after"), (5, "before")]
)
def test_a_kill_at_any_update_takes_two_updates_again_at_most_and_changes_no_bit(
    sparse, tmp_path, prefect_api, number, moment
):
    """One more where the killed process was writing the third's state."""
    home = tmp_path / "killed"
    strike = Strike(f"manifests/it-{number:04d}/update.json", moment)
    assert problems_after([strike], home, prefect_api, sparse / "store/tiny", SPARSE, start=run_once) == []
    again = (home / "output").read_text().count("is taken again from its samples")
    assert again in {1: (1,), 2: (2,), 3: (0, 3), 4: (1,), 5: (0,)}[number], "an update that was made is not lost"
