"""Stored rollouts scored again by other rewards, or given advantages again by another algorithm.

Nothing is generated, nobody learns from them, and what was stored stays as it is.
"""

import logging
import time
from dataclasses import replace

from prefect import task

from infra.store.manifests import Manifest
from models.algorithms.advantages import required_models
from models.config.rewards import ScoringConfig
from models.judges.checks import check_judges
from models.records.work import ComparisonWork, CreditWork
from placement.records import Plan
from tasks.credit import ScoredShards, scored_shards
from tasks.offline_training import local_terms
from tasks.placement.demand import workers_of
from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey, iteration_key, judge_role
from tasks.run.rescorings import (
    Derived,
    RecreditTerms,
    RescoringTerms,
    check_terms,
    own_terms,
    rescored_pairs,
    rescored_waves,
    sealed_numbers,
)
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, record, required
from tasks.run.versions import policy_of
from tasks.update import reward_coefficient
from tasks.views.metrics import shown

logger = logging.getLogger(__name__)


@task(task_run_name="begin {name}")
async def begin_rescoring(run: RunRef, name: str) -> None:
    """Commit by which rewards the re-scoring of that name scores. RunChanged if they were others before."""
    session, derived = session_of(run), Derived("rescore", name)
    terms = RescoringTerms(scoring=session.settings.scoring)
    check_terms(session.run, derived, terms)
    record(run, derived.terms_key, detail=terms.model_dump(mode="json"))


async def iterations_left(run: RunRef, derived: Derived, iterations: tuple[int, ...]) -> list[int]:
    """Iterations that are not done yet."""
    done = sealed_numbers(session_of(run).run, derived)
    return [number for number in iterations if number not in done]


@task(task_run_name="judges of the run")
async def adopt_judges(run: RunRef, name: str) -> list[str]:
    """Take over the models that the run has made for the very same rewards; return the terms whose model is to make."""
    session, prefix = session_of(run), Derived("rescore", name).prefix
    own = ScoringConfig.model_validate(session.run.record.config["scoring"]).local
    missing = []
    for term, reward in session.settings.scoring.local.items():
        made = session.run.find(StageKey.judge(term)) if own.get(term) == reward else None
        if made is None:
            missing.append(term)
        else:
            record(run, StageKey.judge(term).below(prefix), parents=[made], bundles=made.bundles, detail=made.detail)
    return missing


async def wake_judges(run: RunRef, name: str) -> None:
    """Have the models behind rewards share all worker slots; nothing else needs them."""
    session, prefix = session_of(run), Derived("rescore", name).prefix
    for role in ("preparation", "update"):
        await session.release(role)
    terms = local_terms(run)
    if terms:
        slots = session.settings.pools.workers
        workers = workers_of(session.settings, Plan(mode="colocated", rollout=slots, scoring=slots), "scoring")
        models = {judge_role(term): policy_of(required(run, StageKey.judge(term).below(prefix))) for term in terms}
        await (await session.fleet()).arrange(workers, take=models)


def waves_to_rescore(run: RunRef, name: str, number: int) -> list[BatchPlan]:
    """The stored batches of an iteration, under the keys of a re-scoring."""
    return rescored_waves(session_of(run).run, name, number)


@task(task_run_name="it-{number:04d} seal")
async def seal_rescoring(run: RunRef, name: str, number: int, began: float) -> Manifest:
    """Commit that an iteration is scored again, and how the rewards compare; refuse those of judges gone wrong."""
    session, derived = session_of(run), Derived("rescore", name)
    pairs = list(rescored_pairs(session.run, name, number))
    verdicts = {
        term: [
            required(run, wave.shard_key(judge_role(term), shard))
            for wave in waves_to_rescore(run, name, number)
            for shard in range(wave.num_shards)
        ]
        for term in session.settings.scoring.served
    }
    shown_by = {term: [manifest.metrics for manifest in manifests] for term, manifests in verdicts.items()}
    check_judges(session.settings.scoring, shown_by, iteration=number)
    work = ComparisonWork(
        stored=tuple(stored.shards[0] for _, stored, _ in pairs), new=tuple(new.shards[0] for _, _, new in pairs)
    )
    metrics = (await session.perform("scoring", "compare_rewards", work)).result.metrics or {}
    sealed = record(
        run,
        derived.key(number, "seal"),
        parents=[manifest for rollouts, stored, new in pairs for manifest in (rollouts, stored, new)],
        metrics=metrics,
        seconds={"total": time.monotonic() - began},
    )
    logger.info(
        "iteration %3d  reward %s  before %s  changed %.1f%%  missing %d  %.1fs",
        number,
        shown(metrics.get("reward_mean")),
        shown(metrics.get("stored_reward_mean")),
        100 * metrics["changed_fraction"],
        metrics["missing"],
        time.monotonic() - began,
    )
    return sealed


@task(task_run_name="begin {name}")
async def begin_recredit(run: RunRef, name: str, scores: str | None) -> None:
    """Commit by which algorithm and from which scores the re-credit goes. RunChanged if they were others before."""
    session, derived = session_of(run), Derived("recredit", name)
    terms = RecreditTerms(algorithm=session.settings.algorithm, scores=scores)
    check_terms(session.run, derived, terms)
    record(run, derived.terms_key, detail=terms.model_dump(mode="json"))


@task(task_run_name="it-{number:04d} credit", retries=2, retry_condition_fn=is_transient)
async def credit_again(run: RunRef, name: str, number: int, scores: str | None) -> Manifest:
    """Turn an iteration's stored rollouts into training samples, as the run did or would have done."""
    settings = session_of(run).settings
    scored = scored_again(run, number, scores)
    estimates = (
        [required(run, StageKey.of(iteration_key(number), "estimates"))]
        if required_models(settings.algorithm).any
        else []
    )
    dynamic = settings.rollout.dynamic
    if dynamic is not None and dynamic.on_shortfall == "fail":  # other scores may well leave fewer groups to learn from
        dynamic = dynamic.model_copy(update={"on_shortfall": "shrink"})
    work = CreditWork(
        iteration=number,
        shards=scored.shards,
        target=settings.rollout.prompts if dynamic is not None else None,
        dynamic=dynamic,
        policy_version=number - 1,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
        estimates=tuple(shard for manifest in estimates for shard in manifest.shards),
        kl_coefficient=_kl_coefficient(run, number),
    )
    pairs = [manifest for pair in zip(scored.rollouts, scored.scores, strict=True) for manifest in pair]
    key = Derived("recredit", name).key(number, "credit")
    return await once(run, key, role="scoring", method="credit", work=work, parents=[*pairs, *estimates])


def scored_again(run: RunRef, number: int, scores: str | None) -> ScoredShards:
    """All that an iteration's credit looks at, with the run's own scores or those of a re-scoring."""
    scored = scored_shards(run, number)
    if scores is None:
        return scored
    prefix = Derived("rescore", scores).prefix
    return replace(
        scored, scores=tuple(required(run, StageKey.parse(stored.key).below(prefix)) for stored in scored.scores)
    )


@task(task_run_name="it-{number:04d} seal")
async def seal_recredit(run: RunRef, name: str, number: int, began: float) -> Manifest:
    """Commit that an iteration has its other advantages, and how they compare with those that were learnt from."""
    session, derived = session_of(run), Derived("recredit", name)
    stored, new = (
        required(run, StageKey.of(iteration_key(number), "credit")),
        required(run, derived.key(number, "credit")),
    )
    work = ComparisonWork(stored=stored.shards, new=new.shards)
    compared = await session.perform("scoring", "compare_advantages", work)
    metrics = {
        "samples": new.metrics["samples"],
        "informative_groups": new.metrics["informative_groups"],
        **(compared.result.metrics or {}),
    }
    elapsed = time.monotonic() - began
    sealed = record(
        run, derived.key(number, "seal"), parents=[stored, new], metrics=metrics, seconds={"total": elapsed}
    )
    logger.info(
        "iteration %3d  samples %d  informative groups %d  mean |advantage| %s  correlation %s  %.1fs",
        number,
        metrics["samples"],
        metrics["informative_groups"],
        shown(metrics.get("advantage_size")),
        shown(metrics.get("correlation")),
        elapsed,
    )
    return sealed


def _kl_coefficient(run: RunRef, number: int) -> float:
    """As the run adapted it where the penalty is the run's own; another one stays at its first coefficient."""
    session = session_of(run)
    kl = session.settings.algorithm.reward_kl
    if kl is None:
        return 0.0
    own = own_terms(session.run).algorithm.reward_kl
    return reward_coefficient(run, number) if kl == own else kl.coefficient
