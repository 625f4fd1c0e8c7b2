"""Vision-language policies: the engine with its cache and the update give the same log-probs for the same images."""

import functools
import inspect

import numpy as np
import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.local.decoding import decode
from rheostat.models.engines.local.loaded_policy import LoadedPolicy, continuation_logprobs
from rheostat.models.engines.requests import CompletionRow
from rheostat.models.engines.sampling import sample_tokens
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.vision.families import ImageSize
from tests.support.policies import write_policy
from tests.support.vision import FAMILIES, picture, write_seeing

SIZES = {"a": (24, 24), "b": (48, 24), "c": (20, 60), "d": (24, 24)}


class Images:
    """Source of images by name."""

    def encoded(self, digest):
        width, height = SIZES[digest]
        return picture(ord(digest), width=width, height=height)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    """Directory of a policy of each family."""
    return write_seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def policy(directory):
    tokenizer = load_tokenizer(directory)
    return LoadedPolicy(
        load_policy(directory).eval(),
        tokenizer,
        "digest",
        torch.tensor([tokenizer.eos_token_id]),
        96,
        vision=load_vision(directory, source=Images()),
    )


@pytest.fixture
def module(policy):
    """The policy as the update uses it."""
    return TokenLogprobs(policy.model, temperature=1.0, vision=policy.vision)


def build_prompt(policy, *images, before=(5, 6), after=(7, 8, 9)):
    processor = policy.vision.processor
    places = [token for _ in images for token in (processor.place_id, 11)]
    sizes = [ImageSize(*SIZES[image]) for image in images]
    return ModelInput.from_prompt(processor.expand([*before, *places, *after], sizes), images)


def build_prompts(policy):
    return [
        build_prompt(policy, "a"),
        build_prompt(policy, "b", "a", before=()),
        build_prompt(policy),
        build_prompt(policy, "a", "c"),
    ]


def generate(policy, *, places):
    rows = [
        CompletionRow(request=index, sample=sample, prompt_row=index, input=each, seed=100 * index + sample, limit=6)
        for index, each in enumerate(build_prompts(policy))
        for sample in range(3)
    ]
    completions = decode(policy, rows, SamplingConfig(max_new_tokens=6), places=places, on_step=lambda _: None)
    return [
        (row.input.append_completion(done.tokens), done.logprobs) for row, done in zip(rows, completions, strict=True)
    ]


def compute_logprobs(module, inputs):
    with torch.no_grad():
        return module(module.prepare_inputs(lay_out(inputs), torch.device("cpu")))


@pytest.mark.parametrize("places", [64, 4], ids=["all rows at once", "rows that wait"])
def test_the_log_probs_of_the_update_are_those_of_the_engine(policy, module, places):
    completions = generate(policy, places=places)
    found = compute_logprobs(module, [each for each, _ in completions])
    expected = torch.tensor([logprob for _, logprobs in completions for logprob in logprobs])
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)


def test_likelihoods_are_the_log_probs_of_the_update(policy, module):
    inputs = build_prompts(policy)
    found = continuation_logprobs(policy, inputs, [[20], [21, 22]])
    ones = compute_logprobs(module, [each.append_completion([20]) for each in inputs])
    twos = compute_logprobs(module, [each.append_completion([21, 22]) for each in inputs]).view(-1, 2).sum(1)
    assert torch.allclose(found.float(), torch.stack([ones, twos], dim=1), atol=1e-5, rtol=0)


def test_log_probs_are_those_of_the_model_in_transformers(policy, module):
    whole = build_prompt(policy, "b", "a").append_completion([20, 21])
    tokens = torch.from_numpy(whole.tokens.astype(np.int64))[None]
    images = [policy.vision.prepare(name).arrays for name in whole.images]
    arrays = {name: torch.from_numpy(np.concatenate([each[name] for each in images])) for name in images[0]}
    if "pixel_attention_mask" in arrays:
        arrays = {name: array[None] for name, array in arrays.items()}
    places = (tokens == policy.vision.processor.image_id).long()
    kinds = {"mm_token_type_ids": places.int(), "token_type_ids": places}
    kinds = {name: value for name, value in (kinds | arrays).items() if name != "num_crops"}
    takes = inspect.signature(policy.model.forward).parameters
    logits = policy.model(input_ids=tokens, **{name: value for name, value in kinds.items() if name in takes}).logits
    logits = logits.index_fill(-1, torch.tensor(policy.banned), -torch.inf)
    expected = logits.log_softmax(-1)[0, [-3, -2], [20, 21]]
    found = compute_logprobs(module, [whole])
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.thorough_after(1)
def test_ten_thousand_samples_from_uniform_logits_contain_no_banned_token(policy):
    logits = torch.zeros(10_000, policy.model.config.get_text_config().vocab_size)
    uniforms = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sampling in (SamplingConfig(), SamplingConfig(top_p=0.9), SamplingConfig(temperature=0)):
        tokens, logprobs = sample_tokens(logits, uniforms, sampling, banned=policy.banned)
        assert not set(tokens.tolist()) & set(policy.banned)
        assert logprobs.exp().allclose(torch.tensor(1 / (logits.shape[1] - len(policy.banned))))


@pytest.mark.parametrize("chunk", [1 << 26, 7 * 300])
def test_banned_tokens_have_probability_0_in_the_update(policy, chunk):
    module = TokenLogprobs(policy.model, temperature=0.7, vision=policy.vision, chunk_elements=chunk)
    module.model.requires_grad_(False)
    allowed, banned = next(token for token in range(300) if token not in policy.banned), policy.banned[0]
    assert compute_logprobs(module, [build_prompt(policy, "a").append_completion([allowed])]).isfinite().all()
    if banned != policy.vision.processor.image_id:
        assert compute_logprobs(module, [build_prompt(policy, "a").append_completion([banned])]).item() == -torch.inf


def test_the_vision_tower_encodes_each_distinct_image_of_a_micro_batch_once(policy, module, monkeypatch):
    base, calls = policy.model.base_model, []
    run = base.get_image_features

    @functools.wraps(run)
    def counted(**arrays):
        calls.append(next(iter(arrays.values())).numel())
        return run(**arrays)

    group = [build_prompt(policy, "a").append_completion([20 + sample, 30]) for sample in range(8)]
    alone = policy.vision.prepare("a").arrays["pixel_values"].size
    monkeypatch.setattr(base, "get_image_features", counted)
    compute_logprobs(module, group)
    assert calls == [alone]


def test_shared_prompts_give_the_log_probs_and_gradients_of_padded_rows(policy, module):
    in_line = policy.model.config.model_type in ("idefics3", "internvl", "llava", "smolvlm")
    assert module.shares_prompts is in_line
    shown = [
        build_prompt(policy, "a"),
        build_prompt(policy, "d"),
        build_prompt(policy, "b", "a", before=()),
        build_prompt(policy),
    ]
    batch = lay_out([each.append_completion(range(20, 22 + 3 * row)) for each in shown for row in range(3)])
    assert batch.shared is not None and batch.shared.prompts == tuple(batch.inputs[::3])
    found = []
    for shares in {in_line, False}:
        module.shares_prompts = shares
        module.zero_grad()
        read = module.prepare_inputs(batch, torch.device("cpu"))
        assert (read.shared is not None) is shares
        logprobs_N = module(read)
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
        gradients = [each.grad.flatten() for each in module.parameters() if each.grad is not None]
        found.append((logprobs_N.detach(), torch.cat(gradients)))
    for logprobs_N, gradients in found:
        assert torch.allclose(logprobs_N, found[0][0], atol=5e-6, rtol=0)
        assert torch.allclose(gradients, found[0][1], atol=1e-4 * float(gradients.abs().max()), rtol=1e-4)


def test_gradients_of_the_vision_tower_are_zero_without_an_image(policy, module):
    tower = [p for name, p in module.model.named_parameters() if "vision" in name or "visual" in name]
    for inputs, moves in ((build_prompt(policy, "a"), True), (build_prompt(policy), False)):
        module.zero_grad()
        module(
            module.prepare_inputs(lay_out([inputs.append_completion([20, 21])]), torch.device("cpu"))
        ).sum().backward()
        norms = [float(p.grad.abs().sum()) for p in tower if p.grad is not None]
        assert norms and (sum(norms) > 0) is moves


def test_a_text_policy_refuses_prompts_with_images(tmp_path):
    write_policy(tmp_path)
    module = TokenLogprobs(load_policy(tmp_path), temperature=1.0)
    with pytest.raises(BadInput, match=r"text.*images"):
        module.prepare_inputs(
            lay_out([ModelInput.from_prompt([1], ("a",)).append_completion([2])]), torch.device("cpu")
        )
