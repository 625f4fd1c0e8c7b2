"""Images with other colors than RGB of 8 bits keep their shades, and transparent ones are composed on a color."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from infra.errors import BadInput
from models.config.data import FileData
from models.data.color_conversion import count_conversions
from models.data.images import open_picture
from models.data.problems import load_problems
from models.vision.processor import open_image
from tests.support.data_files import write_lines
from tests.support.pictures import picture

RAMP = np.linspace(0, 1, 64).reshape(8, 8)
SHADES = np.rint(RAMP * 255).astype(np.uint8)
CLEAR_RED, HALF_BLUE = (255, 0, 0, 0), (0, 0, 255, 128)


def encode(image, kind="PNG", **options):
    sink = BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def gray(levels, dtype, kind="TIFF"):
    return encode(Image.fromarray(np.asarray(levels).astype(dtype)), kind)


def colored(pixel, mode="RGBA"):
    return encode(Image.new("RGBA", (8, 8), pixel).convert(mode))


def palette(background):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*background, 0, 0, 255])
    image.putpixel((0, 0), 1)
    return encode(image, transparency=0)


@pytest.mark.parametrize(
    ("encoded", "shades"),
    [
        (gray(RAMP * 65535, np.uint16, "PNG"), SHADES),
        (gray(RAMP * 65535, np.uint16), SHADES),
        (gray(RAMP * 65535, ">u2"), SHADES),
        (gray(RAMP * 65535, np.int32), SHADES),
        (gray(RAMP * 2e9 - 1e9, np.int32), SHADES),
        (gray(RAMP, np.float32), SHADES),
        (gray(RAMP * 1000 - 500, np.float32), SHADES),
        (gray(np.full((8, 8), 7.0), np.float32), np.zeros((8, 8))),
        (gray(np.where(RAMP < 0.5, np.nan, RAMP), np.float32), np.where(RAMP < 0.5, 0, SHADES)),
    ],
)
def test_shades_beyond_8_bits_are_scaled(encoded, shades):
    seen_YXC = np.asarray(open_picture(encoded)).astype(int)
    assert seen_YXC.shape == (8, 8, 3)
    assert abs(seen_YXC - np.asarray(shades, int)[..., None]).max() <= 1


@pytest.mark.parametrize(
    ("encoded", "pixel"),
    [
        (colored(CLEAR_RED), (255, 255, 255)),
        (colored(HALF_BLUE), (127, 127, 255)),
        (colored((0, 0, 0, 0), "LA"), (255, 255, 255)),
        (palette((255, 0, 0)), (255, 255, 255)),
        (encode(Image.new("RGB", (8, 8), (9, 8, 7)), transparency=(9, 8, 7)), (255, 255, 255)),
        (encode(Image.new("L", (8, 8), 9), transparency=9), (255, 255, 255)),
        (encode(Image.new("1", (8, 8), 1)), (255, 255, 255)),
        (encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
        (colored((1, 2, 3, 255)), (1, 2, 3)),
    ],
)
def test_every_kind_of_color_becomes_rgb_on_white(encoded, pixel):
    assert open_picture(encoded).getpixel((4, 4)) == pixel


def load_images(folder, *images, **settings):
    for number, encoded in enumerate(images):
        (folder / f"{number}.image").write_bytes(encoded)
    rows = [{"prompt": f"{number}?", "answer": "x", "images": f"{number}.image"} for number in range(len(images))]
    path = write_lines(folder / "rows.jsonl", *rows)
    data = FileData(path=path, heldout_path=path, images_column="images", **settings)
    return [problem.images[0] for problem in load_problems(data, "train", 0)]


def test_problems_have_images_that_policies_read_without_loss(tmp_path):
    images = gray(RAMP * 65535, np.uint16, "PNG"), colored(HALF_BLUE), colored((1, 2, 3, 255)), picture("red")
    loaded = load_images(tmp_path, *images)
    assert loaded[2:] == [*images[2:]]
    for before, after in zip(images, loaded, strict=True):
        assert np.array_equal(np.asarray(open_image(after)), np.asarray(open_picture(before)))
    assert count_conversions([*loaded, *loaded]) == {"images": 4, "16 bits": 1, "transparent": 1}


def test_the_background_of_transparent_images_can_be_chosen(tmp_path):
    [image] = load_images(tmp_path, colored(CLEAR_RED), image_background="#102030")
    assert open_image(image).getpixel((0, 0)) == (0x10, 0x20, 0x30)


def test_images_of_stored_runs_keep_their_bytes(tmp_path):
    images = [gray(RAMP * 65535, np.uint16), colored(CLEAR_RED)]
    assert load_images(tmp_path, *images, image_background="unconverted") == images


def test_a_converted_image_is_upright_in_its_pixels(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = Image.new("RGBA", (8, 4), HALF_BLUE)
    sideways.putpixel((0, 0), (255, 0, 0, 255))
    [image] = load_images(tmp_path, encode(sideways, exif=exif))
    assert Image.open(BytesIO(image)).size == (4, 8)
    assert open_image(image).getpixel((3, 0)) == (255, 0, 0)


def test_a_truncated_image_that_needs_a_conversion_is_refused_with_its_row(tmp_path):
    noise = np.random.default_rng(0).integers(0, 65535, (64, 64))
    with pytest.raises(BadInput, match=r"rows\.jsonl:1: image 1: the image cannot be decoded"):
        load_images(tmp_path, gray(noise, np.uint16, "PNG")[:2000])
