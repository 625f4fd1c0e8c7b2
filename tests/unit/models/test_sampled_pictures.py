"""Samplers with a perfect model of images that are N(0.7, 0.5²) in every latent.

The velocity and the noise that a perfect model predicts are linear in the state. So the sampled images are normal as
well, and their mean and variance follow from step to step without sampling.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from models.config.denoising import CpsSampler, DanceSampler, DdimSampler, SdeSampler
from models.denoising.samplers import NoiseSchedule, deterministic, flow_schedule, transition

MEAN, STD = 0.7, 0.5
"""Of pictures."""


def predict_step(sampler, x, *, prediction, step, schedule):
    """Return the mean and the standard deviation of the state after a step."""
    x_ND, prediction_ND = (torch.full((1, 1), value, dtype=torch.float64) for value in (x, prediction))
    mean_ND, std_N = transition(sampler, x_ND, prediction_ND, torch.tensor([step]), schedule)
    return mean_ND.item(), std_N.item()


def predict_perfectly(level, x, reads="velocity"):
    """Return the prediction of a perfect model for a state."""
    picture, noise = (1 - level, level) if reads == "velocity" else (level**0.5, (1 - level) ** 0.5)
    pull = (x - picture * MEAN) / (picture**2 * STD**2 + noise**2)
    predicted_noise = noise * pull
    return predicted_noise - (MEAN + picture * STD**2 * pull) if reads == "velocity" else predicted_noise


def follow_moments(schedule, sampler=None):
    """Return mean and standard deviation of the sampled states at each level, starting with noise."""
    levels_N = torch.tensor(schedule.levels[:-1], dtype=torch.float64)[:, None]
    steps_N, ends = torch.arange(schedule.steps), []
    std_N = torch.zeros(schedule.steps)
    for x in (0.0, 1.0):
        x_ND = torch.full_like(levels_N, x)
        prediction_ND = predict_perfectly(levels_N, x_ND, schedule.reads)
        if sampler is None:
            ends.append(deterministic(x_ND, prediction_ND, steps_N, schedule))
        else:
            mean_ND, std_N = transition(sampler, x_ND, prediction_ND, steps_N, schedule)
            ends.append(mean_ND)
    mean, std = known_moments(schedule)[0]
    variance, found = std**2, [(mean, std)]
    for at_zero, at_one, std in zip(*(end.flatten().tolist() for end in ends), std_N.tolist(), strict=True):
        mean, variance = at_zero + (at_one - at_zero) * mean, (at_one - at_zero) ** 2 * variance + std**2
        found.append((mean, math.sqrt(variance)))
    return np.array(found)


def known_moments(schedule):
    """Return mean and standard deviation of noisy images at each level."""
    levels = np.array(schedule.levels)
    squares = (1 - levels) ** 2 if schedule.reads == "velocity" else levels
    noise = levels**2 if schedule.reads == "velocity" else 1 - levels
    return np.stack([np.sqrt(squares) * MEAN, np.sqrt(squares * STD**2 + noise)], axis=1)


def spaced_schedule(steps, first=1.0):
    levels = tuple(np.linspace(first, 0.0, steps + 1).tolist())
    return NoiseSchedule(levels, levels[:-1], reads="velocity")


SMALL = 4000
"""Steps; the fresh noise of cps does not shrink with the step by itself, so there a is about 1/√steps."""


VELOCITIES = spaced_schedule(SMALL, first=0.95)  # g of sde has no bound at 1, where no step is small
NOISES = NoiseSchedule(*(tuple(np.linspace(1e-4, 1.0, SMALL + 1).tolist()[:end]) for end in (None, -1)), reads="noise")


@pytest.mark.parametrize(
    ("schedule", "sampler"),
    [
        *((VELOCITIES, each) for each in (None, SdeSampler(), DanceSampler())),
        (VELOCITIES, CpsSampler(noise=2 / math.pi / math.sqrt(SMALL))),
        *((NOISES, each) for each in (None, DdimSampler(noise=0.4), DdimSampler())),
    ],
)
def test_small_steps_keep_the_states_of_every_level(schedule, sampler):
    tolerance = 5e-4 if schedule is VELOCITIES else 2e-3
    np.testing.assert_allclose(follow_moments(schedule, sampler), known_moments(schedule), atol=tolerance)


def test_half_the_step_has_half_the_error():
    for sampler in (None, SdeSampler(), DanceSampler(noise=1.0)):
        errors = [
            np.abs(follow_moments(spaced_schedule(n, 0.95), sampler) - known_moments(spaced_schedule(n, 0.95))).max()
            for n in (500, 1000)
        ]
        assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)


def test_steps_without_noise_agree_with_an_integrator():
    found = solve_ivp(lambda t, x: -predict_perfectly(1 - t, x), (0.0, 1.0), [1.5], rtol=1e-10, atol=1e-12)
    assert found.y[0, -1] == pytest.approx(MEAN + STD * 1.5, abs=1e-8)
    schedule, x_ND = spaced_schedule(500), torch.full((1, 1), 1.5, dtype=torch.float64)
    for k in range(schedule.steps):
        x_ND = deterministic(x_ND, predict_perfectly(schedule.levels[k], x_ND), torch.tensor([k]), schedule)
    assert x_ND.item() == pytest.approx(found.y[0, -1], abs=3e-3)


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5, unique=True),
    st.floats(0.01, 1.0),
    st.floats(-3, 3),
    st.floats(-3, 3),
)
def test_cps_has_the_noise_of_each_level_for_steps_of_any_size(middle, noise, picture, fresh):
    """Of a picture x0 and noise x1: (1 − σ')·x0 is kept, and what x1 has left and what is new make σ'² together."""
    levels = (1.0, *sorted(middle, reverse=True), 0.0)
    schedule = NoiseSchedule(levels, levels[:-1], reads="velocity")
    for k, (level, after) in enumerate(pairwise(levels)):
        x = (1 - level) * picture + level * fresh
        mean, std = predict_step(CpsSampler(noise=noise), x, prediction=fresh - picture, step=k, schedule=schedule)
        left = math.sqrt(max(0.0, after**2 - std**2))
        assert mean == pytest.approx((1 - after) * picture + left * fresh, abs=1e-6)


def test_large_steps_of_sde_leave_more_noise_than_those_of_cps():
    """The problem that arXiv 2509.05952 solves: ten steps of sde towards one image are still noisy."""
    schedule = flow_schedule(10, shift=3.0)
    assert remaining_noise(schedule, CpsSampler()) == pytest.approx(np.array(schedule.levels), abs=1e-6)
    assert (remaining_noise(schedule, SdeSampler())[2:] > 1.05 * np.array(schedule.levels)[2:]).all()


def remaining_noise(schedule, sampler):
    """Return the standard deviation of states at each level if every image is 0; a perfect model predicts x/σ."""
    found = [1.0]
    for k, level in enumerate(schedule.levels[:-1]):
        mean, std = predict_step(sampler, 1.0, prediction=1 / level, step=k, schedule=schedule)
        found.append(math.hypot(mean * found[-1], std))
    return np.array(found)
