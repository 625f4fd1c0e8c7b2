"""Noise schedules and sampler steps equal those of the schedulers of diffusers."""

import numpy as np
import pytest
import torch

from rheostat.models.config.denoising import DdimSampler
from rheostat.models.denoising.samplers import ddim_schedule, deterministic, flow_schedule, transition

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_levels_equal_those_of_diffusers(shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in range(1, 60):
        scheduler.set_timesteps(steps)
        schedule = flow_schedule(steps, shift=shift)
        assert list(schedule.levels) == scheduler.sigmas.tolist()
        assert list(schedule.timesteps) == scheduler.timesteps.tolist()


@pytest.mark.parametrize("terminal", [None, 0.02])
def test_levels_shifted_by_the_picture_size_equal_those_of_diffusers(terminal):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
    for steps in range(2, 60):
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=0.83)
        schedule = flow_schedule(steps, mu=0.83, terminal=terminal)
        assert schedule.levels == pytest.approx(scheduler.sigmas.tolist(), abs=3e-7)  # diffusers computes in float32
        assert schedule.timesteps == pytest.approx(scheduler.timesteps.tolist(), abs=3e-4)


def build_ddim(steps, spacing, offset, to_one):
    """Return the scheduler of diffusers with the settings of Stable Diffusion, and our schedule."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    options = {"steps_offset": offset, "set_alpha_to_one": to_one}
    scheduler = diffusers.DDIMScheduler(**betas, **options, clip_sample=False, timestep_spacing=spacing)
    scheduler.set_timesteps(steps)
    return scheduler, ddim_schedule(steps, scheduler.alphas_cumprod, spacing=spacing, **options)


@pytest.mark.parametrize("steps", [1, 7, 10, 30, 50])
@pytest.mark.parametrize(("spacing", "offset"), [("leading", 0), ("leading", 1), ("linspace", 0), ("trailing", 0)])
@pytest.mark.parametrize("to_one", [True, False])
def test_ddim_timesteps_equal_those_of_diffusers(steps, spacing, offset, to_one):
    scheduler, schedule = build_ddim(steps, spacing, offset, to_one)
    timesteps = scheduler.timesteps.tolist()
    assert list(schedule.timesteps) == timesteps
    levels = scheduler.alphas_cumprod[timesteps].tolist()
    assert list(schedule.levels) == [*levels, scheduler.final_alpha_cumprod.item()]


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("to_one", [True, False])
@pytest.mark.parametrize(("spacing", "steps"), [("leading", 10), ("leading", 7), ("trailing", 20)])
def test_a_ddim_step_equals_that_of_diffusers(noise, to_one, spacing, steps):
    scheduler, schedule = build_ddim(steps, spacing, 1 if spacing == "leading" else 0, to_one)
    x_ND, prediction_ND = torch.randn(2, steps, 6, generator=torch.Generator().manual_seed(5))
    mean_ND, std_N = transition(DdimSampler(noise=noise), x_ND, prediction_ND, torch.arange(steps), schedule)
    deterministic_ND = deterministic(x_ND, prediction_ND, torch.arange(steps), schedule)
    for k, timestep in enumerate(scheduler.timesteps):

        def step(eta, noise_value, k=k, timestep=timestep):
            noise_D = torch.full((6,), noise_value)
            return scheduler.step(prediction_ND[k], timestep, x_ND[k], eta=eta, variance_noise=noise_D).prev_sample

        for ours, expected in (
            (mean_ND[k], step(noise, 0.0)),
            (std_N[k].expand(6), step(noise, 1.0) - step(noise, 0.0)),
            (deterministic_ND[k], step(0.0, 0.0)),
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)


def test_a_step_without_noise_equals_the_euler_step_of_diffusers():
    scheduler, schedule = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), flow_schedule(8, shift=3.0)
    scheduler.set_timesteps(8)
    x_ND, prediction_ND = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1))
    result_ND = deterministic(x_ND, prediction_ND, torch.arange(8), schedule)
    for k, timestep in enumerate(scheduler.timesteps):
        torch.testing.assert_close(result_ND[k], scheduler.step(prediction_ND[k], timestep, x_ND[k]).prev_sample)
