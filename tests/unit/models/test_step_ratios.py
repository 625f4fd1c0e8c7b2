"""What is said of the log-ratios of denoising steps."""

import pytest

from models.training.update_steps import step_ratios


def test_of_each_step_that_was_learnt_there_are_mean_and_deviation():
    sums = {"loss": 3.0, "denoising_step_1": 2.0, "denoising_step_1_sum": -3.0, "denoising_step_1_square": 5.0}
    sums |= {"denoising_step_2": 0.0, "denoising_step_2_sum": 0.0, "denoising_step_2_square": 0.0}
    found = step_ratios(sums)  # of -1 and -2
    assert found == pytest.approx({"log_ratio_mean_step_1": -1.5, "log_ratio_std_step_1": 0.5})
