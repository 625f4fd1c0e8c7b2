"""Held-out problems with several samples each: means, pass@k, by hand and by every choice of samples."""

from itertools import combinations

import pyarrow as pa
import pytest

from rheostat.infra.statistics import mean_interval, pass_at
from rheostat.infra.store.manifests import Manifest
from rheostat.models.rewards.scores import problem_metrics
from rheostat.tasks.views.metrics import Accuracy, accuracy_of


def build_scores(*rows):
    """Build a score shard from pairs of a problem and the scores of its samples, None if one is missing."""
    pairs = [(row, value) for row, values in rows for value in values]
    return pa.table(
        {
            "prompt_row": pa.array([row for row, _ in pairs], pa.int32()),
            "reward": pa.array([None if value is None else 7 * value for _, value in pairs], pa.float64()),
            "reward_even": pa.array([value or 0.0 for _, value in pairs], pa.float64()),
        }
    )


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_right_one(samples):
    for right in range(samples + 1):
        marks = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            choices = [any(chosen) for chosen in combinations(marks, k)]
            assert pass_at(k, samples=samples, right=right) == pytest.approx(sum(choices) / len(choices))


def test_samples_of_a_problem_are_averaged_without_missing_scores():
    """Means 1/4, 1, 1/2 of two, none, 0; pass@2 of the second has three, of the third two: 1/2, 1, 1, 0."""
    shards = [
        build_scores((0, (0, 1, 0, 0)), (1, (1, 1, None, 1))),
        build_scores((2, (None, 1, 0, None)), (3, [None] * 4), (4, [0] * 4)),
    ]
    assert problem_metrics(shards, "even", samples=4) == pytest.approx({
        "accuracy": 1.75 / 4, "squares": 1 / 16 + 1 + 1 / 4, "problems": 4, "samples": 4,
        "pass_at_1": 1.75 / 4, "pass_at_2": 2.5 / 4, "pass_at_4": (1 + 0) / 2,
    })  # fmt: skip


def test_graded_scores_have_no_pass_at_k_and_k_goes_up_to_the_samples():
    assert "pass_at_1" not in problem_metrics([build_scores((0, (0.5, 1)), (1, (0, 0)))], "even", samples=2)
    five = problem_metrics([build_scores((0, (1, 0, 0, 0, 0)))], "even", samples=5)
    assert [name for name in five if name.startswith("pass")] == ["pass_at_1", "pass_at_2", "pass_at_4"]
    nothing = problem_metrics([build_scores((0, (None, None)))], "even", samples=2)
    assert nothing == {"accuracy": 0, "squares": 0, "problems": 0, "samples": 2}


def test_the_interval_counts_problems_and_not_their_completions():
    """100 equal completions of each of four problems do not make the interval narrower."""
    once = problem_metrics([build_scores(*((row, [row % 2]) for row in range(4)))], "even", samples=1)
    often = problem_metrics([build_scores(*((row, [row % 2] * 100) for row in range(4)))], "even", samples=100)
    low, high = mean_interval(4 * often["accuracy"], often["squares"], int(often["problems"]))
    assert (low, high) == mean_interval(4 * once["accuracy"], once["squares"], 4)
    assert (round(low, 3), round(high, 3)) == (0.15, 0.85)  # Wilson's of two in four


@pytest.mark.parametrize("values", [(1, 0), (0, 1)])
def test_the_interval_of_scores_of_0_and_1_is_limited_to_0_to_1(values):
    """Seven problems have the mean 1 and one has 1/2, and the other way round."""
    rows = [(row, [values[0]] * 2) for row in range(7)] + [(7, (0, 1))]
    metrics = problem_metrics([build_scores(*rows)], "even", samples=2)
    accuracy = accuracy_of(Manifest(key="eval-0000/summary", metrics=metrics))
    low, high = mean_interval(8 * metrics["accuracy"], metrics["squares"], 8)
    assert (low < 0) != (high > 1) and (accuracy.low, accuracy.high) == (max(low, 0), min(high, 1))


def test_an_accuracy_names_the_samples_of_a_problem_if_there_are_several():
    single = Accuracy(number=3, problems=8, mean=0.5, low=0.2, high=0.8)
    assert [*single.model_dump(mode="json")] == ["number", "problems", "mean", "low", "high"]
    assert single.line() == "0.500 (95% interval 0.200 to 0.800, 8 problems)"
    several = Accuracy(number=3, problems=8, mean=0.5, low=0.2, high=0.8, samples=4, pass_at={1: 0.5, 4: 0.875})
    assert several.line() == (
        "0.500 (95% interval 0.200 to 0.800, 8 problems with 4 completions each), pass@1 0.500, pass@4 0.875"
    )
    assert Accuracy.model_validate_json(several.model_dump_json()) == several
