"""The loss of one pass: clipped policy loss, importance correction and KL penalty, with what there is to say about it.

Shapes: N completion tokens of one pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.objectives.config import KlPenalty, TruncatedImportance, UpdateConfig
from models.objectives.importance import mismatch, truncated_weight
from models.objectives.kl import kl_estimate
from models.objectives.policy_loss import ppo_clip
from models.objectives.tally import Tally


@dataclass(frozen=True, slots=True)
class PassTokens:
    """What is known of a pass's completion tokens before the forward pass."""

    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Share of each token in the loss of the whole minibatch."""
    old_N: Tensor | None
    """Log-probs before the first step; none in the first step, where the pass itself gives them."""
    reference_N: Tensor | None
    """Log-probs under the reference; none without a KL penalty."""


def update_loss(logprobs_N: Tensor, tokens: PassTokens, *, config: UpdateConfig, tally: Tally) -> Tensor:
    """This pass's share of the minibatch's loss."""
    train_N = logprobs_N.detach() if tokens.old_N is None else tokens.old_N
    truncated = isinstance(config.correction, TruncatedImportance)
    terms = ppo_clip(
        logprobs_N,
        train_N if truncated else tokens.behaviour_N,
        advantages_N=tokens.advantages_N,
        config=config.loss,
    )
    loss_N = terms.loss_N
    if isinstance(config.correction, TruncatedImportance):
        loss_N = loss_N * truncated_weight(train_N, tokens.behaviour_N, cap=config.correction.cap)
    if isinstance(config.kl, KlPenalty):
        assert tokens.reference_N is not None, "a KL penalty needs the reference's log-probs"
        kl_N = kl_estimate(logprobs_N, tokens.reference_N, kind=config.kl.kind)
        loss_N = loss_N + config.kl.coefficient * kl_N
        tally.add({"kl": kl_N})
    shares_N = loss_N * tokens.weights_N
    finite_N = torch.isfinite(shares_N) & torch.isfinite(tokens.behaviour_N) & torch.isfinite(tokens.advantages_N)
    tally.add(
        {
            "loss": shares_N,
            "clip_fraction_low": terms.clipped_low_N,
            "clip_fraction_high": terms.clipped_high_N,
            "ratio_mean": terms.ratio_N,
            "kl_old": terms.ratio_N - 1 - terms.ratio_N.log(),  # k3, from the policy before the update
            "entropy": -logprobs_N,
            "not_finite": ~finite_N,
        }
    )
    tally.raise_to({"ratio_max": terms.ratio_N})
    return shares_N.sum()


def tally_mismatch(train_N: Tensor, behaviour_N: Tensor, *, cap: float, tally: Tally) -> None:
    """Count the mismatch between what generated and the trainer before its first step."""
    found = mismatch(train_N, behaviour_N)
    tally.add(
        {
            "mismatch_mean": found.difference_N,
            "mismatch_weight_mean": found.weight_N,
            "mismatch_truncated": found.weight_N > cap,
            "mismatch_kl": found.kl_N,
            "mismatch_tokens": torch.ones_like(train_N),
        }
    )
    tally.raise_to({"mismatch_max": found.difference_N, "mismatch_weight_max": found.weight_N})
