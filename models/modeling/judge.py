"""Models behind served rewards: built or imported."""

from collections.abc import Sequence
from pathlib import Path

from infra.errors import BadInput
from models.config.judges import (
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    ModelReward,
    ServedReward,
    TrainedJudge,
)
from models.data.problems import Problem
from models.judges.tokenizer import judge_tokenizer
from models.modeling.directory import check_directory, copy_directory
from models.modeling.policy import build_scratch, save_policy
from models.modeling.reward_model import check_reward_model
from models.records.seeds import derive_seed


def write_served_model(reward: ServedReward, directory: Path, *, problems: Sequence[Problem], seed: int) -> int:
    """Build or copy the model into an empty directory; return its number of parameters."""
    match reward:
        case ModelReward(model=DirectoryRewardModel(path=path)):
            parameters = check_reward_model(path, reward.template)
            copy_directory(path, directory)
            return parameters
        case JudgeReward(model=DirectoryJudge(path=path)):
            _, _, parameters = check_directory(path)
            copy_directory(path, directory)
            return parameters
        case JudgeReward(model=TrainedJudge(shape=shape)):
            tokenizer = judge_tokenizer(shape, reward, problems, seed=seed)
            model = build_scratch(shape, tokenizer, seed=derive_seed("judge", seed))
            save_policy(model, tokenizer, directory)
            return int(model.num_parameters())
        case _:
            raise BadInput("a model behind an endpoint, or one that begins as the policy, is not made for the reward")
