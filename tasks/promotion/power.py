"""What a gate can see with the problems that its suites have, before anything is trained."""

import logging

from infra.store.registry import Registry, open_registry
from infra.store.runs import list_runs
from models.config.policy import PolicyConfig
from models.config.promotion import SuiteCheck
from models.gate.size import DISCORDANT, RulePower
from tasks.config.run import RunConfig
from tasks.promotion.gate import gates_of
from tasks.promotion.suites import CHALLENGER, rules_of, suites_of
from tasks.run.preflight import preflight

logger = logging.getLogger(__name__)


async def check_suites(config: RunConfig, configured: PolicyConfig) -> None:
    """Have the suites checked, and the champion that may have taken the configured policy's place, unless it has begun.

    Rules that ask for more than their suites can show are warned of. Raises BadInput.
    """
    if config.name in list_runs(config.store):
        return
    for power in await gate_power(config, configured):
        if power.is_short:
            logger.warning("warning: %s", power.text())


async def gate_power(config: RunConfig, configured: PolicyConfig | None = None) -> list[RulePower]:
    """Say what each rule shows with the problems of its suite. Raises BadInput where inputs of a suite are wrong."""
    rules, suites = rules_of(config), list(suites_of(config))
    for suite in suites:
        against = SuiteCheck(
            suite=suite.name, data=config.data, max_contaminated=rules.max_contaminated, policy=configured
        )
        await preflight(suite.config(CHALLENGER, config.policy), part="plan", checked=against)
    problems = {suite.name: suite.evaluation.problems for suite in suites}
    spread = _spread(open_registry(config.store, rules.registry))
    alpha = rules.alpha / len(rules.primary)
    asked = [(rule, "primary", max(0.0, rule.min_gain), alpha) for rule in rules.primary]
    guarded = [(rule, "guard", rule.margin, rules.alpha) for rule in rules.guards]
    return [
        RulePower(
            rule=rule.label,
            kind=kind,
            problems=problems[rule.suite],
            asked=least,
            discordant=max(spread.get(rule.label, DISCORDANT), least**2),
            alpha=level,
        )
        for rule, kind, least, level in (*asked, *guarded)
    ]


def _spread(registry: Registry) -> dict[str, float]:
    """How much the two policies differed by each rule, the last time that they were compared and did."""
    found: dict[str, float] = {}
    for gate in gates_of(registry):
        if gate.evidence is not None:
            gains = {each.suite: each.difference.mean_square for each in gate.evidence.gains}
            guards = {each.suite: each.difference.mean_square for each in gate.evidence.guards}
            found |= {rule: square for rule, square in {**gains, **guards}.items() if square}
    return found
