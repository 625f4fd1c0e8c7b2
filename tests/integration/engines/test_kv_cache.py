"""The preallocated KV cache compared with the cache layers of transformers and with forward passes without a cache."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicLayer

from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.local.kv_cache import ROOM, InPlaceLayer, use_in_place_layers
from rheostat.models.engines.local.loaded_policy import LoadedPolicy, read_prompts
from rheostat.models.modeling.policy import load_policy
from tests.support.engines import MIXED, PROMPTS, engine_of, plain_logprobs, request
from tests.support.policies import small_tokenizer, write_policy

HYBRID = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}


def random_states(generator: torch.Generator, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of 2 heads. Their sizes differ, as in some architectures."""
    return torch.randn(rows, 2, tokens, 8, generator=generator), torch.randn(rows, 2, tokens, 4, generator=generator)


def test_the_preallocated_cache_equals_a_growing_layer_while_rows_join_and_leave():
    generator = torch.Generator().manual_seed(0)
    grown, other = DynamicLayer(), DynamicLayer()
    first = random_states(generator, 3, 5)
    grown.update(*first)
    other.update(*first)
    held = InPlaceLayer(other)
    for step in range(3 * ROOM):
        new = random_states(generator, len(grown.keys), 1 + step % 2)
        for mine, expected in zip(held.update(*new), grown.update(*new), strict=True):
            assert torch.equal(mine, expected)
        assert held.get_seq_length() == grown.get_seq_length()
        assert held.get_mask_sizes(1) == grown.get_mask_sizes(1)
        if step in (10, 100):
            kept = torch.tensor([2, 0, 0, 1] if step == 10 else [3, 1])
            grown.reorder_cache(kept)
            held.reorder_cache(kept)


def test_a_new_token_is_appended_without_a_copy():
    layer = DynamicLayer()
    layer.update(*random_states(torch.Generator(), 2, 5))
    held = InPlaceLayer(layer)
    places = []
    for _ in range(2 * ROOM):
        keys, values = held.update(*random_states(torch.Generator(), 2, 1))
        places.append((keys.data_ptr(), values.data_ptr()))
    assert sum(before != after for before, after in pairwise(places)) == 1


@pytest.mark.parametrize(
    ("architecture", "changes", "in_place"),
    [("llama", {}, 3), ("qwen3", {}, 3), ("gpt2", {}, 3), ("mistral", {}, 0), ("qwen3", HYBRID, 1)],
)
def test_only_layers_that_grow_with_every_token_are_replaced(architecture, changes, in_place, tmp_path):
    write_policy(tmp_path, architecture, changes=changes)
    tokenizer = small_tokenizer()
    policy = LoadedPolicy(
        load_policy(tmp_path).eval(), tokenizer, "digest", torch.tensor([tokenizer.eos_token_id]), 256
    )
    with torch.inference_mode():
        _, _, _, cache = read_prompts(policy, PROMPTS)
    before = [type(layer) for layer in cache.layers]
    use_in_place_layers(cache)
    after = [type(layer) for layer in cache.layers]
    assert after == [InPlaceLayer if kind is DynamicLayer else kind for kind in before]
    assert after.count(InPlaceLayer) == in_place


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("architecture", "changes"), [("llama", {}), ("qwen3", {}), ("gpt2", {}), ("mistral", {}), ("qwen3", HYBRID)]
)
def test_greedy_tokens_over_many_steps_equal_those_of_forward_passes_without_a_cache(architecture, changes, tmp_path):
    write_policy(tmp_path, architecture, changes=changes, eos_share=1e-6)
    work = [request(row, length, group=2) for row, length in enumerate([30, 7, 19])]
    groups = engine_of(tmp_path).generate(work, SamplingConfig(max_new_tokens=2 * ROOM, temperature=0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert max(len(group[0].tokens) for group in groups) > ROOM
    for prompt, group in zip(work, groups, strict=True):
        given, tokens = prompt.inputs[0], group[0].tokens
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*given.tokens.tolist(), *tokens]]), use_cache=False).logits[0]
        assert tuple(logits_TV[len(given) - 1 : -1].argmax(dim=1).tolist()) == tokens
        assert group[0].logprobs == pytest.approx(plain_logprobs(model, given, tokens, 1.0), abs=1e-5)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(("architecture", "changes"), [("llama", {}), ("gpt2", {}), ("qwen3", HYBRID)])
def test_completions_equal_those_of_the_growing_cache_bit_for_bit(architecture, changes, tmp_path, monkeypatch):
    write_policy(tmp_path, architecture, changes=changes)
    engine, sampling = engine_of(tmp_path), SamplingConfig(max_new_tokens=2 * ROOM)
    in_place = engine.generate(MIXED, sampling)
    monkeypatch.setattr("rheostat.models.engines.local.decoding.use_in_place_layers", lambda cache: None)
    assert engine.generate(MIXED, sampling) == in_place
