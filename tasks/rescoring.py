"""Score stored rollouts again by other rewards: nothing is generated, and what was stored stays as it is."""

import logging
import time

from prefect import task

from infra.store.manifests import Manifest
from models.config.rewards import ScoringConfig
from models.judges.checks import check_judges
from models.records.work import ComparisonWork
from placement.records import Plan
from tasks.derived import (
    Derived,
    RescoringTerms,
    check_terms,
    rescored_pairs,
    rescored_waves,
    sealed_numbers,
)
from tasks.judges import local_terms, model_key
from tasks.placing import judge_role, workers_of
from tasks.plan import BatchPlan
from tasks.reports import shown
from tasks.session import RunRef, session_of
from tasks.stages import record, required
from tasks.versions import policy_of

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
        made = session.run.find(model_key(term)) if own.get(term) == reward else None
        if made is None:
            missing.append(term)
        else:
            record(run, f"{prefix}{model_key(term)}", parents=[made], bundles=made.bundles, detail=made.detail)
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
        models = {judge_role(term): policy_of(required(run, f"{prefix}{model_key(term)}")) for term in terms}
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
        derived.seal_key(number),
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
