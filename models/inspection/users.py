"""Checks of the simulated user (the model that plays the user in dialogues) before a run begins."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target
from rheostat.infra.store.inputs import fetch_path
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.config.users import DirectoryUser, EndpointUser, TrainedUser
from rheostat.models.data.problems import Problem
from rheostat.models.environments.user_view import Transcript, build_problem_data, fill_instructions, user_texts
from rheostat.models.environments.users import user_inputs
from rheostat.models.inspection.directory import Inspected, inspect_directory, inspect_policy


class UserCheck(Protocol):
    """Function that checks one kind of simulated user (the model that plays the user in dialogues) before a run begins.
    `check_user` calls it."""

    def __call__(
        self,
        environment: DialogueEnvironment,
        model: Any,  # noqa: ANN401 -- its own settings
        /,
        *,
        problems: Sequence[Problem],
        gpus: float,
    ) -> int:
        """Return the number of parameters of the simulated user's model that the run's workers, with `gpus` GPUs each,
        load. Raises BadInput if the model cannot play the user."""
        ...


def check_user(environment: DialogueEnvironment, *, problems: Sequence[Problem], gpus: float) -> int:
    """Check that the simulated user can reply. Return the number of its parameters that the run's workers load, or 0
    for a model behind an endpoint. `gpus` is the number of GPUs of a worker. Weights are not read. Raises BadInput if
    the model cannot play the user."""
    model = environment.model
    try:
        check = cast(UserCheck, find_target(model.inspection, where=f"model {model.label!r}"))
        return check(environment, model, problems=problems, gpus=gpus)
    except BadInput as error:
        raise BadInput(f"rollout.environment.model: {error}") from error


def check_endpoint_user(
    environment: DialogueEnvironment, model: EndpointUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Check that each problem has a value for every placeholder in the instructions of the simulated user, and return
    0, because workers load no model. Raises BadInput if a value is missing. No request is sent; the endpoint is first
    contacted when an episode begins."""
    _first_turns(environment, problems)
    return 0


def check_directory_user(
    environment: DialogueEnvironment, model: DirectoryUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Check the simulated user's model in an external directory, and return its number of parameters."""
    return _check_local_user(environment, inspect_directory(fetch_path(model.path)), problems=problems, gpus=gpus)


def check_trained_user(
    environment: DialogueEnvironment, model: TrainedUser, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Check the simulated user that a run would build and train, and return its number of parameters."""
    inspected = inspect_policy(model.shape, user_texts(environment, problems))
    return _check_local_user(environment, inspected, problems=problems, gpus=gpus)


def _check_local_user(
    environment: DialogueEnvironment, found: Inspected, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Check the context length and chat template of a simulated user, and return its number of parameters.

    Raises BadInput if the context is too short for the longest instructions and a reply, or if the chat template
    rejects the instructions.
    """
    model, room = environment.model, environment.sampling.max_new_tokens
    transcripts = _first_turns(environment, problems)
    chats, rules = model.uses_chat_template, model.text_rules
    longest = max(len(each) for each in user_inputs(transcripts, found.tokenizer, chats=chats, rules=rules))
    if longest + room > found.shape.context:
        raise BadInput(
            f"the instructions of the simulated user have up to {longest} tokens and its reply up to {room}, but the "
            f"context of its model is only {found.shape.context} tokens. Use a model with a longer context, or "
            "shorten the instructions."
        )
    assert model.local_engine is not None, "a model that is inspected runs in this process"
    model.local_engine.estimate_memory(
        found.shape, longest=longest + room, gpus=gpus, name="rollout.environment.model.engine"
    )
    return found.shape.parameters


def _first_turns(environment: DialogueEnvironment, problems: Sequence[Problem]) -> list[Transcript]:
    transcripts = []
    for problem in problems:
        try:
            transcripts.append(
                Transcript(fill_instructions(environment.instructions, build_problem_data(problem)), ("-",), ())
            )
        except ValueError as error:
            raise BadInput(f"{problem.source}: {error}") from error
    return transcripts
