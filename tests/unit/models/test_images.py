"""Images of problems are read from any kind of column, identify the problem, and are checked before training."""

import base64
import zlib
from io import BytesIO
from pathlib import Path
from struct import pack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from PIL import Image

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data.examples import Example, warmup_examples
from rheostat.models.data.images import check_pixels, data_address, digest_of, read_header
from rheostat.models.data.problems import ImagePlace, Message, Problem, identity, load_problems
from rheostat.models.text.tokenizer import enforce_prompt_length, tokenize_problems, train_tokenizer
from tests.support.data_files import write_lines
from tests.support.pictures import animation, claiming, picture, write_png, write_tiff

RED, BLUE = picture("red"), picture("blue")
QUESTION = "What colour?"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "red.png").write_bytes(RED)
    return tmp_path


def write_rows(folder: Path, *images: object, prompt: object = QUESTION, **settings: object) -> FileData:
    """Write one line with the same prompt for each value of the images column."""
    path = write_lines(folder / "a.jsonl", *({"prompt": prompt, "answer": "x", "images": each} for each in images))
    return FileData(**{"path": path, "heldout_path": path, "images_column": "images"} | settings)


def test_an_image_is_a_path_or_bytes_or_a_struct_or_a_data_url_alone_or_in_a_list(folder):
    address = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    rows = write_rows(folder, "red.png", ["red.png"], address, {"path": "red.png", "bytes": None})
    problems = load_problems(rows, "train", 0)
    table = pa.table({"prompt": [QUESTION] * 2, "answer": ["x"] * 2, "images": [RED, RED]})
    structs = pa.array([[{"bytes": RED, "path": "gone.png"}], [{"bytes": RED, "path": None}]])
    for name, each in {"plain": table, "structs": table.set_column(2, "images", structs)}.items():
        pq.write_table(each, folder / f"{name}.parquet")
        data = FileData(path=folder / f"{name}.parquet", images_column="images", heldout_fraction=1e-9)
        problems += load_problems(data, "train", 0)
    assert [problem.images for problem in problems] == [(RED,)] * 8


def test_paths_of_images_are_relative_to_images_root(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "blue.png").write_bytes(BLUE)
    data = write_rows(tmp_path, ["blue.png"], [], images_root=tmp_path / "pictures")
    assert [problem.images for problem in load_problems(data, "train", 0)] == [(BLUE,), ()]


def test_the_images_and_their_order_identify_a_problem_and_its_line_does_not():
    images = ((RED,), (BLUE,), (), (RED, BLUE), (BLUE, RED))
    assert len({Problem("a:1", QUESTION, "", images=each).identity for each in images}) == 5
    assert len({Problem(line, QUESTION, "", images=(RED,)).identity for line in ("a:1", "b:7")}) == 1
    assert identity("1+1?") == "1+1?"
    chat = (Message("system", "Be brief."), Message("user", "ä?"))
    assert identity(chat) == '[["system", "Be brief."], ["user", "ä?"]]'


def test_rows_with_one_text_are_split_by_their_images(tmp_path):
    names = [f"{number}.png" for number in range(60)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(picture(f"rgb({number}, 0, 0)"))
    data = write_rows(tmp_path, *names, heldout_path=None, heldout_fraction=0.3)
    train, heldout = (load_problems(data, split, 0) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 60
    assert 5 < len(heldout) < 35
    assert {problem.images for problem in train}.isdisjoint(problem.images for problem in heldout)


def test_messages_mark_the_positions_of_their_images(folder):
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " What?"}]
    [problem] = load_problems(write_rows(folder, "red.png", prompt=[{"role": "user", "content": parts}]), "train", 0)
    assert problem.prompt == (Message("user", ("Look: ", ImagePlace(), " What?")),)


def test_warm_up_examples_have_the_images_of_their_problems(folder):
    [example] = warmup_examples(write_rows(folder, "red.png"), SupervisedWarmup(steps=1, batch_size=1), 0)
    assert example == Example(QUESTION, "x", (RED,))


# ---- files of images


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"no image at all", "cannot be decoded"),
        (b"", "empty"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript document.*cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing.*Convert"),
        (b"<?xml version='1.0'?>\n<!-- a -->\n<svg/>", "SVG drawing.*Convert"),
        (b"%PDF-1.7\n", "PDF document.*Convert"),
        (b"\n<!DOCTYPE html><html>", "HTML page"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC image.*Convert"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF image.*Convert"),
        (b"\x93NUMPY\1\0", "NumPy array"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (base64.b64encode(RED), "Base64 text"),
        (RED[:20], "PNG file cannot be decoded.*damaged"),
        (write_tiff(np.zeros((8, 8)), bits=64, sample_format=3), "TIFF file cannot be decoded.*64-bit"),
        (
            write_png([bytes(8)] * 8, width=8, bits=8, color=0, zTXt=b"a\0\0" + zlib.compress(bytes(1 << 21))),
            "PNG file",
        ),
        (animation(), r"animation .*\b2\b"),
        (picture(size=(201, 1)), "201 x 1 .*200 times"),
        (claiming(0, 5), "cannot be decoded|pixels.* 0 x 5"),
        (claiming(12_000, 12_000), "12000 x 12000 pixels.* 89,478,485 pixels"),
        (claiming(60_000, 60_000), "89,478,485 pixels"),
    ],
)
def test_an_image_that_no_model_can_use_is_refused(encoded, reason):
    with pytest.raises(BadInput, match=rf"^a\.jsonl:1: images: [^\n]*({reason})[^\n]*$"):
        read_header(encoded, where="a.jsonl:1: images")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("https://example.com/a.png", "URL"),
        ("S3://bucket/a.png", "URL"),
        ("/etc/passwd", "outside"),
        ("../a.png", "outside"),
        ("gone.png", "cannot be read: No such file"),
        (r"C:\pictures\a.png", "cannot be read: No such file"),
        ("", "expected the path of an image"),
        ("a\0.png", "expected the path of an image"),
        (base64.b64encode(RED * 40).decode(), "Base64"),
        ("data:text/plain,hello", "data:image"),
        ("data:image/png;base64,@@", "not contain valid Base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "SVG"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "expected an image"),
        ({"bytes": None, "path": None}, "expected an image"),
        (["red.png", None], "expected an image"),
        ([["red.png"]], "expected an image"),
        (7, "expected an image"),
    ],
)
def test_a_value_that_is_no_image_is_refused_with_file_row_and_column(folder, image, reason):
    with pytest.raises(BadInput, match=rf"a\.jsonl:1: images(\[\d\])?: [^\n]*({reason})[^\n]{{0,200}}$"):
        load_problems(write_rows(folder, image), "train", 0)


def test_the_content_and_not_the_name_decides_the_format_of_an_image(folder):
    (folder / "a:b.png").write_bytes(picture("blue", kind="JPEG"))
    upper = f"DATA:image/png;name=red.png;base64,{base64.b64encode(RED).decode()}"
    [named, in_url] = load_problems(write_rows(folder, "a:b.png", upper), "train", 0)
    assert read_header(named.images[0], where="").format == "JPEG"
    assert in_url.images == (RED,)


def test_a_photograph_with_previews_is_a_jpeg_file_for_judges(folder):
    sink = BytesIO()
    Image.new("RGB", (8, 8)).save(sink, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    assert data_address(sink.getvalue()).startswith("data:image/jpeg;base64,")


def test_a_truncated_image_is_refused_when_its_pixels_are_read():
    truncated = picture(size=(300, 300), kind="JPEG")[:-400]
    assert read_header(truncated, where="a").size == (300, 300)
    with pytest.raises(BadInput, match=r"a: .*truncated"):
        check_pixels(truncated, where="a")


def shorten_png(encoded, rows):
    """Return a PNG file with the compressed data of fewer rows, and everything else as before."""
    height = Image.open(BytesIO(encoded)).height
    begin = encoded.index(b"IDAT") - 4
    end = encoded.index(b"IEND") - 4
    pixels = zlib.decompress(encoded[begin + 8 : end - 4])
    content = b"IDAT" + zlib.compress(pixels[: len(pixels) * rows // height])
    chunk = pack(">I", len(content) - 4) + content + pack(">I", zlib.crc32(content))
    return encoded[:begin] + chunk + encoded[end:]


NOISE = Image.effect_noise((300, 300), 90).convert("RGB")


def encode(kind, size=(300, 300), **options):
    sink = BytesIO()
    NOISE.crop((0, 0, *size)).save(sink, kind, **options)
    return sink.getvalue()


COMPLETE = {
    "PNG": encode("PNG"),
    "JPEG": encode("JPEG"),
    "progressive JPEG": encode("JPEG", progressive=True),
    "WEBP": encode("WEBP"),
    "lossless WEBP": encode("WEBP", lossless=True),
    "GIF": encode("GIF"),
    "BMP": encode("BMP"),
    "TIFF": encode("TIFF"),
    "compressed TIFF": encode("TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("kind", COMPLETE)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_image_of_every_format_is_refused(kind, share):
    encoded = COMPLETE[kind]
    check_pixels(encoded, where="a")
    with pytest.raises(BadInput, match=r"^a: "):
        check_pixels(encoded[: int(len(encoded) * share)], where="a")


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (shorten_png(encode("PNG", (100, 100)), 99), "29,799 of 30,100 bytes of pixels"),
        (shorten_png(encode("PNG", (100, 100)), 1), "301 of 30,100 bytes of pixels"),
        (COMPLETE["PNG"][:-12], "no end .chunk IEND"),
        (COMPLETE["JPEG"][:-2000] + b"\xff\xd9", "ends before the last pixels"),
        (COMPLETE["progressive JPEG"][:-2000] + b"\xff\xd9", "ends before the last pixels"),
    ],
)
def test_an_image_whose_missing_pixels_would_be_filled_is_refused_except_in_earlier_runs(encoded, reason):
    with pytest.raises(BadInput, match=rf"^a: .*truncated.*{reason}"):
        check_pixels(encoded, where="a")
    check_pixels(encoded, where="a", allows_missing=True)


def test_an_interlaced_png_file_is_complete():
    passes = [b"\0\0", b"\0\0", b"\0\0\0", b"\0\0\0" * 2, b"\0\0\0" * 2, b"\0" * 4 * 4, b"\0" * 6 * 2]
    header = pack(">IIBBBBB", 5, 5, 8, 0, 0, 0, 1)
    encoded = b"\x89PNG\r\n\x1a\n" + b"".join(
        pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))
        for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(passes))), (b"IEND", b""))
    )
    check_pixels(encoded, where="a")


def test_a_photograph_with_an_exif_rotation_has_the_size_after_the_rotation():
    rotation = Image.Exif()
    rotation[0x0112] = 6
    sink = BytesIO()
    Image.new("RGB", (30, 10)).save(sink, "JPEG", exif=rotation)
    assert read_header(sink.getvalue(), where="a").size == (10, 30)


def test_the_digest_of_an_image_is_the_hash_of_its_bytes():
    assert digest_of(RED) == blake3(RED).hexdigest() == read_header(RED, where="").digest


# ---- tokens


class SquareProcessor:
    """Vision processor that encodes an image of w x h pixels as w * h / 64 tokens."""

    placeholder = shown = "<image>"

    def __init__(self, tokenizer) -> None:
        self._placeholder = tokenizer.convert_tokens_to_ids(self.shown)

    def count_tokens(self, size):
        return size.width * size.height // 64

    def expand(self, tokens, sizes):
        remaining = list(sizes)
        if (count := list(tokens).count(self._placeholder)) != len(remaining):
            raise ValueError(f"expected {len(remaining)} placeholders, found {count}")
        expanded = []
        for token in tokens:
            expanded += [token] * (self.count_tokens(remaining.pop(0)) if token == self._placeholder else 1)
        return expanded


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = train_tokenizer([QUESTION] * 3, vocab_size=300, context=64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def processor(tokenizer):
    return SquareProcessor(tokenizer)


def test_the_tokens_of_images_come_before_the_text_of_a_plain_prompt(tokenizer, processor):
    problem = Problem("a:1", QUESTION, "", images=(RED, picture(size=(8, 8))))
    [prompt] = tokenize_problems([problem], tokenizer, processor)
    placeholder, text = tokenizer.convert_tokens_to_ids("<image>"), tokenizer(QUESTION)["input_ids"]
    assert prompt.input.tokens.tolist() == [placeholder] * 10 + text
    assert prompt.input.images == tuple(blake3(image).hexdigest() for image in problem.images)
    assert (prompt.text, prompt.image_tokens) == (QUESTION, (9, 1))


@pytest.mark.parametrize(
    ("messages", "images", "text"),
    [
        ((Message("user", ("a", ImagePlace(), "b")),), (RED,), "user:a<image>b;"),
        ((Message("system", "s"), Message("user", "a")), (RED,), "system:s;user:<image>a;"),
        ((Message("user", "hi"),), (), "user:hi;"),
    ],
    ids=["at the placeholder of the message", "before the first text of the user", "no image"],
)
def test_the_images_of_a_chat_are_put_into_its_messages(tokenizer, processor, messages, images, text):
    [prompt] = tokenize_problems([Problem("a:1", messages, "", images=images)], tokenizer, processor)
    assert prompt.text == text


def test_a_prompt_that_cannot_be_tokenized_with_its_images_is_refused(tokenizer, processor):
    with pytest.raises(BadInput, match=r"a:1: .*1 placeholders.* 2"):
        prompts = [Problem("a:1", "<image> What?", "", images=(RED,))]
        tokenize_problems(prompts, tokenizer, processor, rules=TextRules("parse"))
    with pytest.raises(BadInput, match=r"a:1: .*1 image, .*only text"):
        tokenize_problems([Problem("a:1", QUESTION, "", images=(RED,))], tokenizer)


def test_a_placeholder_in_the_text_of_a_prompt_is_text(tokenizer, processor):
    [prompt] = tokenize_problems([Problem("a:1", "<image> What?", "", images=(RED,))], tokenizer, processor)
    assert prompt.image_tokens == (9,)
    assert tokenizer.decode(prompt.input.tokens) == "<image>" * 9 + "<image> What?"


def test_the_refusal_of_a_prompt_that_is_too_long_names_the_tokens_of_its_images(tokenizer, processor):
    problems = [Problem("a:1", QUESTION, "", images=(RED, RED))]
    prompts = tokenize_problems(problems, tokenizer, processor)
    with pytest.raises(BadInput, match=r"a:1: .*\d+ tokens \(9 for image 1, 9 for image 2\)"):
        enforce_prompt_length([*zip(problems, prompts, strict=True)], max_tokens=12, too_long="refuse", split="train")
