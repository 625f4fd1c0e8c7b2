"""Paintings as problems, and the reward that compares the pixels of a painting with its reference."""

from collections import Counter
from contextlib import closing
from io import BytesIO
from random import Random

import numpy as np
import pytest
from PIL import Image

from rheostat.models.config.reward_terms import TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.data.images import digest_of
from rheostat.models.data.problems import load_problems
from rheostat.models.records.media import InMemoryImages
from rheostat.models.rewards.evaluate import Case, Evaluator
from tests.support.demos import demo_module

MOTIF, PAINTINGS, REWARD = (demo_module("paint", name) for name in ("motifs", "paintings", "painting"))
COLOURS, GROUND, MOTIFS, PLACES = MOTIF.COLOURS, MOTIF.GROUND, MOTIF.MOTIFS, MOTIF.PLACES
paint, pretraining_examples, PaintingsData = PAINTINGS.paint, PAINTINGS.pretraining_examples, PAINTINGS.PaintingsData
DATA = PaintingsData()
RED = (230, 40, 40)


# ---- problems


def test_each_of_the_24_motifs_is_a_problem_once_in_either_split_and_no_prompt_is_in_both():
    train, heldout = (load_problems(DATA, split, 0) for split in ("train", "heldout"))
    answers = {f"{c} {s} {p}" for c in ("red", "green", "blue") for s in ("square", "circle") for p in PLACES}
    assert len(answers) == 24 == DATA.num_heldout_problems
    for problems in (train, heldout):
        assert sorted(problem.answer for problem in problems) == sorted(answers)
        assert {word for each in problems for word in each.prompt.split()} == {
            w for each in answers for w in each.split()
        }
    assert {each.identity for each in train}.isdisjoint(each.identity for each in heldout)
    for problem in (*train, *heldout):
        assert sorted(problem.prompt.split()) == sorted(problem.answer.split())


def test_the_same_seed_gives_the_same_problems_and_paintings():
    assert load_problems(DATA, "train", 3) == load_problems(DATA, "train", 3) != load_problems(DATA, "train", 4)
    first, again, other = (pretraining_examples(DATA, 50, seed) for seed in (3, 3, 4))
    for one, two in zip(first, again, strict=True):
        assert one.caption == two.caption
        np.testing.assert_array_equal(one.pixels, two.pixels)
    assert [each.caption for each in first] != [each.caption for each in other]


@pytest.mark.parametrize("motif", MOTIFS, ids="-".join)
def test_a_painting_has_its_shape_in_its_colour_at_its_place(motif):
    rng, variants = Random(0), set()
    for _ in range(40):
        pixels = paint(*motif, rng)
        assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.float32)
        assert -1 <= pixels.min() <= pixels.max() <= 1
        bytes_YX = np.rint((pixels + 1) * 127.5)
        inside = (bytes_YX != GROUND).any(-1)
        rows, columns = np.nonzero(inside)
        width = np.ptp(rows) + 1
        expected = {("square", 3): 9, ("square", 4): 16, ("circle", 3): 5, ("circle", 4): 12}
        assert inside.sum() == expected[motif.shape, width]
        middle = np.array([columns.mean() + 0.5, rows.mean() + 0.5])
        distance = np.abs(middle - 8 * np.array(PLACES[motif.place]))
        assert (distance == (0.5 if width == 3 else 0)).all()
        assert np.abs(bytes_YX[inside] - COLOURS[motif.colour]).max() <= 25.5
        variants.add((width, *middle))
    assert len(variants) == 5  # one place of the larger shape, four of the smaller


@pytest.mark.thorough
def test_half_of_the_captions_have_a_random_colour_and_place():
    # 1/2 + 1/2 · 1/3, 1/2 + 1/2 · 1/4 and 1/2 + 1/2 · 1/12; the shape is always right
    right = Counter()
    for caption, pixels in pretraining_examples(DATA, 4096, 0):
        words, facts = {*caption.split()}, describe(pixels)
        right.update(name for name in facts if facts[name] in words)
        right["both"] += {facts["colour"], facts["place"]} <= words
        right["heldout"] += caption.split()[0] in PLACES
    shares = {name: count / 4096 for name, count in right.items()}
    expected = {"colour": 2 / 3, "place": 5 / 8, "both": 13 / 24, "shape": 1, "heldout": 1 / 2}
    assert shares == pytest.approx(expected, abs=0.025)
    assert shares["shape"] == 1


def test_every_caption_is_right_without_caption_noise():
    for caption, pixels in pretraining_examples(PaintingsData(caption_noise=0), 200, 0):
        assert {*caption.split()} == {*describe(pixels).values()}


def describe(pixels):
    """Return the colour, shape and place of a painting, from its pixels."""
    levels = (pixels + 1) * 127.5
    inside = np.abs(levels - GROUND).max(-1) > 1
    rows, columns = np.nonzero(inside)
    middle = (columns.mean() + 0.5) / 8, (rows.mean() + 0.5) / 8
    return {
        "colour": min(COLOURS, key=lambda name: np.abs(levels[inside].mean(0) - COLOURS[name]).sum()),
        "shape": "square" if inside.sum() in (9, 16) else "circle",
        "place": min(PLACES, key=lambda name: np.hypot(*np.subtract(middle, PLACES[name]))),
    }


# ---- the reward


def encode_png(levels, scale=1):
    """Encode levels of 0 to 255, with every pixel enlarged by the scale."""
    pixels = np.rint(np.asarray(levels)).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
    sink = BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def judge(answer, *images):
    return REWARD.painting("", "", answer, images=[*images])


def paint_red(*places):
    """Return dark pixels with red ones at the given (row, column)."""
    levels = np.full((8, 8, 3), GROUND)
    for row, column in places:
        levels[row, column] = RED
    return levels


def block_at(top, left):
    """Return the four places of a block of 2 x 2 pixels."""
    return [(top + row, left + column) for row in (0, 1) for column in (0, 1)]


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("motif", MOTIFS, ids="-".join)
def test_a_painting_is_right_only_for_its_colour_and_place(motif, scale):
    rng = Random(1)
    for _ in range(8):
        encoded = encode_png((paint(*motif, rng) + 1) * 127.5, scale)
        for other in MOTIFS:
            is_right = (other.colour, other.place) == (motif.colour, motif.place)
            assert judge(other.reference, encoded) == float(is_right)


@pytest.mark.parametrize(
    ("answer", "red", "score"),
    [
        # "left" is 2 pixels from the left and 4 from the top; the tolerance of 0.14 of the width is 1.12 pixels
        ("red square left", block_at(3, 1), 1),  # the middle is at 2, 4
        ("red square left", block_at(3, 2), 1),  # 1 off
        ("red square left", block_at(4, 1), 1),  # 1 off
        ("red square left", block_at(4, 2), 0),  # 1.41 off
        ("red square left", block_at(3, 3), 0),  # 2 off
        ("red circle left", block_at(3, 1), 1),  # the shape does not count
        ("red square left", [*block_at(3, 1), (0, 7)], 0),  # two shapes
        ("red square left", [(3, 1), (4, 2)], 0),  # pixels that touch at a corner are two shapes
        ("red square left", [], 0),
        ("green square left", block_at(3, 1), 0),
    ],
)
def test_a_painting_is_right_if_it_has_one_shape_of_the_colour_near_the_place(answer, red, score):
    assert judge(answer, encode_png(paint_red(*red))) == score


def test_the_last_image_counts():
    right, wrong = encode_png(paint_red((3, 1), (4, 1))), encode_png(paint_red((0, 0)))
    assert judge("red square left", wrong, right) == 1
    assert judge("red square left", right, wrong) == 0


def test_a_pixel_of_a_larger_image_is_the_mean_of_its_block():
    large = paint_red((3, 1), (4, 1)).repeat(2, 0).repeat(2, 1)
    large[6, 2] = GROUND  # a quarter of a red pixel is dark: it is still nearer to red
    large[0, 0] = RED  # a quarter of a dark pixel is red: it is still nearer to the ground
    assert judge("red square left", encode_png(large)) == 1
    large[0:2, 0:2] = RED
    assert judge("red square left", encode_png(large)) == 0


@pytest.mark.parametrize(
    ("answer", "images", "message"),
    [
        ("pink square left", [], r"'red square left'.*'pink square left'"),
        ("red square left", [encode_png(np.zeros((12, 12, 3)))], r"multiple of 8.* 12 x 12"),
        ("red square left", [encode_png(np.zeros((8, 16, 3)))], r"multiple of 8.* 16 x 8"),
    ],
)
def test_an_image_or_a_reference_that_cannot_be_judged_is_an_error(answer, images, message):
    with pytest.raises(ValueError, match=message):
        judge(answer, *images)


def test_references_of_problems_are_accepted_before_there_are_images():
    for split in ("train", "heldout"):
        assert {judge(each.answer) for each in load_problems(DATA, split, 0)} == {0}


def test_the_evaluator_passes_the_images_of_a_completion_to_the_reward():
    images = {digest_of(each): each for each in (encode_png(paint_red(*at), 8) for at in (block_at(3, 1), [(0, 0)]))}
    cases = [Case("", "", "red square left", images=digests) for digests in ((each,) for each in images)]
    cases.append(Case("", "", "red", images=()))
    with closing(
        Evaluator(ScoringConfig(rewards=(TargetReward(name="painting", target="painting:painting"),)))
    ) as evaluator:
        verdicts = evaluator.evaluate(cases, InMemoryImages(images))
    assert [verdict.values for verdict in verdicts] == [(1.0,), (0.0,), (None,)]
    assert verdicts[2].error.startswith("painting: ValueError: ")
