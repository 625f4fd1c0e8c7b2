"""PPO with a critic (arXiv 1707.06347): rewards of tokens, generalized advantages, and the returns on which the critic
is trained.

Shapes: N completions, T completion tokens.
"""

import numpy as np

from rheostat.models.algorithms.experience import Advantages, Experience
from rheostat.models.algorithms.ragged import MIN_STD, discounted_sums, last_tokens, normalize_tokens
from rheostat.models.algorithms.shaping import token_rewards
from rheostat.models.config.algorithms import Ppo
from rheostat.models.records.columns import Floats, Integers


def compute_generalized_advantages(
    rewards_T: Floats, values_T: Floats, lengths_N: Integers, *, gamma: float, lam: float | Floats
) -> Floats:
    """Return the generalized advantage estimates (GAE) Σ_k (γλ)^k δ_{t+k}, where δ_t = r_t + γ V_{t+1} - V_t (T).

    `rewards_T` and `values_T` are concatenated over completions with `lengths_N` tokens. The value V after the last
    token of a completion is 0. `lam` may differ between completions (N).
    """
    deltas_T = rewards_T - values_T
    next_T = np.zeros_like(deltas_T)
    next_T[:-1] = values_T[1:]
    next_T[last_tokens(lengths_N)] = 0.0
    next_T *= gamma
    deltas_T += next_T
    return discounted_sums(deltas_T, lengths_N, gamma * lam)


def ppo(experience: Experience, algorithm: Ppo) -> Advantages:
    """Compute advantages from token rewards and the critic's values, and the returns on which the critic is trained.

    The return of a token is its advantage plus its value, computed before advantages are normalized. With
    `algorithm.critic_lam`, the advantages for the returns have another λ than those for the policy.
    """
    values_T, lengths_N = experience.auxiliary_scores.values_T, experience.scored.lengths_N
    assert values_T is not None, "PPO needs the critic's values"
    rewards_T = token_rewards(experience, algorithm, algorithm.kl)

    def advantages(lam: float | Floats) -> Floats:
        return compute_generalized_advantages(rewards_T, values_T, lengths_N, gamma=algorithm.gamma, lam=lam)

    advantages_T = advantages(policy_lam(lengths_N, algorithm))
    critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
    is_shared = algorithm.length_adaptive_lam is None and critic_lam == algorithm.lam
    returns_T = (advantages_T if is_shared else advantages(critic_lam)) + values_T
    if algorithm.whiten:
        advantages_T = normalize_tokens(advantages_T, lengths_N, experience.counted_N)
    counted_T = np.repeat(experience.counted_N, lengths_N)
    return Advantages(advantages_T, returns_T, _metrics(values_T[counted_T], returns_T[counted_T]))


def policy_lam(lengths_N: Integers, algorithm: Ppo) -> float | Floats:
    """Return the λ with which the policy's advantages are estimated: `algorithm.lam`, or for each completion (N)
    1 − 1 / (α · length), at least 0, with α = `algorithm.length_adaptive_lam` (VAPO, arXiv 2504.05118, section 4.2)."""
    alpha = algorithm.length_adaptive_lam
    if alpha is None:
        return algorithm.lam
    return np.maximum(0.0, 1 - 1 / (alpha * np.maximum(lengths_N, 1)))


def _metrics(values_M: Floats, returns_M: Floats) -> dict[str, float]:
    """Return metrics of how well the critic's values predict the returns, over the M trained tokens.

    `explained_variance` is 1 for a perfect prediction and 0 if the prediction is no better than the mean of the
    returns.
    """
    if not len(values_M):
        return {}
    metrics = {"value_mean": float(values_M.mean()), "return_mean": float(returns_M.mean())}
    if returns_M.std() >= MIN_STD:
        metrics["explained_variance"] = float(1 - (returns_M - values_M).var() / returns_M.var())
    return metrics
