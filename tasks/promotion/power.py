"""Statistical power of promotion rules, estimated before training: the smallest difference between two policies that
each rule can detect with the number of problems in its suite."""

import logging
from typing import Literal

from rheostat.infra.store.registry import Registry, open_registry
from rheostat.infra.store.runs import list_runs
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.promotion import ComparisonRule, SuiteCheck
from rheostat.models.gate.comparison import PairedDifference
from rheostat.models.gate.size import DISCORDANT, RulePower
from rheostat.models.gate.verdict import MeasuredGain, MeasuredGuard
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.gate import gates_of
from rheostat.tasks.promotion.suites import CHALLENGER, Suite, promotion_rules, suites_of
from rheostat.tasks.run.preflight import describe_images, preflight

logger = logging.getLogger(__name__)


async def check_suites(config: RunConfig, configured: PolicyConfig) -> None:
    """Warn, before a retrain begins, about each promotion rule whose suite has too few problems to detect the required
    difference.

    `configured` is the policy of the configuration, which the champion may have replaced. Raises BadInput if inputs of
    a suite are wrong.
    """
    if config.name in list_runs(config.store):
        return
    for power in await gate_power(config, configured):
        if power.is_short:
            logger.warning("%s", power.text())


async def gate_power(config: RunConfig, configured: PolicyConfig | None = None) -> list[RulePower]:
    """Return, for each promotion rule, how small a difference it can detect with the problems of its suite. Raises
    BadInput if inputs of a suite are wrong."""
    rules, suites = promotion_rules(config), list(suites_of(config))
    for suite in suites:
        check = SuiteCheck(
            suite=suite.name, data=config.data, max_contaminated=rules.max_contaminated, policy=configured
        )
        with suite.naming_its_keys():
            suite_config = suite.config(CHALLENGER, config.policy)
            result = await preflight(suite_config, part="plan", checked=check)
        for note in result.notes:
            logger.info("suite %s: %s", suite.name, note)
        if images := describe_images(result.facts, suite_config.data.image_background):
            logger.info("suite %s: images: %s", suite.name, images)
    by_name = {suite.name: suite for suite in suites}
    measured = _last_differences(open_registry(config.store, rules.registry))
    alpha = rules.alpha / len(rules.primary)

    def power(rule: ComparisonRule, kind: Literal["primary", "guard"], *, asked: float, alpha: float) -> RulePower:
        suite = by_name[rule.suite]
        return _rule_power(rule, suite, measured.get(rule.label), kind=kind, asked=asked, alpha=alpha)

    primary = [power(rule, "primary", asked=rule.min_gain, alpha=alpha) for rule in rules.primary]
    return primary + [power(rule, "guard", asked=rule.margin, alpha=rules.alpha) for rule in rules.guards]


def _rule_power(
    rule: ComparisonRule,
    suite: Suite,
    measured: PairedDifference | None,
    *,
    kind: Literal["primary", "guard"],
    asked: float,
    alpha: float,
) -> RulePower:
    """Estimate how small a difference a rule can detect. Scores are assumed to differ as much as in the last comparison
    by this rule."""
    reward = suite.reward(rule.term)
    low, high = rule.range or reward.score_range or (0.0, 1.0)
    is_exact = suite.evaluation.samples == 1 and not reward.is_graded
    if measured is not None:
        is_exact = measured.method == "exact"
    return RulePower(
        rule=rule.label,
        kind=kind,
        problems=suite.evaluation.problems,
        asked=asked,
        discordant=DISCORDANT if measured is None else min(1.0, measured.mean_square / (high - low) ** 2),
        alpha=alpha,
        method="exact" if is_exact else "betting",
        width=high - low,
    )


def _last_differences(registry: Registry) -> dict[str, PairedDifference]:
    """Return, for each promotion rule by label, the last measured difference between champion and new policy.
    Comparisons in which all scores were equal are skipped."""
    differences: dict[str, PairedDifference] = {}
    for gate in gates_of(registry):
        if gate.evidence is not None:
            rules: list[MeasuredGain | MeasuredGuard] = [*gate.evidence.gains, *gate.evidence.guards]
            differences |= {each.suite: each.difference for each in rules if each.difference.mean_square}
    return differences
