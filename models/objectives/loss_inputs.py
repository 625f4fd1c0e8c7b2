"""Inputs and outputs of policy losses, and the sums from which training metrics are computed."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Data about the completion tokens of a micro-batch that is known before the forward pass.

    Shapes: N completion tokens of the micro-batch, B sequences.
    """

    behavior_N: Tensor
    """Log-probs under the policy that generated the tokens, as its engine reported them."""
    advantages_N: Tensor
    """Advantage of each token."""
    staleness_N: Tensor
    """Age of each token: number of versions between the policy that generated it and the policy in training."""
    weights_N: Tensor
    """Weight of each token in the loss of the whole minibatch. 0 for tokens that are too stale."""
    rows_N: Tensor
    """Index of each token's sequence in the micro-batch, ascending. Sequences are never split over micro-batches."""
    lengths_B: Tensor
    """Number of completion tokens of each sequence."""
    old_N: Tensor | None
    """Log-probs before the first optimizer step of the iteration. None in the first step, because its forward pass
    computes them."""
    reference_N: Tensor | None
    """Log-probs under the reference policy, or None without a KL penalty."""
    kl_N: Tensor | None = None
    """Divergence from the reference if it can be computed exactly, as for denoising steps. Else None."""

    def at(self, places_C: Tensor) -> Self:
        """Return the inputs of the tokens with the indices `places_C`, for losses that treat each token independently.

        `lengths_B` still describes all tokens.
        """
        names = ("behavior_N", "advantages_N", "staleness_N", "weights_N", "rows_N", "old_N", "reference_N", "kl_N")
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[places_C] for name, value in present.items()})


class LossOutputs(NamedTuple):
    """Outputs of a policy loss for each token."""

    loss_N: Tensor
    """Loss of each token."""
    ratio_N: Tensor
    """Ratio π / π_old of each token, or of its sequence if the loss compares whole sequences. Has no gradient."""
    clipped_low_N: Tensor
    """Whether the lower bound takes effect for each token: its ratio is below the bound, so its gradient is 0 or its
    weight is the bound."""
    clipped_high_N: Tensor
    """Whether the upper bound takes effect for each token: its ratio is above the bound, so its gradient is 0 or its
    weight is the bound."""
    dual_clipped_N: Tensor | None = None
    """Whether the gradient of each token is 0 because of the dual clip. None if the loss has no dual clip."""


class LossFunction(Protocol):
    """Pure function that computes the policy loss of one kind for each token. Its gradient flows only through
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
        """Return the loss of each token. `logprobs_N` are the policy's log-probs, `old_N` those in the denominator of
        the ratio."""
        ...


class MetricSums:
    """Running sums and maxima of training metrics, kept on the device.

    Nothing is copied to the host until the end, so no forward pass waits for a metric.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the elements of each tensor to the running sum with the same name. Tensors may be empty."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, values: dict[str, Tensor]) -> None:
        """Update the running maximum with the same name by the largest element of each tensor. Maxima start at 0."""
        for name, value in values.items():
            maximum = torch.nn.functional.pad(value.detach().double(), (1, 0)).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], maximum) if name in self._maxima else maximum

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the sums and the maxima as two vectors, so that two reductions over ranks are enough.

        Every rank must have added the same names in the same order.
        """
        return torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))

    def unpacked(self, sums: Tensor, maxima: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums and maxima by name, given the two vectors after the reduction."""
        return (
            dict(zip(self._sums, sums.tolist(), strict=True)),
            dict(zip(self._maxima, maxima.tolist(), strict=True)),
        )
