"""Search for the cause among differences between two runs."""

from math import ceil, log2

import pytest

from rheostat.models.gate.comparison import PairedDifference
from rheostat.tasks.forks.causes import Candidate, cut_rows, find_unit, format_sources
from rheostat.tasks.forks.search import BisectResult, Trial, format_numbers, max_trials, search_candidates
from rheostat.tasks.promotion.suites import Suite
from tests.support.configurations import accepted

SETTING, ROWS = Candidate(label="update.epochs", change="2 instead of 1"), Candidate(label="rows", change="", rows=(1,))


def difference(gain):
    """Return a difference from a worse run with an accuracy of 0.1, which is significant above 0.05."""
    return PairedDifference.model_construct(
        mean=gain,
        lower=gain - 0.05,
        upper=gain + 0.05,
        champion=0.1,
        challenger=0.1 + gain,
        prompts=64,
        better=1,
        worse=0,
        test="mcnemar",
        p=0.01,
    )


def search(candidates, gain_of):
    """Search with trials whose gains `gain_of` returns. None is a fork that cannot be trained."""
    steps, trials = search_candidates(candidates), []
    state, undone = next(steps)
    while True:
        gain = gain_of({*undone})
        trials.append(Trial(run="fork", undone=undone, difference=None if gain is None else difference(gain)))
        try:
            state, undone = steps.send(trials[-1])
        except StopIteration as end:
            return end.value, trials
        assert state.suspected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 33])
def test_a_single_cause_is_found_with_log2_plus_two_forks(count):
    for cause in range(count):
        state, trials = search([SETTING] * count, lambda undone, cause=cause: 0.8 * (cause in undone))
        assert state.confirmed == (cause,)
        assert len(trials) <= max_trials(count) <= ceil(log2(count)) + 2


def test_without_a_significant_gain_one_fork_is_trained_and_nothing_is_found():
    state, trials = search([SETTING] * 8, lambda undone: 0.04)
    assert (state.confirmed, len(trials)) == ((), 1)


def test_the_larger_cause_is_found_if_there_are_two():
    gains = {1: 0.3, 6: 0.5}
    state, _ = search([SETTING] * 8, lambda undone: sum(gains.get(index, 0) for index in undone))
    assert state.confirmed == (6,)
    gains = {0: 0.35, 4: 0.35, 6: 0.3}
    state, _ = search([SETTING] * 8, lambda undone: sum(gains.get(index, 0) for index in undone))
    assert state.confirmed == (4,), "the second half restores more, and in it the first half"


def test_wrong_rows_in_both_halves_end_the_search_with_all_remaining_ranges():
    candidates = [SETTING, SETTING, *[ROWS] * 6]
    state, _ = search(candidates, lambda undone: 0.4 * len(undone & {4, 5}))
    assert state.confirmed == (4, 5)
    state, _ = search(candidates, lambda undone: 0.4 * len(undone & {5, 6}))
    assert state.confirmed == (4, 5, 6, 7), "the ranges are in different halves"


def test_if_only_undoing_several_differences_together_helps_all_remaining_ones_are_named():
    state, trials = search([SETTING] * 4, lambda undone: 0.8 * (undone >= {1, 2}))
    assert state.confirmed == (0, 1, 2, 3)
    assert trials[-1].undone == state.suspected == (3,)


def test_if_all_differences_cannot_be_undone_together_the_halves_are_tested():
    for noise in (0.0, 0.01, -0.01):
        state, trials = search(
            [ROWS] * 8, lambda undone, noise=noise: None if len(undone) == 8 else noise + 0.8 * (6 in undone)
        )
        assert state.confirmed == (6,)
        assert len(trials) <= max_trials(8)
    state, _ = search([ROWS] * 8, lambda undone: None if len(undone) == 8 else 0.0)
    assert state.confirmed == ()


def test_if_the_first_half_cannot_be_undone_the_other_one_is_tested_at_once():
    possible = {(0, 1, 2, 3): 0.8, (2, 3): 0.8, (2,): 0.0, (3,): 0.8}
    state, trials = search([SETTING] * 4, lambda undone: possible.get(tuple(sorted(undone))))
    assert state.confirmed == (3,)
    assert [trial.undone for trial in trials] == [(0, 1, 2, 3), (0, 1), (2, 3), (2,), (3,)]
    state, trials = search([SETTING] * 4, lambda undone: 0.8 if len(undone) == 4 else None)
    assert (state.confirmed, len(trials)) == ((0, 1, 2, 3), 3), "the cause is in an untested half"


def test_rows_are_cut_into_ranges_of_about_equal_size():
    assert cut_rows(range(100, 140), 4) == [[*range(n, n + 10)] for n in (100, 110, 120, 130)]
    assert cut_rows([1, 5, 6, 20, *range(30, 38)], 3) == [[1, 5, 6, 20], [30, 31, 32, 33], [34, 35, 36, 37]]
    assert cut_rows([], 8) == []
    assert cut_rows([4, 9], 8) == [[4], [9]]
    assert cut_rows([1, 2, 3, 7, 8], 1) == [[1, 2, 3, 7, 8]]


def test_a_table_of_another_kind_is_one_difference():
    changed = ["algorithm.kind", "algorithm.critic.path", "update.kl", "update.kl.kind", "update.learning_rate"]
    assert [find_unit(key, changed) for key in changed] == [
        "algorithm",
        "algorithm",
        "update.kl",
        "update.kl",
        "update.learning_rate",
    ]


def test_places_in_files_become_ranges_of_rows():
    sources = ["data/a.jsonl:311", "data/a.jsonl:312", "data/a.jsonl:340", "data/b.csv:2"]
    assert format_sources(sources) == "rows 311 to 312, 340 of a.jsonl and row 2 of b.csv"
    assert format_sources(["data/a.parquet row 4", "data/a.parquet row 5"]) == "rows 4 to 5 of a.parquet"
    assert format_sources(["a:1/b.json[7]"]) == "row 7 of b.json"
    assert format_sources(["generated"]) == ""


def test_numbers_of_differences_are_listed_with_ranges():
    assert format_numbers([0, 1, 2, 5]) == "1-3, 6"


def result(outcome, *, gains, found=(), suspected=()):
    trials = [Trial(run=f"why.fork-{n}", undone=(n,), difference=difference(gain)) for n, gain in enumerate(gains)]
    return BisectResult(
        name="why",
        good="good",
        bad="bad",
        outcome=outcome,
        difference=difference(0.8),
        candidates=(SETTING, Candidate(label="rows 3 to 9 of problems.jsonl", change="not in good", rows=(2, 3))),
        untested=("torch was 1.0, is 2.0",),
        trials=tuple(trials),
        found=found,
        suspected=suspected,
    )


def test_the_conclusion_names_the_cause_its_gain_and_what_is_left():
    worse, cause, gain, others = result("found", gains=[0.0, 0.4], found=(1,)).conclusion()
    assert worse.startswith("bad is worse than good: held-out score 0.100, good has 0.900. good minus bad: +0.800")
    assert cause == "Cause: rows 3 to 9 of problems.jsonl: not in good."
    assert gain.startswith("With this undone, the held-out score is 0.500 (why.fork-1), which restores 50% of the")
    assert others.startswith("Other differences contribute, too.")


def test_the_conclusion_lists_possible_reasons_if_no_fork_is_better():
    [_, line] = result("not_restored", gains=[0.0]).conclusion()
    assert line.startswith("Nothing significant was found") and "differences that are listed as not tested" in line
    [_, line] = result("budget", gains=[0.0], suspected=(0, 1)).conclusion()
    assert "is among the differences 1-2. Run the same command with a larger budget" in line


def test_a_fork_that_was_not_trained_is_shown_with_the_reason():
    shown = result("not_restored", gains=[0.0])
    failed = Trial(run="why.fork-2", undone=(0, 1), difference=None, reason="too few prompts remain.")
    lines = shown.model_copy(update={"trials": (*shown.trials, failed)}).text().splitlines()
    assert lines[2].split() == ["why.fork-2", "1-2", "-", "-", "not", "trained"]
    assert lines[4] == "why.fork-2 was not trained: too few prompts remain."


def test_a_curriculum_of_the_training_has_no_effect_on_the_evaluation_of_a_policy():
    rewards = "scoring.rewards=[{kind = 'numeric'}, {kind = 'regex', pattern = 'x', weight = 0.1}]"
    config = accepted("rollout.curriculum.metric=regex", rewards)
    scoring = config.scoring.model_copy(update={"rewards": config.scoring.rewards[:1]})
    suite = Suite("heldout", config.data, scoring, config.evaluation, config.rollout.sampling, config)
    assert suite.config("good", config.policy).rollout.curriculum is None
