"""What the numbers of an iteration say is going wrong."""

import pytest

from tasks.views.diagnosis import SYMPTOMS, WAITED, summed_up, warnings_of

GOOD = {
    "credit/ended_failed_fraction": 0.0, "credit/call_error_fraction": 0.02, "credit/ended_turns_fraction": 0.1,
    "credit/truncated_fraction": 0.05, "update/kl_old": 0.002, "update/mismatch_difference_mean": 1e-6, WAITED: 0.2,
}  # fmt: skip


def test_an_iteration_that_goes_well_and_one_without_episodes_are_warned_of_nothing():
    assert warnings_of(GOOD) == {}
    assert warnings_of({"update/kl_old": 0.002}) == warnings_of({}) == {}


@pytest.mark.parametrize(
    ("metric", "value", "says"),
    [
        ("credit/ended_failed_fraction", 0.004, "environments failed 0.4% of the episodes"),
        ("credit/call_error_fraction", 0.3, "30% of the calls cannot be read"),
        ("credit/ended_turns_fraction", 0.75, "75% of the episodes were ended by rollout.environment.max_turns"),
        (WAITED, 0.62, "wrote nothing in 62% of their seconds"),
        ("credit/truncated_fraction", 0.78, "78% of the completions were cut off at rollout.sampling.max_new_tokens"),
        ("update/kl_old", 5.04, "took the policy 5 nats per token away"),
        ("update/mismatch_difference_mean", 0.35, "differ by 0.35 nats per token"),
    ],
)
def test_each_symptom_is_named_with_its_number(metric, value, says):
    [(found, warning)] = warnings_of(GOOD | {metric: value}).items()
    assert found == metric
    assert says in warning


def test_every_symptom_has_an_iteration_that_shows_it():
    assert {each.metric for each in SYMPTOMS} == GOOD.keys()


def test_a_run_says_each_warning_once_and_where_it_was_last():
    bad = [warnings_of(GOOD | {"update/kl_old": kl}) for kl in (2.0, 0.1, 3.0)]
    bad[1] = warnings_of(GOOD | {WAITED: 0.9})
    kl, waited = summed_up(bad)
    assert kl.startswith("warning: 2 iterations, last in 3: the update took the policy 3 nats")
    assert waited.startswith("warning: iteration 2: rollout workers wrote nothing in 90%")
    assert summed_up([{}, {}]) == []
