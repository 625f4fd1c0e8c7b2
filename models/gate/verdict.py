"""Promote, keep, reject, or nothing to go by: the rules on what was measured. Torch-free."""

from typing import Literal

from infra.config import Settings
from models.gate.comparison import PairedDifference
from models.gate.contamination import Contamination
from models.gate.size import problems_needed

_TESTS = {"mcnemar": "McNemar's", "wilcoxon": "Wilcoxon's"}


class MeasuredGain(Settings):
    """A suite on which the challenger has to be better, and how it did."""

    suite: str
    """Name of the suite."""
    min_gain: float = 0.0
    """What the lower bound of the difference has to exceed."""
    difference: PairedDifference
    """What was measured, with bounds for as many comparisons as there are gains."""

    def shows(self, tests: int) -> bool:
        """Return whether the gain is shown if Holm's method is over this number of comparisons.

        A bootstrap bound has to be confirmed by the test of no gain. If few problems differ, the bound exceeds 0 more
        often than its level says.
        """
        difference, level = self.difference, self.difference.alpha / tests
        is_confirmed = difference.method != "bootstrap" or self.min_gain < 0 or difference.p <= level
        return difference.holm[tests - 1] > self.min_gain and is_confirmed

    @property
    def is_loss(self) -> bool:
        """Whether the challenger is shown to be worse than it may be, and than the champion."""
        return self.difference.upper < min(0.0, self.min_gain)

    def reason(self, tests: int) -> str:
        """Say in a line what was shown."""
        difference, level = self.difference, self.difference.alpha / tests
        lower, sure = difference.holm[tests - 1], f"{100 * (1 - level):.4g}%"
        if self.is_loss:
            found = f"{100 * (1 - difference.alpha):.4g}% upper bound {difference.upper:+.3f}"
            return f"{self.suite}: {difference.mean:+.3f} ({found}), worse than the champion"
        line = f"{self.suite}: {difference.mean:+.3f} ({sure} lower bound {lower:+.3f})"
        if self.shows(tests):
            return f"{line} > {self.min_gain:g}"
        if lower > self.min_gain:
            counts = f"{difference.better} problems better, {difference.worse} worse"
            return f"{line}, but {_TESTS[difference.test]} p {difference.p:.3g} is above {level:.3g}: {counts}"
        return f"{line}, not above {self.min_gain:g}{_needed(difference, self.min_gain, level)}"


class MeasuredGuard(Settings):
    """A suite on which the challenger may not be worse, and how it did."""

    suite: str
    """Name of the suite."""
    margin: float
    """How far below 0 the lower bound of the difference may lie."""
    difference: PairedDifference
    """What was measured."""

    @property
    def holds(self) -> bool:
        """Whether a loss of the margin or more is excluded. A bootstrap bound cannot exclude rare losses."""
        return self.difference.method != "bootstrap" and self.difference.lower > -self.margin

    def reason(self) -> str:
        """Say in a line whether it holds."""
        difference = self.difference
        line = f"{self.suite}: {difference.mean:+.3f}, lower bound {difference.lower:+.3f}"
        if self.holds:
            return f"{line} > {-self.margin:g}"
        return f"{line} is not above {-self.margin:g}{_needed(difference, -self.margin, difference.alpha)}"


class MeasuredLimit(Settings):
    """A number of the challenger and the most that it may be."""

    name: str
    """What was measured: mean length, KL, share of invalid answers, cost."""
    value: float
    """Of the challenger."""
    most: float
    """The most allowed."""

    @property
    def bound(self) -> str:
        """The most, in words."""
        return f"at most {self.most:g}"

    @property
    def holds(self) -> bool:
        """Whether it is no more."""
        return self.value <= self.most

    def reason(self) -> str:
        """Say in a line whether it holds."""
        return f"{self.name}: {self.value:.4g} is {self.bound if self.holds else f'above {self.most:g}'}"


class MeasuredFloor(Settings):
    """A mean score of the challenger and the least that it may be, whatever the champion's is."""

    name: str
    """Of the suite, and of its reward where the rule names one."""
    value: float
    """Of the challenger."""
    least: float
    """The least allowed."""
    missing_share: float
    """Of its answers, those without a score, which count for nothing."""

    @property
    def bound(self) -> str:
        """The least, in words."""
        return f"at least {self.least:g}"

    @property
    def holds(self) -> bool:
        """Whether it is no less."""
        return self.value >= self.least

    def reason(self) -> str:
        """Say in a line whether it holds."""
        return f"{self.name}: {self.value:.4g} is {self.bound if self.holds else f'below {self.least:g}'}"


class Evidence(Settings):
    """All that a verdict goes by."""

    gains: tuple[MeasuredGain, ...]
    """At least one; any of them, by Holm's method, is a reason to promote."""
    guards: tuple[MeasuredGuard, ...] = ()
    """All have to hold."""
    limits: tuple[MeasuredLimit, ...] = ()
    """All have to hold."""
    floors: tuple[MeasuredFloor, ...] = ()
    """All have to hold."""
    contaminated: dict[str, float] = {}
    """Share of a suite's problems that are among those trained on, by suite."""
    trained_on: dict[str, Contamination] = {}
    """Which these are, by suite."""


class GateVerdict(Settings):
    """What becomes of a challenger, and why."""

    verdict: Literal["promote", "keep", "reject", "invalid"]
    """`keep`: the champion stays for want of evidence; `reject`: the challenger is worse, or breaks a guard or a limit;
    `invalid`: what was measured decides nothing."""
    reasons: tuple[str, ...]
    """One line each; those that decided come first."""


def decide(evidence: Evidence, *, max_missing: float, max_contaminated: float) -> GateVerdict:
    """Judge a challenger; the caps are shares of a suite: of scores that are missing, of problems trained on."""
    assert evidence.gains, "a gate has at least one primary suite"
    doubts = _doubts(evidence, max_missing, max_contaminated)
    tests = _holm(evidence.gains)
    shown = [gain for gain, test in zip(evidence.gains, tests, strict=True) if gain.shows(test)]
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
    return GateVerdict(verdict="promote" if shown else "keep", reasons=tuple(reasons))


def _doubts(evidence: Evidence, max_missing: float, max_contaminated: float) -> list[str]:
    doubts = []
    rules: list[MeasuredGain | MeasuredGuard] = [*evidence.gains, *evidence.guards]
    missing = {floor.name: floor.missing_share for floor in evidence.floors}
    doubts += [
        f"{guard.suite}: no guard can hold for scores without a known range, some of which are outside 0 to 1: state "
        "the lowest and the highest possible score as `range` of the guard in [promotion]"
        for guard in evidence.guards
        if guard.difference.method == "bootstrap"
    ]
    for suite, found in {rule.suite: rule.difference for rule in rules}.items():
        missing[suite] = found.missing_share
        if found.unmatched:
            doubts.append(
                f"{suite}: {found.unmatched} problems were asked of one policy only, expected the same of both"
            )
    for suite, share in missing.items():
        if share > max_missing:
            doubts.append(f"{suite}: {share:.1%} of scores are missing, above {max_missing:.1%}")
    for suite, share in evidence.contaminated.items():
        if share > max_contaminated:
            named = evidence.trained_on[suite].text()
            doubts.append(f"{suite}: {named}; {share:.1%} is above {max_contaminated:.1%}")
    return doubts


def _holm(gains: tuple[MeasuredGain, ...]) -> list[int]:
    """Over how many comparisons each gain is judged: those that were not shown yet share alpha (Holm 1979)."""
    judged = [len(gains)] * len(gains)
    shown: set[int] = set()
    while True:
        left = len(gains) - len(shown)
        new = {at for at, gain in enumerate(gains) if at not in shown and gain.shows(left)}
        for at in set(range(len(gains))) - shown:
            judged[at] = left
        shown |= new
        if not new or len(shown) == len(gains):
            return judged


def _needed(difference: PairedDifference, above: float, level: float) -> str:
    """Return about how many problems would show that a difference like the measured one is above a threshold."""
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
    return f": to show it takes about {max(needed, difference.prompts + 1):,} problems, not {difference.prompts:,}"
