"""Configuration of the methods that merge policies. Torch-free."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import Variant

SUM_ERROR: Final = 1e-6
"""Maximum difference between 1 and the sum of the weights of a merge. A larger difference is refused."""

Density = Annotated[float, Field(gt=0, le=1)]
"""Type of a fraction of parameters that a merge keeps."""


class MergeMethod(Variant):
    """Members common to all merge methods. `implementation` names a
    `rheostat.models.modeling.merge_methods.MergeTensor`, which merges one tensor of the policies."""

    num_parents: ClassVar[int | None] = None
    """Required number of policies, or None if any number can be merged."""

    @property
    def base_path(self) -> ModelLocation | None:
        """Model from which the differences of the policies are computed, or None if the method needs no base model."""
        return None

    def find_weights_conflict(self, weights: Sequence[float]) -> str | None:
        """Return the reason why policies cannot be merged with these weights, or None if the weights are valid."""
        if self.num_parents not in {None, len(weights)}:
            return f"method {self.label!r} merges exactly {self.num_parents} policies, but {len(weights)} are given"
        return self._find_sum_conflict(weights)

    def _find_sum_conflict(self, weights: Sequence[float]) -> str | None:
        total = math.fsum(weights)
        if abs(total - 1) <= SUM_ERROR:
            return None
        terms = " + ".join(f"{weight:g}" for weight in weights)
        return f"weights must sum to 1, or all weights that the parents share would be scaled, but {terms} = {total:g}"


class LinearMerge(MergeMethod):
    """Weighted sum of the policies (model soups, arXiv 2203.05482)."""

    implementation = "rheostat.models.modeling.merge_methods:merge_linear"

    kind: Literal["linear"] = "linear"


class SlerpMerge(MergeMethod):
    """Spherical linear interpolation between two policies, tensor by tensor. The weight of the second policy is the
    position t on the arc from the first policy (t = 0) to the second (t = 1)."""

    implementation = "rheostat.models.modeling.merge_methods:merge_slerp"
    num_parents = 2

    kind: Literal["slerp"] = "slerp"


class TaskVectorMerge(MergeMethod):
    """Settings common to the methods that merge task vectors, which are the differences between the policies and a base
    model."""

    base: ModelLocation
    """Model from which the policies were trained: a directory, or a name on the Hugging Face Hub. The merged task
    vectors are added to this model."""

    @property
    def base_path(self) -> ModelLocation | None:
        """Model from which the differences of the policies are computed."""
        return self.base


class TiesMerge(TaskVectorMerge):
    """TIES (arXiv 2306.01708): keeps the largest differences of each policy, elects a sign for each parameter, and
    averages the differences with this sign. Weights are relative and must be above 0."""

    implementation = "rheostat.models.modeling.merge_methods:merge_ties"

    kind: Literal["ties"] = "ties"
    density: Density = 0.2
    """Fraction of the differences of each tensor that are kept, namely the largest ones. The others become 0."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor λ by which the merged differences are multiplied before they are added to the base model."""

    def _find_sum_conflict(self, weights: Sequence[float]) -> str | None:
        if min(weights) > 0:
            return None
        return f"method 'ties' divides by the weights, so each weight must be above 0, but one is {min(weights):g}"


class _DareMerge(TaskVectorMerge):
    density: Density = 0.5
    """Probability with which a difference is kept (1 - p for the drop rate p of the paper). Kept differences are
    divided by this probability, so that their expected value does not change."""
    seed: int = 0
    """Seed of the random choice of the differences that are kept."""

    def _find_sum_conflict(self, weights: Sequence[float]) -> str | None:
        return None


class DareLinearMerge(_DareMerge):
    """DARE (arXiv 2311.03099): drops random differences, rescales the others, and adds their weighted sum to the base
    model. Weights may have any sum."""

    implementation = "rheostat.models.modeling.merge_methods:merge_dare_linear"

    kind: Literal["dare_linear"] = "dare_linear"


class DareTiesMerge(_DareMerge):
    """DARE (arXiv 2311.03099) with the sign election of TIES (arXiv 2306.01708): drops random differences, rescales the
    others, and adds the weighted sum of the differences that have the elected sign. Weights may have any sum."""

    implementation = "rheostat.models.modeling.merge_methods:merge_dare_ties"

    kind: Literal["dare_ties"] = "dare_ties"


MergeMethodConfig = Annotated[
    LinearMerge | SlerpMerge | TiesMerge | DareLinearMerge | DareTiesMerge, Field(discriminator="kind")
]
