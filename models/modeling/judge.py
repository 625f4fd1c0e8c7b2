"""Models behind served rewards: checked, built or imported."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.config.judges import (
    ChoiceVerdict,
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    LogprobVerdict,
    ModelReward,
    ServedReward,
    TrainedJudge,
)
from models.data.problems import Problem
from models.judges.prompts import question_about
from models.modeling.directory import check_directory, copy_directory
from models.modeling.policy import build_scratch, judge_tokenizer, policy_shape, save_policy, scratch_shape
from models.modeling.reward_model import check_reward_model
from models.records.seeds import derive_seed


def check_served_model(term: str, reward: ServedReward, *, problems: Sequence[Problem], seed: int, gpus: float) -> int:
    """Refuse a model that cannot serve the reward, on workers with so many GPUs; return its number of parameters.

    Weights are not read.
    """
    try:
        match reward:
            case ModelReward(model=DirectoryRewardModel(path=path)):
                return check_reward_model(path, reward.template)
            case JudgeReward(model=DirectoryJudge(path=path, engine=engine)):
                config, tokenizer, parameters = check_directory(path)
                shape = policy_shape(config, parameters=parameters, source=str(path))
            case JudgeReward(model=TrainedJudge(shape=judge, engine=engine)):
                tokenizer = judge_tokenizer(judge, reward, problems, seed=seed)
                shape = scratch_shape(judge, tokenizer)
            case _:
                raise BadInput(
                    "a model behind an endpoint, or one that begins as the policy, is not made for the reward"
                )
        longest = _check_room(reward, problems, tokenizer=tokenizer, context=shape.context)
        engine.memory(shape, longest=longest, gpus=gpus, name="model.engine")
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error
    return shape.parameters


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


def _check_room(
    reward: JudgeReward, problems: Sequence[Problem], *, tokenizer: PreTrainedTokenizerFast, context: int
) -> int:
    """Refuse a judge that could not even read a question about a right answer; return the tokens of the longest."""
    verdict = reward.verdict
    chooses = isinstance(verdict, LogprobVerdict) or (isinstance(verdict, ChoiceVerdict) and verdict.constrained)
    room = 1 if chooses else reward.sampling.max_new_tokens
    texts = [question_about(p, p.worked or p.answer, reward=reward, seed=0) for p in problems]
    longest = max(len(tokens) for tokens in tokenizer(texts)["input_ids"])
    if longest + room > context:
        raise BadInput(
            f"questions about right answers have up to {longest} tokens and a verdict up to {room}, expected at most "
            f"{context} together: the judge's context"
        )
    return longest + room
