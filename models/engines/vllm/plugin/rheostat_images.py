"""Prompts with images: reading the image files, and checking the tokens to which vLLM expands the images."""

import asyncio
import os
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from blake3 import blake3
from PIL import Image
from rheostat_requests import Picture, Prompt, Refused
from vllm import AsyncLLMEngine
from vllm.inputs import EngineInput, TokensPrompt, tokens_input

KEPT = 64
"""Number of decoded images that are cached, so that the completions of one prompt decode its images only once."""
DECODER = Path(__file__).parents[3] / "vision" / "color_conversion.py"
"""Path of the module that decodes images.

The module imports nothing of this project. It can therefore also be loaded in vLLM's Python environment."""


def _load_decoder() -> ModuleType:
    """Import the image-decoding module by its file path, so that it can be used in vLLM's Python environment."""
    spec = spec_from_file_location("rheostat_color_conversion", DECODER)
    assert spec is not None and spec.loader is not None, "the file exists"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decoder = _load_decoder()


async def render(engine: AsyncLLMEngine, prompt: Prompt) -> EngineInput:
    """Convert a prompt to the input of vLLM's engine. Raises Refused if an image file cannot be read or does not match
    its digest, or if vLLM replaces the images by other tokens than the prompt contains."""
    if not prompt.images:
        return tokens_input(prompt.tokens)
    images = [await asyncio.to_thread(_read, picture) for picture in prompt.images]
    tokens_prompt = TokensPrompt(
        prompt_token_ids=prompt.collapsed,
        multi_modal_data={"image": images},
        multi_modal_uuids={"image": [picture.digest for picture in prompt.images]},
        mm_processor_kwargs=prompt.settings,
    )
    [engine_input] = await engine.renderer.render_cmpl_async([tokens_prompt])
    token_ids: list[int] = engine_input["prompt_token_ids"]
    if token_ids != prompt.tokens:
        raise Refused(
            f"a prompt with {len(prompt.images)} images has {len(prompt.tokens)} tokens, but vLLM encodes the same "
            f"prompt as {len(token_ids)}{' different' if len(token_ids) == len(prompt.tokens) else ''} tokens. The "
            "image processor settings of the policy and of vLLM differ",
            status=422,
        )
    return engine_input


@lru_cache(maxsize=KEPT)
def _read(picture: Picture) -> Image.Image:
    """Decode an image exactly as the trainer does. Raises Refused if the image cannot be decoded."""
    try:
        file = os.open(picture.path, os.O_RDONLY)
        try:
            encoded = os.pread(file, picture.length, picture.offset)
        finally:
            os.close(file)
    except OSError as error:
        raise Refused(f"image {picture.digest}: {picture.path}: {error.strerror}") from error
    if (digest := blake3(encoded).hexdigest()) != picture.digest:
        raise Refused(f"image {picture.digest}: the content of the file {picture.path} has the digest {digest} instead")
    try:
        image: Image.Image = decoder.decode_rgb(encoded)
    except ValueError as error:
        raise Refused(f"image {picture.digest}: {error}", status=422) from error
    return image
