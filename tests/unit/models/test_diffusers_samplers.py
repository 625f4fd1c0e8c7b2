"""Schedules and steps are those of diffusers' own schedulers."""

import numpy as np
import pytest
import torch

from models.config.denoising import DdimSampler
from models.denoising.samplers import ddim_schedule, deterministic, flow_schedule, transition

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_levels_of_flow_matching_are_diffusers_own(shift):
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in range(1, 60):
        theirs.set_timesteps(steps)
        ours = flow_schedule(steps, shift=shift)
        assert (list(ours.levels), list(ours.timesteps)) == (theirs.sigmas.tolist(), theirs.timesteps.tolist())


@pytest.mark.parametrize("terminal", [None, 0.02])
def test_levels_shifted_by_the_size_of_a_picture_are_diffusers_own(terminal):
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
    for steps in range(2, 60):
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=0.83)
        ours = flow_schedule(steps, mu=0.83, terminal=terminal)
        assert ours.levels == pytest.approx(theirs.sigmas.tolist(), abs=3e-7)  # theirs are computed in float32
        assert ours.timesteps == pytest.approx(theirs.timesteps.tolist(), abs=3e-4)


def ddim_pair(steps, spacing, offset, to_one):
    """Diffusers' scheduler as Stable Diffusion has it, and our schedule of the same."""
    theirs = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        timestep_spacing=spacing,
        steps_offset=offset,
        set_alpha_to_one=to_one,
    )
    theirs.set_timesteps(steps)
    cumulative = theirs.alphas_cumprod
    ours = ddim_schedule(steps, cumulative, spacing=spacing, steps_offset=offset, set_alpha_to_one=to_one)
    return theirs, ours


@pytest.mark.parametrize("steps", [1, 7, 10, 30, 50])
@pytest.mark.parametrize(("spacing", "offset"), [("leading", 0), ("leading", 1), ("linspace", 0), ("trailing", 0)])
@pytest.mark.parametrize("to_one", [True, False])
def test_timesteps_of_ddim_are_diffusers_own(steps, spacing, offset, to_one):
    theirs, ours = ddim_pair(steps, spacing, offset, to_one)
    timesteps = theirs.timesteps.tolist()
    assert list(ours.timesteps) == timesteps
    assert list(ours.levels) == [*theirs.alphas_cumprod[timesteps].tolist(), theirs.final_alpha_cumprod.item()]


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("to_one", [True, False])
@pytest.mark.parametrize(("spacing", "steps"), [("leading", 10), ("leading", 7), ("trailing", 20)])
def test_a_step_of_ddim_is_diffusers_own(noise, to_one, spacing, steps):
    theirs, ours = ddim_pair(steps, spacing, 1 if spacing == "leading" else 0, to_one)
    draw = torch.Generator().manual_seed(5)
    x_ND, said_ND = torch.randn(2, steps, 6, generator=draw)
    mean_ND, std_N = transition(DdimSampler(noise=noise), x_ND, said_ND, torch.arange(steps), ours)
    quiet_ND = deterministic(x_ND, said_ND, torch.arange(steps), ours)
    for k, timestep in enumerate(theirs.timesteps):

        def step(eta, one, k=k, timestep=timestep):
            fresh_D = torch.full((6,), one)
            return theirs.step(said_ND[k], timestep, x_ND[k], eta=eta, variance_noise=fresh_D).prev_sample

        torch.testing.assert_close(mean_ND[k], step(noise, 0.0), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(std_N[k].expand(6), step(noise, 1.0) - step(noise, 0.0), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(quiet_ND[k], step(0.0, 0.0), rtol=1e-5, atol=2e-6)


def test_a_step_without_noise_is_diffusers_euler_step():
    theirs, ours = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), flow_schedule(8, shift=3.0)
    theirs.set_timesteps(8)
    x_ND, said_ND = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1))
    found_ND = deterministic(x_ND, said_ND, torch.arange(8), ours)
    for k, timestep in enumerate(theirs.timesteps):
        torch.testing.assert_close(found_ND[k], theirs.step(said_ND[k], timestep, x_ND[k]).prev_sample)
