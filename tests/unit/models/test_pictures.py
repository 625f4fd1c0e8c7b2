"""Images in which shapes are counted: answers match the pixels, and no image is in both splits."""

import re
from collections import Counter
from io import BytesIO
from random import Random

import numpy as np
import pytest
from PIL import Image

from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.data.right_and_wrong import right_completion, wrong_completion
from tests.support.demos import demo_module

PICTURES = demo_module("vision", "pictures")
CELL, CELLS, COLOURS, MASKS = PICTURES.CELL, PICTURES.CELLS, PICTURES.COLOURS, PICTURES.MASKS
PicturesData = PICTURES.PicturesData
DATA = PicturesData(train_problems=200, heldout_problems=40)


def read_cells(encoded):
    """Read shapes and colours back from the pixels."""
    pixels = np.asarray(Image.open(BytesIO(encoded)).convert("RGB"))
    assert pixels.shape == (24, 24, 3)
    for place in range(CELLS**2):
        top, left = (CELL * each for each in divmod(place, CELLS))
        cell = pixels[top : top + CELL, left : left + CELL]
        found = [
            (shape, colour)
            for shape, mask in MASKS.items()
            for colour, rgb in COLOURS.items()
            if np.array_equal((cell == rgb).all(-1), mask)
        ]
        yield found[0] if found else None


def colour_of(problem):
    return problem.prompt.removeprefix("How many ").removesuffix("?")


def test_a_worked_answer_lists_the_cells_of_its_image_and_counts_the_colour_of_the_question():
    for problem in load_problems(DATA, "train", 0):
        count, work = 0, []
        for cell in read_cells(problem.images[0]):
            count += cell is not None and cell[1] == colour_of(problem)
            work.append(f"{cell[0] if cell else '.'}{count}")
        assert problem.worked == f" {' '.join(work)} #### {count}"
        assert problem.answer == f" #### {count}"


def test_images_are_equal_for_the_same_seed_only_and_no_training_image_is_held_out_for_any_seed():
    first, again, other = (load_problems(DATA, "train", seed) for seed in (3, 3, 4))
    assert first == again != other
    train, heldout = (
        {each.identity for s in range(2) for each in load_problems(DATA, split, s)} for split in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (400, 80)
    assert train.isdisjoint(heldout)


def test_no_count_is_common_enough_to_guess():
    answers = [problem.answer for problem in load_problems(DATA, "train", 0)]
    assert max(answers.count(answer) for answer in answers) < 0.35 * len(answers)


@pytest.mark.thorough
def test_colours_have_their_shares_among_cells_and_among_questions():
    counted = {colour: [] for colour in COLOURS}
    for problem in load_problems(PicturesData(), "train", 0):
        for cell in read_cells(problem.images[0]):
            if cell is not None:
                counted[cell[1]].append(cell[1] == colour_of(problem))
    expected = (0.5, 0.25, 0.15, 0.1)
    np.testing.assert_allclose([np.mean(each) for each in counted.values()], expected, atol=0.03)
    numbers = np.array([len(each) for each in counted.values()])
    np.testing.assert_allclose(numbers / numbers.sum(), expected, atol=0.02)


def counts_of(worked):
    """Return the shapes of a worked answer, its counts and its result."""
    read, _, answer = worked.strip().partition(" #### ")
    cells = read.split()
    return [cell[0] for cell in cells], [int(cell[1:]) for cell in cells], int(answer)


def test_wrong_completions_are_miscounts_worked_answers_of_other_images_and_other_numbers():
    problems, rng, shown = load_problems(DATA, "train", 0), Random(0), Counter()
    readings = {problem.worked for problem in problems}
    for problem in problems:
        shapes, counts, right = counts_of(problem.worked)
        for _ in range(4):
            wrong = wrong_completion(problem, problems, rng)
            if bare := re.fullmatch(r" #### (\d+)", wrong):
                assert int(bare[1]) != right
                shown["bare", len(bare[1])] += 1
            if wrong.count(" ") < 11 or wrong.endswith(" "):
                continue  # broken off, or an answer alone
            found, other, answer = counts_of(wrong)
            assert answer != right
            if (found, other) == (shapes, counts):
                shown["another number"] += 1
            elif wrong in readings:
                shown["another picture"] += 1
            else:
                shown["a miscount"] += 1
                assert (found, answer) == (shapes, other[-1])
                differences = [theirs - ours for theirs, ours in zip(other, counts, strict=True)]
                at = next(index for index, difference in enumerate(differences) if difference)
                assert shapes[at] != "."
                assert set(differences[at:]) in ({1}, {-1})
                assert 0 <= min(other) <= max(other) <= CELLS**2
    assert set(shown) == {("bare", 1), ("bare", 2), "another number", "another picture", "a miscount"}
    assert min(shown.values()) > 0.04 * shown.total()


def test_half_of_the_right_completions_are_worked_answers_and_other_answers_are_unchanged():
    problems, rng = load_problems(DATA, "train", 0), Random(0)
    completions = [(problem, right_completion(problem, rng)) for problem in problems]
    assert all(completion in (problem.worked, problem.answer) for problem, completion in completions)
    assert 60 < sum(completion == problem.answer for problem, completion in completions) < 140
    problem = Problem("a:1", "How many?", "#### 7", "Room B12 has 3 and C4 has 4 #### 7")
    assert {right_completion(problem, Random(seed)) for seed in range(8)} == {problem.worked}
