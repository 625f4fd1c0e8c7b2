"""Training of low-rank adapters (LoRA, arXiv 2106.09685, rsLoRA and DoRA): peft's layers are added to a model and saved
in peft's format.

The base weights stay fixed. The head of a classifier is trained completely, together with the adapters. Shapes: R rank,
I inputs.
"""

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundledFile, BundleRef, fetch_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.file_writer import write_files
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.outline import ModelOutline
from rheostat.models.modeling.checkpointing import layers_to_recompute
from rheostat.models.modeling.flash import attentions_of
from rheostat.models.modeling.merging import MAGNITUDE, PREFIX, SETTINGS, TENSORS
from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.modeling.safetensors import tensor_pieces
from rheostat.models.modeling.trials import allows_float32_trials, is_sharded
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.versions import ModelVersion
from rheostat.models.vision.parts import part_of

_NAME: Final = "default"  # peft's name for the only adapter of a model; it stands in parameters' names, not in files
_HEADS: Final = ("score", "classifier")
_STATE_SPACE_TYPES: Final = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_UNADAPTED: Final = ("out_proj", "conv1d")
"""Names of linear and convolution layers in state-space models that never get a LoRA adapter in peft, because fused
kernels read their weights directly (`_check_lora_target_modules_mamba` in peft/tuners/tuners_utils.py)."""
_VALUES_KEPT_PER_VALUE: Final = 1.5
"""Estimate of the number of values that autograd keeps for the backward pass, per input or output value of a linear
layer. Measured: 1.2 in Llama, 1.6 in Gemma 3 and Phi-3, 1.8 in GPT-2."""


def load_trainable(
    store: Store, version: ModelVersion, *, load: Callable[[Path], PreTrainedModel], lora: LoraConfig | None
) -> PreTrainedModel:
    """Load the weights of a policy version for training.

    If `lora` is given, also load the adapters of this version in float32, or add new adapters if the version has none.
    """
    model = load(fetch_bundle(store, version.weights))
    if lora is None:
        assert version.adapter is None, "a version with an adapter needs update.lora"
        return model
    add_adapters(model, lora, base=version.weights)
    if version.adapter is not None:
        _load_adapters(model, fetch_bundle(store, version.adapter))
    return model


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, base: BundleRef) -> None:
    """Freeze a model and add float32 adapters that leave its outputs unchanged at first. The adapter's matrix B is
    initialized to 0, A from a seed that is derived from the digest of `base`, the stored base weights, and the
    magnitudes of DoRA to the norms of the rows of the weights. Raises BadInput if a name in `lora.targets` matches no
    layer, or with DoRA if a row of a weight is zero. With sharded weights, DoRA makes this collective."""
    import peft  # peft imports DeepSpeed, which then chooses its accelerator, so not before the ranks have joined

    layers = adapted_layers(model, lora)
    head = _find_head_name(model)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated as int, used as any number
        use_rslora=lora.rank_stabilized,
        use_dora=lora.dora,
        lora_dropout=0.0,  # log-probs must be those of the policy that generated
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
        base_model_name_or_path=f"../../{base.key}",  # relative to the adapter's bundle, wherever the store is
        inference_mode=False,
    )
    with (
        lock_model_construction(),
        _gather_layers(layers.values()),
    ):  # peft also samples random numbers, which are replaced
        peft.inject_adapter_in_model(settings, model)
    generator = torch.Generator().manual_seed(derive_seed("adapter", base.digest) >> 1)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            values = torch.empty(parameter.shape)  # in float32 on the CPU, so that every device and dtype has the same
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)  # like peft
            parameter.data = values.to(parameter.device)
        elif ".lora_B." in name:
            parameter.data = torch.zeros(parameter.shape, device=parameter.device)
        elif f"{MAGNITUDE}." in name:
            parameter.data = _check_magnitudes(name, parameter.data).float()
        elif head is not None and name.startswith(f"{head}."):
            parameter.requires_grad_(True)


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether the model's base weights are frozen and only its LoRA adapters are trained."""
    return hasattr(model, "peft_config")


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Run the block with the LoRA adapters of a model disabled, so that only its base weights are used."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # not before the ranks have joined, see above

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that training changes, which are those with `requires_grad`."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def save_adapters(
    model: PreTrainedModel, directory: Path, *, on_progress: Callable[[], None] = lambda: None
) -> dict[str, BundledFile]:
    """Write a model's adapters, and its classifier head if it has one, in peft's format. Returns the size and digest of
    the written tensor file, keyed by file name. `on_progress` is called after each chunk of the file."""
    pieces = tensor_pieces(dict(_named_as_peft(model)), metadata={"format": "pt"})
    file = write_files({directory / TENSORS: pieces}, on_progress=on_progress)[directory / TENSORS]
    settings = model.peft_config[_NAME].to_dict() | {"inference_mode": True}
    settings["target_modules"] = _shorten_names(model, settings["target_modules"])
    if head := _find_head_name(model):
        settings["modules_to_save"] = [head]  # peft loads it as a copy; training needs no copy
    # Written here in sorted order: peft writes a set, whose order differs between processes (another one for experts).
    (directory / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True, default=sorted))
    return {TENSORS: file}


def outline(model: PreTrainedModel) -> ModelOutline:
    """Return the sizes and layers of a model without adapters, to estimate the memory that training needs. The model
    may be on the `meta` device."""
    head = getattr(model, _find_head_name(model) or "", None)
    layers = {name: layer_sizes(layer) for name, layer in linear_layers(model).items()}
    text = model.config.get_text_config()
    return ModelOutline(
        kind=type(model).__name__,
        parameters=model.num_parameters(),
        layers=layers,
        head=0 if head is None else sum(weight.numel() for weight in head.parameters()),
        matmul_parameters=_count_matmul_parameters(model),
        blocks=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        kept_numbers=round(_VALUES_KEPT_PER_VALUE * sum(map(sum, layers.values())) / text.num_hidden_layers),
        norm_numbers=2 * text.hidden_size,
        attentions=attentions_of(model),
        recomputes=bool(layers_to_recompute(model)),
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
        loads_directly=_loads_directly(model),
    )


def _loads_directly(model: PreTrainedModel) -> bool:
    if getattr(model.config, "quantization_config", None) is not None:
        return False
    return model.device.type != "meta" or allows_float32_trials(model)


def _count_matmul_parameters(model: PreTrainedModel) -> int:
    """Return the number of weights that take part in the matrix products of one text token. In a layer of a mixture of
    experts, only the experts that are chosen for one token are counted."""
    text = model.config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    experts_per_token = getattr(text, "num_experts_per_tok", None) or experts
    head = _find_head(model)
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(weight) for module in (*looked_up, head) if module is not None for weight in module.parameters()}
    total = 0 if head is None else sum(weight.numel() for weight in head.parameters() if weight.ndim > 1)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in apart and part_of(name) == "language":
            total += weight.numel() * experts_per_token // experts if ".experts." in name else weight.numel()
    return total


def adapted_layers(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Linear | Conv1D]:
    """Return the layers of a model that get a LoRA adapter, by name. Raises BadInput if a name in `lora.targets`
    matches no layer."""
    linear = linear_layers(model)
    return {name: linear[name] for name in lora.choose(linear, kind=type(model).__name__)}


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return the linear layers of the language decoder that may get an adapter, by name. The output layer is
    excluded."""
    head = _find_head(model)
    excluded = _UNADAPTED if getattr(model.config, "model_type", None) in _STATE_SPACE_TYPES else ()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and part_of(name) == "language"
        and name.rpartition(".")[2] not in excluded
    }


def layer_sizes(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return the input size and the output size of a layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


@contextmanager
def _gather_layers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Run the block with peft gathering the sharded weights of one layer at a time, from which it computes the
    magnitudes of DoRA. `lock_model_construction` must be active, because a function of peft is replaced: peft itself
    gathers only if transformers' trainer has set up ZeRO-3."""
    dora: Any = importlib.import_module("peft.tuners.lora.dora")  # not before the ranks have joined, see above
    if not any(is_sharded(parameter) for layer in layers for parameter in layer.parameters()):
        yield
        return
    import deepspeed

    module: Any = dora
    original = module.gather_params_ctx
    module.gather_params_ctx = deepspeed.zero.GatheredParameters
    try:
        yield
    finally:
        module.gather_params_ctx = original


def _check_magnitudes(name: str, magnitude_O: Tensor) -> Tensor:
    """Return new magnitudes of a layer. Raises BadInput if one is 0, because DoRA would divide by 0."""
    if zeros := int((magnitude_O == 0).sum()):
        raise BadInput(
            f"update.lora.dora cannot train the layer {name.partition(MAGNITUDE)[0]}, because the weights of {zeros} "
            "of its outputs are all zero. Exclude the layer with update.lora.targets, or remove update.lora.dora"
        )
    return magnitude_O


def _load_adapters(model: PreTrainedModel, directory: Path) -> None:
    """Load adapters from files that `save_adapters` wrote. The model must have the same adapted layers."""
    tensors, parameters = load_file(directory / TENSORS), dict(_named_as_peft(model))
    assert tensors.keys() == parameters.keys(), f"{directory}: the adapters belong to another configuration"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _named_as_peft(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"{PREFIX}{name.replace(f'.{_NAME}.', '.').replace(f'{MAGNITUDE}.weight', MAGNITUDE)}", parameter


def _shorten_names(model: PreTrainedModel, layers: set[str]) -> list[str]:
    """Return only the last part of each layer's name (such as `q_proj`), or all full names if a last part also matches
    other modules.

    Users of peft usually name layers by these last parts.
    """
    ends = {name.rpartition(".")[2] for name in layers}
    other_names = (name for name, _ in model.named_modules() if name not in layers)
    return sorted(layers if ends & {name.rpartition(".")[2] for name in other_names} else ends)


def _find_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output layer of a language model or classifier, or None for an image denoiser."""
    if not isinstance(model, PreTrainedModel):
        return None
    return model.get_output_embeddings() or getattr(model, _find_head_name(model) or "", None)


def _find_head_name(model: PreTrainedModel) -> str | None:
    """Return the attribute name of a classifier's output head, which is trained in addition to adapters, or None for a
    language model, whose head is not trained."""
    return next((name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)), None)
