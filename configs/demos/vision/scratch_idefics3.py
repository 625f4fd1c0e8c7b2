"""Construction of a small vision-language policy with random weights: Idefics3's architecture around the decoder of
`ScratchPolicy`."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from scratch_vision import VisionScratchPolicy
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rheostat.models.config.images import PixelLimits
from rheostat.models.inspection.directory import Inspected, inspect_model
from rheostat.models.modeling.policy import lock_model_construction, save_policy, scratch_config
from rheostat.models.text.tokenizer import train_tokenizer
from rheostat.models.vision.pixels import load_limited_processor
from rheostat.models.vision.processor import VisionProcessor

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_SPECIAL: Final = (IMAGE, AROUND, WHOLE)


def write_vision_scratch(policy: VisionScratchPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build a vision-language policy with random weights and a tokenizer trained on `texts`. Return the number of
    parameters."""
    tokenizer = vision_tokenizer(policy, texts)
    model = build_vision_scratch(policy, tokenizer, seed=seed)
    save_vision_scratch(policy, model, tokenizer, directory)
    return int(model.num_parameters())


def inspect_vision_scratch(policy: VisionScratchPolicy, texts: Iterable[str]) -> Inspected:
    """Train the tokenizer on `texts`, and describe the new vision-language policy that a run would build with this
    tokenizer."""
    tokenizer = vision_tokenizer(policy, texts)
    model = outline_vision_scratch(policy, tokenizer)

    def load(limits: PixelLimits) -> VisionProcessor | None:
        with TemporaryDirectory() as directory:
            save_config_files(policy, model, tokenizer, Path(directory))
            return load_limited_processor(Path(directory), limits)

    return replace(inspect_model(model, tokenizer, source=policy.label), load_processor=load)


def vision_tokenizer(policy: VisionScratchPolicy, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts for a new vision-language policy, and add the special tokens for images after its
    vocabulary."""
    decoder = policy.decoder
    tokenizer = train_tokenizer(texts, vocab_size=decoder.vocab_size - len(_SPECIAL), context=decoder.context)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_SPECIAL]})
    return tokenizer


def build_vision_scratch(
    policy: VisionScratchPolicy, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> PreTrainedModel:
    """Build a new vision-language policy with random weights derived from the seed. The caller's random state on the
    CPU stays unchanged."""
    with lock_model_construction():
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(_build_config(policy, tokenizer))


def outline_vision_scratch(policy: VisionScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a new vision-language policy on the `meta` device, without weights."""
    with lock_model_construction(), torch.device("meta"):
        return AutoModelForImageTextToText.from_config(_build_config(policy, tokenizer))


def save_vision_scratch(
    policy: VisionScratchPolicy, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> None:
    """Write a new vision-language policy into a directory that transformers and vLLM can load."""
    save_policy(model, tokenizer, directory)
    save_config_files(policy, model, tokenizer, directory)


def save_config_files(
    policy: VisionScratchPolicy, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> None:
    """Write all files of a new vision-language policy's directory except the weights."""
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    side = {"longest_edge": policy.tower.image_size}
    Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False).save_pretrained(directory)
    # Pipelines of transformers read the number of tokens per image here. The default is that of another vision tower.
    image_tokens = (policy.tower.image_size // policy.tower.patch_size // policy.tower.scale_factor) ** 2
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": image_tokens}
    (directory / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _build_config(policy: VisionScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    return Idefics3Config(
        text_config=scratch_config(policy.decoder, tokenizer).to_dict(),
        vision_config={
            "hidden_size": policy.tower.hidden_size,
            "intermediate_size": policy.tower.intermediate_size,
            "num_hidden_layers": policy.tower.layers,
            "num_attention_heads": policy.tower.heads,
            "patch_size": policy.tower.patch_size,
            "image_size": policy.tower.image_size,
            "initializer_range": policy.tower.initial_std,
        },
        scale_factor=policy.tower.scale_factor,
        image_token_id=int(tokenizer.convert_tokens_to_ids(IMAGE)),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        dtype="float32",
    )
