"""Lower confidence bounds of a mean difference that keep their level for every distribution of the scores.

Scores of 0 or 1 are compared by an exact test, graded scores with a known range by a betting bound. This module does
not import torch.

Shapes: M values of the nuisance parameter, B numbers of wins, P problems, K orders of the problems.
"""

from math import ceil, inf, log, sqrt
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUISANCE: Final = 64
"""Number of grid points of the nuisance parameter (the share of problems on which the policies differ) over which the
exact test takes its maximum. Half as many points are added near one end of the parameter's range."""
_STANDARD_DEVIATIONS: Final = 10
"""Half width, in standard deviations, of the window of binomial counts that are summed. The probability outside of the
window is below 1e-20."""
_HALVINGS: Final = 22
_SCORE_HALVINGS: Final = 12
_ROUNDING: Final = 1e-9
_NEGLIGIBLE: Final = 1e-12
"""Probability below which a number of wins is left out of sums, because it would not change the result."""
_ORDERS: Final = 16
"""Number of random orders of the problems over which the betting bound is averaged."""
_LARGEST_BET: Final = 0.95
"""Largest share of the capital that the betting bound stakes on one problem."""


# ---- scores of 0 or 1
def exact_lower_bound(better: int, worse: int, problems: int, *, level: float, threshold: float = 0.0) -> float:
    """Return the lower confidence bound, at level 1 − `level`, of the share of problems won minus the share lost,
    between −1 and 1.

    `better` and `worse` are the observed numbers of problems won and lost. The bound is the smallest difference that
    `exact_p` does not reject at this level. The bound exceeds `threshold` exactly if `exact_p` rejects the threshold,
    even if `exact_p` does not increase steadily with the difference.
    """
    low, high = -1.0, max((better - worse) / problems, -1.0)
    if low < threshold < high:
        is_rejected = exact_p(better, worse, problems, threshold=threshold) <= level
        low, high = (threshold, high) if is_rejected else (low, threshold)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if exact_p(better, worse, problems, threshold=middle) <= level:
            low = middle
        else:
            high = middle
    return low


def exact_p(better: int, worse: int, problems: int, *, threshold: float) -> float:
    """Return the p-value of the hypothesis that the true share of problems won minus the share lost is at most
    `threshold`.

    `better` and `worse` are the observed numbers of problems won and lost. This is an exact unconditional test (Hsueh,
    Liu & Chen 2001, Biometrics 57:478). The p-value is the probability of a score statistic (Tango 1998, Statistics in
    Medicine 17:891) at least as large as the observed one, maximized over all shares of problems on which the policies
    may differ.
    """
    observed = float(_score(np.array([better]), np.array([worse]), problems, threshold)[0])
    return float(_reach(problems, _largest_worse(problems, threshold, observed), *_hypothesis(threshold)).max())


def largest_losses(problems: int, threshold: float, *, alpha: float) -> Ints:
    """Return, for each number of problems won from 0 to `problems`, the largest number of problems lost at which
    `exact_p` is at most alpha. −1 means that no number is small enough."""

    def keeps_level(score: float) -> bool:
        losses_B = _largest_worse(problems, threshold, score)
        return bool(_reach(problems, losses_B, *_hypothesis(threshold)).max() <= alpha)

    low, high = 0.0, 4.0
    while not keeps_level(high):
        low, high = high, 2 * high
    for _ in range(_SCORE_HALVINGS):
        middle = (low + high) / 2
        if keeps_level(middle):
            high = middle
        else:
            low = middle
    return _largest_worse(problems, threshold, high)


def exact_power(losses_B: Ints, *, better: float, worse: float) -> float:
    """Return the probability that the exact test rejects its hypothesis, if `better` and `worse` are the true shares of
    problems won and lost. `losses_B` is the result of `largest_losses`."""
    return float(_reach(len(losses_B) - 1, losses_B, np.array([better]), np.array([worse]))[0])


def _score(better_B: Ints, worse_B: Ints, problems: int, threshold: float) -> Floats:
    """Return Tango's score statistic for each pair of wins and losses: the excess over the threshold, divided by its
    standard deviation under the null hypothesis."""
    excess = better_B - worse_B - problems * threshold
    variance = restricted_variance(better_B / problems, worse_B / problems, threshold) * problems
    deviation = np.sqrt(np.maximum(variance, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        certain = np.where(np.abs(excess) < _ROUNDING, 0.0, np.sign(excess) * inf)
        return np.where(deviation > _ROUNDING, excess / deviation, certain)


def restricted_variance(better: ArrayLike, worse: ArrayLike, threshold: float) -> Floats:
    """Return the variance of the difference on one problem under the null hypothesis. The shares of wins and losses are
    fitted by maximum likelihood, with a difference equal to the threshold."""
    better, worse = np.asarray(better), np.asarray(worse)
    linear = -better - worse + (2 - better + worse) * threshold
    product = worse * threshold * (1 - threshold)
    fitted = (np.sqrt(np.maximum(linear**2 + 8 * product, 0)) - linear) / 4
    return np.asarray(2 * fitted + threshold * (1 - threshold))


def _largest_worse(problems: int, threshold: float, score: float) -> Ints:
    """Return, for each number of wins, the largest number of losses at which the score statistic is at least `score`,
    or −1 if there is none."""
    better_B = np.arange(problems + 1)
    low_B, high_B = np.full(problems + 1, -1), problems - better_B
    for _ in range(problems.bit_length() + 1):
        middle_B = (low_B + high_B + 1) // 2
        reaches = _score(better_B, np.maximum(middle_B, 0), problems, threshold) >= score - _ROUNDING
        is_open = low_B < high_B
        low_B = np.where(is_open & reaches, middle_B, low_B)
        high_B = np.where(is_open & ~reaches, middle_B - 1, high_B)
    return low_B


def _hypothesis(threshold: float) -> tuple[Floats, Floats]:
    """Return a grid of the null hypothesis: shares of wins, and shares of losses that are lower by `threshold` (M
    each), from the fewest wins to the most."""
    even = (1 - np.cos(np.linspace(0, np.pi, _NUISANCE))) / 2
    position_M = np.concatenate([even, np.geomspace(1e-4, 0.1, _NUISANCE // 2)])
    min_share = max(0.0, threshold)
    better_M = min_share + ((1 + threshold) / 2 - min_share) * position_M
    return better_M, np.maximum(better_M - threshold, 0.0)


def _reach(problems: int, losses_B: Ints, better_M: Floats, worse_M: Floats) -> Floats:
    """Return, for each of M pairs of true shares of wins and losses, the probability that the number of losses is at
    most `losses_B` at the number of wins."""
    from scipy.special import bdtr, gammaln, xlog1py, xlogy

    half = ceil(_STANDARD_DEVIATIONS * sqrt(problems) / 2) + _STANDARD_DEVIATIONS**2 // 2
    if 2 * half > problems:
        first_M, width = np.zeros(len(better_M), int), problems + 1
    else:
        first_M, width = np.clip((problems * better_M).astype(int) - half, 0, problems - 2 * half), 2 * half + 1
    wins = first_M[:, None] + np.arange(width)
    factorials = gammaln(np.arange(problems + 1) + 1)
    chosen = factorials[-1] - factorials - factorials[::-1]
    better, worse = better_M[:, None], worse_M[:, None]
    share = np.exp(chosen[wins] + xlogy(wins, better) + xlog1py(problems - wins, -better))
    lost = np.clip(worse / np.maximum(1 - better, np.finfo(float).tiny), 0, 1)
    losses = losses_B[wins]
    counts = (losses >= 0) & (share > _NEGLIGIBLE)
    below = np.zeros(counts.shape)
    below[counts] = bdtr(losses[counts], (problems - wins)[counts], np.broadcast_to(lost, counts.shape)[counts])
    return np.asarray((share * below).sum(axis=1))


# ---- graded scores
def betting_lower_bound(differences_P: Floats, *, level: float, width: float, seed: int) -> float:
    """Return the lower confidence bound, at level 1 − `level`, of the mean of independent differences that lie between
    −width and width.

    The bound is computed by betting (Waudby-Smith & Ramdas 2024, JRSS B 86:1, section 4: bets for a fixed number of
    observations). The capital is averaged over several random orders of the problems, which keeps the level valid. The
    order in `differences_P` must not depend on the differences.
    """
    values_P = (differences_P / width + 1) / 2
    if not values_P.any():  # all differences are at the lowest possible value, for which no bet is limited
        return -width
    rng = np.random.default_rng(seed)
    values_KP = np.stack([values_P[rng.permutation(len(values_P))] for _ in range(_ORDERS)])
    bets_KP = bet_sizes(_variances(values_KP), level=level)
    low, high = 0.0, float(values_P.mean())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        bets = np.minimum(bets_KP, _LARGEST_BET / middle)
        capital_K = np.log1p(bets * (values_KP - middle)).sum(axis=1)
        if np.logaddexp.reduce(capital_K) - log(_ORDERS) >= log(1 / level):
            low = middle
        else:
            high = middle
    return (2 * low - 1) * width


def bet_sizes(variances_KP: Floats, *, level: float) -> Floats:
    """Return the size of the bet on each problem as a share of the capital, chosen so that the capital reaches 1 /
    level after as few problems as possible.

    `variances_KP` contains, for K orders of the problems, the variance estimated before each problem.
    """
    return np.asarray(np.sqrt(2 * log(1 / level) / (variances_KP.shape[-1] * variances_KP)))


def _variances(values_KP: Floats) -> Floats:
    """Return, for each problem, the variance estimated from the problems before it. The first estimate is 1/4."""
    counts_P = np.arange(1, values_KP.shape[1] + 1)
    means_KP = (0.5 + np.cumsum(values_KP, axis=1)) / (counts_P + 1)
    variances_KP = (0.25 + np.cumsum((values_KP - means_KP) ** 2, axis=1)) / (counts_P + 1)
    return np.concatenate([np.full((len(values_KP), 1), 0.25), variances_KP[:, :-1]], axis=1)


def betting_power(problems: int, *, gain: float, mean_square: float, threshold: float, alpha: float) -> float:
    """Return the probability that `betting_lower_bound` exceeds the threshold, if `gain` is the true mean difference
    and `mean_square` the mean of squared differences. The range of differences is −1 to 1.

    `alpha` is the significance level. The result is a normal approximation of the logarithm of the capital, which
    assumes differences with two possible values.
    """
    from rheostat.infra.statistics import normal_cdf

    mean, spread = (gain + 1) / 2, sqrt(max(mean_square - gain**2, 0.0)) / 2
    null = (threshold + 1) / 2
    if null <= 0:  # every bound is at least −1
        return float(gain > threshold)
    known_P = np.arange(problems)
    bets_P = bet_sizes((0.25 + known_P * spread**2) / (known_P + 1), level=alpha)
    bets_P = np.minimum(bets_P, _LARGEST_BET / null)
    logs = [np.log1p(np.maximum(bets_P * (mean + sign * spread - null), -_LARGEST_BET)) for sign in (1, -1)]
    capital = float((logs[0] + logs[1]).sum()) / 2
    deviation = sqrt(float(((logs[0] - logs[1]) ** 2).sum())) / 2
    missing = log(1 / alpha) - capital
    return float(normal_cdf(-missing / deviation)) if deviation > _ROUNDING else float(missing <= 0)
