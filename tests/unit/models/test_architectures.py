"""Architectures that are trained or refused, and settings of imported models: pad tokens, tied heads and adapters."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    ModernBertDecoderConfig,
)

from rheostat.infra.errors import BadInput
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.policy import DirectoryPolicy
from rheostat.models.engines.requests import context_of
from rheostat.models.inspection.directory import inspect_directory, inspect_import
from rheostat.models.modeling.adapters import adapted_layers
from rheostat.models.modeling.directory import copy_policy
from rheostat.models.modeling.initial import write_import
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.merging import load_merged
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.support import check_trainable, describe_decoding_conflict
from rheostat.models.modeling.trunk import find_trunk
from rheostat.models.text.tokenizer import find_chosen_pad_token, load_tokenizer
from tests.support.families import SHAPE, batch, compute_results
from tests.support.model_families import write_family
from tests.support.policies import small_tokenizer, write_policy

SMALL = {name: size for name, size in SHAPE.items() if name != "num_hidden_layers"} | {"bos_token_id": None}
LLAMA4 = Llama4TextConfig(**SMALL, num_hidden_layers=2, intermediate_size_mlp=32, num_local_experts=2)
MINIMAX = MiniMaxConfig(
    **SMALL, num_hidden_layers=2, num_local_experts=2, layer_types=["linear_attention", "full_attention"], block_size=16
)
MAMBA = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)
MODERNBERT = ModernBertDecoderConfig(
    **SMALL | {"bos_token_id": 1}, num_hidden_layers=2, cls_token_id=1, sep_token_id=1, eos_token_id=1
)


def meta_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def test_llama_4_whose_prefix_names_no_part_is_trained_through_its_decoder():
    model = Llama4ForCausalLM(LLAMA4).float().eval()
    assert find_trunk(model) is model.model
    read = batch()
    found_N, gradients = compute_results(TokenLogprobs(model, temperature=1.0), read, shares=False)
    logits_BTV = model(input_ids=torch.from_numpy(read.tokens_BT), use_cache=False).logits
    logprobs_NV = logits_BTV.flatten(0, 1)[torch.from_numpy(read.positions_N)].log_softmax(-1)
    expected_N = logprobs_NV.gather(1, torch.from_numpy(read.targets_N)[:, None]).squeeze(1)
    torch.testing.assert_close(found_N, expected_N.detach(), rtol=0, atol=2e-6)
    assert any("experts" in name for name in gradients)


def test_layers_between_the_hidden_states_and_the_head_are_refused():
    with pytest.raises(BadInput, match=r"policy p: ModernBertDecoder.*: lm_head\.dense changes the last hidden states"):
        check_trainable(meta_model(MODERNBERT), source="policy p")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SHAPE), ""),
        (LLAMA4, ""),
        (MINIMAX, "MiniMaxCache, contains states that do not belong to a layer"),
        (MAMBA, "past_key_values"),
    ],
    ids=lambda each: getattr(each, "model_type", None),
)
def test_models_whose_cache_cannot_be_reordered_are_refused_by_the_own_engine(config, reason):
    model = meta_model(config)
    check_trainable(model, source="policy p")
    conflict = describe_decoding_conflict(model)
    assert reason in conflict if reason else not conflict


def test_adapters_leave_out_the_layers_that_peft_cannot_adapt_in_state_space_models():
    layers = adapted_layers(meta_model(MAMBA), LoraConfig())
    assert {name.rpartition(".")[2] for name in layers} == {"in_proj", "x_proj", "dt_proj"}


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ([], "<|eos|>"),
        (["<|reserved_0|>"], "<|reserved_0|>"),
        (["<|reserved_0|>", "<|right_pad|>"], "<|right_pad|>"),
        (["<|image_pad|>", "<|vision_pad|>"], "<|eos|>"),
        (["<|turn|>"], "<|eos|>"),
    ],
)
def test_a_tokenizer_without_pad_token_pads_with_an_unused_token_or_with_eos(special, expected, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_policy(source)
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace("<|pad|>", "<|other|>"))
    tokenizer = load_tokenizer(source)
    assert tokenizer.pad_token == expected
    assert find_chosen_pad_token(tokenizer) == tokenizer.convert_tokens_to_ids(expected)
    target.mkdir()
    copy_policy(source, target)
    assert find_chosen_pad_token(load_tokenizer(target)) is None
    assert load_tokenizer(target).pad_token == expected


def test_the_context_of_a_policy_without_one_is_stored_in_the_copy(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_family("bloom", source)
    target.mkdir()
    policy = DirectoryPolicy(path=source, context=512)
    assert inspect_import(policy, ()).shape.context == 512
    write_import(policy, target, texts=(), seed=0)
    assert context_of(target) == 512
    assert inspect_directory(target, is_trained=True).shape.context == 512
    assert inspect_import(DirectoryPolicy(path=target, context=512), ()).shape.context == 512


def test_the_context_of_mpt_is_read_under_the_name_that_its_configuration_has(tmp_path):
    write_family("mpt", tmp_path / "policy")
    assert inspect_directory(tmp_path / "policy", is_trained=True).shape.context == 512


@pytest.mark.parametrize("differs", [True, False])
def test_a_tied_policy_with_a_separate_head_is_copied_as_untied(differs, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_policy(source)
    weights = load_file(source / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embeddings + 1 if differs else embeddings.clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    target.mkdir()
    copy_policy(source, target)
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is not differs
    head = load_policy(target).get_output_embeddings().weight
    assert torch.equal(head, weights["lm_head.weight"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"0\.self_attn\.v_proj": 5}},
        {"use_rslora": True, "rank_pattern": {"v_proj": 6}},
    ],
)
def test_an_adapter_with_patterns_or_rslora_is_merged_as_peft_merges(settings, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_policy(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=4, lora_alpha=7, target_modules=["q_proj", "v_proj"], **settings)
    adapted = peft.get_peft_model(model, lora)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(adapter)
    expected = adapted.merge_and_unload().state_dict()
    for name, weight in load_merged(base, adapter).state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
