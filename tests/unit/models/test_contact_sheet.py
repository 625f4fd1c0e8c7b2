"""Contact sheets: where each picture stands, how it is enlarged, and that only the rest is text."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from infra.errors import BadInput
from models.rollouts.contact_sheet import GAP, LINE, PAPER, SheetPicture, SheetRow, contact_sheet

SIDE = 32


def png(pixels):
    sink = BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(sink, "PNG")
    return sink.getvalue()


def plain(colour, width=8, height=8):
    return png(np.full((height, width, 3), colour))


def drawn(*rows, columns=3):
    sheet = Image.open(BytesIO(contact_sheet(rows, columns=columns, side=SIDE)))
    assert (sheet.format, sheet.mode) == ("PNG", "RGB")
    return np.asarray(sheet)


def cell(sheet, line, column, *, prompts):
    """The square of a picture, below so many prompts."""
    top, left = GAP + line * (SIDE + LINE + GAP) + prompts * LINE, GAP + column * (SIDE + GAP)
    return sheet[top : top + SIDE, left : left + SIDE]


def row(prompt, *pictures, reward=1.0):
    return SheetRow(prompt, tuple(SheetPicture(each, reward) for each in pictures))


def test_each_row_begins_a_line_below_its_prompt_and_goes_on_in_lines_of_so_many_columns():
    colours = [(40 * number, 10, 200) for number in range(5)]
    sheet = drawn(row("first", *(plain(each) for each in colours[:4])), row("second", plain(colours[4])))
    assert sheet.shape == (GAP + 3 * (SIDE + LINE + GAP) + 2 * LINE, GAP + 3 * (SIDE + GAP), 3)
    for colour, line, column, prompts in zip(colours, (0, 0, 0, 1, 2), (0, 1, 2, 0, 0), (1, 1, 1, 1, 2), strict=True):
        assert (cell(sheet, line, column, prompts=prompts) == colour).all()
    paper = np.array([int(PAPER[at : at + 2], 16) for at in (1, 3, 5)])
    assert (cell(sheet, 1, 1, prompts=1) == paper).all()


def test_a_sheet_is_no_wider_than_its_longest_line():
    assert drawn(row("a", plain(9), plain(9)), columns=8).shape[1] == GAP + 2 * (SIDE + GAP)


def test_small_pictures_are_enlarged_pixel_by_pixel_and_large_ones_shrunk_whole():
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3))
    wide = plain((200, 0, 0), width=128, height=64)
    sheet = drawn(row("", png(noise), wide))
    np.testing.assert_array_equal(cell(sheet, 0, 0, prompts=1), noise.repeat(4, 0).repeat(4, 1))
    found = (cell(sheet, 0, 1, prompts=1) == (200, 0, 0)).all(-1)
    assert found[8:24].all() and not found[:8].any() and not found[24:].any()


def test_prompt_and_reward_are_written_where_they_belong_and_make_different_ink():
    def ink(prompt, reward):
        sheet = drawn(row(prompt, plain(9), reward=reward))
        above, below = sheet[GAP : GAP + LINE], sheet[GAP + LINE + SIDE : GAP + LINE + SIDE + LINE]
        return tuple(int((part != 255).any(-1).sum()) for part in (above, below))

    base = ink("red", 0.5)
    assert all(base)
    assert ink("", 0.5) == (0, base[1])
    different = {ink("red", reward)[1] for reward in (0.5, 1.0, None, -2.25)}
    assert len(different) == 4 and {ink("red", reward)[0] for reward in (1.0, None)} == {base[0]}


def test_a_long_prompt_is_cut_to_its_line_whatever_it_is_made_of():
    for hostile in ("red square " * 400, "a\nb\tc\x00\u2028" * 300, "日本🙂" * 300):
        sheet = drawn(row(hostile, plain(9), plain(9)))
        assert sheet.shape == (GAP + SIDE + 2 * LINE + GAP, GAP + 2 * (SIDE + GAP), 3)
        assert (sheet[:, -GAP // 2 :] == 255).all(), "nothing stands in the margin"
        assert (cell(sheet, 0, 0, prompts=1) == 9).all()


def test_the_same_pictures_make_the_same_sheet():
    rows = [row("red", plain(9), plain(200))]
    assert contact_sheet(rows, columns=2, side=SIDE) == contact_sheet(rows, columns=2, side=SIDE)


def test_what_is_no_picture_is_refused():
    with pytest.raises(BadInput, match="not decodable"):
        contact_sheet([row("red", b"no picture")], columns=2, side=SIDE)
