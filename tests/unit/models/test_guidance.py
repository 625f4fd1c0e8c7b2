"""Guidance: what a denoiser says with a prompt, and further away from what it says without one."""

import pytest
import torch

from models.config.denoising import DenoisingConfig
from models.config.policy import ScratchDiffusionPolicy
from models.denoising.families import gather
from models.denoising.pipeline import FrozenParts, load_denoiser
from models.denoising.policy import write_scratch_diffusion
from models.denoising.steps import Drawing

PROMPTS = ("a red circle", "blue")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = tmp_path_factory.mktemp("policy")
    policy = ScratchDiffusionPolicy(layers=1, heads=2, head_size=8)
    write_scratch_diffusion(policy, found, texts=PROMPTS, seed=0)
    return found


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_guidance_leads_away_from_what_is_said_without_a_prompt(directory, guidance):
    """Both are asked in one pass; the numbers are those of two."""
    model = load_denoiser(directory)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    guided = Drawing.of(directory, DenoisingConfig(guidance=guidance, text_tokens=1), FrozenParts(device="cpu"))
    plain = Drawing.of(directory, DenoisingConfig(text_tokens=1), FrozenParts(device="cpu"))
    states_ND = torch.randn(2, 3 * guided.shape[1] * guided.shape[2], generator=torch.Generator().manual_seed(1))
    steps_N, told = torch.tensor([0, 4]), gather([guided.prompts.read(text) for text in PROMPTS], range(2))
    nothing = gather([guided.prompts.read("")], [0, 0])
    with torch.no_grad():
        said = guided.say(model, states_ND, steps_N, told, guided.unconditioned(2, model))
        assert len(passes) == 1
        with_ND, without_ND = (plain.say(model, states_ND, steps_N, each, None) for each in (told, nothing))
    assert (with_ND - without_ND).abs().max() > 0.01
    torch.testing.assert_close(said, with_ND * guidance + without_ND * (1 - guidance), rtol=1e-4, atol=1e-5)
