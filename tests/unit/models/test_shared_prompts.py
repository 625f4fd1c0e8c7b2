"""Micro-batches with shared prompts give the log-probs and gradients of padded rows."""

import pytest
import torch
from transformers import AutoConfig, Lfm2Config, MambaConfig

from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.lora import LoraConfig
from rheostat.models.modeling.adapters import add_adapters
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.shared_prompts import enable_shared_prompts, supports_sequence_parallelism
from rheostat.models.records.model_input import ModelInput
from tests.support.families import FAMILIES, SHAPE, batch, build, compute_results


def assert_equals_padded_rows(module):
    read = batch()
    assert module.shares_prompts
    assert read.shared is not None
    assert len(read.shared.tokens_L) < 0.6 * read.tokens_BT.size
    (padded_N, expected), (shared_N, found) = (compute_results(module, read, shares=shares) for shares in (False, True))
    torch.testing.assert_close(shared_N, padded_N, rtol=0, atol=2e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max() + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_padded_rows(family):
    assert_equals_padded_rows(TokenLogprobs(build(FAMILIES[family]), temperature=0.8))


@pytest.mark.parametrize("family", FAMILIES)
def test_at_double_precision_states_and_gradients_are_those_of_padded_rows(family, monkeypatch):
    model = build(FAMILIES[family]).double()
    if family in ("mixture", "mixtral", "sinks"):
        model.set_experts_implementation("eager")  # grouped products know no double precision
    module = TokenLogprobs(model, temperature=0.8)
    for name in ("float32", "float"):  # what models cast to for norms, positions and softmax
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    answers = []
    for shares in (False, True):
        module.zero_grad()
        states_NH = module.states(ForwardInput.from_microbatch(batch(), torch.device("cpu"), shares=shares))
        (states_NH * torch.linspace(-1, 1, states_NH.numel(), dtype=torch.float64).view_as(states_NH)).sum().backward()
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        answers.append((states_NH.detach(), gradients))
    (padded_NH, expected), (shared_NH, found) = answers
    torch.testing.assert_close(shared_NH, padded_NH, rtol=0, atol=1e-11)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-10 * float(gradient.abs().max() + 1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_log_probs_and_gradients_of_adapters_are_those_of_padded_rows(family):
    model = build(FAMILIES[family])
    add_adapters(model, LoraConfig(rank=4), base=BundleRef(key="policies/x", digest="0" * 64, bytes=0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert_equals_padded_rows(TokenLogprobs(model, temperature=0.8))


def test_context_tokens_inside_a_completion_keep_their_positions():
    module = TokenLogprobs(build(FAMILIES["llama"]), temperature=1.0)
    prompt, turn = ModelInput.from_prompt([5, 6, 7, 8]), ModelInput.from_prompt([9, 10]).append_completion([11])
    first = prompt.append_completion([12, 13])
    read = lay_out(
        [ModelInput(first.chunks + turn.chunks), prompt.append_completion([14]), prompt.append_completion([15])]
    )
    (padded_N, _), (shared_N, _) = (compute_results(module, read, shares=shares) for shares in (False, True))
    torch.testing.assert_close(shared_N, padded_N, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, pad_token_id=0),
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]),
    ],
    ids=["recurrent", "convolutions and attention"],
)
def test_models_that_mix_tokens_outside_of_attention_use_padded_rows(config):
    model = build(config)
    before = model.config._attn_implementation
    assert not enable_shared_prompts(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_heads_may_be_on_other_ranks_unless_they_have_sinks(family):
    assert supports_sequence_parallelism(build(FAMILIES[family])) == (family != "sinks")


def test_padded_rows_give_the_same_bits_in_a_model_that_shares_prompts():
    model = build(FAMILIES["windows and whole"])
    tokens_BT = torch.randint(2, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.arange(20) >= torch.tensor([[0], [4], [9]])
    expected = model(input_ids=tokens_BT, attention_mask=mask_BT.long()).logits
    assert enable_shared_prompts(model)
    assert torch.equal(model(input_ids=tokens_BT, attention_mask=mask_BT.long()).logits, expected)


def test_the_registered_attention_is_not_part_of_a_saved_model(tmp_path):
    model = build(FAMILIES["llama"])
    model.save_pretrained(tmp_path / "before")
    assert enable_shared_prompts(model)
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "after" / "config.json").read_bytes() == (tmp_path / "before" / "config.json").read_bytes()
    assert AutoConfig.from_pretrained(tmp_path / "after").model_type == "llama"
