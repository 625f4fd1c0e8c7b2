"""Small text-to-image policy that is built from scratch: the transformer of Stable Diffusion 3 with tiny text encoders.

Each text encoder has one block, and the denoiser reads the input of this block. A word is therefore represented by its
random embedding. The policy has no VAE: its latents are RGB pixels, and each of them is shown as a square.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from scratch_diffusion import ScratchDiffusionPolicy
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.denoising.families import diffusers_class, process_tree
from rheostat.models.denoising.pipeline import PipelineOutline
from rheostat.models.denoising.policy import byte_tokenizer, describe_denoiser
from rheostat.models.inspection.directory import Inspected
from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.text.tokenizer import EOS, PAD

BEGIN: Final = "<|begin|>"
UNKNOWN: Final = "<|unknown|>"
ENCODERS: Final = 2
"""Number of CLIP text encoders in a Stable Diffusion 3 pipeline. Policies built here omit T5, its third text
encoder."""


def word_tokenizer(texts: Iterable[str], *, context: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each word of the texts. `context` is the maximum number of tokens of a text,
    including the start and end tokens.

    Raises BadInput if a text has too many words.
    """
    words: dict[str, None] = {}
    for text in texts:
        tokens = re.findall(r"\w+|[^\w\s]+", text.lower())
        words |= dict.fromkeys(tokens)
        if len(tokens) + 2 > context:
            raise BadInput(
                f"policy.words is {context}, but the prompt {text!r} has {format_count(len(tokens), 'word')} plus a "
                "start and an end token. Raise policy.words."
            )
    vocabulary = {word: number for number, word in enumerate((PAD, BEGIN, UNKNOWN, *sorted(words), EOS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {EOS}", special_tokens=[(BEGIN, vocabulary[BEGIN]), (EOS, vocabulary[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BEGIN,
        unk_token=UNKNOWN,
        model_max_length=context,
    )


def write_scratch_diffusion(policy: ScratchDiffusionPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build a small text-to-image policy with random weights in a directory, as a pipeline of diffusers. Its tokenizer
    has one token for each word of `texts`.

    Returns the denoiser's number of parameters. Raises BadInput if one of the `texts` has too many words for
    `policy.words`.
    """
    tokenizer = word_tokenizer(texts, context=policy.words)
    with lock_model_construction():
        torch.manual_seed(seed)
        denoiser = diffusers_class("SD3Transformer2DModel").from_config(denoiser_config(policy))
        encoders = [_encoder(policy, tokenizer) for _ in range(ENCODERS)]
        pipe = diffusers_class("StableDiffusion3Pipeline")(
            transformer=denoiser,
            scheduler=diffusers_class("FlowMatchEulerDiscreteScheduler")(shift=policy.shift),
            vae=None,
            text_encoder=encoders[0],
            tokenizer=tokenizer,
            text_encoder_2=encoders[1],
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        )
        pipe.save_pretrained(directory, safe_serialization=True)
    byte_tokenizer().save_pretrained(directory)
    return int(denoiser.num_parameters())


def inspect_scratch_diffusion(policy: ScratchDiffusionPolicy, texts: Iterable[str]) -> Inspected:
    """Return the size and limits of the small text-to-image policy that would be built from these settings and texts,
    without building it.

    Raises BadInput if a text has too many words.
    """
    model, tokenizer = scratch_model(policy), word_tokenizer(texts, context=policy.words)

    def check_drawing(denoising: DenoisingConfig, prompts: Iterable[tuple[str, str]]) -> int:
        for source, text in prompts:
            if (num_tokens := len(tokenizer(text)["input_ids"])) > policy.words:
                raise BadInput(
                    f"{source}: the prompt has {num_tokens} tokens, including start and end, but policy.words, the "
                    f"maximum, is {policy.words}. Raise policy.words, or shorten the prompt."
                )
        return model.check(denoising)

    # T5 is absent and counts as one token
    described = describe_denoiser(model.family, model.denoiser, text=policy.words + 1)
    return replace(described, check_drawing=check_drawing)


def scratch_model(policy: ScratchDiffusionPolicy) -> PipelineOutline:
    """Return the description of the policy's pipeline before it is built. It equals the result of `read_pipeline` on
    the policy's directory."""
    family = process_tree("StableDiffusion3Pipeline", "SD3Transformer2DModel")
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": policy.shift}
    return PipelineOutline(Path(), family.pipelines[0], family, denoiser_config(policy), scheduler, None, ())


def denoiser_config(policy: ScratchDiffusionPolicy) -> dict[str, object]:
    """Return the contents of the denoiser's config.json in the format of diffusers."""
    return {
        "sample_size": policy.side,
        "patch_size": policy.patch_size,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": policy.layers,
        "attention_head_dim": policy.head_size,
        "num_attention_heads": policy.heads,
        "joint_attention_dim": ENCODERS * policy.word_size,
        "caption_projection_dim": policy.heads * policy.head_size,
        "pooled_projection_dim": ENCODERS * policy.word_size,
        "pos_embed_max_size": policy.side // policy.patch_size,
    }


def _encoder(policy: ScratchDiffusionPolicy, tokenizer: PreTrainedTokenizerFast) -> CLIPTextModelWithProjection:
    """Build a text encoder with random embeddings of words and positions.

    The conditioning in diffusers is the input of an encoder's last block. This encoder has a single block, so the
    conditioning is the embeddings.
    """
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=policy.word_size,
        intermediate_size=2 * policy.word_size,
        projection_dim=policy.word_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=policy.words,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModelWithProjection(config)
    for name, weight in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(weight)
    return model.eval()
