"""The model that plays the user in dialogues, checked before anything is made."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

from infra.errors import BadInput
from infra.plugins import find_target
from models.config.environments import DialogueEnvironment
from models.config.users import DirectoryUser, EndpointUser, TrainedUser
from models.data.problems import Problem
from models.environments.transcripts import Transcript, instructed, told_of, user_texts
from models.environments.users import user_inputs
from models.inspection.directory import Inspected, inspect_directory, inspect_policy


class UserCheck(Protocol):
    """Checks the model that plays the user before a run begins."""

    def __call__(
        self,
        environment: DialogueEnvironment,
        model: Any,  # noqa: ANN401 -- its own settings
        /,
        *,
        problems: Sequence[Problem],
        gpus: float,
    ) -> int:
        """Refuse one that cannot reply, on workers with so many GPUs; return its parameters here."""
        ...


def check_user(environment: DialogueEnvironment, *, problems: Sequence[Problem], gpus: float) -> int:
    """Refuse a model that cannot reply; return its parameters here, none behind an endpoint. Weights are not read."""
    model = environment.model
    try:
        check = cast(UserCheck, find_target(model.inspection, where=f"model {model.known_as!r}"))
        return check(environment, model, problems=problems, gpus=gpus)
    except BadInput as error:
        raise BadInput(f"rollout.environment.model: {error}") from error


def check_asked_user(
    environment: DialogueEnvironment, model: EndpointUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """See that the problems fill the instructions; the address is looked at where an episode begins."""
    _first_turns(environment, problems)
    return 0


def check_directory_user(
    environment: DialogueEnvironment, model: DirectoryUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Look at its directory."""
    return _check(environment, inspect_directory(model.path), problems=problems, gpus=gpus)


def check_trained_user(
    environment: DialogueEnvironment, model: TrainedUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Describe the model that would be built."""
    found = inspect_policy(model.shape, user_texts(environment, problems))
    return _check(environment, found, problems=problems, gpus=gpus)


def _check(environment: DialogueEnvironment, found: Inspected, *, problems: Sequence[Problem], gpus: float) -> int:
    """Refuse a model that could not even read the longest instructions, or whose template takes no system message."""
    model, room = environment.model, environment.sampling.max_new_tokens
    asked = _first_turns(environment, problems)
    longest = max(len(each) for each in user_inputs(asked, found.tokenizer, chats=model.chats))
    if longest + room > found.shape.context:
        raise BadInput(
            f"instructions have up to {longest} tokens and a reply up to {room}, expected at most "
            f"{found.shape.context} together: the context of the model that plays the user"
        )
    assert model.held is not None, "a model that is inspected runs here"
    model.held.memory(found.shape, longest=longest + room, gpus=gpus, name="rollout.environment.model.engine")
    return found.shape.parameters


def _first_turns(environment: DialogueEnvironment, problems: Sequence[Problem]) -> list[Transcript]:
    found = []
    for problem in problems:
        try:
            found.append(Transcript(instructed(environment.instructions, told_of(problem)), ("-",), ()))
        except ValueError as error:
            raise BadInput(f"{problem.source}: {error}") from error
    return found
