"""Loading of a model for training: each parameter is stored in the dtype of the update as soon as it is read, and under
ZeRO-3 only as the shard of this rank.

Everything else is loaded as in float32: buffers, such as rotary frequencies, keep their precision.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import transformers.core_model_loading
import transformers.modeling_utils
from torch import nn
from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of the update, keyed by their names in the configuration."""
Shard = Callable[[nn.Parameter], None]
"""Function that replaces the values of a parameter by the part that this rank stores. It does nothing if the parameter
is already sharded. No communication takes place."""


@dataclass(frozen=True, slots=True)
class ParameterStorage:
    """Storage of the parameters of a model that is loaded for training."""

    dtype: torch.dtype
    """Dtype of the update."""
    device: torch.device
    """Device of this rank, to which the model is moved."""
    shard: Shard | None = None
    """Function that shards a parameter (ZeRO-3), or None if every rank stores whole parameters."""
    on_any_rank: Callable[[bool], bool] = bool
    """Function that returns whether a flag is true on at least one of the ranks that load the model together.
    Collective if parameters are sharded."""

    @property
    def changes_parameters(self) -> bool:
        """Whether parameters are stored in another way than as whole float32 tensors."""
        return self.dtype != torch.float32 or self.shard is not None

    def store(self, parameter: nn.Parameter) -> None:
        """Cast a parameter with values to the dtype of the update, and shard it if ranks store shards."""
        _cast_parameter(parameter, self.dtype)
        if self.shard is not None:
            self.shard(parameter)

    def finish(self, model: Module) -> Module:
        """Cast and shard the parameters of a loaded model that were not yet, and move the model to the device."""
        for parameter in model.parameters():
            self.store(parameter)
        return model.to(self.device)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a module to `dtype` one by one, except integers. Buffers, such as rotary frequencies, stay
    as they are."""
    for parameter in module.parameters():
        _cast_parameter(parameter, dtype)


def _cast_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.is_floating_point() and parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)


@contextmanager
def store_parameters_as(storage: ParameterStorage) -> Iterator[None]:
    """Run the block with transformers storing the parameters of the model that it loads as `storage` describes.
    `lock_model_construction` must be active, because functions of transformers are replaced, which has no other hook.

    The model is still built in float32. Its parameters are empty at first. If they are cast then, transformers reads
    the files in the new dtype. This gives the same bits as a cast afterwards, since conversions of stored weights only
    move values.
    """
    loading, utils = transformers.core_model_loading, transformers.modeling_utils
    convert, set_parameter, materialize = (
        utils.convert_and_load_state_dict_in_model,
        loading.set_param_for_module,
        loading.spawn_materialize,
    )

    thread = threading.get_ident()  # another thread may load a model that is not under training

    def convert_narrowly(model: PreTrainedModel, *args: Any, **options: Any) -> Any:  # noqa: ANN401 -- passed on
        if threading.get_ident() == thread:
            cast_parameters(model, storage.dtype)
        return convert(model, *args, **options)

    def set_and_shard(model: PreTrainedModel, name: str, *args: Any) -> None:  # noqa: ANN401
        set_parameter(model, name, *args)
        if threading.get_ident() != thread:
            return
        if name not in _tied_names(model) and (parameter := _find_parameter(model, name)) is not None:
            storage.store(parameter)

    def materialize_when_needed(pool: object, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        # Threads would read tensors before the earlier ones are sharded, and keep memory that is freed later.
        return materialize(None, *args, **options)

    utils.convert_and_load_state_dict_in_model = convert_narrowly
    loading.spawn_materialize = materialize_when_needed
    if storage.shard is not None:
        loading.set_param_for_module = set_and_shard
    try:
        yield
    finally:
        utils.convert_and_load_state_dict_in_model = convert
        loading.set_param_for_module, loading.spawn_materialize = set_parameter, materialize


def _tied_names(model: PreTrainedModel) -> Collection[str]:
    """Return the names of parameters that may be tied. transformers compares their values after loading, so they are
    sharded at the end."""
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {*pairs, *pairs.values()}


def _find_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter of this name if it has values, or None if it is a buffer or its stored size was wrong."""
    module, _, last = name.rpartition(".")
    parameter = model.get_submodule(module)._parameters.get(last)
    return None if parameter is None or parameter.device.type == "meta" else parameter
