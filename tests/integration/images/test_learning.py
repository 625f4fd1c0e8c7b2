"""Training of policies of every family on generated images, also with adapters, which diffusers can load."""

import diffusers
import numpy as np
import pytest
import torch

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.objectives import LoraConfig
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.policy import write_merged_pipeline
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs
from rheostat.models.modeling.adapters import load_trainable, save_adapters, trained_parameters
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.versions import ModelVersion
from tests.support.pipelines import (
    build_trainer_inputs,
    config_of,
    generate_pictures,
    generate_with_diffusers,
    pixels,
    samplers_of,
)
from tests.support.processes import preload

preload(__name__)

LORA = LoraConfig(rank=2, alpha=4)
_LAST = "transformer_blocks.1"
SILENT = {
    "sd3": {f"{_LAST}.attn.add_q_proj"},
    "qwen": {f"{_LAST}.attn.{name}" for name in ("add_q_proj", "to_add_out")}
    | {f"{_LAST}.txt_mlp.net.{name}" for name in ("0.proj", "2")},
}
"""Layers whose outputs do not influence the picture: the text stream of the last block."""


def logprobs_of(module, rows, size):
    """Return the trainer's log-probs of each denoising step, in micro-batches of this number of rows."""
    passes = [lay_out(rows[start : start + size]) for start in range(0, len(rows), size)]
    return torch.cat([module(module.prepare_inputs(each, torch.device("cpu"))) for each in passes])


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("learnt", [range(1, 3), None], ids=["window", "all"])
def test_log_probs_of_the_trainer_equal_those_of_the_engine_for_any_micro_batch(directory, learnt):
    model = load_denoiser(directory)
    drawings = [(sampler, 1.0) for sampler in samplers_of(directory)]
    for sampler, guidance in [*drawings, (drawings[0][0], 2.0)]:
        config = config_of(directory, sampler=sampler, guidance=guidance)
        completions = generate_pictures(directory, config, learnt, rows=2)
        rows, gallery = build_trainer_inputs(completions, directory)
        behaviour = torch.tensor([said for each in completions for said in each.logprobs])
        module = StepLogprobs(model, GenerationSetup.load(directory, config, FrozenParts(device="cpu")), gallery)
        for size in (1, 3):
            with torch.no_grad():
                ratios = (logprobs_of(module, rows, size) - behaviour).exp()
            assert len(ratios) == len(rows) * len(completions[0].tokens)
            assert (ratios - 1).abs().max() <= 1e-6


@pytest.mark.thorough
def test_adapters_are_trained_and_generate_the_same_images_after_merging(family, directory, tmp_path):
    config = config_of(directory)
    rows, gallery = build_trainer_inputs(generate_pictures(directory, config, range(2)), directory)
    store = open_store(str(tmp_path / "store"))
    start = ModelVersion(version=0, weights=publish_bundle(store, directory, prefix="policies"))
    model = load_trainable(store, start, load=load_denoiser, lora=LORA)
    module = StepLogprobs(model, GenerationSetup.load(directory, config, FrozenParts(device="cpu")), gallery)
    before = logprobs_of(module, rows, 3)
    optimizer = torch.optim.SGD(trained_parameters(model), lr=1.0)
    for _ in range(2):  # B is 0 at first, so A learns from the second step on
        optimizer.zero_grad()
        logprobs_of(module, rows, 3).sum().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        known = {name: each for name, each in gradients.items() if each is not None}
        assert all(each.isfinite().all() for each in known.values())
        for parameter in trained_parameters(model):
            if parameter.grad is not None:
                parameter.grad = 0.2 * parameter.grad / parameter.grad.norm().clamp(min=1e-12)
        optimizer.step()
    silent = {name.rpartition(".lora_")[0] for name, each in gradients.items() if each is None or not each.any()}
    assert silent == SILENT.get(family, set()), "the others all learn"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_adapters(model, adapter)
    version = ModelVersion(version=1, weights=start.weights, adapter=publish_bundle(store, adapter, prefix="adapters"))
    again = StepLogprobs(load_trainable(store, version, load=load_denoiser, lora=LORA), module.setup, gallery)
    assert torch.equal(logprobs_of(again, rows, 3), logprobs_of(module, rows, 3))
    assert not torch.equal(logprobs_of(module, rows, 3), before)

    (tmp_path / "merged").mkdir()
    write_merged_pipeline(directory, adapter, tmp_path / "merged", dtype=torch.float32)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "merged")
    made = [
        np.stack([pixels(each) for each in generate_pictures(directory, config, range(0), adapter=one)])
        for one in (adapter, None)
    ]
    np.testing.assert_allclose(made[0], generate_with_diffusers(pipe, directory, config, "np"), atol=1 / 255)
    assert np.abs(made[0] - made[1]).max() > 10 / 255, "the adapter does nothing"
