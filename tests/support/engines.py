"""Tests of every engine with real models, and helpers. A module that imports the tests needs a fixture `loaded`."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.store.bundles import BundleRef, fetch_bundle, publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.lora import LoraConfig
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Completion, Engine, Request
from rheostat.models.modeling.adapters import add_adapters, save_adapters
from rheostat.models.modeling.merging import load_merged
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import sample_seed
from rheostat.models.records.versions import ModelVersion
from tests.support.inputs import request_completions, request_continuations
from tests.support.policies import CONTEXT, VOCABULARY, small_tokenizer, write_policy

SHAPE = {"head_dim": 32}
"""Change to the shape of every policy: vLLM supports few head sizes on CPUs."""

RANK = 4
"""Rank of adapters."""

SAMPLING = SamplingConfig(max_new_tokens=24)

EOS = small_tokenizer().eos_token_id

TOLERANCE = 1e-4
"""Largest difference of log-probs in float32 between an engine and a plain forward pass."""


@dataclass(frozen=True)
class Published:
    """Policy in a store, with its local directory."""

    directory: Path
    version: ModelVersion
    adapter: Path | None = None

    def model(self) -> PreTrainedModel:
        if self.adapter is None:
            return AutoModelForCausalLM.from_pretrained(self.directory)
        return load_merged(self.directory, self.adapter, device="cpu", dtype=torch.float32)


class Unscored(TransformersEngine):
    """Settings of an engine that computes no log-probs of given tokens."""

    scores_tokens = False


Loaded = Callable[[Published], Engine]
"""Function that returns an engine with a policy loaded. Each call may return the same engine."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Published:
    return publish(tmp_path_factory.mktemp("policy"))


def publish(path: Path, architecture: str = "llama", *, changes: dict[str, object] = SHAPE, **settings) -> Published:
    """Write a random policy and publish it in a store below `path`."""
    write_policy(path / "written", architecture, changes={**SHAPE, **changes}, **settings)
    return publish_directory(path)


def publish_directory(path: Path) -> Published:
    """Publish the policy in the folder `written`."""
    store = open_store(str(path / "store"))
    ref = publish_bundle(store, path / "written", prefix="policies")
    return Published(fetch_bundle(store, ref), ModelVersion(version=0, weights=ref))


def publish_changed(path: Path, policy: Published, change: Callable[[Path], object]) -> Published:
    """Publish a copy of a policy's files after a change to the copy."""
    shutil.copytree(policy.directory, path / "written", ignore=shutil.ignore_patterns("bundle.json"))
    change(path / "written")
    return publish_directory(path)


def load_if_needed(engine: Engine, policy: Published) -> Engine:
    """Return the engine after it has loaded the policy, unless it serves the policy already."""
    if engine.loaded_digest() != policy.version.digest:
        engine.load(policy.directory, policy.version, adapter=policy.adapter)
    return engine


def publish_adapter(path: Path, base: Published, *, rank: int = RANK) -> Published:
    """Publish an adapter whose weight changes are about as large as the weights."""
    model = load_policy(base.directory)
    add_adapters(model, LoraConfig(rank=rank, alpha=4), base=base.version.weights)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(index))
    (path / "adapter").mkdir()
    save_adapters(model, path / "adapter")
    store = open_store(str(path / "store"))
    ref: BundleRef = publish_bundle(store, path / "adapter", prefix="adapters")
    version = ModelVersion(version=1, weights=base.version.weights, adapter=ref)
    return Published(base.directory, version, adapter=fetch_bundle(store, ref))


def request(row: int, length: int, group: int = 4) -> Request:
    """Return a request for completions of a prompt of random tokens, without special tokens."""
    tokens = np.random.Generator(np.random.Philox(row)).integers(2, VOCABULARY, size=length)
    seeds = tuple(sample_seed(0, 0, prompt_row=row, sample=sample) for sample in range(group))
    return request_completions(row, tokens.tolist(), seeds)


MIXED = [request(row, length) for row, length in enumerate([30, 7, 19, 7, 41])]

PROMPTS = [
    ModelInput.from_prompt(np.random.default_rng(row).integers(2, VOCABULARY, length))
    for row, length in enumerate([9, 3, 17, 1, 9])
]

CONTINUATIONS = [[7], [8, 30, 31, 9], [12, 5]]


def plain_logprobs(model: PreTrainedModel, given: ModelInput, tokens: Sequence[int], temperature: float) -> list[float]:
    """Return log-probs of tokens by a forward pass over one sequence, without cache, padding or batch."""
    with torch.inference_mode():
        read = torch.tensor([[*given.tokens.tolist(), *tokens]])
        logits_TV = model(read, use_cache=False).logits[0, len(given) - 1 : -1]
    return (logits_TV / temperature).log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def require_plain_logprobs(
    found: Published,
    requests: list[Request],
    groups: list[list[Completion]],
    temperature: float,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Check the log-probs of all completions against plain forward passes."""
    model = found.model()
    for asked, group in zip(requests, groups, strict=True):
        for given, completion in zip(asked.inputs, group, strict=True):
            expected = plain_logprobs(model, given, completion.tokens, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=tolerance)


def find_readable_completion(
    engine: Engine, asked: Request, *, prefix: tuple[int, ...] = ()
) -> tuple[Request, Completion]:
    """Return a completion whose first six tokens are whole characters, and the request for it alone."""
    asked = request_continuations(asked, [prefix] * len(asked.seeds))
    [group] = engine.generate([asked], SAMPLING)
    for seed, found in zip(asked.seeds, group, strict=True):
        begun = small_tokenizer().batch_decode([[token] for token in found.tokens[:6]])
        if len(found.tokens) > 6 and "\N{REPLACEMENT CHARACTER}" not in "".join(begun):
            return replace(asked, inputs=asked.inputs[:1], seeds=(seed,)), found
    raise AssertionError("no completion begins with readable tokens; ask for more")


def list_tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group] for group in groups]


def require_frequencies(model: PreTrainedModel, given: ModelInput, tokens: list[int], temperature: float) -> None:
    """Compare the frequencies of tokens with the softmax after the prompt at a temperature, by Pearson's statistic."""
    with torch.inference_mode():
        logits_V = model(torch.tensor([given.tokens.tolist()])).logits[0, -1]
    shares_V = (logits_V / temperature).softmax(dim=0).double().numpy()
    found_V = np.bincount(tokens, minlength=len(shares_V))
    freedom = len(shares_V) - 1
    statistic = ((found_V - len(tokens) * shares_V) ** 2 / (len(tokens) * shares_V)).sum()
    # If tokens follow the softmax, its mean is the degrees of freedom f and its standard deviation √(2f).
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


# ---- tests of every engine


@pytest.fixture
def adapter_tolerance() -> float:
    """Largest difference of log-probs with an adapter. A module redefines it for an engine of lower precision."""
    return TOLERANCE


def test_log_probs_are_those_of_a_plain_forward_pass(loaded: Loaded, policy):
    groups = loaded(policy).generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    assert len({len(completion.tokens) for group in groups for completion in group}) > 3
    require_plain_logprobs(policy, MIXED, groups, 0.8)


def test_first_tokens_have_the_frequencies_of_the_softmax(loaded: Loaded, policy):
    asked = request(3, 11, group=4000)
    [group] = loaded(policy).generate([asked], SamplingConfig(max_new_tokens=1, temperature=0.7))
    require_frequencies(policy.model(), asked.inputs[0], [completion.tokens[0] for completion in group], 0.7)


def test_tokens_after_a_prefix_have_the_frequencies_of_the_softmax(loaded: Loaded, policy):
    """The seeds that sampled the prefix sample the next token too, and the two samples are independent."""
    asked = request(3, 11, group=4000)
    engine = loaded(policy)
    [first] = engine.generate([asked], SamplingConfig(max_new_tokens=1))
    rare = request_continuations(asked, [first[0].tokens[:1]] * 4000)
    [second] = engine.generate([rare], SamplingConfig(max_new_tokens=2))
    require_frequencies(policy.model(), rare.inputs[0], [completion.tokens[0] for completion in second], 1.0)
    same = sum(one.tokens[0] == other.tokens[0] for one, other in zip(first, second, strict=True))
    assert same < 4000 * 0.1


def test_equal_seeds_give_equal_tokens_and_other_seeds_give_others(loaded: Loaded, policy):
    engine = loaded(policy)
    first = engine.generate(MIXED, SAMPLING)
    engine.generate([request(99, 50)], SamplingConfig(max_new_tokens=5))
    again = engine.generate(MIXED, SAMPLING)
    assert list_tokens(again) == list_tokens(first)
    for group, repeated in zip(first, again, strict=True):
        assert len({completion.tokens for completion in group}) == len(group)
        for completion, other in zip(group, repeated, strict=True):
            assert other.logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_a_completion_does_not_depend_on_the_other_rows_of_its_batch(loaded: Loaded, policy):
    """Tokens are equal and log-probs close: the last bits of sums may differ with the shape of a batch."""
    engine = loaded(policy)
    together = engine.generate(MIXED, SAMPLING)
    for asked, group in zip(MIXED, together, strict=True):
        [[alone]] = engine.generate([replace(asked, inputs=asked.inputs[2:3], seeds=asked.seeds[2:3])], SAMPLING)
        assert alone.tokens == group[2].tokens
        assert alone.logprobs == pytest.approx(group[2].logprobs, abs=1e-5)


def test_eos_ends_a_completion_and_is_its_last_token(loaded: Loaded, policy):
    completions = [completion for group in loaded(policy).generate(MIXED, SAMPLING) for completion in group]
    stopped = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    cut = [completion for completion in completions if completion.finish_reason is FinishReason.LENGTH]
    assert stopped
    assert cut
    assert len(stopped) + len(cut) == len(completions)
    assert all(completion.tokens[-1] == EOS and EOS not in completion.tokens[:-1] for completion in stopped)
    assert all(len(completion.tokens) == 24 and EOS not in completion.tokens for completion in cut)
    assert all(len(completion.logprobs) == len(completion.tokens) for completion in completions)
    assert all(
        completion.text == small_tokenizer().decode(completion.tokens, skip_special_tokens=True)
        for completion in completions
    )


def test_log_probs_are_float32_values(loaded: Loaded, policy):
    [group] = loaded(policy).generate([request(4, 9)], SAMPLING)
    assert all(float(np.float32(value)) == value for completion in group for value in completion.logprobs)


def test_every_end_token_of_the_model_ends_a_completion(loaded: Loaded, policy, tmp_path):
    """The generation settings may name more tokens than the tokenizer's EOS."""
    engine, asked = loaded(policy), request(8, 9, group=8)
    [group] = engine.generate([asked], SAMPLING)
    seed, free = next(pair for pair in zip(asked.seeds, group, strict=True) if len(pair[1].tokens) > 6)
    alone = replace(asked, inputs=asked.inputs[:1], seeds=(seed,))
    write_policy(tmp_path / "written", changes=SHAPE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    model.generation_config.eos_token_id = [free.tokens[5], EOS]
    model.generation_config.save_pretrained(tmp_path / "written")
    [[stopped]] = loaded(publish_directory(tmp_path)).generate([alone], SAMPLING)
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it(loaded: Loaded, policy):
    engine = loaded(policy)
    asked, free = find_readable_completion(engine, request(8, 9, group=32))
    stop = small_tokenizer().decode(free.tokens[3:6])
    [[stopped]] = engine.generate([asked], SamplingConfig(max_new_tokens=24, stop=("never said", stop)))
    texts = [small_tokenizer().decode(free.tokens[:length]) for length in range(7)]
    assert stopped.tokens == free.tokens[: next(length for length, text in enumerate(texts) if stop in text)]
    assert stop in stopped.text
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_text_that_begins_in_the_prefix_ends_a_completion(loaded: Loaded, policy):
    engine = loaded(policy)
    asked, free = find_readable_completion(
        engine, request(8, 9, group=32), prefix=tuple(small_tokenizer()("Ana has")["input_ids"])
    )
    stop = "has" + small_tokenizer().decode(free.tokens[:2])
    [[stopped]] = engine.generate([asked], SamplingConfig(max_new_tokens=24, stop=(stop,)))
    assert stopped.tokens == free.tokens[:2]
    assert stopped.text == f"Ana {stop}"
    assert stopped.finish_reason is FinishReason.STOP


def test_a_budget_cuts_a_completion_which_can_be_continued(loaded: Loaded, policy):
    engine, asked = loaded(policy), request(8, 9, group=8)
    [group] = engine.generate([replace(asked, budget=3)], SAMPLING)
    cut = [index for index, one in enumerate(group) if EOS not in one.tokens]
    assert len(cut) > 1
    assert {(len(group[index].tokens), group[index].finish_reason) for index in cut} == {(3, FinishReason.CUT)}
    begun = [group[index] for index in cut]
    rest = replace(asked, inputs=asked.inputs[: len(cut)], seeds=tuple(asked.seeds[index] for index in cut))
    goes_on = request_continuations(rest, [one.tokens for one in begun], budget=30)
    [ended] = engine.generate([goes_on], SAMPLING)
    require_plain_logprobs(policy, [goes_on], [ended], 1.0)
    for first, last in zip(begun, ended, strict=True):
        assert last.text == small_tokenizer().decode(first.tokens + last.tokens, skip_special_tokens=True)
        length = len(first.tokens + last.tokens)
        assert last.finish_reason is (FinishReason.STOP if last.tokens[-1] == EOS else FinishReason.LENGTH)
        assert length == 24 or last.tokens[-1] == EOS


def test_likelihoods_are_those_of_each_sequence_by_itself(loaded: Loaded, policy):
    engine, model = loaded(policy), policy.model()
    for continuations in (CONTINUATIONS, [[7], [8]]):
        found = engine.score_continuations(PROMPTS, continuations)
        expected = [[sum(plain_logprobs(model, prompt, tokens, 1.0)) for tokens in continuations] for prompt in PROMPTS]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_likelihoods_reach_to_the_end_of_the_context(loaded: Loaded, policy):
    prompt = ModelInput.from_prompt([5] * (CONTEXT - 2))
    [[found]] = loaded(policy).score_continuations([prompt], [[7, 8]])
    assert found == pytest.approx(sum(plain_logprobs(policy.model(), prompt, (7, 8), 1.0)), abs=TOLERANCE)


def test_a_continuation_that_does_not_fit_the_context_is_refused(loaded: Loaded, policy):
    with pytest.raises(BadInput, match=f"prompt 1 has {CONTEXT} tokens .* 1"):
        loaded(policy).score_continuations([ModelInput.from_prompt([5]), ModelInput.from_prompt([5] * CONTEXT)], [[7]])


def test_a_prompt_without_room_for_a_completion_is_refused_with_its_lengths(loaded: Loaded, policy):
    engine = loaded(policy)
    engine.generate([request(6, CONTEXT - 2)], SamplingConfig(max_new_tokens=2))
    with pytest.raises(
        BadInput, match=f"prompt row 6: {CONTEXT - 2} prompt tokens plus max_new_tokens \\(3\\) .* {CONTEXT}"
    ):
        engine.generate([request(6, CONTEXT - 2)], SamplingConfig(max_new_tokens=3))
    with pytest.raises(BadInput, match="prompt row 6"):
        engine.generate([request(6, 0)], SamplingConfig(max_new_tokens=3))


def test_a_policy_that_is_loaded_replaces_the_former_policy(loaded: Loaded, policy, tmp_path):
    before = loaded(policy).generate(MIXED, SAMPLING)
    other = publish(tmp_path, seed=1)
    engine = loaded(other)
    assert engine.loaded_digest() == other.version.digest
    after = engine.generate(MIXED, SAMPLING)
    require_plain_logprobs(other, MIXED, after, 1.0)
    assert list_tokens(after) != list_tokens(before)
    assert list_tokens(loaded(policy).generate(MIXED, SAMPLING)) == list_tokens(before)


def test_an_adapter_gives_the_log_probs_of_the_merged_policy(loaded: Loaded, policy, tmp_path, adapter_tolerance):
    adapted = publish_adapter(tmp_path, policy)
    engine = loaded(adapted)
    assert engine.loaded_digest() == adapted.version.digest != policy.version.digest
    groups = engine.generate(MIXED, SAMPLING)
    require_plain_logprobs(adapted, MIXED, groups, 1.0, tolerance=adapter_tolerance)
    require_plain_logprobs(policy, MIXED, loaded(policy).generate(MIXED, SAMPLING), 1.0)


def test_an_engine_gives_the_same_outputs_after_sleep_and_a_load(loaded: Loaded, policy):
    engine = loaded(policy)
    before = engine.score_continuations(PROMPTS, CONTINUATIONS)
    engine.sleep()
    assert engine.loaded_digest() == ""
    with pytest.raises(AssertionError, match="before load"):
        engine.score_continuations(PROMPTS, CONTINUATIONS)
    with pytest.raises(AssertionError, match="before load"):
        engine.generate(MIXED, SAMPLING)
    after = loaded(policy).score_continuations(PROMPTS, CONTINUATIONS)
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_step_counts_match_the_decoded_tokens(loaded: Loaded, policy):
    engine = loaded(policy)
    before = engine.step_sums()
    groups = engine.generate(MIXED, SAMPLING)
    lengths = [len(completion.tokens) for group in groups for completion in group]
    sums = engine.step_sums().since(before)
    # The prefill generates the first token of each sequence; engines may mix prefills with decoding steps.
    assert 0.75 * (sum(lengths) - len(lengths)) <= sums["step_sequences"] <= sum(lengths)
    assert 0.75 * (max(lengths) - 1) <= sums["steps"] <= 2 * max(lengths)
    assert sums["step_sequences"] <= sums["step_sequences_squared"] <= len(lengths) * sums["step_sequences"]
    assert 0 < sums["step_seconds"] <= sums["step_sequence_seconds"] <= len(lengths) * sums["step_seconds"]


def test_progress_grows_while_completions_are_generated(loaded: Loaded, policy):
    engine = loaded(policy)
    before = engine.progress
    engine.generate([request(1, 5)], SamplingConfig(max_new_tokens=100))
    assert engine.progress > before


def test_weights_that_are_not_numbers_are_refused_with_the_digest(loaded: Loaded, tmp_path):
    write_policy(tmp_path / "written", changes=SHAPE)
    weights = load_file(tmp_path / "written/model.safetensors")
    weights["lm_head.weight"][17] = torch.nan
    save_file(weights, tmp_path / "written/model.safetensors", metadata={"format": "pt"})
    broken = publish_directory(tmp_path)
    with pytest.raises(Quarantined, match=rf"policy.* {broken.version.digest}.*prompt row \d, sample \d"):
        loaded(broken).generate(MIXED, SAMPLING)


ARCHITECTURES = {"qwen3 tied": {"tie_word_embeddings": True}, "qwen3": {}, "llama": {}}


@pytest.mark.parametrize("shape", ARCHITECTURES)
def test_greedy_completions_equal_those_of_transformers(loaded: Loaded, shape, tmp_path):
    found = publish(tmp_path, shape.split()[0], changes=ARCHITECTURES[shape], eos_share=0.0001)
    engine = loaded(found)
    groups = engine.generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0))
    assert sum(len(group[0].tokens) for group in groups) > 50
    model = found.model()
    for asked, group in zip(MIXED, groups, strict=True):
        prompt = torch.tensor([asked.inputs[0].tokens.tolist()])
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24)
        assert len({completion.tokens for completion in group}) == 1
        assert list(group[0].tokens) == made[0, prompt.shape[1] :].tolist()
    require_plain_logprobs(found, MIXED, groups, 1.0)
    drawn = engine.generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    require_plain_logprobs(found, MIXED, drawn, 0.8)


POLICY = ModelVersion(version=0, weights=BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0))


def engine_of(directory: Path, **settings) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(TransformersEngine(**settings))
    engine.load(directory, POLICY)
    return engine
