"""What alarms find in the numbers of iterations, worked by hand."""

import pytest

from models.config.alarms import EntropyCollapse, KlDrift, LengthCollapse, MetricAlarm, RewardDip


def raised(alarm, *iterations):
    """What an alarm says of the last of these iterations."""
    return alarm.raised(len(iterations), lambda number: iterations[number - 1])


def lengths(*means):
    return [{"credit/length_mean": mean} for mean in means]


def rewards(*pairs):
    return [{"credit/reward_mean": mean, "credit/reward_std": spread} for mean, spread in pairs]


def metric(name, *values):
    return [{} if value is None else {name: value} for value in values]


def test_a_length_below_half_of_its_mean_in_the_window_is_a_collapse():
    alarm = LengthCollapse(window=2)
    assert raised(alarm, *lengths(1000, 90, 110, 50)) is None, "half of (90 + 110) / 2 is 50, which is not below"
    said = raised(alarm, *lengths(1000, 90, 110, 49))
    assert said == "completions have 49 tokens on average, less than 0.5 of the 100 of the 2 iterations before"


def test_a_window_that_is_not_full_raises_nothing():
    assert raised(LengthCollapse(window=3), *lengths(100, 100, 1)) is None
    assert raised(LengthCollapse(window=3), *lengths(100, 100, 100, 1)) is not None
    assert raised(MetricAlarm(metric="update/loss", bound=0, window=2), *metric("update/loss", 5)) is None


def test_what_a_run_returned_from_is_not_compared_with():
    collapsed = [*lengths(100, 100), {}, *lengths(40)]
    assert "the 100 of the 3 iterations" in raised(LengthCollapse(window=3), *collapsed)
    assert raised(LengthCollapse(window=1), *collapsed) is None, "nothing is left to compare with"


def test_a_reward_dips_by_standard_deviations_below_the_best_of_the_window():
    alarm = RewardDip(window=2, bound=1.5)
    assert raised(alarm, *rewards((0.9, 0.1), (0.5, 0.2), (0.4, 0.2), (0.25, 0.1))) is None, "0.5 - 1.5 · 0.2 = 0.2"
    assert raised(alarm, *rewards((0.9, 0.1), (0.5, 0.2), (0.4, 0.2), (0.19, 0.1))) == (
        "the mean reward is 0.19, more than 1.5 standard deviations (0.2 each) below the best of the 2 iterations "
        "before, 0.5"
    )
    assert raised(alarm, *rewards((0.5, 0.2), (0.4, 0.2), (0.19, 0.3))) is None, "the larger spread of the two counts"


def test_a_reward_without_spread_dips_when_it_falls_and_not_by_rounding():
    alarm = RewardDip(window=1)
    assert raised(alarm, *rewards((1.0, 0.0), (0.9, 0.0))) is not None
    assert raised(alarm, *rewards((0.1, 0.0), (0.1 - 1e-17, 0.0))) is None
    assert raised(alarm, *rewards((1.0, 0.0), (0.95, 0.218))) is None, "one of twenty is wrong"


def test_entropy_collapses_below_a_share_of_the_first_iterations():
    entropy = "update/entropy"
    assert raised(EntropyCollapse(window=2), *metric(entropy, 3, 1, 0.21)) is None, "a tenth of (3 + 1) / 2 is 0.2"
    said = raised(EntropyCollapse(window=2), *metric(entropy, 3, 1, 0.19))
    assert said == "the entropy is 0.19 nats per token, less than 0.1 of the 2 of the first 2 iterations"
    assert raised(EntropyCollapse(window=2), *metric(entropy, 3, 0.1)) is None, "the first ones raise nothing"
    assert raised(EntropyCollapse(window=2), *metric(entropy, 3, 1, None)) is None, "nothing was learnt"


@pytest.mark.parametrize("name", ["update/kl", "credit/kl"])
def test_kl_is_that_to_the_reference_in_the_mean_of_a_window(name):
    alarm = KlDrift(window=2, bound=0.5)
    assert raised(alarm, *metric(name, 9, 0.4, 0.6)) is None
    said = raised(alarm, *metric(name, 0, 0.4, 0.62))
    assert said == "the policy is 0.51 nats per token away from the reference, more than 0.5"


def test_any_number_is_above_or_below_a_bound():
    above, below = (MetricAlarm(metric="update/loss", bound=2, side=side) for side in ("above", "below"))
    assert [raised(above, {"update/loss": value}) is None for value in (1, 2, 3)] == [True, True, False]
    assert [raised(below, {"update/loss": value}) is None for value in (1, 2, 3)] == [False, True, True]
    assert raised(above, {"update/loss": 3}) == "update/loss is 3, above 2"
    assert raised(above, {}) is None
