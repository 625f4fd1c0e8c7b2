"""Estimates of the weights, memory and FLOPs of a denoiser against measurements."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import DiffusionPolicy
from rheostat.models.denoising.families import CLIP_TOKENS, select_conditions, zero_condition
from rheostat.models.denoising.pipeline import load_denoiser, read_pipeline
from rheostat.models.denoising.policy import inspect_diffusion
from rheostat.models.inspection.directory import inspect_policy
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes
from rheostat.models.modeling import initial
from rheostat.models.modeling.checkpointing import checkpoint_denoiser
from tests.support.demos import demo_part
from tests.support.processes import preload

preload(__name__)

LAYERS = {
    "JointTransformerBlock",
    "FluxTransformerBlock",
    "FluxSingleTransformerBlock",
    "QwenImageTransformerBlock",
    "BasicTransformerBlock",
    "ResnetBlock2D",
}
"""Classes of layers that can be recomputed."""
TEXT = {
    "sd3": CLIP_TOKENS + 256,
    "flux": 512,
    "schnell": 512,
    "qwen": 512,
    "sd1": CLIP_TOKENS,
    "sdxl": CLIP_TOKENS,
}


class Kept:
    """Record the storages that autograd keeps of forward passes."""

    def __init__(self):
        self.storages = {}

    def keep(self, tensor):
        self.storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def numbers(self):
        return sum(each.untyped_storage().nbytes() // each.element_size() for each in self.storages.values())

    def run_pass(self, model, states, text, family, *, rows):
        """Run a forward pass of a number of states with a number of text tokens."""
        conditions = select_conditions([zero_condition(model.config, text)], [0] * rows)
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            family.predict(model, torch.randn(rows, *states), torch.full((rows,), 500.0), conditions, guidance=1.0)


def kept_by(model, states, text, family):
    """Return the numbers that autograd keeps for one more state, and the products that a state takes."""
    counts, products = [], 0
    for rows in (2, 3):
        kept = Kept()
        with FlopCounterMode(display=False) as counter:
            kept.run_pass(model, states, text, family, rows=rows)
        counts.append(kept.numbers())
        products = counter.get_total_flops() / 2 / rows
    return counts[1] - counts[0], products


def layer_numbers(model, states, text, family):
    """Return the numbers that autograd keeps for a state in each layer."""
    kept, counts, rows = Kept(), [], 3
    for layer in model.modules():
        if type(layer).__name__ in LAYERS:
            layer.register_forward_pre_hook(lambda *_: counts.append(-kept.numbers() / rows))
            layer.register_forward_hook(lambda *_: counts.append(counts.pop() + kept.numbers() / rows))
    for parameter in model.parameters():
        kept.keep(parameter)
    kept.run_pass(model, states, text, family, rows=rows)
    return counts


def test_estimates_of_a_forward_pass_equal_measurements(directory, family):
    outline = inspect_diffusion(DiffusionPolicy(path=str(directory)), ()).outline
    model, found = load_denoiser(directory), read_pipeline(directory).family
    side = found.side(model.config)
    states, tokens = (found.channels(model.config), side, side), found.tokens(model.config, side)
    layers = layer_numbers(load_denoiser(directory), states, TEXT[family], found)
    kept, products = kept_by(model, states, TEXT[family], found)
    assert outline.parameters == sum(each.numel() for each in model.parameters())
    assert outline.kept_numbers * outline.blocks * tokens == pytest.approx(kept, rel=0.02)
    assert outline.matmul_parameters * tokens == pytest.approx(products, rel=0.001)
    guided = outline.guided(5.0)  # Flux alone has guidance as an input, and needs no second pass
    assert guided.kept_numbers == outline.kept_numbers * (1 if family == "flux" else 2)
    assert outline.guided(1.0) == outline
    checkpoint_denoiser(model, is_enabled=True)
    kept, _ = kept_by(model, states, TEXT[family], found)
    update = UpdateConfig(activation_checkpointing=True)
    estimates = microbatch_bytes(update, outline, MicrobatchSizes(7 * tokens), held=0)
    assert estimates["update_activations_bytes"] == pytest.approx(4 * 7 * (kept + max(layers)), rel=0.02)


def test_estimates_of_a_scratch_policy_equal_measurements(tmp_path):
    policy, texts = demo_part("paint/scratch_diffusion:ScratchDiffusionPolicy")(), ["red square left"]
    outline = inspect_policy(policy, texts).outline
    assert initial.write_policy(policy, tmp_path, texts=texts, seed=0) == outline.parameters
    model, found = load_denoiser(tmp_path), read_pipeline(tmp_path).family
    kept, products = kept_by(model, (3, 8, 8), policy.words + 1, found)
    assert outline.kept_numbers * outline.blocks * 16 == pytest.approx(kept, rel=0.02)
    assert outline.matmul_parameters * 16 == pytest.approx(products, rel=0.001)
