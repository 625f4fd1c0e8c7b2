"""Penalties on rewards: for completions close to the length limit, and for divergence from the reference policy.

Shapes: N completions, T completion tokens.
"""

import math
from typing import Literal

import numpy as np

from rheostat.models.algorithms.experience import Experience
from rheostat.models.algorithms.ragged import last_tokens, sums_per_completion, values_on_last_tokens
from rheostat.models.config.algorithms import Algorithm, Overlong, RewardKl
from rheostat.models.config.divergence import AdaptiveKl
from rheostat.models.config.objectives import MAX_LOG_RATIO
from rheostat.models.records.columns import Floats, Integers


def overlong_penalty(lengths_N: Integers, overlong: Overlong, max_new_tokens: int) -> Floats:
    """Return the length penalty of each completion (N; DAPO, arXiv 2503.14476, eq. 13).

    The penalty is 0 up to `overlong.buffer` tokens below the limit `max_new_tokens`, and rises linearly to
    `overlong.penalty` at the limit.
    """
    assert max_new_tokens >= 1, "a penalty near the limit needs the limit"
    share_N: Floats = np.clip((lengths_N - (max_new_tokens - overlong.buffer)) / overlong.buffer, 0.0, 1.0)
    return overlong.penalty * share_N


def divergence(logprobs_T: Floats, reference_T: Floats, kind: Literal["k1", "k2", "k3"]) -> Floats:
    """Return an estimate of KL(behavior ‖ reference) at each token, in nats (Schulman, "Approximating KL divergence").

    The behavior policy is the one that generated the tokens. For kind k3, log-ratios are clamped at ±20 before they are
    exponentiated.
    """
    log_ratio_T = logprobs_T - reference_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T**2 / 2
        case "k3":
            bounded_T = np.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            return np.expm1(-bounded_T) + bounded_T


def penalties(experience: Experience, algorithm: Algorithm, kl: RewardKl | None = None) -> Floats:
    """Return the total penalty of each completion (N): the penalty for its length, if the algorithm has one, plus the
    penalty for its tokens' divergence from the reference, if `kl` is not None."""
    lengths_N = experience.scored.lengths_N
    penalties_N = np.zeros(len(lengths_N))
    if algorithm.overlong is not None:
        penalties_N += overlong_penalty(lengths_N, algorithm.overlong, experience.max_new_tokens)
    if kl is not None:
        penalties_N += experience.kl_coefficient * sums_per_completion(_divergence(experience, kl), lengths_N)
    return penalties_N


def token_rewards(experience: Experience, algorithm: Algorithm, kl: RewardKl | None) -> Floats:
    """Return the reward of each token (T).

    The reward of a token is minus its divergence penalty, plus the weighted values of the spans (steps, tokens or
    turns) that end at the token. The last token of a completion additionally gets the reward of the whole completion
    minus the length penalty.
    """
    scored, lengths_N = experience.scored, experience.scored.lengths_N
    rewards_T = np.zeros(int(lengths_N.sum()))
    if kl is not None:
        rewards_T = -experience.kl_coefficient * _divergence(experience, kl)
    for term in scored.terms:
        if term.spans is not None:
            rewards_T += term.weight * values_on_last_tokens(term.spans, lengths_N)
    at_end_N = scored.outcomes() - penalties(experience, algorithm)
    rewards_T[last_tokens(lengths_N)] += at_end_N[lengths_N > 0]
    return rewards_T


def shaping_metrics(experience: Experience, algorithm: Algorithm, kl: RewardKl | None) -> dict[str, float]:
    """Return metrics of the length penalty and of the divergence from the reference. The metric `kl` is the mean
    divergence over the tokens of completions that have a reward."""
    scored, metrics = experience.scored, dict[str, float]()
    if algorithm.overlong is not None and scored.is_scored.any():
        penalties_N = overlong_penalty(scored.lengths_N, algorithm.overlong, experience.max_new_tokens)
        metrics["overlong_penalty_mean"] = float(penalties_N[scored.is_scored].mean())
    if kl is not None:
        metrics["kl_coefficient"] = experience.kl_coefficient
        kl_T = _divergence(experience, kl)[np.repeat(scored.is_scored, scored.lengths_N)]
        metrics |= {"kl": float(kl_T.mean())} if len(kl_T) else {}
    return metrics


def _divergence(experience: Experience, kl: RewardKl) -> Floats:
    reference_T = experience.auxiliary_scores.reference_T
    assert reference_T is not None, "a penalty on divergence needs the reference's log-probs"
    return divergence(experience.logprobs_T, reference_T, kl.kind)


MAX_ERROR = 0.2
"""Limit of the relative error (kl / target − 1) in the KL controller (arXiv 1909.08593, section 2.2). Larger errors are
clipped to ±MAX_ERROR."""


def next_coefficient(coefficient: float, *, kl: float, completions: int, adaptive: AdaptiveKl) -> float:
    """Return the KL coefficient of the next iteration, which is adapted to keep the divergence near `adaptive.target`.

    `kl` is the mean divergence per token of the last iteration, and `completions` is its number of completions. This is
    the proportional controller in log space of arXiv 1909.08593, section 2.2. The paper multiplies the coefficient by 1
    + error / horizon after each completion. This function multiplies it once by exp(error x completions / horizon),
    which is nearly the same and stays positive for batches larger than the horizon.
    """
    error = min(max(kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * math.exp(error * completions / adaptive.horizon)
