"""Vision-language policies on vLLM's server: images from files, and the tokens and log-probs of the trainer."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.engines.vllm.images import VisionInputEncoder
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import ModelInput
from rheostat.models.vision.processor import load_processor
from tests.support.engines import (
    RANK,
    TOLERANCE,
    Published,
    list_tokens,
    load_if_needed,
    publish_adapter,
    publish_changed,
    publish_directory,
)
from tests.support.seeing import prompts_of, write_media
from tests.support.vision import write_seeing
from tests.vllm.servers import CONFIG, GenerateAnswer, in_the_middle, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SHOWN = [1, 0, 2, 1, 3, 1]
"""Number of images of each prompt."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Published:
    home = tmp_path_factory.mktemp("seeing")
    write_seeing(home / "written", "idefics3")
    return publish_directory(home)


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Media:
    store = str(tmp_path_factory.mktemp("media"))
    return Media(open_store(store), [write_media(store)])


@pytest.fixture(scope="module")
def engine(media) -> Iterator[ServedEngine]:
    engine = ServedEngine(CONFIG, adapter_rank=RANK)
    engine.show(media)
    yield engine
    engine.close()


def edit_preprocessor(directory: Path, **settings: object) -> None:
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def local_engine(policy: Published, media: Media) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(TransformersEngine())
    engine.load(policy.directory, policy.version, adapter=policy.adapter)
    engine.show(media)
    return engine


def requests_of(policy: Published, *, group: int = 4) -> list[Request]:
    prompts = prompts_of(policy.directory, SHOWN)
    return [
        Request(row, (prompt,) * group, tuple(range(100 * row, 100 * row + group)))
        for row, prompt in enumerate(prompts)
    ]


def another_tower(directory: Path) -> None:
    """Reverse the weights of the tower and leave the decoder as it is."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "vision_model" in name and tensor.dim() > 1:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def require_own_logprobs(
    policy: Published,
    media: Media,
    requests: list[Request],
    groups: list[list[Completion]],
) -> None:
    """Compare with the likelihoods of every prefix by the transformers engine."""
    engine = local_engine(policy, media)
    for asked, group in zip(requests, groups, strict=True):
        for given, completion in zip(asked.inputs, group, strict=True):
            beginnings = [completion.tokens[: end + 1] for end in range(len(completion.tokens))]
            [sums] = engine.score_continuations([given], beginnings)
            np.testing.assert_allclose(np.diff([0.0, *sums]), completion.logprobs, atol=TOLERANCE, rtol=0)


def asked_of(engine: ServedEngine) -> GenerateAnswer:
    [client] = engine._servers.running_clients()
    return GenerateAnswer(client.url, client.key)


def spelt(policy: Published, media: Media, given: ModelInput) -> dict[str, object]:
    return {
        "id": 0,
        **VisionInputEncoder(load_processor(policy.directory), media).encode(given),
        "seed": 1,
        "max_tokens": 8,
    }


def test_log_probs_after_images_are_those_of_the_trainer(engine, policy, media):
    warm = SamplingConfig(max_new_tokens=24)
    requests = requests_of(policy)
    groups = load_if_needed(engine, policy).generate(requests, warm)
    assert list_tokens(engine.generate(requests, warm)) == list_tokens(groups)
    require_own_logprobs(policy, media, requests, groups)


def test_a_completion_continues_after_its_images(engine, policy, media):
    requests = requests_of(policy, group=2)
    begun = load_if_needed(engine, policy).generate([replace(each, budget=3) for each in requests], SamplingConfig())
    further = [
        replace(
            each,
            inputs=tuple(given.append_completion(one.tokens) for given, one in zip(each.inputs, group, strict=True)),
        )
        for each, group in zip(requests, begun, strict=True)
    ]
    require_own_logprobs(policy, media, further, engine.generate(further, SamplingConfig(max_new_tokens=16)))


def test_image_tokens_have_probability_zero_and_the_other_tokens_sum_to_one(engine, policy, media):
    processor = load_processor(policy.directory)
    words = [token for token in range(processor._tokenizer.get_vocab_size()) if token not in processor.banned]
    prompts = prompts_of(policy.directory, [2])
    [found] = load_if_needed(engine, policy).score_continuations(prompts, [[token] for token in words])
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-5)
    [expected] = local_engine(policy, media).score_continuations(prompts, [[token] for token in words])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    hot = SamplingConfig(max_new_tokens=24, temperature=2.0)
    drawn = {
        token for group in engine.generate(requests_of(policy, group=24), hot) for one in group for token in one.tokens
    }
    assert len(drawn) > 250
    assert not drawn & set(processor.banned)


def test_likelihoods_after_images_are_those_of_the_trainer(engine, policy, media):
    prompts, continuations = prompts_of(policy.directory, SHOWN), [[7], [8, 30, 31, 9], [12, 5]]
    found = load_if_needed(engine, policy).score_continuations(prompts, continuations)
    np.testing.assert_allclose(
        found, local_engine(policy, media).score_continuations(prompts, continuations), atol=TOLERANCE
    )


def test_image_features_of_a_replaced_tower_are_not_reused(engine, policy, media, tmp_path):
    """vLLM caches image features by the name of the image only."""
    other, requests = publish_changed(tmp_path, policy, another_tower), requests_of(policy)
    before = load_if_needed(engine, policy).score_continuations(prompts_of(policy.directory, [1]), [[7]])
    after = load_if_needed(engine, other).score_continuations(prompts_of(policy.directory, [1]), [[7]])
    assert np.abs(np.subtract(after, before)).max() > 100 * TOLERANCE
    require_own_logprobs(other, media, requests, engine.generate(requests, SamplingConfig(max_new_tokens=8)))
    require_own_logprobs(
        policy, media, requests, load_if_needed(engine, policy).generate(requests, SamplingConfig(max_new_tokens=8))
    )


def test_an_adapter_is_served_with_the_tower(engine, policy, media, tmp_path):
    adapted, requests = publish_adapter(tmp_path, policy), requests_of(policy, group=2)
    groups = load_if_needed(engine, adapted).generate(requests, SamplingConfig(max_new_tokens=8))
    require_own_logprobs(adapted, media, requests, groups)
    plain = load_if_needed(engine, policy).generate(requests, SamplingConfig(max_new_tokens=8))
    require_own_logprobs(policy, media, requests, plain)
    assert list_tokens(plain) != list_tokens(groups)


def test_tokens_that_vllm_would_expand_again_are_refused_with_both_lengths(engine, policy, media):
    given = prompts_of(policy.directory, [1])[0]
    server, right = asked_of(load_if_needed(engine, policy)), spelt(policy, media, given)
    answer = server.try_generate(policy.version.digest, [right | {"collapsed": right["tokens"]}])
    length = len(given)
    assert answer.status_code == 422
    # Each of the nine places of the image is one for another; of one image, the first is written out.
    assert f"has {length} tokens, but vLLM encodes the same prompt as {length + 11} tokens" in answer.json()["error"]
    completions, _ = server.generate(policy.version.digest, [right])
    assert len(completions[0].tokens) == 8, "what was refused leaves nothing in vLLM's caches that is not in both"


def test_a_file_without_the_image_is_refused_with_the_digest(engine, policy, media):
    given = prompts_of(policy.directory, [1])[0]
    right = spelt(policy, media, given)
    [image] = right["images"]
    server = asked_of(load_if_needed(engine, policy))
    for wrong, reason in (
        ({"offset": image["offset"] + 1}, f"image {image['digest']}: the content of the file {image['path']}"),
        ({"path": "/nowhere"}, "/nowhere: No such file"),
    ):
        answer = server.try_generate(policy.version.digest, [right | {"images": [image | wrong]}])
        assert answer.status_code == 400
        assert reason in answer.json()["error"]


def test_a_policy_with_other_image_settings_is_not_loaded_into_a_running_server(engine, policy, tmp_path):
    def brighter(directory: Path) -> None:
        edit_preprocessor(directory, image_mean=[0.1, 0.1, 0.1])

    server = asked_of(load_if_needed(engine, policy))
    answer = server.try_load(publish_changed(tmp_path, policy, brighter))
    assert answer.status_code == 400
    assert "was started in image_mean of preprocessor_config.json" in answer.json()["error"]


def test_a_server_killed_during_work_with_images_changes_no_completion(engine, policy, media):
    requests, long = requests_of(policy, group=8), SamplingConfig(max_new_tokens=200)
    undisturbed = load_if_needed(engine, policy).generate(requests, long)
    first = server_of(engine)
    with in_the_middle(engine, first.kill):
        again = engine.generate(requests, long)
    assert not first.is_running()
    assert list_tokens(again) == list_tokens(undisturbed)
    require_own_logprobs(policy, media, requests[:2], again[:2])


def test_images_that_are_split_into_parts_have_the_tokens_of_the_trainer(engine, policy, media, tmp_path):
    """The engine restarts its own server for other image settings."""

    def cut(directory: Path) -> None:
        edit_preprocessor(directory, do_image_splitting=True, size={"longest_edge": 48})

    parted = publish_changed(tmp_path, policy, cut)
    prompts = prompts_of(parted.directory, [1, 2])
    assert len(prompts[0]) > 60
    requests = [Request(row, (prompt,) * 2, (row, 50 + row)) for row, prompt in enumerate(prompts)]
    groups = load_if_needed(engine, parted).generate(requests, SamplingConfig(max_new_tokens=8))
    require_own_logprobs(parted, media, requests, groups)
