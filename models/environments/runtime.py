"""Environment runtime of a rollout worker, which runs episodes with the worker's engine and the environment."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from transformers import GenerationConfig, PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, RheostatError
from rheostat.infra.plugins import nearest_name
from rheostat.infra.processes.episodes import DescribedTools, EpisodeRequest
from rheostat.infra.processes.restarting import RestartingProcess
from rheostat.infra.store.contracts import Objects
from rheostat.models.config.episodes import EpisodeSettings, SteppedEnvironment
from rheostat.models.data.problems import Message, Problem
from rheostat.models.engines.protocol import ContinuousEngine, Engine, GeneratesCompletions, InterleavingEngine
from rheostat.models.engines.requests import end_tokens
from rheostat.models.environments.clock import EnvironmentClock
from rheostat.models.environments.context import build_context_builder
from rheostat.models.environments.episodes import Episodes
from rheostat.models.environments.pool import start_process
from rheostat.models.environments.responders import LocalModelResponder, build_responder
from rheostat.models.environments.user_view import build_problem_data
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import RolloutWork
from rheostat.models.rollouts.groups import Group
from rheostat.models.text.arguments import check_arguments, check_schemas
from rheostat.models.text.calls import Parser, build_parser, keep_text
from rheostat.models.text.per_turn import check_turn_prompts
from rheostat.models.text.tokenizer import ToolSchema, load_tokenizer
from rheostat.models.text.turns import TurnFormat, check_template_appends, turn_format

logger = logging.getLogger(__name__)


class EnvironmentRuntime:
    """Environment of a rollout worker. Runs the episodes of rollout shards with the loaded policy and the environment's
    processes.

    The policy's turn format is read only once, because all policies of a run share their tokenizer.
    """

    def __init__(self, settings: SteppedEnvironment) -> None:
        self._settings = settings
        self._answers = build_responder(settings)
        self._reading: tuple[TurnFormat, Parser] | None = None
        self._clock = EnvironmentClock()

    @property
    def progress(self) -> int:
        """Number of answered turns so far. A worker whose number stops growing is considered stuck."""
        return self._answers.progress

    def load(self, directory: Path, user: ModelVersion) -> None:
        """Load the model `user`, which plays the user in dialogues. Raises BadInput if the environment uses no model in
        this process."""
        if not isinstance(self._answers, LocalModelResponder):
            raise BadInput(
                f"{self._settings.run.where}: a model was loaded for this environment, but only environments with a "
                "simulated user (kind 'dialogue') use a model"
            )
        self._answers.load(directory, user)

    def sleep(self) -> None:
        """Release the memory of the model that plays the user."""
        if isinstance(self._answers, LocalModelResponder):
            self._answers.sleep()

    def run_episodes(
        self, groups: Sequence[Group], engine: Engine, work: RolloutWork, *, directory: Path, store: Objects
    ) -> list[Group]:
        """Run each completion of the groups as an episode, to its end or to the token limit of the iteration.

        `directory` contains the policy's tokenizer. Nothing is written to `store`.
        """
        if self._reading is None:
            self._reading = read_turns(directory, self._settings)
        form, parse = self._reading
        episodes = Episodes(
            engine=_set_pace(engine, self._settings),
            environments=self._answers,
            settings=self._settings,
            sampling=work.sampling,
            version=work.policy.version,
            partial=work.partial,
            history=build_context_builder(self._settings, form, work.sampling.max_new_tokens),
            form=form,
            parse=parse,
            clock=self._clock,
        )
        return episodes.complete(groups)

    def pop_times(self) -> dict[str, float]:
        """Return the seconds in which environments computed answers, and the seconds in which no turn was generated,
        since the last call."""
        return self._clock.pop_times()

    def close(self) -> None:
        """End the environment's processes, or close the model that plays the user."""
        self._answers.close()


def _set_pace(engine: Engine, settings: SteppedEnvironment) -> GeneratesCompletions:
    """Return the engine, or an engine that batches the turns of independent episodes if `pace` is "free". Raises
    BadInput if the engine cannot batch them."""
    if settings.pace == "rounds" or isinstance(engine, InterleavingEngine):
        return engine
    if isinstance(engine, ContinuousEngine):
        return engine.batch_continuously()
    raise BadInput(
        f"rollout.environment.pace = 'free' needs an engine that batches concurrent calls, but {engine.producer()} has "
        "neither the method `run_interleaved` nor `batch_continuously`. Remove rollout.environment.pace"
    )


def tool_schemas(settings: SteppedEnvironment, describes: DescribedTools = "all") -> tuple[ToolSchema, ...]:
    """Start an environment and return the schemas of its tools. Empty if the environment is a model that plays the
    user.

    `describes` selects the tools. Raises BadInput if the environment cannot be used.
    """
    if settings.process is None:
        return ()
    process = start_process(settings.process, describes=describes)
    place = RestartingProcess(lambda: process, what=settings.run.where)
    try:
        return tuple(cast(ToolSchema, schema) for schema in place.ready().schemas)
    finally:
        place.close()


def tools_of(settings: EpisodeSettings | None, problems: Sequence[Problem]) -> tuple[ToolSchema, ...]:
    """Return the schemas of the environment's tools if the prompts are chats, which show the tools. Empty for
    plain-text prompts, without an environment, or if a program requests the turns.

    Raises BadInput if the prompts are of the wrong kind (chats or plain text), if a problem has images but
    `history='per_turn'` is configured, if a problem names a tool that the environment lacks, or if the environment
    cannot be used.
    """
    stepped = None if settings is None else settings.stepped
    if stepped is None:
        return ()
    is_chat = stepped.prompts == "chat"
    for problem in problems:
        if stepped.has_turn_prompts and problem.images:
            raise BadInput(
                f"{problem.source}: the problem has {format_count(len(problem.images), 'image')}, but "
                "rollout.environment.history = 'per_turn' supports text only. Use another history, or problems without "
                "images."
            )
        if isinstance(problem.prompt, str) == is_chat:
            kinds = ("a chat", "plain text") if is_chat else ("plain text", "a chat")
            raise BadInput(
                f"{problem.source}: rollout.environment needs {kinds[0]} as the prompt, but this problem has "
                f"{kinds[1]}. Change the problems, or set rollout.environment.prompts = "
                f"{'text' if is_chat else 'chat'!r}."
            )
    schemas = tool_schemas(stepped) if is_chat else ()
    names = [_tool_name(schema) for schema in schemas]
    for problem in problems if names else ():
        for tool in problem.template.tools:
            if (name := _tool_name(tool)) not in names:
                raise BadInput(
                    f"{problem.source}: the row selects the tool {name!r}, but rollout.environment has only the tools "
                    f"{', '.join(names)}{nearest_name(name, names) or '.'} A row may only select some of these tools."
                )
    return schemas


def _tool_name(tool: ToolSchema) -> str:
    """Return the name of a tool from its schema.

    The schema is either `{"function": {...}}` or, as in some data files, only the inner object.
    """
    return str(cast(Mapping[str, object], tool.get("function", tool))["name"])


def check_turns(
    settings: SteppedEnvironment, tokenizer: PreTrainedTokenizerFast, tools: Sequence[ToolSchema], problem: Problem
) -> None:
    """Check before a run that the policy's turns can be parsed, and that an episode of `problem` can start. Raises
    BadInput if one of the checks fails."""
    form = turn_format(tokenizer, tools=tools, is_chat=settings.prompts == "chat").with_arguments(problem.template)
    parse = build_parser(settings.parser, tokenizer, tools=tools)
    _check_shown(form)
    if settings.arguments == "checked" and parse is not keep_text:
        check_schemas(tools or _known_schemas(settings), where=settings.run.where)
    if settings.has_turn_prompts:
        check_turn_prompts(form, role=settings.run.role, where="rollout.environment.history 'per_turn'")
    elif settings.history == "template":
        check_template_appends(form, role=settings.run.role, where="rollout.environment")
    answers = build_responder(settings)
    try:
        [first_answer] = answers.answer([EpisodeRequest(episode="0", problem=build_problem_data(problem), seed=0)], [0])
    finally:
        answers.close()
    if first_answer.step is None:
        raise BadInput(
            f"{settings.run.where}: starting the first episode, as a test, failed: {first_answer.failure}. Correct "
            "the environment or its options."
        )


def _check_shown(form: TurnFormat) -> None:
    """Raise BadInput if prompts rendered by the policy's chat template do not contain the environment's tools."""
    names = [_tool_name(tool) for tool in form.tools]
    if not names:
        return
    [prompt] = form.render([[form.encode_message(Message("user", "-"))]], generation_prompt=True)
    hidden = [name for name in names if name not in prompt]
    if hidden:
        raise BadInput(
            f"rollout.environment: the policy's chat template does not include the tool {hidden[0]!r} in the prompt, "
            "so the policy could not know it. Use a policy that was trained to use tools, or set "
            "rollout.environment.kind = 'target' with a class that parses the text."
        )


def read_turns(directory: Path, settings: SteppedEnvironment) -> tuple[TurnFormat, Parser]:
    """Return the format of the policy's turns and the parser of its tool calls. `directory` contains the policy's
    tokenizer.

    Raises BadInput if the tokenizer or the environment cannot be used.
    """
    tokenizer = load_tokenizer(directory)
    tools = tool_schemas(settings) if settings.prompts == "chat" else ()
    stated = end_tokens(tokenizer, _generation(directory))
    form = turn_format(tokenizer, stated=stated, tools=tools, is_chat=settings.prompts == "chat")
    parse = build_parser(settings.parser, tokenizer, tools=tools)
    if settings.arguments == "unchecked" or parse is keep_text:
        return form, parse
    return form, check_arguments(parse, tools or _known_schemas(settings))


def _known_schemas(settings: SteppedEnvironment) -> tuple[ToolSchema, ...]:
    """Return the schemas of the environment's tools for checking the arguments of calls, if prompts do not show the
    tools. Returns no schemas if the environment cannot be started."""
    try:
        return tool_schemas(settings, "known")
    except RheostatError as error:
        logger.warning(
            "%s: the arguments of tool calls are not checked against the schemas of the tools, because the schemas "
            "cannot be read: %s",
            settings.run.where,
            error,
        )
        return ()


def _generation(directory: Path) -> GenerationConfig:
    """Load the policy's generation settings, or return transformers' defaults if generation_config.json is missing."""
    if not (directory / "generation_config.json").is_file():
        return GenerationConfig()
    return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
