"""The models behind served rewards: made once per run, before the first iteration."""

import logging

from prefect import task

from infra.store.manifests import Manifest
from models.config.judges import JudgeReward, ModelReward, TrainedJudge, TrainedRewardModel
from models.config.training import WarmupConfig
from models.records.work import JudgePreparation, JudgeWarmupWork, RewardModelWork
from tasks.offline import losses_line
from tasks.placing import judge_role
from tasks.plan import policy_key
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, record, required
from tasks.versions import policy_of

logger = logging.getLogger(__name__)


def model_key(term: str) -> str:
    """Key of the manifest that committed the model behind a served reward."""
    return f"{judge_role(term)}/model"


def served_terms(run: RunRef) -> list[str]:
    """Rewards that models serve."""
    return list(session_of(run).settings.scoring.served)


def local_terms(run: RunRef) -> list[str]:
    """Served rewards whose model the run holds; one behind an endpoint is elsewhere."""
    return list(session_of(run).settings.scoring.local)


@task(task_run_name="{term}", retries=2, retry_condition_fn=is_transient)
async def make_judge(run: RunRef, term: str, prefix: str = "") -> Manifest:
    """Build or copy the model of a served reward; `prefix` is that of a re-scoring's manifests."""
    settings = session_of(run).settings
    reward, key = settings.scoring.served[term], f"{prefix}{judge_role(term)}/base"
    if isinstance(reward, ModelReward) and isinstance(reward.model, TrainedRewardModel):
        policy = required(run, policy_key(0))
        return record(run, key, parents=[policy], bundles=policy.bundles, detail={"version": 0})
    work = JudgePreparation(reward=reward, data=settings.data, seed=settings.seed)
    return await once(run, key, role="preparation", method="make_judge", work=work)


@task(task_run_name="{term} training", retries=2, retry_condition_fn=is_transient)
async def train_judge(run: RunRef, term: str, prefix: str = "") -> Manifest:
    """Commit the model of a served reward: as it was made, or after its training where the run trains it itself."""
    reward, key = session_of(run).settings.scoring.served[term], f"{prefix}{model_key(term)}"
    base = required(run, f"{prefix}{judge_role(term)}/base")
    match reward:
        case JudgeReward(model=TrainedJudge(warmup=warmup)):
            logger.info("judge %s: %d steps of %d examples", term, warmup.steps, warmup.batch_size)
            method, work = "warm_judge", _judge_work(run, reward, warmup, base)
        case ModelReward(model=TrainedRewardModel() as training):
            logger.info("reward model %s: %d steps of %d pairs", term, training.steps, training.batch_size)
            method, work = "train_reward_model", _reward_model_work(run, reward, training, base)
        case _:
            return record(run, key, parents=[base], bundles=base.bundles, detail={"version": 0})
    trained = await once(run, key, role="update", method=method, work=work, parents=[base])
    logger.info("%s: %s", term, losses_line(trained))
    return trained


def _judge_work(run: RunRef, reward: JudgeReward, warmup: WarmupConfig, base: Manifest) -> object:
    settings = session_of(run).settings
    return JudgeWarmupWork(judge=policy_of(base), reward=reward, data=settings.data, warmup=warmup, seed=settings.seed)


def _reward_model_work(run: RunRef, reward: ModelReward, training: TrainedRewardModel, base: Manifest) -> object:
    settings = session_of(run).settings
    assert settings.preferences is not None, "a configuration with a trained reward model has preferences"
    return RewardModelWork(
        policy=policy_of(base),
        data=settings.data,
        preferences=settings.preferences,
        training=training,
        template=reward.template,
        seed=settings.seed,
    )
