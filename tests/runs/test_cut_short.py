"""A run that ended between an update and its seal continues, and seals iterations while later ones run."""

import json
import shutil

import httpx
import pytest

import rheostat.flows.iteration
from tests.support import checker
from tests.support.in_process import copy_job
from tests.support.jobs import PASSWORD, manifest_of, manifests_of, wait_for

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]

GONE = ("manifests/it-0002/seal.json", "manifests/it-0003", "manifests/eval-0003", "manifests/retention")


@pytest.fixture(scope="module")
def continued(reference, tmp_path_factory):
    """Undisturbed run without the second seal and later results, continued for one more iteration.

    The third iteration is sealed only after the update of the fourth, which must not wait for the seal.
    """
    job = copy_job(reference, tmp_path_factory.mktemp("cut-short") / "job")
    for path in [*(job.run / gone for gone in GONE), *sorted((job.run / "chain").iterdir())[2:]]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (job.home / "left").write_text(json.dumps(sorted(manifests_of(job.run))))
    seal = rheostat.flows.iteration.seal_iteration

    def late(open_run, iteration):
        if iteration.number == 3:
            assert wait_for((job.run / "manifests/it-0004/update.json").exists)
        return seal(open_run, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rheostat.flows.iteration, "seal_iteration", late)
        job.train("name=tiny", "iterations=4", "controllers.iterations_per_flow_run=3")
    return job


def flows_of(job):
    """Return the names of the flow runs of jobs with this name from Prefect's API, newest first."""
    asked = {"flow_runs": {"tags": {"all_": ["tiny"]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 100}
    found = httpx.post(f"{job.api}/flow_runs/filter", json=asked, auth=PASSWORD, timeout=30).raise_for_status().json()
    return [flow["name"] for flow in found]


def created(job, key):
    """Return when a manifest was committed."""
    return manifest_of(job.run, key)["provenance"]["created"]


def test_a_missing_seal_is_written_before_any_new_manifest(continued):
    new = manifests_of(continued.run).keys() - {*json.loads((continued.home / "left").read_text())}
    assert {"it-0002/seal", "it-0003/plan", "it-0004/seal", "eval-0004/summary"} <= new
    assert min(new, key=lambda key: created(continued, key)) == "it-0002/seal"


def test_an_update_does_not_wait_for_the_seal_of_the_previous_iteration(continued, reference):
    assert (
        created(continued, "it-0004/update") < created(continued, "it-0003/seal") < created(continued, "it-0004/seal")
    )
    made, undisturbed = manifests_of(continued.run), manifests_of(reference.run)
    assert {key: made[key] for key in undisturbed if not key.startswith("eval-0003")}.items() <= undisturbed.items()
    assert checker.problems_of(continued.run) == []
    assert continued.command("verify").code == 0


def test_the_successor_of_a_controller_is_named_after_its_first_iteration(continued):
    names = flows_of(continued)
    assert {f"{role} from it-0004" for role in ("rollout 0", "rollout 1", "scoring 0", "update")} <= {*names}
    assert not [name for name in names if name.endswith("from it-0003")]
