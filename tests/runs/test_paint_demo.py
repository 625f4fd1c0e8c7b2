"""The text-to-image demo as a new user runs it: the policy is trained to paint its prompts, for every seed."""

import pytest

from tests.support.jobs import demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ALL_STEPS = "rollout.denoising={steps=10, sampler={kind='cps', noise=0.8}, text_tokens=1}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_raises_the_share_of_right_paintings_by_three_tenths(seed, tmp_path):
    summary = demo(tmp_path, f"seed={seed}", config="configs/demos/paint/job.toml")
    assert summary["after"]["mean"] >= summary["before"]["mean"] + 0.3


def test_training_on_a_window_of_three_steps_keeps_four_fifths_of_the_gain_of_all_steps(tmp_path):
    window, whole = (
        demo(tmp_path / name, *more, config="configs/demos/paint/job.toml")
        for name, more in (("window", []), ("whole", [ALL_STEPS]))
    )
    gains = [summary["after"]["mean"] - summary["before"]["mean"] for summary in (window, whole)]
    assert gains[0] >= 0.8 * gains[1]
