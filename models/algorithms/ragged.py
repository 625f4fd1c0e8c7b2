"""Arithmetic on flat arrays that concatenate the values of all completions: group statistics, discounted sums,
normalization.

Shapes: N completions, G groups, T completion tokens and S spans of all completions, concatenated. A missing value is
NaN and is excluded from means.
"""

from dataclasses import dataclass

import numpy as np

from rheostat.models.algorithms.experience import ScoredGroups, SpanColumns
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.records.columns import Floats, Integers, Mask

MIN_STD = 1e-6
"""Standard deviation below which the values of a group or batch are treated as equal."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Number, mean and population standard deviation of the values in each group."""

    count_G: Integers
    mean_G: Floats
    std_G: Floats

    @property
    def differ(self) -> Mask:
        """Mask of the groups that have at least two values which are not all equal (G)."""
        differ_G: Mask = (self.count_G >= 2) & (self.std_G >= MIN_STD)
        return differ_G


def group_statistics(values_N: Floats, group_N: Integers, num_groups: int) -> GroupStatistics:
    """Return count, mean and standard deviation of the values in each group.

    `group_N` is the index of each value's group. Groups may be interleaved. NaN values are ignored, and a group without
    values has 0 in all statistics.
    """
    is_finite_N = np.isfinite(values_N)
    if not is_finite_N.all():
        group_N, values_N = group_N[is_finite_N], values_N[is_finite_N]
    count_G = np.bincount(group_N, minlength=num_groups)
    divisor_G = np.maximum(count_G, 1)
    mean_G = np.bincount(group_N, weights=values_N, minlength=num_groups) / divisor_G
    squares_N = (values_N - mean_G[group_N]) ** 2
    std_G = np.sqrt(np.bincount(group_N, weights=squares_N, minlength=num_groups) / divisor_G)
    return GroupStatistics(count_G=count_G, mean_G=mean_G, std_G=std_G)


def rewards_differ(scored: ScoredGroups, algorithm: Algorithm) -> Mask:
    """Return a mask of the groups whose total rewards are not all equal (G)."""
    return group_statistics(scored.total_N, scored.group_N, scored.num_groups).differ


def last_tokens(lengths_N: Integers) -> Integers:
    """Return the position of each completion's last token in the concatenated tokens. Completions without tokens are
    skipped."""
    last_N: Integers = np.cumsum(lengths_N)[lengths_N > 0] - 1
    return last_N


def sums_per_completion(values_T: Floats, lengths_N: Integers) -> Floats:
    """Return the sum of the token values of each completion (N). `values_T` is the concatenation over completions with
    `lengths_N` tokens."""
    row_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    return np.bincount(row_T, weights=values_T, minlength=len(lengths_N)).astype(np.float64)


def discounted_sums(values_T: Floats, lengths_N: Integers, factor: float | Floats) -> Floats:
    """Return, for each token, the discounted sum of the values from this token to the end of its completion (T).

    A value k tokens later is multiplied by factor^k. The factor may differ between completions (N). The sums are
    computed backwards for all completions at once, with one numpy call per token of the longest completion. Completions
    are sorted by descending length, so that each call covers only the completions that are long enough, and the total
    work is proportional to the number of tokens.
    """
    order_N = np.argsort(-lengths_N, kind="stable")
    last_N = (np.cumsum(lengths_N) - 1)[order_N]
    factor_N = np.broadcast_to(factor, lengths_N.shape)[order_N]
    reaching_L = len(lengths_N) - np.cumsum(np.bincount(lengths_N))[:-1]  # L: completions longer than 0, 1, 2, …
    sums_N, sums_T = np.zeros(len(lengths_N)), np.empty(len(values_T))
    for back, count in enumerate(reaching_L):
        index = last_N[:count] - back
        sums_N[:count] *= factor_N[:count]
        sums_N[:count] += values_T[index]
        sums_T[index] = sums_N[:count]
    return sums_T


def normalize_tokens(values_T: Floats, lengths_N: Integers, counted_N: Mask) -> Floats:
    """Subtract a mean from all values and divide them by a population standard deviation. Mean and standard deviation
    are computed over the tokens of the completions in `counted_N`.

    Returns 0 for all tokens if the values of these completions are equal or if there are none.
    """
    counted_T = values_T if counted_N.all() else values_T[np.repeat(counted_N, lengths_N)]
    if not len(counted_T):
        return np.zeros_like(values_T)
    centred_T: Floats = values_T - counted_T.mean()
    std = float(counted_T.std())
    if std < MIN_STD:
        return np.zeros_like(values_T)
    centred_T /= std
    return centred_T


def span_bounds(spans: SpanColumns, lengths_N: Integers) -> tuple[Integers, Integers]:
    """Return, for each span, the position of its first token and the position after its last token. Positions are
    indices into the concatenated tokens of all completions."""
    begins_S = spans.starts_S + np.repeat(np.cumsum(lengths_N) - lengths_N, spans.counts_N)
    ends_S = np.empty_like(begins_S)
    ends_S[:-1] = begins_S[1:]
    ends_S[last_tokens(spans.counts_N)] = np.cumsum(lengths_N)[spans.counts_N > 0]
    return begins_S, ends_S


def values_on_tokens(spans: SpanColumns, lengths_N: Integers) -> Floats:
    """Return, for each token, the value of the span that contains the token (T). Tokens of completions without spans
    get NaN."""
    begins_S, ends_S = span_bounds(spans, lengths_N)
    valued_N = spans.counts_N > 0
    valued_T = np.repeat(spans.values_S, ends_S - begins_S)
    if valued_N.all():
        return valued_T
    values_T = np.full(int(lengths_N.sum()), np.nan)
    values_T[np.repeat(valued_N, lengths_N)] = valued_T
    return values_T


def values_on_last_tokens(spans: SpanColumns, lengths_N: Integers) -> Floats:
    """Return an array over all tokens (T) that contains the value of each span at the span's last token, and 0 at all
    other tokens."""
    _, ends_S = span_bounds(spans, lengths_N)
    values_T = np.zeros(int(lengths_N.sum()))
    values_T[ends_S - 1] = spans.values_S
    return values_T
