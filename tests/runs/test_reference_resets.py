"""Runs whose KL penalty measures the divergence from a reference that is replaced after every second iteration."""

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import has_bundle
from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.runs import open_run
from rheostat.tasks.forks.creation import request_fork
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, copy_job
from tests.support.whole_runs import check_same_run, copy_until

pytestmark = pytest.mark.timeout(1200)

IN_LOSS = ("iterations=5", "update.minibatches=1", "update.kl={kind='k3', coefficient=0.1, reset_every=2}")
IN_REWARD = ("iterations=3", "algorithm={kind='grpo', kl={kind='k3', coefficient=0.1, reset_every=2}}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prefect_api) -> InProcessJob:
    """Tiny run of five iterations with resets after iterations 2 and 4."""
    job = InProcessJob(tmp_path_factory.mktemp("resets"), prefect_api)
    job.train(*IN_LOSS)
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api) -> InProcessJob:
    """The same run, which keeps all policies."""
    job = InProcessJob(tmp_path_factory.mktemp("whole"), prefect_api)
    job.train(*IN_LOSS, "retention.keep_last=6")
    return job


def run_of(job, name="tiny"):
    return open_run(str(job.store), name)


def test_each_update_is_compared_with_the_policy_after_the_last_reset(trained):
    run = run_of(trained)
    updates = [run.require(f"it-000{number}/update") for number in range(1, 6)]
    references = [0, 0, 2, 2, 4]
    for number, (update, version) in enumerate(zip(updates, references, strict=True), start=1):
        policy, credit = policy_after(run, number - 1), run.require(f"it-000{number}/credit")
        reference = policy_after(run, version)
        expected = [policy.digest, credit.digest, *([reference.digest] if version == 2 and number == 4 else [])]
        assert [*update.parents] == expected
        assert Iteration(run, number).reference == reference
        # The one minibatch is measured before its step, so the divergence is 0 if the reference is the trained policy.
        assert (update.metrics["kl"] == 0) == (version == number - 1), number
    assert verify_run(str(trained.store), "tiny") == []


def test_retention_keeps_the_policy_that_is_the_reference(trained):
    run = run_of(trained)
    stored = [number for number in range(6) if has_bundle(run.store, policy_after(run, number).bundles["weights"])]
    assert stored == [0, 4, 5], "policy 2 was the reference until iteration 4"


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("iteration", [5, 4])
def test_a_run_that_was_killed_and_resumed_has_the_same_bits(trained, whole, tmp_path, prefect_api, iteration):
    assert [run_of(job).require("it-0005/seal").detail["policy"] for job in (whole, trained)] == [
        policy_after(run_of(trained), 5).bundles["weights"].digest
    ] * 2
    job = InProcessJob(tmp_path / "resumed", prefect_api)
    copy_until(whole.run, job.run, iteration=iteration)
    job.train(*IN_LOSS, "retention.keep_last=6")
    check_same_run(job.run, whole.run)


def test_forks_and_copies_have_the_reference_of_their_parent(trained, tmp_path):
    job = copy_job(trained, tmp_path / "job")
    options = ["pools.cluster=threads", "report=false"]
    with job.prefect():
        from rheostat.flows.fork import fork

        run_flow(fork("tiny@4", "same", options, store=str(job.store)))
    fork_run, parent = run_of(job, "same"), run_of(job)
    assert policy_after(fork_run, 5).bundles == policy_after(parent, 5).bundles
    assert Iteration(fork_run, 4).reference == Iteration(parent, 4).reference == policy_after(parent, 2)
    copy_run("same", str(job.store), str(tmp_path / "copies"))
    assert verify_run(str(job.store), "same") == verify_run(str(tmp_path / "copies"), "same") == []
    unset = request_fork(str(job.store), "tiny@4", "unset", overrides=[*options, "update.kl.reset_every="])
    assert unset.plan
    with pytest.raises(BadInput, match=r"policy 3 is not stored, which is the reference .*reset_every"):
        changes = [*options, "iterations=6", "update.kl.reset_every=3"]
        request_fork(str(job.store), "tiny@5", "other", overrides=changes)


@pytest.mark.thorough
def test_a_penalty_in_the_reward_is_computed_from_the_reset_reference(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*IN_REWARD)
    run = run_of(job)
    estimates = [run.require(f"it-000{number}/estimates") for number in (1, 2, 3)]
    for number, version in ((1, 0), (2, 0), (3, 2)):
        reference = policy_after(run, version).digest
        assert reference in estimates[number - 1].parents
        # Estimates of policy and reference differ from each other only if they are different policies.
        is_zero = run.require(f"it-000{number}/credit").metrics["kl"] < 1e-9
        assert is_zero == (version == number - 1)
    refused = job.command("recredit", "--algorithm", "kind='rloo'\nkl={kind='k3', coefficient=0.1}")
    assert refused.code == 2 and "log-probs of the reference with these resets (algorithm.kl)" in refused.output
    assert verify_run(str(job.store), "tiny") == []
