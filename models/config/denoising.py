"""Configuration of picture generation: denoising steps, and which of them are noisy and trained. Torch-free.

A step goes from one noise level to the next: level 1 is pure noise, level 0 the picture. A noisy step samples the next
state from a normal distribution around the model's prediction, so it has a probability. It plays the role that a token
has in text.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infra.config import Positive, Settings
from infra.variants import Variant


class Sampler(Variant):
    """Fields common to all samplers. `implementation` names a `models.denoising.samplers.Transition`."""

    prediction_type: ClassVar[Literal["velocity", "noise"]] = "velocity"
    """Prediction type of the models that this sampler supports: the velocity of flow matching, or the noise."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """Scaling of a step's log-prob: "exact" divides the squared error by 2s², with s the standard deviation of the
        step's noise. "published" omits this factor."""
        return "exact"


class SdeSampler(Sampler):
    """Flow-GRPO's stochastic differential equation (arXiv 2505.05470, eq. 9). The noise decreases towards the end of
    the denoising."""

    implementation = "models.denoising.samplers:sde"

    kind: Literal["sde"] = "sde"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Noise scale, a in the paper."""


class DanceSampler(Sampler):
    """DanceGRPO's stochastic differential equation (arXiv 2505.07818, eq. 8), which is Flow-GRPO's equation with equal
    noise at every level."""

    implementation = "models.denoising.samplers:dance"

    kind: Literal["dance"] = "dance"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.3
    """Noise scale, η in the paper."""


class CpsSampler(Sampler):
    """Coefficients-preserving sampling (arXiv 2509.05952): after each step the state contains as much noise as the
    schedule prescribes for its noise level.

    The last step has no noise, so it is not trained.
    """

    implementation = "models.denoising.samplers:cps"

    kind: Literal["cps"] = "cps"
    noise: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Noise scale, a in the paper: the share sin(aπ/2) of the noise at the next level is new."""
    weighting: Literal["exact", "published"] = "exact"
    """Scaling of a step's log-prob: "exact" divides the squared error by 2s², with s the standard deviation of the
    step's noise. "published" omits this factor, as the paper's code does, which gives noisy steps more weight."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """Scaling of a step's log-prob, as configured."""
        return self.weighting


class DdimSampler(Sampler):
    """DDIM with noise (arXiv 2010.02502, eq. 16; DDPO, arXiv 2305.13301), for models that predict the noise."""

    implementation = "models.denoising.samplers:ddim"
    prediction_type = "noise"

    kind: Literal["ddim"] = "ddim"
    noise: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Noise scale, η in the paper."""


SamplerConfig = Annotated[SdeSampler | DanceSampler | CpsSampler | DdimSampler, Field(discriminator="kind")]


class LearntWindow(Settings):
    """Consecutive steps that are noisy and trained, while all others are deterministic (MixGRPO, arXiv 2507.21802).

    The first step of the window is sampled once per iteration and is the same for all its pictures.
    """

    size: Positive = 3
    """Number of steps in the window."""
    first: Annotated[int, Field(ge=0)] = 0
    """Lowest step, counted from 0, at which the randomly placed window may begin."""
    last: Annotated[int, Field(ge=0)] = 2
    """Highest step, counted from 0, at which the randomly placed window may begin."""

    @model_validator(mode="after")
    def _require_order(self) -> Self:
        if self.last < self.first:
            raise ValueError(
                f"window.last is {self.last}, but it must be at least window.first, which is {self.first}. Raise "
                "window.last"
            )
        return self


class DenoisingConfig(Settings):
    """Settings for generating pictures by denoising."""

    steps: Annotated[int, Field(ge=2, le=1000)] = 10
    """Number of denoising steps from noise to picture."""
    sampler: SamplerConfig = CpsSampler()
    """Sampler of the noisy steps, which computes the distribution of the next state."""
    window: LearntWindow | None = None
    """Steps that are noisy and trained. If not set, all steps with noise are trained."""
    guidance: Annotated[float, Field(ge=1)] = 1.0
    """Scale of classifier-free guidance, in generation and training. 1 turns guidance off, which halves the
    computation. Models that take the guidance scale as an input, such as FLUX.1-dev, receive this value."""
    side: Positive | None = None
    """Height and width of a picture in pixels. The default is the size for which the policy's denoiser is
    configured."""
    text_tokens: Positive | None = None
    """Maximum tokens of a prompt, with padding, for T5 or Qwen's text encoder: `max_sequence_length` of the diffusers
    pipeline. Whoever uses the trained policy must set the same value. The default is the default of the pipeline."""

    @model_validator(mode="after")
    def _require_window_within_steps(self) -> Self:
        if self.window is not None and self.window.last + self.window.size > self.steps:
            raise ValueError(
                f"window.last is {self.window.last} and window.size is {self.window.size}, so the window could end "
                f"after the last of {self.steps} steps. Set window.last to at most {self.steps - self.window.size}"
            )
        return self
