"""Small pipelines of every family that can be trained, built from configurations, with random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers.utils import logging
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.denoising import CpsSampler, DanceSampler, DdimSampler, DenoisingConfig, SdeSampler
from rheostat.models.config.engines import DiffusersEngine
from rheostat.models.denoising.pipeline import read_pipeline
from rheostat.models.denoising.policy import byte_tokenizer
from rheostat.models.engines.image_generation import DiffusersImageEngine
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.records.media import Gallery
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.pictures import Picture
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.vision.color_conversion import decode_rgb
from tests.support.demos import demo_module

PROMPTS = ("red square left", "a blue disc above two green squares", "green disc")
"""Prompts of different lengths."""
WORD = 16
CONTEXT = 12


def words(context: int = CONTEXT) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the words of the prompts. Other words are one unknown token."""
    return demo_module("paint", "scratch_pipeline").word_tokenizer(PROMPTS, context=context)


def clip(kind: type, **options: object) -> torch.nn.Module:
    tokenizer = words()
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WORD,
            intermediate_size=2 * WORD,
            projection_dim=WORD,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **options,
        )
    )


def t5() -> torch.nn.Module:
    return T5EncoderModel(
        T5Config(vocab_size=len(words()), d_model=2 * WORD, d_kv=8, d_ff=WORD, num_layers=1, num_heads=2)
    )


def vae(**options: object) -> torch.nn.Module:
    """Build a VAE of four latents of four pixels each."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        sample_size=32,
        **options,
    )


def unet(**options: object) -> torch.nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
        **options,
    )


NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
"""Build the denoiser of Stable Diffusion 1 and XL."""


def sd3() -> "diffusers.DiffusionPipeline":
    """Build Stable Diffusion 3 with T5."""
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * WORD,
            caption_projection_dim=16,
            pooled_projection_dim=2 * WORD,
            pos_embed_max_size=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(scaling_factor=1.5, shift_factor=0.06),
        text_encoder=clip(CLIPTextModelWithProjection),
        tokenizer=words(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=words(),
        text_encoder_3=t5(),
        tokenizer_3=words(64),
    )


def flux(*, guided: bool = True) -> "diffusers.DiffusionPipeline":
    """Build FLUX.1-dev, whose schedule is shifted by the size of a picture, or schnell."""
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * WORD,
            pooled_projection_dim=WORD,
            guidance_embeds=guided,
            axes_dims_rope=(2, 2, 4),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0 if guided else 1.0, use_dynamic_shifting=guided, base_image_seq_len=4, max_image_seq_len=64
        ),
        vae=vae(scaling_factor=0.36, shift_factor=0.12),
        text_encoder=clip(CLIPTextModel),
        tokenizer=words(),
        text_encoder_2=t5(),
        tokenizer_2=words(64),
    )


def qwen() -> "diffusers.DiffusionPipeline":
    """Build Qwen-Image."""
    text = {
        "hidden_size": 2 * WORD,
        "intermediate_size": WORD,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(words()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 2 * WORD,
        "fullatt_block_indexes": [0],
    }
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * WORD,
            axes_dims_rope=(2, 2, 4),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.1, 0.9, 1.5, 2.0],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=words(256),
    )


def sd1() -> "diffusers.DiffusionPipeline":
    """Build Stable Diffusion 1.5, whose scheduler is PNDM."""
    return diffusers.StableDiffusionPipeline(
        unet=unet(cross_attention_dim=WORD),
        scheduler=diffusers.PNDMScheduler(**NOISE, skip_prk_steps=True, steps_offset=1),
        vae=vae(scaling_factor=0.18),
        text_encoder=clip(CLIPTextModel),
        tokenizer=words(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> "diffusers.DiffusionPipeline":
    """Build Stable Diffusion XL."""
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(
            cross_attention_dim=2 * WORD,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + WORD,
            use_linear_projection=True,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(**NOISE, steps_offset=1, timestep_spacing="leading"),
        vae=vae(scaling_factor=0.13),
        text_encoder=clip(CLIPTextModel),
        tokenizer=words(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=words(),
        add_watermarker=False,
    )


def schnell() -> "diffusers.DiffusionPipeline":
    """Build FLUX without guidance as an input, with a schedule that is the same for all sizes."""
    return flux(guided=False)


BUILT: "dict[str, Callable[[], diffusers.DiffusionPipeline]]" = {
    "sd3": sd3,
    "flux": flux,
    "schnell": schnell,
    "qwen": qwen,
    "sd1": sd1,
    "sdxl": sdxl,
}


def write(name: str, directory: Path) -> Path:
    """Build a pipeline and save it as a policy of kind 'diffusion' is stored."""
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        BUILT[name]().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


# ---- drawn from
SEEDS = (11, 12, 13)
POLICY = ModelVersion(version=0, weights=BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0))
SAMPLERS = {"velocity": (CpsSampler(), SdeSampler(), DanceSampler()), "noise": (DdimSampler(),)}


def samplers_of(directory: Path) -> tuple[CpsSampler | SdeSampler | DanceSampler | DdimSampler, ...]:
    """Return the samplers that fit a policy."""
    return SAMPLERS[read_pipeline(directory).family.prediction_type]


def config_of(directory: Path, **other: object) -> DenoisingConfig:
    """Return the settings for pictures of 32 pixels, which are 8 latents."""
    return DenoisingConfig(**{"steps": 5, "sampler": samplers_of(directory)[0], "text_tokens": 16, "side": 32} | other)


def requests(directory: Path, prompts: Sequence[str] = PROMPTS, seeds: Sequence[int] = SEEDS) -> list[Request]:
    """Request one picture of each prompt."""
    tokenizer = load_tokenizer(directory)
    inputs = [ModelInput.from_prompt(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    return [
        Request(row=row, inputs=(each,), seeds=(seed,))
        for row, (each, seed) in enumerate(zip(inputs, seeds, strict=True))
    ]


def generate_pictures(
    directory: Path, config: DenoisingConfig, learnt: range | None, *, rows: int = 64, adapter: Path | None = None
) -> list[Completion]:
    """Generate pictures of the prompts with the engine."""
    engine = DiffusersImageEngine(DiffusersEngine(max_batch_rows=rows))
    engine.load(directory, POLICY, adapter=adapter)
    return [each for [each] in engine.generate_images(requests(directory), config, learnt)]


@dataclass
class Shown:
    """Pictures by digest, like the media of a run."""

    pictures: dict[str, Picture]

    def encoded(self, digest: str) -> bytes:
        return self.pictures[digest].encoded

    def states(self, digest: str, *, steps: int) -> np.ndarray:
        found = self.pictures[digest].states
        assert len(found) == steps + 1
        return found


def build_trainer_inputs(completions: Sequence[Completion], directory: Path) -> tuple[list[ModelInput], Gallery]:
    """Return the rows that a trainer reads, and the shards of their states."""
    gallery = Gallery()
    gallery.source = Shown({each.picture.digest: each.picture for each in completions if each.picture is not None})
    asked = [each.inputs[0] for each in requests(directory)]
    rows = [
        type(each)(each.chunks, (made.picture.digest,)).append_completion(made.tokens)
        for each, made in zip(asked, completions, strict=True)
        if made.picture is not None
    ]
    return rows, gallery


def noise_of(seed: int, directory: Path, config: DenoisingConfig) -> torch.Tensor:
    """Return the initial noise of a picture of this seed, 1 x C x Y x X."""
    shape = read_pipeline(directory).shape(config)
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal((1, *shape), dtype=np.float32))


def generate_with_diffusers(
    pipe: diffusers.DiffusionPipeline, directory: Path, config: DenoisingConfig, output: str
) -> np.ndarray:
    """Generate pictures of the prompts with the pipeline of diffusers, one after another."""
    found, is_packed = [], hasattr(pipe, "_pack_latents")
    options = {"guidance_scale": config.guidance}
    if is_packed and not pipe.transformer.config.guidance_embeds:
        options = {"true_cfg_scale": config.guidance, "negative_prompt": ""}
    if hasattr(pipe, "tokenizer_max_length"):
        options["max_sequence_length"] = config.text_tokens
    pipe.set_progress_bar_config(disable=True)
    if isinstance(pipe, diffusers.StableDiffusionPipeline):
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        noise = noise_of(seed, directory, config)
        made = pipe(
            prompt,
            height=config.side,
            width=config.side,
            num_inference_steps=config.steps,
            latents=pipe._pack_latents(noise, *noise.shape) if is_packed else noise,
            output_type=output,
            **options,
        )
        found.append(np.asarray(made.images))
    return np.concatenate(found)


def pixels(completion: Completion) -> np.ndarray:
    """Decode a picture to numbers from 0 to 1."""
    return np.asarray(decode_rgb(completion.picture.encoded), np.float32) / 255
