"""The tokens and pixels that a vision-language policy reads for a text with images."""

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers import Idefics3Processor, LlavaProcessor

from rheostat.infra.errors import BadInput
from rheostat.models.vision.color_conversion import decode_rgb
from rheostat.models.vision.families import ImageSize
from rheostat.models.vision.processor import load_processor
from tests.support.policies import write_policy
from tests.support.vision import FAMILIES, picture, tiny_tokenizer, write_seeing


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {kind: write_seeing(tmp_path_factory.mktemp(kind), kind) for kind in FAMILIES}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(24, 24), (48, 24), (20, 60)])
def test_a_prompt_has_the_image_tokens_and_patches_that_the_vision_tower_encodes(directories, kind, width, height):
    processor = load_processor(directories[kind])
    image = processor.prepare(picture(1, width=width, height=height))
    tokens = processor.expand([5, processor.place_id, 8, processor.place_id, 6], [ImageSize(width, height)] * 2)
    assert (tokens[0], tokens[-1]) == (5, 6)
    assert tokens.count(processor.image_id) == 2 * image.tokens > 0
    pixels = image.arrays["pixel_values"]
    patches = len(pixels) if kind.startswith("qwen") else pixels.size // (3 * 4 * 4)  # Qwen has a row per patch
    assert processor.image_tokens.patches(np.array(tokens, np.int32)) == 2 * patches > 0


LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


@pytest.mark.parametrize(
    ("kind", "theirs", "settings", "width"),
    [
        ("idefics3", Idefics3Processor, {"image_seq_len": 9}, 24),
        ("smolvlm", Idefics3Processor, {"image_seq_len": 9}, 48),  # cut into rows and columns
        ("llava", LlavaProcessor, LLAVA, 24),
    ],
)
def test_expanded_tokens_and_pixels_are_those_of_the_processor_in_transformers(
    directories, kind, theirs, settings, width
):
    processor, tokenizer = load_processor(directories[kind]), tiny_tokenizer()
    whole = theirs(FAMILIES[kind][1](), tokenizer, **settings)
    encoded, text = picture(2, width=width), "see <image> red"
    expected = whole(images=[decode_rgb(encoded)], text=[text], return_tensors="np")
    assert processor.expand(tokenizer(text)["input_ids"], [ImageSize(width, 24)]) == expected["input_ids"][0].tolist()
    assert np.array_equal(processor.prepare(encoded).arrays["pixel_values"].ravel(), expected["pixel_values"].ravel())


def test_newlines_around_an_image_are_encoded_together(directories):
    processor, tokenizer = load_processor(directories["gemma3"]), tiny_tokenizer()
    spelt = tokenizer.decode(processor.encode_image(ImageSize(24, 24)))
    found = processor.expand(tokenizer("How\n<boi>\n many")["input_ids"], [ImageSize(24, 24)])
    assert found == tokenizer(f"How\n{spelt}\n many")["input_ids"]


def test_more_images_than_placeholders_are_refused_with_both_numbers(directories):
    processor = load_processor(directories["idefics3"])
    with pytest.raises(ValueError, match=r"<image> 1 time, but it has 2 images"):
        processor.expand([processor.place_id], [ImageSize(24, 24)] * 2)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gemma3"])
def test_collapsing_expanded_tokens_gives_the_placeholders_back(directories, kind):
    processor, sizes = load_processor(directories[kind]), [ImageSize(24, 24), ImageSize(48, 24), ImageSize(24, 24)]
    folded = [5, processor.place_id, 6, processor.place_id, processor.place_id, 7]
    assert processor.collapse(processor.expand(folded, sizes), sizes) == folded


def test_incomplete_image_tokens_cannot_be_collapsed(directories):
    processor = load_processor(directories["idefics3"])
    written = processor.expand([5, processor.place_id, 6], [ImageSize(24, 24)])
    with pytest.raises(ValueError, match=r"token 0.* 12 tokens of the image"):
        processor.collapse([*written[:4], *written[5:]], [ImageSize(24, 24)])


def test_tokens_for_media_and_padding_are_banned(directories):
    vocabulary = tiny_tokenizer().get_vocab()
    for kind, names in {"idefics3": ["<image>"], "qwen3_vl": ["<|image_pad|>", "<|video_pad|>"]}.items():
        expected = {vocabulary[name] for name in [*names, "<|pad|>"]}
        assert set(load_processor(directories[kind]).banned) == expected


def test_a_text_policy_has_no_processor(tmp_path):
    write_policy(tmp_path)
    assert load_processor(tmp_path) is None


def test_a_vision_language_policy_without_preprocessor_settings_is_refused(tmp_path):
    write_seeing(tmp_path, "llava")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(BadInput, match=r"llava.*preprocessor_config\.json.*processor_config\.json"):
        load_processor(tmp_path)


def test_bytes_that_are_no_image_are_refused(directories):
    with pytest.raises(ValueError, match="decoded"):
        load_processor(directories["llava"]).prepare(b"GIF89a")


def test_an_image_that_idefics_would_treat_as_padding_is_refused(tmp_path):
    write_seeing(tmp_path, "idefics3")
    settings = tmp_path / "preprocessor_config.json"
    changed = json.loads(settings.read_text()) | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    settings.write_text(json.dumps(changed))
    black = BytesIO()
    Image.new("RGB", (24, 24)).save(black, format="PNG")
    with pytest.raises(ValueError, match="is 0 after normalization"):
        load_processor(tmp_path).prepare(black.getvalue())
