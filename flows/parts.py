"""Commands that run a job a part of the way: `sft`, `dpo`, `reward-model`."""

from typing import TYPE_CHECKING

from flows.config import RunConfig
from flows.launcher import run_flow, watched
from infra.errors import BadInput
from models.rewards.config import JudgeReward, TrainedJudge

if TYPE_CHECKING:
    from tasks.offline_reports import TrainedPolicy, TrainedRewards


def run_part(command: str, config: RunConfig) -> "TrainedPolicy | TrainedRewards":
    """Run or continue the job as far as the command says. Raises BadInput before anything is written or started."""
    match command:
        case "sft":
            return _sft(config)
        case "dpo":
            return _dpo(config)
        case "reward-model":
            return _reward_model(config)
    raise AssertionError(f"no part of a job is called {command!r}")


def _sft(config: RunConfig) -> "TrainedPolicy":
    if config.warmup is None:
        raise BadInput(f"run {config.name!r} has no supervised warm-up: set [warmup]")
    with watched(config):
        from flows.sft import sft

        return run_flow(sft(config))


def _dpo(config: RunConfig) -> "TrainedPolicy":
    if config.dpo is None:
        raise BadInput(f"run {config.name!r} has no preference optimisation of its policy: set [dpo] and [preferences]")
    with watched(config):
        from flows.dpo import dpo

        return run_flow(dpo(config))


def _reward_model(config: RunConfig) -> "TrainedRewards":
    judges = [reward for reward in config.scoring.local.values() if isinstance(reward, JudgeReward)]
    if not config.scoring.trained_reward_models and not any(isinstance(j.model, TrainedJudge) for j in judges):
        raise BadInput(
            f"run {config.name!r} trains no reward model: set model.kind 'trained' in a reward of kind 'model'"
        )
    with watched(config):
        from flows.reward_modelling import reward_model

        return run_flow(reward_model(config))
