"""Inputs and outputs of policy losses, and the sums from which training metrics are computed."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Data about the completion tokens of a micro-batch that are known before the forward pass.

    Shapes: N completion tokens of the micro-batch, B sequences.
    """

    behavior_N: Tensor
    """Log-probs under the policy that generated the tokens, as its engine reported them."""
    advantages_N: Tensor
    """Advantages of the tokens."""
    staleness_N: Tensor
    """Number of policy versions between the generation of each token and this update."""
    weights_N: Tensor
    """Weight of each token in the loss of the whole minibatch. 0 for tokens that are too stale."""
    rows_N: Tensor
    """Index of each token's sequence in the micro-batch, ascending. A sequence is never split over micro-batches."""
    lengths_B: Tensor
    """Number of completion tokens of each sequence."""
    old_N: Tensor | None
    """Log-probs before the first optimizer step. None in the first step, in which the forward pass computes them."""
    reference_N: Tensor | None
    """Log-probs under the reference policy. None without a KL penalty."""
    kl_N: Tensor | None = None
    """Divergence from the reference if it is known in closed form, as for denoising steps. None otherwise."""

    def at(self, places_C: Tensor) -> Self:
        """Return the inputs of some tokens, for losses that treat each token independently.

        `places_C` are the indices of the tokens. `lengths_B` still describes all tokens.
        """
        names = ("behavior_N", "advantages_N", "staleness_N", "weights_N", "rows_N", "old_N", "reference_N", "kl_N")
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[places_C] for name, value in present.items()})


class LossOutputs(NamedTuple):
    """Outputs of a policy loss for each token."""

    loss_N: Tensor
    """Loss of each token."""
    ratio_N: Tensor
    """Ratio π / π_old of each token, or of its sequence if the loss compares whole sequences. Without gradient."""
    clipped_low_N: Tensor
    """Whether the ratio of each token is below the lower clipping bound, which stops the gradient or limits the
    weight."""
    clipped_high_N: Tensor
    """Whether the ratio of each token is above the upper clipping bound, which stops the gradient or limits the
    weight."""
    dual_clipped_N: Tensor | None = None
    """Whether the dual clip stops the gradient of each token. None if the loss has no dual clip."""


class LossFunction(Protocol):
    """Policy loss of each token, as a pure function. Its gradient flows only through `logprobs_N`."""

    def __call__(
        self,
        logprobs_N: Tensor,
        old_N: Tensor,
        /,
        *,
        tokens: LossInputs,
        config: Any,  # noqa: ANN401 -- the loss's own class
    ) -> LossOutputs:
        """Return the loss, computed from the log-probs of the policy and those before the update."""
        ...


class MetricSums:
    """Sums and maxima of training metrics, accumulated on the device.

    Nothing is copied to the host before the end, so no forward pass waits for a metric.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the sum of each tensor's elements to the running sum of the same name. Tensors may be empty."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, values: dict[str, Tensor]) -> None:
        """Update the running maximum of each name, which starts at 0, with the largest element of the tensor."""
        for name, value in values.items():
            maximum = torch.nn.functional.pad(value.detach().double(), (1, 0)).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], maximum) if name in self._maxima else maximum

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the sums and the maxima as two vectors, which can be reduced over ranks.

        Every rank must have accumulated the same names in the same order.
        """
        return torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))

    def unpacked(self, sums: Tensor, maxima: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Return the reduced sums and maxima by name."""
        return (
            dict(zip(self._sums, sums.tolist(), strict=True)),
            dict(zip(self._maxima, maxima.tolist(), strict=True)),
        )
