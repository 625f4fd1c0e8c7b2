"""The sequence from supervised fine-tuning over preferences to reinforcement learning, each stage as a command."""

import pytest

from tests.support.jobs import Job, digest_of, manifests_of

CHAIN = (
    "iterations=2",
    "preferences.kind=answers",
    "preferences.train_pairs=64",
    "preferences.heldout_pairs=16",
    "dpo.steps=4",
    "dpo.batch_size=8",
    'scoring.rewards=[{kind="numeric",weight=0},{kind="model",name="liked",model={kind="trained",steps=4,batch_size=8}}]',
)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # five commands
def test_sft_dpo_and_reward_model_stop_at_their_stage_and_train_continues(tmp_path):
    job = Job(tmp_path)
    sft = job.part("sft", *CHAIN)
    assert sft.code == 0, sft.output
    assert "held-out accuracy before" in sft.output
    after_sft = manifests_of(job.run)
    assert "policy/sft" in after_sft
    assert not {"policy/dpo", "policy/initial", "judge-liked/model"} & after_sft.keys()

    dpo = job.part("dpo", *CHAIN, "--json")
    assert dpo.code == 0, dpo.output
    assert digest_of(job.run, "policy/dpo") in dpo.output
    rewards = job.part("reward-model", *CHAIN)
    assert rewards.code == 0, rewards.output
    assert "liked: loss" in rewards.output
    assert "on 16 held-out pairs" in rewards.output
    before_run = manifests_of(job.run)
    assert "judge-liked/model" in before_run
    assert not any(key.startswith("it-") for key in before_run)

    done = job.train(*CHAIN)
    assert done.code == 0, done.output
    assert before_run.items() <= manifests_of(job.run).items()
    assert digest_of(job.run, "policy/initial") == digest_of(job.run, "policy/dpo")
    verified = job.command("verify")
    assert verified.code == 0, verified.output

    alone = Job(tmp_path / "alone")
    assert alone.train(*CHAIN).code == 0
    assert digest_of(alone.run, "it-0002/update") == digest_of(job.run, "it-0002/update")
