"""KL divergences between policy and teacher over the teacher's k most probable tokens and the remaining probability.

All other tokens of the vocabulary count as one further token, whose probability is the rest. The divergence of these
k + 1 probabilities is never larger than the divergence over the whole vocabulary, and equal to it if k is the size of
the vocabulary. Without this token, the divergence would not change if the policy moved probability to tokens that are
not among the k. Shapes: N completion tokens of a micro-batch, K most probable tokens.
"""

from typing import Final

import torch
from torch import Tensor

from rheostat.models.config.teachers import Direction

MIN_REST: Final = 1e-7
"""Minimum probability of the tokens that are not among the k. It is about the rounding error of the sum of k float32
probabilities, and the limit that TRL uses (`add_tail_bucket`)."""

MIN_LOGPROB: Final = -100.0
"""Minimum log-prob of one of the k tokens, so that a token that the policy can never generate gives a finite
divergence. Such a token has no gradient."""


def compute_top_k_divergence(policy_NK: Tensor, teacher_NK: Tensor, *, direction: Direction) -> Tensor:
    """Return the KL divergence of each token's distribution in nats (N), given the log-probs of the teacher's k most
    probable tokens under the policy and under the teacher. The gradient is that of `policy_NK`.

    The direction "reverse" is KL(policy ‖ teacher) (MiniLLM, arXiv 2306.08543, eq. 1), and "forward" is KL(teacher ‖
    policy). They are the generalized divergence of GKD (arXiv 2306.13649, eq. 1) with β = 1 and β = 0 in the
    implementation of TRL.
    """
    policy_NR, teacher_NR = _add_rest(policy_NK), _add_rest(teacher_NK.detach())
    first_NR, second_NR = (policy_NR, teacher_NR) if direction == "reverse" else (teacher_NR, policy_NR)
    return (first_NR.exp() * (first_NR - second_NR)).sum(-1)


def _add_rest(logprobs_NK: Tensor) -> Tensor:
    """Return the log-probs of the k tokens, followed by the log-prob of all other tokens together."""
    rest_N1 = (1 - logprobs_NK.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([logprobs_NK.clamp(min=MIN_LOGPROB), rest_N1.log()], dim=-1)
