"""Problems of several files are sampled by their weights, and the stream is the same from any place."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.models.config.data import FileData, MixtureData, WeightedFile
from rheostat.models.data.curriculum import (
    Cursor,
    Part,
    PromptOrder,
    learnable_weights,
    max_prompts,
    read_parts,
    take_rows,
)
from rheostat.models.data.problems import load_problems
from tests.support.json_lines import write_json_lines

PARTS = (Part(range(40), 3), Part(range(40, 50), 1), Part(range(50, 150), 0.5))
ROWS = 150


def take_prompts(counts: list[int], *, parts: tuple[Part, ...] = PARTS, seed: int = 7) -> list[int]:
    """Return the rows of iterations that take the given numbers of prompts and give none back."""
    cursor, rows = Cursor(), list[int]()
    for count in counts:
        taken, cursor = take_rows(cursor, count, PromptOrder(parts[-1].rows.stop, seed, parts), taken=())
        assert len({*taken}) == count
        rows += taken
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_each_part_has_its_share_of_the_prompts_independent_of_its_size(seed):
    rows = take_prompts([8] * 500, seed=seed)
    found = Counter(next(n for n, part in enumerate(PARTS) if row in part.rows) for row in rows)
    for number, part in enumerate(PARTS):
        assert found[number] == pytest.approx(4000 * part.weight / 4.5, abs=8)


def test_the_first_prompt_is_from_a_part_with_the_probability_of_its_share():
    first = [take_prompts([1], seed=seed)[0] for seed in range(600)]
    share = sum(row < 40 for row in first) / 600
    assert share == pytest.approx(3 / 4.5, abs=4 * np.sqrt(2 / 9 / 600))


def test_a_problem_comes_again_only_after_all_problems_of_its_part():
    rows = [row for row in take_prompts([20] * 100) if row in PARTS[1].rows]
    epochs = [rows[start : start + 10] for start in range(0, len(rows) - 9, 10)]
    assert len(epochs) > 30
    assert all(sorted(epoch) == [*range(40, 50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 20, "each time in a new order"


@settings(max_examples=30)
@given(st.integers(0, 200_000), st.integers(1, 8))
def test_the_stream_continues_from_any_place_as_if_it_had_never_ended(position, count):
    """Compare one call, which counts earlier prompts again in blocks, with one call per prompt."""
    at_once, _ = take_rows(Cursor(position=position), count, PromptOrder(ROWS, 7, PARTS), taken=())
    cursor, singly = Cursor(position=position), list[int]()
    while len(singly) < count:
        [row], after = take_rows(cursor, 1, PromptOrder(ROWS, 7, PARTS), taken=singly)
        singly.append(row)
        cursor = Cursor(position=after.position)
    assert tuple(singly) == at_once


def test_a_single_part_is_sampled_like_problems_without_parts():
    plain, _ = take_rows(Cursor(position=3), 5, PromptOrder(9, 1), taken=())
    for parts in ((Part(range(9), 2),), (Part(range(0), 5), Part(range(9), 1))):
        assert take_rows(Cursor(position=3), 5, PromptOrder(9, 1, parts), taken=())[0] == plain


def test_the_largest_iteration_takes_no_more_prompts_from_a_part_than_it_has():
    cases = {((1000, 5), (9, 1)): (50, 1), ((10, 10), (1, 1)): (20, 0), ((3, 0), (1, 1)): (0, 1)}
    assert {case: max_prompts(*map(list, case)) for case in cases} == cases


def test_parts_are_read_from_a_manifest():
    assert read_parts({"version": 0, "parts": {"rows": [40, 10, 100], "weights": [3, 1, 0.5]}}) == PARTS
    assert read_parts({"version": 0}) == ()


# ---- files


def write_problems(path: Path, count: int, *, column: str = "prompt") -> Path:
    return write_json_lines(path, ({column: f"{path.stem} {n}", "answer": "1"} for n in range(count)))


def build_mixture(folder: Path) -> MixtureData:
    few, many = write_problems(folder / "few.jsonl", 6), write_problems(folder / "many.jsonl", 60, column="question")
    first = WeightedFile(path=few, heldout_path=few, weight=2)
    return MixtureData(sources=(first, WeightedFile(path=many, heldout_path=many, prompt_column="question")))


def test_each_file_is_read_with_its_own_settings_and_its_problems_name_their_part(tmp_path):
    data = build_mixture(tmp_path)
    problems = load_problems(data, "train", 0)
    assert [problem.part for problem in problems] == [0] * 6 + [1] * 60
    alone = FileData(**data.sources[1].model_dump(exclude={"weight"}))
    assert [problem.prompt for problem in problems[6:]] == [each.prompt for each in load_problems(alone, "train", 0)]


def test_the_first_held_out_problems_have_each_files_share(tmp_path):
    prompts = [str(problem.prompt) for problem in load_problems(build_mixture(tmp_path), "heldout", 0)]
    assert prompts[:9] == ["few 0", "many 0", "few 1", "few 2", "many 1", "few 3", "few 4", "many 2", "few 5"]
    assert prompts[9:] == [f"many {n}" for n in range(3, 60)], "the first file has no more problems"


def weights_of(solve_rates, *, min_factor=0.1, num_prompts=10, parts=PARTS):
    return learnable_weights(parts, solve_rates, min_factor=min_factor, num_prompts=num_prompts)


def test_weights_follow_the_variance_of_rewards_in_each_part():
    # p (1 - p): 0.25 and 0.16 in the first part, 0.09 in the second, none in the third
    rates = {0: 0.5, 39: 0.2, 40: 0.9}
    expected = np.array([3 * 1, 1 * 0.09 / 0.205, 0.5 * 1])
    assert weights_of(rates, num_prompts=1) == pytest.approx(expected / expected.sum())


def test_a_part_that_is_always_or_never_solved_keeps_the_lowest_factor():
    rates = {0: 1.0, 1: 0.0, 45: 0.5, 60: 0.5}
    expected = np.array([3 * 0.1, 1, 0.5])
    assert weights_of(rates, num_prompts=1) == pytest.approx(expected / expected.sum())


@pytest.mark.parametrize("rates", [{}, {0: 1.0, 40: 0.0, 50: 1.0}])
def test_weights_stay_without_a_difference_in_learnability(rates):
    assert weights_of(rates, num_prompts=1) == pytest.approx(np.array([3, 1, 0.5]) / 4.5)


def test_no_part_supplies_more_prompts_than_it_has():
    rates = {0: 1.0, 45: 0.5, 60: 1.0}
    weights = weights_of(rates, num_prompts=40)
    assert weights == pytest.approx([0.75 * 0.3 / 0.35, 10 / 40, 0.75 * 0.05 / 0.35])
    assert sum(weights_of({0: 0.5, 45: 0.5, 60: 0.5}, num_prompts=150)) == pytest.approx(1)


def test_shares_change_at_once_and_each_part_continues_its_own_stream():
    cursor, rows = Cursor(), list[int]()
    for weights in (None, [1, 8, 1], [1, 1, 8], None):
        order = PromptOrder(ROWS, 7, PARTS, weights=weights)
        for _ in range(10):
            taken, cursor = take_rows(cursor, 10, order, taken=())
            rows += taken
        if weights is not None:
            found = Counter(next(n for n, part in enumerate(PARTS) if row in part.rows) for row in rows[-100:])
            assert [found[number] for number in range(3)] == pytest.approx([10 * each for each in weights], abs=4)
    assert sum(cursor.drawn) == cursor.position
    for part in PARTS:
        drawn = [row for row in rows if row in part.rows]
        epochs = [drawn[start : start + len(part.rows)] for start in range(0, len(drawn), len(part.rows))]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs)


def test_rows_that_wait_are_listed_once_if_a_small_part_has_a_large_weight():
    parts, cursor = (Part(range(2000), 1), Part(range(2000, 2040), 1)), Cursor()
    order = PromptOrder(2040, 7, parts, weights=[0.05, 0.95])
    for _ in range(20):
        taken = list[int]()
        for _ in range(3):
            rows, cursor = take_rows(cursor, 32, order, taken=taken)
            taken += rows
    assert len(cursor.returned) == len({*cursor.returned}) <= 40
