"""Writers of the models with which a run starts: the policy, judges, reward models and simulated users.

Each model is written into an empty directory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.variants import implementation_of
from rheostat.models.config.data import DataConfig
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.config.judges import (
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    ModelReward,
    PolicyShape,
    ServedReward,
    TrainedJudge,
)
from rheostat.models.config.policy import DirectoryPolicy, MergePolicy, PolicySource, ScratchPolicy
from rheostat.models.config.process_models import DirectoryProcessModel, ProcessModelReward
from rheostat.models.config.served_models import ServedModel
from rheostat.models.config.users import DirectoryUser, TrainedUser, UserModel
from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.environments.user_view import user_texts
from rheostat.models.judges.prompts import vocabulary_texts
from rheostat.models.modeling.directory import check_directory, copy_directory, copy_policy, record_context
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.modeling.process_model import check_process_model
from rheostat.models.modeling.reward_model import check_reward_model
from rheostat.models.modeling.weighted_sum import find_method, find_parents, write_merge
from rheostat.models.records.merges import MergeWork
from rheostat.models.records.seeds import derive_seed
from rheostat.models.text.tokenizer import problem_texts, train_tokenizer


class PolicyWriter(Protocol):
    """Function that builds or copies the initial policy for one value of `policy.kind`. `write_policy` calls it. The
    same arguments give the same bytes."""

    def __call__(self, policy: Any, directory: Path, /, *, texts: Iterable[str], seed: int) -> int:  # noqa: ANN401 -- its own
        """Write the policy into `directory` and return its number of parameters. If the policy needs a new tokenizer,
        the tokenizer is trained on `texts`."""
        ...


def write_policy(policy: PolicySource, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build or copy the initial policy into an empty directory, and return its number of parameters. A new tokenizer is
    trained on `texts`."""
    return cast(PolicyWriter, implementation_of(policy))(policy, directory, texts=texts, seed=seed)


def iterate_texts(data: DataConfig, seed: int) -> Iterator[str]:
    """Yield the texts of the training problems, for training a tokenizer. Problems are loaded only when iteration
    begins."""
    yield from problem_texts(load_problems(data, "train", seed))


def write_scratch(policy: ScratchPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build a text policy with random weights and a tokenizer trained on `texts`. Return the number of parameters."""
    tokenizer = train_tokenizer(texts, vocab_size=policy.vocab_size, context=policy.context)
    model = build_scratch(policy, tokenizer, seed=seed)
    save_policy(model, tokenizer, directory)
    return int(model.num_parameters())


def write_import(policy: DirectoryPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Copy the policy from the configured directory into the run's directory, and return its number of parameters.
    `texts` and `seed` are not used."""
    parameters = _copy(fetch_path(policy.path), directory)
    if policy.context is not None:
        record_context(directory, policy.context)
    return parameters


def write_merged_policy(policy: MergePolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Write the merge of the policies listed in the configuration, and return its number of parameters. `texts` and
    `seed` are not used."""
    work = MergeWork(
        find_parents(policy),
        directory,
        dtype=policy.dtype,
        unrelated=policy.allow_unrelated,
        method=find_method(policy),
    )
    write_merge(work)
    _, _, parameters = check_directory(directory)
    return parameters


class ServedModelWriter(Protocol):
    """Function that builds or copies a model that scores completions, such as a judge. `write_served_model` calls it.
    The same arguments give the same bytes."""

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
        """Write the model that computes `reward` into `directory` and return its number of parameters."""
        ...


def write_served_model(reward: ServedReward, directory: Path, *, problems: Sequence[Problem], seed: int) -> int:
    """Build or copy the model that computes `reward` into an empty directory, and return its number of parameters."""
    write = cast(ServedModelWriter, implementation_of(reward.model))
    return write(reward, reward.model, directory, problems=problems, seed=seed)


def refuse_to_write(
    reward: ServedReward, model: ServedModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Raise BadInput, because no separate model is built for this reward: it uses a model behind an endpoint, or a copy
    of the policy."""
    raise BadInput(
        "the model of this reward is behind an endpoint or starts as a copy of the policy, so it is not written "
        "separately"
    )


def write_reward_model(
    reward: ModelReward, model: DirectoryRewardModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Check a reward model in an external directory, copy it into `directory`, and return its number of parameters."""
    parameters = check_reward_model(source := fetch_path(model.path), reward.template)
    copy_directory(source, directory)
    return parameters


def write_process_model(
    reward: ProcessModelReward, model: DirectoryProcessModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Check a process reward model in an external directory, copy it into `directory`, and return its number of
    parameters."""
    parameters = check_process_model(source := fetch_path(model.path))
    copy_directory(source, directory)
    return parameters


def write_judge(
    reward: JudgeReward, model: DirectoryJudge, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Copy a judge from an external directory into `directory`, and return its number of parameters."""
    return _copy(fetch_path(model.path), directory)


def write_trained_judge(
    reward: JudgeReward, model: TrainedJudge, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Build the judge that the run will train, with a tokenizer trained on judge prompts and verdicts. Return the
    number of parameters."""
    if isinstance(model.shape, PolicyShape):
        return refuse_to_write(reward, model, directory, problems=problems, seed=seed)
    texts = vocabulary_texts(reward, problems, seed=seed)
    return write_policy(model.shape, directory, texts=texts, seed=derive_seed("judge", seed))


# ---- simulated users
class UserWriter(Protocol):
    """Function that builds or copies the simulated user, the model that plays the user in dialogues. `write_user` calls
    it. The same arguments give the same bytes."""

    def __call__(
        self,
        environment: DialogueEnvironment,
        model: Any,  # noqa: ANN401 -- its own settings
        directory: Path,
        /,
        *,
        problems: Sequence[Problem],
        seed: int,
    ) -> int:
        """Write the simulated user's model into `directory` and return its number of parameters."""
        ...


def write_user(environment: DialogueEnvironment, directory: Path, *, problems: Sequence[Problem], seed: int) -> int:
    """Build or copy the simulated user of a dialogue environment into an empty directory, and return its number of
    parameters."""
    write = cast(UserWriter, implementation_of(environment.model))
    return write(environment, environment.model, directory, problems=problems, seed=seed)


def refuse_to_write_user(
    environment: DialogueEnvironment, model: UserModel, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Raise BadInput, because a simulated user behind an endpoint has no model that a run could build."""
    raise BadInput("the simulated user is behind an endpoint, so the run does not write its model")


def copy_user(
    environment: DialogueEnvironment, model: DirectoryUser, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Copy a simulated user from an external directory into `directory`, and return its number of parameters."""
    return _copy(fetch_path(model.path), directory)


def build_user(
    environment: DialogueEnvironment, model: TrainedUser, directory: Path, *, problems: Sequence[Problem], seed: int
) -> int:
    """Build the simulated user that the run will train, with a tokenizer trained on the worked episodes (example
    dialogues) of the problems. Return the number of parameters."""
    texts = user_texts(environment, problems)
    return write_policy(model.shape, directory, texts=texts, seed=derive_seed("user", seed))


def _copy(source: Path, directory: Path) -> int:
    _, _, parameters = check_directory(source)
    copy_policy(source, directory)
    return parameters
