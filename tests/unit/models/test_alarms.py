"""Alarms on the metrics of iterations, against values computed by hand."""

import pytest

from rheostat.models.config.alarms import EntropyCollapse, KlDrift, LengthCollapse, MetricAlarm, RewardDip


def raise_alarm(alarm, *iterations):
    """Return the message of an alarm after the last of these iterations, or None."""
    return alarm.find_breach(len(iterations), lambda number: iterations[number - 1])


def metric(name, *values):
    return [{} if value is None else {name: value} for value in values]


def lengths(*means):
    return metric("credit/length_mean", *means)


def rewards(*pairs):
    return [{"credit/reward_mean": mean, "credit/reward_std": deviation} for mean, deviation in pairs]


def entropies(*values):
    return metric("update/entropy", *values)


LOSS_ABOVE, LOSS_BELOW = (MetricAlarm(metric="update/loss", bound=2, side=side) for side in ("above", "below"))
DIP = RewardDip(window=2, bound=1.5)
KL = KlDrift(window=2, bound=0.5)


@pytest.mark.parametrize(
    ("alarm", "iterations", "parts"),
    [
        # half of (90 + 110) / 2 is 50
        (LengthCollapse(window=2), lengths(1000, 90, 110, 49), ["49 tokens", "0.5 of the 100 of the 2 iterations"]),
        (LengthCollapse(window=3), lengths(100, 100, 100, 1), ["1 tokens"]),
        # an iteration that was reverted has no metrics
        (LengthCollapse(window=3), lengths(100, 100, None, 40), ["the 100 of the 3 iterations"]),
        # 0.5 - 1.5 * 0.2 = 0.2
        (
            DIP,
            rewards((0.9, 0.1), (0.5, 0.2), (0.4, 0.2), (0.19, 0.1)),
            ["0.19", "1.5 ", "0.2 ", "2 iterations", "0.5"],
        ),
        (RewardDip(window=1), rewards((1.0, 0.0), (0.9, 0.0)), ["0.9"]),
        # a tenth of (3 + 1) / 2 is 0.2
        (EntropyCollapse(window=2), entropies(3, 1, 0.19), ["0.19 nats", "0.1 of the 2 of the first 2 iterations"]),
        (KL, metric("update/kl", 0, 0.4, 0.62), ["0.51 nats", "0.5"]),
        (KL, metric("credit/kl", 0, 0.4, 0.62), ["0.51 nats", "0.5"]),
        (LOSS_ABOVE, metric("update/loss", 3), ["update/loss is 3, above 2"]),
        (LOSS_BELOW, metric("update/loss", 1), ["update/loss is 1, below 2"]),
    ],
)
def test_an_alarm_is_raised_beyond_its_bound_and_names_the_numbers(alarm, iterations, parts):
    message = raise_alarm(alarm, *iterations)
    assert message is not None
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("alarm", "iterations"),
    [
        pytest.param(LengthCollapse(window=2), lengths(1000, 90, 110, 50), id="exactly half of the mean"),
        pytest.param(LengthCollapse(window=3), lengths(100, 100, 1), id="the window is not full"),
        pytest.param(
            MetricAlarm(metric="update/loss", bound=0, window=2),
            metric("update/loss", 5),
            id="the window of a metric is not full",
        ),
        pytest.param(LengthCollapse(window=1), lengths(100, 100, None, 40), id="no iteration left to compare with"),
        pytest.param(DIP, rewards((0.9, 0.1), (0.5, 0.2), (0.4, 0.2), (0.25, 0.1)), id="within 1.5 * 0.2 of 0.5"),
        pytest.param(DIP, rewards((0.5, 0.2), (0.4, 0.2), (0.19, 0.3)), id="within the larger deviation of the two"),
        pytest.param(RewardDip(window=1), rewards((0.1, 0.0), (0.1 - 1e-17, 0.0)), id="a dip by rounding"),
        pytest.param(RewardDip(window=1), rewards((1.0, 0.0), (0.95, 0.218)), id="one completion in twenty is wrong"),
        pytest.param(EntropyCollapse(window=2), entropies(3, 1, 0.21), id="above a tenth of the first entropies"),
        pytest.param(EntropyCollapse(window=2), entropies(3, 0.1), id="one of the first iterations"),
        pytest.param(EntropyCollapse(window=2), entropies(3, 1, None), id="an iteration without an update"),
        pytest.param(KL, metric("update/kl", 9, 0.4, 0.6), id="a mean of exactly the bound"),
        pytest.param(KL, metric("credit/kl", 9, 0.4, 0.6), id="a mean of exactly the bound, in the reward"),
        pytest.param(LOSS_ABOVE, metric("update/loss", 2), id="exactly the upper bound"),
        pytest.param(LOSS_BELOW, metric("update/loss", 2), id="exactly the lower bound"),
        pytest.param(LOSS_ABOVE, [{}], id="no such metric"),
    ],
)
def test_no_alarm_is_raised_within_the_bound_or_without_enough_iterations(alarm, iterations):
    assert raise_alarm(alarm, *iterations) is None
