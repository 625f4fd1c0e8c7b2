"""Scoring stage: judges and reward models first compute verdicts (one per completion), and scoring workers then combine
verdicts and rules to rewards. Each controller does this for its shards."""

from collections.abc import Sequence

from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.judges import ServedReward
from rheostat.models.records.versions import policy_of
from rheostat.models.records.work import JudgeWork, ScoringWork, VerdictShard
from rheostat.tasks.run.batch import Batch, picture_shards_of
from rheostat.tasks.run.keys import StageKey, reward_model_role
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import run_concurrently, run_once, stage, wait_for_manifest

PAUSES_SECONDS = [5.0, 15.0, 30.0, 60.0]
"""Pauses in seconds before an unreachable judge is called again, in addition to the pauses between its requests."""


@stage("{batch.key} {term}", retries=len(PAUSES_SECONDS), pauses_seconds=PAUSES_SECONDS)
async def judge_shards(open_run: OpenRun, batch: Batch, shards: Sequence[int], term: str) -> None:
    """Let the model of one reward judge the completions of some shards, each shard as soon as it is generated, and
    store the verdicts."""
    await run_concurrently(_judge_shard(open_run, batch, shard, term) for shard in shards)


@stage("{batch.key} score", retries=2)
async def score_shards(open_run: OpenRun, batch: Batch, shards: Sequence[int]) -> None:
    """Compute the rewards of some shards on the scoring workers, each shard as soon as it is generated and judged, and
    store the scores."""
    await run_concurrently(_score_shard(open_run, batch, shard) for shard in shards)


async def _judge_shard(open_run: OpenRun, batch: Batch, shard: int, term: str) -> Manifest:
    plan, settings = batch.plan, open_run.settings
    rollouts = await wait_for_manifest(open_run, plan.rollout_key(shard))
    is_hosted = term in settings.scoring.hosted_rewards
    served = [open_run.reward_model(term, prefix=plan.rescoring)] if is_hosted else []
    work = JudgeWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        model=policy_of(served[0]) if served else None,
        seed=settings.seed,
        media=(*batch.media, *picture_shards_of(rollouts)),
        prompts=batch.prompts.shards[0] if _needs_prompts(settings.scoring.model_rewards[term]) else None,
    )
    key = plan.shard_key(reward_model_role(term), shard)
    return await run_once(
        open_run, key, role=reward_model_role(term), method="judge", work=work, parents=[rollouts, *served]
    )


def _needs_prompts(reward: ServedReward) -> bool:
    """Return whether the model that computes a reward receives chat prompts as messages, or the rubrics of prompts."""
    return reward.chat_prompt == "messages" or reward.uses_rubric


async def _score_shard(open_run: OpenRun, batch: Batch, shard: int) -> Manifest:
    plan, settings = batch.plan, open_run.settings
    rollouts = await wait_for_manifest(open_run, plan.rollout_key(shard))
    verdicts = {
        term: await wait_for_manifest(open_run, plan.shard_key(reward_model_role(term), shard))
        for term in settings.scoring.model_rewards
    }
    dynamic = settings.rollout.dynamic
    work = ScoringWork(
        iteration=plan.number,
        rollouts=rollouts.shards[0],
        verdicts=tuple(VerdictShard(term=term, verdicts=manifest.shards[0]) for term, manifest in verdicts.items()),
        media=(*batch.media, *picture_shards_of(rollouts)),
        tokenizer=_tokenizer_of(open_run),
        metric="" if dynamic is None else dynamic.metric or settings.scoring.terms[0],
        max_missing=_max_missing(open_run, batch),
    )
    key, parents = plan.shard_key("scoring", shard), [rollouts, *verdicts.values()]
    return await run_once(open_run, key, role="scoring", method="score", work=work, parents=parents)


def _max_missing(open_run: OpenRun, batch: Batch) -> int | None:
    """Return how many more scores of an iteration may be missing before the iteration fails. Return None if no such
    limit applies to the batch, because it is no training batch or only a part of its iteration."""
    plan, settings = batch.plan, open_run.settings
    parts = settings.rollout.dynamic or settings.rollout.partial
    if plan.split != "train" or plan.rescoring or parts is not None:
        return None
    manifests = (open_run.run.find(plan.shard_key("scoring", shard)) for shard in range(plan.num_shards))
    missing = sum(int(manifest.metrics["missing"]) for manifest in manifests if manifest is not None)
    return int(settings.scoring.max_missing * len(plan.rows) * plan.group_size) - missing


def _tokenizer_of(open_run: OpenRun) -> BundleRef | None:
    """Return the stored files of the initial policy, which contain the tokenizer, if rewards for steps or tokens need
    it. Otherwise return None."""
    process = open_run.settings.scoring.process_terms
    return policy_of(open_run.run.require(StageKey.policy(0))).weights if process else None
