"""Attention by a variable-length kernel gives the log-probs and gradients of padded rows."""

import functools
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig

from rheostat.infra.config import adopt_recorded, read_recorded
from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import FLASH, KERNELS, VARLEN, check_attention
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.modeling import shared_prompts
from rheostat.models.modeling.adapters import outline
from rheostat.models.modeling.flash import (
    KernelOptions,
    KernelRows,
    attend_rows,
    attentions_of,
    flash_kernel,
    repeat_tokens,
)
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.shared_prompts import set_attention, use_attention_kernel
from rheostat.models.modeling.varlen import adapt_varlen, require_varlen, supports_varlen, varlen_kernel
from rheostat.models.records.model_input import ModelInput
from tests.support.families import (
    FAMILIES,
    SHAPE,
    add_test_adapters,
    assert_same_results,
    batch,
    build,
    compute_results,
)
from tests.support.flash_kernels import MODES, reference_kernel, reference_varlen, reference_varlen_without_gqa

LATENT = SHAPE | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
KEPT = ("llama", "qwen3", "mixture", "window", "windows and whole", "phi3", "gpt2")
REFERENCES = {
    "flash": reference_kernel,
    "varlen": adapt_varlen(reference_varlen),
    "varlen of PyTorch 2.11": adapt_varlen(reference_varlen_without_gqa),
}
KERNEL_FAMILIES = {name: FAMILIES[name] for name in KEPT} | {
    "soft caps": Gemma2Config(**SHAPE, sliding_window=5, attn_logit_softcapping=1e-3),
    "latent": DeepseekV3Config(**LATENT),
}


GPU_FAMILIES = {name: each for name, each in KERNEL_FAMILIES.items() if name in KEPT and name != "mixture"} | {
    "soft caps": FAMILIES["gemma2"],
    "latent": DeepseekV3Config(**LATENT | {"first_k_dense_replace": SHAPE["num_hidden_layers"]}),
}
"""Families without experts, whose choice may differ after rounding to bfloat16."""
WIDE = {"wide heads": LlamaConfig(**SHAPE | {"head_dim": 264})}


def build_module(config, *, adapters=False, reference=None):
    model = build(config)
    if adapters:
        add_test_adapters(model)
    module = TokenLogprobs(model, temperature=0.8)
    if reference is not None:
        module.shares_prompts = use_attention_kernel(REFERENCES[reference], module.model, name="reference")
        assert module.shares_prompts
    return module


@pytest.mark.parametrize(
    ("family", "shares", "adapters", "reference"),
    [
        *((family, shares, False, "flash") for family in KERNEL_FAMILIES for shares in (True, False)),
        *((family, True, False, "varlen") for family in KERNEL_FAMILIES if family != "soft caps"),
        *(("llama", shares, True, "varlen") for shares in (True, False)),
        *((family, True, False, "varlen of PyTorch 2.11") for family in ("llama", "window")),
        ("llama", True, True, "flash"),
    ],
)
def test_one_kernel_call_over_rows_of_different_lengths_gives_the_results_of_padded_rows(
    family, shares, adapters, reference
):
    padded, kernel = (
        build_module(KERNEL_FAMILIES[family], adapters=adapters, reference=each) for each in (None, reference)
    )
    assert_same_results(compute_results(kernel, batch(), shares=shares), compute_results(padded, batch(), shares=False))


@pytest.mark.parametrize(("size", "causal", "window"), [(20, True, (-1, -1)), (8, True, (3, 0)), (12, False, (-1, -1))])
def test_varlen_gives_the_output_of_flash_kernels_for_head_sizes_that_are_no_multiple_of_8(size, causal, window):
    torch.manual_seed(0)
    query_QHD, key_KHD, value_KHD = (
        torch.randn(tokens, heads, size, requires_grad=True) for tokens, heads in ((9, 4), (14, 2), (14, 2))
    )
    options = {"causal": causal, "window_size": window, "softcap": 0.0, "softmax_scale": None, "deterministic": True}
    lengths = {"cu_seqlens_q": torch.tensor([0, 7, 9]), "cu_seqlens_k": torch.tensor([0, 7, 14])}
    options |= {name: each.int() for name, each in lengths.items()} | {"max_seqlen_q": 7, "max_seqlen_k": 7}
    results = []
    for kernel in REFERENCES.values():
        output_QHD = kernel(query_QHD, key_KHD, value_KHD, **options)
        gradients = torch.autograd.grad(output_QHD.square().sum(), (query_QHD, key_KHD, value_KHD))
        results.append((output_QHD, *gradients))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_the_installed_varlen_accepts_the_arguments_of_kernels():
    query_QHD, key_KHD, value_KHD = (
        torch.empty(tokens, heads, 12, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for tokens, heads in ((9, 4), (14, 2), (14, 2))
    )
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    rows = KernelRows(ends, ends, max_queries=7, max_keys=7)
    options = KernelOptions(causal=True, scaling=None, window=(3, 0), softcap=0.0)
    output_QHD = attend_rows(varlen_kernel(), (query_QHD, key_KHD, value_KHD), rows, options)
    output_QHD.sum().backward()
    assert output_QHD.shape == query_QHD.grad.shape == (9, 4, 12)
    assert key_KHD.grad.shape == value_KHD.grad.shape == (14, 2, 12)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_only_the_backward_pass_of_varlen_uses_the_deterministic_mode(is_checkpointed):
    module = build_module(FAMILIES["llama"], reference="varlen")
    module.checkpoint_layers(is_enabled=is_checkpointed)
    modes_elsewhere = []
    for layer in module.model.model.layers:
        layer.mlp.register_full_backward_hook(
            lambda *_: modes_elsewhere.append(torch.are_deterministic_algorithms_enabled())
        )
    MODES.clear()
    compute_results(module, batch(), shares=True)
    assert MODES == [True] * 3
    assert modes_elsewhere == [False] * 3 and not torch.are_deterministic_algorithms_enabled()


def test_gradients_of_a_repeated_token_are_added_in_float32():
    states_LHD = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient_KHD = torch.tensor([256.0, *(1.0,) * 64, 3.0], dtype=torch.bfloat16)[:, None, None]
    repeat_tokens(states_LHD, torch.tensor([0] * 65 + [1])).backward(gradient_KHD)
    assert states_LHD.grad.flatten().tolist() == [320, 3]  # in bfloat16, 256 + 1 is 256


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
        ("llama", ("sdpa", "eager", *KERNELS)),
        ("wide heads", ("sdpa", "eager")),
        ("gemma2", ("eager", *FLASH)),  # sdpa and varlen do not support soft caps
        ("sinks", ("eager",)),  # the kernels of the packages do not support sinks
    ],
)
def test_the_attention_implementations_of_a_model_are_listed(family, implementations):
    assert attentions_of(build((FAMILIES | WIDE)[family])) == implementations


def test_attention_that_a_model_does_not_support_is_refused():
    gemma, shape = outline(build(FAMILIES["gemma2"])), DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 8, 128).shape()
    for attention in ("sdpa", VARLEN):
        with pytest.raises(BadInput, match=rf"'{attention}'.*Gemma2ForCausalLM.*eager, flash_att"):
            check_attention(attention, gemma, shape)
        with pytest.raises(BadInput, match=rf"'{attention}'.*Gemma2ForCausalLM"):
            set_attention(build(FAMILIES["gemma2"]), attention)
    for attention in (None, "auto", "flash_attention_2"):
        check_attention(attention, gemma, shape)
    wide = DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 288, 128)
    for attention in KERNELS:
        with pytest.raises(BadInput, match=rf"'{attention}'.*256.* 288.*'sdpa'"):
            check_attention(attention, wide.outline(), wide.shape())
        with pytest.raises(BadInput, match=rf"'{attention}'.*reads images.*'sdpa'"):
            check_attention(attention, outline(build(FAMILIES["llama"])), replace(shape, vision_model_type="gemma3"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU may support the kernel")
def test_varlen_without_a_gpu_is_refused_when_the_model_is_loaded():
    with pytest.raises(BadInput, match=r"'varlen'.*no GPU.*'sdpa'"):
        set_attention(build(FAMILIES["llama"]), VARLEN)


AUTO = {
    "llama": "sdpa_or_varlen_of_shared_prompts",
    "window": "sdpa_or_varlen_of_shared_prompts",
    "wide heads": "sdpa_of_shared_prompts",
    "gemma2": "eager_of_shared_prompts",
    "sinks": "eager_of_shared_prompts",
}


@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("shares", [True, False])
def test_automatic_attention_gives_the_bits_of_the_default_attention_on_a_cpu(family, shares):
    default, auto = (
        TokenLogprobs(build((FAMILIES | WIDE)[family]), temperature=0.8, attention=attention)
        for attention in (None, "auto")
    )
    assert auto.model.config._attn_implementation == AUTO[family]
    assert auto.shares_prompts and default.shares_prompts
    expected, actual = (compute_results(module, batch(), shares=shares) for module in (default, auto))
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][name], each) for name, each in expected[1].items())


@pytest.mark.parametrize("family", ["llama", "window", "windows and whole"])
def test_automatic_attention_uses_varlen_for_shared_prompts_where_device_and_dtype_allow_it(family, monkeypatch):
    calls = []

    @functools.wraps(reference_varlen)
    def record(query, *arguments, **options):
        calls.append(len(query))
        return reference_varlen(query, *arguments, **options)

    monkeypatch.setattr(shared_prompts, "supports_varlen", lambda device, dtype: dtype == torch.float32)
    monkeypatch.setattr(shared_prompts, "varlen_kernel", lambda: adapt_varlen(record))
    auto = TokenLogprobs(build(FAMILIES[family]), temperature=0.8, attention="auto")
    expected = compute_results(build_module(FAMILIES[family]), batch(), shares=False)
    assert_same_results(compute_results(auto, batch(), shares=True), expected)
    assert calls == [len(batch().shared.tokens_L)] * 3
    assert_same_results(compute_results(auto, batch(), shares=False), expected)
    compute_results(auto.double(), batch(), shares=True)
    assert len(calls) == 3


def test_devices_and_data_types_decide_whether_varlen_can_be_used():
    assert not supports_varlen(torch.device("cpu"), torch.bfloat16)
    assert not supports_varlen(torch.device("cuda"), torch.float32)


def test_recorded_runs_keep_the_default_attention_of_the_model():
    recorded = read_recorded(UpdateConfig, {}), adopt_recorded(UpdateConfig(), {"minibatches": 4})
    assert {each.attention for each in recorded} == {None}
    assert "attention" not in recorded[0].as_recorded()
    assert UpdateConfig().attention == UpdateConfig().as_recorded()["attention"] == "auto"
    assert adopt_recorded(UpdateConfig(), UpdateConfig().as_recorded()).attention == "auto"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "attention", "adapters"),
    [
        *((family, name, False) for family in ("llama", "qwen3", "soft caps", "window") for name in FLASH),
        *((family, VARLEN, False) for family in GPU_FAMILIES if family != "soft caps"),
        *(("llama", name, True) for name in (VARLEN, *FLASH)),
    ],
)
def test_a_kernel_is_as_exact_as_padded_rows_and_bit_identical_when_repeated(family, attention, adapters):
    assert torch.cuda.is_available(), "expected a CUDA GPU"
    try:
        _ = FLASH.get(attention) and flash_kernel(attention)
    except BadInput as error:  # the packages are optional; PyTorch's own kernel must work on every supported GPU
        pytest.skip(str(error))
    config, results = GPU_FAMILIES[family], {}
    for name, shares in ((None, False), (attention, True), (attention, False)):
        model = build(config)
        if adapters:
            add_test_adapters(model)
        module = TokenLogprobs(model.bfloat16(), temperature=0.8, attention=name).cuda()
        logprobs_N, gradients = results[name, shares] = compute_results(module, batch(), shares=shares, device="cuda")
        again_N, again = compute_results(module, batch(), shares=shares, device="cuda")
        assert torch.equal(again_N, logprobs_N)
        assert name is None or all(torch.equal(again[key], each) for key, each in gradients.items())
    exact = compute_results(build_module(config, adapters=adapters), batch(), shares=False)
    errors = {key: measure_errors(result, exact) for key, result in results.items()}
    for shares in (True, False):
        for kernel, padded in zip(errors[attention, shares], errors[None, False], strict=True):
            assert kernel < 2 * padded + 1e-3, errors


@pytest.mark.gpu
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("family", ["llama", "window", "windows and whole", "latent"])
def test_automatic_attention_on_a_gpu_uses_varlen_for_shared_prompts(family, is_checkpointed, monkeypatch):
    assert torch.cuda.is_available(), "expected a CUDA GPU"
    kernel, results, calls = require_varlen(), {}, []
    monkeypatch.setattr(shared_prompts, "varlen_kernel", lambda: calls.append("auto") or kernel)
    for attention in ("auto", VARLEN):
        model = build(GPU_FAMILIES[family]).bfloat16()
        module = TokenLogprobs(model, temperature=0.8, attention=attention).cuda()
        module.checkpoint_layers(is_enabled=is_checkpointed)
        results[attention] = compute_results(module, batch(), shares=True, device="cuda")
    assert torch.equal(results["auto"][0], results[VARLEN][0])
    assert all(torch.equal(results["auto"][1][name], each) for name, each in results[VARLEN][1].items())
    assert len(calls) == SHAPE["num_hidden_layers"] * (2 if is_checkpointed else 1)


@pytest.mark.gpu
def test_automatic_attention_on_a_gpu_gives_the_log_probs_of_sdpa_in_float32():
    assert torch.cuda.is_available(), "expected a CUDA GPU"
    default, auto = (
        TokenLogprobs(build(FAMILIES["window"]), temperature=0.8, attention=attention).cuda()
        for attention in (None, "auto")
    )
    expected, actual = (compute_results(module, batch(), shares=True, device="cuda") for module in (default, auto))
    assert torch.equal(actual[0], expected[0])


def measure_errors(result, exact) -> tuple[float, float]:
    """Return the largest error of the log-probs and the relative error of the gradients against float32."""
    error = sum(float((result[1][name].cpu().float() - each).square().sum()) for name, each in exact[1].items())
    norm = sum(float(each.square().sum()) for each in exact[1].values())
    return float((result[0].cpu() - exact[0]).abs().max()), (error / norm) ** 0.5
