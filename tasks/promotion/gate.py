"""Gate of a retrain: compares the new policy (challenger) with the champion on evaluation suites, and decides by the
configured rules whether the challenger may replace the champion."""

from collections import Counter
from collections.abc import Iterator, Mapping

from blake3 import blake3

from rheostat.infra.config import Settings
from rheostat.infra.costs import total
from rheostat.infra.errors import Quarantined
from rheostat.infra.store.registry import Registry, open_registry
from rheostat.infra.store.runs import Run, open_run
from rheostat.models.config.promotion import ComparisonRule, Floor, LimitsConfig, PromotionConfig
from rheostat.models.gate.comparison import PairedDifference, PairedScores, compare
from rheostat.models.gate.contamination import Contamination, contamination
from rheostat.models.gate.verdict import (
    Evidence,
    GateVerdict,
    MeasuredFloor,
    MeasuredGain,
    MeasuredGuard,
    MeasuredLimit,
    decide,
)
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.draft import read_draft, trained_ids_key
from rheostat.tasks.promotion.evidence import SuiteAnswers, mean_score, prompt_identities, read_answers
from rheostat.tasks.promotion.suites import CHALLENGER, Opponent, Suite, promotion_rules, suites_of
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.stages import stage
from rheostat.tasks.views.metrics import Accuracy, run_costs


class SuiteResult(Settings):
    """Accuracies of the champion and of the new policy (challenger) on one evaluation suite."""

    digest: str
    """Digest of the suite's problems. Suites with the same problems have the same digest."""
    champion: Accuracy
    """Accuracy of the champion, or of the run's initial policy if there is no champion."""
    challenger: Accuracy
    """Accuracy of the retrained policy."""
    past: int
    """Number of earlier retrains in the same registry that were compared on the same problems. Each one makes a false
    pass more likely."""


class GateResult(GateVerdict):
    """Decision whether a retrained policy may replace the champion, with the measurements behind the decision."""

    evidence: Evidence | None
    """Measured differences, guards (suites that must not get worse) and limits, or None if scores were missing for most
    problems."""
    opponent: int
    """Number of the registry record of the champion that the new policy was compared with, or 0 for the run's initial
    policy."""
    fingerprint: str
    """Fingerprint of the configuration with which the new policy was trained."""
    suites: dict[str, SuiteResult]
    """Accuracies on each suite, by name of the suite."""


@stage("gate")
async def run_gate(config: RunConfig, opponent: Opponent) -> GateResult:
    """Compare the two policies on every suite that the promotion rules name, and return the decision. The same
    evaluations always give the same decision."""
    rules, run = promotion_rules(config), open_run(config.store, config.name)
    suites = list(suites_of(config))
    answers = {suite.name: [read_answers(suite, side) for side in (opponent.side, CHALLENGER)] for suite in suites}
    evidence = None
    try:
        evidence = _collect_evidence(run, config, opponent, answers)
    except Quarantined as error:
        verdict = GateVerdict(verdict="invalid", reasons=(str(error),))
    else:
        verdict = decide(evidence, max_missing=rules.max_missing, max_contaminated=rules.max_contaminated)
    past = Counter(
        suite.digest for gate in gates_of(open_registry(config.store, rules.registry)) for suite in gate.suites.values()
    )
    results = {
        name: SuiteResult(
            digest=champion.digest,
            champion=champion.accuracy,
            challenger=challenger.accuracy,
            past=past[champion.digest],
        )
        for name, (champion, challenger) in answers.items()
    }
    reasons = [_warn_of_reuse(name, result.past, rules.alpha) for name, result in results.items() if result.past]
    return GateResult(
        verdict=verdict.verdict,
        reasons=(*verdict.reasons, *reasons),
        evidence=evidence,
        opponent=opponent.number,
        fingerprint=run.record.fingerprint,
        suites=results,
    )


def gates_of(registry: Registry) -> Iterator[GateResult]:
    """Yield the decision about each retrain in the registry, once per retrain. A later record that signs a proposal
    repeats the decision and is skipped."""
    seen_runs: set[str] = set()
    for record in registry.records():
        if record.gate is not None and record.run not in seen_runs:
            seen_runs.add(record.run)
            yield GateResult.model_validate(record.gate)


def _warn_of_reuse(name: str, past: int, alpha: float) -> str:
    """Return a warning with the probability that a policy which is no better passes by chance. It grows with the number
    of earlier retrains (`past`) that were compared on the same problems."""
    chance = 1 - (1 - alpha) ** (past + 1)
    gates = "one earlier gate" if past == 1 else f"{past} earlier gates"
    return (
        f"{name}: {gates} used these problems; with {past + 1} gates, a challenger that is no better passes with "
        f"probability {chance:.1%}"
    )


def _collect_evidence(
    run: Run, config: RunConfig, opponent: Opponent, answers: Mapping[str, list[SuiteAnswers]]
) -> Evidence:
    rules = promotion_rules(config)
    suites = {suite.name: suite for suite in suites_of(config)}

    def difference(rule: ComparisonRule, threshold: float) -> PairedDifference:
        return _compare_sides(rule, suites[rule.suite], answers[rule.suite], rules, threshold=threshold)

    before = ids_trained_before(open_registry(config.store, rules.registry), run.name, opponent)
    trained_on = {name: _measure_contamination(run, sides[1], before) for name, sides in answers.items()}
    return Evidence(
        gains=tuple(
            MeasuredGain(suite=rule.label, min_gain=rule.min_gain, difference=difference(rule, rule.min_gain))
            for rule in rules.primary
        ),
        guards=tuple(
            MeasuredGuard(suite=rule.label, margin=rule.margin, difference=difference(rule, -rule.margin))
            for rule in rules.guards
        ),
        limits=tuple(_measure_limits(rules.limits, run, config.iterations, next(iter(answers.values()))[1])),
        floors=tuple(_measure_floor(rule, answers[rule.suite][1]) for rule in rules.floors),
        contaminated={name: known.share for name, known in trained_on.items()},
        trained_on=trained_on,
    )


def _measure_floor(rule: Floor, challenger: SuiteAnswers) -> MeasuredFloor:
    mean, missing = mean_score(challenger, rule.term)
    return MeasuredFloor(name=rule.label, value=mean, least=rule.min_score, missing_share=missing)


def _measure_contamination(run: Run, answers: SuiteAnswers, learnt_before_ids: frozenset[str]) -> Contamination:
    trained_problems = (problem for _, problem in prompt_identities(run, "train"))
    return contamination(answers.problems, trained_problems, before=learnt_before_ids)


def ids_trained_before(registry: Registry, run: str, opponent: Opponent) -> frozenset[str]:
    """Return the ids of the problems that the opponent, or the champion from which the run started, was trained on."""
    draft, runs = read_draft(registry, run), {record.number: record.run for record in registry.records()}
    champions = {opponent.number, 0 if draft is None else draft.champion} - {0}
    lists = [registry.store.find(trained_ids_key(runs[number])) or b"" for number in champions]
    return frozenset(b"".join(lists).decode().split())


def _compare_sides(
    rule: ComparisonRule, suite: Suite, sides: list[SuiteAnswers], rules: PromotionConfig, *, threshold: float
) -> PairedDifference:
    champion, challenger = sides
    seed = blake3("\n".join((rule.label, champion.policy, challenger.policy)).encode()).digest(length=8)
    term = rule.term or next(iter(champion.scores))
    scores = PairedScores.of(champion.scores[term], challenger.scores[term])
    score_range = rule.range or suite.reward(rule.term).score_range
    try:
        return compare(
            scores,
            alpha=rules.alpha,
            seed=int.from_bytes(seed),
            tests=len(rules.primary),
            score_range=score_range,
            threshold=threshold,
        )
    except Quarantined as error:
        raise Quarantined(f"{rule.label}: {error}") from error


def _measure_limits(limits: LimitsConfig, run: Run, iterations: int, answers: SuiteAnswers) -> Iterator[MeasuredLimit]:
    sealed = run.find(StageKey.of(iteration_key(iterations), "seal"))
    measured = {
        "length": answers.tokens,
        "max_truncated": answers.cut_off,
        "kl": 0.0 if sealed is None else sealed.metrics.get("update/kl_old", 0.0),
        "price": total(run_costs(run).values()).price,
    }
    for name, value in measured.items():
        if (bound := getattr(limits, name)) is not None:
            yield MeasuredLimit(name=name, value=value, most=bound)
