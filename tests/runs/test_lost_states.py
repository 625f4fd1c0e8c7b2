"""Runs with a lost optimizer state, which is computed again to the same bits."""

import shutil

import pytest

from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.in_process import InProcessJob
from tests.support.jobs import bundles_of
from tests.support.whole_runs import check_same_run, copy_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]


def copy_without_state(whole, home, number, *, api):
    """Copy a run as it was when an update was committed but its optimizer state was not stored."""
    job = InProcessJob(home, api, counts_works=True)
    copy_until(whole.run, job.run, iteration=number + 1)
    (job.run / f"manifests/it-{number:04d}/seal.json").unlink()
    shutil.rmtree(bundles_of(job.run, f"it-{number:04d}/update")["state"])
    for path in (job.run / "chain").glob("*.json"):
        if int(path.name.partition("-")[0]) > number:
            path.unlink()
    return job


def test_a_run_killed_between_a_policy_and_its_state_ends_with_the_same_weights(undisturbed, tmp_path, prefect_api):
    whole = undisturbed("all versions kept")
    job = copy_without_state(whole, tmp_path, 2, api=prefect_api)
    assert checker.problems_of(job.run) == []
    assert verify_run(str(job.store), "tiny") == []
    job.train("retention.keep_last=4")
    check_same_run(job.run, whole.run)


def test_every_third_update_keeps_its_state(undisturbed):
    run = undisturbed("few states").run
    bundles = [bundles_of(run, f"it-{number:04d}/update") for number in range(1, 6)]
    assert ["state" in each for each in bundles] == [False, False, True, False, False]
    assert all((path / "bundle.json").exists() for path in bundles[2].values()), "a resumed run needs the state"
