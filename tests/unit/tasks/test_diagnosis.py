"""Warnings derived from the metrics of an iteration."""

import pytest

from rheostat.tasks.views.diagnosis import (
    ENTROPY_LEFT,
    INFORMATIVE,
    LONGER,
    MEMORIZED,
    WAITED,
    compare_with_heldout,
    find_warnings,
    summarize_warnings,
)

GOOD = {
    "credit/ended_failed_fraction": 0.0, "credit/call_error_fraction": 0.02, "credit/ended_turns_fraction": 0.1,
    "credit/truncated_fraction": 0.05, "update/kl_old": 0.002, "update/mismatch_difference_mean": 1e-6, WAITED: 0.2,
    "update/kl": 0.05, "credit/kl": 0.05, "update/entropy": 0.6, "credit/length_mean": 30.0, "credit/reward_mean": 0.4,
    "credit/reward_std": 0.5, "credit/groups": 64.0, "credit/informative_groups": 20.0, "credit/completions": 512.0,
    "credit/term_right_mean": 0.4, "credit/term_right_std": 0.49,
}  # fmt: skip
FIRST = GOOD | {"update/entropy": 0.9, "credit/length_mean": 10.0, "credit/reward_mean": 0.1}
"""Metrics of the first iteration of a run whose completions have become long."""


def test_a_good_iteration_and_an_iteration_without_episodes_give_no_warnings():
    assert find_warnings(GOOD) == find_warnings(GOOD, first=FIRST, accuracy=0.4) == {}
    assert find_warnings({"update/kl_old": 0.002}) == find_warnings({}) == {}


@pytest.mark.parametrize(
    ("metric", "value", "says"),
    [
        ("credit/ended_failed_fraction", 0.004, "Environments failed in 0.4% of the episodes"),
        ("credit/call_error_fraction", 0.3, "30% of the tool calls cannot be parsed"),
        ("credit/ended_turns_fraction", 0.75, "75% of the episodes reached rollout.environment.max_turns"),
        (WAITED, 0.62, "idle for 62% of the time"),
        ("credit/truncated_fraction", 0.78, "78% of the completions were cut off at rollout.sampling.max_new_tokens"),
        ("update/kl_old", 5.04, "moved the policy 5 nats per token away"),
        ("update/kl", 3.0, "3 nats per token away from the reference. Raise update.kl.coefficient"),
        ("credit/kl", 3.0, "3 nats per token away from the reference. Raise algorithm.kl.coefficient"),
        ("update/mismatch_difference_mean", 0.35, "differ by 0.35 nats per token"),
    ],
)
def test_each_symptom_of_one_iteration_is_reported_with_its_number(metric, value, says):
    [(symptom, warning)] = find_warnings(GOOD | {metric: value}).items()
    assert symptom == metric and says in warning


@pytest.mark.parametrize(
    ("symptom", "changed", "says"),
    [
        (INFORMATIVE, {"credit/informative_groups": 2.0}, "Only 3% of the groups are informative"),
        (ENTROPY_LEFT, {"update/entropy": 0.045}, "fell to 5% of its value in iteration 1"),
        (LONGER, {"credit/reward_mean": 0.14}, "Completions grew 3.0x since iteration 1"),
        ("credit/term_right_std", {"credit/term_right_std": 0.0}, "Reward 'right' gave every completion 0.4"),
    ],
)
def test_collapsing_diverging_and_constant_metrics_are_reported_with_their_number(symptom, changed, says):
    [(found, warning)] = find_warnings(GOOD | changed, first=FIRST, accuracy=0.4).items()
    assert found == symptom and says in warning


def test_a_nearly_perfect_policy_may_have_low_entropy_and_uninformative_groups():
    settled = GOOD | {"credit/informative_groups": 0.0, "update/entropy": 0.01, "credit/reward_mean": 0.95}
    assert find_warnings(settled, first=FIRST, accuracy=0.95) == {}
    assert find_warnings(settled, first=FIRST, accuracy=0.5).keys() == {INFORMATIVE, ENTROPY_LEFT}


def test_a_constant_reward_gives_one_warning_and_none_about_uninformative_groups():
    flat = GOOD | {"credit/term_right_std": 0.0, "credit/informative_groups": 0.0}
    assert find_warnings(flat, first=FIRST, accuracy=0.4).keys() == {"credit/term_right_std"}


def test_a_policy_that_solves_training_prompts_but_few_heldout_problems_gives_a_warning():
    [(found, warning)] = compare_with_heldout(0.95, 0.4).items()
    assert found == MEMORIZED and "Sampled accuracy is 95%, but held-out accuracy is only 40%" in warning
    assert "may have memorized the training prompts" in warning
    for accuracy, heldout in ((0.95, 0.5), (0.9, 0.1), (None, 0.1), (0.95, None)):
        assert compare_with_heldout(accuracy, heldout) == {}


def test_a_run_reports_each_warning_once_with_its_last_iteration():
    bad = [find_warnings(GOOD | {"update/kl_old": kl}) for kl in (2.0, 0.1, 3.0)]
    bad[1] = find_warnings(GOOD | {WAITED: 0.9})
    kl, waited = summarize_warnings(bad)
    assert kl.startswith("warning: 2 iterations, last in 3: The update moved the policy 3 nats")
    assert waited.startswith("warning: iteration 2: Rollout workers were idle for 90%")
    assert summarize_warnings([{}, {}]) == []
