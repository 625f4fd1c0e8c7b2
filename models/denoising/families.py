"""Supported families of denoisers: how a family encodes prompts and runs its denoiser on a batch of states.

A state is the noisy latents of an image. Shapes: N states of a batch, C channels, Y x X latents (height and width). A
batch of states always has the shape N x C x Y x X here. FLUX and Qwen-Image read squares of 2 x 2 latents as one token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from logging import CRITICAL
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from rheostat.infra.errors import BadInput
from rheostat.infra.validation_errors import nearest
from rheostat.models.modeling.policy import lock_model_construction

Condition = Mapping[str, Tensor]
"""Text conditioning: the outputs of the text encoders by name, as tensors with one row for each prompt."""

PACKED: Final = 2
"""Side length of the square of latents that FLUX and Qwen-Image read as one token."""


class Predict(Protocol):
    """Function that runs the denoiser of one family (such as FLUX) on a batch of states (noisy latents)."""

    def __call__(
        self, model: nn.Module, states_NCYX: Tensor, timesteps_N: Tensor, condition: Condition, /, *, guidance: float
    ) -> Tensor:
        """Return the predicted velocity or noise, which has the same shape as the states."""
        ...


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Maximum prompt length of one text encoder in a pipeline. The encoder truncates longer prompts."""

    tokenizer: str
    """Name of the folder with the encoder's tokenizer, such as `tokenizer_2`. The encoder's folder has the same suffix
    (`text_encoder_2`)."""
    tokens: int | None = None
    """Default maximum number of tokens, including special tokens, or None if the encoder has a fixed maximum."""
    max_tokens: int = 0
    """Highest value to which the maximum number of tokens can be set in the configuration."""

    @property
    def encoder(self) -> str:
        """Name of the folder with the text encoder, such as `text_encoder_2`."""
        return self.tokenizer.replace("tokenizer", "text_encoder")


CLIP_TOKENS: Final = 77
"""Maximum number of tokens that CLIP's text encoders read."""


def _count(tokenizer: Any, prompt: str) -> int:  # noqa: ANN401
    return len(list(tokenizer(prompt, verbose=False)["input_ids"]))


@dataclass(frozen=True, slots=True)
class DenoiserFamily:
    """Family of denoisers: one denoiser class of diffusers, the pipelines that contain it, and functions to run it."""

    denoiser: str
    """Name of the denoiser's class in diffusers, such as `SD3Transformer2DModel`."""
    pipelines: tuple[str, ...]
    """Names of the diffusers pipelines that may contain the denoiser."""
    folder: Literal["transformer", "unet"]
    """Folder with the denoiser's weights inside a pipeline's directory."""
    prediction_type: Literal["velocity", "noise"]
    """Quantity that the denoiser is trained to predict: the velocity or the noise."""
    encode: Callable[[Any, str, int | None, torch.device], Condition]
    """Function that encodes a prompt, given a pipeline, the prompt, the maximum number of tokens for the encoder with
    the highest limit (None for the default), and the device of the encoders."""
    predict: Predict
    """Function that runs the denoiser on a batch of states (noisy latents)."""
    limits: tuple[PromptLimit, ...]
    """Prompt limits of the encoders that may read a whole prompt, highest first. The first encoder present counts."""
    count: Callable[[Any, str], int] = _count
    """Function that counts the tokens of a prompt, given a tokenizer and the prompt's text."""
    packing: int = 1
    """Side length of the square of latents that becomes one token (1 if latents are not grouped). If it is above 1, the
    denoiser's configuration counts all values of a square as channels."""
    uses_even_spacing: bool = False
    """Whether the pipeline spaces noise levels evenly from 1 to 1/steps, before it shifts the levels towards noise. If
    false, the last level above 0 is the smallest noise level used in training."""
    required_settings: Mapping[str, object] = field(default_factory=dict)
    """Only supported values of denoiser settings. Others require inputs besides states, timesteps and text."""

    def channels(self, config: Mapping[str, Any]) -> int:
        """Return the number of channels of a state. `config` is the denoiser's configuration."""
        return int(config["in_channels"]) // self.packing**2

    def side(self, config: Mapping[str, Any]) -> int:
        """Return the side length, in latents, of the square images that the denoiser was trained on.

        Raises BadInput if the configuration has different height and width.
        """
        side = config.get("sample_size") or 128
        if not isinstance(side, int):
            raise BadInput(f"{self.denoiser}: sample_size must be one number (square pictures), found {side!r}")
        return int(side)

    def tokens(self, config: Mapping[str, Any], side: int) -> int:
        """Return the number of tokens in a state of `side` x `side` latents. A UNet reads one token per latent."""
        return int((side // (1 if self.folder == "unet" else self.patch(config))) ** 2)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise BadInput if the denoiser needs inputs that are not supported, such as an image for in-painting."""
        in_channels, out_channels = int(config["in_channels"]), config.get("out_channels") or config["in_channels"]
        if self.packing > 1:
            out_channels *= int(config.get("patch_size") or 1) ** 2
        if in_channels != out_channels:
            raise BadInput(
                f"{self.denoiser} has {in_channels} input channels but {out_channels} output channels, so it needs "
                "another picture as input (in-painting, editing). Use a model that reads only noise and text."
            )
        for name, value in self.required_settings.items():
            if (config.get(name) or None) != value:
                raise BadInput(
                    f"{self.denoiser}: config.json sets {name} = {config.get(name)!r}, which requires model inputs "
                    f"that are not supported. Only {value!r} is supported. Use another model."
                )

    def patch(self, config: Mapping[str, Any]) -> int:
        """Return the side length of a token in latents, or for a UNet the factor by which it downsamples a state."""
        if self.folder == "unet":
            return int(2 ** (len(config["block_out_channels"]) - 1))
        return int(self.packing if self.packing > 1 else config["patch_size"])


def zero_condition(config: Any, text: int) -> Condition:  # noqa: ANN401 -- a model's configuration
    """Return text conditioning of zeros for one row of `text` tokens, which a denoiser of any family accepts."""
    width = config.get("joint_attention_dim") or config["cross_attention_dim"]
    pooled = config.get("pooled_projection_dim")
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    condition = {"states": torch.zeros(1, text, width), "mask": torch.ones(1, text, dtype=torch.bool)}
    return condition | ({"pooled": torch.zeros(1, pooled), "pixels": torch.ones(1, 1)} if pooled else {})


def select_conditions(conditions: Sequence[Condition], rows: Sequence[int]) -> Condition:
    """Stack the conditioning of prompts, padded to the longest text, and return one row for each index in `rows`."""
    gathered: dict[str, Tensor] = {}
    for name in conditions[0]:
        parts = [each[name] for each in conditions]
        longest = max(part.shape[1] for part in parts) if parts[0].ndim > 1 else 0
        if any(part.ndim > 1 and part.shape[1] < longest for part in parts):
            parts = [_pad_to(part, longest) for part in parts]
        index = torch.tensor(rows, device=parts[0].device)
        gathered[name] = torch.cat(parts).index_select(0, index)
    return gathered


def _pad_to(part: Tensor, length: int) -> Tensor:
    shape = (part.shape[0], length - part.shape[1], *part.shape[2:])
    return torch.cat([part, part.new_zeros(shape)], dim=1)


def diffusers_class(name: str) -> Any:  # noqa: ANN401 -- diffusers has few types
    """Import a class of the diffusers library by its name.

    A lock is held during the import, because diffusers imports its modules on first access, which is not thread-safe.
    Raises BadInput if diffusers is not installed.
    """
    if find_spec("diffusers") is None:
        raise BadInput(
            "text-to-image policies need the package diffusers, which is missing. Run: pip install 'rheostat[images]'"
        )
    with lock_model_construction():
        import diffusers
        from diffusers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity(CRITICAL)  # diffusers warns of omitted parts, and logs errors that it also raises
        return getattr(diffusers, name)


def process_tree(pipeline: str, denoiser: str) -> DenoiserFamily:
    """Return the family with this pipeline and denoiser class. Raises BadInput if no family is supported for them."""
    for family in FAMILIES:
        if pipeline in family.pipelines and family.denoiser == denoiser:
            return family
    pipelines = [name for family in FAMILIES for name in family.pipelines]
    raise BadInput(
        f"model_index.json names the pipeline {pipeline} with the denoiser {denoiser}, which is not supported. Use a "
        f"model with one of the pipelines {', '.join(pipelines)}{nearest(pipeline, pipelines)}"
    )


# ---- Stable Diffusion 3
def _encode_sd3(pipe: Any, prompt: str, tokens: int | None, device: torch.device) -> Condition:  # noqa: ANN401
    states, _, pooled, _ = pipe.encode_prompt(
        prompt, prompt, prompt, device, do_classifier_free_guidance=False, max_sequence_length=tokens or 256
    )
    return {"states": states, "pooled": pooled}


def _predict_sd3(
    model: nn.Module, states_NCYX: Tensor, timesteps_N: Tensor, condition: Condition, /, *, guidance: float
) -> Tensor:
    prediction = model(
        hidden_states=states_NCYX,
        timestep=timesteps_N,
        encoder_hidden_states=condition["states"],
        pooled_projections=condition["pooled"],
        return_dict=False,
    )
    return cast(Tensor, prediction[0])


# ---- FLUX
def _encode_flux(pipe: Any, prompt: str, tokens: int | None, device: torch.device) -> Condition:  # noqa: ANN401
    states, pooled, _ = pipe.encode_prompt(prompt, prompt, device, max_sequence_length=tokens or 512)
    return {"states": states, "pooled": pooled}


def _predict_flux(
    model: nn.Module, states_NCYX: Tensor, timesteps_N: Tensor, condition: Condition, /, *, guidance: float
) -> Tensor:
    height, width = states_NCYX.shape[2] // PACKED, states_NCYX.shape[3] // PACKED
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    picture_ids = torch.cat([torch.zeros(len(places), 1), places], dim=1).to(states_NCYX)
    guidance_scale = None
    if has_guidance_input(model):
        guidance_scale = torch.full((len(states_NCYX),), guidance, dtype=torch.float32, device=states_NCYX.device)
    prediction = model(
        hidden_states=_pack(states_NCYX),
        timestep=timesteps_N / 1000,
        guidance=guidance_scale,
        pooled_projections=condition["pooled"],
        encoder_hidden_states=condition["states"],
        txt_ids=picture_ids.new_zeros(condition["states"].shape[1], 3),
        img_ids=picture_ids,
        return_dict=False,
    )
    return _unpack(prediction[0], states_NCYX)


# ---- Qwen-Image
def _encode_qwen(pipe: Any, prompt: str, tokens: int | None, device: torch.device) -> Condition:  # noqa: ANN401
    states, mask = pipe.encode_prompt(prompt, device, max_sequence_length=tokens or 512)
    if mask is None:  # if no token is padding
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return {"states": states, "mask": mask.bool()}


@cache
def _qwen_template() -> tuple[str, int]:
    """Return the template around a prompt, and the number of its first tokens that are dropped after encoding."""
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    pipe = diffusers_class("QwenImagePipeline")(**dict.fromkeys(names))
    return str(pipe.prompt_template_encode), int(pipe.prompt_template_encode_start_idx)


def _count_qwen(tokenizer: Any, prompt: str) -> int:  # noqa: ANN401
    template, dropped = _qwen_template()
    return _count(tokenizer, template.format(prompt)) - dropped


def _predict_qwen(
    model: nn.Module, states_NCYX: Tensor, timesteps_N: Tensor, condition: Condition, /, *, guidance: float
) -> Tensor:
    """Predict velocities with the denoiser of Qwen-Image.

    With classifier-free guidance, the pipeline of Qwen-Image in diffusers rescales predictions, token by token, to the
    norm of the conditional prediction. Rheostat does not, so that guidance works the same way for all families.
    Therefore a policy trained with guidance generates different images in diffusers' own pipeline.
    """
    height, width = states_NCYX.shape[2] // PACKED, states_NCYX.shape[3] // PACKED
    prediction = model(
        hidden_states=_pack(states_NCYX),
        timestep=timesteps_N / 1000,
        encoder_hidden_states=condition["states"],
        encoder_hidden_states_mask=condition["mask"],
        img_shapes=[[(1, height, width)]] * len(states_NCYX),
        return_dict=False,
    )
    return _unpack(prediction[0], states_NCYX)


# ---- UNets of Stable Diffusion 1, 2 and XL
def _encode_unet(pipe: Any, prompt: str, tokens: int | None, device: torch.device) -> Condition:  # noqa: ANN401
    encoded = pipe.encode_prompt(
        prompt=prompt, device=device, num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    return {"states": encoded[0]}


def _encode_xl(pipe: Any, prompt: str, tokens: int | None, device: torch.device) -> Condition:  # noqa: ANN401
    """Encode a prompt for SDXL. An empty prompt is encoded as zeros if the pipeline's configuration says so."""
    states, _, pooled, _ = pipe.encode_prompt(
        prompt=prompt, device=device, num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    if not prompt and pipe.config.force_zeros_for_empty_prompt:
        states, pooled = torch.zeros_like(states), torch.zeros_like(pooled)
    return {"states": states, "pooled": pooled, "pixels": pooled.new_full((1, 1), pipe.vae_scale_factor)}


def _predict_unet(
    model: nn.Module, states_NCYX: Tensor, timesteps_N: Tensor, condition: Condition, /, *, guidance: float
) -> Tensor:
    added = None
    if "pooled" in condition:  # SDXL also takes the original size, the crop offset and the target size
        sides_N1 = states_NCYX.shape[2] * condition["pixels"]
        sides = sides_N1.expand(-1, 2)
        added = {"text_embeds": condition["pooled"], "time_ids": torch.cat([sides, 0 * sides, sides], dim=1)}
    prediction = model(
        states_NCYX,
        timesteps_N,
        encoder_hidden_states=condition["states"],
        added_cond_kwargs=added,
        return_dict=False,
    )
    return cast(Tensor, prediction[0])


def has_guidance_input(model: nn.Module) -> bool:
    """Return whether the denoiser takes the guidance scale as an input, so that one forward pass is enough."""
    return bool(cast(Any, model).config.get("guidance_embeds", False))


def _pack(states_NCYX: Tensor) -> Tensor:
    """Rearrange states into sequences of tokens, one for each square of `PACKED` x `PACKED` latents, row by row."""
    count, channels, height, width = states_NCYX.shape
    squares = states_NCYX.reshape(count, channels, height // PACKED, PACKED, width // PACKED, PACKED)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * PACKED**2)


def _unpack(tokens_NLP: Tensor, like_NCYX: Tensor) -> Tensor:
    count, channels, height, width = like_NCYX.shape
    squares = tokens_NLP.reshape(count, height // PACKED, width // PACKED, channels, PACKED, PACKED)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(like_NCYX.shape)


_UNET: Final = dict.fromkeys(
    ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
)

_CLIP: Final = PromptLimit("tokenizer")

FAMILIES: Final = (
    DenoiserFamily(
        denoiser="SD3Transformer2DModel",
        pipelines=("StableDiffusion3Pipeline",),
        folder="transformer",
        prediction_type="velocity",
        encode=_encode_sd3,
        predict=_predict_sd3,
        limits=(PromptLimit("tokenizer_3", tokens=256, max_tokens=512), _CLIP),
    ),
    DenoiserFamily(
        denoiser="FluxTransformer2DModel",
        pipelines=("FluxPipeline",),
        folder="transformer",
        prediction_type="velocity",
        encode=_encode_flux,
        predict=_predict_flux,
        limits=(PromptLimit("tokenizer_2", tokens=512, max_tokens=512),),
        packing=PACKED,
        uses_even_spacing=True,
    ),
    DenoiserFamily(
        denoiser="QwenImageTransformer2DModel",
        pipelines=("QwenImagePipeline",),
        folder="transformer",
        prediction_type="velocity",
        encode=_encode_qwen,
        predict=_predict_qwen,
        limits=(PromptLimit("tokenizer", tokens=512, max_tokens=1024),),
        count=_count_qwen,
        packing=PACKED,
        uses_even_spacing=True,
        required_settings=dict.fromkeys(("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")),
    ),
    DenoiserFamily(
        denoiser="UNet2DConditionModel",
        pipelines=("StableDiffusionPipeline",),
        folder="unet",
        prediction_type="noise",
        encode=_encode_unet,
        predict=_predict_unet,
        limits=(_CLIP,),
        required_settings=_UNET,
    ),
    DenoiserFamily(
        denoiser="UNet2DConditionModel",
        pipelines=("StableDiffusionXLPipeline",),
        folder="unet",
        prediction_type="noise",
        encode=_encode_xl,
        predict=_predict_unet,
        limits=(_CLIP,),
        required_settings=_UNET | {"addition_embed_type": "text_time"},
    ),
)
