"""Comparison of two policies on the same problems with the same seeds.

This module does not import torch, and imports SciPy only inside functions.

Shapes: P problems, S samples of each problem. The unit of comparison is a problem, so the samples of a problem are
averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.models.config.promotion import MIN_PROBLEMS
from rheostat.models.gate.bounds import Floats, betting_lower_bound, exact_lower_bound

RESAMPLES = 10_000
_DRAWN_AT_ONCE = 2**22
_OUTSIDE = 1e-6
"""Maximum distance by which a score may be outside of the range of scores, to allow for rounding."""
Method = Literal["exact", "betting", "bootstrap"]
_EQUAL = 1e-12
"""Spread below which all differences are treated as equal, because sums of the same scores may differ in their last
bits."""


@dataclass(frozen=True, eq=False)
class PairedScores:
    """Scores of two policies on the same problems. Missing scores are NaN."""

    prompts: tuple[str, ...]
    """Ids of the problems (P). Problem i has row i in both score arrays."""
    champion_PS: Floats
    """Score of the champion (the policy in use) for each problem and sample."""
    challenger_PS: Floats
    """Score of the challenger (the new policy) for each problem and sample, generated with the champion's seed."""
    unmatched: tuple[str, ...] = ()
    """Ids of problems that are not compared, because only one policy has scores for them or the numbers of samples
    differ."""

    def __post_init__(self) -> None:
        shapes = self.champion_PS.shape, self.challenger_PS.shape
        assert shapes[0] == shapes[1] and shapes[0][:1] == (len(self.prompts),), shapes

    @property
    def missing_PS(self) -> NDArray[np.bool_]:  # noqa: N802 -- tensors wear their shapes
        """Mask of the pairs in which at least one of the two scores is missing (P x S)."""
        return np.isnan(self.champion_PS) | np.isnan(self.challenger_PS)

    @classmethod
    def of(cls, champion: Mapping[str, Sequence[float]], challenger: Mapping[str, Sequence[float]]) -> Self:
        """Pair the scores of both policies by the id of the problem and the position of the sample.

        Problems whose number of samples differs from the champion's most frequent number are listed as unmatched.
        """
        sizes = [len(scores) for scores in champion.values()]
        samples = max(sizes, key=sizes.count, default=0)
        whole = [{name for name, scores in side.items() if len(scores) == samples} for side in (champion, challenger)]
        prompts = tuple(name for name in champion if name in whole[0] & whole[1])
        unmatched = tuple(name for name in {**champion, **challenger} if name not in whole[0] & whole[1])
        sides = (np.array([side[name] for name in prompts], float) for side in (champion, challenger))
        champion_PS, challenger_PS = (side.reshape(len(prompts), samples) for side in sides)
        return cls(prompts, champion_PS, challenger_PS, unmatched)


class PairedDifference(Settings):
    """Difference between the mean scores of challenger and champion on the problems of a suite, with confidence bounds
    and a significance test. A pair consists of the scores of both policies in one sample of a problem."""

    prompts: int
    """Number of problems with scores of both policies. All statistics below are about these problems."""
    unmatched: int
    """Number of problems that are not compared, because only one policy has scores for them or the numbers of samples
    differ."""
    completions: int
    """Number of pairs of scores, with or without missing scores."""
    missing: int
    """Number of pairs in which at least one of the two scores is missing."""
    champion: float
    """Mean score of the champion over the compared problems."""
    challenger: float
    """Mean score of the challenger over the compared problems."""
    mean: float
    """Mean score of the challenger minus mean score of the champion."""
    alpha: float
    """Significance level of the two bounds, such as 0.05."""
    method: Method = "bootstrap"
    """Method of the confidence bounds. "exact": an exact test, used if each problem has a single score that is the
    lowest or highest possible. "betting": bounds by betting on means, used if the range of the scores is known.
    "bootstrap": the paired bootstrap over problems, BCa (Efron 1987), which is approximate."""
    score_range: tuple[float, float] | None = None
    """Lowest and highest possible score. None if it is unknown."""
    lower: float
    """One-sided lower confidence bound of the difference, at level 1 − alpha. If all problems have the same difference,
    the bootstrap bound is this difference, because BCa is undefined."""
    upper: float
    """One-sided upper confidence bound of the difference, at level 1 − alpha."""
    holm: tuple[float, ...]
    """Lower confidence bounds of the difference at levels 1 − alpha, 1 − alpha / 2, 1 − alpha / 3, … Holm's correction
    for comparisons on several suites selects one of them."""
    test: Literal["mcnemar", "wilcoxon"]
    """Significance test of the hypothesis that there is no gain. McNemar's exact test if scores are 0 or 1 and each
    problem has one sample, otherwise Wilcoxon's signed-rank test."""
    p: float
    """One-sided p-value of the hypothesis that there is no gain."""
    better: int
    """Number of problems on which the challenger has the higher score (c of McNemar's test)."""
    worse: int
    """Number of problems on which the champion has the higher score (b of McNemar's test)."""
    mean_square: float
    """Mean of the squared differences over the problems. If differences are −1, 0 or 1, it is the share of problems on
    which the policies differ."""

    @property
    def discordant(self) -> float:
        """Share of the problems on which the two policies have different mean scores."""
        return (self.better + self.worse) / self.prompts

    @property
    def missing_share(self) -> float:
        """Share of the pairs in which at least one of the two scores is missing."""
        return self.missing / self.completions


def compare(
    scores: PairedScores,
    *,
    alpha: float,
    seed: int,
    tests: int = 1,
    score_range: tuple[float, float] | None = None,
    threshold: float = 0.0,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Compute confidence bounds of the mean difference over problems, and test whether it exceeds the threshold.

    `alpha` is the significance level, and `tests` is the number of comparisons that Holm's method covers. A pair with a
    missing score is excluded for both policies, and a problem without a complete pair is omitted. The order of problems
    does not matter. If no range of scores is given and all scores are between 0 and 1, the range is 0 to 1. Raises
    BadInput for fewer than 30 problems. Raises Quarantined if missing scores leave fewer than 30, or if a score is
    outside its range.
    """
    champion_P, challenger_P = _problem_means(scores)
    differences_P = challenger_P - champion_P
    better, worse = int((differences_P > 0).sum()), int((differences_P < 0).sum())
    right_or_wrong = _is_at_ends(scores, champion_P, challenger_P, ends=(0, 1))
    score_range = _range_of(scores, score_range)
    levels = [alpha / (n + 1) for n in range(tests)]
    method: Method = "bootstrap"
    if score_range is None:
        lowers, upper = _bootstrap_bounds(np.sort(differences_P), levels, seed=seed, resamples=resamples)
    elif _is_at_ends(scores, champion_P, challenger_P, ends=score_range):
        method, width = "exact", score_range[1] - score_range[0]
        problems, above, below = len(differences_P), threshold / width, min(0.0, threshold) / width
        lowers = [width * exact_lower_bound(better, worse, problems, level=level, threshold=above) for level in levels]
        upper = -width * exact_lower_bound(worse, better, problems, level=alpha, threshold=-below)
    else:
        method, width = "betting", score_range[1] - score_range[0]
        lowers = [betting_lower_bound(differences_P, level=level, width=width, seed=seed) for level in levels]
        upper = -betting_lower_bound(-differences_P, level=alpha, width=width, seed=seed)
    return PairedDifference(
        prompts=len(differences_P),
        unmatched=len(scores.unmatched),
        completions=scores.missing_PS.size,
        missing=int(scores.missing_PS.sum()),
        champion=_mean(champion_P),
        challenger=_mean(challenger_P),
        mean=_mean(differences_P),
        alpha=alpha,
        method=method,
        score_range=score_range,
        lower=lowers[0],
        upper=upper,
        holm=tuple(lowers),
        test="mcnemar" if right_or_wrong else "wilcoxon",
        p=_mcnemar(better, worse) if right_or_wrong else _wilcoxon(np.sort(differences_P)),
        better=better,
        worse=worse,
        mean_square=_mean(differences_P**2),
    )


def _range_of(scores: PairedScores, score_range: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the range of scores, or None if the range is unknown. If `score_range` is None, the range is 0 to 1,
    provided that all scores are in it.

    Raises Quarantined if a score is outside of the given range.
    """
    lowest, highest = (float(end([scores.champion_PS, scores.challenger_PS])) for end in (np.nanmin, np.nanmax))
    low, high = score_range or (0.0, 1.0)
    if low - _OUTSIDE <= lowest and highest <= high + _OUTSIDE:
        return low, high
    if score_range is None:
        return None
    raise Quarantined(
        f"some scores are outside of the range of this reward: they are between {lowest:g} and {highest:g}, but the "
        f"range is {low:g} to {high:g}. Set `range` of the rule in [promotion] to the lowest and the highest possible "
        "score."
    )


def _is_at_ends(scores: PairedScores, champion_P: Floats, challenger_P: Floats, *, ends: tuple[float, float]) -> bool:
    """Return whether each problem has exactly one score per policy, and this score is one of the two ends of the
    range."""
    return scores.champion_PS.shape[1] == 1 and bool(np.isin([champion_P, challenger_P], ends).all())


def _problem_means(scores: PairedScores) -> tuple[Floats, Floats]:
    """Return the mean score of each problem for the champion and for the challenger, in the order of the problems' ids.

    A mean is computed over the pairs in which no score is missing. Problems without such a pair are omitted. Raises
    BadInput for fewer than 30 problems, or Quarantined if missing scores leave fewer than 30.
    """
    if len(scores.prompts) < MIN_PROBLEMS:
        raise BadInput(
            f"the paired test of two policies needs at least {MIN_PROBLEMS} problems that both policies answered, but "
            f"there are only {len(scores.prompts)}. Raise evaluation.problems, or `problems` of the suite. If too few "
            "problems are held out, raise data.heldout_fraction."
        )
    missing_PS = scores.missing_PS
    some_P = ~missing_PS.all(axis=1)
    ordered = sorted(np.flatnonzero(some_P), key=lambda at: scores.prompts[at])
    if some_P.sum() < MIN_PROBLEMS:
        raise Quarantined(
            f"only {some_P.sum()} of {some_P.size} problems have scores of both policies, but the gate needs at least "
            f"{MIN_PROBLEMS}, because {missing_PS.sum()} of {missing_PS.size} pairs of completions lack a score. Look "
            "at the logs for errors of the reward."
        )
    sides = (scores.champion_PS, scores.challenger_PS)
    champion_P, challenger_P = (np.nanmean(np.where(missing_PS, np.nan, side)[ordered], axis=1) for side in sides)
    return champion_P, challenger_P


def _mean(values_P: Floats) -> float:
    return fsum(values_P) / len(values_P)  # exact, whatever the order


def _bootstrap_bounds(
    differences_P: Floats, levels: Sequence[float], *, seed: int, resamples: int
) -> tuple[list[float], float]:
    """Return a BCa lower bound of the mean difference at confidence 1 − level for each level, and the upper bound for
    the first level."""
    if np.ptp(differences_P) < _EQUAL:
        return [_mean(differences_P)] * len(levels), _mean(differences_P)
    from scipy import stats

    drawn, num = None, resamples
    ends = []
    for level, side in [(levels[0], "less"), *((level, "greater") for level in levels)]:
        drawn = stats.bootstrap(
            (differences_P,),
            np.mean,
            n_resamples=num,
            batch=max(1, _DRAWN_AT_ONCE // len(differences_P)),
            confidence_level=1 - level,
            alternative=side,
            method="BCa",
            bootstrap_result=drawn,
            rng=seed,
        )
        num = 0  # the other bounds use the same resamples
        interval = drawn.confidence_interval
        ends.append(float(interval.high if side == "less" else interval.low))
    return ends[1:], ends[0]


def _mcnemar(better: int, worse: int) -> float:
    """Return the one-sided p-value of McNemar's exact test (1947), a sign test on the problems that only one policy
    solves. `better` and `worse` are the numbers of problems on which the challenger is better and worse."""
    from scipy.special import bdtrc

    return float(bdtrc(better - 1, better + worse, 0.5)) if better else 1.0


def _wilcoxon(differences_P: Floats) -> float:
    """Return the one-sided p-value of Wilcoxon's signed-rank test (1945). Problems with a difference of 0 are
    excluded."""
    from scipy import stats

    return float(stats.wilcoxon(differences_P, alternative="greater").pvalue) if differences_P.any() else 1.0
