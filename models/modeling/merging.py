"""LoRA and DoRA adapters in peft's format: reading and checking them, and adding them to their base model.

Shapes: R rank, I inputs and O outputs of a layer.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rheostat.infra.errors import BadInput
from rheostat.infra.store.hub import find_hub_base
from rheostat.infra.store.inputs import recorded_base
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.weight_files import read_header

SETTINGS: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Prefix that peft's files add to the names of the base model's modules."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Initialization methods in peft that also change the weights of the base model."""
_A, _B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


class AdapterSettings(BaseModel):
    """Settings in peft's adapter_config.json that determine how an adapter is added to its base model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peft_type: str
    base_model_name_or_path: str | None
    r: Annotated[int, Field(ge=1)]
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | str = True
    layer_replication: list[object] | None = None
    alora_invocation_tokens: list[int] | None = None

    def find_unsupported(self) -> list[str]:
        """Return the names of settings with which the adapter is neither LoRA nor rsLoRA nor DoRA."""
        method = self.init_lora_weights if isinstance(self.init_lora_weights, str) else ""
        unsupported = {
            f"peft_type = {self.peft_type!r}": self.peft_type != "LORA",
            f"bias = {self.bias!r}": self.bias != "none",
            f"init_lora_weights = {method!r}": method.startswith(_CHANGES_BASE),
            "layer_replication": bool(self.layer_replication),
            "alora_invocation_tokens": bool(self.alora_invocation_tokens),
        }
        return [name for name, is_set in unsupported.items() if is_set]

    def scale(self, layer: str) -> float:
        """Return the factor by which the product B A is multiplied in a layer: alpha / rank, or alpha / sqrt(rank) with
        rsLoRA (arXiv 2312.03732). As in peft, rank and alpha can be set for layers whose name ends with a match of a
        regular expression."""
        rank = _find_pattern(self.rank_pattern, layer, default=self.r)
        alpha = _find_pattern(self.alpha_pattern, layer, default=self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


T = TypeVar("T")


def _find_pattern(patterns: Mapping[str, T], layer: str, *, default: T) -> T:
    """Return the value of the first regular expression in `patterns` that matches the end of a layer's name, else
    `default` (as peft's `get_pattern_key`)."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


@dataclass(frozen=True, slots=True)
class Delta:
    """LoRA factors A and B and the scale of one layer. The matrix scale x B A is added to the layer's weight."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    """Norm of each row of the changed weight (DoRA), or None for adapters without magnitudes."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA or DoRA adapter that was read from files in peft's format and checked."""

    directory: Path
    rank: int
    """Largest LoRA rank among the adapted layers."""
    deltas: dict[str, Delta]
    """LoRA factors of each adapted layer, by the layer's name in the base model."""
    replaced: dict[str, Tensor]
    """Parameters that replace those of the base model because they were trained completely, such as a critic's head."""

    @property
    def has_magnitudes(self) -> bool:
        """Whether this is a DoRA adapter."""
        return any(delta.magnitude_O is not None for delta in self.deltas.values())


def is_adapter(directory: Path) -> bool:
    """Return whether a directory contains a LoRA adapter and not a complete model."""
    return (directory / SETTINGS).is_file() and not (directory / "config.json").is_file()


def find_base(directory: Path) -> Path:
    """Return the directory of an adapter's base model. The adapter's settings name it by an absolute or relative path,
    or by its name on the Hugging Face Hub.

    Raises BadInput if this is not a model directory.
    """
    base_name = _read_settings(directory).base_model_name_or_path
    base = directory / (base_name or "")
    if not (base / "config.json").is_file():
        base = find_hub_base(directory, recorded_base(directory)) or base
    if not base_name or not (base / "config.json").is_file():
        raise BadInput(
            f"adapter {directory}: base_model_name_or_path in {SETTINGS} must be the path of the base model's "
            f"directory, or the name of a model on the Hugging Face Hub, but it is {base_name!r}. Correct it, or "
            "download the base model"
        )
    return base.resolve()


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter in peft's format from its directory. Raises BadInput if it is neither LoRA nor rsLoRA nor DoRA,
    or if its files cannot be read."""
    settings = _read_settings(directory)
    if unsupported := settings.find_unsupported():
        raise BadInput(
            f"adapter {directory}: {SETTINGS} sets {', '.join(unsupported)}, but only LoRA, rsLoRA and DoRA adapters "
            "are read. Merge the adapter into its base with peft (merge_and_unload), and use the merged model."
        )
    read_header(directory / TENSORS, where=f"adapter {directory}")
    tensors = load_file(directory / TENSORS)
    tensors_by_name = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    layers = [name.removesuffix(_A) for name in tensors_by_name if name.endswith(_A)]
    if unpaired := [name for name in layers if f"{name}{_B}" not in tensors_by_name]:
        raise BadInput(
            f"adapter {directory}: the layer {unpaired[0]} has a matrix A but no matrix B. Save the adapter again "
            "with peft"
        )
    with_magnitudes = {name.removesuffix(MAGNITUDE) for name in tensors_by_name if name.endswith(MAGNITUDE)}
    if with_magnitudes != (set(layers) if settings.use_dora else set()):
        raise BadInput(
            f"adapter {directory}: {SETTINGS} sets use_dora = {settings.use_dora}, but {len(with_magnitudes)} of "
            f"{len(layers)} layers have magnitudes. Save the adapter again with peft"
        )
    try:
        scales = {name: settings.scale(name) for name in layers}
    except re.error as error:
        raise BadInput(
            f"adapter {directory}: a pattern in {SETTINGS} is not a valid regular expression: {error}"
        ) from error
    return Adapter(
        directory=directory,
        rank=max([settings.r, *settings.rank_pattern.values()]),
        deltas={
            name: Delta(
                a_RI=tensors_by_name[f"{name}{_A}"],
                b_OR=tensors_by_name[f"{name}{_B}"],
                scale=scales[name],
                magnitude_O=tensors_by_name.get(f"{name}{MAGNITUDE}"),
            )
            for name in layers
        },
        replaced={name: tensor for name, tensor in tensors_by_name.items() if not name.endswith((_A, _B, MAGNITUDE))},
    )


def check_fits(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise BadInput if an adapter does not fit the layers of a model. The model may be on the `meta` device."""
    embeddings = model.get_input_embeddings().weight if isinstance(model, PreTrainedModel) else None
    for name, delta in adapter.deltas.items():
        layer = _find_layer(model, name)
        if layer is None or layer.weight is embeddings:
            raise BadInput(
                f"adapter {adapter.directory}: the base model has no linear layer {name} with separate weights, which "
                "the adapter changes. Use the base model with which the adapter was trained"
            )
        shape_OI = (delta.b_OR.shape[0], delta.a_RI.shape[1])
        base_OI = tuple(layer.weight.shape)[:: -1 if isinstance(layer, Conv1D) else 1]
        if base_OI != shape_OI:
            raise BadInput(
                f"adapter {adapter.directory}: the adapter of {name} is for weights of shape {shape_OI}, but those of "
                f"the base model have the shape {base_OI}. Use the base model with which the adapter was trained"
            )
        if delta.magnitude_O is not None and delta.magnitude_O.shape != shape_OI[:1]:
            raise BadInput(
                f"adapter {adapter.directory}: the magnitudes of {name} have the shape "
                f"{tuple(delta.magnitude_O.shape)}, but the layer has {shape_OI[0]} outputs. Use the base model with "
                "which the adapter was trained"
            )
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    for name, tensor in adapter.replaced.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise BadInput(
                f"adapter {adapter.directory}: {name} has the shape {tuple(tensor.shape)}, but in the base model it "
                f"has {shapes.get(name)}. Use the base model with which the adapter was trained"
            )


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """Add an adapter to a float32 model on the CPU, and return the parameters that changed, by name. Raises BadInput if
    the adapter does not fit.

    Each changed weight is `W + scale * (B @ A)`, all in float32. With DoRA, each of its rows is then divided by its
    norm and multiplied by its magnitude. If a layer stores its weight as inputs x outputs, the product is transposed.
    The same files always give the same bits.
    """
    check_fits(model, adapter)
    changed = dict(_iter_merged(model, adapter))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in changed.items():
        parameters[name].copy_(value)
    return {name: parameters[name] for name in changed}


def load_merged(
    base: Path, adapter: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load a base model and add an adapter. The sum is computed in float32 on the CPU and then cast to `dtype`."""
    wide = load_policy(base)
    changed = merge(wide, read_adapter(adapter))
    if dtype == torch.float32:
        return wide.to(device)
    # Loaded twice, so that unchanged parameters are exactly those that loading in this precision gives.
    model = load_policy(base, device=device, dtype=dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in changed.items():
            parameters[name].copy_(value.to(parameters[name].dtype))
    return model


def _iter_merged(model: PreTrainedModel, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for name, delta in adapter.deltas.items():
        layer = _find_layer(model, name)
        assert layer is not None, "a fitting adapter contains only existing layers"
        yield f"{name}.weight", _apply_delta(layer.weight, delta, layer=layer)
    yield from adapter.replaced.items()


def add_adapter(weight: Tensor, name: str, *, adapter: Adapter, model: PreTrainedModel) -> Tensor:
    """Return the base model's parameter `name` with the adapter applied. `weight` is its stored value, and `model` may
    be on the `meta` device. The sum is float32. A parameter that the adapter replaces or does not change is returned in
    the precision in which it is stored."""
    layer = name.removesuffix(".weight")
    if name in adapter.replaced:
        return adapter.replaced[name]
    if layer not in adapter.deltas:
        return weight
    module = _find_layer(model, layer)
    assert module is not None, "a fitting adapter contains only existing layers"
    return _apply_delta(weight.float(), adapter.deltas[layer], layer=module)


def _apply_delta(weight: Tensor, delta: Delta, *, layer: nn.Linear | Conv1D) -> Tensor:
    """Return the float32 weight of a layer plus scale x B A. The product is transposed if the layer stores its weight
    as inputs x outputs. With DoRA, return m (W + scale x B A) / ||W + scale x B A||, where the norm is that of the
    weights of one output (arXiv 2402.09353, eq. 5)."""
    delta_OI = delta.scale * (delta.b_OR.float() @ delta.a_RI.float())
    is_transposed = isinstance(layer, Conv1D)
    changed = weight + (delta_OI.T if is_transposed else delta_OI)
    if delta.magnitude_O is None:
        return changed
    norms: Tensor = torch.linalg.vector_norm(changed, dim=0 if is_transposed else 1, keepdim=True)
    return delta.magnitude_O.float().view_as(norms) / norms * changed


def _find_layer(model: PreTrainedModel, name: str) -> nn.Linear | Conv1D | None:
    layer = dict(model.named_modules()).get(name)
    return layer if isinstance(layer, nn.Linear | Conv1D) else None


def _read_settings(directory: Path) -> AdapterSettings:
    try:
        return AdapterSettings.model_validate(json.loads((directory / SETTINGS).read_text()))
    except (OSError, ValueError, ValidationError) as error:
        raise BadInput(
            f"adapter {directory}: {SETTINGS} is not a valid configuration of peft: {' '.join(str(error).split())}. "
            "Save the adapter again with peft"
        ) from error
