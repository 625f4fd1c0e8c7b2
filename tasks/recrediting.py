"""Give stored rollouts advantages again, by another algorithm or from other scores; nobody learns from them."""

import logging
import time
from dataclasses import replace

from prefect import task

from infra.store.manifests import Manifest
from models.algorithms.advantages import needs_of, reward_kl
from models.records.work import ComparisonWork, CreditWork
from tasks.derived import Derived, RecreditTerms, check_terms, own_terms
from tasks.kl import reward_coefficient
from tasks.plan import credit_key, estimates_key
from tasks.reports import shown
from tasks.scoring import Scored, scored_shards
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, record, required

logger = logging.getLogger(__name__)


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
    estimates = [required(run, estimates_key(number))] if needs_of(settings.algorithm).any else []
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
    key = f"{Derived('recredit', name).iteration_key(number)}/credit"
    return await once(run, key, role="scoring", method="credit", work=work, parents=[*pairs, *estimates])


def scored_again(run: RunRef, number: int, scores: str | None) -> Scored:
    """All that an iteration's credit looks at, with the run's own scores or those of a re-scoring."""
    scored = scored_shards(run, number)
    if scores is None:
        return scored
    prefix = Derived("rescore", scores).prefix
    return replace(scored, scores=tuple(required(run, f"{prefix}{stored.key}") for stored in scored.scores))


@task(task_run_name="it-{number:04d} seal")
async def seal_recredit(run: RunRef, name: str, number: int, began: float) -> Manifest:
    """Commit that an iteration has its other advantages, and how they compare with those that were learnt from."""
    session, derived = session_of(run), Derived("recredit", name)
    stored, new = required(run, credit_key(number)), required(run, f"{derived.iteration_key(number)}/credit")
    work = ComparisonWork(stored=stored.shards, new=new.shards)
    compared = await session.perform("scoring", "compare_advantages", work)
    metrics = {
        "samples": new.metrics["samples"],
        "informative_groups": new.metrics["informative_groups"],
        **(compared.result.metrics or {}),
    }
    elapsed = time.monotonic() - began
    sealed = record(run, derived.seal_key(number), parents=[stored, new], metrics=metrics, seconds={"total": elapsed})
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
    kl = reward_kl(session.settings.algorithm)
    if kl is None:
        return 0.0
    own = reward_kl(own_terms(session.run).algorithm)
    return reward_coefficient(run, number) if kl == own else kl.coefficient
