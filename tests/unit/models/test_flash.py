"""Attention by a variable-length kernel gives the log-probs and gradients of padded rows."""

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config

from infra.errors import BadInput
from models.config.attention import FLASH, check_attention
from models.inspection.plain import DecoderSizes
from models.modeling.adapters import outline
from models.modeling.flash import attentions_of, flash_kernel
from models.modeling.layout import lay_out
from models.modeling.logprobs import TokenLogprobs
from models.modeling.shared_prompts import set_attention, use_attention_kernel
from models.records.model_input import ModelInput
from tests.support.families import (
    FAMILIES,
    SHAPE,
    add_test_adapters,
    assert_same_results,
    batch,
    build,
    compute_results,
)
from tests.support.flash_kernels import reference_kernel

LATENT = SHAPE | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
KEPT = ("llama", "qwen3", "mixture", "window", "windows and whole", "phi3", "gpt2")
KERNEL_FAMILIES = {name: FAMILIES[name] for name in KEPT} | {
    "soft caps": Gemma2Config(**SHAPE, sliding_window=5, attn_logit_softcapping=1e-3),
    "latent": DeepseekV3Config(**LATENT),
}


def build_module(config, *, adapters=False, is_reference=False):
    model = build(config)
    if adapters:
        add_test_adapters(model)
    module = TokenLogprobs(model, temperature=0.8)
    if is_reference:
        module.shares_prompts = use_attention_kernel(reference_kernel, module.model, name="reference")
        assert module.shares_prompts
    return module


@pytest.mark.parametrize(
    ("family", "shares", "adapters"),
    [*((family, shares, False) for family in KERNEL_FAMILIES for shares in (True, False)), ("llama", True, True)],
)
def test_one_kernel_call_over_rows_of_different_lengths_gives_the_results_of_padded_rows(family, shares, adapters):
    padded, kernel = (
        build_module(KERNEL_FAMILIES[family], adapters=adapters, is_reference=is_reference)
        for is_reference in (False, True)
    )
    assert_same_results(compute_results(kernel, batch(), shares=shares), compute_results(padded, batch(), shares=False))


def test_shared_prompts_have_queries_once_and_rows_without_own_tokens_have_none():
    prompt, other = ModelInput.from_prompt([5, 6, 7, 8]), ModelInput.from_prompt([9, 10])
    rows = [
        prompt.append_completion([11]),
        prompt,
        other.append_completion([12, 13]),
        prompt.append_completion([14, 15]),
        other,
    ]
    shared = lay_out(rows).shared
    assert shared.queries_R.tolist() == [5, 4, 2]
    assert shared.keys_R.tolist() == [5, 4, 6]
    assert shared.tokens_L.tolist() == [5, 6, 7, 8, 11, 9, 10, 12, 13, 14, 15]
    assert shared.tokens_L[shared.keys_K].tolist() == [5, 6, 7, 8, 11, 9, 10, 12, 13, 5, 6, 7, 8, 14, 15]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_configured_eager_attention_is_used(family):
    eager = TokenLogprobs(build(FAMILIES[family]), temperature=0.8, attention="eager")
    assert eager.model.config._attn_implementation == "eager_of_shared_prompts"
    assert_same_results(
        compute_results(eager, batch(), shares=True),
        compute_results(build_module(FAMILIES[family]), batch(), shares=True),
    )


@pytest.mark.parametrize(
    ("family", "implementations"),
    [
        ("llama", ("sdpa", "eager", *FLASH)),
        ("gemma2", ("eager", *FLASH)),  # sdpa does not support soft caps
        ("sinks", ("eager",)),  # the kernels of the packages do not support sinks
    ],
)
def test_the_attention_implementations_of_a_model_class_are_listed(family, implementations):
    assert attentions_of(build(FAMILIES[family])) == implementations


def test_attention_that_a_model_does_not_support_is_refused():
    gemma, shape = outline(build(FAMILIES["gemma2"])), DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 8, 128).shape()
    with pytest.raises(BadInput, match=r"'sdpa'.*Gemma2ForCausalLM.*eager, flash_att"):
        check_attention("sdpa", gemma, shape)
    with pytest.raises(BadInput, match=r"'sdpa'.*Gemma2ForCausalLM"):
        set_attention(build(FAMILIES["gemma2"]), "sdpa")
    check_attention("flash_attention_2", gemma, shape)
    wide = DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 288, 128)
    with pytest.raises(BadInput, match=r"256.* 288.*'sdpa'"):
        check_attention("flash_attention_2", wide.outline(), wide.shape())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", FLASH)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "window"])
def test_the_flash_kernel_is_as_exact_as_padded_rows_and_bit_identical_when_repeated(family, attention):
    assert torch.cuda.is_available(), "expected a CUDA GPU"
    try:
        flash_kernel(attention)
    except BadInput as error:
        pytest.skip(str(error))
    results = {}
    for name, shares in ((None, False), (attention, True), (attention, False)):
        module = TokenLogprobs(build(FAMILIES[family]).bfloat16(), temperature=0.8, attention=name).cuda()
        logprobs_N, gradients = results[name, shares] = compute_results(module, batch(), shares=shares, device="cuda")
        again_N, again = compute_results(module, batch(), shares=shares, device="cuda")
        assert torch.equal(again_N, logprobs_N)
        assert name is None or all(torch.equal(again[key], each) for key, each in gradients.items())
    exact = compute_results(build_module(FAMILIES[family]), batch(), shares=False)
    errors = {key: measure_errors(result, exact) for key, result in results.items()}
    for shares in (True, False):
        for kernel, padded in zip(errors[attention, shares], errors[None, False], strict=True):
            assert kernel < 2 * padded + 1e-3, errors


def measure_errors(result, exact) -> tuple[float, float]:
    """Return the largest error of the log-probs and the relative error of the gradients against float32."""
    error = sum(float((result[1][name].cpu().float() - each).square().sum()) for name, each in exact[1].items())
    norm = sum(float(each.square().sum()) for each in exact[1].values())
    return float((result[0].cpu() - exact[0]).abs().max()), (error / norm) ** 0.5
