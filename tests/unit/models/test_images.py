"""Images of problems: read from any kind of column, part of what a problem is, refused with the place of the fault."""

import base64
import json
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from PIL import Image

from infra.errors import BadInput
from models.config.data import FileData
from models.config.training import WarmupConfig
from models.data.examples import Example, warmup_examples
from models.data.images import check_pixels, digest_of, read_header
from models.data.problems import ImagePlace, Message, Problem, identity, load_problems
from models.text.tokenizer import tokenize_problems, train_tokenizer, with_room
from tests.support.pictures import animation, claiming, picture

RED, BLUE = picture("red"), picture("blue")
QUESTION = "What colour?"


def rows_file(folder: Path, *images: object, **columns: object) -> FileData:
    """Write a line with the same question for each value of the images column."""
    lines = [json.dumps({"prompt": QUESTION, "answer": "x", "images": each} | columns) for each in images]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return FileData(path=folder / "a.jsonl", heldout_path=folder / "a.jsonl", images_column="images")


def refusal(folder: Path, image: object, **columns: object) -> str:
    """Return what is said of a row."""
    with pytest.raises(BadInput) as raised:
        load_problems(rows_file(folder, image, **columns), "train", 0)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_image_is_read_from_a_path_bytes_a_struct_or_a_data_address_alone_or_in_a_list(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    address = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    inline = load_problems(
        rows_file(tmp_path, "red.png", ["red.png"], address, {"path": "red.png", "bytes": None}), "train", 0
    )
    table = pa.table({"prompt": [QUESTION] * 2, "answer": ["x"] * 2, "images": [RED, RED]})
    structs = table.set_column(
        2, "images", pa.array([[{"bytes": RED, "path": "gone.png"}], [{"bytes": RED, "path": None}]])
    )
    for name, each in {"plain": table, "structs": structs}.items():
        pq.write_table(each, tmp_path / f"{name}.parquet")
        data = FileData(path=tmp_path / f"{name}.parquet", images_column="images", heldout_fraction=1e-9)
        inline += load_problems(data, "train", 0)
    assert [problem.images for problem in inline] == [(RED,)] * 8


def test_paths_begin_in_the_root_that_is_named(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "blue.png").write_bytes(BLUE)
    data = rows_file(tmp_path, ["blue.png"], []).model_copy(update={"images_root": tmp_path / "pictures"})
    assert [problem.images for problem in load_problems(data, "train", 0)] == [(BLUE,), ()]


def test_two_rows_with_one_text_and_two_pictures_are_two_problems():
    red, blue, text = (Problem("a:1", QUESTION, "", images=images) for images in ((RED,), (BLUE,), ()))
    assert len({red.identity, blue.identity, text.identity}) == 3
    assert Problem("b:7", QUESTION, "", images=(RED,)).identity == red.identity
    assert (
        Problem("b:7", QUESTION, "", images=(RED, BLUE)).identity
        != Problem("", QUESTION, "", images=(BLUE, RED)).identity
    )


def test_what_shows_no_images_is_named_as_it_always_was():
    assert identity("1+1?") == "1+1?"
    assert (
        identity((Message("system", "Be brief."), Message("user", "ä?"))) == '[["system", "Be brief."], ["user", "ä?"]]'
    )


def test_rows_of_one_text_are_split_by_their_pictures(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(picture(f"rgb({number}, 0, 0)"))
    data = rows_file(tmp_path, *(f"{number}.png" for number in range(60)))
    data = data.model_copy(update={"heldout_path": None, "heldout_fraction": 0.3})
    train, heldout = (load_problems(data, split, 0) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 60
    assert 5 < len(heldout) < 35
    assert {problem.images for problem in train}.isdisjoint(problem.images for problem in heldout)


def test_messages_say_where_their_images_are(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " What?"}]
    data = rows_file(tmp_path, "red.png", prompt=[{"role": "user", "content": parts}])
    [problem] = load_problems(data, "train", 0)
    assert problem.prompt == (Message("user", ("Look: ", ImagePlace(), " What?")),)


def test_warm_up_examples_have_the_images_of_their_problems(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    [example] = warmup_examples(rows_file(tmp_path, "red.png"), WarmupConfig(steps=1, batch_size=1), 0)
    assert example == Example(QUESTION, "x", (RED,))


# ---- what is refused


def test_an_image_that_is_not_there_or_leads_elsewhere_is_bad_input(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret.png").write_bytes(RED)
    (home / "link.png").symlink_to(tmp_path / "secret.png")
    assert "a.jsonl:1: images: " in (said := refusal(home, "gone.png")) and "No such file" in said
    for outside in ("../secret.png", "link.png", str(tmp_path / "secret.png")):
        assert f"found {outside[:80]!r} outside it" in refusal(home, [outside])  # paths of pytest-xdist are long
    assert "found the address 'https://a.b/c.png'" in refusal(home, "https://a.b/c.png")
    assert "data:image/...;base64" in refusal(home, "data:text/html;base64,AA==")
    assert "not base64" in refusal(home, "data:image/png;base64,A")
    assert "images: expected a path, bytes, {bytes, path} or data" in refusal(home, 7)


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (b"no image at all", "not decodable: expected an image"),
        (animation(), r"found an animation or several pages \(2 of them\)"),
        (picture(size=(201, 1)), "expected sides of 1 to 200 at most, found 201 x 1"),
        (claiming(0, 5), "not decodable|expected an image with pixels, found 0 x 5"),
        (claiming(12_000, 12_000), "expected at most 89,478,485 pixels, found 12000 x 12000"),
        (claiming(60_000, 60_000), "expected at most 89,478,485 pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not decodable"),
    ],
)
def test_what_no_model_could_see_is_bad_input(encoded, message):
    with pytest.raises(BadInput, match=message) as raised:
        read_header(encoded, where="a.jsonl:1: images")
    assert str(raised.value).startswith("a.jsonl:1: images: ")
    assert "\n" not in str(raised.value)


def test_a_torn_image_is_found_when_its_pixels_are_read():
    torn = picture(size=(300, 300), kind="JPEG")[:-400]
    assert read_header(torn, where="a").size == (300, 300)
    with pytest.raises(BadInput, match="a: not decodable: image file is truncated"):
        check_pixels(torn, where="a")


def test_a_file_without_the_column_of_images_is_bad_input(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    data = rows_file(tmp_path, "red.png")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b", "image": "red.png"}))
    with pytest.raises(BadInput, match=r"b.jsonl:1: no column 'images', did you mean 'image'\?"):
        load_problems(data.model_copy(update={"heldout_path": tmp_path / "b.jsonl"}), "heldout", 0)


def test_a_chat_with_places_for_more_or_fewer_images_is_bad_input(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    assert "a.jsonl:1: the messages have places for 2 images, found 1" in refusal(tmp_path, "red.png", prompt=chat)
    odd = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    assert 'prompt[0].content[0]: expected {type: "image"} or {type: "text", text}' in refusal(tmp_path, [], prompt=odd)


# ---- tokens


class Squares:
    """Reads an image of w x h as w * h / 64 tokens."""

    shown = "<image>"

    def __init__(self, tokenizer) -> None:
        self._place = tokenizer.convert_tokens_to_ids(self.shown)

    def num_tokens(self, size):
        return size.width * size.height // 64

    def expand(self, tokens, sizes):
        left = list(sizes)
        if list(tokens).count(self._place) != len(left):
            raise ValueError(f"expected {len(left)} placeholders, found {list(tokens).count(self._place)}")
        found = []
        for token in tokens:
            found += [token] * (self.num_tokens(left.pop(0)) if token == self._place else 1)
        return found


@pytest.fixture
def seeing():
    tokenizer = train_tokenizer([QUESTION] * 3, vocab_size=300, context=64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer, Squares(tokenizer)


def test_the_images_of_a_plain_prompt_come_before_its_text_as_many_tokens_as_each_takes(seeing):
    tokenizer, squares = seeing
    problem = Problem("a:1", QUESTION, "", images=(RED, picture(size=(8, 8))))
    [prompt] = tokenize_problems([problem], tokenizer, squares)
    place, text = tokenizer.convert_tokens_to_ids("<image>"), tokenizer(QUESTION)["input_ids"]
    assert prompt.input.tokens.tolist() == [place] * 10 + text
    assert prompt.input.images == tuple(blake3(image).hexdigest() for image in problem.images)
    assert (prompt.text, prompt.image_tokens) == (QUESTION, (9, 1))


CHAT = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)


def test_the_images_of_a_chat_stand_where_it_says_else_before_the_users_first_text(seeing):
    tokenizer, squares = seeing
    tokenizer.chat_template = CHAT
    says = (Message("user", ("a", ImagePlace(), "b")),)
    silent = (Message("system", "s"), Message("user", "a"))
    problems = [Problem("a:1", says, "", images=(RED,)), Problem("a:2", silent, "", images=(RED,))]
    texts = [prompt.text for prompt in tokenize_problems(problems, tokenizer, squares)]
    assert texts == ["user:a<image>b;", "system:s;user:<image>a;"]


def test_a_chat_without_images_is_not_lost_in_a_template_that_knows_parts_alone(seeing):
    tokenizer, squares = seeing
    tokenizer.chat_template = CHAT
    [prompt] = tokenize_problems([Problem("a:1", (Message("user", "hi"),), "")], tokenizer, squares)
    assert prompt.text == "user:hi;"


def test_a_text_that_spells_a_placeholder_is_bad_input(seeing):
    tokenizer, squares = seeing
    with pytest.raises(BadInput, match="a:1: expected 1 placeholders, found 2"):
        tokenize_problems([Problem("a:1", "<image> What?", "", images=(RED,))], tokenizer, squares)


def test_images_for_a_policy_that_reads_text_alone_are_bad_input(seeing):
    with pytest.raises(BadInput, match="a:1: expected a prompt without images, found 1: the policy reads text alone"):
        tokenize_problems([Problem("a:1", QUESTION, "", images=(RED,))], seeing[0])


def test_a_prompt_that_is_too_long_says_what_its_images_take(seeing):
    problems = [Problem("a:1", QUESTION, "", images=(RED, RED))]
    prompts = tokenize_problems(problems, *seeing)
    with pytest.raises(
        BadInput, match=r"a:1: the prompt has \d+ tokens \(9 for image 1, 9 for image 2\), expected 1 to"
    ):
        with_room([*zip(problems, prompts, strict=True)], max_tokens=12, too_long="refuse", split="train")


def test_a_photograph_that_is_to_be_turned_has_the_size_that_is_shown():
    turn = Image.Exif()
    turn[0x0112] = 6
    sink = BytesIO()
    Image.new("RGB", (30, 10)).save(sink, "JPEG", exif=turn)
    assert read_header(sink.getvalue(), where="a").size == (10, 30)


def test_an_image_is_named_by_its_bytes():
    assert digest_of(RED) == blake3(RED).hexdigest() == read_header(RED, where="").digest
