"""Layouts of an optimizer's state under each ZeRO stage, and the conversion of a stored state to another layout.

Each rank stores its part as one vector, split into the tensors of its DeepSpeed engine. A layout defines which values
of which parameters the vector contains. A rank can therefore find its values in files that were written with another
layout, and reads only these values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from rheostat.infra.config import Settings

_ALIGNMENT: Final = 2
"""DeepSpeed's `nccl_start_alignment_factor`. ZeRO-1 and ZeRO-2 pad the vector of all parameters to a multiple of this
factor times the number of ranks."""
_STEP: Final = "step"
_VECTORS: Final = ("exp_avg", "exp_avg_sq", "master")


class StateLayout(Settings):
    """Settings that determine how an optimizer's state is divided among ranks."""

    world_size: int
    """Number of ranks among which the optimizer state is divided."""
    zero_stage: int
    """DeepSpeed's ZeRO stage (0 to 3), which determines whether optimizer state, gradients and weights are sharded over
    the ranks."""
    dtype: str
    """Data type of the model's weights: "float32" or "bfloat16"."""
    optimizer: str = "adamw"
    """Key of the optimizer in the configuration, such as "adamw" or "muon"."""


@dataclass(frozen=True, slots=True)
class _ParameterRange:
    """Contiguous range of the values of one parameter, with its offset in a rank's flat optimizer vector."""

    parameter: int
    begin: int
    end: int
    at: int
    """Offset of the range's first value in the rank's flat vector."""


def _iter_ranges(layout: StateLayout, sizes: Sequence[int], rank: int) -> Iterator[_ParameterRange]:
    """Yield the parameter ranges that are stored in a rank's flat optimizer vector, in order. Padding is skipped.
    `sizes` holds the number of values of each parameter."""
    at, count = 0, layout.world_size
    if layout.zero_stage == 3:
        for parameter, size in enumerate(sizes):
            share = ceil(size / count)
            yield _ParameterRange(parameter, min(size, rank * share), min(size, (rank + 1) * share), at)
            at += share
        return
    share = sum(sizes)
    if layout.zero_stage:
        share = ceil(share / (_ALIGNMENT * count)) * _ALIGNMENT
    first = rank * share if layout.zero_stage else 0
    for parameter, (size, before) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False)):
        begin, end = max(0, first - before), min(size, first + share - before)
        if begin < end:
            yield _ParameterRange(parameter, begin, end, before + begin - first)


@dataclass(frozen=True)
class _RankFile:
    """Safetensors file with one rank's part of an optimizer state, read range by range."""

    path: Path

    @cached_property
    def _spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Names of the stored tensors that form each flat vector (such as "exp_avg"), in order, with the begin and end
        offset of each tensor in the vector."""
        spans: dict[str, list[tuple[str, int, int]]] = {}
        with safe_open(self.path, framework="pt") as file:
            for name in sorted(file.keys(), key=lambda name: int(name.rpartition(".")[2])):
                vector = spans.setdefault(name.rpartition(".")[0], [])
                begin = vector[-1][2] if vector else 0
                vector.append((name, begin, begin + prod(file.get_slice(name).get_shape())))
        return spans

    def has(self, vector: str) -> bool:
        return vector in self._spans

    def steps(self) -> Tensor:
        """Return the number of optimizer steps taken, which is the same for every parameter."""
        with safe_open(self.path, framework="pt") as file:
            return torch.stack([file.get_tensor(name) for name, _, _ in self._spans[_STEP]]).max()

    def read(self, vector: str, begin: int, end: int) -> Tensor:
        """Return the values of a flat vector, such as "exp_avg", from offset `begin` up to, but excluding, `end`."""
        ranges = []
        with safe_open(self.path, framework="pt") as file:
            for name, first, last in self._spans[vector]:
                low, high = max(begin, first) - first, min(end, last) - first
                if low < high:
                    tensor = file.get_slice(name)
                    flat = len(tensor.get_shape()) == 1
                    ranges.append(tensor[low:high] if flat else file.get_tensor(name).flatten()[low:high])
        return torch.cat(ranges)


def convert_state(
    files: Sequence[Path],
    source: StateLayout,
    target: StateLayout,
    *,
    rank: int,
    sizes: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> Mapping[str, Tensor]:
    """Read this rank's part of an optimizer state that was written with another number of ranks or ZeRO stage. Returns
    tensors by name. `files` are the files of the layout `source`, in rank order. `target` is this run's layout. `sizes`
    contains the number of values of each trained parameter, in the engine's order. `shapes` contains the shapes of this
    rank's tensors."""
    parts = [_RankFile(path) for path in (files[:1] if source.zero_stage == 0 else files)]
    sources = [
        (part, {piece.parameter: piece for piece in _iter_ranges(source, sizes, r)}) for r, part in enumerate(parts)
    ]
    cuts = [prod(shape) for shape in shapes]
    moments = {f"{_STEP}.{index}": parts[0].steps() for index in range(len(shapes))}
    for vector in _VECTORS:
        if not parts[0].has(vector):
            continue
        values = torch.zeros(sum(cuts))
        for wants in _iter_ranges(target, sizes, rank):
            for part, ranges in sources:
                has = ranges.get(wants.parameter)
                if has is None or not (low := max(wants.begin, has.begin)) < (high := min(wants.end, has.end)):
                    continue
                values_of_range = part.read(vector, has.at + low - has.begin, has.at + high - has.begin)
                values[wants.at + low - wants.begin : wants.at + high - wants.begin] = values_of_range
        for index, (tensor, shape) in enumerate(zip(torch.split(values, cuts), shapes, strict=True)):
            moments[f"{vector}.{index}"] = tensor.view(*shape)
    return moments
