"""The vLLM engine with prompts that have images: the requests to servers, and settings that are refused."""

from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig, VllmEngine
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.policy import ModelShape
from rheostat.models.engines.protocol import Request, VisionEngine
from rheostat.models.modeling.adapters import adapted_layers
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.media import InMemoryImages, Media
from rheostat.models.vision.processor import load_processor
from tests.support.batch_server import BatchServer
from tests.support.engines import Published, publish_directory
from tests.support.seeing import PICTURES, prompts_of, write_media
from tests.support.vision import write_seeing

SAMPLING = SamplingConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Published:
    home = tmp_path_factory.mktemp("seeing")
    write_seeing(home / "written", "idefics3")
    return publish_directory(home)


@pytest.fixture
def media(tmp_path) -> Media:
    return Media(open_store(str(tmp_path)), [write_media(str(tmp_path))])


@pytest.fixture
def served(serve, media) -> tuple[VisionEngine, BatchServer]:
    """Engine that knows the images, with its server."""
    engine, [server] = serve()
    assert isinstance(engine, VisionEngine)
    engine.show(media)
    return engine, server


def requests_of(policy: Published, num_images: list[int]) -> list[Request]:
    return [Request(row, (prompt,), (row,)) for row, prompt in enumerate(prompts_of(policy.directory, num_images))]


def bytes_at(image: dict) -> bytes:
    return Path(image["path"]).read_bytes()[image["offset"] :][: image["length"]]


def test_an_image_is_addressed_by_file_offset_and_length(media):
    for digest, encoded in PICTURES.items():
        part = media.part(digest)
        assert (part.width, part.height) == (24, 24)
        assert bytes_at({"path": part.path, "length": part.length, "offset": part.offset}) == encoded


def test_a_request_has_the_files_of_images_and_one_placeholder_token_for_each(served, policy):
    engine, server = served
    requests, processor = requests_of(policy, [2, 0]), load_processor(policy.directory)
    engine.generate(requests, SAMPLING)
    with_images, without_images = server.asked[0]["requests"]
    assert with_images["tokens"] == requests[0].inputs[0].tokens.tolist()
    assert with_images["collapsed"] == [5, processor.place_id, 11, processor.place_id, 11, 7, 8]
    assert [bytes_at(image) for image in with_images["images"]] == [PICTURES[d] for d in requests[0].inputs[0].images]
    # The tower has 6 x 6 patches, and 2 x 2 patches become one token. The directory does not state this number.
    assert with_images["settings"] == {"backend": "pil", "image_seq_len": 9}
    assert without_images.keys() == {"id", "tokens", "seed", "max_tokens", "experts"}
    assert server.asked[0]["sampling"]["banned"] == list(processor.banned)


def test_the_tokens_of_a_completion_that_continues_follow_the_placeholders(served, policy):
    engine, server = served
    [[prompt]] = [each.inputs for each in requests_of(policy, [1])]
    engine.generate([Request(0, (prompt.append_completion([30, 31]),), (0,))], SAMPLING)
    [request] = server.asked[0]["requests"]
    assert request["tokens"] == [*prompt.tokens.tolist(), 30, 31]
    assert request["collapsed"][-4:] == [7, 8, 30, 31]


def test_work_ends_if_the_server_expands_images_to_other_tokens(served, policy):
    engine, server = served
    server.refusal = (422, "a prompt with 1 images has 16 tokens, but vLLM encodes the same prompt as 27 tokens")
    for query in (
        lambda: engine.generate(requests_of(policy, [1]), SAMPLING),
        lambda: engine.score_continuations(prompts_of(policy.directory, [1]), [[7]]),
    ):
        with pytest.raises(Quarantined, match=r"16 tokens, .* 27"):
            query()


def test_images_that_are_not_in_files_are_refused(serve):
    engine, _ = serve()
    with pytest.raises(BadInput, match=r"images .*in files"):
        engine.show(InMemoryImages(PICTURES))


# ---- settings that are refused before a run begins


@pytest.mark.parametrize(
    ("message", "vision_model", "gpus", "settings"),
    [
        (r"rollout\.engine\.kind = 'vllm' .*idefics3, .*qwen2_5_vl.* = 'transformers'", "qwen2_5_vl", 0, {}),
        (r"rollout\.engine\.kind = 'vllm' .*idefics3, .*qwen2_5_vl.* = 'transformers'", "qwen2_5_vl", 1, {}),
        (r"rollout\.engine\.logprobs = 'raw'.*'processed'", "idefics3", 0, {"logprobs": "raw"}),
        ("logprobs = 'raw'", "idefics3", 0, {"logprobs": "raw", "base_urls": ("http://127.0.0.1:8000",)}),
        (None, "idefics3", 0, {}),
    ],
)
def test_vllm_serves_only_the_vision_models_that_were_compared_with_transformers(message, vision_model, gpus, settings):
    shape = ModelShape(
        parameters=100, context=96, layers=1, heads=1, kv_heads=1, head_size=32, vision_model_type=vision_model
    )
    engine = VllmEngine.model_validate(settings)
    if message is None:
        memory = engine.estimate_memory(shape, longest=90, gpus=gpus, name="rollout.engine")
        assert memory["rollout_weights_bytes"] == 400
        return
    with pytest.raises(BadInput, match=message):
        engine.estimate_memory(shape, longest=90, gpus=gpus, name="rollout.engine")


def test_an_adapter_of_the_vision_tower_is_refused(tmp_path: Path):
    """vLLM serves adapters of a tower only if a separate option is set."""
    model = load_policy(write_seeing(tmp_path, "idefics3"))
    for target in ("fc1", "modality_projection.proj", "model.vision_model.encoder.layers.0.self_attn.q_proj"):
        with pytest.raises(BadInput, match=f"update.lora.targets .*'{target}'.*Idefics3"):
            adapted_layers(model, LoraConfig(targets=(target,)))
