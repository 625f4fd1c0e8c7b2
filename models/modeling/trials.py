"""Weights in trials: short forward passes that find out how a model computes, before it is trained.

A trial compares numbers with narrow tolerances, so its result must not depend on the dtype in which weights are loaded.
Inside `float32_trials`, a module's parameters are read in float32, one tensor at a time. Parameters that ZeRO-3 shards
over the ranks are gathered when they are read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rheostat.models.modeling.trunk import find_trunk

KEPT_TENSORS: Final = 2
"""Number of tensors that are kept at a time. The tokens of an expert alternate between two parameters that hold
all experts of a layer."""
_DTYPE: Final = ContextVar[torch.dtype | None]("_DTYPE", default=None)


@contextmanager
def trials_in(dtype: torch.dtype) -> Iterator[None]:
    """Run the block with trials that compute in `dtype`, whatever the dtype of the weights. Collective if the weights
    are sharded: every rank must then run the same trials."""
    token = _DTYPE.set(dtype)
    try:
        yield
    finally:
        _DTYPE.reset(token)


def float32_trials() -> AbstractContextManager[None]:
    """Return a context with trials that compute in float32, like `trials_in`."""
    return trials_in(torch.float32)


@contextmanager
def trial_weights(model: nn.Module) -> Iterator[None]:
    """Run the block, which is a trial of this model. Inside `trials_in`, modules read their parameters in the dtype of
    the trials. Otherwise they read them as they are."""
    dtype = _DTYPE.get()
    if dtype is None or all(each.dtype == dtype and not is_sharded(each) for each in model.parameters()):
        yield
        return
    read = _Reader(dtype)
    before = [(module, module._parameters) for module in model.modules() if module._parameters]
    for module, parameters in before:
        module._parameters = _ReadParameters(parameters, read)
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters = parameters


def computes_in_float32(model: PreTrainedModel) -> bool:
    """Return whether the trials of a model can compute in float32, although its weights have another dtype or are
    sharded. This is false if a module reads a parameter in another way than as an attribute of a module."""
    with float32_trials(), trial_weights(model):
        return _find_states_dtype(model, use_cache=False) == torch.float32


def allows_float32_trials(model: PreTrainedModel) -> bool:
    """Return whether trials of a model on the `meta` device could compute in float32 if its weights were stored in
    bfloat16. Also return true if the model cannot run on the `meta` device, because this is no evidence against it."""
    if _find_states_dtype(model, use_cache=True) is None:  # without a cache, most classes read values
        return True
    before = [(parameter, parameter.data) for parameter in model.parameters() if parameter.is_floating_point()]
    for parameter, values in before:
        parameter.data = values.bfloat16()
    try:
        with float32_trials(), trial_weights(model):
            return _find_states_dtype(model, use_cache=True) == torch.float32
    finally:
        for parameter, values in before:
            parameter.data = values


@torch.no_grad()
def _find_states_dtype(model: PreTrainedModel, *, use_cache: bool) -> torch.dtype | None:
    """Return the dtype of a model's last hidden states, or None if the forward pass fails."""
    tokens_BT = torch.tensor([[0, 1, 2]], device=model.device)
    try:
        states: Tensor = find_trunk(model)(input_ids=tokens_BT, use_cache=use_cache).last_hidden_state
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError):
        return None
    return states.dtype


def trial_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which the trials of a model compute."""
    return _DTYPE.get() or model.dtype


def is_sharded(parameter: Tensor) -> bool:
    """Return whether the values of a parameter are sharded over the ranks by ZeRO-3."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter. The parameter itself is empty if it is sharded over the ranks."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class _Reader:
    """Function that returns the values of a parameter in a dtype, and keeps those of the latest parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._kept = dtype, dict[int, Tensor]()

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        """Return the values of a parameter. Collective if the parameter is sharded and not kept."""
        if id(parameter) not in self._kept:
            if len(self._kept) == KEPT_TENSORS:
                del self._kept[next(iter(self._kept))]
            self._kept[id(parameter)] = _read(parameter, self._dtype)
        return self._kept[id(parameter)]


class _ReadParameters(dict[str, nn.Parameter | None]):
    """Parameters of one module. If the module reads a parameter, it gets the result of a function of this parameter."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._read(parameter)  # type: ignore[return-value]


def _read(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return the values of a parameter in `dtype`, except integers. Collective if the parameter is sharded."""
    wanted = dtype if parameter.is_floating_point() else parameter.dtype
    if not is_sharded(parameter):
        return parameter.detach().to(wanted)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().to(wanted, copy=True)
