"""Credit stage: computes training samples from the scores of an iteration, in one task per iteration."""

from collections.abc import Iterable

from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import DynamicSampling
from rheostat.models.judges.checks import check_judges
from rheostat.models.records.work import CreditWork
from rheostat.tasks.auxiliary import auxiliary_manifests
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.iteration import Iteration, ScoredRollouts
from rheostat.tasks.run.keys import StageKey, reward_model_role
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.solve_rates import solve_rate_term
from rheostat.tasks.run.stages import run_once, stage
from rheostat.tasks.update import reward_coefficient


@stage("{iteration.key} credit", retries=2)
async def assign_credit(open_run: OpenRun, iteration: Iteration) -> Manifest:
    """Compute the training samples (completions with advantages) from the rewards of all batches of an iteration.

    Raises Quarantined if too many answers of a judge are unusable, or too many known-bad completions pass a judge.
    """
    check_verdicts(open_run.settings.scoring, iteration.batches, iteration=iteration.number)
    return await compute_credit(
        open_run,
        iteration,
        iteration.stage_key("credit"),
        iteration.scored_rollouts(),
        dynamic=open_run.settings.rollout.dynamic,
        kl_coefficient=reward_coefficient(open_run, iteration),
        rated_by=solve_rate_term(open_run.settings.rollout, open_run.settings.scoring),
    )


async def compute_credit(
    open_run: OpenRun,
    iteration: Iteration,
    key: StageKey,
    scored: ScoredRollouts,
    *,
    dynamic: DynamicSampling | None,
    kl_coefficient: float,
    rated_by: str = "",
) -> Manifest:
    """Compute training samples from scored rollouts with the configured algorithm, and store them as the result
    named `key`. If `rated_by` names a reward, the result also lists the solve rates of the prompts."""
    settings, auxiliary = open_run.settings, auxiliary_manifests(open_run, iteration)
    positive = settings.update.positive_nll
    work = CreditWork(
        iteration=iteration.number,
        shards=scored.shards,
        target=settings.rollout.prompts if dynamic is not None else None,
        dynamic=dynamic,
        policy_version=iteration.number - 1,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
        estimates=tuple(shard for manifest in auxiliary for shard in manifest.shards),
        kl_coefficient=kl_coefficient,
        solve_rate_term=rated_by,
        sample_term="" if positive is None else positive.metric or settings.scoring.terms[0],
    )
    parents = [*scored.manifests, *auxiliary]
    return await run_once(open_run, key, role="scoring", method="credit", work=work, parents=parents)


def check_verdicts(scoring: ScoringConfig, batches: Iterable[Batch], *, iteration: int) -> None:
    """Raise Quarantined if too many answers of a judge are unusable, or too many known-bad completions pass a judge."""
    batches = list(batches)
    verdicts = {
        term: [verdict for batch in batches for verdict in batch.stage_manifests(reward_model_role(term))]
        for term in scoring.model_rewards
    }
    metrics_by_term = {term: [manifest.metrics for manifest in manifests] for term, manifests in verdicts.items()}
    check_judges(scoring, metrics_by_term, iteration=iteration)
