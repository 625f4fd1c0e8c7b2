"""Models that a run starts from, each written into an empty directory: its policy, and those behind served rewards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from infra.errors import BadInput
from infra.store.inputs import fetched
from infra.variants import implementation_of
from models.config.data import DataConfig
from models.config.judges import (
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    ModelReward,
    ServedModel,
    ServedReward,
    TrainedJudge,
)
from models.config.policy import DirectoryPolicy, PolicySource, ScratchPolicy, SeeingScratchPolicy
from models.data.problems import Problem, load_problems
from models.judges.prompts import vocabulary_texts
from models.modeling.directory import check_directory, copy_directory
from models.modeling.policy import build_scratch, save_policy
from models.modeling.reward_model import check_reward_model
from models.modeling.seeing_scratch import build_seeing, save_seeing, seeing_tokenizer
from models.records.seeds import derive_seed
from models.text.tokenizer import scratch_tokenizer, train_tokenizer


class PolicyWriter(Protocol):
    """Builds or copies a policy; the same arguments give the same bytes."""

    def __call__(self, policy: Any, directory: Path, /, *, data: DataConfig, seed: int) -> int:  # noqa: ANN401 -- its own
        """Return its number of parameters."""
        ...


def write_policy(policy: PolicySource, directory: Path, *, data: DataConfig, seed: int) -> int:
    """Build or copy the policy into an empty directory; return its number of parameters."""
    return cast(PolicyWriter, implementation_of(policy))(policy, directory, data=data, seed=seed)


def write_scratch(policy: ScratchPolicy, directory: Path, *, data: DataConfig, seed: int) -> int:
    """Build the decoder, with a tokenizer of the data's text."""
    tokenizer = scratch_tokenizer(policy, load_problems(data, "train", seed))
    model = build_scratch(policy, tokenizer, seed=seed)
    save_policy(model, tokenizer, directory)
    return int(model.num_parameters())


def write_seeing_scratch(policy: SeeingScratchPolicy, directory: Path, *, data: DataConfig, seed: int) -> int:
    """Build the policy that sees, with a tokenizer of the data's text."""
    tokenizer = seeing_tokenizer(policy, load_problems(data, "train", seed))
    model = build_seeing(policy, tokenizer, seed=seed)
    save_seeing(policy, model, tokenizer, directory)
    return int(model.num_parameters())


def write_import(policy: DirectoryPolicy, directory: Path, *, data: DataConfig, seed: int) -> int:
    """Copy a directory from elsewhere."""
    return _copy(fetched(policy.path), directory)


class ServedModelWriter(Protocol):
    """Builds or copies the model behind a reward; the same arguments give the same bytes."""

    def __call__(
        self,
        reward: Any,  # noqa: ANN401 -- its own settings, as the model's
        model: Any,  # noqa: ANN401
        directory: Path,
        /,
        *,
        problems: Sequence[Problem],
        seed: int,
    ) -> int:
        """Return its number of parameters."""
        ...


def write_served_model(reward: ServedReward, directory: Path, *, problems: Sequence[Problem], seed: int) -> int:
    """Build or copy the model into an empty directory; return its number of parameters."""
    write = cast(ServedModelWriter, implementation_of(reward.model))
    return write(reward, reward.model, directory, problems=problems, seed=seed)


def refuse_to_write(
    reward: ServedReward, model: ServedModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Raise BadInput: nobody makes such a model for its reward."""
    raise BadInput("a model behind an endpoint, or one that begins as the policy, is not made for the reward")


def write_reward_model(
    reward: ModelReward, model: DirectoryRewardModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Copy a classifier from elsewhere."""
    parameters = check_reward_model(model.path, reward.template)
    copy_directory(model.path, directory)
    return parameters


def write_judge(
    reward: JudgeReward, model: DirectoryJudge, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Copy a judge from elsewhere."""
    return _copy(model.path, directory)


def write_trained_judge(
    reward: JudgeReward, model: TrainedJudge, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Build the decoder that the run will train, with a tokenizer of its questions and verdicts."""
    tokenizer = train_tokenizer(
        vocabulary_texts(reward, problems, seed=seed), vocab_size=model.shape.vocab_size, context=model.shape.context
    )
    built = build_scratch(model.shape, tokenizer, seed=derive_seed("judge", seed))
    save_policy(built, tokenizer, directory)
    return int(built.num_parameters())


def _copy(source: Path, directory: Path) -> int:
    _, _, parameters = check_directory(source)
    copy_directory(source, directory)
    return parameters
