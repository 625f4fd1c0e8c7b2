"""What a policy that sees makes of a text with images."""

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers import Idefics3Processor, LlavaProcessor

from infra.errors import BadInput
from models.vision.families import ImageSize
from models.vision.processor import load_processor, open_image
from tests.support.policies import write_policy
from tests.support.vision import FAMILIES, picture, tiny_tokenizer, write_seeing


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {kind: write_seeing(tmp_path_factory.mktemp(kind), kind) for kind in FAMILIES}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(24, 24), (48, 24), (20, 60)])
def test_an_image_takes_as_many_places_as_the_tower_makes_states_of_it(directories, kind, width, height):
    processor = load_processor(directories[kind])
    image = processor.prepare(picture(1, width=width, height=height))
    tokens = processor.expand([5, processor.place_id, 6], [ImageSize(width, height)])
    assert (tokens[0], tokens[-1]) == (5, 6)
    assert tokens.count(processor.image_id) == image.tokens > 0


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(24, 24), (48, 24), (20, 60)])
def test_the_patches_of_a_prompts_images_are_those_that_the_tower_reads(directories, kind, width, height):
    processor = load_processor(directories[kind])
    pixels = processor.prepare(picture(1, width=width, height=height)).arrays["pixel_values"]
    read = len(pixels) if kind.startswith("qwen") else pixels.size // (3 * 4 * 4)  # theirs come as rows of patches
    tokens = processor.expand([5, processor.place_id, 6, processor.place_id], [ImageSize(width, height)] * 2)
    assert processor.image_tokens.patches(np.array(tokens, np.int32)) == 2 * read > 0


@pytest.mark.parametrize(("kind", "theirs"), [("idefics3", Idefics3Processor), ("llava", LlavaProcessor)])
def test_expanded_tokens_and_pixels_are_those_of_the_familys_own_processor(directories, kind, theirs):
    processor = load_processor(directories[kind])
    parts = {"idefics3": {"image_seq_len": 9}}
    parts["llava"] = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    tokenizer = tiny_tokenizer()
    whole = theirs(FAMILIES[kind][1](), tokenizer, **parts[kind])
    encoded, text = picture(2), "see <image> red"
    expected = whole(images=[open_image(encoded)], text=[text], return_tensors="np")
    assert processor.expand(tokenizer(text)["input_ids"], [ImageSize(24, 24)]) == expected["input_ids"][0].tolist()
    assert np.array_equal(processor.prepare(encoded).arrays["pixel_values"].ravel(), expected["pixel_values"].ravel())


def test_images_cut_into_rows_and_columns_are_expanded_as_their_own_processor_does(directories):
    processor, tokenizer = load_processor(directories["smolvlm"]), tiny_tokenizer()
    whole = Idefics3Processor(FAMILIES["smolvlm"][1](), tokenizer, image_seq_len=9)
    expected = whole(images=[open_image(picture(2, width=48))], text=["a <image> b"], return_tensors="np")
    found = processor.expand(tokenizer("a <image> b")["input_ids"], [ImageSize(48, 24)])
    assert found == expected["input_ids"][0].tolist()


def test_newlines_around_an_image_are_read_as_one_run(directories):
    processor, tokenizer = load_processor(directories["gemma3"]), tiny_tokenizer()
    spelt = tokenizer.decode(processor.spell(ImageSize(24, 24)))
    found = processor.expand(tokenizer("How\n<boi>\n many")["input_ids"], [ImageSize(24, 24)])
    assert found == tokenizer(f"How\n{spelt}\n many")["input_ids"]


def test_more_images_than_places_are_refused_with_both_numbers(directories):
    processor = load_processor(directories["idefics3"])
    with pytest.raises(ValueError, match="1 times <image> and 2 images"):
        processor.expand([processor.place_id], [ImageSize(24, 24)] * 2)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gemma3"])
def test_what_was_written_out_is_folded_up_again(directories, kind):
    processor, sizes = load_processor(directories[kind]), [ImageSize(24, 24), ImageSize(48, 24), ImageSize(24, 24)]
    folded = [5, processor.place_id, 6, processor.place_id, processor.place_id, 7]
    assert processor.collapse(processor.expand(folded, sizes), sizes) == folded


def test_tokens_that_are_not_all_of_an_image_are_not_folded_up(directories):
    processor = load_processor(directories["idefics3"])
    written = processor.expand([5, processor.place_id, 6], [ImageSize(24, 24)])
    with pytest.raises(ValueError, match="expected 12 tokens of an image behind token 0, found others"):
        processor.collapse([*written[:4], *written[5:]], [ImageSize(24, 24)])


def test_the_tokens_that_stand_for_media_and_padding_are_no_words(directories):
    vocabulary = tiny_tokenizer().get_vocab()
    for kind, names in {"idefics3": ["<image>"], "qwen3_vl": ["<|image_pad|>", "<|video_pad|>"]}.items():
        expected = {vocabulary[name] for name in [*names, "<|pad|>"]}
        assert set(load_processor(directories[kind]).banned) == expected


def test_a_policy_that_reads_text_alone_has_no_processor(tmp_path):
    write_policy(tmp_path)
    assert load_processor(tmp_path) is None


def test_a_policy_that_sees_without_its_preprocessors_settings_is_refused(tmp_path):
    write_seeing(tmp_path, "llava")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(BadInput, match=r"preprocessor_config\.json or processor_config\.json beside a llava"):
        load_processor(tmp_path)


def test_bytes_that_are_no_image_are_refused(directories):
    with pytest.raises(ValueError, match="no image that can be decoded"):
        load_processor(directories["llava"]).prepare(b"GIF89a")


def test_an_image_that_idefics_would_take_for_padding_is_refused(tmp_path):
    write_seeing(tmp_path, "idefics3")
    settings = tmp_path / "preprocessor_config.json"
    changed = json.loads(settings.read_text()) | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    settings.write_text(json.dumps(changed))
    black = BytesIO()
    Image.new("RGB", (24, 24)).save(black, format="PNG")
    with pytest.raises(ValueError, match="every pixel is 0"):
        load_processor(tmp_path).prepare(black.getvalue())
