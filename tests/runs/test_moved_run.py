"""A run that continues with another parallel layout: the same data in the same order, and nearly the same weights."""

import json

import pyarrow.compute as pc
import pytest
from safetensors.numpy import load_file

from rheostat.infra.errors import RunChanged
from rheostat.infra.store.bundles import delete_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.run.batch import rollouts_of
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.states import states_of
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, copy_job
from tests.support.jobs import manifests_of
from tests.support.stored_runs import open_tiny

pytestmark = [pytest.mark.timeout(600), pytest.mark.system]


@pytest.fixture(scope="module")
def continued_run(reference, tmp_path_factory):
    """Finished run after another iteration with the same ranks."""
    return train_further(reference, tmp_path_factory.mktemp("unmoved") / "job")


def train_further(reference, home, *overrides: str, accept=False, lose=False) -> InProcessJob:
    """Train a copy of the finished run for another iteration, without its optimizer state if `lose` is set."""
    job = copy_job(reference, home)
    if lose:
        run = open_tiny(job)
        for state in states_of(run.require(StageKey.policy(3))):
            delete_bundle(run.store, state)
    job.train("iterations=4", *overrides, accept_change=accept)
    return job


def weights(job: InProcessJob, number: int) -> dict:
    ref = open_tiny(job).require(StageKey.policy(number)).bundles["weights"]
    return load_file(job.run / ref.key / "model.safetensors")


def distance(one: dict, other: dict) -> float:
    return sum(float(((one[name] - other[name]) ** 2).sum()) for name in one) ** 0.5


def test_a_changed_zero_stage_is_refused_by_name_and_nothing_is_written(copied, reference):
    with pytest.raises(
        RunChanged, match=r"pools\.threads was 1, is 2; update\.zero_stage was 0, is 2\. Use --accept-change"
    ):
        copied.train("iterations=4", "pools.threads=2", "update.zero_stage=2")
    assert manifests_of(copied.run) == manifests_of(reference.run)


@pytest.mark.parametrize("lost", [False, True])
def test_another_zero_stage_trains_on_the_same_data_to_nearly_the_same_weights(
    reference, continued_run, tmp_path, lost
):
    job = train_further(reference, tmp_path / "job", "update.zero_stage=2", accept=True, lose=lost)
    (change,) = json.loads(job.command("show", "--json").output)["changes"]
    assert (change["iteration"], change["changes"]) == (4, ["update.zero_stage was 0, is 2"])
    kept, made = manifests_of(continued_run.run), manifests_of(job.run)
    others = {key for key in kept.keys() | made.keys() if kept.get(key) != made.get(key)}
    assert "it-0004/update" in others
    assert all(key.startswith(("it-0004/update", "it-0004/seal", "eval-0004", "retention/")) for key in others)
    rows = [
        [read_shard(run.store, m.shards[0])["prompt_id"] for m in rollouts_of(run, 4)]
        for run in map(open_tiny, (continued_run, job))
    ]
    assert all(pc.all(pc.equal(one, other)).as_py() for one, other in zip(*rows, strict=True))
    step = distance(weights(continued_run, 4), weights(continued_run, 3))
    assert distance(weights(job, 4), weights(continued_run, 4)) < 1e-3 * step
    assert verify_run(str(job.store), "tiny") == []
    job.train("iterations=5", "update.zero_stage=2")
    with pytest.raises(RunChanged, match=r"update\.zero_stage was 2, is 0"):
        job.train("iterations=6")


def test_other_numbers_of_workers_and_controllers_change_no_bit(reference, continued_run, tmp_path):
    job = train_further(reference, tmp_path / "job", "pools.workers=1", "controllers.count=3")
    assert manifests_of(job.run) == manifests_of(continued_run.run)
