"""Settings of a small vision-language policy with random weights."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from rheostat.infra.config import Positive, Settings
from rheostat.models.config.policy import PolicySource, ScratchPolicy


class ScratchTower(Settings):
    """Vision tower (image encoder) of a small vision-language policy, with the architecture of Idefics3's vision
    tower."""

    image_size: Annotated[int, Field(ge=4, le=4096)] = 24
    """Side length in pixels to which images are resized. Must be a multiple of patch_size x scale_factor."""
    patch_size: Positive = 4
    """Side length of an image patch in pixels."""
    scale_factor: Positive = 2
    """Number of patches along a side of the square that is merged into one image token: 2 merges 2 x 2 patches."""
    hidden_size: Annotated[int, Field(ge=8)] = 64
    """Size of the hidden state of a patch. Must be a multiple of `heads`."""
    intermediate_size: Annotated[int, Field(ge=8)] = 128
    """Hidden size of the MLP in each transformer block."""
    layers: Positive = 2
    """Number of transformer blocks."""
    heads: Positive = 2
    """Number of attention heads in each transformer block."""
    initial_std: Annotated[float, Field(gt=0)] = 0.125
    """Standard deviation of the normal distribution of the initial weights. The default is 1 / √64."""

    @model_validator(mode="after")
    def _require_divisible_sizes(self) -> "ScratchTower":
        side = self.patch_size * self.scale_factor
        if self.image_size % side:
            raise ValueError(
                f"image_size is {self.image_size}, but it must be a multiple of patch_size x scale_factor = {side}. "
                "Change one of them"
            )
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}. "
                "Change one of them"
            )
        return self


VISION_DECODER: Final = ScratchPolicy(
    vocab_size=303, hidden_size=64, intermediate_size=192, heads=2, kv_heads=2, context=96, initial_std=0.125
)


class VisionScratchPolicy(PolicySource):
    """Small vision-language policy with random weights: Idefics3's vision tower, and a decoder as in `kind =
    "scratch"`."""

    implementation = "scratch_idefics3:write_vision_scratch"
    inspection = "scratch_idefics3:inspect_vision_scratch"

    tower: ScratchTower = ScratchTower()
    """Vision tower, which encodes images."""
    decoder: ScratchPolicy = VISION_DECODER
    """Decoder, which reads and generates tokens. Three tokens of its vocabulary represent images. Keys that you do not
    set keep the default values shown here, which differ from those of `kind = "scratch"`."""

    @field_validator("decoder", mode="before")
    @classmethod
    def _add_decoder_defaults(cls, value: object) -> object:
        return {**VISION_DECODER.model_dump(), **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _require_image_tokens(self) -> "VisionScratchPolicy":
        if self.decoder.vocab_size < 303:
            raise ValueError(
                f"decoder.vocab_size is {self.decoder.vocab_size}, but it must be at least 303, because images need 3 "
                "tokens. Raise it"
            )
        return self
