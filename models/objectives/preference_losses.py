"""Losses over pairs of completions, one better than the other: DPO, and reward models. Shapes: P pairs."""

from typing import NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class DpoTerms(NamedTuple):
    """What the loss says of each pair."""

    loss_P: Tensor
    margins_P: Tensor
    """How much more the policy's implicit reward is for the chosen completion."""
    right_P: Tensor
    """True where that is more than nothing."""


def dpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    beta: float,
    label_smoothing: float,
) -> DpoTerms:
    """Compare log-probs of whole completions with the reference's (DPO, arXiv 2305.18290, eq. 7).

    Label smoothing takes that share of the pairs to be the wrong way round (conservative DPO, Mitchell, 2023).
    The implicit reward is beta · log(π / π_ref) (eq. 5, up to a constant of the prompt).
    """
    margins_P = beta * ((chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P))
    loss_P = -(1 - label_smoothing) * F.logsigmoid(margins_P) - label_smoothing * F.logsigmoid(-margins_P)
    return DpoTerms(loss_P=loss_P, margins_P=margins_P.detach(), right_P=margins_P.detach() > 0)


class PairTerms(NamedTuple):
    """What the loss says of each pair."""

    loss_P: Tensor
    margins_P: Tensor
    """Reward of the chosen completion minus that of the rejected one."""
    right_P: Tensor
    """True where that is more than nothing."""


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, *, centering: float) -> PairTerms:
    """Return −log σ(r_chosen − r_rejected) (Bradley and Terry, 1952) + centering · (r_chosen + r_rejected)².

    Pairs say nothing of where zero is; the second term does (arXiv 2312.09244, section 3).
    """
    margins_P = chosen_P - rejected_P
    loss_P = -F.logsigmoid(margins_P) + centering * (chosen_P + rejected_P).square()
    return PairTerms(loss_P=loss_P, margins_P=margins_P.detach(), right_P=margins_P.detach() > 0)
