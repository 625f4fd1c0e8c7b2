"""What losses know of a pass's completion tokens, and what they say of them.

Shapes: N completion tokens of one pass, B its sequences.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
