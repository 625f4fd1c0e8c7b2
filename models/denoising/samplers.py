"""Samplers of text-to-image policies: noise schedules, the distribution of each denoising step, and its log-prob.

A state is the noisy latents of an image at one noise level. With flow matching a state is x = (1 − σ)·x0 + σ·x1 with
the clean latents x0 and the noise x1, and the model predicts the velocity v = x1 − x0. Models that predict the noise e
have states √ᾱ·x0 + √(1 − ᾱ)·x1. The next state is always normally distributed around a·x + b·v, or a·x + b·e, where a,
b and the standard deviation depend only on the step. A batch may contain several steps.

Shapes: N states, D latents of a state, L levels of noise (one more than steps).
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.variants import implementation_of
from rheostat.models.config.denoising import CpsSampler, DanceSampler, DdimSampler, OdeSampler, Sampler, SdeSampler


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Noise levels of the denoising steps, with the timestep that the model receives at each step."""

    levels: tuple[float, ...]
    """Noise levels before the first step and after each step, so there is one more level than steps. For models that
    predict velocities, σ from about 1 down to 0. For models that predict noise, ᾱ from about 0 up to about 1."""
    timesteps: tuple[float, ...]
    """Timestep of each step, which is the model input that represents the noise level before the step."""
    prediction_type: Literal["velocity", "noise"]
    """Quantity that a model with this schedule predicts: velocity or noise."""

    def __post_init__(self) -> None:
        """Check that there is one noise level more than timesteps."""
        assert len(self.levels) == len(self.timesteps) + 1, f"{len(self.levels)} levels, {len(self.timesteps)} steps"

    @property
    def steps(self) -> int:
        """Number of denoising steps from noise to image."""
        return len(self.timesteps)


def flow_schedule(
    steps: int,
    *,
    shift: float = 1.0,
    mu: float | None = None,
    terminal: float | None = None,
    train_timesteps: int = 1000,
) -> NoiseSchedule:
    """Return the noise schedule of diffusers' FlowMatchEulerDiscreteScheduler.

    `shift` is a constant factor that shifts levels towards noise (Stable Diffusion 3). If shifting depends on the image
    size (FLUX, Qwen-Image), `mu` is used instead of `shift`. Pipelines compute `mu` from the size of the image. If
    `terminal` is set, the last level before 0 has this value (`shift_terminal`, Qwen-Image).
    """
    if mu is None:
        # The scheduler shifts its smallest level when it is built, and shifts this level again with the others.
        min_level = _shifted(torch.tensor(1.0) / train_timesteps, shift).item()
        levels_L = _shifted(_evenly(min_level, steps), shift)
    else:
        even_L = _evenly(1 / steps, steps)
        levels_L = math.exp(mu) / (math.exp(mu) + (1 / even_L - 1))
    if terminal is not None:
        levels_L = 1 - (1 - levels_L) * ((1 - terminal) / (1 - levels_L[-1]))
    levels_L = levels_L.float()
    timesteps_L = levels_L * train_timesteps
    return NoiseSchedule((*levels_L.tolist(), 0.0), tuple(timesteps_L.tolist()), prediction_type="velocity")


def _evenly(least: float, steps: int) -> Tensor:
    return torch.linspace(1.0, least, steps, dtype=torch.float64)


def _shifted(levels: Tensor, shift: float) -> Tensor:
    return shift * levels / (1 + (shift - 1) * levels)


def ddim_schedule(
    steps: int, alphas_cumprod: Tensor, *, spacing: str, steps_offset: int, set_alpha_to_one: bool
) -> NoiseSchedule:
    """Return the noise schedule of diffusers' DDIMScheduler, with one difference: each step ends at the noise level at
    which the next step begins.

    A step of diffusers' scheduler always goes down by `train // steps` timesteps. If timesteps are spaced differently
    ('linspace', or 'trailing' if `steps` does not divide the training timesteps), the steps in diffusers therefore end
    at other levels. Raises BadInput if a timestep is outside of the training timesteps or is pure noise, or if the
    spacing is unknown.
    """
    train = len(alphas_cumprod)
    timesteps = _ddim_timesteps(steps, train, spacing=spacing, steps_offset=steps_offset)
    if steps > train or timesteps[0] >= train:
        raise BadInput(
            f"with {format_count(steps, 'step')}, timestep_spacing {spacing!r} and steps_offset {steps_offset}, the "
            f"first timestep is {timesteps[0]}, but the model was trained on timesteps below {train}. Lower "
            "rollout.denoising.steps, or correct the model's scheduler_config.json."
        )
    end = 1.0 if set_alpha_to_one else alphas_cumprod[0].item()
    levels = (*alphas_cumprod[timesteps].tolist(), end)
    if levels[0] <= 0:
        raise BadInput(
            f"alphas_cumprod[{timesteps[0]}] of the model's scheduler is {levels[0]}, but it must be more than 0: at "
            "pure noise, predicted noise does not determine the picture. A model with rescale_betas_zero_snr needs "
            "another prediction_type. Use another model."
        )
    return NoiseSchedule(levels, tuple(map(float, timesteps)), prediction_type="noise")


def _ddim_timesteps(steps: int, train: int, *, spacing: str, steps_offset: int) -> list[int]:
    """Return the timesteps in descending order, from noise to image. `train` is the number of training timesteps. The
    names of spacings are those of arXiv 2305.08891, table 2."""
    match spacing:
        case "leading":
            return [k * (train // steps) + steps_offset for k in reversed(range(steps))]
        case "linspace":
            return [round(k * (train - 1) / max(1, steps - 1)) for k in reversed(range(steps))]
        case "trailing":
            return [round(train - k * train / steps) - 1 for k in range(steps)]
        case _:
            raise BadInput(
                "timestep_spacing in the model's scheduler_config.json must be 'leading', 'linspace' or 'trailing', "
                f"found {spacing!r}"
            )


MIN_NOISE: Final = 0.01
"""Minimum standard deviation of the noise that a denoising step must add to be trained on. States have a standard
deviation of about 1.

The flow-matching schedules of diffusers reach level 0.001 before the last step, at which the sampler `cps` with noise
0.8 has a standard deviation of 0.00095.
"""


class Transition(Protocol):
    """Function of one sampler that returns the normal distribution of the next states. `transition` calls the function
    of the configured sampler."""

    def __call__(
        self,
        x_ND: Tensor,
        prediction_ND: Tensor,
        steps_N: Tensor,
        schedule: NoiseSchedule,
        sampler: Any,  # noqa: ANN401 -- its own
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean (N x D) and standard deviation (N) of the next states, in float32, or float64 if an input is.

        `prediction_ND` is the model's prediction, and `steps_N` are indices of steps (int64). The standard deviation is
        0 for steps without randomness.
        """
        ...


def transition(
    sampler: Sampler, x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule
) -> tuple[Tensor, Tensor]:
    """Return the mean (N x D) and standard deviation (N) of the next states under the configured sampler.

    `x_ND` are the current states (noisy latents), `prediction_ND` is the model's prediction for these states, and
    `steps_N` is the denoising step of each state.
    """
    assert sampler.prediction_type == schedule.prediction_type, (
        f"sampler {sampler.label!r} needs a model that predicts the {sampler.prediction_type}, but this one predicts "
        f"the {schedule.prediction_type}"
    )
    return cast(Transition, implementation_of(sampler))(x_ND, prediction_ND, steps_N, schedule, sampler)


def deterministic(x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Return the next states without added noise (N x D). The step is an Euler step along the velocity, or a DDIM step
    with η = 0 if the model predicts noise."""
    if schedule.prediction_type == "noise":
        return _ddim(x_ND, prediction_ND, steps_N, schedule, noise=0.0)[0]
    level_N, after_N = _around(steps_N, schedule)
    return _mixed(x_ND, prediction_ND, kept_N=torch.ones_like(level_N), moved_N=after_N - level_N)


def noisy_steps(sampler: Sampler, schedule: NoiseSchedule) -> tuple[int, ...]:
    """Return the indices of the steps that can be trained, because they add noise with a standard deviation of at least
    `MIN_NOISE`.

    The log-prob of a step divides by the variance of its noise, so tiny changes of the mean at a step with less noise
    would outweigh all other steps. Such steps are at the end of a schedule. Flow-GRPO also omits the last step.

    With a deterministic sampler, finished pictures are trained with new noise at the noise levels of the steps. The
    result then contains the steps whose level is at least `MIN_NOISE`. DiffusionNFT also omits the last step.
    """
    if sampler.is_deterministic:
        return tuple(step for step, level in enumerate(schedule.levels[:-1]) if level >= MIN_NOISE)
    nothing_ND = torch.zeros(schedule.steps, 1)
    _, std_N = transition(sampler, nothing_ND, nothing_ND, torch.arange(schedule.steps), schedule)
    return tuple((std_N >= MIN_NOISE).nonzero().flatten().tolist())


def sde(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, sampler: SdeSampler
) -> tuple[Tensor, Tensor]:
    """Return the distribution (mean and standard deviation) of the next states in Flow-GRPO (arXiv 2505.05470, eq. 9),
    with g² = a²σ/(1 − σ).

    At σ = 1, g² would be infinite. There, 1 − σ is computed from the second noise level, as in the authors' code.
    """
    level_N, _ = _around(steps_N, schedule)
    finite_N = torch.where(level_N == 1, schedule.levels[1], level_N)
    return _diffused(x_ND, prediction_ND, steps_N, schedule, square_N=sampler.noise**2 * level_N / (1 - finite_N))


def dance(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, sampler: DanceSampler
) -> tuple[Tensor, Tensor]:
    """Return the distribution (mean and standard deviation) of the next states in DanceGRPO (arXiv 2505.07818, eq. 8),
    with g = η at every noise level."""
    square_N = torch.full(steps_N.shape, sampler.noise**2, dtype=torch.float64, device=steps_N.device)
    return _diffused(x_ND, prediction_ND, steps_N, schedule, square_N=square_N)


def _diffused(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, *, square_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of an Euler-Maruyama step of the SDE with g² = `square_N`, which has the same
    marginal distributions as the deterministic ODE."""
    level_N, after_N = _around(steps_N, schedule)
    change_N = after_N - level_N
    pull_N = square_N * change_N / (2 * level_N)
    mean_ND = _mixed(x_ND, prediction_ND, kept_N=1 + pull_N, moved_N=change_N + pull_N * (1 - level_N))
    return mean_ND, (square_N * -change_N).sqrt().to(mean_ND.dtype)


def cps(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, sampler: CpsSampler
) -> tuple[Tensor, Tensor]:
    """Return the distribution (mean and standard deviation) of the next states in coefficients-preserving sampling
    (arXiv 2509.05952).

    The next state is (1 − σ')·x̂0 + σ'·(cos(aπ/2)·x̂1 + sin(aπ/2)·fresh noise), where x̂0 is the predicted image, x̂1
    the predicted noise and σ' the next noise level. Therefore the amount of noise in a state always matches its level.
    The last step adds no noise, because its σ' is 0.
    """
    level_N, after_N = _around(steps_N, schedule)
    angle = sampler.noise * math.pi / 2
    # x̂0 = x − σv and x̂1 = x + (1 − σ)v, rearranged as coefficients of x and v.
    picture_N, noise_N = 1 - after_N, after_N * math.cos(angle)
    moved_N = (1 - level_N) * noise_N - level_N * picture_N
    mean_ND = _mixed(x_ND, prediction_ND, kept_N=picture_N + noise_N, moved_N=moved_N)
    return mean_ND, (after_N * math.sin(angle)).to(mean_ND.dtype)


def ode(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, sampler: OdeSampler
) -> tuple[Tensor, Tensor]:
    """Return the next states of Euler steps along the velocity, and standard deviations of 0."""
    mean_ND = deterministic(x_ND, prediction_ND, steps_N, schedule)
    return mean_ND, torch.zeros(len(steps_N), dtype=mean_ND.dtype, device=mean_ND.device)


def ddim(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, sampler: DdimSampler
) -> tuple[Tensor, Tensor]:
    """Return the distribution (mean and standard deviation) of the next states in DDIM with noise (arXiv 2010.02502,
    eq. 12, 16), as in DDPO (arXiv 2305.13301)."""
    return _ddim(x_ND, prediction_ND, steps_N, schedule, noise=sampler.noise)


def _ddim(
    x_ND: Tensor, prediction_ND: Tensor, steps_N: Tensor, schedule: NoiseSchedule, *, noise: float
) -> tuple[Tensor, Tensor]:
    level_N, after_N = _around(steps_N, schedule)
    variance_N = noise**2 * (1 - after_N) / (1 - level_N) * (1 - level_N / after_N)
    # x̂0 = (x − √(1 − ᾱ)·e)/√ᾱ, times √ᾱ', rearranged as coefficients of x and e.
    signal_ratio_N = (after_N / level_N).sqrt()
    moved_N = (1 - after_N - variance_N).sqrt() - signal_ratio_N * (1 - level_N).sqrt()
    mean_ND = _mixed(x_ND, prediction_ND, kept_N=signal_ratio_N, moved_N=moved_N)
    return mean_ND, variance_N.sqrt().to(mean_ND.dtype)


def step_logprobs(
    next_ND: Tensor, mean_ND: Tensor, std_N: Tensor, *, weighting: Literal["exact", "published"] = "exact"
) -> Tensor:
    """Return the log-prob of each next state (N) under a normal distribution, as a mean over latents and without the
    terms that cancel in probability ratios.

    Because of the mean over D latents, a probability ratio is the D-th root of the ratio of the full densities. With
    the weighting "published", the factor 1/(2s²) is omitted, as in the code of arXiv 2509.05952. Standard deviations
    must not be 0.
    """
    squares_N = _mean_square(next_ND, mean_ND)
    return -squares_N if weighting == "published" else -squares_N / (2 * std_N.square())


def step_divergence(mean_ND: Tensor, other_ND: Tensor, std_N: Tensor) -> Tensor:
    """Return the KL divergence between normal distributions with means `mean_ND` and `other_ND` and equal standard
    deviations `std_N` (N), averaged over latents."""
    return _mean_square(mean_ND, other_ND) / (2 * std_N.square())


def _mean_square(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    one_ND, other_ND = _floats(one_ND, other_ND)
    return (one_ND - other_ND).square().mean(dim=1)


def _mixed(x_ND: Tensor, prediction_ND: Tensor, *, kept_N: Tensor, moved_N: Tensor) -> Tensor:
    x_ND, prediction_ND = _floats(x_ND, prediction_ND)
    return x_ND * kept_N.to(x_ND.dtype)[:, None] + prediction_ND * moved_N.to(x_ND.dtype)[:, None]


def _floats(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both tensors to float32, or to float64 if one of them is float64.

    Half precision is not sufficient, because one denoising step changes a state by less than its resolution.
    """
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return one.to(dtype), other.to(dtype)


def _around(steps_N: Tensor, schedule: NoiseSchedule) -> tuple[Tensor, Tensor]:
    """Return the noise levels before and after each of the given steps, in float64, because adjacent levels differ
    little."""
    levels_L = torch.tensor(schedule.levels, dtype=torch.float64, device=steps_N.device)
    return levels_L[steps_N], levels_L[steps_N + 1]
