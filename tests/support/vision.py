"""Tiny vision-language policies of every family, with random weights, and pictures for them."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.text.tokenizer import train_tokenizer

SPECIALS: Final = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<img>", "</img>", "<IMG_CONTEXT>", "<boi>", "<eoi>",
)  # fmt: skip


def picture(seed: int, *, width: int = 24, height: int = 24) -> bytes:
    """Encode a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded = BytesIO()
    Image.fromarray(pixels).save(encoded, format="PNG")
    return encoded.getvalue()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Train a vocabulary that contains all families' tokens."""
    tokenizer = train_tokenizer(["How many red? #### 4\n\n\n describe the picture"], vocab_size=300, context=320)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, normalized=False, special=True) for token in SPECIALS]}
    )
    return tokenizer


def _text(tokens: PreTrainedTokenizerFast, **other: object) -> dict[str, object]:
    return {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 320,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
        "bos_token_id": None,
        **other,
    }


_TOWER: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 24,
}
_MROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _idefics3(kind: str, ids: Mapping[str, int], tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    """Head size that vLLM supports on a CPU."""
    return {
        "text_config": {"model_type": "llama", **_text(tokens, head_dim=32, tie_word_embeddings=True)},
        "vision_config": _TOWER,
        "scale_factor": 2,
        "image_token_id": ids["<image>"],
        "pad_token_id": tokens.pad_token_id,
        "tie_word_embeddings": True,
    }


def _llava(kind: str, ids: Mapping[str, int], tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "text_config": {"model_type": "llama", **_text(tokens)},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": ids["<image>"],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _qwen(kind: str, ids: Mapping[str, int], tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    tower: dict[str, object] = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "out_hidden_size": 32}
    if kind == "qwen3_vl":
        tower |= {"intermediate_size": 48, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
    else:
        tower |= {"intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]}
    return {
        "text_config": _text(tokens, rope_parameters=_MROPE, tie_word_embeddings=False),
        "vision_config": tower,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _gemma3(kind: str, ids: Mapping[str, int], tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "text_config": _text(tokens, sliding_window=16, query_pre_attn_scalar=16),
        "vision_config": {**_TOWER, "vision_use_head": False},
        "mm_tokens_per_image": 9,
        "boi_token_index": ids["<boi>"],
        "eoi_token_index": ids["<eoi>"],
        "image_token_index": ids["<image>"],
    }


def _internvl(kind: str, ids: Mapping[str, int], tokens: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "text_config": {"model_type": "qwen2", **_text(tokens)},
        "vision_config": {**_TOWER, "patch_size": [4, 4], "image_size": [24, 24]},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 9,
        "downsample_ratio": 0.5,
    }


_SMALL: Final = {"longest_edge": 24}
_SQUARE: Final = {"height": 24, "width": 24}
_Settings = Callable[[str, Mapping[str, int], PreTrainedTokenizerFast], dict[str, object]]

FAMILIES: Final[dict[str, tuple[_Settings, Callable[[], Any]]]] = {
    "idefics3": (
        _idefics3,
        lambda: Idefics3ImageProcessorPil(size=_SMALL, max_image_size=_SMALL, do_image_splitting=False),
    ),
    "smolvlm": (
        _idefics3,
        lambda: SmolVLMImageProcessorPil(size={"longest_edge": 48}, max_image_size=_SMALL, do_image_splitting=True),
    ),
    "llava": (_llava, lambda: CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=_SQUARE)),
    "qwen2_5_vl": (
        _qwen,
        lambda: Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}),
    ),
    "qwen3_vl": (
        _qwen,
        lambda: Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}),
    ),
    "gemma3": (_gemma3, lambda: Gemma3ImageProcessorPil(size=_SQUARE, image_seq_length=9)),
    "internvl": (_internvl, lambda: GotOcr2ImageProcessorPil(size=_SQUARE, min_patches=1, max_patches=4)),
}


def write_seeing(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a policy of a family."""
    settings, images = FAMILIES[kind]
    tokenizer = tiny_tokenizer()
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in SPECIALS}
    with lock_model_construction():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings(kind, ids, tokenizer)))
        for name, parameter in model.named_parameters():  # far enough from 0 that mistakes show
            if parameter.dim() > 1 and "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    images().save_pretrained(directory)
    return directory
