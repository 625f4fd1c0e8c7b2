"""The reward of paintings: what it calls right in pixels, at any scale, and what it refuses."""

from io import BytesIO
from random import Random

import numpy as np
import pytest
from PIL import Image

from models.config.data import PaintingsData
from models.config.reward_terms import PaintingReward
from models.config.rewards import ScoringConfig
from models.data.images import digest_of
from models.data.paintings import GROUND, MOTIFS, painted, pretraining_examples
from models.data.problems import load_problems
from models.records.media import HeldImages
from models.rewards.evaluate import Case, Evaluator
from models.rewards.rules import build_reward

RED = (230, 40, 40)


def png(levels, scale=1):
    """Encode levels of 0 to 255, each pixel so many times as large."""
    pixels = np.rint(np.asarray(levels)).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
    sink = BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def levels(pixels):
    return (pixels + 1) * 127.5


def judge(answer, *images):
    return build_reward(PaintingReward())("", "", answer, images=[*images])


def ground(*red):
    """Dark pixels, of which some (row, column) are red."""
    found = np.full((8, 8, 3), GROUND)
    for row, column in red:
        found[row, column] = RED
    return found


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("motif", MOTIFS, ids="-".join)
def test_a_true_painting_is_right_and_under_every_other_colour_or_place_wrong(motif, scale):
    rng = Random(1)
    for _ in range(8):
        encoded = png(levels(painted(*motif, rng)), scale)
        for said in MOTIFS:
            is_true = (said.colour, said.place) == (motif.colour, motif.place)
            assert judge(said.facts, encoded) == float(is_true)


def test_of_captions_that_lie_half_of_the_time_13_in_24_are_right():
    scores = []
    for caption, pixels in pretraining_examples(PaintingsData(), 4096, 5):
        facts = next(motif.facts for motif in MOTIFS if {*motif} == {*caption.split()})
        scores.append(judge(facts, png(levels(pixels))))
    assert np.mean(scores) == pytest.approx(13 / 24, abs=0.025)


def test_the_middle_may_be_so_far_from_its_place_and_no_farther():
    # "left" is 2 pixels from the left and 4 from the top, 0.14 of the width 1.12 pixels
    def block(top, left):
        return png(ground(*((top + row, left + column) for row in (0, 1) for column in (0, 1))))

    assert judge("red square left", block(3, 1)) == 1  # its middle is 2, 4
    assert judge("red square left", block(3, 2)) == judge("red square left", block(4, 1)) == 1  # 1 off
    assert judge("red square left", block(4, 2)) == 0  # 1.41 off
    assert judge("red square left", block(3, 3)) == 0  # 2 off


def test_two_blobs_nothing_and_a_shape_of_another_colour_than_asked_are_wrong():
    whole = [(row, column) for row in (3, 4) for column in (1, 2)]
    assert judge("red circle left", png(ground(*whole))) == 1  # of its shape nothing is asked
    assert judge("red square left", png(ground(*whole, (0, 7)))) == 0
    assert judge("red square left", png(ground((3, 1), (4, 2)))) == 0  # pixels that meet at a corner are two
    assert judge("red square left", png(ground())) == 0
    assert judge("green square left", png(ground(*whole))) == 0


def test_the_last_picture_counts():
    right, wrong = png(ground((3, 1), (4, 1))), png(ground((0, 0)))
    assert judge("red square left", wrong, right) == 1
    assert judge("red square left", right, wrong) == 0


def test_a_picture_shown_larger_is_the_mean_of_its_blocks():
    large = ground((3, 1), (4, 1)).repeat(2, 0).repeat(2, 1)
    large[6, 2] = GROUND  # a quarter of a red pixel is dark: it still is nearer to red
    large[0, 0] = RED  # a quarter of a dark pixel is red: it still is nearer to the ground
    assert judge("red square left", png(large)) == 1
    large[0:2, 0:2] = RED
    assert judge("red square left", png(large)) == 0


@pytest.mark.parametrize(
    ("answer", "images", "said"),
    [
        ("#### 7", [png(ground())], "no colour, shape and place, such as 'red square left', in the reference '#### 7'"),
        ("pink square left", [], "in the reference 'pink square left'"),
        ("red square left", [], "expected a picture, found none"),
        ("red square left", [b"no picture"], "no image that can be decoded"),
        ("red square left", [png(np.zeros((12, 12, 3)))], "8 x 8 pixels or a multiple, found 12 x 12"),
        ("red square left", [png(np.zeros((8, 16, 3)))], "8 x 8 pixels or a multiple, found 16 x 8"),
    ],
)
def test_what_cannot_be_judged_has_no_score(answer, images, said):
    with pytest.raises(ValueError, match=said):
        judge(answer, *images)


def test_references_are_known_to_fit_before_there_are_pictures():
    reward = build_reward(PaintingReward())
    for split in ("train", "heldout"):
        found = [reward("", "", each.answer) for each in load_problems(PaintingsData(), split, 0)]
        assert np.isnan(found).all()  # which is no score
    with pytest.raises(ValueError, match="in the reference"):
        reward("", "", "#### 7")


def test_a_worker_gives_the_reward_the_pictures_of_its_completions():
    pictures = {digest_of(each): each for each in (png(ground((3, 1), (4, 1)), 8), png(ground((0, 0)), 8))}
    cases = [Case("", "", "red square left", images=(digest,)) for digest in pictures]
    evaluator = Evaluator(ScoringConfig(rewards=(PaintingReward(),)))
    try:
        found = evaluator.evaluate([*cases, Case("", "", "red square left")], HeldImages(pictures))
    finally:
        evaluator.close()
    assert [verdict.values for verdict in found] == [(1.0,), (0.0,), (None,)]
    assert found[2].error == "painting: ValueError: expected a picture, found none"
