"""Limits on the number of pixels of an image.

The limits are written into the image processor's settings in the policy's directory, so that trainer, engines and
judges all resize images in the same way.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rheostat.infra.errors import BadInput
from rheostat.models.config.images import PixelLimits
from rheostat.models.vision.processor import SETTINGS, VisionProcessor, load_processor

SIZED_BY_PIXELS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` whose image processor resizes each image to between a minimum and a maximum number of
pixels."""
_READ: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", *SETTINGS)
"""Names of the files in a policy's directory that `load_processor` reads."""


def limit_pixels(directory: Path, limits: PixelLimits) -> None:
    """Write the limits on the number of pixels into the image processor's settings in a policy's directory. Does
    nothing if no limit is set. Raises BadInput if the model's image processor has no such limits."""
    if not any(limits):
        return
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] not in SIZED_BY_PIXELS:
        raise BadInput(
            f"data.min_pixels and data.max_pixels apply only to policies of {', '.join(SIZED_BY_PIXELS)}, but the "
            f"policy is {config['model_type']}. Remove the keys."
        )
    for name in SETTINGS:
        path = directory / name
        if path.is_file():
            whole: dict[str, Any] = json.loads(path.read_text())
            _limit(whole.get("image_processor", whole), limits)
            path.write_text(json.dumps(whole, indent=2) + "\n")


def _limit(settings: dict[str, Any], limits: PixelLimits) -> None:
    size = dict(settings.get("size") or {})
    named = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}  # in pixels, despite the names
    for old, (name, limit) in zip(("min_pixels", "max_pixels"), named.items(), strict=True):
        before = settings.pop(old, None)
        if (value := limit or before) is not None:
            size[name] = value
    settings["size"] = size


def load_limited_processor(directory: Path, limits: PixelLimits) -> VisionProcessor | None:
    """Load the image processor of a model with the pixel limits that a run would write into its copy of the model. The
    directory itself is not changed. Returns None if the policy is text-only. Raises BadInput if the image processor
    does not load or has no such limits."""
    if not any(limits):
        return load_processor(directory)
    with _copied(directory) as copy:
        limit_pixels(copy, limits)
        return load_processor(copy)


@contextmanager
def _copied(directory: Path) -> Iterator[Path]:
    with TemporaryDirectory() as copy:
        for name in _READ:
            if (directory / name).is_file():
                shutil.copy(directory / name, copy)
        yield Path(copy)
