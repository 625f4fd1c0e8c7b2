"""Sampling and log-probs of denoising steps: by hand, against torch's distributions, and with a perfect model."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch.distributions import Normal, kl_divergence

from rheostat.models.config.denoising import CpsSampler, DanceSampler, DdimSampler, SdeSampler
from rheostat.models.denoising.samplers import (
    NoiseSchedule,
    ddim_schedule,
    deterministic,
    flow_schedule,
    noisy_steps,
    step_divergence,
    step_logprobs,
    transition,
)

FLOW = NoiseSchedule((1.0, 0.8, 0.5, 0.0), (1000.0, 800.0, 500.0), prediction_type="velocity")
NOISE = NoiseSchedule((0.36, 0.64, 1.0), (700.0, 300.0), prediction_type="noise")
SAMPLERS = [SdeSampler(), DanceSampler(), CpsSampler(), DdimSampler()]


def schedule_of(sampler):
    return FLOW if sampler.prediction_type == "velocity" else NOISE


def predict_steps(sampler, x, prediction, schedule=None):
    """Return the means and standard deviations of all steps of a schedule, from one state or from one per step."""
    schedule = schedule or schedule_of(sampler)
    steps_N, double = torch.arange(schedule.steps), torch.float64
    x_ND, prediction_ND = (torch.as_tensor(v, dtype=double).expand(len(steps_N))[:, None] for v in (x, prediction))
    mean_ND, std_N = transition(sampler, x_ND, prediction_ND, steps_N, schedule)
    return mean_ND.flatten().tolist(), std_N.tolist()


def test_a_shift_of_3_gives_the_levels_worked_by_hand():
    """The lowest level is shifted to 3·0.001/1.002 and then once more, as in diffusers; the middle lies between."""
    least = 3 * 0.001 / (1 + 2 * 0.001)
    middle = (1 + least) / 2
    expected = [1.0, 3 * middle / (1 + 2 * middle), 3 * least / (1 + 2 * least), 0.0]
    assert flow_schedule(3, shift=3.0).levels == pytest.approx(expected, rel=1e-6)


def test_a_schedule_has_one_level_more_than_steps():
    assert (FLOW.steps, NOISE.steps) == (3, 2)
    with pytest.raises(AssertionError, match="3 levels, 3 steps"):
        NoiseSchedule((1.0, 0.8, 0.0), (1000.0, 800.0, 0.0), prediction_type="velocity")


@pytest.mark.parametrize(
    ("sampler", "means", "deviations"),
    [
        # g² = ¼·σ/(1 − σ) is 1.25 (of 1/(1 − 0.8)), 1 and 0.25
        (
            SdeSampler(noise=0.5),
            [2 * 0.875 + 0.2, 2 * 0.8125 + 1.125 * 0.3, 2 * 0.875 + 1.125 * 0.5],
            [0.5, math.sqrt(0.3), math.sqrt(0.125)],
        ),
        # scores are −2, −(2 − 0.2)/0.8 = −2.25 and −(2 − 0.5)/0.5 = −3; ½η² is 0.125
        (
            DanceSampler(noise=0.5),
            [2.2 - 0.25 * 0.2, 2.3 - 0.28125 * 0.3, 2.5 - 0.375 * 0.5],
            [0.5 * math.sqrt(0.2), 0.5 * math.sqrt(0.3), 0.5 * math.sqrt(0.5)],
        ),
        # the sine of a third of a right angle is ½; images are 3, 2.8 and 2.5, noises 2, 1.8 and 1.5
        (
            CpsSampler(noise=1 / 3),
            [0.2 * 3 + 0.4 * math.sqrt(3) * 2, 0.5 * 2.8 + 0.25 * math.sqrt(3) * 1.8, 2.5],
            [0.4, 0.25, 0.0],
        ),
        # images are (2 − 0.8)/0.6 = 2 and (2 − 0.6)/0.8 = 1.75; the variance is (0.36/0.64)·(1 − 0.36/0.64)
        (DdimSampler(), [0.8 * 2 + math.sqrt(0.36 - 0.24609375), 1.75], [math.sqrt(0.24609375), 0.0]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_steps_from_state_2_are_those_worked_by_hand(sampler, means, deviations):
    prediction = -1.0 if sampler.prediction_type == "velocity" else 1.0
    mean, std = predict_steps(sampler, 2.0, prediction)
    assert mean == pytest.approx(means)
    assert std == pytest.approx(deviations)


def test_steps_without_noise_are_those_worked_by_hand():
    x_ND, prediction_ND = torch.full((3, 1), 2.0), torch.full((3, 1), -1.0)
    assert deterministic(x_ND, prediction_ND, torch.arange(3), FLOW).flatten().tolist() == pytest.approx(
        [2.2, 2.3, 2.5]
    )
    found_ND = deterministic(x_ND[:2], -prediction_ND[:2], torch.arange(2), NOISE)
    assert found_ND.flatten().tolist() == pytest.approx([0.8 * 2 + 0.6, 1.75])


def test_ddim_with_full_noise_is_the_posterior_of_denoising_diffusion():
    """With known x0 and noise, q(x' | x, x0) is eq. 7 of arXiv 2006.11239, which uses other coefficients."""
    level, after, picture, noise = 0.36, 0.64, 1.3, -0.4
    kept, beta = level / after, 1 - level / after
    x = math.sqrt(level) * picture + math.sqrt(1 - level) * noise
    expected = math.sqrt(after) * beta * picture + math.sqrt(kept) * (1 - after) * x
    mean, std = predict_steps(DdimSampler(noise=1.0), x, noise)
    assert mean[0] == pytest.approx(expected / (1 - level))
    assert std[0] ** 2 == pytest.approx((1 - after) / (1 - level) * beta)


@given(st.integers(0, 9), st.sampled_from(SAMPLERS))
def test_log_probs_differ_as_those_of_normal_distributions(seed, sampler):
    draw = torch.Generator().manual_seed(seed)
    next_ND, x_ND, prediction_ND, other_ND = torch.randn(4, 1, 40, generator=draw, dtype=torch.float64)
    step_N = torch.tensor([0])
    mean_ND, std_N = transition(sampler, x_ND, prediction_ND, step_N, schedule_of(sampler))
    moved_ND, _ = transition(sampler, x_ND, other_ND, step_N, schedule_of(sampler))
    new, old = Normal(moved_ND, std_N), Normal(mean_ND, std_N)
    found_N = step_logprobs(next_ND, moved_ND, std_N) - step_logprobs(next_ND, mean_ND, std_N)
    torch.testing.assert_close(found_N, (new.log_prob(next_ND) - old.log_prob(next_ND)).mean(1))
    torch.testing.assert_close(step_divergence(moved_ND, mean_ND, std_N), kl_divergence(new, old).mean(1))


def test_published_log_probs_are_the_exact_log_probs_times_twice_the_variance():
    next_ND, mean_ND = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    std_N = torch.tensor([0.5])
    assert step_logprobs(next_ND, mean_ND, std_N, weighting="published").tolist() == [-2.5]
    assert step_logprobs(next_ND, mean_ND, std_N).tolist() == [-5.0]
    assert step_divergence(next_ND, mean_ND, std_N).tolist() == [5.0]


def test_steps_with_noise_can_be_trained_on():
    assert [noisy_steps(sampler, FLOW) for sampler in SAMPLERS[:3]] == [(0, 1, 2), (0, 1, 2), (0, 1)]
    assert noisy_steps(DdimSampler(), NOISE) == (0,)
    ten = flow_schedule(10)  # its last step but one leads to level 0.001
    assert noisy_steps(CpsSampler(noise=0.8), ten) == tuple(range(8))
    assert noisy_steps(SdeSampler(noise=0.7), ten) == tuple(range(9))
    cumulative = torch.linspace(0.99, 0.01, 1000)

    def trained_steps(offset, to_one):
        found = ddim_schedule(5, cumulative, spacing="leading", steps_offset=offset, set_alpha_to_one=to_one)
        return noisy_steps(DdimSampler(), found)

    assert trained_steps(1, to_one=False) == (
        0,
        1,
        2,
        3,
        4,
    )  # the last goes from timestep 1 to 0, as in Stable Diffusion
    assert trained_steps(0, to_one=False) == (0, 1, 2, 3)  # it would go from 0 to 0
    assert trained_steps(1, to_one=True) == (0, 1, 2, 3)


@given(st.permutations(range(6)), st.sampled_from(SAMPLERS))
def test_a_row_has_the_same_bits_in_every_order_of_rows(order, sampler):
    schedule, draw = schedule_of(sampler), torch.Generator().manual_seed(3)
    x_ND, prediction_ND, next_ND = torch.randn(3, 6, 17, generator=draw)
    steps_N = torch.arange(6) % schedule.steps
    mean_ND, std_N = transition(sampler, x_ND, prediction_ND, steps_N, schedule)
    moved_ND, moved_N = transition(sampler, x_ND[order], prediction_ND[order], steps_N[order], schedule)
    assert torch.equal(moved_ND, mean_ND[order])
    assert torch.equal(moved_N, std_N[order])
    assert torch.equal(step_logprobs(next_ND[order], moved_ND, moved_N), step_logprobs(next_ND, mean_ND, std_N)[order])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda found: found.kind)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_arithmetic_is_in_single_precision_for_every_precision_of_the_network(sampler, half):
    schedule, draw = schedule_of(sampler), torch.Generator().manual_seed(4)
    x_ND, prediction_ND = torch.randn(2, 2, 9, generator=draw)
    prediction_ND, steps_N = prediction_ND.to(half), torch.arange(2)
    mean_ND, std_N = transition(sampler, x_ND, prediction_ND, steps_N, schedule)
    quiet_ND = deterministic(x_ND.to(half), prediction_ND, steps_N, schedule)
    assert {found.dtype for found in (mean_ND, std_N, quiet_ND)} == {torch.float32}
    assert torch.equal(mean_ND, transition(sampler, x_ND, prediction_ND.float(), steps_N, schedule)[0])
    near_ND, far_ND, std_N = mean_ND.to(half), x_ND.to(half), torch.ones(2)
    assert torch.equal(step_logprobs(near_ND, far_ND, std_N), step_logprobs(near_ND.float(), far_ND.float(), std_N))
    assert step_divergence(near_ND, far_ND, std_N).dtype == torch.float32
    exact_ND, exact_N = transition(sampler, x_ND.double(), prediction_ND, steps_N, schedule)
    assert {exact_ND.dtype, exact_N.dtype} == {torch.float64}
    torch.testing.assert_close(mean_ND.double(), exact_ND, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda found: found.kind)
def test_the_gradient_of_a_log_prob_is_that_of_central_differences(sampler):
    schedule, draw = schedule_of(sampler), torch.Generator().manual_seed(6)
    x_ND, prediction_ND, next_ND = torch.randn(3, 1, 4, generator=draw, dtype=torch.float64)

    def logprob(prediction_ND):
        mean_ND, std_N = transition(sampler, x_ND, prediction_ND, torch.tensor([0]), schedule)
        return step_logprobs(next_ND, mean_ND, std_N)

    assert torch.autograd.gradcheck(logprob, prediction_ND.requires_grad_())


def test_all_samplers_with_little_noise_agree_with_the_deterministic_step():
    x_ND, prediction_ND = torch.full((2, 1), 2.0), torch.full((2, 1), -1.0)
    for sampler in (SdeSampler(noise=1e-4), DanceSampler(noise=1e-4), CpsSampler(noise=1e-4), DdimSampler(noise=1e-4)):
        schedule = schedule_of(sampler)
        mean_ND, std_N = transition(sampler, x_ND, prediction_ND, torch.arange(2), schedule)
        torch.testing.assert_close(mean_ND, deterministic(x_ND, prediction_ND, torch.arange(2), schedule))
        assert (std_N < 2e-4).all()


def test_a_sampler_of_velocities_refuses_a_model_that_predicts_noise():
    with pytest.raises(AssertionError, match=r"sde.* velocity.* noise"):
        predict_steps(SdeSampler(), 1.0, 1.0, NOISE)


# ---- with a perfect model

MEAN, STD = 0.7, 0.5
"""Moments of images that are normal in every latent.

The velocity and the noise that a perfect model predicts are linear in the state. So the sampled states are normal as
well, and their moments follow from step to step without sampling.
"""


def predict_perfectly(level, x, prediction_type="velocity"):
    """Return the prediction of a perfect model for a state."""
    picture, noise = (1 - level, level) if prediction_type == "velocity" else (level**0.5, (1 - level) ** 0.5)
    pull = (x - picture * MEAN) / (picture**2 * STD**2 + noise**2)
    predicted_noise = noise * pull
    return predicted_noise - (MEAN + picture * STD**2 * pull) if prediction_type == "velocity" else predicted_noise


def follow_moments(schedule, sampler=None):
    """Return mean and standard deviation of the sampled states at each level, starting with noise."""
    levels_N = torch.tensor(schedule.levels[:-1], dtype=torch.float64)[:, None]
    steps_N, ends = torch.arange(schedule.steps), []
    std_N = torch.zeros(schedule.steps)
    for x in (0.0, 1.0):
        x_ND = torch.full_like(levels_N, x)
        prediction_ND = predict_perfectly(levels_N, x_ND, schedule.prediction_type)
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
    squares = (1 - levels) ** 2 if schedule.prediction_type == "velocity" else levels
    noise = levels**2 if schedule.prediction_type == "velocity" else 1 - levels
    return np.stack([np.sqrt(squares) * MEAN, np.sqrt(squares * STD**2 + noise)], axis=1)


def spaced_schedule(steps, first=1.0):
    levels = tuple(np.linspace(first, 0.0, steps + 1).tolist())
    return NoiseSchedule(levels, levels[:-1], prediction_type="velocity")


SMALL = 4000
"""Steps; the fresh noise of cps does not shrink with the step by itself, so there a is about 1/√steps."""


VELOCITIES = spaced_schedule(SMALL, first=0.95)  # g of sde has no bound at 1, where no step is small
NOISES = NoiseSchedule(
    *(tuple(np.linspace(1e-4, 1.0, SMALL + 1).tolist()[:end]) for end in (None, -1)), prediction_type="noise"
)


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
    """For a picture x0 and noise x1, (1 − σ')·x0 is kept, and the variances of old and new noise add up to σ'²."""
    levels = (1.0, *sorted(middle, reverse=True), 0.0)
    schedule = NoiseSchedule(levels, levels[:-1], prediction_type="velocity")
    states = [(1 - level) * picture + level * fresh for level in levels[:-1]]
    steps = predict_steps(CpsSampler(noise=noise), states, fresh - picture, schedule)
    for after, mean, std in zip(levels[1:], *steps, strict=True):
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
    predictions = [1 / level for level in schedule.levels[:-1]]
    for mean, std in zip(*predict_steps(sampler, 1.0, predictions, schedule), strict=True):
        found.append(math.hypot(mean * found[-1], std))
    return np.array(found)
