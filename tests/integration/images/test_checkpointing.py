"""Layers of denoisers that are computed again in the backward pass teach the same to the bit, and keep less."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from infra.store.bundles import BundleRef
from models.config.lora import LoraConfig
from models.denoising.pipeline import FrozenParts, load_denoiser
from models.denoising.steps import Drawing, StepLogprobs
from models.modeling.adapters import put_adapters
from models.modeling.layout import lay_out
from tests.support.pipelines import config_of, drawn, learnt_from
from tests.support.processes import preload

preload(__name__)


def learnt(module, rows):
    """Log-probs, gradients, and the bytes that were kept from the forward pass to the backward pass."""
    kept, weights = {}, {each.untyped_storage().data_ptr() for each in module.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found_N = module(module.read(lay_out(rows), torch.device("cpu")))
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    (found_N * torch.linspace(-1, 1, len(found_N))).sum().backward()
    return found_N.detach(), {name: each.grad for name, each in module.named_parameters()}, held


@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_of_layers_that_are_computed_again_are_the_same_bits(directory, adapters):
    config = config_of(directory, guidance=2.0)
    rows, gallery = learnt_from(drawn(directory, config, range(2)), directory)
    drawing, found = Drawing.of(directory, config, FrozenParts(device="cpu")), []
    for again in (False, True):
        model = load_denoiser(directory)
        if adapters:
            put_adapters(model, LoraConfig(rank=2), base=BundleRef(key="policies/base", digest="base", bytes=0))
        module = StepLogprobs(model, drawing, gallery)
        module.checkpoint_layers(again=again)
        found.append(learnt(module, rows))
        assert not model.training, "nothing is dropped out"
        with torch.no_grad():
            assert torch.equal(module(module.read(lay_out(rows), torch.device("cpu"))), found[-1][0])
    (expected_N, gradients, much), (found_N, others, little) = found
    assert torch.equal(found_N, expected_N)
    assert any(gradient is not None and gradient.any() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (others[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(others[name], gradient), name
    assert little < 0.25 * much
