"""Pictures to be counted: what is drawn is what is answered, and no picture is in both splits."""

import re
from collections import Counter
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image

from models.config.data import PicturesData
from models.data.arithmetic import right_completion, wrong_completion
from models.data.pictures import CELL, CELLS, COLOURS, MASKS
from models.data.problems import Problem, load_problems

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


def test_a_worked_answer_reads_the_cells_of_its_picture_and_counts_the_asked_colour():
    for problem in load_problems(DATA, "train", 0):
        asked = problem.prompt.removeprefix("How many ").removesuffix("?")
        count, work = 0, []
        for cell in read_cells(problem.images[0]):
            count += cell is not None and cell[1] == asked
            work.append(f"{cell[0] if cell else '.'}{count}")
        assert problem.worked == f" {' '.join(work)} #### {count}"
        assert problem.answer == f" #### {count}"


def test_the_same_seed_draws_the_same_pictures_and_another_seed_others():
    first, again, other = (load_problems(DATA, "train", seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_training_picture_is_never_a_heldout_picture_of_any_seed():
    train, heldout = (
        {each.identity for s in range(2) for each in load_problems(DATA, split, s)} for split in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (400, 80)
    assert train.isdisjoint(heldout)


def test_no_count_is_so_common_that_a_guess_pays():
    answers = [problem.answer for problem in load_problems(DATA, "train", 0)]
    assert max(answers.count(answer) for answer in answers) < 0.35 * len(answers)


def test_a_cell_of_a_common_colour_is_counted_more_often_whatever_is_asked():
    counted = {colour: [] for colour in COLOURS}
    for problem in load_problems(PicturesData(), "train", 0):
        for cell in read_cells(problem.images[0]):
            if cell is not None:
                counted[cell[1]].append(cell[1] == problem.prompt.removeprefix("How many ").removesuffix("?"))
    shares = [np.mean(each) for each in counted.values()]
    np.testing.assert_allclose(shares, (0.5, 0.25, 0.15, 0.1), atol=0.03)
    common = [len(each) for each in counted.values()]
    np.testing.assert_allclose(np.array(common) / sum(common), (0.5, 0.25, 0.15, 0.1), atol=0.02)


def counts_of(worked):
    """The shapes that a worked answer reads, its counts, and its answer."""
    read, _, answer = worked.strip().partition(" #### ")
    cells = read.split()
    return [cell[0] for cell in cells], [int(cell[1:]) for cell in cells], int(answer)


def test_a_judge_is_shown_miscounts_what_other_pictures_show_and_other_numbers():
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


def test_answers_that_were_worked_in_other_words_are_shown_as_they_are():
    problem = Problem("a:1", "How many?", "#### 7", "Room B12 has 3 and C4 has 4 #### 7")
    assert {right_completion(problem, Random(seed)) for seed in range(8)} == {problem.worked}


def test_a_right_answer_is_shown_worked_half_of_the_time():
    problems, rng = load_problems(DATA, "train", 0), Random(0)
    shown = [(problem, right_completion(problem, rng)) for problem in problems]
    assert all(said in (problem.worked, problem.answer) for problem, said in shown)
    assert 60 < sum(said == problem.answer for problem, said in shown) < 140
