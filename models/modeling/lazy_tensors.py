"""Tensors whose values are computed when they are written, so that a sharded model is never gathered as a whole."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rheostat.infra.store.file_writer import FILES_AT_ONCE

GATHERED: Final = 2 * FILES_AT_ONCE
"""Number of gathered parameters that are kept at a time for one writing rank. In each of the files that a rank writes
at the same time, the tensors of an expert alternate between two parameters that hold all experts of a layer."""

Compute = Callable[[int], Tensor]
"""Function that computes a tensor for the rank with the given index, which writes it. On other ranks, the returned
tensor may be on the meta device, without values."""


class LazyTensor(Tensor):
    """Tensor on the meta device that knows how to compute its values. Torch functions of lazy tensors return lazy
    tensors. Functions that need the values to know the shape of their result are refused by the meta device."""

    outline: Tensor
    """Tensor on the meta device with the shape and dtype of this tensor."""
    compute: Compute
    """Function that returns a tensor with the values on the rank that writes the tensor."""

    @staticmethod
    def __new__(cls: type["LazyTensor"], outline: Tensor, compute: Compute) -> "LazyTensor":
        """Create a tensor like `outline`, whose values `compute` returns."""
        made: LazyTensor = Tensor._make_wrapper_subclass(
            cls, outline.shape, strides=outline.stride(), dtype=outline.dtype, device=torch.device("meta")
        )
        made.outline, made.compute = outline, compute
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks `func`
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Run a torch function on the outlines now, and on the values when a result is computed."""
        outlines, outline_options = tree_map_only(LazyTensor, lambda each: each.outline, (args, kwargs))
        result = func(*outlines, **outline_options)

        def compute(writer: int) -> object:
            values, options = tree_map_only(LazyTensor, lambda each: each.compute(writer), (args, kwargs))
            return func(*values, **options)

        if isinstance(result, Tensor):
            return LazyTensor(result, cast(Compute, compute))
        if isinstance(result, list | tuple):
            return [LazyTensor(part, partial(_compute_part, compute, place)) for place, part in enumerate(result)]
        return result


def _compute_part(compute: Callable[[int], object], place: int, writer: int) -> Tensor:
    return cast(Sequence[Tensor], compute(writer))[place]


def compute_values(tensor: Tensor, *, writer: int = 0) -> Tensor:
    """Return a tensor with values: the argument, or the computed values of a lazy tensor. `writer` is the rank that
    needs the values. Other ranks may get a tensor on the meta device."""
    return tensor.compute(writer) if isinstance(tensor, LazyTensor) else tensor


def build_lazy_state(model: nn.Module, gather: Callable[[nn.Parameter, int], Tensor]) -> Mapping[str, Tensor]:
    """Return the state of a model, like `state_dict`, with lazy tensors for the parameters. `gather` returns the values
    of a parameter for the rank with the given index. At most `GATHERED` parameters are kept at a time for each rank.
    All ranks that compute the same tensors in the same order call `gather` in the same order."""

    @cache
    def gather_for(writer: int) -> Callable[[nn.Parameter], Tensor]:
        return lru_cache(maxsize=GATHERED)(lambda parameter: gather(parameter, writer))

    parameters = dict(model.named_parameters(remove_duplicate=False))

    def build(name: str, value: Tensor) -> Tensor:
        parameter = parameters.get(name)
        if parameter is None:
            return value
        outline = torch.empty(getattr(parameter, "ds_shape", parameter.shape), dtype=parameter.dtype, device="meta")
        return LazyTensor(outline, lambda writer: gather_for(writer)(parameter))

    return {name: build(name, value) for name, value in model.state_dict().items()}
