"""Configuration of images in the rows of data files. Torch-free."""

from typing import Annotated, NamedTuple, Self

from pydantic import model_validator

from rheostat.infra.config import Positive, Settings, Since
from rheostat.infra.store.inputs import Location


class PixelLimits(NamedTuple):
    """Minimum and maximum image size in pixels (width × height). None means the default of the policy's image
    processor."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class ImageFileSettings(Settings):
    """Settings for images in the rows of a data file: their column, their directory and the limits on their size."""

    images_column: Annotated[str | None, Since("0.1.0", before=None)] = None
    """Column with the images of the prompt, one image or a list: paths below `images_root`, encoded bytes, structs
    `{bytes, path}`, or texts `data:image/...;base64,`. If not set, prompts have no images."""
    images_root: Annotated[Location | None, Since("0.1.0", before=None)] = None
    """Directory to which image paths are relative, on this machine or at s3://bucket/name. The default is the directory
    of the data file."""
    image_mark: Annotated[str, Since("0.2.0", before="")] = "<image>"
    """Placeholder of an image in the texts of messages, as in files of LLaVA. Each mark becomes the next image of the
    row in `images_column`. Set "" to read marks as text. Has no effect without `images_column`."""
    min_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Minimum size of an image in pixels (width × height). Smaller images are enlarged. Requires an image processor
    that supports a minimum size. If not set, the default of the policy's image processor is used."""
    max_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Maximum size of an image in pixels (width × height). Larger images are shrunk, which reduces the number of
    tokens. If not set, the default of the policy's image processor is used."""

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
    def used_image_mark(self) -> str:
        """Placeholder of an image in the texts of messages. Empty if there is no column with images."""
        return self.image_mark if self.images_column is not None else ""

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum image size in pixels, as configured."""
        return PixelLimits(self.min_pixels, self.max_pixels)
