"""A run that goes on on other ranks, if that is accepted: the same data in the same order, near the same weights."""

import json
import shutil

import pyarrow.compute as pc
import pytest
from safetensors.numpy import load_file

from infra.errors import RunChanged
from infra.store.bundles import delete_bundle
from infra.store.runs import open_run
from infra.store.shards import read_shard
from tasks.run.batch import rollouts_of
from tasks.run.keys import StageKey
from tasks.run.states import states_of
from tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifests_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.system]


@pytest.fixture(scope="module")
def unmoved(reference, prefect_api, tmp_path_factory):
    """The finished run after one more iteration, where it was."""
    return more(reference, prefect_api, tmp_path_factory.mktemp("unmoved"))


def more(reference, api, home, *overrides: str, accept=False, lose=False) -> InProcessJob:
    job = InProcessJob(home, api)
    shutil.copytree(reference.store, job.store)
    if lose:
        run = open_run(str(job.store), "tiny")
        for state in states_of(run.require(StageKey.policy(3))):
            delete_bundle(run.store, state)
    job.train("iterations=4", *overrides, accept_change=accept)
    return job


def weights(job: InProcessJob, number: int) -> dict:
    ref = open_run(str(job.store), "tiny").require(StageKey.policy(number)).bundles["weights"]
    return load_file(job.run / ref.key / "model.safetensors")


def apart(one: dict, other: dict) -> float:
    return sum(float(((one[name] - other[name]) ** 2).sum()) for name in one) ** 0.5


def test_other_ranks_are_refused_by_name_and_nothing_is_written(reference, prefect_api, tmp_path):
    job = InProcessJob(tmp_path, prefect_api)
    shutil.copytree(reference.store, job.store)
    with pytest.raises(
        RunChanged, match=r"pools\.threads was 1, is 2; update\.zero_stage was 0, is 2; --accept-change"
    ):
        job.train("iterations=4", "pools.threads=2", "update.zero_stage=2")
    assert manifests_of(job.run) == manifests_of(reference.run)


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_goes_on_on_another_stage_with_the_same_data_and_near_the_same_weights(
    reference, unmoved, prefect_api, tmp_path, lost
):
    job = more(reference, prefect_api, tmp_path, "update.zero_stage=2", accept=True, lose=lost)
    (change,) = json.loads(job.command("show", "--json").output)["changes"]
    assert (change["iteration"], change["changes"]) == (4, ["update.zero_stage was 0, is 2"])
    kept, made = manifests_of(unmoved.run), manifests_of(job.run)
    others = {key for key in kept.keys() | made.keys() if kept.get(key) != made.get(key)}
    assert "it-0004/update" in others
    assert all(key.startswith(("it-0004/update", "it-0004/seal", "eval-0004", "retention/")) for key in others)
    rows = [
        [read_shard(run.store, m.shards[0])["prompt_id"] for m in rollouts_of(run, 4)]
        for run in (open_run(str(each.store), "tiny") for each in (unmoved, job))
    ]
    assert all(pc.all(pc.equal(one, other)).as_py() for one, other in zip(*rows, strict=True))
    step = apart(weights(unmoved, 4), weights(unmoved, 3))
    assert apart(weights(job, 4), weights(unmoved, 4)) < 1e-3 * step
    assert verify_run(str(job.store), "tiny") == []
    job.train("iterations=5", "update.zero_stage=2")
    with pytest.raises(RunChanged, match=r"update\.zero_stage was 2, is 0"):
        job.train("iterations=6")


def test_workers_and_controllers_may_be_others_and_change_no_bit(reference, unmoved, prefect_api, tmp_path):
    job = more(reference, prefect_api, tmp_path, "pools.workers=1", "controllers.count=3")
    assert manifests_of(job.run) == manifests_of(unmoved.run)
