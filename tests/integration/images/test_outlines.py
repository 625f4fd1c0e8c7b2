"""What is said of a policy before it is built: weights, and what a pass keeps and computes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.config.policy import DiffusionPolicy, ScratchDiffusionPolicy
from models.denoising.families import CLIP_TOKENS, blank, gather
from models.denoising.pipeline import load_denoiser, read_pipeline
from models.denoising.policy import inspect_diffusion, inspect_scratch_diffusion, write_scratch_diffusion
from tests.support.processes import preload

preload(__name__)

TEXT = {
    "sd3": CLIP_TOKENS + 256,
    "flux": 512,
    "schnell": 512,
    "qwen": 512,
    "sd1": CLIP_TOKENS,
    "sdxl": CLIP_TOKENS,
}


def kept_by(model, states, text, family):
    """Numbers that autograd keeps of a state more in real passes, and products that it takes."""
    counts, products = [], 0
    for rows in (2, 3):
        kept = {}

        def keep(each, kept=kept):
            kept[each.untyped_storage().data_ptr()] = each
            return each

        told = gather([blank(model.config, text)], [0] * rows)
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            family.say(model, torch.randn(rows, *states), torch.full((rows,), 500.0), told, guidance=1.0)
        counts.append(sum(each.untyped_storage().nbytes() // each.element_size() for each in kept.values()))
        products = counter.get_total_flops() / 2 / rows
    return counts[1] - counts[0], products


def test_what_a_pass_keeps_and_computes_is_what_a_real_one_does(directory, family):
    outline = inspect_diffusion(DiffusionPolicy(path=str(directory)), ()).outline
    model, found = load_denoiser(directory), read_pipeline(directory).family
    side = found.side(model.config)
    kept, products = kept_by(model, (found.channels(model.config), side, side), TEXT[family], found)
    tokens = found.tokens(model.config, side)
    model, found = load_denoiser(directory), read_pipeline(directory).family
    side = found.side(model.config)
    kept, products = kept_by(model, (found.channels(model.config), side, side), TEXT[family], found)
    tokens = found.tokens(model.config, side)
    assert outline.parameters == sum(each.numel() for each in model.parameters())
    assert outline.kept_numbers * outline.blocks * tokens == pytest.approx(kept, rel=0.02)
    assert outline.matmul_parameters * tokens == pytest.approx(products, rel=0.001)


def test_a_policy_from_nothing_is_described_as_it_is_built(tmp_path):
    policy, texts = ScratchDiffusionPolicy(), ["red square left"]
    outline = inspect_scratch_diffusion(policy, texts).outline
    assert write_scratch_diffusion(policy, tmp_path, texts=texts, seed=0) == outline.parameters
    model, found = load_denoiser(tmp_path), read_pipeline(tmp_path).family
    kept, products = kept_by(model, (3, 8, 8), policy.words + 1, found)
    assert outline.kept_numbers * outline.blocks * 16 == pytest.approx(kept, rel=0.02)
    assert outline.matmul_parameters * 16 == pytest.approx(products, rel=0.001)
