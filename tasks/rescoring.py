"""Rescoring and recredit of stored rollouts: compute new scores with other rewards, or new advantages with another
algorithm.

Nothing is generated or trained, and stored results stay unchanged.
"""

import logging
import time

from rheostat.infra.config import read_recorded
from rheostat.infra.store.dependencies import Dependencies, record_dependencies, recorded_config
from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.versions import policy_of
from rheostat.models.records.work import ComparisonWork
from rheostat.placement.records import Plan
from rheostat.tasks.credit import check_verdicts, compute_credit
from rheostat.tasks.placement.demand import workers_per_role
from rheostat.tasks.run.dependencies import recredit_dependencies, rescoring_dependencies
from rheostat.tasks.run.hub_inputs import base_commits, hub_commits
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, reward_model_role
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.rescorings import (
    DerivedResult,
    RecreditTerms,
    RescoringTerms,
    check_terms,
    link_completed_iterations,
    recorded_terms,
    rescored_batches,
    rescored_shards,
    sealed_numbers,
)
from rheostat.tasks.run.stages import commit_decision, controller_provenance, stage
from rheostat.tasks.update import reward_coefficient
from rheostat.tasks.views.metrics import format_number

logger = logging.getLogger(__name__)


@stage("begin {derived.name}")
async def begin_rescoring(open_run: OpenRun, derived: DerivedResult, scoring: ScoringConfig) -> None:
    """Store the rewards with which stored rollouts are scored again, as the user wrote them (`scoring`), and the
    commits of their models on the Hugging Face Hub. Raises RunChanged if a rescoring of this name was begun with other
    rewards or other code."""
    used = open_run.settings.scoring
    commits = hub_commits(used) | base_commits(used)
    dependencies = rescoring_dependencies(used).model_copy(update={"hub": commits})
    _commit_terms(open_run, derived, RescoringTerms(scoring=scoring), dependencies)


@stage("begin {derived.name}")
async def begin_recredit(open_run: OpenRun, derived: DerivedResult, scores: str | None) -> None:
    """Store the algorithm, and the source of the scores, with which advantages are computed again. Raises RunChanged if
    a recredit of this name was begun with another algorithm, other scores or other code."""
    algorithm = open_run.settings.algorithm
    terms = RecreditTerms(algorithm=algorithm, scores=scores)
    _commit_terms(open_run, derived, terms, recredit_dependencies(algorithm))


def _commit_terms(
    open_run: OpenRun, derived: DerivedResult, terms: RescoringTerms | RecreditTerms, now: Dependencies
) -> None:
    check_terms(open_run.run, derived, terms)
    record_dependencies(open_run.run, now, iteration=1, prefix=derived.prefix)
    commit_decision(open_run, derived.terms_key, detail=terms.as_recorded())


async def find_remaining_iterations(
    open_run: OpenRun, derived: DerivedResult, numbers: tuple[int, ...]
) -> list[Iteration]:
    """Return the iterations among `numbers` for which new scores or advantages are not complete yet. Completed
    iterations that are not in the chain yet are appended, for example after the process was killed."""
    link_completed_iterations(open_run.run, derived)
    done = sealed_numbers(open_run.run, derived)
    return [Iteration(open_run.run, number) for number in numbers if number not in done]


@stage("judges of the run")
async def reuse_reward_models(open_run: OpenRun, derived: DerivedResult) -> list[str]:
    """Reuse the run's reward models for rewards whose configuration is unchanged. Return the names of the rewards whose
    model must be built again."""
    own_rewards = read_recorded(ScoringConfig, recorded_config(open_run.run)["scoring"]).hosted_rewards
    missing = []
    for term, reward in open_run.settings.scoring.hosted_rewards.items():
        key = StageKey.reward_model(term)
        manifest = open_run.run.find(key) if own_rewards.get(term) == reward else None
        if manifest is None:
            missing.append(term)
        else:
            commit_decision(
                open_run,
                key.with_prefix(derived.prefix),
                parents=[manifest],
                bundles=manifest.bundles,
                detail=manifest.detail,
            )
    return missing


async def start_reward_models(open_run: OpenRun, derived: DerivedResult) -> None:
    """Give all worker slots to the reward models. Other roles are not needed."""
    for role in ("preparation", "update"):
        await open_run.close_pool(role)
    terms = open_run.settings.scoring.hosted_rewards
    if terms:
        fleet = await open_run.get_fleet()
        slots = await fleet.check_slots()
        workers = workers_per_role(open_run.settings, Plan(mode="colocated", rollout=slots, scoring=slots), "scoring")
        models = {
            reward_model_role(term): policy_of(open_run.reward_model(term, prefix=derived.prefix)) for term in terms
        }
        await fleet.arrange(workers, take=models)


@stage("{iteration.key} seal")
async def seal_rescoring(
    open_run: OpenRun, derived: DerivedResult, iteration: Iteration, start_time: float
) -> Manifest:
    """Compare the new rewards of an iteration with the stored rewards, and mark the iteration as complete. The
    comparison is stored in the last manifest (seal).

    Raises Quarantined if too many answers of a judge are unusable, or too many known-bad completions pass a judge.
    """
    check_verdicts(open_run.settings.scoring, rescored_batches(iteration, derived), iteration=iteration.number)
    shards = rescored_shards(iteration, derived)
    work = ComparisonWork(
        stored=tuple(stored.shards[0] for _, stored, _ in shards), new=tuple(new.shards[0] for _, _, new in shards)
    )
    metrics = (await open_run.perform("scoring", "compare_rewards", work)).result.metrics or {}
    sealed = commit_decision(
        open_run,
        derived.key(iteration.number, "seal"),
        parents=[manifest for manifests in shards for manifest in manifests],
        metrics=metrics,
        provenance=controller_provenance(seconds={"total": time.monotonic() - start_time}),
    )
    link_completed_iterations(open_run.run, derived)
    logger.info(
        "iteration %3d  reward %s  stored reward %s  changed %.1f%%  missing %d  %.1fs",
        iteration.number,
        format_number(metrics.get("reward_mean")),
        format_number(metrics.get("stored_reward_mean")),
        100 * metrics["changed_fraction"],
        metrics["missing"],
        time.monotonic() - start_time,
    )
    return sealed


@stage("{iteration.key} credit", retries=2)
async def recompute_credit(
    open_run: OpenRun, derived: DerivedResult, iteration: Iteration, scores: str | None
) -> Manifest:
    """Compute training samples with new advantages from an iteration's stored rollouts, with the configured algorithm.

    `scores` names the rescoring whose scores are used. None uses the run's own scores.
    """
    dynamic = open_run.settings.rollout.dynamic
    if dynamic is not None and dynamic.on_shortfall == "fail":  # other scores may leave fewer informative groups
        dynamic = dynamic.model_copy(update={"on_shortfall": "shrink"})
    return await compute_credit(
        open_run,
        iteration,
        derived.key(iteration.number, "credit"),
        iteration.scored_rollouts(prefix="" if scores is None else DerivedResult("rescore", scores).prefix),
        dynamic=dynamic,
        kl_coefficient=_kl_coefficient(open_run, iteration),
    )


@stage("{iteration.key} seal")
async def seal_recredit(
    open_run: OpenRun, derived: DerivedResult, iteration: Iteration, new: Manifest, start_time: float
) -> Manifest:
    """Compare the new advantages of an iteration with the stored ones, and mark the iteration as complete. The
    comparison is stored in the last manifest (seal)."""
    stored = iteration.credit
    work = ComparisonWork(stored=stored.shards, new=new.shards)
    compared = await open_run.perform("scoring", "compare_advantages", work)
    metrics = {
        "samples": new.metrics["samples"],
        "informative_groups": new.metrics["informative_groups"],
        **(compared.result.metrics or {}),
    }
    key, elapsed = derived.key(iteration.number, "seal"), time.monotonic() - start_time
    sealed = commit_decision(
        open_run,
        key,
        parents=[stored, new],
        metrics=metrics,
        provenance=controller_provenance(seconds={"total": elapsed}),
    )
    link_completed_iterations(open_run.run, derived)
    logger.info(
        "iteration %3d  samples %d  informative groups %d  mean |advantage| %s  correlation %s  %.1fs",
        iteration.number,
        metrics["samples"],
        metrics["informative_groups"],
        format_number(metrics.get("advantage_size")),
        format_number(metrics.get("correlation")),
        elapsed,
    )
    return sealed


def _kl_coefficient(open_run: OpenRun, iteration: Iteration) -> float:
    """Return the coefficient of the KL penalty for computing advantages again. With the same KL settings as in the run,
    the result is the value that the run used in this iteration. Otherwise it is the configured initial value, or 0
    without a KL penalty."""
    kl = open_run.settings.algorithm.reward_kl
    if kl is None:
        return 0.0
    own = recorded_terms(open_run.run).algorithm.reward_kl
    return reward_coefficient(open_run, iteration) if kl == own else kl.coefficient
