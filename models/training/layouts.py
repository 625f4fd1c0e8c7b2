"""Where each ZeRO stage keeps an optimizer's state, and how it comes to other ranks or to another stage.

A rank's part is one vector, cut into its engine's tensors. A layout says which values of which parameters the vector
has; so a rank of any layout finds its values in the files of another one, and reads only those.
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

from infra.config import Settings

_ALIGNMENT: Final = 2
"""DeepSpeed's `nccl_start_alignment_factor`: of the vector that ZeRO-1 and 2 cut, for each rank."""
_STEP: Final = "step"
_VECTORS: Final = ("exp_avg", "exp_avg_sq", "master")


class StateLayout(Settings):
    """How a state is spread over ranks."""

    world_size: int
    """Ranks that share it."""
    zero_stage: int
    """DeepSpeed's stage."""
    dtype: str
    """Precision of the weights."""
    optimizer: str = "adamw"
    """Whose state it is."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive values of one parameter in a rank's vector."""

    parameter: int
    begin: int
    end: int
    at: int
    """Place of the first one in the vector."""


def _pieces(layout: StateLayout, sizes: Sequence[int], rank: int) -> Iterator[_Piece]:
    """What a rank's vector consists of, in order; padding is in no piece. `sizes` are those of the parameters."""
    at, count = 0, layout.world_size
    if layout.zero_stage == 3:
        for parameter, size in enumerate(sizes):
            share = ceil(size / count)
            yield _Piece(parameter, min(size, rank * share), min(size, (rank + 1) * share), at)
            at += share
        return
    share = sum(sizes)
    if layout.zero_stage:
        share = ceil(share / (_ALIGNMENT * count)) * _ALIGNMENT
    first = rank * share if layout.zero_stage else 0
    for parameter, (size, before) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False)):
        begin, end = max(0, first - before), min(size, first + share - before)
        if begin < end:
            yield _Piece(parameter, begin, end, before + begin - first)


@dataclass(frozen=True)
class _Part:
    """A rank's file of a state."""

    path: Path

    @cached_property
    def _spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Tensors of each vector, in order, with where they begin and end in it."""
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
        """Optimizer steps that were taken; every parameter took them."""
        with safe_open(self.path, framework="pt") as file:
            return torch.stack([file.get_tensor(name) for name, _, _ in self._spans[_STEP]]).max()

    def read(self, vector: str, begin: int, end: int) -> Tensor:
        """Values from one place of a vector to another."""
        found = []
        with safe_open(self.path, framework="pt") as file:
            for name, first, last in self._spans[vector]:
                low, high = max(begin, first) - first, min(end, last) - first
                if low < high:
                    tensor = file.get_slice(name)
                    flat = len(tensor.get_shape()) == 1
                    found.append(tensor[low:high] if flat else file.get_tensor(name).flatten()[low:high])
        return torch.cat(found)


def respread(
    files: Sequence[Path],
    found: StateLayout,
    wanted: StateLayout,
    *,
    rank: int,
    sizes: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> Mapping[str, Tensor]:
    """Return a rank's part of a state in the layout that is wanted, from the files of another, by rank.

    `sizes` are those of the trained parameters in the engine's order, `shapes` those of the rank's own tensors.
    """
    parts = [_Part(path) for path in (files[:1] if found.zero_stage == 0 else files)]
    sources = [(part, {piece.parameter: piece for piece in _pieces(found, sizes, r)}) for r, part in enumerate(parts)]
    cuts = [prod(shape) for shape in shapes]
    moments = {f"{_STEP}.{index}": parts[0].steps() for index in range(len(shapes))}
    for vector in _VECTORS:
        if not parts[0].has(vector):
            continue
        values = torch.zeros(sum(cuts))
        for wants in _pieces(wanted, sizes, rank):
            for part, pieces in sources:
                has = pieces.get(wants.parameter)
                if has is None or not (low := max(wants.begin, has.begin)) < (high := min(wants.end, has.end)):
                    continue
                taken = part.read(vector, has.at + low - has.begin, has.at + high - has.begin)
                values[wants.at + low - wants.begin : wants.at + high - wants.begin] = taken
        for index, (tensor, shape) in enumerate(zip(torch.split(values, cuts), shapes, strict=True)):
            moments[f"{vector}.{index}"] = tensor.view(*shape)
    return moments
