"""Compatible settings are accepted. Incompatible ones are in the tables of tests/unit/refusals."""

import pytest

from rheostat.models.config.optimizers import Adam8bit
from rheostat.tasks.config.run import load_config
from tests.support.configurations import accepted, refusal
from tests.support.jobs import ROOT

KEEP = "rollout.dynamic.surplus=keep"
CAPO = "algorithm.kind=capo"
DISTILLATION = "algorithm.kind=distillation"
VLLM = "rollout.engine.kind=vllm"
RAW = "rollout.engine.logprobs=raw"
REPLAY = "update.router_replay=rollout"
UNCACHED = "rollout.engine.prefix_caching=false"
SERVERS = 'rollout.engine.base_urls=["http://127.0.0.1:8000"]'
FLASH = ("update.attention=flash_attention_2", "update.dtype=bfloat16", "pools.gpus_per_update_rank=1")
WEIGHTLESS = "scoring.rewards=[{kind='numeric',weight=0}]"
STEPS = "{kind='target',target='arithmetic_steps:wrong_steps',per='step'}"
OUTCOME_AND_STEPS = f"scoring.rewards=[{{kind='numeric',weight=2}},{STEPS}]"
LOW_OUTCOME = f"scoring.rewards=[{{kind='numeric',weight=0.5}},{STEPS}]"
JUDGE = "scoring.rewards=[{kind='judge',slots=2,model={kind='trained',engine={kind='vllm',tensor_parallel=4}}}]"
TRAINED_REWARD = "scoring.rewards=[{kind='numeric'},{kind='model',name='liked',model={kind='trained'}}]"
LIKED = "{kind='model',model={kind='directory',path='m'}}"
TEACHER = "algorithm.distillation.teacher={kind='directory',path='somewhere'}"
ENDPOINT = (
    "algorithm.distillation.teacher={kind='endpoint',base_url='https://teacher.example.com/v1',"
    "allowed_hosts=['teacher.example.com'],model='large'}"
)
DIFFUSION = (
    "data={kind='target',target='paintings:PaintingsData'}",
    "policy={kind='target',target='scratch_diffusion:ScratchDiffusionPolicy'}",
    "rollout.denoising.steps=6",
    "rollout.engine.kind=diffusers",
    "scoring.rewards=[{kind='target',name='painting',target='painting:painting',checks_references=true}]",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.kind=ppo", "rollout.group_size=1"),
        ("algorithm.kind=reinforce_pp", "rollout.group_size=1"),
        ("algorithm.kind=rloo", KEEP),
        ("algorithm.kind=reinforce_pp", "update.kl.kind=k3"),
        ("update.loss.kind=policy_gradient", "update.minibatches=1"),
        ("update.max_staleness=1", KEEP),
        ("update.max_staleness=1", "rollout.partial.tokens=8"),
        ("update.max_staleness=1", "rollout.staleness=1", "retention.keep_last=3"),
        ("update.stale_correction.kind=masked", KEEP),
        ("update.stale_correction.kind=masked", "rollout.partial.tokens=8"),
        ("update.stale_correction.kind=masked", "rollout.staleness=1", "retention.keep_last=3"),
        ("update.stale_correction.kind=second_moment", "rollout.staleness=1", "retention.keep_last=3"),
        ("update.correction={kind='truncated',level='sequence'}", "update.loss.kind=gspo"),
        ("update.loss.kind=vespo", "update.correction.kind=none"),
        ("update.loss.kind=vespo", "update.correction.kind=none", "rollout.staleness=1", "retention.keep_last=3"),
        ("update.top_entropy=0.2", "update.entropy.coefficient=0.01"),
        (WEIGHTLESS, "iterations=0"),
        (CAPO, LOW_OUTCOME, "algorithm.allow_low_outcome=true"),
        ("algorithm.kind=grpo", ENDPOINT),
        ("algorithm.kind=grpo", "rollout.sampling.temperature=0.7", TEACHER),
        ("algorithm.kind=grpo", OUTCOME_AND_STEPS, TEACHER),
        ("algorithm.kind=rloo", OUTCOME_AND_STEPS, TEACHER),
        ("algorithm.kind=reinforce_pp", OUTCOME_AND_STEPS, TEACHER),
        ("algorithm.kind=ppo", OUTCOME_AND_STEPS, TEACHER),
        (CAPO, OUTCOME_AND_STEPS, TEACHER),
        (*FLASH, "pools.ray_address=10.0.0.1:6379"),
        ("update.attention=varlen", *FLASH[1:]),
        (VLLM, RAW, "rollout.sampling.top_p=0.9"),
        (VLLM, RAW, "rollout.sampling.top_k=40"),
        ("rollout.sampling.top_p=0.9",),
        ("rollout.curriculum={}", "rollout.staleness=1", "retention.keep_last=3"),
        ("rollout.curriculum={}", KEEP, "rollout.partial.tokens=8"),
        ("rollout.curriculum.metric=numeric", f"scoring.rewards=[{LIKED},{{kind='numeric'}}]"),
        ("rollout.sampling.top_k=40",),
        (VLLM, "rollout.sampling.temperature=0.7"),
        ("rollout.sampling.temperature=2.5",),
        (VLLM, "update.lora.rank=512"),
        ("update.lora.rank=513",),
        ("update.lora.dora=true",),
        (VLLM, "update.lora.rank_stabilized=true"),
        (VLLM, "update.lora.rank=8", "pools.gpus_per_worker=1", "rollout.engine.dtype=bfloat16"),
        (VLLM, "rollout.engine.tensor_parallel=4", "pools.gpus_per_worker=4"),
        (VLLM, "rollout.engine.tensor_parallel=4", SERVERS),
        (VLLM, "pools.gpus_per_worker=0.5", "rollout.engine.gpu_memory_share=0.5"),
        (VLLM, "pools.gpus_per_worker=0.5", "pools.workers=1"),
        # each slot shares its GPU with a rank, not with another slot
        (VLLM, "pools={workers=2,gpus_per_worker=0.5,gpus_per_update_rank=0.5,update_ranks=2}"),
        (VLLM, "rollout.engine.api_key_variable=KEY", SERVERS),
        (REPLAY,),
        (VLLM, REPLAY),
        (VLLM, REPLAY, UNCACHED),
        (VLLM, SERVERS, REPLAY, UNCACHED, "pools.gpus_per_worker=1"),
        ("dpo.steps=10", "preferences.kind=answers"),
        ("dpo.steps=10", "preferences={kind='file',path='pairs.jsonl'}", "data={kind='file',path='p.jsonl'}"),
    ],
)  # fmt: skip
def test_compatible_settings_are_accepted(overrides):
    accepted(*overrides)


def test_derived_settings_follow_from_the_configuration():
    assert accepted("update.optimizer.kind=adam8bit", "update.dtype=bfloat16").update.running_stage == 2
    assert accepted(CAPO, OUTCOME_AND_STEPS).scoring.process_terms == ("target",)
    assert accepted(DISTILLATION, WEIGHTLESS, TEACHER).algorithm.distillation.coefficient == 1
    assert accepted(JUDGE, "pools.workers=3", "pools.gpus_per_worker=2").scoring.hosted_rewards
    assert accepted(*DIFFUSION, "evaluation.samples=8").evaluation.temperature == 0
    trained = accepted(TRAINED_REWARD, "preferences.kind=answers").scoring.trained_reward_models
    assert list(trained) == ["liked"]


def test_an_optimizer_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(Adam8bit, "package", ("no_such_bits", "no-such-bits>=1"))
    message = refusal("update.optimizer.kind=adam8bit")
    assert "no_such_bits" in message and "pip install 'no-such-bits>=1'" in message


def test_an_optimizer_whose_package_would_load_code_from_a_hub_is_refused(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("update.optimizer.kind=adam8bit")
    assert "'adam8bit'" in message and "package kernels" in message


def test_a_flash_kernel_that_is_too_old_is_refused_and_a_new_one_accepted(tmp_path, monkeypatch):
    for version in ("2.5.9", "2.8.3"):
        metadata = tmp_path / version / "flash_attn.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Name: flash-attn\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path / "2.5.9")
    message = refusal(*FLASH)
    assert "2.6" in message and "2.5.9" in message
    monkeypatch.syspath_prepend(tmp_path / "2.8.3")
    assert accepted(*FLASH).update.reference_attention == "flash_attention_2"
    assert accepted(*FLASH, "update.reference_dtype=float32").update.reference_attention is None


def test_supervised_warm_up_reward_model_and_reinforcement_are_one_configuration():
    config = load_config(ROOT / "configs/rlhf.toml")
    assert config.warmup is not None
    assert list(config.scoring.trained_reward_models) == ["model"]
    weights = {term: reward.weight for term, reward in zip(config.scoring.terms, config.scoring.rewards, strict=True)}
    assert weights == {"numeric": 0, "model": 1}


def test_dpo_is_one_configuration_without_an_iteration():
    config = load_config(ROOT / "configs/dpo.toml")
    assert config.warmup is not None and config.dpo is not None
    assert config.iterations == 0
