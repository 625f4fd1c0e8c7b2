"""Methods that merge one tensor of several policies: linear, SLERP, TIES and DARE.

Each method works tensor by tensor in float32. TIES therefore keeps the largest differences of each tensor, as mergekit
does, and not those of the whole model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from rheostat.infra.variants import implementation_of
from rheostat.models.config.merging import (
    DareLinearMerge,
    DareTiesMerge,
    LinearMerge,
    MergeMethod,
    SlerpMerge,
    TiesMerge,
)
from rheostat.models.records.seeds import derive_seed

MAX_COSINE: Final = 0.9995
"""Cosine of the angle between two tensors above which SLERP interpolates linearly, as in mergekit."""
MIN_NORM: Final = 1e-8
"""Norm up to which SLERP treats a tensor as zero, as in mergekit. A zero tensor counts as orthogonal to every other."""


@dataclass(frozen=True, slots=True)
class TensorVersions:
    """One tensor of all policies that are merged. All versions have the same shape."""

    name: str
    """Name of the tensor in the weight files."""
    parents: Sequence[Tensor]
    """Values of the tensor in the policies, in the precision of their files."""
    weights: Sequence[float]
    """Weight of each policy."""
    base: Tensor | None = None
    """Value of the tensor in the base model, or None if the method needs no base model."""

    @property
    def float_base(self) -> Tensor:
        """Value of the tensor in the base model, in float32."""
        assert self.base is not None, "methods with task vectors have a base model"
        return self.base.float()

    def iterate_differences(self) -> Iterator[Tensor]:
        """Yield the task vector of each policy: its difference from the base model, in float32."""
        base = self.float_base
        for parent in self.parents:
            yield parent.float() - base


class MergeTensor(Protocol):
    """Function that merges one tensor of several policies. `merge_tensor` calls it. The same arguments give the same
    bits, whatever the order in which tensors are merged."""

    def __call__(self, method: Any, versions: TensorVersions, /) -> Tensor:  # noqa: ANN401 -- its own settings
        """Return the merged tensor in float32. `method` has the method's settings."""
        ...


def merge_tensor(method: MergeMethod, versions: TensorVersions, *, dtype: torch.dtype) -> Tensor:
    """Merge one tensor of several policies in float32, and cast the result to `dtype`. If the tensor is equal in all
    policies and the base model, only cast it. Raises ValueError if tensors differ that are not floating-point."""
    first, *others = [*versions.parents, *([] if versions.base is None else [versions.base])]
    if all(_is_same(first, other) for other in others):
        return first.to(dtype)
    if not first.is_floating_point():
        raise ValueError(
            f"a tensor of type {first.dtype} cannot be merged, so its values must be the same in every policy, but "
            "they differ"
        )
    return cast(MergeTensor, implementation_of(method))(method, versions).to(dtype)


def merge_linear(method: LinearMerge, versions: TensorVersions) -> Tensor:
    """Return the weighted sum Σ λ_i θ_i in the order of the policies (arXiv 2203.05482)."""
    return _sum_weighted(versions.parents, versions.weights)


def merge_slerp(method: SlerpMerge, versions: TensorVersions) -> Tensor:
    """Return the spherical linear interpolation of two tensors, each read as one vector: sin((1 − t) Ω) / sin Ω · θ_0 +
    sin(t Ω) / sin Ω · θ_1, in which Ω is the angle between θ_0 and θ_1 (Shoemake, "Animating rotation with quaternion
    curves", 1985). Vectors that are nearly parallel are interpolated linearly."""
    first, second = (tensor.float() for tensor in versions.parents)
    t = versions.weights[1]
    cosine = _inner_product(first, second) / (_norm_or_one(first) * _norm_or_one(second))
    if abs(cosine) > MAX_COSINE:
        return _sum_weighted((first, second), (1 - t, t))
    angle = np.arccos(cosine)
    factors = np.sin([(1 - t) * angle, t * angle]) / np.sin(angle)
    return _sum_weighted((first, second), factors.tolist())


def merge_ties(method: TiesMerge, versions: TensorVersions) -> Tensor:
    """Return θ_base + λ τ, in which τ is the disjoint mean of the trimmed task vectors (arXiv 2306.01708, algorithm 1):
    for each parameter, the weighted mean of the differences that have the sign of their weighted sum."""
    trimmed = [_trim(difference, method.density) for difference in versions.iterate_differences()]
    total, weight_sum = _sum_elected(trimmed, versions.weights)
    weight_sum[weight_sum == 0] = 1  # no difference was kept, so the total is 0
    return versions.float_base + total / weight_sum * method.scale


def merge_dare_linear(method: DareLinearMerge, versions: TensorVersions) -> Tensor:
    """Return θ_base + Σ λ_i δ_i, in which δ_i is a policy's task vector after drop and rescale (arXiv 2311.03099, eq. 1
    to 3)."""
    return versions.float_base + _sum_weighted(_drop_and_rescale(method, versions), versions.weights)


def merge_dare_ties(method: DareTiesMerge, versions: TensorVersions) -> Tensor:
    """Return θ_base + Σ λ_i δ_i, in which δ_i is a policy's task vector after drop and rescale (arXiv 2311.03099). For
    each parameter, the sum contains only the differences that have the sign of the whole weighted sum (arXiv
    2306.01708, section 3.2). As in mergekit, the sum is not divided by the sum of the weights."""
    total, _ = _sum_elected([*_drop_and_rescale(method, versions)], versions.weights)
    return versions.float_base + total


# ---- task vectors
def _trim(difference: Tensor, density: float) -> Tensor:
    """Return a task vector with only its largest absolute values, at least one. The number of values that are kept is
    rounded down. Of equal values, the first ones are kept."""
    if density == 1:
        return difference
    sizes_N = difference.abs().reshape(-1)
    num_kept = max(1, int(density * len(sizes_N)))
    place = len(sizes_N) - num_kept
    threshold = np.partition(sizes_N.numpy(), place)[place]
    is_kept_N = sizes_N > threshold
    ties = (sizes_N == threshold).nonzero().squeeze(1)
    is_kept_N[ties[: num_kept - int(is_kept_N.sum())]] = True
    return difference.where(is_kept_N.reshape(difference.shape), 0.0)


def _drop_and_rescale(method: DareLinearMerge | DareTiesMerge, versions: TensorVersions) -> Iterator[Tensor]:
    """Yield each task vector with random values set to 0 and the others divided by the density. The random choice
    depends only on the seed, the name of the tensor and the position of the policy."""
    for place, difference in enumerate(versions.iterate_differences()):
        if method.density == 1:
            yield difference
            continue
        generator = torch.Generator().manual_seed(derive_seed("dare", method.seed, versions.name, place) >> 1)
        is_kept = torch.rand(difference.shape, generator=generator) < method.density
        yield difference.where(is_kept, 0.0) / method.density


def _sum_elected(differences: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return, for each parameter, the weighted sum of the differences that have the elected sign, and the sum of their
    weights. The elected sign is the sign of the weighted sum of all differences."""
    is_positive = _sum_weighted(differences, weights) >= 0
    total = torch.zeros(is_positive.shape)
    weight_sum = torch.zeros(is_positive.shape)
    for difference, weight in zip(differences, weights, strict=True):
        product = difference * weight
        agrees = torch.where(is_positive, product > 0, product < 0)
        total += product * agrees
        weight_sum += agrees * weight
    return total, weight_sum


# ---- arithmetic
def _sum_weighted(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of tensors in float32, in the given order."""
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        total = torch.zeros(tensor.shape, dtype=torch.float32) if total is None else total
        total += tensor.float() * weight
    assert total is not None, "a merge has at least one policy"
    return total


def _inner_product(first: Tensor, second: Tensor) -> float:
    return float((first * second).sum(dtype=torch.float64))


def _norm_or_one(tensor: Tensor) -> float:
    norm = _inner_product(tensor, tensor) ** 0.5
    return norm if norm > MIN_NORM else 1.0


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, bit for bit."""
    if one.dtype != other.dtype:
        return False
    bytes_of = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(*bytes_of))
