"""Training on data alone, before the first iteration: the policy's stages, one from another, and reward models."""

import logging

from prefect import task

from infra.store.manifests import Manifest
from models.config.judges import JudgeReward, ModelReward, TrainedJudge, TrainedRewardModel
from models.config.training import WarmupConfig
from models.records.work import JudgePreparation, JudgeWarmupWork, PreferenceWork, RewardModelWork, WarmupWork
from tasks.run.keys import BASE, DPO, SFT, StageKey
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, record, required
from tasks.run.versions import policy_of

logger = logging.getLogger(__name__)

SHOWN_LOSSES = 6


def is_fine_tuned(run: RunRef) -> bool:
    """Whether the policy imitates worked examples first."""
    return session_of(run).settings.warmup is not None


def is_preferring(run: RunRef) -> bool:
    """Whether the policy learns from preferences directly."""
    return session_of(run).settings.dpo is not None


@task(task_run_name="fine-tuning of the policy", retries=2, retry_condition_fn=is_transient)
async def fine_tune(run: RunRef) -> Manifest:
    """Commit the policy after its supervised warm-up."""
    settings = session_of(run).settings
    assert settings.warmup is not None, "fine_tune where is_fine_tuned"
    base = required(run, BASE)
    work = WarmupWork(policy=policy_of(base), data=settings.data, warmup=settings.warmup, seed=settings.seed)
    logger.info("warm-up: %d steps of %d examples", settings.warmup.steps, settings.warmup.batch_size)
    tuned = await once(run, SFT, role="update", method="warmup", work=work, parents=[base])
    logger.info("warm-up: %s", losses_line(tuned))
    return tuned


@task(task_run_name="preferences of the policy", retries=2, retry_condition_fn=is_transient)
async def prefer(run: RunRef) -> Manifest:
    """Commit the policy after direct preference optimisation."""
    settings = session_of(run).settings
    assert settings.dpo is not None and settings.preferences is not None, "prefer where is_preferring"
    start = required(run, SFT if is_fine_tuned(run) else BASE)
    work = PreferenceWork(
        policy=policy_of(start),
        data=settings.data,
        preferences=settings.preferences,
        dpo=settings.dpo,
        seed=settings.seed,
    )
    logger.info("DPO: %d steps of %d pairs", settings.dpo.steps, settings.dpo.batch_size)
    preferring = await once(run, DPO, role="update", method="prefer", work=work, parents=[start])
    logger.info("DPO: %s", losses_line(preferring))
    return preferring


@task(task_run_name="policy 0")
async def begin_with(run: RunRef) -> Manifest:
    """Commit version 0: the policy after all its training on data alone."""
    trained = required(run, DPO if is_preferring(run) else SFT if is_fine_tuned(run) else BASE)
    return record(run, StageKey.policy(0), parents=[trained], bundles=trained.bundles, detail={"version": 0})


def losses_line(trained: Manifest) -> str:
    """The course of the loss, and what was right of held-out pairs, as one line."""
    losses, metrics = losses_of(trained), trained.metrics
    stride = -(-len(losses) // SHOWN_LOSSES)
    course = " ".join(f"{loss:.3f}" for loss in [*losses[:-1:stride], losses[-1]])
    pairs = ""
    if "heldout_accuracy" in metrics:
        right, count = metrics["heldout_accuracy"], metrics["heldout_pairs"]
        pairs = f"; {right:.3f} of {count:.0f} held-out pairs right, margin {metrics['heldout_margin']:.2f}"
    return f"loss {course} after {trained.provenance.seconds['stage']:.0f} s{pairs}"


def losses_of(trained: Manifest) -> list[float]:
    """The course of the loss in few points."""
    losses = trained.detail["losses"]
    assert isinstance(losses, list)
    return [loss for loss in losses if isinstance(loss, float)]


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
    reward, key = settings.scoring.served[term], StageKey.judge(term, made=True).below(prefix)
    if term in settings.scoring.trained_reward_models:  # it begins as the policy
        policy = required(run, StageKey.policy(0))
        return record(run, key, parents=[policy], bundles=policy.bundles, detail={"version": 0})
    work = JudgePreparation(reward=reward, data=settings.data, seed=settings.seed)
    return await once(run, key, role="preparation", method="make_judge", work=work)


@task(task_run_name="{term} training", retries=2, retry_condition_fn=is_transient)
async def train_judge(run: RunRef, term: str, prefix: str = "") -> Manifest:
    """Commit the model of a served reward: as it was made, or after its training where the run trains it itself."""
    reward, key = session_of(run).settings.scoring.served[term], StageKey.judge(term).below(prefix)
    base = required(run, StageKey.judge(term, made=True).below(prefix))
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
