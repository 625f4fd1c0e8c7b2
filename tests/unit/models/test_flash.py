"""Attention by a kernel for rows of many lengths says what padded rows say, and teaches the same."""

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config

from infra.errors import BadInput
from infra.store.bundles import BundleRef
from models.config.attention import FLASH, check_attention
from models.config.lora import LoraConfig
from models.inspection.directory import DecoderSizes
from models.modeling.adapters import outline, put_adapters
from models.modeling.flash import attentions_of, flash_kernel
from models.modeling.layout import lay_out
from models.modeling.logprobs import TokenLogprobs
from models.modeling.shared_prompts import attend, attend_by
from models.records.model_input import ModelInput
from tests.support.families import FAMILIES, SHAPE, ask, batch, build

LATENT = SHAPE | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
KEPT = ("llama", "qwen3", "mixture", "window", "windows and whole", "phi3", "gpt2")
KERNEL_FAMILIES = {name: FAMILIES[name] for name in KEPT} | {
    "soft caps": Gemma2Config(**SHAPE, sliding_window=5, attn_logit_softcapping=1e-3),
    "latent": DeepseekV3Config(**LATENT),
}


def one_row(q_QHD, k_KHD, v_KHD, *, scale, causal, window, softcap):
    """Attention written out in float64; the last query stands at the last key."""
    groups = q_QHD.shape[1] // k_KHD.shape[1]
    k_KHD, v_KHD = (each.repeat_interleave(groups, 1) for each in (k_KHD, v_KHD))
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * (q_QHD.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    behind = torch.arange(len(k_KHD)) - (torch.arange(len(q_QHD))[:, None] + len(k_KHD) - len(q_QHD))
    sees = (behind <= 0) if causal else torch.ones_like(behind, dtype=torch.bool)
    if window[0] >= 0:
        sees &= behind >= -window[0]
    return torch.einsum("hqk,khd->qhd", scores_HQK.masked_fill(~sees, -torch.inf).softmax(-1), v_KHD)


def reference(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, **options):
    """What `flash_attn_varlen_func` computes, row after row."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k)), "rows are all there is"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    assert options.pop("deterministic")
    window, softcap, causal = (options.pop(name) for name in ("window_size", "softcap", "causal"))
    assert not options
    rows = zip(q.double().split(queries), k.double().split(keys), v.double().split(keys), strict=True)
    said = [one_row(*row, scale=softmax_scale, causal=causal, window=window, softcap=softcap) for row in rows]
    return torch.cat(said).to(q.dtype)


def by_reference(module):
    module.shares_prompts = attend_by(reference, module.model, name="reference")
    return module


def assert_same(found, expected):
    (found_N, gradients), (expected_N, wanted) = found, expected
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max() + 1))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_one_call_over_rows_as_long_as_they_are_says_what_padded_rows_say(family, shares):
    read = batch()
    expected = ask(TokenLogprobs(build(KERNEL_FAMILIES[family]), temperature=0.8), read, shares=False)
    module = by_reference(TokenLogprobs(build(KERNEL_FAMILIES[family]), temperature=0.8))
    assert module.shares_prompts
    assert_same(ask(module, read, shares=shares), expected)


def test_so_it_does_under_adapters():
    modules = []
    for _ in range(2):
        model = build(FAMILIES["llama"])
        put_adapters(model, LoraConfig(rank=4), base=BundleRef(key="policies/x", digest="0" * 64, bytes=0))
        modules.append(TokenLogprobs(model, temperature=0.8))
    plain, kernel = modules[0], by_reference(modules[1])
    assert_same(ask(kernel, batch(), shares=True), ask(plain, batch(), shares=False))


def test_a_prompt_asks_once_and_a_row_without_tokens_of_its_own_not_at_all():
    prompt, other = ModelInput.given([5, 6, 7, 8]), ModelInput.given([9, 10])
    rows = [prompt.continued([11]), prompt, other.continued([12, 13]), prompt.continued([14, 15]), other]
    shared = lay_out(rows).shared
    assert shared.queries_R.tolist() == [5, 4, 2]
    assert shared.keys_R.tolist() == [5, 4, 6]
    assert shared.tokens_L.tolist() == [5, 6, 7, 8, 11, 9, 10, 12, 13, 14, 15]
    assert shared.tokens_L[shared.keys_K].tolist() == [5, 6, 7, 8, 11, 9, 10, 12, 13, 5, 6, 7, 8, 14, 15]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_eager_attention_is_taken_where_it_is_asked_for(family):
    asked = TokenLogprobs(build(FAMILIES[family]), temperature=0.8, attention="eager")
    assert asked.model.config._attn_implementation == "eager_of_shared_prompts"
    plain = TokenLogprobs(build(FAMILIES[family]), temperature=0.8)
    assert_same(ask(asked, batch(), shares=True), ask(plain, batch(), shares=True))


def test_classes_say_how_they_can_compute_attention():
    named = {name: attentions_of(build(FAMILIES[name])) for name in ("llama", "gemma2", "sinks")}
    assert named["llama"] == ("sdpa", "eager", *FLASH)
    assert named["gemma2"] == ("eager", *FLASH), "sdpa knows no soft caps"
    assert named["sinks"] == ("eager",), "the packages' kernels know no sinks"


def test_a_way_that_a_class_does_not_know_is_refused_in_one_line():
    gemma, shape = outline(build(FAMILIES["gemma2"])), DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 8, 128).shape()
    with pytest.raises(BadInput, match="'sdpa': Gemma2ForCausalLM does not compute it so; expected eager, flash_att"):
        check_attention("sdpa", gemma, shape)
    with pytest.raises(BadInput, match="'sdpa': Gemma2ForCausalLM does not compute it so"):
        attend(build(FAMILIES["gemma2"]), "sdpa")
    check_attention("flash_attention_2", gemma, shape)
    wide = DecoderSizes("llama", 300, 32, 48, 3, 4, 2, 288, 128)
    with pytest.raises(BadInput, match="heads of at most 256 numbers, found 288; use 'sdpa'"):
        check_attention("flash_attention_2", wide.outline(), wide.shape())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", FLASH)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "window"])
def test_the_flash_kernel_says_what_padded_rows_say_and_the_same_bits_twice(family, attention):
    assert torch.cuda.is_available(), "expected a CUDA GPU"
    try:
        flash_kernel(attention)
    except BadInput as error:
        pytest.skip(str(error))
    answers = {}
    for name, shares in ((None, False), (attention, True), (attention, False)):
        module = TokenLogprobs(build(FAMILIES[family]).bfloat16(), temperature=0.8, attention=name).cuda()
        answers[name, shares] = ask(module, batch(), shares=shares, device="cuda")
        again = ask(module, batch(), shares=shares, device="cuda")
        assert torch.equal(again[0], answers[name, shares][0])
        assert name is None or all(torch.equal(again[1][key], each) for key, each in answers[name, shares][1].items())
    exact = ask(TokenLogprobs(build(FAMILIES[family]), temperature=0.8), batch(), shares=False)
    errors = {key: apart(found, exact) for key, found in answers.items()}
    for shares in (True, False):
        for ours, plain in zip(errors[attention, shares], errors[None, False], strict=True):
            assert ours < 2 * plain + 1e-3, errors


def apart(found, exact) -> tuple[float, float]:
    """How far log-probs and gradients are from those of float32, relative to the latter's size."""
    away = sum(float((found[1][name].cpu().float() - each).square().sum()) for name, each in exact[1].items())
    whole = sum(float(each.square().sum()) for each in exact[1].values())
    return float((found[0].cpu() - exact[0]).abs().max()), (away / whole) ** 0.5
