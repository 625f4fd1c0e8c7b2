"""Number of problems that a comparison of two policies needs, and what a given number of problems can show.

Gains, margins and thresholds are in units of the scores' range. `mean_square` is the mean square of the score
differences. For scores of 0 or 1 this is the share of problems on which exactly one of the two policies is right. This
module does not import torch.
"""

from functools import lru_cache
from math import ceil, sqrt
from typing import Final, Literal

from pydantic import computed_field

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.statistics import normal_cdf, normal_quantile
from rheostat.models.config.promotion import MIN_PROBLEMS
from rheostat.models.gate.bounds import Ints, betting_power, exact_power, largest_losses, restricted_variance

POWER: Final = 0.8
"""Default statistical power: the probability that a test shows a gain that exists."""
DISCORDANT: Final = 0.2
"""Assumed share of problems that exactly one of two policies solves, if nothing has been measured yet."""
SizedMethod = Literal["exact", "betting"]
_MOST_PROBLEMS: Final = 10**7
_EXACT_PROBLEMS: Final = 1000
"""Number of problems up to which the power of the exact test is computed exactly. For more problems, a normal
approximation is used."""
_EXACT_ABOVE: Final = 4000
"""Number of problems up to which the power of the exact test is computed exactly if the threshold is above 0. The
normal approximation is too optimistic for fewer problems."""
_HALVINGS: Final = 8
_REFINEMENTS: Final = 3
_CLOSE: Final = 0.005


class RulePower(Settings):
    """Statistical power of one rule of the promotion gate, given the number of problems in its evaluation suite."""

    rule: str
    """Name of the evaluation suite, with the name of the reward term if the rule is about a single term."""
    kind: Literal["primary", "guard"]
    """Kind of rule. A primary rule must show that the challenger gains, and a guard must show that it does not lose."""
    problems: int
    """Number of problems in the evaluation suite."""
    asked: float
    """Minimum gain of a primary rule, or maximum loss (margin) of a guard, in units of the score. 0 if any gain is
    enough."""
    discordant: float
    """Mean square of the score differences, divided by the square of the range of scores. The value is the last
    measured one, or 0.2 if there is none. For scores of 0 or 1, it is the share of problems on which the two policies
    differ."""
    alpha: float
    """Significance level of the rule, such as 0.05."""
    method: SizedMethod = "exact"
    """Method of the confidence bounds that is assumed for the computation."""
    width: float = 1.0
    """Width of the range of scores: highest minus lowest possible score."""

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def power(self) -> float | None:
        """Probability that a guard passes a challenger that is as good as the champion. None for a primary rule."""
        if self.kind == "primary":
            return None
        threshold = -self.asked / self.width
        return power_of(self.problems, 0.0, self.discordant, alpha=self.alpha, threshold=threshold, method=self.method)

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def needed(self) -> int:
        """Number of problems that the suite needs for a power of 0.8, or 0 if the suite has enough or if no number is
        enough.

        The power is the probability that a guard passes a challenger as good as the champion, or that a primary rule
        shows the largest possible gain.
        """
        if not self.is_short:
            return 0
        if self.kind == "guard":
            gain, threshold = 0.0, -self.asked / self.width
        else:
            gain, threshold = largest_gain(self.discordant, self.method), self.asked / self.width
        if gain <= threshold:
            return 0
        return problems_needed(gain, self.discordant, alpha=self.alpha, threshold=threshold, method=self.method)

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def shown(self) -> float | None:
        """For a primary rule, the smallest true gain that is shown with power 0.8. For a guard, the smallest margin
        with which a challenger as good as the champion passes with power 0.8.

        None if no possible gain or margin reaches this power.
        """
        problems, differ, alpha, method = self.problems, self.discordant, self.alpha, self.method
        if self.kind == "primary":
            gain = smallest_gain(problems, differ, alpha=alpha, threshold=self.asked / self.width, method=method)
        else:
            gain = smallest_margin(problems, differ, alpha=alpha, method=method)
        return None if gain is None else gain * self.width

    @computed_field  # type: ignore[prop-decorator]  # of pydantic, which mypy does not follow
    @property
    def is_short(self) -> bool:
        """Whether the suite has too few problems for a power of 0.8."""
        return self.shown is None if self.power is None else self.power < POWER

    def text(self) -> str:
        """Return one line for people that describes which gain or margin the suite's problems can show."""
        line = f"{self.rule}: with {self.problems:,} problems,"
        needs = f", which needs {self.needed:,} problems" if self.needed else ""
        if self.kind == "guard":
            line += f" an equal challenger passes the margin {self.asked:g} with power {self.power:.2f}"
            line += "" if self.shown is None else f", and the margin {self.shown:.3f} with power {POWER:g}"
            line += f"; power {POWER:g} needs {self.needed:,} problems" if self.needed else ""
        elif self.shown is None:
            line += f" no possible gain above {self.asked:g} is shown with power {POWER:g}{needs}"
        elif self.asked:
            line += f" a gain of {self.shown:.3f} is shown to be above {self.asked:g} with power {POWER:g}"
        else:
            line += f" a gain of {self.shown:.3f} is shown with power {POWER:g}"
        scores = f"{self.discordant:.0%} of problems differ"
        if self.method == "betting":
            scores = f"graded scores, root mean square difference {sqrt(self.discordant) * self.width:.2g}"
        return f"{line} (level {self.alpha:g}, {scores})"


def power_of(
    problems: int,
    gain: float,
    mean_square: float,
    *,
    alpha: float,
    threshold: float = 0.0,
    method: SizedMethod = "exact",
) -> float:
    """Return the probability that the lower confidence bound at level 1 − alpha exceeds the threshold, if `gain` is the
    true mean difference and `mean_square` the mean of squared differences."""
    if method == "betting":
        return betting_power(problems, gain=gain, mean_square=mean_square, threshold=threshold, alpha=alpha)
    differ = max(mean_square, abs(gain))
    better, worse = (differ + gain) / 2, (differ - gain) / 2
    if problems <= (_EXACT_ABOVE if threshold > 0 else _EXACT_PROBLEMS):
        return exact_power(_losses(problems, threshold, alpha), better=better, worse=worse)
    spread = sqrt(max(float(restricted_variance(better, worse, threshold)), 0.0))
    excess = (gain - threshold) * sqrt(problems) - float(normal_quantile(1 - alpha)) * spread
    return float(normal_cdf(excess / sqrt(max(differ - gain**2, 1e-12))))


@lru_cache(maxsize=64)
def _losses(problems: int, threshold: float, alpha: float) -> Ints:
    return largest_losses(problems, threshold, alpha=alpha)


def largest_gain(mean_square: float, method: SizedMethod) -> float:
    """Return the largest possible mean difference of scores, given the mean of the squared differences."""
    return mean_square if method == "exact" else sqrt(mean_square)


def problems_needed(
    gain: float,
    mean_square: float,
    *,
    alpha: float,
    threshold: float = 0.0,
    method: SizedMethod = "exact",
    power: float = POWER,
) -> int:
    """Return approximately how many problems are needed to show, with this power and at level `alpha`, that a true gain
    exceeds the threshold.

    `mean_square` is the mean of the squared differences. The number starts with the formula of Connor (1987, Biometrics
    43:207) and is corrected by its computed power. Raises BadInput if the gain does not exceed the threshold or exceeds
    what the mean square allows, or if alpha or power is out of range.

    >>> problems_needed(0.05, 0.2, alpha=0.05), problems_needed(0.05, 0.2, alpha=0.01)
    (493, 801)
    """
    if not threshold < gain <= sqrt(max(0.0, mean_square)):
        max_gain = sqrt(max(0.0, mean_square))
        raise BadInput(
            f"the gain in score to be detected is {gain:g}, but it must be above the threshold, {threshold:g}, and at "
            f"most {max_gain:g}, the largest gain that is possible with this mean square difference"
        )
    z_alpha, z_beta = _quantiles(alpha, power)
    square = mean_square - 2 * threshold * gain + threshold**2
    spread = z_alpha * sqrt(square) + z_beta * sqrt(mean_square - gain**2)
    estimate = min((spread / (gain - threshold)) ** 2, _MOST_PROBLEMS)
    for _ in range(_REFINEMENTS):
        number = max(ceil(estimate), MIN_PROBLEMS)
        computed_power = power_of(number, gain, mean_square, alpha=alpha, threshold=threshold, method=method)
        if abs(computed_power - power) < _CLOSE:
            return number
        reached = float(normal_quantile(min(max(computed_power, 0.01), 0.9999)))
        estimate = min(number * ((z_alpha + z_beta) / max(z_alpha + reached, z_alpha / 2)) ** 2, _MOST_PROBLEMS)
    number = max(ceil(estimate), MIN_PROBLEMS)
    for _ in range(_REFINEMENTS**2):
        if power_of(number, gain, mean_square, alpha=alpha, threshold=threshold, method=method) >= power:
            break
        number += max(1, number // 100)
    return number


def smallest_gain(
    problems: int, mean_square: float, *, alpha: float, threshold: float = 0.0, method: SizedMethod = "exact"
) -> float | None:
    """Return the smallest true gain that is shown to exceed the threshold with power 0.8, or None if no possible gain
    is.

    `mean_square` is the mean of the squared differences. Raises BadInput if alpha is not between 0 and 0.5.

    >>> round(smallest_gain(501, 0.2, alpha=0.05), 3)
    0.05
    """
    _quantiles(alpha, POWER)
    low, high = max(threshold, 0.0), largest_gain(mean_square, method)
    if low >= high or power_of(problems, high, mean_square, alpha=alpha, threshold=threshold, method=method) < POWER:
        return None
    for _ in range(2 * _HALVINGS):
        middle = (low + high) / 2
        shows = power_of(problems, middle, mean_square, alpha=alpha, threshold=threshold, method=method) >= POWER
        low, high = (low, middle) if shows else (middle, high)
    return high


def smallest_margin(problems: int, mean_square: float, *, alpha: float, method: SizedMethod = "exact") -> float | None:
    """Return the smallest margin (maximum loss of a guard) with which a challenger as good as the champion passes with
    power 0.8. None if even a margin of 1 is too small."""
    low, high = 0.0, 1.0
    guess = min(1.0, 4 * sqrt(mean_square / problems))
    if power_of(problems, 0.0, mean_square, alpha=alpha, threshold=-guess, method=method) >= POWER:
        high = guess
    elif power_of(problems, 0.0, mean_square, alpha=alpha, threshold=-high, method=method) < POWER:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        shows = power_of(problems, 0.0, mean_square, alpha=alpha, threshold=-middle, method=method) >= POWER
        low, high = (low, middle) if shows else (middle, high)
    return high


def _quantiles(alpha: float, power: float) -> tuple[float, float]:
    if not (0 < alpha < 0.5 and 0.5 <= power < 1):
        raise BadInput(
            f"alpha must be above 0 and below 0.5, and power must be at least 0.5 and below 1, found alpha {alpha:g} "
            f"and power {power:g}"
        )
    return float(normal_quantile(1 - alpha)), float(normal_quantile(power))
