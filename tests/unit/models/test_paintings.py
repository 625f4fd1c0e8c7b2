"""Pictures to be painted: what is painted is what is asked, and no prompt is in both splits."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from models.config.data import PaintingsData
from models.data.paintings import COLOURS, GROUND, MOTIFS, PLACES, painted, pretraining_examples
from models.data.problems import load_problems

DATA = PaintingsData()


def test_each_of_the_24_pictures_is_asked_once_in_either_split_and_no_prompt_is_in_both():
    train, heldout = (load_problems(DATA, split, 0) for split in ("train", "heldout"))
    answers = {f"{c} {s} {p}" for c in ("red", "green", "blue") for s in ("square", "circle") for p in PLACES}
    assert len(answers) == 24 == DATA.heldout_known
    for problems in (train, heldout):
        assert sorted(problem.answer for problem in problems) == sorted(answers)
    assert {each.identity for each in train}.isdisjoint(each.identity for each in heldout)
    # Who has learnt the words of one split knows those of the other.
    assert {word for each in train for word in each.prompt.split()} == {
        word for each in heldout for word in each.prompt.split()
    }
    for problem in (*train, *heldout):
        assert sorted(problem.prompt.split()) == sorted(problem.answer.split())


def test_the_same_seed_asks_and_paints_alike():
    assert load_problems(DATA, "train", 3) == load_problems(DATA, "train", 3) != load_problems(DATA, "train", 4)
    first, again, other = (pretraining_examples(DATA, 50, seed) for seed in (3, 3, 4))
    for one, two in zip(first, again, strict=True):
        assert one.caption == two.caption
        np.testing.assert_array_equal(one.pixels, two.pixels)
    assert [each.caption for each in first] != [each.caption for each in other]


@pytest.mark.parametrize("motif", MOTIFS, ids="-".join)
def test_a_painting_has_its_shape_in_its_colour_at_its_place(motif):
    rng, seen = Random(0), set()
    for _ in range(40):
        pixels = painted(*motif, rng)
        assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.float32)
        assert -1 <= pixels.min() <= pixels.max() <= 1
        bytes_YX = np.rint((pixels + 1) * 127.5)
        inside = (bytes_YX != GROUND).any(-1)
        rows, columns = np.nonzero(inside)
        across = np.ptp(rows) + 1
        expected = {("square", 3): 9, ("square", 4): 16, ("circle", 3): 5, ("circle", 4): 12}
        assert inside.sum() == expected[motif.shape, across]
        middle = np.array([columns.mean() + 0.5, rows.mean() + 0.5])
        off = np.abs(middle - 8 * np.array(PLACES[motif.place]))
        assert (off == (0.5 if across == 3 else 0)).all()
        assert np.abs(bytes_YX[inside] - COLOURS[motif.colour]).max() <= 25.5
        seen.add((across, *middle))
    assert len(seen) == 5  # one place of the larger, four of the smaller


def test_half_of_the_captions_are_of_any_colour_and_place():
    # 1/2 + 1/2 · 1/3, 1/2 + 1/2 · 1/4 and 1/2 + 1/2 · 1/12; the shape is always said as it is
    right = Counter()
    for caption, pixels in pretraining_examples(DATA, 4096, 0):
        words = {*caption.split()}
        shown = seen_in(pixels)
        right["colour"] += shown["colour"] in words
        right["place"] += shown["place"] in words
        right["both"] += {shown["colour"], shown["place"]} <= words
        right["shape"] += shown["shape"] in words
        right["heldout"] += caption.split()[0] in PLACES
    shares = {name: count / 4096 for name, count in right.items()}
    assert shares == {
        "colour": pytest.approx(2 / 3, abs=0.025), "place": pytest.approx(5 / 8, abs=0.025),
        "both": pytest.approx(13 / 24, abs=0.025), "shape": 1, "heldout": pytest.approx(1 / 2, abs=0.025),
    }  # fmt: skip


def test_without_lies_every_caption_is_true():
    for caption, pixels in pretraining_examples(PaintingsData(lies=0), 200, 0):
        assert {*caption.split()} == {*seen_in(pixels).values()}


def seen_in(pixels):
    """Name what a painting shows, from its pixels."""
    levels = (pixels + 1) * 127.5
    inside = np.abs(levels - GROUND).max(-1) > 1
    rows, columns = np.nonzero(inside)
    middle = (columns.mean() + 0.5) / 8, (rows.mean() + 0.5) / 8
    return {
        "colour": min(COLOURS, key=lambda name: np.abs(levels[inside].mean(0) - COLOURS[name]).sum()),
        "shape": "square" if inside.sum() in (9, 16) else "circle",
        "place": min(PLACES, key=lambda name: np.hypot(*np.subtract(middle, PLACES[name]))),
    }
