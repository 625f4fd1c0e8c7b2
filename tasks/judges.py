"""The models behind served rewards: made once per run, before the first iteration."""

import logging

from prefect import task

from infra.manifests import Manifest
from models.rewards.config import JudgeReward, TrainedJudge
from models.work import JudgePreparation, JudgeWarmupWork
from tasks.placing import judge_role
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
    work = JudgePreparation(reward=settings.scoring.served[term], data=settings.data, seed=settings.seed)
    return await once(run, f"{prefix}{judge_role(term)}/base", role="preparation", method="make_judge", work=work)


@task(task_run_name="{term} warm-up", retries=2, retry_condition_fn=is_transient)
async def train_judge(run: RunRef, term: str, prefix: str = "") -> Manifest:
    """Commit the model of a served reward: as it was made, or after its training where the run trains it itself."""
    settings = session_of(run).settings
    reward, base = settings.scoring.served[term], required(run, f"{prefix}{judge_role(term)}/base")
    if not isinstance(reward, JudgeReward) or not isinstance(reward.model, TrainedJudge):
        return record(run, f"{prefix}{model_key(term)}", parents=[base], bundles=base.bundles, detail={"version": 0})
    warmup = reward.model.warmup
    work = JudgeWarmupWork(judge=policy_of(base), reward=reward, data=settings.data, warmup=warmup, seed=settings.seed)
    logger.info("judge %s: %d steps of %d examples", term, warmup.steps, warmup.batch_size)
    trained = await once(
        run, f"{prefix}{model_key(term)}", role="update", method="warm_judge", work=work, parents=[base]
    )
    seconds = trained.provenance.seconds["stage"]
    logger.info("judge %s: loss %.3f after %.0f s", term, trained.metrics["loss_last"], seconds)
    return trained
