"""Weights of tokens, learning rates and metrics of the update, against numbers worked by hand."""

import pytest

from models.config.objectives import ConstantMean, SequenceMean, TokenMean
from models.objectives.losses import token_weights
from models.training.trainer import learning_rate
from models.training.update_steps import step_ratios


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [(TokenMean(), 0.25, 0.25), (SequenceMean(), 0.5, 1 / 6), (ConstantMean(length=10), 0.05, 0.05)],
)
def test_aggregations_weigh_tokens_of_long_and_short_sequences_differently(aggregation, short, long):
    assert token_weights(aggregation, [1, 3]) == pytest.approx([short, long])
    assert token_weights(aggregation, [1, 0, 3])[::2] == token_weights(aggregation, [1, 3])


@pytest.mark.parametrize(
    ("schedule", "floor", "rates"),
    [
        ("constant", 0.0, [0.5, 1, 1, 1, 1]),
        ("linear", 0.0, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0.0, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0.1, [0.5, 1, 1, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_then_stays_or_falls(schedule, floor, rates):
    settings = {"peak": 1.0, "warmup_steps": 2, "schedule": schedule, "floor": floor}
    assert [learning_rate(step, 6, **settings) for step in (0, 1, 2, 4, 6)] == pytest.approx(rates)


def test_log_ratios_of_denoising_steps_are_reported_by_mean_and_deviation_for_steps_with_samples():
    sums = {"loss": 3.0, "denoising_step_1": 2.0, "denoising_step_1_sum": -3.0, "denoising_step_1_square": 5.0}
    sums |= {"denoising_step_2": 0.0, "denoising_step_2_sum": 0.0, "denoising_step_2_square": 0.0}
    found = step_ratios(sums)  # log-ratios -1 and -2
    assert found == pytest.approx({"log_ratio_mean_step_1": -1.5, "log_ratio_std_step_1": 0.5})
