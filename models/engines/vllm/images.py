"""Encoding of prompts with images for servers, as image files and placeholder tokens instead of pixels."""

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import JsonValue

from rheostat.infra.errors import BadInput
from rheostat.models.records.media import ImageFiles
from rheostat.models.records.model_input import ModelInput
from rheostat.models.vision.families import ImageSize
from rheostat.models.vision.processor import VisionProcessor


class VisionInputEncoder:
    """Encoder that converts the inputs of a vision-language policy to JSON for vLLM servers. For a text-only policy,
    only tokens are encoded."""

    def __init__(
        self, processor: VisionProcessor | None, files: ImageFiles | None, *, suppressed: Sequence[int] = ()
    ) -> None:
        """Initialize the encoder. `suppressed` contains token IDs that the policy must never generate."""
        self.files = files
        self._processor = processor
        self._suppressed = suppressed

    @property
    def banned(self) -> list[JsonValue]:
        """IDs of the tokens that have probability 0: suppressed tokens and placeholders of images."""
        return [*(() if self._processor is None else self._processor.banned), *self._suppressed]

    def encode(self, model_input: ModelInput) -> dict[str, JsonValue]:
        """Encode a model input as JSON for a server: its tokens and, if it has images, the image files. Raises BadInput
        if the policy cannot process images, or if the prompt was encoded with other image settings.

        With images, the tokens are also sent with one placeholder per image. vLLM expands the placeholders, and the
        server checks that the result equals the tokens.
        """
        encoded: dict[str, JsonValue] = {"tokens": model_input.tokens.tolist()}
        if not model_input.images:
            return encoded
        if self._processor is None or self.files is None:
            raise BadInput(
                "a prompt has images, but the policy reads only text, or its images are not stored in files. Use a "
                "vision-language policy"
            )
        parts = [self.files.part(digest) for digest in model_input.images]
        try:
            collapsed = self._processor.collapse(
                model_input.prompt.tolist(), [ImageSize(part.width, part.height) for part in parts]
            )
        except ValueError as error:
            raise BadInput(
                f"a prompt was encoded with other image settings than those of this policy: {error}. Set the same "
                "image processor settings, or start a new run"
            ) from error
        images: list[JsonValue] = [
            {"digest": digest, **asdict(part), "path": str(part.path.absolute())}
            for digest, part in zip(model_input.images, parts, strict=True)
        ]
        collapsed += model_input.completion.tolist()
        return encoded | {
            "collapsed": [*collapsed],
            "images": images,
            "settings": {**self._processor.processor_arguments},
        }
