"""Commands that run a job a part of the way: `sft`, `dpo`, `reward-model`."""

from typing import TYPE_CHECKING

from flows.config import RunConfig
from flows.launcher import run_flow, watched
from flows.scopes import require_part

if TYPE_CHECKING:
    from tasks.offline_reports import TrainedPolicy, TrainedRewards


def run_part(command: str, config: RunConfig) -> "TrainedPolicy | TrainedRewards":
    """Run or continue the job as far as the command says. Raises BadInput before anything is written or started."""
    require_part(command, config)
    with watched(config):
        match command:
            case "sft":
                from flows.sft import sft

                return run_flow(sft(config))
            case "dpo":
                from flows.dpo import dpo

                return run_flow(dpo(config))
            case "reward-model":
                from flows.reward_modelling import reward_model

                return run_flow(reward_model(config))
    raise AssertionError(f"no part of a job is called {command!r}")
