"""The loss of DiffusionNFT, against numbers worked by hand and the formula of its paper, and the sampler `ode`."""

import numpy as np
import pytest
import torch

from rheostat.models.config.denoising import CpsSampler, OdeSampler
from rheostat.models.config.policy_losses import DiffusionNft
from rheostat.models.denoising.samplers import NoiseSchedule, deterministic, noisy_steps, transition
from rheostat.models.objectives.forward_process import diffusion_nft
from tests.support.losses import doubles

X0, NOISE, LEVEL = doubles([[1.0, -2.0]]), doubles([[0.5, 1.0]]), 0.5
TARGET = NOISE - X0  # the velocity (-0.5, 3)


def errors_of(velocity) -> torch.Tensor:
    """Return the error of the predicted picture, x_t - t v - x0."""
    return (1 - LEVEL) * X0 + LEVEL * NOISE - LEVEL * velocity - X0


def test_the_loss_of_one_picture_is_the_sum_worked_by_hand():
    """The errors of v are (1, -1) and those of v_old are (3, 1). With β = 1/2, those of v⁺ are (2, 0) and those of v⁻
    are (4, 2). Mean squares by mean absolute values: 2 / 1 and 10 / 3. Advantage 1 of a clip of 4: r = 5/8."""
    config = DiffusionNft(beta=0.5, advantage_clip=4.0)
    loss = diffusion_nft(doubles([[1, -1]]), doubles([[3, 1]]), advantages_N=doubles([1]), config=config)
    assert loss.tolist() == pytest.approx([(5 / 8 * 2 + 3 / 8 * 10 / 3) * 4 / 0.5])


@pytest.mark.parametrize(("advantage", "weight"), [(0, 0.5), (2.5, 0.75), (5, 1.0), (50, 1.0), (-5, 0.0), (-50, 0.0)])
def test_the_loss_is_the_formula_of_the_paper_in_velocities(advantage, weight):
    """Loss: r w⁺ |v⁺ - v|² + (1 - r) w⁻ |v⁻ - v|², with w = t² / mean|x0 prediction - x0| of the velocity."""
    beta, generator = 0.3, torch.Generator().manual_seed(1)
    velocity, old = (torch.randn(1, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    positive, negative = (1 - beta) * old + beta * velocity, (1 + beta) * old - beta * velocity
    parts = [
        LEVEL**2 * (each - TARGET).square().mean() / (errors_of(each).abs().mean()) for each in (positive, negative)
    ]
    expected = (weight * parts[0] + (1 - weight) * parts[1]) * 5 / beta
    config, advantages_N = DiffusionNft(beta=beta), doubles([advantage])
    loss = diffusion_nft(errors_of(velocity), errors_of(old), advantages_N=advantages_N, config=config)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def step_against_gradient(advantage: float, *, beta: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient with respect to the velocity at the old velocity (1, 1), and the direction to the target."""
    velocity = doubles([[1.0, 1.0]]).requires_grad_()
    config, old_ND = DiffusionNft(beta=beta), errors_of(velocity.detach())
    diffusion_nft(errors_of(velocity), old_ND, advantages_N=doubles([advantage]), config=config).sum().backward()
    return velocity.grad, TARGET - velocity.detach()


def test_a_picture_with_a_positive_advantage_attracts_the_velocity_and_one_with_a_negative_repels_it():
    for advantage in (0.5, 3.0, 50.0, -0.5, -3.0, -50.0):
        gradient, towards = step_against_gradient(advantage)
        moved = -(gradient * towards).sum().item()
        assert moved * advantage > 0


def test_at_the_old_velocity_the_gradient_is_advantage_times_that_of_flow_matching_for_any_beta():
    """E(v) = t² mean (v - target)² / mean |t (v - target)|, whose denominator has no gradient."""
    for beta in (0.1, 1.0, 2.0):
        for advantage in (-2.0, 0.0, 3.0):
            gradient, towards = step_against_gradient(advantage, beta=beta)
            expected = -advantage * LEVEL**2 * towards / (LEVEL * towards).abs().mean()  # 2/D of the square, D = 2
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert not step_against_gradient(0.0)[0].any()


def test_a_picture_with_advantage_0_pulls_a_moved_velocity_back_to_the_old_one():
    """With equal errors of v⁺ and v⁻ in absolute value, only the square of the distance from v_old is left."""
    errors_ND = doubles([[0.5, -0.5]]).requires_grad_()
    loss = diffusion_nft(errors_ND, doubles([[0, 0]]), advantages_N=doubles([0]), config=DiffusionNft())
    loss.sum().backward()
    assert (errors_ND.grad * errors_ND).sum() > 0


def test_an_error_of_0_has_a_finite_loss_and_gradient():
    errors_ND = doubles([[0, 0]]).requires_grad_()
    loss = diffusion_nft(errors_ND, doubles([[0, 0]]), advantages_N=doubles([1]), config=DiffusionNft())
    loss.sum().backward()
    assert loss.item() == 0 and not errors_ND.grad.any()


def test_the_ode_sampler_takes_the_deterministic_step_and_trains_all_levels_but_the_last_near_0():
    schedule = NoiseSchedule((1.0, 0.8, 0.009, 0.0), (1000.0, 800.0, 9.0), prediction_type="velocity")
    states_ND, velocities_ND = np.random.default_rng(0).standard_normal((2, 3, 4))
    arguments = torch.from_numpy(states_ND), torch.from_numpy(velocities_ND), torch.arange(3), schedule
    mean_ND, std_N = transition(OdeSampler(), *arguments)
    assert torch.equal(mean_ND, deterministic(*arguments)) and not std_N.any()
    assert noisy_steps(OdeSampler(), schedule) == (0, 1)
    assert noisy_steps(CpsSampler(), schedule) == (0,)
