"""Memory that the check before a run estimates for text-to-image policies and for sequence-parallel ranks."""

import pytest

from infra.errors import BadInput
from models.commands.preflight import check
from models.config.data import PaintingsData
from models.config.denoising import DenoisingConfig, LearntWindow
from models.config.engines import DiffusersEngine
from models.config.objectives import UpdateConfig
from models.config.policy import DirectoryPolicy, ScratchDiffusionPolicy
from models.config.reward_terms import PaintingReward
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import WarmupConfig
from tests.support.policies import write_policy
from tests.support.preflight import inputs


def check_paintings(
    policy: ScratchDiffusionPolicy,
    *,
    group_size: int = 2,
    steps: int = 3,
    guidance: float = 1.0,
    update: UpdateConfig | None = None,
    warmup: WarmupConfig | None = None,
) -> dict[str, float]:
    """Return the facts about a job whose policy generates paintings and trains on a number of denoising steps."""
    window = LearntWindow(size=steps, first=0, last=0)
    denoising = DenoisingConfig(text_tokens=1, window=window, guidance=guidance)
    rollout = RolloutConfig(prompts=16, group_size=group_size, denoising=denoising, engine=DiffusersEngine())
    scoring = ScoringConfig(rewards=(PaintingReward(),))
    return check(
        inputs(data=PaintingsData(), policy=policy, warmup=warmup, rollout=rollout, scoring=scoring, update=update)
    )


def test_flash_attention_is_refused_for_heads_that_are_too_large(tmp_path):
    write_policy(tmp_path, "mistral", changes={"head_dim": 264})
    policy = DirectoryPolicy(path=tmp_path)
    with pytest.raises(BadInput, match=r"'flash_attention_2': .* 256 .* 264"):
        check(inputs(policy=policy, update=UpdateConfig(attention="flash_attention_2")))
    assert check(inputs(policy=policy, update=UpdateConfig(attention="eager")))["parameters"]


def test_a_sequence_parallel_rank_holds_its_share_of_a_forward_pass():
    one, two, both = (
        check(inputs(update=UpdateConfig(sequence_parallel=ranks_of_group, minibatches=1), ranks=ranks))
        for ranks_of_group, ranks in ((1, 1), (2, 2), (2, 4))
    )
    for part in ("update_activations_bytes", "update_head_bytes"):
        assert two[part] == both[part] == pytest.approx(one[part] / 2, rel=1e-3)
    assert two["update_weights_bytes"] == one["update_weights_bytes"]


def test_the_painting_reward_finds_its_references_in_both_splits():
    scoring = ScoringConfig(rewards=(PaintingReward(),))
    facts = check(inputs(data=PaintingsData(), rollout=RolloutConfig(prompts=16), scoring=scoring))
    assert (facts["train_problems"], facts["heldout_problems"]) == (24, 24)


def test_images_for_the_warm_up_must_be_as_large_as_the_images_of_the_policy():
    warmup = WarmupConfig(steps=1, batch_size=2)
    with pytest.raises(BadInput, match=r"warmup: .*policy\.side 16 x 16 pixels, found 8 x 8"):
        check_paintings(ScratchDiffusionPolicy(side=16, layers=1), warmup=warmup)
    facts = check_paintings(ScratchDiffusionPolicy(side=8, layers=1), warmup=warmup)
    assert facts["update_activations_bytes"] > 0 == facts["update_head_bytes"]


def test_layers_of_a_denoiser_are_recomputed_from_a_certain_size_on_unless_configured_otherwise():
    small, large = ScratchDiffusionPolicy(layers=1), ScratchDiffusionPolicy(layers=6, heads=8)

    def check_update(policy: ScratchDiffusionPolicy, recomputes: bool | None = None) -> dict[str, float]:
        update = UpdateConfig(activation_checkpointing=recomputes, minibatches=1, microbatch_tokens=2**16)
        return check_paintings(policy, group_size=64, update=update)

    kept, again = check_update(large, recomputes=False), check_update(large)
    assert (check_update(small)["recomputes"], again["recomputes"]) == (0, 1)
    assert (check_update(small, recomputes=True)["recomputes"], kept["recomputes"]) == (1, 0)
    assert kept["update_activations_bytes"] == again["kept_activations_bytes"] > 2**30
    assert 1 / 6 < again["update_activations_bytes"] / kept["update_activations_bytes"] < 1 / 3


def test_memory_of_an_update_grows_with_the_denoising_steps_and_doubles_with_guidance():
    policy, update = ScratchDiffusionPolicy(layers=1), UpdateConfig(minibatches=1)
    one, three, guided = (
        check_paintings(policy, steps=steps, guidance=guidance, update=update)["update_activations_bytes"]
        for steps, guidance in ((1, 1.0), (3, 1.0), (1, 5.0))
    )
    assert three == 3 * one
    assert guided == 2 * one
