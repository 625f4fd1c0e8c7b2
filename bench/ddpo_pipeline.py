"""Small version of Stable Diffusion 1.5 with the same classes, schedule and attention layers, and random weights."""

import json
from pathlib import Path
from typing import Final

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

CONTEXT: Final = 77
TEXT_WIDTH: Final = 64
LATENTS: Final = 16


def write_small_pipeline(directory: Path) -> int:
    """Save a small Stable Diffusion pipeline with random weights to a directory.

    Return the number of weights of its UNet.
    """
    torch.manual_seed(0)
    tokenizer = _byte_words(directory.with_name("tokenizer"))
    unet = UNet2DConditionModel(
        sample_size=LATENTS,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=8 * LATENTS,
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=unet,
        # The settings of Stable Diffusion 1.5.
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(directory, safe_serialization=True)
    return int(unet.num_parameters())


def _byte_words(directory: Path) -> CLIPTokenizer:
    """Build a CLIP tokenizer without merges, so that every byte is one token.

    A second token per byte marks the last byte of a word. The vocabulary is written to `directory`.
    """
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    directory.mkdir()
    (directory / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(str(directory), model_max_length=CONTEXT)


def _text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()
