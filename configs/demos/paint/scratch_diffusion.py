"""Settings of a small text-to-image policy with random weights."""

from typing import Annotated

from pydantic import Field, model_validator

from rheostat.infra.config import Positive
from rheostat.models.config.policy import PolicySource


class ScratchDiffusionPolicy(PolicySource):
    """Small text-to-image policy with random weights: the transformer of Stable Diffusion 3, on pixels instead of
    latents."""

    implementation = "scratch_pipeline:write_scratch_diffusion"
    inspection = "scratch_pipeline:inspect_scratch_diffusion"
    generates_images = True

    side: Annotated[int, Field(ge=4, le=256)] = 8
    """Height and width, in pixels, of the pictures that the transformer generates. Stored pictures are enlarged 8
    times."""
    patch_size: Positive = 2
    """Side length in pixels of the image patch that becomes one token."""
    layers: Positive = 4
    """Number of transformer blocks."""
    heads: Positive = 4
    """Number of attention heads in each transformer block."""
    head_size: Annotated[int, Field(ge=4)] = 16
    """Number of dimensions of each attention head."""
    words: Annotated[int, Field(ge=4)] = 16
    """Maximum length of a prompt in words and punctuation marks, including the start and end tokens."""
    word_size: Annotated[int, Field(ge=4, multiple_of=2)] = 16
    """Size of the embedding of a word in each of the two text encoders."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Shift of the flow-matching noise schedule. Values above 1 move the steps towards high noise levels."""

    @property
    def picture_side(self) -> int:
        """Height and width in pixels of the generated pictures, before stored copies are enlarged."""
        return self.side

    @model_validator(mode="after")
    def _require_divisible_side(self) -> "ScratchDiffusionPolicy":
        if self.side % self.patch_size:
            raise ValueError(
                f"side is {self.side}, but it must be a multiple of patch_size, which is {self.patch_size}. Change one "
                "of them"
            )
        return self
