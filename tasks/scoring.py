"""Verdicts of reward models and scores, one task per shard."""

from prefect import task

from infra.store.bundles import BundleRef
from infra.store.manifests import Manifest
from models.records.work import JudgeWork, ScoringWork, VerdictShard
from tasks.offline_training import local_terms
from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey, judge_role
from tasks.run.session import RunRef, session_of
from tasks.run.stages import committed, is_transient, once, required
from tasks.run.versions import policy_of

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
    served = [required(run, StageKey.judge(term).below(plan.rescoring))] if term in local_terms(run) else []
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
    return policy_of(required(run, StageKey.policy(0))).weights if process else None
