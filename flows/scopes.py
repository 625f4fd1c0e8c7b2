"""What a page that runs only part of the way needs of a run's configuration."""

from flows.config import ControllersConfig, RunConfig
from models.rewards.config import ServedReward, is_process


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
