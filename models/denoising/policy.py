"""Text-to-image (diffusion) policies: creating, inspecting, loading and exporting their directories."""

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

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import DiffusionPolicy, ModelShape
from rheostat.models.denoising.families import (
    CLIP_TOKENS,
    DenoiserFamily,
    diffusers_class,
    has_guidance_input,
    select_conditions,
    zero_condition,
)
from rheostat.models.denoising.pipeline import (
    WEIGHTS,
    PipelineOutline,
    check_weights,
    copy_pipeline,
    is_pipeline,
    link_frozen_parts,
    load_denoiser,
    load_part,
    read_pipeline,
)
from rheostat.models.inspection.directory import Inspected
from rheostat.models.modeling.adapters import layer_sizes, linear_layers
from rheostat.models.modeling.checkpointing import checkpoint_denoiser
from rheostat.models.modeling.merging import merge, read_adapter
from rheostat.models.modeling.policy import lock_model_construction, policy_shape
from rheostat.models.modeling.safetensors import save_tensors
from rheostat.models.text.tokenizer import train_tokenizer

PROMPT_BYTES = 16384
"""Maximum length of a text-to-image prompt in bytes. The policy's text encoders have separate, lower limits."""
BYTES = 258
"""Vocabulary size of a tokenizer that encodes bytes, including two special tokens."""


def policy_context(directory: Path) -> int:
    """Return the maximum number of tokens of prompt and completion together, for the policy in a directory. For a
    text-to-image policy, this is the maximum length of a prompt."""
    if is_pipeline(directory):
        return PROMPT_BYTES
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return policy_shape(config, parameters=0, source=str(directory)).context


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that encodes a text as its bytes. Rheostat stores the prompts of text-to-image policies in
    this encoding, while the policy's text encoders use their own tokenizers."""
    return train_tokenizer((), vocab_size=BYTES, context=PROMPT_BYTES)


# ---- writing
def write_diffusion(policy: DiffusionPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Copy the pipeline of `policy.path` to a directory, and add the tokenizer that encodes prompts as bytes.

    Returns the denoiser's number of parameters. Raises BadInput if Rheostat cannot train the pipeline.
    """
    source = fetch_path(policy.path)
    parameters = check_weights(read_pipeline(source))
    copy_pipeline(source, directory)
    byte_tokenizer().save_pretrained(directory)
    return parameters


def write_merged_pipeline(base: Path, adapter: Path | None, target: Path, *, dtype: torch.dtype) -> None:
    """Write a pipeline to `target` with a LoRA adapter merged into its denoiser. The weights are added in float32 and
    then cast to `dtype`. If `adapter` is None, the weights are only cast."""
    folder = read_pipeline(base).family.folder
    model = load_merged_denoiser(base, adapter, device="cpu", dtype=torch.float32)
    tensors: dict[str, Tensor] = {name: each.to(dtype) for name, each in model.state_dict().items()}
    (target / folder).mkdir()
    save_tensors(tensors, target / folder / WEIGHTS, metadata={"format": "pt"})
    link_frozen_parts(base, target)


# ---- loading
def load_merged_denoiser(directory: Path, adapter: Path | None, *, device: str, dtype: torch.dtype) -> nn.Module:
    """Load a pipeline's denoiser and merge a LoRA adapter into it. The weights are added in float32 on the CPU and then
    cast to `dtype`. If `adapter` is None, the weights are only cast."""
    if adapter is None:
        return load_denoiser(directory, device=device, dtype=dtype)
    wide = cast(Any, load_denoiser(directory))
    merge(wide, read_adapter(adapter))
    return cast(nn.Module, wide.to(device=device, dtype=dtype))


# ---- prompts
def check_prompts(directory: Path, prompts: Iterable[tuple[str, str]], denoising: DenoisingConfig) -> None:
    """Raise BadInput for the first prompt that is too long, because text encoders would truncate it.

    Each of the `prompts` is a pair of the prompt's origin (for messages) and its text. If several encoders read a
    prompt, the highest limit applies: if T5 is present, CLIP's encoders may truncate the prompt to 77 tokens. Only
    tokenizers are loaded. Also raises BadInput if a text encoder is missing or `rollout.denoising.text_tokens` is too
    high.
    """
    model = read_pipeline(directory)
    family, limits = model.family, model.limits
    if not limits:
        required_parts = ", or ".join(f"{each.tokenizer} and {each.encoder}" for each in family.limits)
        raise BadInput(
            f"{model.where}: the pipeline needs {required_parts}, but model_index.json lists only "
            f"{', '.join(model.parts)}. Use a complete copy of the model."
        )
    limit = limits[0]
    configured = denoising.text_tokens if limit.tokens is not None else None
    if configured is not None and configured > limit.max_tokens:
        raise BadInput(
            f"rollout.denoising.text_tokens is {configured}, but {model.pipeline} reads at most {limit.max_tokens} "
            "tokens of a prompt. Lower it."
        )
    tokenizer = load_part(model, limit.tokenizer)
    max_tokens = configured or limit.tokens or tokenizer.model_max_length
    remedy = (
        f". Raise rollout.denoising.text_tokens, to at most {limit.max_tokens}."
        if max_tokens < limit.max_tokens
        else ""
    )
    for source, text in prompts:
        if (num_tokens := family.count(tokenizer, text)) > max_tokens:
            raise BadInput(
                f"{source}: {model.pipeline} reads at most {max_tokens} tokens of a prompt, but this one has "
                f"{num_tokens}: {text[:40]!r}{remedy}"
            )


# ---- inspecting
def inspect_diffusion(policy: DiffusionPolicy, texts: Iterable[str]) -> Inspected:
    """Return the size and limits of the diffusers pipeline in `policy.path`. Raises BadInput if Rheostat cannot train
    it."""
    model = read_pipeline(fetch_path(policy.path))
    check_weights(model)
    described = describe_denoiser(
        model.family, model.denoiser, text=sum(each.tokens or CLIP_TOKENS for each in model.limits)
    )
    return replace(described, check_drawing=partial(_check_drawing, model))


def _check_drawing(model: PipelineOutline, denoising: DenoisingConfig, prompts: Iterable[tuple[str, str]]) -> int:
    check_prompts(model.directory, prompts, denoising)
    return model.check(denoising)


def describe_denoiser(family: DenoiserFamily, config: Mapping[str, Any], *, text: int) -> Inspected:
    """Describe a text-to-image policy whose denoiser has this configuration, in the format of diffusers, without
    building its weights. `text` is the number of prompt tokens that the denoiser reads."""
    with lock_model_construction(), FakeTensorMode(allow_non_fake_inputs=True):
        model = diffusers_class(family.denoiser).from_config(dict(config))
        measured = _measure_activations(model, family, text=text)
    layers = {name: layer_sizes(layer) for name, layer in linear_layers(model).items()}
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
        has_guidance_input=has_guidance_input(model),
        largest_parameter=max(weight.numel() for weight in model.parameters()),
    )
    shape = ModelShape(
        parameters=parameters, context=PROMPT_BYTES, layers=blocks, heads=1, kv_heads=1, head_size=hidden
    )
    return Inspected(shape, outline, byte_tokenizer(), _no_critic)


class _Measured(NamedTuple):
    """Memory and compute of a denoiser's forward pass per token, measured for an image of the default size."""

    kept: float
    """Number of values per token that autograd keeps for the backward pass, without gradient checkpointing."""
    layers: list[float]
    """For each layer whose activations gradient checkpointing can recompute, the number of values in `kept` that belong
    to the layer."""
    again: float
    """Number of values per token that autograd keeps for the backward pass, with gradient checkpointing."""
    products: float
    """Number of multiply-add operations per token in a forward pass."""


def _measure_activations(model: Any, family: DenoiserFamily, *, text: int) -> _Measured:  # noqa: ANN401
    """Measure memory and compute of a forward pass with `text` prompt tokens. Fake tensors, which have shapes but no
    data, make the measurement cheap."""
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    side, rows = family.side(model.config), 2  # two rows, because layout changes of a single row need fewer copies
    states_NCYX, condition = (
        torch.zeros(rows, family.channels(model.config), side, side),
        zero_condition(model.config, text),
    )
    condition, tokens = select_conditions([condition], [0] * rows), rows * family.tokens(model.config, side)
    tensors: dict[int, Tensor] = {}  # by storage; the references keep a storage from being reused
    layers: list[float] = []

    def keep(each: Tensor) -> Tensor:
        if each.untyped_storage()._cdata not in own:
            tensors[each.untyped_storage()._cdata] = each
        return each

    def numbers() -> float:
        return sum(each.untyped_storage().nbytes() // each.element_size() for each in tensors.values()) / tokens

    def call(layer: nn.Module, *args: Any) -> Any:  # noqa: ANN401
        before, output = numbers(), layer(*args)
        layers.append(numbers() - before)
        return output

    def run() -> float:
        tensors.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            family.predict(model, states_NCYX, torch.ones(rows), condition, guidance=1.0)
        return numbers()

    model.enable_gradient_checkpointing(call)
    with FlopCounterMode(display=False) as counter:
        whole = run()
    checkpoint_denoiser(model, is_enabled=True)
    return _Measured(whole, layers, again=run(), products=counter.get_total_flops() / 2 / tokens)


def _no_critic() -> ModelOutline:
    raise BadInput(
        "algorithm.critic is not supported for text-to-image policies. Use an algorithm without a critic, such as "
        "algorithm.kind = 'grpo'."
    )
