"""Configuration of how pictures are drawn: denoising steps, and which of them are noisy and learnt. Torch-free.

A step goes from one noise level to the next; level 1 is noise, level 0 the picture. A noisy step draws what comes next
from a normal distribution around what the model says, so it has a probability: it is to pictures what a token is to
text.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infra.config import Positive, Settings
from infra.variants import Variant


class Sampler(Variant):
    """What all samplers share. `implementation` is a `models.denoising.samplers.Transition`."""

    reads: ClassVar[Literal["velocity", "noise"]] = "velocity"
    """What the models say that it samples from: velocities of flow matching, or the noise."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """Whether a step's log-prob keeps its factor 1/2s²."""
        return "exact"


class SdeSampler(Sampler):
    """Flow-GRPO's stochastic differential equation (arXiv 2505.05470, eq. 9): little noise near the picture."""

    implementation = "models.denoising.samplers:sde"

    kind: Literal["sde"] = "sde"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.7
    """The paper's a."""


class DanceSampler(Sampler):
    """DanceGRPO's (arXiv 2505.07818, eq. 8): the same equation with as much noise at every level."""

    implementation = "models.denoising.samplers:dance"

    kind: Literal["dance"] = "dance"
    noise: Annotated[float, Field(gt=0, le=10)] = 0.3
    """The paper's η."""


class CpsSampler(Sampler):
    """Coefficients-preserving sampling (arXiv 2509.05952): what a step adds is as much noise as its level has.

    Its last step has no noise, so it is not learnt.
    """

    implementation = "models.denoising.samplers:cps"

    kind: Literal["cps"] = "cps"
    noise: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The paper's a: of the noise at the next level, the share sin(aπ/2) is new."""
    weighting: Literal["exact", "published"] = "exact"
    """The log-prob of a step, or without its factor 1/2s², as the paper's code has it: noisy steps then weigh more."""

    @property
    def weighs(self) -> Literal["exact", "published"]:
        """As configured."""
        return self.weighting


class DdimSampler(Sampler):
    """DDIM with noise (arXiv 2010.02502, eq. 16; DDPO, arXiv 2305.13301), for models that say the noise."""

    implementation = "models.denoising.samplers:ddim"
    reads = "noise"

    kind: Literal["ddim"] = "ddim"
    noise: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The paper's η."""


SamplerConfig = Annotated[SdeSampler | DanceSampler | CpsSampler | DdimSampler, Field(discriminator="kind")]


class LearntWindow(Settings):
    """Steps that follow each other, noisy and learnt; the others are deterministic (MixGRPO, arXiv 2507.21802).

    Where it begins is drawn for each iteration, the same for all its pictures.
    """

    size: Positive = 3
    """Steps in it."""
    first: Annotated[int, Field(ge=0)] = 0
    """First step that it may begin at, from 0."""
    last: Annotated[int, Field(ge=0)] = 2
    """Last step that it may begin at."""

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"window.last {self.last}: expected window.first {self.first} or more")
        return self


class DenoisingConfig(Settings):
    """How pictures are drawn."""

    steps: Annotated[int, Field(ge=2, le=1000)] = 10
    """Steps from noise to picture."""
    sampler: SamplerConfig = CpsSampler()
    """How noisy steps draw what comes next."""
    window: LearntWindow | None = None
    """Which steps are noisy and learnt; none takes all that have noise."""
    guidance: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance, in drawing and learning alike; 1 has none, and half the cost. Of models that take
    guidance as an input, such as FLUX.1-dev, that input."""
    side: Positive | None = None
    """Height and width of a picture in pixels; none takes what comes with the policy."""
    text_tokens: Positive | None = None
    """Tokens of a prompt that T5 or Qwen's text encoder reads, with padding: `max_sequence_length` of the pipeline, as
    whoever draws with the policy later must give it. None takes the pipeline's default."""

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.window is not None and self.window.last + self.window.size > self.steps:
            raise ValueError(
                f"window.last {self.window.last} and window.size {self.window.size}: the window would end behind the "
                f"last of {self.steps} steps; expected window.last {self.steps - self.window.size} at most"
            )
        return self
