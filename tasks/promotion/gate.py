"""The gate: what the evaluations of champion and challenger say by the configured rules."""

from collections.abc import Iterator, Mapping

from blake3 import blake3

from infra.errors import Quarantined
from infra.store.runs import Run, open_run
from models.config.promotion import LimitsConfig, PromotionConfig
from models.gate.comparison import PairedDifference, PairedScores, compare
from models.gate.contamination import Contamination, contamination
from models.gate.verdict import Evidence, GateVerdict, MeasuredGain, MeasuredGuard, MeasuredLimit, decide
from tasks.config.run import RunConfig
from tasks.promotion.evidence import SuiteAnswers, answers_of, prompt_identities
from tasks.promotion.suites import SIDES, suites_of
from tasks.run.keys import StageKey, iteration_key
from tasks.run.stages import stage


class GateResult(GateVerdict):
    """A verdict and what it goes by."""

    evidence: Evidence | None
    """What was measured; none where scores were missing for most problems."""


@stage("gate")
async def judge(config: RunConfig) -> GateResult:
    """Compare the two policies on every suite that the rules name; the same evaluations give the same verdict."""
    promotion = config.promotion
    assert promotion is not None, "a gate has rules"
    suites = list(suites_of(config, promotion))
    answers = {suite.name: [answers_of(suite, side) for side in SIDES] for suite in suites}
    try:
        differences = {name: _difference(name, sides, promotion) for name, sides in answers.items()}
    except Quarantined as error:
        return GateResult(verdict="invalid", reasons=(str(error),), evidence=None)
    run = open_run(config.store, config.name)
    evidence = Evidence(
        gains=tuple(
            MeasuredGain(suite=rule.suite, min_gain=rule.min_gain, difference=differences[rule.suite])
            for rule in promotion.primary
        ),
        guards=tuple(
            MeasuredGuard(suite=rule.suite, margin=rule.margin, difference=differences[rule.suite])
            for rule in promotion.guards
        ),
        limits=tuple(_limits(promotion.limits, run, config.iterations, answers[suites[0].name][1])),
        contaminated={name: _contaminated(run, sides[1]).share for name, sides in answers.items()},
    )
    found = decide(evidence, max_missing=promotion.max_missing, max_contaminated=promotion.max_contaminated)
    return GateResult(**found.model_dump(), evidence=evidence)


def _contaminated(run: Run, answers: SuiteAnswers) -> Contamination:
    return contamination(answers.problems, (problem for _, problem in prompt_identities(run, "train")))


def _difference(name: str, sides: list[SuiteAnswers], promotion: PromotionConfig) -> PairedDifference:
    champion, challenger = sides
    seed = blake3("\n".join((name, champion.policy, challenger.policy)).encode()).digest(length=8)
    scores = PairedScores.of(champion.scores, challenger.scores)
    return compare(scores, alpha=promotion.alpha, seed=int.from_bytes(seed), tests=len(promotion.primary))


def _limits(limits: LimitsConfig, run: Run, iterations: int, answers: SuiteAnswers) -> Iterator[MeasuredLimit]:
    sealed = run.find(StageKey.of(iteration_key(iterations), "seal"))
    kl = 0.0 if sealed is None else sealed.metrics.get("update/kl_old", 0.0)
    measured: Mapping[str, float] = {"length": answers.tokens, "cut_off": answers.cut_off, "kl": kl}
    for name, value in measured.items():
        if (most := getattr(limits, name)) is not None:
            yield MeasuredLimit(name=name, value=value, most=most)
