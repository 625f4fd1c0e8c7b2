"""How large images are for a policy: settings in the directory of the policy, so that all who read it agree."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from infra.errors import BadInput
from models.config.data import PixelLimits
from models.vision.processor import SETTINGS, VisionProcessor, load_processor

SIZED_BY_PIXELS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Kinds of models, by `model_type`, whose image processors keep an image's pixels between two numbers."""
_READ: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", *SETTINGS)
"""What `load_processor` reads."""


def limit_pixels(directory: Path, limits: PixelLimits) -> None:
    """Write the limits into the settings of a policy's image processor. Raises BadInput where it knows none."""
    if not any(limits):
        return
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] not in SIZED_BY_PIXELS:
        raise BadInput(
            f"data.min_pixels and data.max_pixels: expected a policy of {', '.join(SIZED_BY_PIXELS)}, whose images are "
            f"sized by pixels; found {config['model_type']}"
        )
    for name in SETTINGS:
        path = directory / name
        if path.is_file():
            whole: dict[str, Any] = json.loads(path.read_text())
            _limit(whole.get("image_processor", whole), limits)
            path.write_text(json.dumps(whole, indent=2) + "\n")


def _limit(settings: dict[str, Any], limits: PixelLimits) -> None:
    size = dict(settings.get("size") or {})
    named = {"shortest_edge": limits.least, "longest_edge": limits.most}  # they count pixels, whatever their names
    for old, (name, limit) in zip(("min_pixels", "max_pixels"), named.items(), strict=True):
        before = settings.pop(old, None)
        if (value := limit or before) is not None:
            size[name] = value
    settings["size"] = size


def processor_within(directory: Path, limits: PixelLimits) -> VisionProcessor | None:
    """Load what a policy will make of images when it was imported with these limits; its directory stays as it is."""
    if not any(limits):
        return load_processor(directory)
    with _copied(directory) as copy:
        limit_pixels(copy, limits)
        return load_processor(copy)


@contextmanager
def _copied(directory: Path) -> Iterator[Path]:
    with TemporaryDirectory() as made:
        for name in _READ:
            if (directory / name).is_file():
                shutil.copy(directory / name, made)
        yield Path(made)
