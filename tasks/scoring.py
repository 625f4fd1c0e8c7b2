"""Scoring stage: verdicts of reward models, and scores. Each is one task for the shards of a controller."""

from collections.abc import Sequence

from infra.store.bundles import BundleRef
from infra.store.manifests import Manifest
from models.records.versions import policy_of
from models.records.work import JudgeWork, ScoringWork, VerdictShard
from tasks.run.batch import Batch, pictures_of
from tasks.run.keys import StageKey, reward_model_role
from tasks.run.session import Session
from tasks.run.stages import committed, once, side_by_side, stage

PAUSES_SECONDS = [5.0, 15.0, 30.0, 60.0]
"""Pauses in seconds before an unreachable judge is called again, in addition to the pauses between its requests."""


@stage("{batch.key} {term}", retries=len(PAUSES_SECONDS), pauses_seconds=PAUSES_SECONDS)
async def judge_shards(session: Session, batch: Batch, shards: Sequence[int], term: str) -> None:
    """Let a served reward model judge shards as soon as each is generated, and commit the verdicts."""
    await side_by_side(_judge_shard(session, batch, shard, term) for shard in shards)


@stage("{batch.key} score", retries=2)
async def score_shards(session: Session, batch: Batch, shards: Sequence[int]) -> None:
    """Let scoring workers score shards as soon as each is generated and judged, and commit the scores."""
    await side_by_side(_score_shard(session, batch, shard) for shard in shards)


async def _judge_shard(session: Session, batch: Batch, shard: int, term: str) -> Manifest:
    plan, settings = batch.plan, session.settings
    rollouts = await committed(session, plan.rollout_key(shard))
    is_hosted = term in settings.scoring.hosted_rewards
    served = [session.reward_model(term, prefix=plan.rescoring)] if is_hosted else []
    work = JudgeWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        model=policy_of(served[0]) if served else None,
        seed=settings.seed,
        media=(*batch.media, *pictures_of(rollouts)),
    )
    key = plan.shard_key(reward_model_role(term), shard)
    return await once(
        session, key, role=reward_model_role(term), method="judge", work=work, parents=[rollouts, *served]
    )


async def _score_shard(session: Session, batch: Batch, shard: int) -> Manifest:
    plan, settings = batch.plan, session.settings
    rollouts = await committed(session, plan.rollout_key(shard))
    verdicts = {
        term: await committed(session, plan.shard_key(reward_model_role(term), shard))
        for term in settings.scoring.model_rewards
    }
    dynamic = settings.rollout.dynamic
    work = ScoringWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        verdicts=tuple(VerdictShard(term=term, verdicts=manifest.shards[0]) for term, manifest in verdicts.items()),
        media=(*batch.media, *pictures_of(rollouts)),
        tokenizer=_tokenizer_of(session),
        metric="" if dynamic is None else dynamic.metric or settings.scoring.terms[0],
        max_missing=_max_missing(session, batch),
    )
    key, parents = plan.shard_key("scoring", shard), [rollouts, *verdicts.values()]
    return await once(session, key, role="scoring", method="score", work=work, parents=parents)


def _max_missing(session: Session, batch: Batch) -> int | None:
    """Return the number of further missing scores that the batch's iteration tolerates, or None if it is not credited
    as a whole."""
    plan, settings = batch.plan, session.settings
    parts = settings.rollout.dynamic or settings.rollout.partial
    if plan.split != "train" or plan.rescoring or parts is not None:
        return None
    manifests = (session.run.find(plan.shard_key("scoring", shard)) for shard in range(plan.num_shards))
    missing = sum(int(manifest.metrics["missing"]) for manifest in manifests if manifest is not None)
    return int(settings.scoring.max_missing * len(plan.rows) * plan.group_size) - missing


def _tokenizer_of(session: Session) -> BundleRef | None:
    """Return the bundle with the run's tokenizer if rewards score steps or tokens, otherwise None. The initial policy
    is always kept."""
    process = session.settings.scoring.process_terms
    return policy_of(session.run.require(StageKey.policy(0))).weights if process else None
