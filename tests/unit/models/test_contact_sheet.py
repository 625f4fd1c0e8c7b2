"""Layout of contact sheets: where each picture and its text are drawn and how pictures are scaled."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from rheostat.infra.errors import BadInput
from rheostat.models.rollouts.contact_sheet import GAP, LINE, PAPER, SheetPicture, SheetRow, contact_sheet

SIDE = 32


def encode_png(pixels):
    sink = BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(sink, "PNG")
    return sink.getvalue()


def encode_color(color, width=8, height=8):
    return encode_png(np.full((height, width, 3), color))


def draw_sheet(*rows, columns=3):
    """Return the pixels of a sheet with these prompts and pictures."""
    sheet = Image.open(BytesIO(contact_sheet(rows, columns=columns, side=SIDE)))
    assert (sheet.format, sheet.mode) == ("PNG", "RGB")
    return np.asarray(sheet)


def crop_picture(sheet, line, column, *, prompts=1):
    """Return the pixels of the picture in this line and column, below this number of prompts."""
    top, left = GAP + line * (SIDE + LINE + GAP) + prompts * LINE, GAP + column * (SIDE + GAP)
    return sheet[top : top + SIDE, left : left + SIDE]


def build_row(prompt, *pictures, reward=1.0):
    return SheetRow(prompt, tuple(SheetPicture(each, reward) for each in pictures))


def test_each_prompt_starts_a_line_and_its_pictures_wrap_after_the_last_column():
    colors = [(40 * number, 10, 200) for number in range(5)]
    first, second = build_row("first", *map(encode_color, colors[:4])), build_row("second", encode_color(colors[4]))
    sheet = draw_sheet(first, second)
    assert sheet.shape == (GAP + 3 * (SIDE + LINE + GAP) + 2 * LINE, GAP + 3 * (SIDE + GAP), 3)
    places = ((0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 0, 1), (2, 0, 2))
    for color, (line, column, prompts) in zip(colors, places, strict=True):
        assert (crop_picture(sheet, line, column, prompts=prompts) == color).all()
    paper = np.array([int(PAPER[at : at + 2], 16) for at in (1, 3, 5)])
    assert (crop_picture(sheet, 1, 1) == paper).all()
    narrow = draw_sheet(build_row("a", encode_color(9), encode_color(9)), columns=8)
    assert narrow.shape[1] == GAP + 2 * (SIDE + GAP), "a sheet is not wider than its longest line"


def test_small_pictures_are_enlarged_pixel_by_pixel_and_large_pictures_keep_their_aspect_ratio():
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3))
    sheet = draw_sheet(build_row("", encode_png(noise), encode_color((200, 0, 0), width=128, height=64)))
    np.testing.assert_array_equal(crop_picture(sheet, 0, 0), noise.repeat(4, 0).repeat(4, 1))
    is_red = (crop_picture(sheet, 0, 1) == (200, 0, 0)).all(-1)
    assert is_red[8:24].all() and not is_red[:8].any() and not is_red[24:].any()


def test_the_prompt_is_drawn_above_and_the_reward_below_a_picture():
    def count_ink(prompt, reward):
        sheet = draw_sheet(build_row(prompt, encode_color(9), reward=reward))
        above, below = sheet[GAP : GAP + LINE], sheet[GAP + LINE + SIDE : GAP + LINE + SIDE + LINE]
        return tuple(int((part != 255).any(-1).sum()) for part in (above, below))

    ink = {reward: count_ink("red", reward) for reward in (0.5, 1.0, None, -2.25)}
    assert all(ink[0.5])
    assert count_ink("", 0.5) == (0, ink[0.5][1])
    assert len({below for _, below in ink.values()}) == 4
    assert len({above for above, _ in ink.values()}) == 1


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("prompt", ["red square " * 400, "a\nb\tc\x00\u2028" * 300, "日本🙂" * 300])
def test_a_long_prompt_is_cut_to_one_line(prompt):
    sheet = draw_sheet(build_row(prompt, encode_color(9), encode_color(9)))
    assert sheet.shape == (GAP + SIDE + 2 * LINE + GAP, GAP + 2 * (SIDE + GAP), 3)
    assert (sheet[:, -GAP // 2 :] == 255).all(), "the margin is empty"
    assert (crop_picture(sheet, 0, 0) == 9).all()


def test_the_same_pictures_give_the_same_sheet_and_other_bytes_are_refused():
    rows = [build_row("red", encode_color(9), encode_color(200))]
    assert contact_sheet(rows, columns=2, side=SIDE) == contact_sheet(rows, columns=2, side=SIDE)
    with pytest.raises(BadInput, match="cannot be decoded"):
        contact_sheet([build_row("red", b"no picture")], columns=2, side=SIDE)
