"""Configuration of picture generation: denoising steps, and which of them are noisy and trained. Torch-free.

A step goes from one noise level to the next: level 1 is pure noise, level 0 the picture. A noisy step samples the next
state from a normal distribution around the model's prediction, so it has a probability. It plays the role that a token
has in text.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings
from rheostat.infra.counts import format_count
from rheostat.infra.variants import Variant


class Sampler(Variant):
    """Fields common to all samplers, which compute the distribution of the next state in each denoising step.
    `implementation` is the import path of a `rheostat.models.denoising.samplers.Transition`."""

    prediction_type: ClassVar[Literal["velocity", "noise"]] = "velocity"
    """Output of the models that this sampler supports: the velocity of flow matching ("velocity"), or the noise
    ("noise")."""

    is_deterministic: ClassVar[bool] = False
    """Whether no step adds noise, so that steps have no log-probs. Only the finished picture is stored for training."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """Scaling of a step's log-prob: "exact" divides the squared error by 2s², with s the standard deviation of the
        step's noise. "published" omits this factor, as the code of the CPS paper does."""
        return "exact"


class SdeSampler(Sampler):
    """Flow-GRPO's stochastic differential equation (arXiv 2505.05470, eq. 9). Each step adds less noise towards the end
    of the denoising."""

    implementation = "rheostat.models.denoising.samplers:sde"

    kind: Literal["sde"] = "sde"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Scale of the noise that each step adds, a in the paper."""


class DanceSampler(Sampler):
    """DanceGRPO's stochastic differential equation (arXiv 2505.07818, eq. 8). The equation is Flow-GRPO's with the same
    noise scale in every step."""

    implementation = "rheostat.models.denoising.samplers:dance"

    kind: Literal["dance"] = "dance"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.3
    """Scale of the noise that each step adds, η in the paper."""


class CpsSampler(Sampler):
    """Coefficients-preserving sampling (arXiv 2509.05952): after each step the state contains exactly as much noise as
    the noise schedule prescribes. The last step adds no noise, so it is not trained."""

    implementation = "rheostat.models.denoising.samplers:cps"

    kind: Literal["cps"] = "cps"
    noise: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Scale of the noise that each step adds, a in the paper. The share sin(aπ/2) of the noise in the next state is
    newly sampled. The other noise is the one that the model predicts."""
    weighting: Literal["exact", "published"] = "exact"
    """Scaling of a step's log-prob: "exact" divides the squared error by 2s², with s the standard deviation of the
    step's noise. "published" omits this factor, as the paper's code does, which gives noisy steps more weight."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """Scaling of a step's log-prob, as configured in `weighting`."""
        return self.weighting


class DdimSampler(Sampler):
    """DDIM sampling with added noise (arXiv 2010.02502, eq. 16; DDPO, arXiv 2305.13301), for models that predict the
    noise."""

    implementation = "rheostat.models.denoising.samplers:ddim"
    prediction_type = "noise"

    kind: Literal["ddim"] = "ddim"
    noise: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Scale of the noise that each step adds, η in the paper. With 1, the sampler is that of DDPM."""


class OdeSampler(Sampler):
    """Euler steps along the predicted velocity, without noise. Such steps have no log-probs, so this sampler needs a
    loss that trains on finished pictures, such as `diffusion_nft`. The loss adds new noise to the pictures at the noise
    levels of the denoising steps in `rollout.denoising.window`. If no window is set, it uses all levels of at least
    0.01."""

    implementation = "rheostat.models.denoising.samplers:ode"
    is_deterministic = True

    kind: Literal["ode"] = "ode"


SamplerConfig = Annotated[
    SdeSampler | DanceSampler | CpsSampler | DdimSampler | OdeSampler, Field(discriminator="kind")
]


class LearntWindow(Settings):
    """Consecutive denoising steps that add noise and are trained, while all other steps are deterministic (MixGRPO,
    arXiv 2507.21802).

    The first step of the window is sampled once per iteration and is the same for all its pictures.
    """

    size: Positive = 3
    """Number of denoising steps in the window."""
    first: Annotated[int, Field(ge=0)] = 0
    """First possible start of the window: the number of a denoising step, counted from 0. The start is sampled from
    `first` to `last`."""
    last: Annotated[int, Field(ge=0)] = 2
    """Last possible start of the window: the number of a denoising step, counted from 0."""

    @model_validator(mode="after")
    def _require_order(self) -> Self:
        if self.last < self.first:
            raise ValueError(
                f"window.last is {self.last}, but it must be at least window.first, which is {self.first}. Raise "
                "window.last"
            )
        return self


class DenoisingConfig(Settings):
    """Settings for generating pictures by denoising, for text-to-image policies."""

    checks = {"policy": "rheostat.models.inspection.training:check_denoising"}

    steps: Annotated[int, Field(ge=2, le=1000)] = 10
    """Number of denoising steps from noise to picture."""
    sampler: SamplerConfig = CpsSampler()
    """Sampler, which computes the distribution of the next state in the steps that add noise."""
    window: LearntWindow | None = None
    """Window of consecutive steps that add noise and are trained. If not set, all steps in which the sampler adds noise
    are trained."""
    guidance: Annotated[float, Field(ge=1)] = 1.0
    """Scale of classifier-free guidance, in rollouts and in training. 1 turns guidance off, which halves the
    computation. Models that take the guidance scale as an input, such as FLUX.1-dev, receive this value."""
    side: Positive | None = None
    """Height and width of a picture in pixels. The default is the size in the configuration of the policy's
    denoiser."""
    text_tokens: Positive | None = None
    """Length in tokens to which prompts are padded or truncated for the T5 or Qwen text encoder (`max_sequence_length`
    of the diffusers pipeline). Use the same value when you generate with the trained policy. The default is that of the
    pipeline."""

    @model_validator(mode="after")
    def _require_window_within_steps(self) -> Self:
        if self.window is not None and self.window.last + self.window.size > self.steps:
            raise ValueError(
                f"window.last is {self.window.last} and window.size is {self.window.size}, so the window could end "
                f"after the last of {format_count(self.steps, 'step')}. Set window.last to at most "
                f"{self.steps - self.window.size}"
            )
        return self
