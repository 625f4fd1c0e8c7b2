"""Verdict of the gate about a challenger (the retrained policy), from the measurements of all rules. Possible verdicts
are promote, keep, reject and invalid.

This module does not import torch.
"""

from typing import Literal

from rheostat.infra.config import Settings
from rheostat.models.gate.comparison import PairedDifference
from rheostat.models.gate.contamination import Contamination
from rheostat.models.gate.size import problems_needed

_TESTS = {"mcnemar": "McNemar's", "wilcoxon": "Wilcoxon's"}


class MeasuredGain(Settings):
    """Comparison on a primary suite, on which the challenger must be better than the champion."""

    suite: str
    """Name of the evaluation suite on which both policies were compared."""
    min_gain: float = 0.0
    """Gain that must be shown: the lower confidence bound of the difference must exceed this value."""
    difference: PairedDifference
    """Measured difference, with one lower confidence bound for each number of comparisons in Holm's method."""

    def shows(self, tests: int) -> bool:
        """Return whether the gain is statistically significant after Holm's correction for `tests` comparisons.

        A bootstrap bound must also be confirmed by the significance test, because it exceeds 0 more often than its
        level allows if few problems differ.
        """
        difference, level = self.difference, self.difference.alpha / tests
        is_confirmed = difference.method != "bootstrap" or self.min_gain < 0 or difference.p <= level
        return difference.holm[tests - 1] > self.min_gain and is_confirmed

    @property
    def is_loss(self) -> bool:
        """Whether the challenger is significantly worse than the champion, by more than `min_gain` allows if that is
        negative."""
        return self.difference.upper < min(0.0, self.min_gain)

    def reason(self, tests: int) -> str:
        """Return one line with the result of the comparison for messages. `tests` is the number of comparisons in
        Holm's method."""
        difference, level = self.difference, self.difference.alpha / tests
        lower, sure = difference.holm[tests - 1], f"{100 * (1 - level):.4g}%"
        if self.is_loss:
            bound = f"{100 * (1 - difference.alpha):.4g}% upper bound {difference.upper:+.3f}"
            return f"{self.suite}: {difference.mean:+.3f} ({bound}), worse than the champion"
        line = f"{self.suite}: {difference.mean:+.3f} ({sure} lower bound {lower:+.3f})"
        if self.shows(tests):
            return f"{line} > {self.min_gain:g}"
        if lower > self.min_gain:
            counts = f"{difference.better} problems better, {difference.worse} worse"
            return f"{line}, but {_TESTS[difference.test]} p {difference.p:.3g} is above {level:.3g}: {counts}"
        return f"{line}, not above {self.min_gain:g}{_suggest_problems(difference, self.min_gain, level)}"


class MeasuredGuard(Settings):
    """Comparison on a guard suite, on which the challenger must not lose `margin` or more to the champion."""

    suite: str
    """Name of the evaluation suite whose problems were measured."""
    margin: float
    """Loss that must be excluded: the lower confidence bound of the difference must be above minus this margin."""
    difference: PairedDifference
    """Measured difference between the challenger's and the champion's mean scores on the suite."""

    @property
    def holds(self) -> bool:
        """Whether a loss of the margin or more is excluded. False for a bootstrap bound, because it cannot exclude rare
        losses."""
        return self.difference.method != "bootstrap" and self.difference.lower > -self.margin

    def reason(self) -> str:
        """Return one line for messages with the measured difference, its bound and the allowed margin."""
        difference = self.difference
        line = f"{self.suite}: {difference.mean:+.3f}, lower bound {difference.lower:+.3f}"
        if self.holds:
            return f"{line} > {-self.margin:g}"
        return f"{line} is not above {-self.margin:g}{_suggest_problems(difference, -self.margin, difference.alpha)}"


class MeasuredLimit(Settings):
    """Measured quantity of the challenger, such as its mean length, with the maximum that the gate allows."""

    name: str
    """Name of the measured quantity: mean length, KL divergence, share of truncated completions, or cost."""
    value: float
    """Measured value of the challenger, in the unit of the named quantity."""
    most: float
    """Maximum that the gate allows, in the same unit as `value`."""

    @property
    def bound(self) -> str:
        """Allowed maximum as text for messages, such as `at most 5`."""
        return f"at most {self.most:g}"

    @property
    def holds(self) -> bool:
        """Whether the measured value is at most the allowed maximum."""
        return self.value <= self.most

    def reason(self) -> str:
        """Return one line for messages with the measured value and its maximum."""
        return f"{self.name}: {self.value:.4g} is {self.bound if self.holds else f'above {self.most:g}'}"


class MeasuredFloor(Settings):
    """Mean score of the challenger on a suite, with the minimum that the gate requires regardless of the champion's
    score."""

    name: str
    """Name of the suite, with the name of the reward term if the minimum is about a single term."""
    value: float
    """Mean score of the challenger on the suite. Completions without a score are excluded."""
    least: float
    """Minimum mean score that the gate requires."""
    missing_share: float
    """Share of the challenger's completions without a score, which are excluded from the mean."""

    @property
    def bound(self) -> str:
        """Required minimum as text for messages, such as `at least 0.5`."""
        return f"at least {self.least:g}"

    @property
    def holds(self) -> bool:
        """Whether the mean score is at least the required minimum."""
        return self.value >= self.least

    def reason(self) -> str:
        """Return one line for messages with the mean score and its required minimum."""
        return f"{self.name}: {self.value:.4g} is {self.bound if self.holds else f'below {self.least:g}'}"


class Evidence(Settings):
    """Measurements of a challenger on which the promotion gate bases its verdict."""

    gains: tuple[MeasuredGain, ...]
    """Results of the primary suites, at least one. The challenger can be promoted if at least one gain is significant
    after Holm's correction."""
    guards: tuple[MeasuredGuard, ...] = ()
    """Results of the guard suites. The challenger is rejected if one of them does not exclude a loss of its margin."""
    limits: tuple[MeasuredLimit, ...] = ()
    """Measured quantities with an allowed maximum. The challenger is rejected if one of them exceeds its maximum."""
    floors: tuple[MeasuredFloor, ...] = ()
    """Mean scores with a required minimum. The challenger is rejected if one of them is below its minimum."""
    contaminated: dict[str, float] = {}
    """Share of each suite's problems that also occur among the training problems, by name of the suite."""
    trained_on: dict[str, Contamination] = {}
    """Number and example ids of each suite's problems that also occur among the training problems, by name of the
    suite."""


class GateVerdict(Settings):
    """Decision of the promotion gate about a challenger, with its reasons."""

    verdict: Literal["promote", "keep", "reject", "invalid"]
    """Decision. `promote`: a gain is significant and all other rules hold. `keep`: the champion stays, because no gain
    is significant. `reject`: the challenger is worse, or violates a guard, a limit or a floor. `invalid`: the
    measurements do not allow a decision."""
    reasons: tuple[str, ...]
    """Reasons for the decision, one line each. The decisive reasons come first."""


def decide(evidence: Evidence, *, max_missing: float, max_contaminated: float) -> GateVerdict:
    """Decide whether a challenger replaces the champion, given the measurements.

    `max_missing` is the largest allowed share of missing scores in a suite, and `max_contaminated` the largest allowed
    share of its problems that also occur among the training problems. Above one of them, the verdict is `invalid`.
    """
    assert evidence.gains, "a gate needs at least one primary suite"
    doubts = _find_doubts(evidence, max_missing, max_contaminated)
    tests = _count_comparisons(evidence.gains)
    shown_gains = [gain for gain, test in zip(evidence.gains, tests, strict=True) if gain.shows(test)]
    rules: list[MeasuredGuard | MeasuredLimit | MeasuredFloor] = [
        *evidence.guards,
        *evidence.limits,
        *evidence.floors,
    ]
    losses = [gain.is_loss for gain in evidence.gains]
    lines = [(gain.is_loss, gain.reason(test)) for gain, test in zip(evidence.gains, tests, strict=True)]
    lines += [(not rule.holds, rule.reason()) for rule in rules]
    reasons = [line for fell, line in lines if fell] + [line for fell, line in lines if not fell]
    if doubts:
        return GateVerdict(verdict="invalid", reasons=(*doubts, *reasons))
    if any(losses) or not all(rule.holds for rule in rules):
        return GateVerdict(verdict="reject", reasons=tuple(reasons))
    return GateVerdict(verdict="promote" if shown_gains else "keep", reasons=tuple(reasons))


def _find_doubts(evidence: Evidence, max_missing: float, max_contaminated: float) -> list[str]:
    doubts = []
    rules: list[MeasuredGain | MeasuredGuard] = [*evidence.gains, *evidence.guards]
    missing = {floor.name: floor.missing_share for floor in evidence.floors}
    doubts += [
        f"{guard.suite}: the scores of a guard must have a known range if some are outside 0 to 1. Set `range` of "
        "the guard in [promotion] to the lowest and the highest possible score."
        for guard in evidence.guards
        if guard.difference.method == "bootstrap"
    ]
    for suite, difference in {rule.suite: rule.difference for rule in rules}.items():
        missing[suite] = difference.missing_share
        if difference.unmatched:
            doubts.append(
                f"{suite}: only one of the two policies answered {difference.unmatched} problems, but both must "
                "answer the same problems. Run the missing evaluation again"
            )
    for suite, share in missing.items():
        if share > max_missing:
            doubts.append(
                f"{suite}: {share:.1%} of the scores are missing, which is more than max_missing, {max_missing:.1%}"
            )
    for suite, share in evidence.contaminated.items():
        if share > max_contaminated:
            named = evidence.trained_on[suite].text()
            doubts.append(
                f"{suite}: {named}. This share, {share:.1%}, is above max_contaminated, {max_contaminated:.1%}"
            )
    return doubts


def _count_comparisons(gains: tuple[MeasuredGain, ...]) -> list[int]:
    """Return, for each gain, the number of comparisons by which Holm's method (1979) divides its significance level."""
    comparisons = [len(gains)] * len(gains)
    shown_gains: set[int] = set()
    while True:
        num_left = len(gains) - len(shown_gains)
        new = {at for at, gain in enumerate(gains) if at not in shown_gains and gain.shows(num_left)}
        for at in set(range(len(gains))) - shown_gains:
            comparisons[at] = num_left
        shown_gains |= new
        if not new or len(shown_gains) == len(gains):
            return comparisons


def _suggest_problems(difference: PairedDifference, above: float, level: float) -> str:
    """Return a remark for messages with the number of problems needed to show a difference of the measured size, or ""
    if no number is enough. The difference must be shown to exceed `above` at significance level `level`."""
    if difference.mean <= above:
        return ""
    low, high = difference.score_range or (0.0, 1.0)
    width = high - low
    needed = problems_needed(
        difference.mean / width,
        difference.mean_square / width**2,
        alpha=level,
        threshold=above / width,
        method="exact" if difference.method == "exact" else "betting",
    )
    problems = max(needed, difference.prompts + 1)
    return f". About {problems:,} problems, not {difference.prompts:,}, would be needed to show this difference"
