"""Configuration of images in the rows of data files. Torch-free."""

from typing import Annotated, NamedTuple, Self

from pydantic import model_validator

from infra.config import Positive, Settings, Since
from infra.store.inputs import Location


class PixelLimits(NamedTuple):
    """Minimum and maximum image size in pixels (width × height). None keeps the value that comes with the policy."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class ImageFileSettings(Settings):
    """Images in the rows of a data file: their column, their directory and the limits on their size."""

    images_column: Annotated[str | None, Since("0.1.0", before=None)] = None
    """Column with the images of the prompt, one or a list: paths below `images_root`, bytes, structs `{bytes, path}` or
    texts `data:image/...;base64,`. Not set means that prompts have no images."""
    images_root: Annotated[Location | None, Since("0.1.0", before=None)] = None
    """Directory to which the paths of images are relative, on this machine or at s3://bucket/name. The default is the
    directory of the file."""
    min_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Minimum size of an image in pixels (width × height). Smaller images are enlarged. Requires an image processor
    that supports a minimum size. If not set, the value that comes with the policy is used."""
    max_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Maximum size of an image in pixels (width × height). Larger images are shrunk, which reduces their number of
    tokens. If not set, the value that comes with the policy is used."""

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if any(self.pixels) and self.images_column is None:
            raise ValueError(
                "min_pixels and max_pixels have no effect without images_column. Set images_column, or remove "
                "min_pixels and max_pixels"
            )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels is {self.min_pixels}, but max_pixels is only {self.max_pixels}. Raise max_pixels"
            )
        return self

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum image size as configured."""
        return PixelLimits(self.min_pixels, self.max_pixels)
