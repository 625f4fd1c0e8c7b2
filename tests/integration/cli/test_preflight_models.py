"""The check before a run: what is refused since a policy cannot do it, and what its ranks hold."""

import pytest
from transformers import AutoModelForCausalLM, Lfm2Config, PhimoeConfig

from infra.errors import BadInput
from models.commands.preflight import Inputs, check
from models.config.algorithms import CriticConfig, DistillationOnly, Ppo
from models.config.data import (
    PaintingsData,
)
from models.config.denoising import DenoisingConfig, LearntWindow
from models.config.engines import DiffusersEngine
from models.config.objectives import UpdateConfig
from models.config.policy import DirectoryPolicy, ScratchDiffusionPolicy, ScratchPolicy, SeeingScratchPolicy
from models.config.reward_terms import PaintingReward
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.teachers import Distillation, TeacherDirectory
from models.config.training import WarmupConfig
from models.modeling.critic import critic_from_policy
from models.modeling.policy import save_policy
from tests.support.policies import ARCHITECTURES, DECODER, VOCABULARY, small_tokenizer, write_policy
from tests.support.preflight import inputs


def test_experts_are_replayed_of_policies_whose_routers_can_be_told_what_to_choose(tmp_path, monkeypatch):
    update = UpdateConfig(router_replay="rollout")
    with pytest.raises(BadInput, match=r"update.router_replay: expected a policy with experts and a router for them"):
        check(inputs(update=update))
    write_policy(tmp_path / "mixtral", "mixtral")
    check(inputs(policy=DirectoryPolicy(path=tmp_path / "mixtral"), update=update))
    monkeypatch.setitem(ARCHITECTURES, "phimoe", (PhimoeConfig, {**DECODER, "num_local_experts": 4}))
    write_policy(tmp_path / "phimoe", "phimoe")
    with pytest.raises(BadInput, match=r"update.router_replay: expected routers that choose by one call of topk, foun"):
        check(inputs(policy=DirectoryPolicy(path=tmp_path / "phimoe"), update=update))


def test_slices_are_refused_where_ranks_could_not_share_the_heads_of_a_model(tmp_path):
    def refused(slices: int, **parts) -> str:
        update = UpdateConfig(sequence_parallel=slices)
        with pytest.raises(BadInput) as refusal:
            check(inputs(update=update, ranks=slices, **parts))
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    few = ScratchPolicy(heads=4, kv_heads=2)
    assert refused(3) == "update.sequence_parallel 3: the policy has 4 attention heads, expected a divisor of that"
    assert refused(4, policy=few).endswith("the policy has 2 key-value heads, expected a divisor of that")
    told = refused(2, policy=SeeingScratchPolicy())
    assert told.endswith("expected a model that reads text alone, the policy is of model_type 'idefics3'")
    config = Lfm2Config(
        **{**DECODER, "vocab_size": VOCABULARY, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]
    )
    save_policy(AutoModelForCausalLM.from_config(config), small_tokenizer(), tmp_path / "lfm2")
    told = refused(2, policy=DirectoryPolicy(path=tmp_path / "lfm2"))
    assert "expected a model whose tokens meet in attention alone, head by head, the policy has convolutions" in told
    write_policy(tmp_path / "teacher", changes={"num_key_value_heads": 1})
    write_policy(tmp_path / "policy")
    teacher = DistillationOnly(distillation=Distillation(teacher=TeacherDirectory(path=tmp_path / "teacher")))
    told = refused(2, policy=DirectoryPolicy(path=tmp_path / "policy"), algorithm=teacher)
    assert told.startswith("update.sequence_parallel 2: algorithm.distillation.teacher ")
    assert told.endswith("has 1 key-value heads, expected a divisor of that")
    save_policy(critic_from_policy(tmp_path / "teacher"), small_tokenizer(), tmp_path / "critic")
    critic = Ppo(critic=CriticConfig(path=tmp_path / "critic"))
    told = refused(2, policy=DirectoryPolicy(path=tmp_path / "policy"), algorithm=critic)
    assert told.startswith("update.sequence_parallel 2: the critic ")
    assert told.endswith("has 1 key-value heads, expected a divisor of that")


def test_a_rank_holds_its_slice_of_a_pass():
    one, two, both = (
        check(inputs(update=UpdateConfig(sequence_parallel=slices, minibatches=1), ranks=ranks))
        for slices, ranks in ((1, 1), (2, 2), (2, 4))
    )
    for part in ("update_activations_bytes", "update_head_bytes"):
        assert two[part] == both[part] == pytest.approx(one[part] / 2, rel=1e-3)
    assert two["update_weights_bytes"] == one["update_weights_bytes"]


def test_a_way_to_compute_attention_that_a_policy_does_not_go_with_is_refused(tmp_path):
    write_policy(tmp_path, "mistral", changes={"head_dim": 264})
    policy = DirectoryPolicy(path=tmp_path)
    with pytest.raises(BadInput, match="'flash_attention_2': expected heads of at most 256 numbers, found 264; use"):
        check(inputs(policy=policy, update=UpdateConfig(attention="flash_attention_2")))
    assert check(inputs(policy=policy, update=UpdateConfig(attention="eager")))["parameters"]


def test_paintings_are_asked_in_both_splits_and_their_reward_knows_its_references():
    painting = ScoringConfig(rewards=(PaintingReward(),))
    asked = {"rollout": RolloutConfig(prompts=16), "scoring": painting}
    facts = check(inputs(data=PaintingsData(), **asked))
    assert (facts["train_problems"], facts["heldout_problems"]) == (24, 24)
    said = "train problem 0: the painting reward finds no colour, shape and place, such as 'red square left'"
    with pytest.raises(BadInput, match=said):
        check(inputs(scoring=painting))


def test_pictures_that_warm_up_imitates_are_as_large_as_those_that_are_drawn():
    def of(side: int) -> Inputs:
        denoising = DenoisingConfig(text_tokens=1, window=LearntWindow(size=3, first=0, last=2))
        return inputs(
            data=PaintingsData(),
            policy=ScratchDiffusionPolicy(side=side, layers=1),
            warmup=WarmupConfig(steps=1, batch_size=2),
            rollout=RolloutConfig(prompts=16, group_size=2, denoising=denoising, engine=DiffusersEngine()),
            scoring=ScoringConfig(rewards=(PaintingReward(),)),
        )

    with pytest.raises(BadInput, match=r"warmup: expected pictures of policy\.side 16 x 16 pixels, found 8 x 8 for '"):
        check(of(16))
    facts = check(of(8))
    assert facts["update_activations_bytes"] > 0 == facts["update_head_bytes"]


def test_layers_of_a_denoiser_are_computed_again_from_a_size_on_unless_it_is_said_otherwise():
    small, large = ScratchDiffusionPolicy(layers=1), ScratchDiffusionPolicy(layers=6, heads=8)
    denoising = DenoisingConfig(text_tokens=1, window=LearntWindow(size=3, first=0, last=2))

    def found(policy: ScratchDiffusionPolicy, asked: bool | None = None) -> dict[str, float]:
        return check(
            inputs(
                data=PaintingsData(),
                policy=policy,
                rollout=RolloutConfig(prompts=16, group_size=64, denoising=denoising, engine=DiffusersEngine()),
                scoring=ScoringConfig(rewards=(PaintingReward(),)),
                update=UpdateConfig(activation_checkpointing=asked, minibatches=1, microbatch_tokens=2**16),
            )
        )

    kept, again = found(large, asked=False), found(large)
    assert (found(small)["recomputes"], again["recomputes"]) == (0, 1)
    assert (found(small, asked=True)["recomputes"], kept["recomputes"]) == (1, 0)
    assert kept["update_activations_bytes"] == again["kept_activations_bytes"] > 2**30
    assert 1 / 6 < again["update_activations_bytes"] / kept["update_activations_bytes"] < 1 / 3


def test_what_an_update_holds_of_pictures_follows_from_their_own_tokens_and_from_guidance():
    def facts(steps: int, guidance: float = 1.0) -> dict[str, float]:
        window = LearntWindow(size=steps, first=0, last=0)
        denoising = DenoisingConfig(text_tokens=1, window=window, guidance=guidance)
        return check(
            inputs(
                data=PaintingsData(),
                policy=ScratchDiffusionPolicy(layers=1),
                rollout=RolloutConfig(prompts=16, group_size=2, denoising=denoising, engine=DiffusersEngine()),
                scoring=ScoringConfig(rewards=(PaintingReward(),)),
                update=UpdateConfig(minibatches=1),
            )
        )

    one, three = facts(1), facts(3)
    assert three["update_activations_bytes"] == 3 * one["update_activations_bytes"]
    assert facts(1, guidance=5.0)["update_activations_bytes"] == 2 * one["update_activations_bytes"]
