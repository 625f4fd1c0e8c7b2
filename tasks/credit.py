"""From the scores of an iteration to training samples, one task per iteration."""

from dataclasses import dataclass

from prefect import task

from infra.store.manifests import Manifest
from models.algorithms.advantages import required_models
from models.judges.checks import check_judges
from models.records.work import CreditWork, ScoredShard
from tasks.run.batch import BatchPlan, waves_of
from tasks.run.carry_over import carry_over_before
from tasks.run.keys import StageKey, iteration_key, judge_role
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, required
from tasks.update import reward_coefficient


@task(task_run_name="it-{number:04d} credit", retries=2, retry_condition_fn=is_transient)
async def assign_credit(run: RunRef, number: int) -> Manifest:
    """Turn the rewards of all of the iteration's batches into training samples; refuse those of judges gone wrong."""
    settings = session_of(run).settings
    waves = waves_of(session_of(run).run, number)
    verdicts = {term: stage_of(run, waves, judge_role(term)) for term in settings.scoring.served}
    shown = {term: [manifest.metrics for manifest in manifests] for term, manifests in verdicts.items()}
    check_judges(settings.scoring, shown, iteration=number)
    scored = scored_shards(run, number)
    estimates = (
        [required(run, StageKey.of(iteration_key(number), "estimates"))]
        if required_models(settings.algorithm).any
        else []
    )
    work = CreditWork(
        iteration=number,
        shards=scored.shards,
        target=settings.rollout.prompts if settings.rollout.dynamic is not None else None,
        dynamic=settings.rollout.dynamic,
        policy_version=number - 1,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
        estimates=tuple(shard for manifest in estimates for shard in manifest.shards),
        kl_coefficient=reward_coefficient(run, number),
    )
    pairs = [manifest for pair in zip(scored.rollouts, scored.scores, strict=True) for manifest in pair]
    parents = [*pairs, *estimates]
    return await once(
        run, StageKey.of(iteration_key(number), "credit"), role="scoring", method="credit", work=work, parents=parents
    )


@dataclass(frozen=True, slots=True)
class ScoredShards:
    """What an iteration's credit looks at, pair by pair: kept groups of the iteration before, then its own."""

    rollouts: tuple[Manifest, ...]
    scores: tuple[Manifest, ...]
    rows: tuple[tuple[int, ...] | None, ...]
    """Prompt rows that count; none means all."""

    @property
    def shards(self) -> tuple[ScoredShard, ...]:
        """The pairs by reference."""
        return tuple(
            ScoredShard(rollouts=rollouts.shards[0], scores=scores.shards[0], rows=rows)
            for rollouts, scores, rows in zip(self.rollouts, self.scores, self.rows, strict=True)
        )


def scored_shards(run: RunRef, number: int) -> ScoredShards:
    """All that an iteration's credit looks at."""
    session = session_of(run)
    waves, kept = waves_of(session.run, number), carry_over_before(session.run, number).kept
    fresh = stage_of(run, waves, "rollout")
    return ScoredShards(
        rollouts=(*(required(run, groups.rollouts) for groups in kept), *fresh),
        scores=(*(required(run, groups.scores) for groups in kept), *stage_of(run, waves, "scoring")),
        rows=(*(groups.rows for groups in kept), *(None for _ in fresh)),
    )


def stage_of(run: RunRef, waves: list[BatchPlan], stage: str) -> list[Manifest]:
    """Manifests of one stage of some batches, in order."""
    return [required(run, wave.shard_key(stage, shard)) for wave in waves for shard in range(wave.num_shards)]
