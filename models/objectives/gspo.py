"""GSPO's clipped surrogate: the ratio is that of a whole sequence. Shapes: N completion tokens of B sequences."""

import torch
from torch import Tensor

from models.objectives.config import Gspo
from models.objectives.pass_tokens import PassTokens, PolicyTerms


def gspo(logprobs_N: Tensor, old_N: Tensor, *, tokens: PassTokens, config: Gspo) -> PolicyTerms:
    """Clip the sequence's ratio, in its token form (GSPO, arXiv 2507.18071, eq. 13 and 14).

    Every token has its sequence's ratio as value and its own log-prob's gradient times that ratio. Where all tokens of
    a sequence have one advantage, their mean has the value and gradient of the form per sequence (eq. 5).
    """
    sequence_N = sequence_ratio(logprobs_N.detach(), old_N, rows_N=tokens.rows_N, lengths_B=tokens.lengths_B)
    ratio_N = sequence_N * torch.exp(logprobs_N - logprobs_N.detach())
    low, high = 1 - config.clip_low, 1 + config.clip_high
    advantages_N = tokens.advantages_N
    return PolicyTerms(
        loss_N=torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N),
        ratio_N=sequence_N,
        clipped_low_N=(sequence_N < low) & (advantages_N < 0),
        clipped_high_N=(sequence_N > high) & (advantages_N > 0),
    )


def sequence_ratio(logprobs_N: Tensor, old_N: Tensor, *, rows_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return exp(mean log-ratio) of each token's sequence (eq. 7).

    By segments, whose sums have one order: `index_add` on an accelerator adds in another one every time.
    """
    sums_B = torch.segment_reduce(logprobs_N - old_N, "sum", lengths=lengths_B, unsafe=True)
    return torch.exp(sums_B / lengths_B.clamp(min=1)).index_select(0, rows_N)
