"""Policies of every family generate the images of diffusers' pipelines.

Shapes: N pictures, D numbers of a state.
"""

import numpy as np
import pytest
import torch

from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.samplers import deterministic
from rheostat.models.denoising.steps import GenerationSetup
from tests.support.pipelines import (
    PROMPTS,
    SEEDS,
    config_of,
    generate_pictures,
    generate_with_diffusers,
    noise_of,
    pixels,
    requests,
)
from tests.support.processes import preload

preload(__name__)


def ours(directory, config, prompts=PROMPTS, seeds=SEEDS, dtype=torch.float32):
    """Return the final states of the pictures of the prompts, generated in one batch without noise."""
    setup, model = (
        GenerationSetup.load(directory, config, FrozenParts(device="cpu")),
        load_denoiser(directory, dtype=dtype),
    )
    condition = setup.encode_prompts(
        [each.inputs[0] for each in requests(directory, prompts, seeds)], range(len(prompts))
    )
    empty_condition = setup.encode_empty_prompt(len(prompts), model)
    states_ND = torch.cat([noise_of(seed, directory, config).flatten(1) for seed in seeds])
    for step in range(config.steps):
        steps_N = torch.full((len(prompts),), step)
        with torch.no_grad():
            prediction_ND = setup.predict(model, states_ND, steps_N, condition, empty_condition)
        states_ND = deterministic(states_ND, prediction_ND, steps_N, setup.schedule)
    return states_ND.view(-1, *setup.shape)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_generated_without_noise_equal_those_of_the_diffusers_pipeline(pipe, directory, family, guidance):
    if guidance != 1 and family == "qwen":
        pytest.skip("its pipeline scales what is guided back to the norm of what is not, token by token")
    config = config_of(directory, guidance=guidance)
    latents, found = generate_with_diffusers(pipe, directory, config, "latent"), ours(directory, config)
    if hasattr(pipe, "_pack_latents"):
        found = pipe._pack_latents(found, *found.shape)
    wanted = generate_with_diffusers(pipe, directory, config, "np")
    made = np.stack([pixels(each) for each in generate_pictures(directory, config, range(0))])
    np.testing.assert_allclose(found, latents, atol=1e-5)
    np.testing.assert_allclose(made, wanted, atol=1 / 255)


def test_an_image_does_not_depend_on_the_rest_of_its_batch(directory):
    config = config_of(directory)
    together = ours(directory, config)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = ours(directory, config, [prompt], [seed])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)


def test_a_denoiser_in_bfloat16_gives_nearly_the_same_states(directory):
    config = config_of(directory)
    wide, narrow = (ours(directory, config, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.float32)
    assert 0 < (wide - narrow).abs().mean() < 0.01 * wide.std()
