"""CLIP as a reward: the numbers of transformers' own features, and what is refused in one line."""

import json
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from infra.errors import BadInput
from models.config.reward_terms import ClipReward
from models.config.rewards import ScoringConfig
from models.data.images import digest_of
from models.modeling.policy import making_models
from models.records.media import HeldImages
from models.rewards.evaluate import Case, Evaluator
from models.rewards.rules import build_reward
from models.text.tokenizer import train_tokenizer
from tasks.config.run import RunConfig
from tasks.run.dependencies import rescoring_dependencies
from tests.support.vision import picture

TEXTS = ("red square left", "a blue circle " * 9)
PICTURES = tuple(picture(seed, width=20, height=30) for seed in range(2))
WIDTH = 12


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
    with making_models():
        model = CLIPModel(config)
    model.logit_scale.data.fill_(3.0)  # exp(3) = 20.1
    model.save_pretrained(directory)
    size = {"shortest_edge": 16}
    CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=16), tokenizer).save_pretrained(directory)
    CLIPImageProcessorPil(size=size, crop_size=16).save_pretrained(directory)
    return directory


@pytest.fixture
def copy(clip, tmp_path):
    directory = tmp_path / "copy"
    directory.mkdir()
    for path in clip.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def features(directory):
    """Embed texts and pictures all at once, padded, as transformers does."""
    model, processor = CLIPModel.from_pretrained(directory).eval(), CLIPProcessor.from_pretrained(directory)
    images = [Image.open(BytesIO(encoded)) for encoded in PICTURES]
    inputs = processor(text=[*TEXTS], images=images, return_tensors="pt", padding=True, truncation=True, max_length=16)
    pixels = inputs.pop("pixel_values")
    with torch.inference_mode():
        texts = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
        return texts, model.get_image_features(pixels).pooler_output, model(**inputs, pixel_values=pixels)


def head(path, **layers):
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in layers.items()}
    save_file(tensors, path)
    return tensors


def scores(config):
    reward = build_reward(config)
    return [[reward(text, "", "", images=[encoded]) for text in TEXTS] for encoded in PICTURES]


def test_the_value_is_the_cosine_of_transformers_own_features(clip):
    texts, images, _ = features(clip)
    expected = torch.nn.functional.cosine_similarity(images[:, None], texts[None], dim=-1)
    assert len({round(float(each), 3) for each in expected.flatten()}) == 4
    np.testing.assert_allclose(scores(ClipReward(path=clip)), expected, atol=1e-6)


def test_the_logit_is_the_models_own_over_100(clip):
    *_, output = features(clip)
    np.testing.assert_allclose(scores(ClipReward(path=clip, value="logit")), output.logits_per_image / 100, atol=1e-6)


def test_a_head_reads_the_image_alone(clip, tmp_path):
    shapes = {f"layers.{n}.{part}": shape for n, w, v in ((2, 5, WIDTH), (10, 1, 5))
              for part, shape in (("weight", (w, v)), ("bias", (w,)))}  # fmt: skip
    tensors = head(tmp_path / "head.safetensors", **shapes)
    _, images, _ = features(clip)
    unit = images / images.norm(dim=-1, keepdim=True)
    inner = unit @ tensors["layers.2.weight"].T + tensors["layers.2.bias"]
    expected = inner @ tensors["layers.10.weight"].T + tensors["layers.10.bias"]
    found = scores(ClipReward(path=clip, head=tmp_path / "head.safetensors"))
    np.testing.assert_allclose(found, expected.expand(2, 2), atol=1e-5)
    single = head(tmp_path / "linear.safetensors", weight=(1, WIDTH))
    found = scores(ClipReward(path=clip, head=tmp_path / "linear.safetensors"))
    np.testing.assert_allclose(found, (unit @ single["weight"].T).expand(2, 2), atol=1e-5)


def test_the_last_picture_counts_and_without_one_there_is_no_score(clip):
    reward, (first, last) = build_reward(ClipReward(path=clip)), PICTURES
    assert reward(TEXTS[0], "", "", images=[first, last]) == reward(TEXTS[0], "", "", images=[last])
    for missing in ({}, {"images": []}):
        with pytest.raises(ValueError, match="expected a picture, found none"):
            reward(TEXTS[0], "", "", **missing)


@pytest.mark.system
def test_a_worker_scores_by_it_in_a_process_of_its_own_twice_alike(clip):
    images = {digest_of(encoded): encoded for encoded in PICTURES}
    cases = [Case(TEXTS[0], "", "", images=(digest,)) for digest in images]
    evaluator = Evaluator(ScoringConfig(rewards=(ClipReward(path=clip),), timeout_seconds=60))
    try:
        first, again = (evaluator.evaluate(cases, HeldImages(images)) for _ in range(2))
    finally:
        evaluator.close()
    assert first == again and [verdict.error for verdict in first] == [None, None]
    expected = [[row[0]] for row in scores(ClipReward(path=clip))]
    np.testing.assert_allclose([verdict.values for verdict in first], expected, atol=1e-6)


def test_another_model_in_the_directory_is_a_change(clip, copy):
    before, same = (
        rescoring_dependencies(ScoringConfig(rewards=(ClipReward(path=each),))).data for each in (clip, copy)
    )
    assert {path.rpartition("/")[2] for path in before} == {path.name for path in clip.iterdir()}
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"logit_scale": torch.tensor(2.0)}, weights, metadata={"format": "pt"})
    after = rescoring_dependencies(ScoringConfig(rewards=(ClipReward(path=copy),))).data
    assert [path for path in same if same[path].digest != after[path].digest] == [str(weights)]


def refusal(**settings):
    with pytest.raises(BadInput) as refused:
        build_reward(ClipReward(**settings))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_directory_that_is_no_whole_clip_is_refused_in_one_line(copy, tmp_path):
    assert "no such directory" in refusal(path=tmp_path / "none")
    config = json.loads((copy / "config.json").read_text())
    start = f"reward 'clip': path {copy}: expected a CLIP, "

    def written(**changes):
        (copy / "config.json").write_text(json.dumps(config | changes))

    written(model_type="llama")
    assert refusal(path=copy) == f"{start}found model_type 'llama' in config.json"
    written(projection_dim=WIDTH + 1)
    assert refusal(path=copy).startswith(f"reward 'clip': path {copy}: ")
    written()
    settings = {name: (copy / name).read_bytes() for name in ("preprocessor_config.json", "processor_config.json")}
    for name in settings:
        (copy / name).unlink()
    expected = "with preprocessor_config.json or processor_config.json beside it, found none"
    assert refusal(path=copy) == start + expected
    (copy / "preprocessor_config.json").write_text("{")
    assert refusal(path=copy).startswith(f"{start}its processor does not load: ")
    larger = json.loads(settings["preprocessor_config.json"]) | {"crop_size": {"height": 24, "width": 24}}
    (copy / "preprocessor_config.json").write_text(json.dumps(larger))
    assert refusal(path=copy).startswith(f"{start}processor and model do not fit: Input image size (24*24)")
    (copy / "preprocessor_config.json").write_bytes(settings["preprocessor_config.json"])
    tensors = load_file(copy / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert refusal(path=copy).endswith("1 weights are missing from its safetensors, first visual_projection.weight")
    (copy / "tokenizer.json").unlink()
    assert refusal(path=copy) == f"{start}with tokenizer.json or vocab.json beside it, found none"
    (copy / "config.json").unlink()
    assert refusal(path=copy).startswith(f"{start}config.json does not load: ")


@pytest.mark.parametrize(
    "layers",
    [{}, {"a.1.weight": (1, WIDTH + 1)}, {"a.1.weight": (5, WIDTH), "a.2.weight": (1, 4)}, {"w.weight": (2, WIDTH)}],
)
def test_a_head_that_does_not_lead_from_the_embedding_to_one_number_is_refused(clip, tmp_path, layers):
    head(tmp_path / "head.safetensors", **layers)
    said = refusal(path=clip, head=tmp_path / "head.safetensors")
    assert f"expected linear layers from {WIDTH} numbers to 1, found weights of {[*layers.values()]}" in said


def test_a_head_that_is_no_safetensors_or_stands_beside_a_value_is_refused(clip, tmp_path):
    (tmp_path / "head.pth").write_bytes(b"pickle")
    assert "head.pth: expected a file of safetensors" in refusal(path=clip, head=tmp_path / "head.pth")
    with pytest.raises(ValidationError, match="value 'logit' with head"):
        ClipReward(path=clip, head=tmp_path / "head.pth", value="logit")
    config = RunConfig(scoring=ScoringConfig(rewards=(ClipReward(path=clip, head=tmp_path / "head.pth"),)))
    assert RunConfig.model_validate(config.identity()).fingerprint() == config.fingerprint()
