"""Images with other colors than RGB of 8 bits keep their shades, and transparent ones are composed on a color."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData
from rheostat.models.data.images import open_picture, read_header
from rheostat.models.data.problems import load_problems
from rheostat.models.vision.color_conversion import READINGS, count_conversions, decode_rgb
from rheostat.tasks.run.preflight import IMAGE_READINGS, describe_images
from tests.support.data_files import write_lines
from tests.support.pictures import picture, write_color_tiff, write_png, write_tiff

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
        (write_tiff((RAMP * 4095).astype(int), bits=12), SHADES),
        (write_tiff((RAMP * 65535).astype("<u2"), bits=16, photometric=0), 255 - SHADES),
        (write_tiff((RAMP * 65535 - 32768).astype("<i2"), bits=16, sample_format=2), SHADES),
        (write_tiff((RAMP * 4294967295).astype("<u4"), bits=32), SHADES),
        (write_tiff((RAMP * 255 - 128).astype("i1"), bits=8, sample_format=2), SHADES),
        (write_tiff(RAMP.astype("<f4"), bits=32, sample_format=3, photometric=0), 255 - SHADES),
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
        (encode(Image.new("YCbCr", (8, 8), (81, 90, 240)), "TIFF"), (238, 14, 13)),
        (encode(Image.new("LAB", (8, 8), (128, 128, 128)), "TIFF"), (119, 119, 119)),
        (encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
        (encode(Image.new("P", (8, 8), 0), transparency=bytes([0])), (255, 255, 255)),
        (encode(Image.new("P", (8, 8), 0), "GIF", transparency=0), (255, 255, 255)),
        (encode(Image.new("RGBA", (8, 8), CLEAR_RED), "WEBP", lossless=True), (255, 255, 255)),
        (write_png([b"\x00\x0f" * 8] * 8, width=8, bits=16, color=0, tRNS=b"\x00\x0f"), (255, 255, 255)),
        (write_png([b"\x12\x34" * 24] * 8, width=8, bits=16, color=2, tRNS=b"\x12\x34" * 3), (255, 255, 255)),
        (write_png([b"\xf0\x00" * 24] * 8, width=8, bits=16, color=2), (239, 239, 239)),
        (write_png([b"\x11" * 4] * 8, width=8, bits=4, color=0, tRNS=b"\0\1"), (255, 255, 255)),
        (write_png([b"\x55" * 2] * 8, width=8, bits=2, color=0, tRNS=b"\0\1"), (255, 255, 255)),
        (write_png([b"\0"] * 8, width=8, bits=1, color=0, tRNS=b"\0\0"), (255, 255, 255)),
        (write_png([b"\x80\0\x80\0" * 8] * 8, width=8, bits=16, color=4), (191, 191, 191)),
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
        assert np.array_equal(np.asarray(decode_rgb(after)), np.asarray(open_picture(before)))
    assert count_conversions([*loaded, *loaded]) == {"images": 4, "16 bits": 1, "transparent": 1}


def test_the_background_of_transparent_images_can_be_chosen(tmp_path):
    [image] = load_images(tmp_path, colored(CLEAR_RED), image_background="#102030")
    assert decode_rgb(image).getpixel((0, 0)) == (0x10, 0x20, 0x30)


def test_images_of_stored_runs_keep_their_bytes(tmp_path):
    images = [gray(RAMP * 65535, np.uint16), colored(CLEAR_RED)]
    assert load_images(tmp_path, *images, image_background="unconverted") == images


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (29, 9)), (6, (9, 0)), (8, (0, 29))])
def test_the_size_and_the_pixels_of_an_image_are_upright(kind, orientation, corner):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (30, 10))
    image.paste("white", (0, 0, 2, 2))
    encoded = encode(image, kind, exif=exif)
    pixels = decode_rgb(encoded)
    assert pixels.size == read_header(encoded, where="a").size == ((10, 30) if orientation in (6, 8) else (30, 10))
    assert pixels.getpixel(corner)[0] > 200
    assert count_conversions([encoded]).get("rotated", 0) == (orientation != 1)


def write_deep(levels_YXC, kind):
    """Encode color, or gray with transparency, with 16 bits per channel."""
    _, width, channels = levels_YXC.shape
    if kind == "PNG":
        rows = [row.astype(">u2").tobytes() for row in levels_YXC]
        return write_png(rows, width=width, bits=16, color={2: 4, 3: 2, 4: 6}[channels])
    return write_color_tiff(levels_YXC.astype(kind))


@pytest.mark.parametrize(("kind", "channels"), [("PNG", 2), ("PNG", 3), ("PNG", 4), ("<u2", 3), (">u2", 3), (">u2", 4)])
def test_colors_of_16_bits_are_rounded_to_the_nearest_of_8_bits(tmp_path, kind, channels):
    levels_YXC = np.random.default_rng(0).integers(0, 65536, (16, 16, channels))
    if channels != 3:
        levels_YXC[..., -1] = 65535
    nearest_YXC = np.rint(levels_YXC[..., : 3 if channels > 2 else 1] / 65535 * 255)
    encoded = write_deep(levels_YXC, kind)
    [image] = load_images(tmp_path, encoded)
    assert (np.asarray(decode_rgb(image)) == nearest_YXC).all()
    assert (np.asarray(open_picture(encoded)) == nearest_YXC).all()
    assert count_conversions([image]) == {"images": 1, "rounded color": 1}


def test_transparency_and_colors_of_16_bits_are_composed_after_rounding(tmp_path):
    levels_YXC = np.full((8, 8, 4), 61440)
    levels_YXC[..., -1] = 32768
    [image] = load_images(tmp_path, write_deep(levels_YXC, "PNG"), image_background="black")
    assert decode_rgb(image).getpixel((0, 0)) == (120, 120, 120)


def test_colors_of_16_bits_that_fit_8_bits_and_those_of_earlier_runs_keep_their_bytes(tmp_path):
    fitting = write_deep(np.full((8, 8, 3), 257 * 9), "PNG")
    assert load_images(tmp_path, fitting) == [fitting]
    other = write_deep(np.full((8, 8, 3), 61440), "PNG")
    assert load_images(tmp_path, other, image_version=1) == [other]


@pytest.mark.parametrize("orientation", [3, 6])
def test_colors_of_16_bits_are_rounded_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    levels_YXC = np.random.default_rng(0).integers(0, 65536, (4, 8, 3))
    rows = [row.astype(">u2").tobytes() for row in levels_YXC]
    encoded = write_png(rows, width=8, bits=16, color=2, eXIf=exif.tobytes().removeprefix(b"Exif\0\0"))
    turned = np.rot90(levels_YXC, 2 if orientation == 3 else -1)
    assert (np.asarray(open_picture(encoded)) == np.rint(turned / 257)).all()


def test_images_that_are_read_differently_than_their_file_suggests_are_counted():
    deep = write_png([b"\xf0\x00" * 24] * 8, width=8, bits=16, color=2)
    inked = encode(Image.new("CMYK", (8, 8)), "JPEG")
    assert count_conversions([deep, inked, picture("red")]) == {"images": 3, "color with 16 bits": 1, "CMYK": 1}


def test_the_plan_describes_images_that_are_converted_or_read_differently():
    counts = {"images": 31, "16 bits": 20, "transparent": 1, "rotated": 4, "CMYK": 2, "color with 16 bits": 1}
    facts = {f"images/{kind}": float(number) for kind, number in counts.items()}
    assert describe_images(facts, "black") == (
        "21 of 31 distinct images converted to RGB with 8 bits: 20 gray with 16 bits, 1 transparent; "
        "transparency on black; 4 rotated upright as their EXIF orientation specifies; 1 in color with 16 bits, of "
        "which the upper 8 are read; 2 in CMYK, converted without a color profile"
    )
    assert describe_images({"images/images": 31.0}, "black") == ""
    assert describe_images(facts, "black", group="warm-up images") == ""
    assert set(IMAGE_READINGS) == set(READINGS)


def test_a_converted_image_is_upright_in_its_pixels(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = Image.new("RGBA", (8, 4), HALF_BLUE)
    sideways.putpixel((0, 0), (255, 0, 0, 255))
    [image] = load_images(tmp_path, encode(sideways, exif=exif))
    assert Image.open(BytesIO(image)).size == (4, 8)
    assert decode_rgb(image).getpixel((3, 0)) == (255, 0, 0)


def test_a_truncated_image_that_needs_a_conversion_is_refused_with_its_row(tmp_path):
    noise = np.random.default_rng(0).integers(0, 65535, (64, 64))
    with pytest.raises(BadInput, match=r"rows\.jsonl:1: images: image 1: the pixels of the image cannot be decoded"):
        load_images(tmp_path, gray(noise, np.uint16, "PNG")[:2000])
