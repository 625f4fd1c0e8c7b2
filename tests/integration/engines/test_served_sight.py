"""How prompts with images are put to vLLM's servers, and what is refused there and before."""

import os
from pathlib import Path

import pytest

from infra.errors import BadInput, Quarantined
from infra.store.storage import open_store
from models.config.engines import SamplingConfig, VllmEngine
from models.config.lora import LoraConfig
from models.config.policy import ModelShape
from models.engines.protocol import Request, SeeingEngine, build_engine
from models.engines.vllm.engine import ServedEngine
from models.modeling.adapters import adapted_layers
from models.modeling.policy import load_policy
from models.records.media import HeldImages, Media
from models.vision.processor import load_processor
from tests.support.batch_server import KEY, BatchServer, batch_server
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
def served(policy, monkeypatch):
    """An engine with the policy loaded, and the server that it asks."""
    monkeypatch.setenv("SERVERS_KEY", KEY)
    with batch_server(BatchServer(lambda directory: policy.version.digest)) as server:
        given = {"base_urls": (server.url,), "api_key_variable": "SERVERS_KEY"}
        engine = build_engine(VllmEngine.model_validate(given))
        assert isinstance(engine, ServedEngine)
        engine.load(policy.directory, policy.version)
        yield engine, server


def requests_of(policy: Published, shown: list[int]) -> list[Request]:
    return [Request(row, (prompt,), (row,)) for row, prompt in enumerate(prompts_of(policy.directory, shown))]


def bytes_at(image: dict) -> bytes:
    file = os.open(image["path"], os.O_RDONLY)
    try:
        return os.pread(file, image["length"], image["offset"])
    finally:
        os.close(file)


def test_an_image_is_named_by_the_part_of_a_file_that_it_is(media):
    for digest, encoded in PICTURES.items():
        part = media.part(digest)
        assert (part.width, part.height) == (24, 24)
        assert bytes_at({"path": part.path, "length": part.length, "offset": part.offset}) == encoded


def test_a_server_is_told_files_and_one_place_for_each_image(served, policy, media):
    engine, server = served
    assert isinstance(engine, SeeingEngine)
    engine.show(media)
    requests, processor = requests_of(policy, [2, 0]), load_processor(policy.directory)
    engine.generate(requests, SAMPLING)
    seeing, blind = server.asked[0]["requests"]
    assert seeing["tokens"] == requests[0].inputs[0].tokens.tolist()
    assert seeing["collapsed"] == [5, processor.place_id, 11, processor.place_id, 11, 7, 8]
    assert [bytes_at(image) for image in seeing["images"]] == [PICTURES[d] for d in requests[0].inputs[0].images]
    # The tower has 6 x 6 patches, of which 2 x 2 become a token: the directory does not say so.
    assert seeing["settings"] == {"backend": "pil", "image_seq_len": 9}
    assert blind.keys() == {"id", "tokens", "seed", "max_tokens", "experts"}
    assert server.asked[0]["sampling"]["banned"] == list(processor.banned)


def test_a_completion_that_goes_on_stands_behind_the_places(served, policy, media):
    engine, server = served
    engine.show(media)
    [asked] = requests_of(policy, [1])
    [given] = asked.inputs
    engine.generate([Request(0, (given.continued([30, 31]),), (0,))], SAMPLING)
    [request] = server.asked[0]["requests"]
    assert request["tokens"] == [*given.tokens.tolist(), 30, 31]
    assert request["collapsed"][-4:] == [7, 8, 30, 31]


def test_tokens_that_the_server_does_not_make_of_the_images_are_the_end_of_the_work(served, policy, media):
    engine, server = served
    engine.show(media)
    server.refusal = (422, "a prompt with 1 images: expected 16 tokens, vLLM writes it out as 27")
    with pytest.raises(Quarantined, match="expected 16 tokens, vLLM writes it out as 27"):
        engine.generate(requests_of(policy, [1]), SAMPLING)
    with pytest.raises(Quarantined, match="expected 16 tokens, vLLM writes it out as 27"):
        engine.likelihoods(prompts_of(policy.directory, [1]), [[7]])


def test_images_that_lie_in_no_file_are_not_for_servers(served):
    engine, _ = served
    with pytest.raises(BadInput, match="expected images that lie in files, which servers can read"):
        engine.show(HeldImages(PICTURES))


# ---- what is refused before a run begins

SHAPE = ModelShape(parameters=100, context=96, layers=1, heads=1, kv_heads=1, head_size=32, sees="idefics3")


def memory(shape: ModelShape = SHAPE, *, gpus: float = 0, **settings: object) -> dict[str, float]:
    return VllmEngine.model_validate(settings).memory(shape, longest=90, gpus=gpus, name="rollout.engine")


def test_policies_that_see_are_served_if_vllm_was_compared_on_them():
    assert memory()["rollout_weights_bytes"] == 400
    other = ModelShape(parameters=100, context=96, layers=1, heads=1, kv_heads=1, head_size=32, sees="qwen2_5_vl")
    for gpus in (0, 1):
        with pytest.raises(BadInput, match=r"rollout\.engine\.kind 'vllm': .* idefics3; found qwen2_5_vl, .*='transf"):
            memory(other, gpus=gpus)


def test_raw_log_probs_know_of_no_token_that_is_never_written():
    with pytest.raises(BadInput, match=r"rollout\.engine\.logprobs 'raw': a model that sees .*use .*'processed'"):
        memory(logprobs="raw")
    with pytest.raises(BadInput, match="logprobs 'raw'"):
        memory(logprobs="raw", base_urls=("http://127.0.0.1:8000",))


def test_no_adapter_is_made_of_the_tower(tmp_path: Path):
    """vLLM would serve it only where it is asked to, apart."""
    model = load_policy(write_seeing(tmp_path, "idefics3"))
    for target in ("fc1", "modality_projection.proj", "model.vision_model.encoder.layers.0.self_attn.q_proj"):
        with pytest.raises(BadInput, match=f"lora.targets '{target}': no linear layer of Idefics3"):
            adapted_layers(model, LoraConfig(targets=(target,)))
