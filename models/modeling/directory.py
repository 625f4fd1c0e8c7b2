"""Imported policies: directories in Hugging Face format. They are checked before loading, and their code never runs."""

import json
from pathlib import Path
from shutil import copyfile

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import CONTENTS
from rheostat.models.config.context import usable_context
from rheostat.models.modeling.merging import check_fits, find_base, is_adapter, load_merged, read_adapter
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.weight_files import StoredWeight, read_stored_weights
from rheostat.models.text.template_files import copy_named_templates
from rheostat.models.text.tokenizer import find_chosen_pad_token, load_tokenizer
from rheostat.models.untrusted_files.directory import check_untrusted_files, missing_directory_error
from rheostat.models.vision.processor import is_vision_model, load_processor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KEPT = ("*.json", "*.jinja", "*.txt", "*.model")
"""Glob patterns of the files that are copied together with the weights of an imported model: configuration and
tokenizer files, but never code."""


def check_directory(directory: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerFast, int]:
    """Check that the policy in a directory can be trained and can generate. Return its configuration, tokenizer and
    number of parameters. Raises BadInput if a check fails.

    Names, shapes and sizes of all weights are compared with the configuration, but the weights themselves are not read.
    If the directory contains an adapter in peft's format, the adapter and its base model are checked.
    """
    if not directory.is_dir():
        raise missing_directory_error("policy", directory)
    check_untrusted_files(directory)
    if is_adapter(directory):
        checked = check_directory(find_base(directory))
        check_fits(meta_policy(directory), read_adapter(directory))
        return checked
    config = _causal_config(directory)
    load_processor(directory)
    weight_files(directory)
    tokenizer = load_tokenizer(directory)
    model = meta_policy(directory)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise BadInput(
            f"policy {directory}: the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for only "
            f"{model.get_input_embeddings().weight.shape[0]}. Take the tokenizer and the model from the same "
            "checkpoint"
        )
    return config, tokenizer, model.num_parameters()


def meta_policy(directory: Path) -> PreTrainedModel:
    """Return a policy on the `meta` device, with the names and shapes of its weights but no values. For an adapter,
    return its base model."""
    return load_policy(find_base(directory) if is_adapter(directory) else directory, device="meta")


def copy_directory(source: Path, target: Path) -> None:
    """Copy the model files of a policy, but no code, from `source` to `target`. A LoRA adapter is merged into its base
    model."""
    if is_adapter(source):
        write_merged(find_base(source), source, target, dtype=torch.float32)
        return
    for path in (*weight_files(source), source / INDEX):
        if path.is_file():
            copyfile(path, target / path.name)
    copy_config_files(source, target)


def write_merged(base: Path, adapter: Path | None, target: Path, *, dtype: torch.dtype) -> None:
    """Write a policy as one complete model directory. If `adapter` is given, it is added to the base in float32. The
    weights are cast to `dtype` at the end."""
    model = load_policy(base) if adapter is None else load_merged(base, adapter)
    for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in float32
        parameter.data = parameter.data.to(dtype)
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    if text.tie_word_embeddings and head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = text.tie_word_embeddings = False
    model.save_pretrained(target)
    copy_config_files(base, target)


def copy_policy(source: Path, target: Path) -> None:
    """Copy a policy from `source` to `target`. In the copy, add a missing pad token and correct a wrong
    `tie_word_embeddings`."""
    copy_directory(source, target)
    if not is_adapter(source):
        _record_separate_head(source, target)
    _record_pad_token(target)


def _record_separate_head(source: Path, target: Path) -> None:
    """Set `tie_word_embeddings` to false in a copied config.json if the stored weights of output layer and embeddings
    differ.

    If the setting is wrong, transformers still loads both weights, but vLLM would use the embeddings as the output
    layer.
    """
    path = target / "config.json"
    config, stored = _read_object(path), read_stored_weights(source, what="policy")
    places = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    if not any("lm_head" in name for name in stored) or all(p.get("tie_word_embeddings") is False for p in places[:1]):
        return
    pairs = getattr(meta_policy(source), "all_tied_weights_keys", {}).items()
    if all(_is_equal(source, stored[a], stored[b], names=(a, b)) for a, b in pairs if a in stored and b in stored):
        return
    for part in places:
        if part is config or "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _is_equal(directory: Path, one: StoredWeight, other: StoredWeight, *, names: tuple[str, str]) -> bool:
    """Return whether two stored weights, whose `names` are given in the same order, have the same values."""
    tensors = []
    for weight, name in zip((one, other), names, strict=True):
        with safe_open(directory / weight.file, framework="pt") as opened:
            tensors.append(opened.get_tensor(name))
    return bool(torch.equal(*tensors))


def record_context(target: Path, context: int) -> None:
    """Write the maximum sequence length `context` into the config.json of a copied policy, if config.json contains
    none."""
    path = target / "config.json"
    config, text = _read_object(path), _causal_config(target).get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if usable_context(longest if isinstance(longest, int) else None, text.to_dict()) is not None:
        return
    part = config.get("text_config")
    (part if isinstance(part, dict) else config)["max_position_embeddings"] = context
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _record_pad_token(target: Path) -> None:
    """Write a pad token, chosen from the existing tokens, into a copied tokenizer_config.json if the tokenizer has
    none."""
    path = target / "tokenizer_config.json"
    tokenizer = load_tokenizer(target)
    if find_chosen_pad_token(tokenizer) is not None:
        settings = _read_object(path) if path.is_file() else {}
        path.write_text(json.dumps({**settings, "pad_token": str(tokenizer.pad_token)}, indent=2) + "\n")


def copy_config_files(source: Path, target: Path) -> None:
    """Copy the configuration and tokenizer files that are missing in the target directory."""
    for path in (path for pattern in KEPT for path in sorted(source.glob(pattern))):
        # A policy in a run's store has a table of contents, which must not replace that of the copy.
        is_skipped = path.name in (CONTENTS, INDEX) or (target / path.name).exists()
        if path.is_file() and not path.name.startswith(".") and not is_skipped:
            copyfile(path, target / path.name)
    copy_named_templates(source, target)


def weight_files(directory: Path) -> list[Path]:
    """Return the paths of the safetensors files with the weights of a model. Raises BadInput if a file is missing."""
    index = directory / INDEX
    names = {SINGLE}
    if index.is_file():
        files = _read_object(index).get("weight_map")
        names = {str(name) for name in files.values()} if isinstance(files, dict) else set()
    for name in sorted(names):
        if not (directory / name).is_file() or "/" in name:
            pickled = any(directory.glob("*.bin"))
            hint = (
                ". Pickled weights (.bin) are never loaded: convert them to safetensors with save_pretrained"
                if pickled
                else ""
            )
            raise BadInput(f"policy {directory}: the weight file {name} does not exist{hint}")
    return [directory / name for name in sorted(names)]


def _causal_config(directory: Path) -> PretrainedConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise BadInput(
            f"policy {directory}: the directory has no config.json, so it is not a model directory in Hugging Face "
            "format. Set the path to a model directory"
        )
    kind = _read_object(path).get("model_type")
    known = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if is_vision_model(directory) else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    causal = known.get(kind) if isinstance(kind, str) else None
    if causal is None:
        raise BadInput(
            f"{path}: model_type is {kind!r}, which is not a causal language model that transformers knows. Use "
            "another model"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError, OSError, ImportError, StrictDataclassError) as error:
        raise BadInput(
            f"{path}: transformers cannot load the configuration: {str(error).strip().splitlines()[0]}. Use a "
            "complete copy of the model"
        ) from error
    expected = {causal} if isinstance(causal, str) else set(causal)
    if config.architectures and not expected & set(config.architectures):
        raise BadInput(
            f"{path}: the architecture is {', '.join(config.architectures)}, but the policy must be a causal language "
            f"model ({causal}). Use another model"
        )
    return config


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: the file is not valid JSON: {error}. Copy or download the file again") from error
    if not isinstance(content, dict):
        raise BadInput(
            f"{path}: the file must contain a JSON object, but it contains a {type(content).__name__}. Copy or "
            "download the file again"
        )
    return content
