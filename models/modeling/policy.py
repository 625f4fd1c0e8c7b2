"""The policy as a transformers model: building a new decoder, and loading, saving and describing any policy.

Weights are loaded only from safetensors files. Nothing is downloaded, and missing weights are an error.
"""

import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from rheostat.infra.errors import BadInput
from rheostat.models.config.context import longrope_scales, usable_context
from rheostat.models.config.policy import ModelShape, ScratchPolicy
from rheostat.models.modeling.parameter_storage import ParameterStorage, store_parameters_as
from rheostat.models.modeling.trials import computes_in_float32
from rheostat.models.modeling.unread_weights import report_unread_weights
from rheostat.models.modeling.weight_files import check_loaded_weights, is_quantized, read_stored_weights
from rheostat.models.records.media import ImageSource
from rheostat.models.vision.families import FAMILIES
from rheostat.models.vision.parts import Part, frozen_names, part_of
from rheostat.models.vision.processor import is_vision_model, load_processor
from rheostat.models.vision.tower import VisionInputs

logger = logging.getLogger(__name__)

_MAKING = threading.RLock()


@contextmanager
def lock_model_construction() -> Iterator[None]:
    """Run the block while no other thread builds a model, and restore the CPU's random state afterwards.

    The lock is needed because transformers replaces torch's initialization functions and default dtype for all threads
    while it builds a model.
    """
    transformers_logging.disable_progress_bar()
    with _MAKING, torch.random.fork_rng(devices=[]):
        yield


class Architecture(Protocol):
    """Interface of transformers' `AutoModelFor…` classes, through which model weights are loaded."""

    def from_pretrained(self, path: str, **options: object) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Load a model. With `output_loading_info`, also return a report of missing and unexpected weights."""
        ...


def load_weights(
    architecture: Architecture,
    directory: Path,
    *,
    what: str,
    device: str,
    dtype: torch.dtype,
    storage: ParameterStorage | None = None,
) -> PreTrainedModel:
    """Load a model of the given architecture. Raises BadInput if the files do not fit config.json, because transformers
    would fill missing weights with random numbers. `what` is the kind of model with which error messages begin, such as
    "critic".

    `storage` is given for the models of an update rank, with `dtype` = float32: parameters are then stored as it
    describes. The preflight check finds models that do not allow this (`ModelOutline.loads_directly`). They are loaded
    as a whole in float32, and the log says so. Raises BadInput if the parameters cannot be sharded during loading.
    """
    if storage is not None and storage.changes_parameters and not is_quantized(directory):
        model = _load_directly(architecture, directory, what=what, storage=storage)
        if model is not None:
            return model
    return _load(architecture, directory, what=what, device=device, dtype=dtype)


def _load_directly(
    architecture: Architecture, directory: Path, *, what: str, storage: ParameterStorage
) -> PreTrainedModel | None:
    """Load a model whose parameters are stored as `storage` describes. Return None if the model must be loaded as a
    whole. Raises BadInput if the parameters cannot be sharded, for example because a model class reads their sizes
    after they were sharded. Collective if parameters are sharded: all ranks do the same."""
    model, reason = None, "another rank could not load it"
    try:
        loaded = _load(architecture, directory, what=what, device="cpu", dtype=torch.float32, storage=storage)
        model = storage.finish(loaded)
    except (BadInput, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, BadInput) and error.__cause__ is None:  # the files do not fit config.json
            raise
        reason = first_line(error.__cause__ or error)
    if storage.on_any_rank(model is None) or model is None:
        if storage.shard is not None:
            raise BadInput(
                f"{what} {directory}: update.zero_stage is 3, but the model cannot be loaded as shards: {reason}. Set "
                "update.zero_stage = 2"
            )
    elif computes_in_float32(model):
        return model
    else:
        reason = "its modules do not read their weights as attributes"
    logger.warning("%s %s is loaded as a whole in float32, because %s", what, directory, reason)
    return None


def _load(
    architecture: Architecture,
    directory: Path,
    *,
    what: str,
    device: str,
    dtype: torch.dtype,
    storage: ParameterStorage | None = None,
) -> PreTrainedModel:
    where = f"{what} {directory}"
    stored = read_stored_weights(directory, what=what)
    storing = nullcontext() if storage is None else store_parameters_as(storage)
    try:
        with lock_model_construction(), _suppress_reports(), storing:
            model, loading = architecture.from_pretrained(
                str(directory),
                dtype=dtype,
                device_map=device,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported in our words below
            )
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise BadInput(
            f"{where}: the weights cannot be loaded: {first_line(error)}. Use a complete copy of the model"
        ) from error
    check_loaded_weights(model, loading, stored, where=where)
    files = {name: weight.file for name, weight in stored.items()}
    report_unread_weights(loading["unexpected_keys"], files, where=where, architecture=type(model).__name__)
    return model


@contextmanager
def _suppress_reports() -> Iterator[None]:
    """Run the block with transformers' printed table of missing and unexpected weights turned off, because error
    messages report these weights."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error's class if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def scratch_config(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Return the transformers configuration of a new decoder whose vocabulary is that of the tokenizer."""
    kinds: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return kinds[policy.architecture](
        vocab_size=len(tokenizer),
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.heads,
        num_key_value_heads=policy.kv_heads,
        head_dim=policy.hidden_size // policy.heads,
        max_position_embeddings=policy.context,
        initializer_range=policy.initial_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build_scratch(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Build a decoder with random weights derived from the seed. The caller's random state on the CPU stays
    unchanged."""
    with lock_model_construction():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(scratch_config(policy, tokenizer))


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a model and its tokenizer into a directory that transformers and vLLM can load."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def load_policy(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    storage: ParameterStorage | None = None,
) -> PreTrainedModel:
    """Load a policy's weights, by default in float32. On the `meta` device, load only names and shapes. `storage`
    describes how the parameters of a policy under training are stored."""
    architecture = AutoModelForImageTextToText if is_vision_model(directory) else AutoModelForCausalLM
    return load_weights(architecture, directory, what="policy", device=device, dtype=dtype, storage=storage)


def load_vision(directory: Path, *, source: ImageSource | None = None, is_frozen: bool = False) -> VisionInputs | None:
    """Load the image settings of a vision-language policy, or return None for a text-only policy. `source` provides the
    encoded images. Set `is_frozen` if the vision tower is not trained."""
    processor = load_processor(directory)
    return None if processor is None else VisionInputs(processor, source=source, is_frozen=is_frozen)


def freeze(model: PreTrainedModel, parts: Collection[Part]) -> None:
    """Freeze the given parts of a vision-language model, such as its vision tower, so that training does not change
    them. Raises BadInput if the model has no such part."""
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, parts, kind=type(model).__name__):
        parameters[name].requires_grad_(False)


def trains_vision(model: PreTrainedModel) -> bool:
    """Return whether any weight of the vision tower or the projector of a model is trained (not frozen)."""
    return any(each.requires_grad and part_of(name) != "language" for name, each in model.named_parameters())


def policy_shape(config: PretrainedConfig, *, parameters: int, source: str, context: int | None = None) -> ModelShape:
    """Return the sizes of a model that determine its memory use and its maximum sequence length, read from its
    configuration. `source` names the model in messages, and `context` is the maximum sequence length for a
    configuration that contains none. Raises BadInput if neither is set, or if they differ."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise BadInput(
            f"policy {source}: config.json has no single number of attention heads (num_attention_heads). Models "
            "without attention, or with another number of heads in each layer, are not supported. Use another model."
        )
    longest = getattr(text, "max_position_embeddings", None)
    usable = usable_context(longest if isinstance(longest, int) else None, text.to_dict())
    if None not in (usable, context) and usable != context:
        raise BadInput(
            f"policy.context is {context}, but config.json in {source} already sets the maximum length {usable}. "
            "Remove policy.context."
        )
    context = context or usable
    if context is None:
        raise BadInput(
            f"policy {source}: config.json sets no maximum sequence length (max_position_embeddings). Set "
            "policy.context to the length in tokens on which the model was trained. For a model other than the policy, "
            "add max_position_embeddings to config.json."
        )
    return ModelShape(
        parameters=parameters,
        context=context,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vision_model_type=config.model_type if config.model_type in FAMILIES else "",
        longrope_scales=tuple(longrope_scales(text.to_dict())),
    )
