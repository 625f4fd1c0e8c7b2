"""Models under training are loaded in the dtype of the update, with the bits of a cast after a load in float32."""

import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rheostat.infra.errors import BadInput
from rheostat.models.modeling.adapters import outline
from rheostat.models.modeling.directory import meta_policy
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.parameter_storage import ParameterStorage
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.trials import float32_trials, trial_weights
from tests.support.model_families import write_family

STORAGE = ParameterStorage(torch.bfloat16, torch.device("cpu"))
FAMILIES_WITH = {
    "tied weights": "qwen3",
    "experts that are merged": "qwen3_moe",
    "a scale in a buffer": "gemma3_text",
    "a stored buffer": "deepseek_v3",
    "convolution layers": "gpt2",
}


@pytest.mark.parametrize("family", FAMILIES_WITH.values(), ids=list(FAMILIES_WITH))
def test_parameters_have_the_bits_of_a_later_cast_and_buffers_those_of_a_load_in_float32(family, tmp_path):
    write_family(family, tmp_path)
    whole, model = load_policy(tmp_path), load_policy(tmp_path, storage=STORAGE)
    expected, found = dict(whole.named_parameters()), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected[name].bfloat16()), name
    buffers = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name
    assert model.config.dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "bloom", "granite"])
def test_trials_in_float32_find_the_same_for_both_dtypes(family, tmp_path):
    write_family(family, tmp_path)
    whole = TokenLogprobs(load_policy(tmp_path), temperature=1.0)
    with float32_trials():
        module = TokenLogprobs(load_policy(tmp_path, storage=STORAGE), temperature=1.0)
    assert module.head.settings == whole.head.settings
    assert module.shares_prompts == whole.shares_prompts
    assert module.head.weight.dtype == torch.bfloat16 and module.head.weight is module.model.lm_head.weight


def test_a_trial_reads_float32_and_leaves_the_parameters_as_they_are(tmp_path):
    write_family("qwen3", tmp_path)
    model = load_policy(tmp_path, storage=STORAGE)
    before = dict(model.named_parameters())
    with float32_trials(), trial_weights(model):
        assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.float32
    with trial_weights(model):
        assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_model_whose_modules_hide_their_weights_is_loaded_in_float32_with_a_warning(tmp_path, monkeypatch, caplog):
    forward = LlamaRMSNorm.forward

    def forward_with_stored_weight(self, states):
        weight = dict.__getitem__(self._parameters, "weight")
        return (forward(self, states) * weight).to(weight.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward_with_stored_weight)
    write_family("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load_policy(tmp_path, storage=STORAGE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert f"policy {tmp_path} is loaded as a whole in float32" in caplog.text
    assert not outline(meta_policy(tmp_path)).loads_directly  # so the plan has a note before the run
    monkeypatch.undo()
    assert outline(meta_policy(tmp_path)).loads_directly


def test_a_model_whose_parameters_cannot_be_sharded_is_refused(tmp_path):
    def fail(parameter):
        raise ValueError("its class reads the size of a weight")

    write_family("llama", tmp_path)
    storage = replace(STORAGE, shard=fail)
    with pytest.raises(BadInput, match=r"as shards: its class reads .* a weight\. Set update\.zero_stage = 2$"):
        load_policy(tmp_path, storage=storage)


def test_a_missing_weight_is_refused_as_in_float32(tmp_path):
    write_family("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"does not contain the weight model\.norm\.weight of size 32"):
        load_policy(tmp_path, storage=STORAGE)
