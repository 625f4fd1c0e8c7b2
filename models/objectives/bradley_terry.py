"""Reward models from pairs of completions, one better than the other. Shapes: P pairs."""

from typing import NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


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
