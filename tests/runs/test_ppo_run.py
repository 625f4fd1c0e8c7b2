"""A whole run of PPO: the critic next to the policy, and the adaptive coefficient of the KL penalty."""

from itertools import pairwise

import pytest

from rheostat.models.algorithms.shaping import next_coefficient
from rheostat.models.config.divergence import AdaptiveKl
from tests.support.jobs import bundles_of, digest_of, manifest_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]


@pytest.fixture
def ppo(undisturbed):
    return undisturbed("ppo")


def test_ppo_trains_only_the_critic_during_critic_warmup_and_then_both_models(ppo):
    keys = [f"it-000{number}/update" for number in (1, 2, 3)]
    updates = [manifest_of(ppo.run, key) for key in keys]
    assert len({digest_of(ppo.run, key, "critic") for key in ("critic/initial", *keys)}) == 4
    policies = [digest_of(ppo.run, key) for key in ("policy/initial", *keys)]
    assert policies[0] == policies[1]
    assert len(set(policies)) == 3
    assert ["state" in made["bundles"] for made in updates] == [False, True, True]
    for made in updates:
        assert made["metrics"]["critic_grad_norm"] > 0
        assert 0 <= made["metrics"]["value_loss"] < 10


def test_credit_depends_on_estimates_which_depend_on_rollouts_and_models(ppo):
    for number in (1, 2, 3):
        estimates, credit = (
            manifest_of(ppo.run, f"it-000{number}/estimates"),
            manifest_of(ppo.run, f"it-000{number}/credit"),
        )
        rollouts = [manifest_of(ppo.run, f"it-000{number}/rollout/000{shard}")["digest"] for shard in range(3)]
        before = "critic/initial" if number == 1 else f"it-000{number - 1}/update"
        assert rollouts == estimates["parents"][:3]
        assert manifest_of(ppo.run, before)["digest"] in estimates["parents"]
        assert estimates["digest"] in credit["parents"]
        assert estimates["digest"] in manifest_of(ppo.run, f"it-000{number}/seal")["parents"]


def test_the_kl_coefficient_adapts_to_the_divergence_of_the_previous_iteration(ppo):
    measured = [manifest_of(ppo.run, f"it-000{number}/credit")["metrics"] for number in (1, 2, 3)]
    assert measured[0]["kl_coefficient"] == 0.05
    assert abs(measured[0]["kl"]) < 1e-6
    for before, after in pairwise(measured):
        expected = next_coefficient(
            before["kl_coefficient"], kl=before["kl"], completions=24, adaptive=AdaptiveKl(target=0.001, horizon=50)
        )
        assert after["kl_coefficient"] == expected
    assert measured[1]["kl_coefficient"] < 0.05


def test_retention_deletes_old_critics_with_their_policies(ppo):
    keys = ("critic/initial", "it-0001/update", "it-0002/update", "it-0003/update")
    critics = [bundles_of(ppo.run, key)["critic"] for key in keys]
    assert [(critic / "model.safetensors").exists() for critic in critics] == [True, False, True, True]
    verified = ppo.command("verify")
    assert verified.code == 0, verified.output
