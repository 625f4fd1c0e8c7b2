"""Input of the check before a run."""

from pathlib import Path

from infra.config import PoolsConfig
from models.commands.preflight import Inputs, check
from models.config.algorithms import AlgorithmConfig, Grpo
from models.config.data import (
    ArithmeticData,
    DataConfig,
    PreferencesConfig,
)
from models.config.objectives import UpdateConfig
from models.config.policy import PolicyConfig, ScratchPolicy
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import DpoConfig, EvaluationConfig, WarmupConfig
from tasks.config.run import load_config


def inputs(
    *,
    data: DataConfig | None = None,
    policy: PolicyConfig | None = None,
    warmup: WarmupConfig | None = None,
    preferences: PreferencesConfig | None = None,
    dpo: DpoConfig | None = None,
    rollout: RolloutConfig | None = None,
    scoring: ScoringConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    update: UpdateConfig | None = None,
    ranks: int = 1,
    gpus: float = 0,
) -> Inputs:
    """A small job, with other parts where they are given."""
    return Inputs(
        seed=0,
        data=data or ArithmeticData(train_problems=64, heldout_problems=8),
        policy=policy or ScratchPolicy(),
        warmup=warmup,
        preferences=preferences,
        dpo=dpo,
        rollout=rollout or RolloutConfig(),
        scoring=scoring or ScoringConfig(),
        algorithm=algorithm or Grpo(),
        update=update or UpdateConfig(),
        pools=PoolsConfig(update_ranks=ranks, gpus_per_worker=gpus),
        evaluation=EvaluationConfig(problems=1),
    )


def read_inputs(*overrides: str) -> Inputs:
    """Return the input of the check for `job.toml` in the current directory."""
    return Inputs.model_validate_json(load_config(Path("job.toml"), overrides).model_dump_json())


def check_job(*overrides: str) -> dict[str, float]:
    """Check `job.toml` in the current directory with overrides; return the facts about the job."""
    return check(read_inputs(*overrides))
