"""Inputs and outputs of policy losses, and the sums from which training metrics are computed."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Data about the completion tokens of a micro-batch that are known before the forward pass. Shapes: N completion
    tokens of the micro-batch, B sequences."""

    behavior_N: Tensor
    """Log-prob of each token under the policy that generated it, as reported by the inference engine."""
    advantages_N: Tensor
    """Advantage of each token."""
    staleness_N: Tensor
    """Age of each token in policy versions: the version in training minus the version that generated the token."""
    weights_N: Tensor
    """Weight of each token in the loss of the whole minibatch. The weight is 0 for tokens that are too stale."""
    rows_N: Tensor
    """Index of each token's sequence within the micro-batch, ascending. A sequence is never split over
    micro-batches."""
    lengths_B: Tensor
    """Number of completion tokens of each sequence."""
    old_N: Tensor | None
    """Trainer's log-probs from before the first optimizer step of the iteration. None in the first step, because its
    own forward pass computes them."""
    reference_N: Tensor | None
    """Log-probs under the reference policy, or None if there is no KL penalty in the loss."""
    kl_N: Tensor | None = None
    """KL divergence from the reference if it can be computed exactly, as for the denoising steps of diffusion policies.
    Otherwise None, and the divergence is estimated from log-probs."""
    selected_N: Tensor | None = None
    """Mask of the tokens that the loss has selected in the whole minibatch, or None if it selects no tokens."""
    outlier_N: Tensor | None = None
    """Whether the correction `second_moment` masks each token, because the token's log-ratio is among the largest of
    the minibatch. None if no token is masked."""
    low_entropy_N: Tensor | None = None
    """Whether `update.top_entropy` masks each token, because the policy's entropy at the token is below the threshold
    of the minibatch. None if no token is masked."""
    teacher_N: Tensor | None = None
    """KL divergence from the teacher at each token, which is part of the loss. None if there is no such part."""
    teacher_coefficient: float = 0.0
    """Factor of `teacher_N` in the loss."""
    positive_weights_N: Tensor | None = None
    """Weight of each token in the mean negative log-likelihood of the minibatch's correct completions. None if the loss
    does not contain this mean."""

    def at(self, places_C: Tensor) -> Self:
        """Return the inputs of the tokens with the indices `places_C` only, for losses that treat each token
        independently. `lengths_B` is unchanged and still counts all tokens."""
        known = ("behavior_N", "advantages_N", "staleness_N", "weights_N", "rows_N")
        optional = ("old_N", "reference_N", "kl_N", "selected_N", "outlier_N", "low_entropy_N", "teacher_N")
        names = (*known, *optional, "positive_weights_N")
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[places_C] for name, value in present.items()})


class LossOutputs(NamedTuple):
    """Outputs of a policy loss for each token."""

    loss_N: Tensor
    """Loss of each token, before it is weighted."""
    ratio_N: Tensor
    """Probability ratio π / π_old of each token. If the loss compares whole sequences, the ratio of the token's
    sequence. Has no gradient."""
    clipped_low_N: Tensor
    """Whether the ratio of each token is below the lower bound and the bound takes effect: the gradient is 0, or the
    token is weighted with the bound."""
    clipped_high_N: Tensor
    """Whether the ratio of each token is above the upper bound and the bound takes effect: the gradient is 0, or the
    token is weighted with the bound."""
    dual_clipped_N: Tensor | None = None
    """Whether the dual clip (a limit of the loss for negative advantages) sets the gradient of each token to 0. None if
    the loss has no dual clip."""


class LossFunction(Protocol):
    """Pure function that computes one kind of policy loss for each token. The loss has a gradient only with respect to
    `logprobs_N`."""

    def __call__(
        self,
        logprobs_N: Tensor,
        old_N: Tensor,
        /,
        *,
        tokens: LossInputs,
        config: Any,  # noqa: ANN401 -- the loss's own class
    ) -> LossOutputs:
        """Return the loss of each token. `logprobs_N` are the log-probs of the policy in training, `old_N` are the
        log-probs in the denominator of the ratio, and `config` contains the settings of the loss."""
        ...


class MetricSums:
    """Running sums and maxima of training metrics, kept on the device. Values are copied to the host only at the end of
    the update, so that no forward pass waits for a copy."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the sum of each tensor's elements to the running sum of the same name. Tensors may be empty."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, values: dict[str, Tensor]) -> None:
        """Raise the running maximum of the same name to the largest element of each tensor, if that is higher. Maxima
        start at 0."""
        for name, value in values.items():
            maximum = torch.nn.functional.pad(value.detach().double(), (1, 0)).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], maximum) if name in self._maxima else maximum

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the running sums and the running maxima as two vectors, so that one reduction over ranks is enough for
        each. Every rank must have added the same names in the same order."""
        return torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))

    def unpacked(self, sums: Tensor, maxima: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums and the maxima as dicts by metric name, given the vectors of `packed` after the reduction
        over ranks."""
        return (
            dict(zip(self._sums, sums.tolist(), strict=True)),
            dict(zip(self._maxima, maxima.tolist(), strict=True)),
        )
