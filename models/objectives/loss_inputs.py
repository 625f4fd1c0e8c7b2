"""What losses read, what they return, and the sums that metrics are made of."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What is known of a pass's completion tokens before the forward pass."""

    behaviour_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor
    weights_N: Tensor
    """Share of each token in the loss of the whole minibatch; 0 where it is too stale."""
    rows_N: Tensor
    """Which of the pass's sequences each token is of, in order; every sequence is in one pass as a whole."""
    lengths_B: Tensor
    """Completion tokens of each sequence."""
    old_N: Tensor | None
    """Log-probs before the first step; none in the first step, where the pass itself gives them."""
    reference_N: Tensor | None
    """Log-probs under the reference; none without a KL penalty."""
    kl_N: Tensor | None = None
    """The divergence from the reference, where it is known in closed form, as of denoising steps."""

    def at(self, places_C: Tensor) -> Self:
        """Return what is known of some tokens, for losses that take each by itself; `lengths_B` stays that of all."""
        names = ("behaviour_N", "advantages_N", "staleness_N", "weights_N", "rows_N", "old_N", "reference_N", "kl_N")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[places_C] for name, value in known.items()})


class LossOutputs(NamedTuple):
    """What one policy loss says of each token."""

    loss_N: Tensor
    ratio_N: Tensor
    """π / π_old of the token, or of its sequence where the loss compares those; without gradient."""
    clipped_low_N: Tensor
    """True where the lower bound holds: it cuts the gradient off, or the weight."""
    clipped_high_N: Tensor
    """True where the upper bound does."""
    dual_clipped_N: Tensor | None = None
    """True where the dual clip cuts the gradient off; none where the loss has no such bound."""


class LossFunction(Protocol):
    """A policy loss per token: a pure function, whose gradient flows through `logprobs_N` alone."""

    def __call__(
        self,
        logprobs_N: Tensor,
        old_N: Tensor,
        /,
        *,
        tokens: LossInputs,
        config: Any,  # noqa: ANN401 -- the loss's own class
    ) -> LossOutputs:
        """Compare the policy's log-probs with those of the policy before, under the settings of the loss."""
        ...


class MetricSums:
    """Collects statistics on the device; nothing is read back before the end, so no pass waits for one."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the sum of each tensor's elements; it may have none."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, values: dict[str, Tensor]) -> None:
        """Raise each maximum, which starts at 0, to the greatest of the tensor's elements."""
        for name, value in values.items():
            most = torch.nn.functional.pad(value.detach().double(), (1, 0)).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], most) if name in self._maxima else most

    def packed(self) -> tuple[Tensor, Tensor]:
        """Sums and maxima as two vectors, to be combined over ranks; every rank must have counted the same names."""
        return torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))

    def unpacked(self, sums: Tensor, maxima: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Name the elements of the two vectors again."""
        return (
            dict(zip(self._sums, sums.tolist(), strict=True)),
            dict(zip(self._maxima, maxima.tolist(), strict=True)),
        )
