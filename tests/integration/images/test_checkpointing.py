"""Denoiser layers that are recomputed in the backward pass give bitwise equal gradients and keep fewer activations."""

import pytest
import torch

from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.lora import LoraConfig
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs
from rheostat.models.modeling.adapters import add_adapters
from rheostat.models.modeling.layout import lay_out
from tests.support.pipelines import build_trainer_inputs, config_of, generate_pictures
from tests.support.processes import preload
from tests.support.recomputing import compute_gradients

preload(__name__)


@pytest.mark.parametrize("adapters", [False, True])
def test_recomputed_layers_have_bitwise_equal_gradients(directory, adapters):
    config = config_of(directory, guidance=2.0)
    rows, gallery = build_trainer_inputs(generate_pictures(directory, config, range(2)), directory)
    setup, found = GenerationSetup.load(directory, config, FrozenParts(device="cpu")), []
    for again in (False, True):
        model = load_denoiser(directory)
        if adapters:
            add_adapters(model, LoraConfig(rank=2), base=BundleRef(key="policies/base", digest="base", bytes=0))
        module = StepLogprobs(model, setup, gallery)
        module.checkpoint_layers(is_enabled=again)
        read = module.prepare_inputs(lay_out(rows), torch.device("cpu"))
        found.append(compute_gradients(module, read))
        assert not model.training, "nothing is dropped out"
        with torch.no_grad():
            assert torch.equal(module(read), found[-1][0])
    (expected_N, gradients, much), (found_N, others, little) = found
    assert torch.equal(found_N, expected_N)
    assert any(gradient is not None and gradient.any() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (others[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(others[name], gradient), name
    assert little < 0.25 * much
