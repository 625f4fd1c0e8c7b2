"""Policies that draw: built or copied, described before that, loaded to be served, and written for others."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedTokenizerFast

from infra.errors import BadInput
from infra.store.inputs import fetched
from models.config.denoising import DenoisingConfig
from models.config.policy import DiffusionPolicy, ModelOutline, ModelShape, ScratchDiffusionPolicy
from models.denoising.families import CLIP_TOKENS, DenoiserFamily, blank, class_of, gather, takes_guidance
from models.denoising.pipeline import (
    WEIGHTS,
    PictureModel,
    check_weights,
    copy_pipeline,
    is_pipeline,
    link_beside_denoiser,
    load_denoiser,
    load_part,
    read_pipeline,
)
from models.denoising.scratch import scratch_model, word_tokenizer, write_scratch_pipeline
from models.inspection.directory import Inspected
from models.modeling.adapters import linear_layers
from models.modeling.checkpointing import checkpoint_denoiser
from models.modeling.merging import merge, read_adapter
from models.modeling.policy import making_models, policy_shape
from models.modeling.safetensors import save_tensors
from models.text.tokenizer import train_tokenizer

PROMPT_BYTES = 16384
"""Longest prompt in bytes; its text encoders say how much of it they read."""
BYTES = 258
"""Tokens of a tokenizer that spells bytes, two special ones included."""


def policy_context(directory: Path) -> int:
    """Count the tokens that prompt and completion of a policy may have together."""
    if is_pipeline(directory):
        return PROMPT_BYTES
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return policy_shape(config, parameters=0, source=str(directory)).context


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Spell prompts as the bytes of their text: the text encoders have tokenizers of their own."""
    return train_tokenizer((), vocab_size=BYTES, context=PROMPT_BYTES)


# ---- written
def write_scratch_diffusion(policy: ScratchDiffusionPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build a small policy, with a word for every word of the texts."""
    parameters = write_scratch_pipeline(policy, directory, texts=texts, seed=seed)
    byte_tokenizer().save_pretrained(directory)
    return parameters


def write_diffusion(policy: DiffusionPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Copy a directory from elsewhere."""
    source = fetched(policy.path)
    parameters = check_weights(read_pipeline(source))
    copy_pipeline(source, directory)
    byte_tokenizer().save_pretrained(directory)
    return parameters


def write_merged_pipeline(base: Path, adapter: Path | None, target: Path, *, dtype: torch.dtype) -> None:
    """Write a pipeline with its denoiser and adapter summed in float32, then cast once."""
    folder = read_pipeline(base).family.folder
    model = load_served(base, adapter, device="cpu", dtype=torch.float32)
    tensors: dict[str, Tensor] = {name: each.to(dtype) for name, each in model.state_dict().items()}
    (target / folder).mkdir()
    save_tensors(tensors, target / folder / WEIGHTS, metadata={"format": "pt"})
    link_beside_denoiser(base, target)


# ---- loaded
def load_served(directory: Path, adapter: Path | None, *, device: str, dtype: torch.dtype) -> nn.Module:
    """Load a denoiser and add its adapter: summed in float32 on the CPU, then cast."""
    if adapter is None:
        return load_denoiser(directory, device=device, dtype=dtype)
    wide = cast(Any, load_denoiser(directory))
    merge(wide, read_adapter(adapter))
    return cast(nn.Module, wide.to(device=device, dtype=dtype))


# ---- prompts
def check_prompts(directory: Path, prompts: Iterable[tuple[str, str]], denoising: DenoisingConfig) -> None:
    """Raise BadInput for the first prompt of which the policy would read the beginning alone.

    `prompts` are where each came from, as messages name it, and its text. Where several encoders read a prompt, the one
    that reads most counts: with T5 beside them, CLIP's encoders of 77 tokens may read less. Only tokenizers are loaded.
    """
    model = read_pipeline(directory)
    family, limits = model.family, model.limits
    if not limits:
        wanted = ", or ".join(f"{each.tokenizer} and {each.encoder}" for each in family.limits)
        raise BadInput(f"{model.where}: expected {wanted}, found {', '.join(model.parts)}")
    limit = limits[0]
    asked = denoising.text_tokens if limit.tokens is not None else None
    if asked is not None and asked > limit.most:
        raise BadInput(f"rollout.denoising.text_tokens {asked}: {model.pipeline} reads at most {limit.most}")
    tokenizer = load_part(model, limit.tokenizer)
    most = asked or limit.tokens or tokenizer.model_max_length
    remedy = f"; raise rollout.denoising.text_tokens, to {limit.most} at most" if most < limit.most else ""
    for source, text in prompts:
        if (found := family.count(tokenizer, text)) > most:
            raise BadInput(
                f"{source}: expected a prompt of {most} tokens at most, which {model.pipeline} reads, found {found}: "
                f"{text[:40]!r}{remedy}"
            )


# ---- described
def inspect_scratch_diffusion(policy: ScratchDiffusionPolicy, texts: Iterable[str]) -> Inspected:
    """Find the words of the texts, and describe what would be built."""
    model, tokenizer = scratch_model(policy), word_tokenizer(texts, context=policy.words)

    def check_drawing(denoising: DenoisingConfig, prompts: Iterable[tuple[str, str]]) -> int:
        for source, text in prompts:
            if (found := len(tokenizer(text)["input_ids"])) > policy.words:
                raise BadInput(f"{source}: expected at most policy.words {policy.words} with two ends, found {found}")
        return model.check(denoising)

    described = _described(model.family, model.denoiser, text=policy.words + 1)  # of the T5 that it lacks, one
    return replace(described, check_drawing=check_drawing)


def inspect_diffusion(policy: DiffusionPolicy, texts: Iterable[str]) -> Inspected:
    """Describe the directory."""
    found = read_pipeline(fetched(policy.path))
    check_weights(found)
    described = _described(found.family, found.denoiser, text=sum(each.tokens or CLIP_TOKENS for each in found.limits))
    return replace(described, check_drawing=partial(_check_drawing, found))


def _check_drawing(model: PictureModel, denoising: DenoisingConfig, prompts: Iterable[tuple[str, str]]) -> int:
    check_prompts(model.directory, prompts, denoising)
    return model.check(denoising)


def _described(family: DenoiserFamily, config: Mapping[str, Any], *, text: int) -> Inspected:
    with making_models(), FakeTensorMode(allow_non_fake_inputs=True):
        model = class_of(family.denoiser).from_config(dict(config))
        measured = _measured(model, family, text=text)
    layers = {name: sum(layer.weight.shape) for name, layer in linear_layers(model).items()}
    blocks = len(measured.layers)
    parameters = sum(weight.numel() for weight in model.parameters())
    hidden = int(getattr(model, "inner_dim", 0)) or max(getattr(model.config, "block_out_channels", (0,)))
    outline = ModelOutline(
        kind=type(model).__name__,
        parameters=parameters,
        layers=layers,
        matmul_parameters=round(measured.products),
        blocks=blocks,
        hidden_size=round(measured.again / blocks),
        vocab_size=0,
        kept_numbers=round(measured.kept / blocks),
        largest_block=max(measured.layers) * blocks / measured.kept,
        takes_guidance=takes_guidance(model),
    )
    shape = ModelShape(
        parameters=parameters, context=PROMPT_BYTES, layers=blocks, heads=1, kv_heads=1, head_size=hidden
    )
    return Inspected(shape, outline, byte_tokenizer(), _no_critic)


class _Measured(NamedTuple):
    """What a pass takes of one token of a picture of the usual size."""

    kept: float
    """Numbers that autograd keeps."""
    layers: list[float]
    """Of these, those of each layer that can be computed again."""
    again: float
    """Numbers that it keeps where these are."""
    products: float


def _measured(model: Any, family: DenoiserFamily, *, text: int) -> _Measured:  # noqa: ANN401
    """Measure a model of fake tensors, which have shapes alone: a pass takes no memory and hardly any time."""
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    side, rows = family.side(model.config), 2  # of one row alone layouts need fewer copies
    states_NCYX, told = torch.zeros(rows, family.channels(model.config), side, side), blank(model.config, text)
    told, tokens = gather([told], [0] * rows), rows * family.tokens(model.config, side)
    kept: dict[int, Tensor] = {}  # by storage, held so that none is given to another
    layers: list[float] = []

    def keep(each: Tensor) -> Tensor:
        if each.untyped_storage()._cdata not in own:
            kept[each.untyped_storage()._cdata] = each
        return each

    def numbers() -> float:
        return sum(each.untyped_storage().nbytes() // each.element_size() for each in kept.values()) / tokens

    def call(layer: nn.Module, *args: Any) -> Any:  # noqa: ANN401
        before, said = numbers(), layer(*args)
        layers.append(numbers() - before)
        return said

    def say() -> float:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            family.say(model, states_NCYX, torch.ones(rows), told, guidance=1.0)
        return numbers()

    model.enable_gradient_checkpointing(call)
    with FlopCounterMode(display=False) as counter:
        whole = say()
    checkpoint_denoiser(model, again=True)
    return _Measured(whole, layers, again=say(), products=counter.get_total_flops() / 2 / tokens)


def _no_critic() -> ModelOutline:
    raise BadInput("a critic reads text: a policy that draws has none; use an algorithm without one, such as grpo")
