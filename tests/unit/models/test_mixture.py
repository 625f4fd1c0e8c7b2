"""Problems of several files: each is drawn by its weight, from any place of the stream the same."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import BadInput
from models.config.data import FileData, MixtureData, WeightedFile
from models.data.curriculum import Cursor, Part, most_prompts, parts_of, take
from models.data.problems import load_problems
from tasks.config.run import override_config

UNEQUAL = (Part(range(40), 3), Part(range(40, 50), 1), Part(range(50, 150), 0.5))
ROWS = 150


def issued(counts: list[int], *, parts: tuple[Part, ...] = UNEQUAL, seed: int = 7) -> list[int]:
    """Rows of iterations that each take so many prompts and give none back."""
    cursor, rows = Cursor(), list[int]()
    for count in counts:
        taken, cursor = take(cursor, count, taken=(), num_prompts=parts[-1].rows.stop, seed=seed, parts=parts)
        assert len({*taken}) == count
        rows += taken
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_each_part_has_its_share_of_the_prompts_however_large_it_is(seed):
    rows = issued([8] * 500, seed=seed)
    found = Counter(next(n for n, part in enumerate(UNEQUAL) if row in part.rows) for row in rows)
    for number, part in enumerate(UNEQUAL):
        assert found[number] == pytest.approx(4000 * part.weight / 4.5, abs=8)


def test_the_first_place_is_of_a_part_with_the_probability_of_its_share():
    first = [issued([1], seed=seed)[0] for seed in range(600)]
    share = sum(row < 40 for row in first) / 600
    assert share == pytest.approx(3 / 4.5, abs=4 * np.sqrt(2 / 9 / 600))


def test_a_part_is_gone_through_whole_before_a_problem_of_it_comes_again():
    rows = [row for row in issued([20] * 100) if row in UNEQUAL[1].rows]
    epochs = [rows[start : start + 10] for start in range(0, len(rows) - 9, 10)]
    assert len(epochs) > 30
    assert all(sorted(epoch) == [*range(40, 50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 20, "each time in a new order"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 200_000), st.integers(1, 8))
def test_the_stream_goes_on_from_any_place_as_if_it_had_never_ended(position, count):
    """What was drawn before is counted anew, in blocks; a walk from there, place by place, is the same."""
    at_once, _ = take(Cursor(position=position), count, taken=(), num_prompts=ROWS, seed=7, parts=UNEQUAL)
    cursor, singly = Cursor(position=position), list[int]()
    while len(singly) < count:
        [row], after = take(cursor, 1, taken=singly, num_prompts=ROWS, seed=7, parts=UNEQUAL)
        singly.append(row)
        cursor = Cursor(position=after.position)
    assert tuple(singly) == at_once


def test_one_part_and_parts_of_which_one_is_left_are_drawn_as_no_parts_are():
    plain, _ = take(Cursor(position=3), 5, taken=(), num_prompts=9, seed=1)
    for parts in ((Part(range(9), 2),), (Part(range(0), 5), Part(range(9), 1))):
        assert take(Cursor(position=3), 5, taken=(), num_prompts=9, seed=1, parts=parts)[0] == plain


def test_the_largest_iteration_asks_no_part_for_more_than_it_has():
    assert most_prompts([1000, 5], [9, 1]) == (50, 1)
    assert most_prompts([10, 10], [1, 1]) == (20, 0)
    assert most_prompts([3, 0], [1, 1]) == (0, 1)


def test_parts_follow_each_other_as_a_manifest_tells_of_them():
    told = {"version": 0, "parts": {"rows": [40, 10, 100], "weights": [3, 1, 0.5]}}
    assert parts_of(told) == UNEQUAL
    assert parts_of({"version": 0}) == ()


# ---- files


def problem_file(path: Path, count: int, *, column: str = "prompt") -> Path:
    path.write_text("".join(json.dumps({column: f"{path.stem} {n}", "answer": "1"}) + "\n" for n in range(count)))
    return path


def mixture(folder: Path) -> MixtureData:
    few, many = problem_file(folder / "few.jsonl", 6), problem_file(folder / "many.jsonl", 60, column="question")
    return MixtureData(
        sources=(
            WeightedFile(path=few, heldout_path=few, weight=2),
            WeightedFile(path=many, heldout_path=many, prompt_column="question"),
        )
    )


def test_each_file_is_read_as_it_says_and_its_problems_are_marked(tmp_path):
    data = mixture(tmp_path)
    problems = load_problems(data, "train", 0)
    assert [problem.part for problem in problems] == [0] * 6 + [1] * 60
    alone = FileData(**data.sources[1].model_dump(exclude={"weight"}))
    assert [problem.prompt for problem in problems[6:]] == [each.prompt for each in load_problems(alone, "train", 0)]


def test_the_first_held_out_problems_have_each_files_share(tmp_path):
    asked = [str(problem.prompt) for problem in load_problems(mixture(tmp_path), "heldout", 0)]
    assert asked[:9] == ["few 0", "many 0", "few 1", "few 2", "many 1", "few 3", "few 4", "many 2", "few 5"]
    assert asked[9:] == [f"many {n}" for n in range(3, 60)], "of a file that has no more come none"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[]", "data.sources: should have at least 1 item, got []"),
        ('[{path="a.jsonl",weight=0}]', "data.sources.0.weight: expected greater than 0, got 0"),
        ('[{path="a.jsonl",wieght=1}]', "unknown key 'data.sources.0.wieght'; did you mean 'weight'?"),
        (
            '[{path="a",images_column="i",max_pixels=9},{path="b"}]',
            "data: min_pixels and max_pixels are the policy's: expected the same in all sources",
        ),
    ],
)
def test_a_mixture_that_is_none_is_refused_in_a_line(sources, message):
    with pytest.raises(BadInput) as refused:
        override_config({}, ["data.kind=mixture", f"data.sources={sources}"], source="run.toml")
    assert str(refused.value) == f"run.toml: {message}"
