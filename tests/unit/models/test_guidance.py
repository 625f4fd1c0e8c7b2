"""Classifier-free guidance extrapolates from the unconditional to the conditional prediction in one forward pass."""

import pytest
import torch

from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup
from rheostat.models.modeling import initial
from tests.support.demos import demo_part

PROMPTS = ("a red circle", "blue")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy")
    policy = demo_part("paint/scratch_diffusion:ScratchDiffusionPolicy")(layers=1, heads=2, head_size=8)
    initial.write_policy(policy, directory, texts=PROMPTS, seed=0)
    return directory


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_guided_predictions_extrapolate_those_with_and_without_a_prompt(directory, guidance):
    model = load_denoiser(directory).double()  # float32 rounds batches of one and two differently
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    guided, plain = (
        GenerationSetup.load(directory, DenoisingConfig(**options, text_tokens=1), FrozenParts(device="cpu"))
        for options in ({"guidance": guidance}, {})
    )
    states_ND = torch.randn(2, 3 * guided.shape[1] * guided.shape[2], generator=torch.Generator().manual_seed(1))
    steps_N, prompts = (
        torch.tensor([0, 4]),
        guided.prompts.select(PROMPTS, range(2)),
    )
    nothing = guided.prompts.select([""], [0, 0])
    with torch.no_grad():
        guided_ND = guided.predict(model, states_ND, steps_N, prompts, guided.encode_empty_prompt(2, model))
        assert len(calls) == 1
        with_ND, without_ND = (plain.predict(model, states_ND, steps_N, each, None) for each in (prompts, nothing))
    assert (with_ND - without_ND).abs().max() > 0.01
    torch.testing.assert_close(guided_ND, with_ND * guidance + without_ND * (1 - guidance), rtol=1e-4, atol=1e-5)
