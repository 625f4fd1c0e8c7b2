"""Whole runs of PPO: a critic beside the policy, a penalty in the reward whose coefficient adapts, kills in between."""

import json
import signal
from itertools import pairwise

import pytest

from models.algorithms.shaping import next_coefficient
from models.config.objectives import AdaptiveKl
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, leftovers_of, manifests_of, shards_of

pytestmark = pytest.mark.timeout(2000)

PPO = (
    "algorithm.kind=ppo",
    "algorithm.critic.learning_rate=1e-3",
    "algorithm.critic.warmup_iterations=1",
    'algorithm.kl={kind="k1", coefficient=0.05, adaptive={target=0.001, horizon=50}}',
    "update.learning_rate=1e-2",
    "evaluation.problems=1",
    "retention.keep_last=2",
)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory, prefect_api):
    """A tiny run, never disturbed; nothing may change it."""
    job = InProcessJob(tmp_path_factory.mktemp("ppo"), prefect_api)
    job.train(*PPO)
    return job


def manifest(job, key):
    return json.loads((job.run / f"manifests/{key}.json").read_text())


@pytest.mark.system
def test_a_run_of_ppo_trains_a_critic_first_and_then_the_policy_beside_it(ppo):
    updates = [manifest(ppo, f"it-000{number}/update") for number in (1, 2, 3)]
    critics = [manifest(ppo, "critic/initial"), *updates]
    assert len({made["bundles"]["critic"]["digest"] for made in critics}) == 4
    policies = [made["bundles"]["weights"]["digest"] for made in (manifest(ppo, "policy/initial"), *updates)]
    assert policies[0] == policies[1]
    assert len(set(policies)) == 3
    assert ["state" in made["bundles"] for made in updates] == [False, True, True]
    for made in updates:
        assert made["metrics"]["critic_grad_norm"] > 0
        assert 0 <= made["metrics"]["value_loss"] < 10


@pytest.mark.system
def test_credit_follows_from_estimates_which_follow_from_rollouts_and_models(ppo):
    for number in (1, 2, 3):
        estimates, credit = manifest(ppo, f"it-000{number}/estimates"), manifest(ppo, f"it-000{number}/credit")
        rollouts = [manifest(ppo, f"it-000{number}/rollout/000{shard}")["digest"] for shard in range(3)]
        before = "critic/initial" if number == 1 else f"it-000{number - 1}/update"
        assert rollouts == estimates["parents"][:3]
        assert manifest(ppo, before)["digest"] in estimates["parents"]
        assert estimates["digest"] in credit["parents"]
        assert estimates["digest"] in manifest(ppo, f"it-000{number}/seal")["parents"]


@pytest.mark.system
def test_the_penaltys_coefficient_follows_the_divergence_of_the_iteration_before(ppo):
    measured = [manifest(ppo, f"it-000{number}/credit")["metrics"] for number in (1, 2, 3)]
    assert measured[0]["kl_coefficient"] == 0.05
    assert abs(measured[0]["kl"]) < 1e-6
    for before, after in pairwise(measured):
        expected = next_coefficient(
            before["kl_coefficient"], kl=before["kl"], completions=24, adaptive=AdaptiveKl(target=0.001, horizon=50)
        )
        assert after["kl_coefficient"] == expected
    assert measured[1]["kl_coefficient"] < 0.05


@pytest.mark.system
def test_old_critics_lose_their_files_with_their_policies_and_the_run_verifies(ppo):
    keys = ("critic/initial", "it-0001/update", "it-0002/update", "it-0003/update")
    critics = [ppo.run / manifest(ppo, key)["bundles"]["critic"]["key"] for key in keys]
    assert [(critic / "model.safetensors").exists() for critic in critics] == [True, False, True, True]
    verified = ppo.command("verify")
    assert verified.code == 0, verified.output


@pytest.mark.slow
def test_a_run_of_ppo_that_is_killed_again_and_again_ends_as_if_it_never_was(ppo, tmp_path):
    job = Job(tmp_path, ppo.api, counts_works=True)
    moments = ("critic/initial", "it-0001/update", "it-0002/estimates", "it-0002/credit", "it-0003/estimates")
    for key in moments:
        ended = job.train(*PPO, faults=[Fault("driver", "after", f"/manifests/{key}.json$")])
        assert ended.code == -signal.SIGKILL, (key, ended.output)
    ended = job.train(*PPO)
    assert ended.code == 0, ended.output
    whole(job, ppo)


@pytest.mark.slow
def test_update_ranks_and_preparation_killed_around_the_critics_writes_make_the_same_run(ppo, tmp_path):
    job = Job(tmp_path, ppo.api, counts_works=True)
    faults = [
        Fault("preparation", "after", "/critics/.*/bundle.json"),
        Fault("update-0", "progress", "estimate"),
        Fault("update-0", "during", "/shards/"),
        Fault("update-0", "after", "/critics/.*/bundle.json"),
        Fault("update-0", "before", "/critics/.*/model.safetensors", count=2),
    ]
    ended = job.train(*PPO, faults=faults)
    assert ended.code == 0, ended.output
    assert job.struck() == len(faults)
    whole(job, ppo)


def whole(job, undisturbed):
    assert manifests_of(job.run) == manifests_of(undisturbed.run)
    assert shards_of(job.run) == shards_of(undisturbed.run)
    assert leftovers_of(job.run) == []
    verified = job.command("verify")
    assert verified.code == 0, verified.output
