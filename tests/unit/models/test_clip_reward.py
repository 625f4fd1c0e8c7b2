"""The CLIP reward equals the features of transformers, and an unusable model directory or head is refused."""

import re
import shutil
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.clip_rewards import ClipReward
from rheostat.models.config.judges import ClipModel, ClipModelReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.data.images import digest_of, media_tables
from rheostat.models.modeling.initial import write_served_model
from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.records.media import MEDIA, InMemoryImages
from rheostat.models.records.schemas import VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import JudgeWork
from rheostat.models.rewards.clip import ClipScorer
from rheostat.models.rewards.evaluate import Case, Evaluator
from rheostat.models.rewards.rules import build_reward
from rheostat.models.text.tokenizer import train_tokenizer
from rheostat.models.vision.color_conversion import decode_rgb
from rheostat.models.workers.reward_model import RewardModelWorker
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.dependencies import rescoring_dependencies
from tests.support.demos import ArithmeticData
from tests.support.model_files import change_files
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.vision import picture

TEXTS = ("red square left", "a blue circle " * 9)
PICTURES = tuple(picture(seed, width=20, height=30) for seed in range(2))
WIDTH = 12
LARGE = {"height": 24, "width": 24}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clip")
    tokenizer = train_tokenizer([*TEXTS], vocab_size=300, context=16)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.padding_side = "right"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = CLIPConfig(
        text_config={**sizes, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 16},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=WIDTH,
    )
    torch.manual_seed(0)
    with lock_model_construction():
        model = CLIPModel(config)
    model.logit_scale.data.fill_(3.0)  # exp(3) = 20.1
    model.save_pretrained(directory)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
    CLIPProcessor(images, tokenizer).save_pretrained(directory)
    images.save_pretrained(directory)
    return directory


@pytest.fixture
def copy(clip, tmp_path):
    return shutil.copytree(clip, tmp_path / "copy")


@pytest.fixture(scope="module")
def features(clip):
    """Text features, image features and output of transformers for all texts and pictures, padded."""
    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    images = [Image.open(BytesIO(encoded)) for encoded in PICTURES]
    inputs = processor(text=[*TEXTS], images=images, return_tensors="pt", padding=True, truncation=True, max_length=16)
    pixels = inputs.pop("pixel_values")
    with torch.inference_mode():
        texts = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
        return texts, model.get_image_features(pixels).pooler_output, model(**inputs, pixel_values=pixels)


def write_head(path, **shapes):
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    save_file(tensors, path)
    return tensors


def compute_rewards(config):
    reward = build_reward(config)
    return [[reward(text, "", "", images=[encoded]) for text in TEXTS] for encoded in PICTURES]


def test_the_reward_is_the_cosine_of_the_features_of_transformers(clip, features):
    texts, images, _ = features
    expected = torch.nn.functional.cosine_similarity(images[:, None], texts[None], dim=-1)
    assert len({round(float(each), 3) for each in expected.flatten()}) == 4
    np.testing.assert_allclose(compute_rewards(ClipReward(path=clip)), expected, atol=1e-6)


def test_the_logit_is_the_logit_of_the_model_over_100(clip, features):
    rewards = compute_rewards(ClipReward(path=clip, value="logit"))
    np.testing.assert_allclose(rewards, features[2].logits_per_image / 100, atol=1e-6)


def test_a_head_scores_the_image_alone(clip, features, tmp_path):
    path, linear_path = tmp_path / "head.safetensors", tmp_path / "linear.safetensors"
    shapes = {"layers.2.weight": (5, WIDTH), "layers.2.bias": (5,), "layers.10.weight": (1, 5), "layers.10.bias": (1,)}
    head, linear = write_head(path, **shapes), write_head(linear_path, weight=(1, WIDTH))
    images = features[1]
    unit = images / images.norm(dim=-1, keepdim=True)
    inner = unit @ head["layers.2.weight"].T + head["layers.2.bias"]
    expected = inner @ head["layers.10.weight"].T + head["layers.10.bias"]
    rewards = compute_rewards(ClipReward(path=clip, head=path))
    np.testing.assert_allclose(rewards, expected.expand(2, 2), atol=1e-5)
    rewards = compute_rewards(ClipReward(path=clip, head=linear_path))
    np.testing.assert_allclose(rewards, (unit @ linear["weight"].T).expand(2, 2), atol=1e-5)


def test_the_last_picture_is_scored_and_without_a_picture_there_is_no_score(clip):
    reward, (first, last) = build_reward(ClipReward(path=clip)), PICTURES
    assert reward(TEXTS[0], "", "", images=[first, last]) == reward(TEXTS[0], "", "", images=[last])
    for missing in ({}, {"images": []}):
        with pytest.raises(ValueError, match="picture"):
            reward(TEXTS[0], "", "", **missing)


@pytest.mark.system
def test_a_reward_process_gives_the_same_scores_twice(clip):
    images = {digest_of(encoded): encoded for encoded in PICTURES}
    cases = [Case(TEXTS[0], "", "", images=(digest,)) for digest in images]
    evaluator = Evaluator(ScoringConfig(rewards=(ClipReward(path=clip),), timeout_seconds=600))
    try:
        first, again = (evaluator.evaluate(cases, InMemoryImages(images)) for _ in range(2))
    finally:
        evaluator.close()
    assert first == again and [verdict.error for verdict in first] == [None, None]
    expected = [[row[0]] for row in compute_rewards(ClipReward(path=clip))]
    np.testing.assert_allclose([verdict.values for verdict in first], expected, atol=1e-6)


def test_the_dependencies_of_a_reward_contain_every_file_and_change_with_the_weights(clip, copy):
    before, same = (
        rescoring_dependencies(ScoringConfig(rewards=(ClipReward(path=each),))).data for each in (clip, copy)
    )
    assert {path.rpartition("/")[2] for path in before} == {path.name for path in clip.iterdir()}
    change_files(copy, {"model.safetensors": {"logit_scale": torch.tensor(2.0)}})
    after = rescoring_dependencies(ScoringConfig(rewards=(ClipReward(path=copy),))).data
    assert [path for path in same if same[path].digest != after[path].digest] == [str(copy / "model.safetensors")]


# ---- in worker slots


def read_verdicts(directory, root, *, pictures=PICTURES, texts=TEXTS, **settings):
    """Score a shard of pictures, one of each text, with a worker. Return its rows of verdicts."""
    store = open_store(str(root / "run"))
    reward = ClipModelReward(model=ClipModel(path=directory, **settings))
    with store.scratch() as folder:
        write_served_model(reward, folder, problems=(), seed=0)
        model = ModelVersion(0, publish_bundle(store, folder, prefix="judges"))
    digests = {digest_of(encoded): encoded for encoded in pictures}
    rows = [
        rollout(row, 0, "", prompt=text) | {"images": [digest] if digest else []}
        for row, (text, digest) in enumerate(zip(texts, digests or [None], strict=True))
    ]
    media = tuple(write_shard(store, each, kind=MEDIA, metadata={}) for each in media_tables(pictures))
    worker = RewardModelWorker(str(root), "run", "look", reward, 1)
    [verdicts] = worker.judge(JudgeWork(1, write_rollouts(store, *rows), model=model, seed=0, media=media)).shards
    return read_shard(store, verdicts, VERDICT_SCHEMA.names).to_pylist()


def test_a_worker_in_a_slot_gives_the_scores_of_the_reward_clip(clip, tmp_path):
    expected = [row[column] for column, row in enumerate(compute_rewards(ClipReward(path=clip, value="logit")))]
    assert [row["value"] for row in read_verdicts(clip, tmp_path, value="logit")] == expected


def test_a_worker_in_a_slot_uses_the_stored_copy_of_the_head(clip, tmp_path):
    write_head(tmp_path / "head.safetensors", weight=(1, WIDTH))
    head = {"head": tmp_path / "head.safetensors"}
    expected = [row[0] for row in compute_rewards(ClipReward(path=clip, **head))]
    assert [row["value"] for row in read_verdicts(clip, tmp_path, **head)] == expected


def test_a_completion_without_a_picture_gets_no_score_from_a_worker(clip, tmp_path):
    [row] = read_verdicts(clip, tmp_path, pictures=(), texts=TEXTS[:1])
    assert row["value"] is None and "no picture" in row["error"]


@pytest.mark.gpu
def test_batched_scores_on_a_gpu_agree_with_the_scores_on_the_cpu(clip):
    images = [decode_rgb(encoded) for encoded in PICTURES]
    expected = [
        ClipScorer(ClipReward(path=clip)).score([text], [image])[0] for text, image in zip(TEXTS, images, strict=True)
    ]
    scores = ClipScorer(ClipReward(path=clip), device="cuda").score(TEXTS, images)
    np.testing.assert_allclose(scores, expected, atol=1e-4)


# ---- refused directories and heads


def refuse_reward(**settings):
    with pytest.raises(BadInput) as refused:
        build_reward(ClipReward(**settings))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"config.json": None}, ["config.json"]),
        ({"config.json": {"model_type": "llama"}}, ["'llama'", "config.json"]),
        ({"config.json": {"projection_dim": WIDTH + 1}}, []),
        (dict.fromkeys(PROCESSOR_FILES), [*PROCESSOR_FILES]),
        ({"processor_config.json": None, "preprocessor_config.json": "{"}, ["processor cannot be loaded"]),
        ({"processor_config.json": None, "preprocessor_config.json": {"crop_size": LARGE}}, ["24*24"]),
        (
            {"model.safetensors": {"visual_projection.weight": None}},
            ["not contain the weight visual_projection.weight"],
        ),
        ({"tokenizer.json": None}, ["tokenizer.json", "vocab.json"]),
    ],
)
def test_a_directory_that_is_not_a_complete_clip_is_refused(copy, changes, parts):
    change_files(copy, changes)
    message = refuse_reward(path=copy)
    assert message.startswith(f"reward 'clip': path {copy}")
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    "layers",
    [{}, {"a.1.weight": (1, WIDTH + 1)}, {"a.1.weight": (5, WIDTH), "a.2.weight": (1, 4)}, {"w.weight": (2, WIDTH)}],
)
def test_a_head_must_map_the_embedding_to_one_number(clip, tmp_path, layers):
    write_head(tmp_path / "head.safetensors", **layers)
    message = refuse_reward(path=clip, head=tmp_path / "head.safetensors")
    assert re.search(rf"{WIDTH} inputs.* to 1 output.*{re.escape(str([*layers.values()]))}", message)


def test_a_missing_directory_and_a_head_that_is_no_safetensors_or_has_a_value_are_refused(clip, tmp_path):
    assert "no such directory" in refuse_reward(path=tmp_path / "none")
    path = tmp_path / "head.pth"
    path.write_bytes(b"pickle")
    assert "head.pth: " in (message := refuse_reward(path=clip, head=path)) and "safetensors" in message
    with pytest.raises(ValidationError, match=r"'logit'.*head"):
        ClipReward(path=clip, head=path, value="logit")
    config = RunConfig(data=ArithmeticData(), scoring=ScoringConfig(rewards=(ClipReward(path=clip, head=path),)))
    assert RunConfig.model_validate(config.identity()).fingerprint() == config.fingerprint()
