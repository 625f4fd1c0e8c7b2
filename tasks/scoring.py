"""Verdicts of served rewards and scores, one task per shard; credit, one task per iteration."""

from dataclasses import dataclass

from prefect import task

from infra.store.bundles import BundleRef
from infra.store.manifests import Manifest
from models.algorithms.advantages import needs_of
from models.judges.checks import check_judges
from models.records.work import CreditWork, JudgeWork, ScoredShard, ScoringWork, VerdictShard
from tasks.handover import handover_before
from tasks.judges import local_terms, model_key
from tasks.kl import reward_coefficient
from tasks.placing import judge_role
from tasks.plan import BatchPlan, credit_key, estimates_key, policy_key, waves_of
from tasks.session import RunRef, session_of
from tasks.stages import committed, is_transient, once, required
from tasks.versions import policy_of

PAUSES_SECONDS = [5.0, 15.0, 30.0, 60.0]
"""Before a judge that is down is asked again, beside the pauses of its own requests."""


@task(
    task_run_name="{plan.key} {term} {shard:04d}",
    retries=len(PAUSES_SECONDS),
    retry_delay_seconds=PAUSES_SECONDS,
    retry_condition_fn=is_transient,
)
async def judge_shard(run: RunRef, plan: BatchPlan, shard: int, term: str, silence_seconds: float) -> Manifest:
    """Wait for one rollout shard's commit, have a served reward judge it, commit the verdicts."""
    rollouts = await committed(run, plan.rollout_key(shard), silence_seconds=silence_seconds)
    settings = session_of(run).settings
    served = [required(run, f"{plan.rescoring}{model_key(term)}")] if term in local_terms(run) else []
    work = JudgeWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        model=policy_of(served[0]) if served else None,
        seed=settings.seed,
    )
    key = plan.shard_key(judge_role(term), shard)
    return await once(run, key, role=judge_role(term), method="judge", work=work, parents=[rollouts, *served])


@task(task_run_name="{plan.key} score {shard:04d}", retries=2, retry_condition_fn=is_transient)
async def score_shard(run: RunRef, plan: BatchPlan, shard: int, silence_seconds: float) -> Manifest:
    """Wait for one rollout shard's commit and its verdicts, have a scoring worker score it, commit the scores."""
    settings = session_of(run).settings
    rollouts = await committed(run, plan.rollout_key(shard), silence_seconds=silence_seconds)
    terms = list(settings.scoring.served)
    verdicts = [
        await committed(run, plan.shard_key(judge_role(term), shard), silence_seconds=silence_seconds) for term in terms
    ]
    dynamic = settings.rollout.dynamic
    work = ScoringWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        verdicts=tuple(
            VerdictShard(term=term, verdicts=manifest.shards[0]) for term, manifest in zip(terms, verdicts, strict=True)
        ),
        tokenizer=tokenizer_of(run),
        metric="" if dynamic is None else dynamic.metric or settings.scoring.terms[0],
    )
    key = plan.shard_key("scoring", shard)
    return await once(run, key, role="scoring", method="score", work=work, parents=[rollouts, *verdicts])


def tokenizer_of(run: RunRef) -> BundleRef | None:
    """Bundle with the run's tokenizer, where steps or tokens have rewards of their own; the first policy is kept."""
    process = session_of(run).settings.scoring.process_terms
    return policy_of(required(run, policy_key(0))).weights if process else None


@task(task_run_name="it-{number:04d} credit", retries=2, retry_condition_fn=is_transient)
async def assign_credit(run: RunRef, number: int) -> Manifest:
    """Turn the rewards of all of the iteration's batches into training samples; refuse those of judges gone wrong."""
    settings = session_of(run).settings
    waves = waves_of(session_of(run).run, number)
    verdicts = {term: stage_of(run, waves, judge_role(term)) for term in settings.scoring.served}
    shown = {term: [manifest.metrics for manifest in manifests] for term, manifests in verdicts.items()}
    check_judges(settings.scoring, shown, iteration=number)
    scored = scored_shards(run, number)
    estimates = [required(run, estimates_key(number))] if needs_of(settings.algorithm).any else []
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
    return await once(run, credit_key(number), role="scoring", method="credit", work=work, parents=parents)


@dataclass(frozen=True, slots=True)
class Scored:
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


def scored_shards(run: RunRef, number: int) -> Scored:
    """All that an iteration's credit looks at."""
    session = session_of(run)
    waves, kept = waves_of(session.run, number), handover_before(session.run, number).kept
    fresh = stage_of(run, waves, "rollout")
    return Scored(
        rollouts=(*(required(run, groups.rollouts) for groups in kept), *fresh),
        scores=(*(required(run, groups.scores) for groups in kept), *stage_of(run, waves, "scoring")),
        rows=(*(groups.rows for groups in kept), *(None for _ in fresh)),
    )


def stage_of(run: RunRef, waves: list[BatchPlan], stage: str) -> list[Manifest]:
    """Manifests of one stage of some batches, in order."""
    return [required(run, wave.shard_key(stage, shard)) for wave in waves for shard in range(wave.num_shards)]
