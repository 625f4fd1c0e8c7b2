"""Policies stored as a base directory and an adapter directory: reading, checking and merging them into one model.

Shapes: R rank, I inputs and O outputs of a layer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from infra.errors import BadInput
from models.modeling.policy import load_policy
from models.modeling.weight_files import read_header

SETTINGS: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Prefix that peft writes before the names of the base model's modules."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdapterSettings(BaseModel):
    """Settings in peft's adapter_config.json that determine how an adapter changes its base."""

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


@dataclass(frozen=True, slots=True)
class Delta:
    """Factors of the matrix that is added to one layer: scale x B A."""

    a_RI: Tensor
    b_OR: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter in peft's format, read and checked."""

    directory: Path
    rank: int
    scale: float
    """alpha / rank."""
    deltas: dict[str, Delta]
    """Factors by the layer's name in the base."""
    replaced: dict[str, Tensor]
    """Parameters of the base that were trained in full, such as a critic's head."""


def is_adapter(directory: Path) -> bool:
    """Return whether a directory contains an adapter rather than a whole model."""
    return (directory / SETTINGS).is_file() and not (directory / "config.json").is_file()


def find_base(directory: Path) -> Path:
    """Return the directory of an adapter's base, which the adapter's settings name as an absolute or relative path.

    Raises BadInput if that is not a model directory.
    """
    base_name = _read_settings(directory).base_model_name_or_path
    base = directory / (base_name or "")
    if not base_name or not (base / "config.json").is_file():
        raise BadInput(
            f"adapter {directory}: base_model_name_or_path in {SETTINGS} must name a model directory, but it is "
            f"{base_name!r}"
        )
    return base.resolve()


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter. Raises BadInput if it is not plain LoRA or its files do not load."""
    settings = _read_settings(directory)
    other = {
        "peft_type": settings.peft_type != "LORA",
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
        "bias": settings.bias != "none",
        "rank_pattern": bool(settings.rank_pattern),
        "alpha_pattern": bool(settings.alpha_pattern),
    }
    if any(other.values()):
        raise BadInput(
            f"adapter {directory}: only plain LoRA with one rank is supported, but {SETTINGS} sets "
            f"{', '.join(name for name, is_set in other.items() if is_set)}"
        )
    read_header(directory / TENSORS, where=f"adapter {directory}")
    tensors = load_file(directory / TENSORS)
    tensors_by_name = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    layers = [name.removesuffix(_A) for name in tensors_by_name if name.endswith(_A)]
    if unpaired := [name for name in layers if f"{name}{_B}" not in tensors_by_name]:
        raise BadInput(f"adapter {directory}: {unpaired[0]} has a matrix A but no matrix B")
    return Adapter(
        directory=directory,
        rank=settings.r,
        scale=settings.lora_alpha / settings.r,
        deltas={
            name: Delta(a_RI=tensors_by_name[f"{name}{_A}"], b_OR=tensors_by_name[f"{name}{_B}"]) for name in layers
        },
        replaced={name: tensor for name, tensor in tensors_by_name.items() if not name.endswith((_A, _B))},
    )


def check_fits(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise BadInput if an adapter does not fit the model, which may be on the `meta` device."""
    embeddings = model.get_input_embeddings().weight if isinstance(model, PreTrainedModel) else None
    for name, delta in adapter.deltas.items():
        layer = _find_layer(model, name)
        if layer is None or layer.weight is embeddings:
            raise BadInput(f"adapter {adapter.directory}: its base has no linear layer {name} with separate weights")
        shape_OI = (delta.b_OR.shape[0], delta.a_RI.shape[1])
        base_OI = tuple(layer.weight.shape)[:: -1 if isinstance(layer, Conv1D) else 1]
        if base_OI != shape_OI:
            raise BadInput(
                f"adapter {adapter.directory}: {name} is for weights of shape {shape_OI}, but its base has {base_OI}"
            )
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    for name, tensor in adapter.replaced.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise BadInput(
                f"adapter {adapter.directory}: {name} is {tuple(tensor.shape)}, but its base has {shapes.get(name)}"
            )


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """Add an adapter to a float32 model on the CPU, and return the parameters that changed, by name.

    Each is `W + (alpha / rank) * (B @ A)`, all in float32. If a layer stores its weight as inputs x outputs, the
    product is transposed. The same expression on the same files gives the same bits. Raises BadInput if the adapter
    does not fit.
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
    """Load a policy's base and add its adapter, summed in float32 on the CPU and then cast to `dtype`."""
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
        yield f"{name}.weight", layer.weight + _compute_delta(adapter, delta, layer)
    yield from adapter.replaced.items()


def add_adapter(weight: Tensor, name: str, *, adapter: Adapter, model: PreTrainedModel) -> Tensor:
    """Return a parameter of the base after applying the adapter. The model may be on the `meta` device.

    The sum is float32. A parameter that the adapter replaces or leaves unchanged is returned in its stored precision.
    """
    layer = name.removesuffix(".weight")
    if name in adapter.replaced:
        return adapter.replaced[name]
    if layer not in adapter.deltas:
        return weight
    module = _find_layer(model, layer)
    assert module is not None, "a fitting adapter contains only existing layers"
    return weight.float() + _compute_delta(adapter, adapter.deltas[layer], module)


def _compute_delta(adapter: Adapter, delta: Delta, layer: nn.Linear | Conv1D) -> Tensor:
    """Return the matrix that is added to a layer's weight, in the orientation in which the layer stores its weight."""
    delta_OI = adapter.scale * (delta.b_OR.float() @ delta.a_RI.float())
    return delta_OI.T if isinstance(layer, Conv1D) else delta_OI


def _find_layer(model: PreTrainedModel, name: str) -> nn.Linear | Conv1D | None:
    layer = dict(model.named_modules()).get(name)
    return layer if isinstance(layer, nn.Linear | Conv1D) else None


def _read_settings(directory: Path) -> AdapterSettings:
    try:
        return AdapterSettings.model_validate(json.loads((directory / SETTINGS).read_text()))
    except (OSError, ValueError, ValidationError) as error:
        raise BadInput(f"adapter {directory}: {SETTINGS} is not peft's: {' '.join(str(error).split())}") from error
