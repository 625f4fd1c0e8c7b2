"""Requests to train the models behind rewards before the first iteration."""

from typing import Any, Protocol, cast

from rheostat.infra.plugins import find_target
from rheostat.models.config.data import DataConfig
from rheostat.models.config.judges import JudgeReward, ModelReward, ServedReward, TrainedJudge, TrainedRewardModel
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.process_models import ProcessModelReward, TrainedProcessModel
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import JudgeWarmupWork, ProcessModelWork, RewardModelWork

TrainingWork = JudgeWarmupWork | RewardModelWork | ProcessModelWork


class TrainingOrder(Protocol):
    """Function that creates the request to train the model behind a reward. The model's settings refer to this function
    as `training`."""

    def __call__(
        self,
        base: ModelVersion,
        reward: Any,  # noqa: ANN401 -- its own settings, as the model's
        model: Any,  # noqa: ANN401
        /,
        *,
        data: DataConfig,
        preferences: PreferencesConfig | None,
        seed: int,
    ) -> TrainingWork:
        """Return the request; `base` is the model before its training."""
        ...


def order_training(
    base: ModelVersion, reward: ServedReward, *, data: DataConfig, preferences: PreferencesConfig | None, seed: int
) -> TrainingWork | None:
    """Create the request to train the model behind a reward. Returns None if the run does not train this model."""
    model = reward.model
    if model.training is None:
        return None
    order = cast(TrainingOrder, find_target(model.training, where=f"model {model.label!r}"))
    return order(base, reward, model, data=data, preferences=preferences, seed=seed)


def order_judge_warmup(
    base: ModelVersion,
    reward: JudgeReward,
    model: TrainedJudge,
    *,
    data: DataConfig,
    preferences: PreferencesConfig | None,
    seed: int,
) -> JudgeWarmupWork:
    """Create the request to train the judge `model`, starting from the version `base`."""
    return JudgeWarmupWork(judge=base, reward=reward, data=data, warmup=model.warmup, seed=seed)


def order_reward_model_training(
    base: ModelVersion,
    reward: ModelReward,
    model: TrainedRewardModel,
    *,
    data: DataConfig,
    preferences: PreferencesConfig | None,
    seed: int,
) -> RewardModelWork:
    """Create the request to train the reward model `model` on the run's preference pairs, starting from the version
    `base`."""
    assert preferences is not None, "a configuration with a trained reward model has preferences"
    return RewardModelWork(base, data, preferences, model, reward.template, seed, reward.chat_prompt)


def order_process_model_training(
    base: ModelVersion,
    reward: ProcessModelReward,
    model: TrainedProcessModel,
    *,
    data: DataConfig,
    preferences: PreferencesConfig | None,
    seed: int,
) -> ProcessModelWork:
    """Create the request to train the process reward model `model` on its step labels, starting from the version
    `base`."""
    return ProcessModelWork(base, model, reward.separator, seed)
