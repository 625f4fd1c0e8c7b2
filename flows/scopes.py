"""What pages that run a job a part of the way need of its configuration."""

from flows.config import ControllersConfig, RunConfig
from infra.errors import BadInput
from models.config.judges import JudgeReward, ServedReward, TrainedJudge
from models.config.rewards import is_process


def measured_by_rules(config: RunConfig) -> RunConfig:
    """Score by the first reward alone, where that is a rule: models that score may not be there yet."""
    first = config.scoring.rewards[0]
    if isinstance(first, ServedReward) or is_process(first):
        return config
    scoring = config.scoring.model_copy(update={"rewards": (first,)})
    rollout = config.rollout.model_copy(update={"dynamic": None})
    # Controllers of other processes would read the run's own configuration.
    controllers = ControllersConfig(count=config.controllers.count, where="nested")
    return config.model_copy(update={"scoring": scoring, "rollout": rollout, "controllers": controllers})


def require_part(command: str, config: RunConfig) -> None:
    """Refuse a part that the job does not have."""
    match command:
        case "sft" if config.warmup is None:
            raise BadInput(f"run {config.name!r} has no supervised warm-up: set [warmup]")
        case "dpo" if config.dpo is None:
            raise BadInput(f"run {config.name!r} has no preference optimisation: set [dpo] and [preferences]")
        case "reward-model" if not _trains_rewards(config):
            raise BadInput(
                f"run {config.name!r} trains no reward model: set model.kind 'trained' in a reward of kind 'model'"
            )


def _trains_rewards(config: RunConfig) -> bool:
    judges = [reward for reward in config.scoring.local.values() if isinstance(reward, JudgeReward)]
    return bool(config.scoring.trained_reward_models) or any(isinstance(judge.model, TrainedJudge) for judge in judges)
