"""Memory estimates of the input check for text-to-image policies and for sequence-parallel ranks."""

import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.models.commands.preflight import check
from rheostat.models.config.attention import KERNELS
from tests.support.model_files import set_tensors
from tests.support.policies import write_policy
from tests.support.preflight import check_job, read_inputs

PAINTINGS = (
    "data={kind='target',target='paintings:PaintingsData'}",
    "scoring.rewards=[{kind='target',name='painting',target='painting:painting',checks_references=true}]",
    "rollout.prompts=16",
    "rollout.group_size=2",
    "rollout.engine.kind=diffusers",
    "rollout.denoising={text_tokens=1,window={size=3,first=0,last=0}}",
    "policy={kind='target',target='scratch_diffusion:ScratchDiffusionPolicy',options={layers=1}}",
)
"""Job whose policy generates paintings."""


@pytest.fixture(autouse=True)
def place(make_job):
    return make_job("arithmetic")


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("attention", KERNELS)
def test_attention_kernels_are_refused_for_heads_that_are_too_large(place, attention):
    write_policy(place / "wide", "mistral", changes={"head_dim": 264})
    job = read_inputs("policy.kind=directory", "policy.path=wide", "update.attention=eager")
    assert check(job).facts["parameters"]
    kernel = job.update.model_copy(update={"attention": attention})
    with pytest.raises(BadInput, match=rf"'{attention}' .* 256 .* 264"):
        check(job.model_copy(update={"update": kernel}))


def test_the_check_notes_weights_that_no_model_reads(place):
    write_policy(place / "headed", "mistral")
    set_tensors(place / "headed/model.safetensors", {"v_head.summary.weight": torch.zeros(1, 16)})
    notes = check(read_inputs("policy.kind=directory", "policy.path=headed")).notes
    assert [note for note in notes if "v_head.summary.weight in model.safetensors is not read" in note]


def test_a_sequence_parallel_rank_needs_memory_for_its_share_of_a_forward_pass():
    one, two, both = (
        check_job(f"update.sequence_parallel={group}", "update.minibatches=1", f"pools.update_ranks={ranks}")
        for group, ranks in ((1, 1), (2, 2), (2, 4))
    )
    for part in ("update_activations_bytes", "update_head_bytes"):
        assert two[part] == both[part] == pytest.approx(one[part] / 2, rel=1e-3)
    assert two["update_weights_bytes"] == one["update_weights_bytes"]


def test_the_painting_reward_finds_its_references_in_both_splits():
    facts = check_job(*PAINTINGS)
    assert (facts["train_problems"], facts["heldout_problems"]) == (24, 24)


@pytest.mark.thorough
def test_images_for_the_warm_up_must_be_as_large_as_the_images_of_the_policy():
    warmup = "warmup={steps=1,batch_size=2}"
    with pytest.raises(BadInput, match=r"\[warmup\]: .*8 x 8 pixels, but the policy generates images of 16 x 16"):
        check_job(*PAINTINGS, "policy.options.side=16", warmup)
    facts = check_job(*PAINTINGS, "policy.options.side=8", warmup)
    assert facts["update_activations_bytes"] > 0 == facts["update_head_bytes"]


@pytest.mark.thorough
def test_layers_of_a_denoiser_are_recomputed_above_a_certain_size_unless_configured_otherwise():
    large = ("policy.options.layers=6", "policy.options.heads=8")

    def check_update(*overrides: str, recomputes: str = "") -> dict[str, float]:
        update = (f"update.activation_checkpointing={recomputes}", f"update.microbatch_tokens={2**16}")
        return check_job(*PAINTINGS, *overrides, "rollout.group_size=64", "update.minibatches=1", *update)

    kept, again = check_update(*large, recomputes="false"), check_update(*large)
    assert (check_update()["recomputes"], again["recomputes"]) == (0, 1)
    assert (check_update(recomputes="true")["recomputes"], kept["recomputes"]) == (1, 0)
    assert kept["update_activations_bytes"] == again["kept_activations_bytes"] > 2**30
    assert 1 / 6 < again["update_activations_bytes"] / kept["update_activations_bytes"] < 1 / 3


@pytest.mark.thorough
def test_memory_of_an_update_grows_with_the_denoising_steps_and_doubles_with_guidance():
    one, three, guided = (
        check_job(
            *PAINTINGS,
            "update.minibatches=1",
            f"rollout.denoising.window.size={steps}",
            f"rollout.denoising.guidance={guidance}",
        )["update_activations_bytes"]
        for steps, guidance in ((1, 1.0), (3, 1.0), (1, 5.0))
    )
    assert three == 3 * one
    assert guided == 2 * one
