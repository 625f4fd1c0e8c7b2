"""Configuration of environments, which reply to the policy's turns, and of the length of episodes. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from rheostat.infra.config import Positive, Since
from rheostat.infra.plugins import present_target
from rheostat.infra.processes.episodes import RunEnvironment
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import DataLocation, ModelLocation, Program
from rheostat.infra.variants import ImportString, Variant
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.file_rules import FileRules
from rheostat.models.config.job import Job
from rheostat.models.config.users import UserModelConfig

CONNECT_SECONDS: Final = 30.0
"""Time limit in seconds for starting or connecting to a tool server, in addition to the time limit for a turn."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class EpisodeSettings(Variant, ABC):
    """Fields common to all environments: the format and the length of an episode, in which the policy and the
    environment take turns."""

    checks = {"policy": "rheostat.models.inspection.engines:check_turns"}
    responder: ClassVar[str] = "rheostat.models.environments.pool:EnvironmentPool"
    """Import path `pkg.mod:name` of a `rheostat.models.environments.responders.ResponderFactory`, which creates the
    object that computes the environment's replies in a worker."""

    parser: str = "auto"
    """Parser of tool calls in the policy's turns: `hermes`, `llama3_json`, `none`, a function `pkg.mod:function`, or
    `auto`, which selects the parser that fits the tokenizer's chat template."""
    arguments: Annotated[Literal["checked", "unchecked"], Since("0.2.0", before="unchecked")] = "checked"
    """Check of the arguments of tool calls. `checked` compares them with the tool's schema; if an argument is missing,
    unknown or of a wrong type, the policy receives a message that names it, and arguments that are JSON text are
    decoded. `unchecked` passes all arguments to the tool, and an error in the tool fails the episode."""
    max_turns: Positive = 4
    """Maximum number of turns of the policy. The episode ends after the last one."""
    turn_tokens: Positive = 256
    """Maximum tokens of one turn of the policy. `rollout.sampling.max_new_tokens` limits all turns and observations
    (replies of the environment) of an episode together. With history "per_turn", `max_new_tokens` applies to each turn
    separately: to the turn plus the tokens by which its prompt is longer than the first prompt."""
    observation_tokens: Annotated[int, Field(ge=16)] = 512
    """Maximum tokens of one observation (reply of the environment). The middle of a longer observation is replaced by a
    mark."""
    batches: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of batches into which the prompts of a shard are divided. With several batches, the policy generates turns
    for one batch while environments reply to another."""
    pace: Annotated[Literal["rounds", "free"], Since("0.2.0", before="rounds")] = "rounds"
    """Order of the turns with the engine `transformers`. `rounds` generates the next turn of all unfinished episodes of
    a batch together, so that shards are bit-reproducible. `free` generates the next turn of an episode as soon as its
    environment has replied, while other episodes wait; shards that are generated again are equal up to rounding. With
    vLLM, the pace is always free."""
    history: Literal["template", "append", "per_turn"] = "template"
    """Handling of chat templates that change earlier turns when messages follow, such as templates that remove the
    reasoning from earlier turns. `template` refuses such templates. `append` keeps the sampled tokens, although the
    template would render them differently. `per_turn` renders the whole chat again before each turn and trains each
    turn with its own prompt."""
    prompts: Literal["chat", "text"] = "chat"
    """Format of prompts and observations (replies of the environment): "chat" formats them by the tokenizer's chat
    template, "text" appends observations to plain text unchanged."""

    @property
    @abstractmethod
    def run(self) -> RunEnvironment:
        """Description of the environment for the processes that run it: the user code to import, if any, the name of
        the environment in messages, and the chat role of its replies."""

    @property
    def process(self) -> "EnvironmentSettings | None":
        """This object if the environment runs in separate processes, else None."""
        return None

    @property
    def dialogue(self) -> "DialogueEnvironment | None":
        """This object if a simulated user replies to the policy's turns, else None."""
        return None

    @property
    def has_turn_prompts(self) -> bool:
        """Whether the whole chat is rendered again before each turn, so each turn has its own prompt (history
        "per_turn")."""
        return self.history == "per_turn"

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this environment cannot be combined."""
        if self.has_turn_prompts:
            yield from _find_per_turn_conflicts(self, job)
        if self.pace == "free" and self.batches > 1:
            yield (
                f"rollout.environment.batches is {self.batches}, but pace = 'free' does not divide episodes into "
                "batches. Remove one of them"
            )
        if self.turn_tokens > job.rollout.sampling.max_new_tokens:
            yield (
                f"rollout.environment.turn_tokens is {self.turn_tokens}, but rollout.sampling.max_new_tokens, which "
                f"limits the whole episode, is {job.rollout.sampling.max_new_tokens}. Lower turn_tokens"
            )


def _find_per_turn_conflicts(environment: EpisodeSettings, job: Job) -> Iterator[str]:
    where = "rollout.environment.history = 'per_turn' cannot be combined with"
    if job.rollout.partial is not None:
        yield (
            f"{where} rollout.partial, because a later iteration does not have the prompts that were rendered for "
            "earlier turns. Remove one of them"
        )
    if environment.prompts == "text":
        yield f"{where} prompts = 'text', because only a chat template can render earlier turns. Remove history"
    if job.algorithm.overlong is not None:
        yield (
            f"{where} algorithm.overlong, because max_new_tokens does not limit the sum of all turns. Remove one of "
            "them"
        )
    for term, reward in zip(job.scoring.terms, job.scoring.rewards, strict=True):
        if reward.granularity in ("step", "token"):
            yield (
                f"{where} reward {term!r}, which scores the {reward.granularity}s of a single sequence. Use a "
                "reward that scores turns or episodes"
            )


class EnvironmentSettings(EpisodeSettings, ABC):
    """Fields common to environments without a simulated user. User code runs in separate processes, which are killed if
    they do not reply in time.

    `implementation` names a `rheostat.models.environments.pool.ProcessStarter`.
    """

    implementation = "rheostat.models.environments.pool:user_process"

    step_seconds: Annotated[float, Field(gt=0)] = 20
    """Time limit in seconds for the environment's reply to a turn. If it is exceeded, the episode has failed and its
    reward is missing."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of environment processes in each worker, and so the number of episodes that receive replies at the same
    time."""

    @property
    def process(self) -> "EnvironmentSettings":
        """This object itself, because the environment runs in separate processes."""
        return self

    @property
    def sandboxed_by(self) -> str:
        """Configuration key or environment kind that requires a sandbox, for messages. Empty if no sandbox is
        required."""
        return ""


class UsersEnvironment(EnvironmentSettings, ABC):
    """Fields common to environments that run code of the user."""

    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of the environment: "bubblewrap" runs its processes in a sandbox without network access, without write
    access to your files, and unable to see other processes."""

    @property
    def sandboxed_by(self) -> str:
        """Configuration key that requires a sandbox, for messages. Empty if no sandbox is required."""
        return "rollout.environment.sandbox" if self.sandbox == "bubblewrap" else ""


class TargetEnvironment(UsersEnvironment):
    """User-defined environment class with a method `step(turn)` and optionally `reset(problem, seed)`, `close()` and
    `tools`."""

    kind: Literal["target"] = "target"
    target: ImportString
    """Environment class, as `pkg.mod:Class`. One instance is created for each episode."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments with which the class is called."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment: the class that `target` names, and its options."""
        where = f"rollout.environment target {self.target!r}"
        return RunEnvironment(where, target=present_target(self.target), options=self.options, role="user")


class ToolsEnvironment(UsersEnvironment):
    """Python functions that the policy may call as tools. A turn without a tool call ends the episode."""

    kind: Literal["tools"] = "tools"
    tools: Annotated[tuple[ImportString, ...], Field(min_length=1)]
    """Functions, as `pkg.mod:function`. The policy receives their names, parameter types and docstrings."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment: the Python functions that the policy may call as tools."""
        return RunEnvironment("rollout.environment.tools", tools=self.tools)


class PythonEnvironment(EnvironmentSettings):
    """Python interpreter in a sandbox, which the policy calls as the tool `python(code)`. Each call runs a new program,
    whose output or error is returned to the policy. A turn without a tool call ends the episode."""

    implementation = "rheostat.models.environments.python:PythonTool"

    kind: Literal["python"] = "python"
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the code, with its installed packages. The default is the interpreter
    that runs Rheostat."""
    step_seconds: Annotated[float, Field(gt=0)] = 10
    """Time limit in seconds for all tool calls of a turn together. Programs that are still running are then killed, and
    the policy receives an error message."""
    memory_mib: Annotated[int, Field(ge=128)] = 2048
    """Memory limit in MiB of all processes of a call together. It also limits the address space of each process."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which imports no user code."""
        return RunEnvironment("rollout.environment kind 'python'")

    @property
    def sandboxed_by(self) -> str:
        """Environment kind, for messages, because code that the policy generated always requires a sandbox."""
        return self.run.where


class SearchEnvironment(FileRules, EnvironmentSettings):
    """Search in a file of passages with a retriever, which the policy calls as the tool `search(query)`. A turn without
    a tool call ends the episode."""

    implementation = "rheostat.models.environments.search:SearchTool"

    kind: Literal["search"] = "search"
    retriever: ModelLocation
    """Directory of a sentence-transformers model, on this machine or at s3://bucket/name, or a name on the Hub
    (docs/retrieval.md)."""
    corpus: DataLocation
    """File of passages: .jsonl, .json with an array, .csv or .tsv (each also compressed as .gz or .zst),
    .parquet, .arrow or .feather."""
    text_column: str = "text"
    """Column with the text of a passage."""
    passages: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of passages returned for a query, sorted by decreasing similarity."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of episodes that receive replies at the same time. All of them use the same retriever in the process of
    the rollout worker."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which imports no user code."""
        return RunEnvironment("rollout.environment kind 'search'")


class McpEnvironment(EnvironmentSettings):
    """Tools of an MCP server (Model Context Protocol; `pip install 'mcp>=2.3,<3'`). A turn without a tool call ends the
    episode.

    All episodes of an environment process share one local server, or one connection to a remote server.
    """

    implementation = "rheostat.models.environments.pool:server_process"

    kind: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program and arguments that start a local MCP server on stdio. Set either this or `url`."""
    url: str | None = None
    """Address of an MCP server on streamable HTTP, which must be https unless the server is on this machine. Set either
    this or `command`."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that the local server started by `command` receives, in addition to `PATH`,
    `HOME` and similar ones."""
    header_variables: dict[str, str] = {}
    """HTTP headers sent to `url`, each with the name of the environment variable that contains the header's value, such
    as `Bearer …`."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call. If empty, the policy may call all tools of the server."""

    @property
    def secrets(self) -> dict[str, str]:
        """Names of the environment variables with secrets, keyed by the variable or HTTP header in which the server
        receives the value."""
        return {**{name: name for name in self.variables}, **self.header_variables}

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment: the client class for the MCP server, and its options."""
        server: dict[str, JsonValue] = {
            "command": list(self.command),
            "url": self.url or "",
            "variables": dict(self.secrets),
            "seconds": self.step_seconds + CONNECT_SECONDS,
        }
        return RunEnvironment(
            "rollout.environment kind 'mcp'",
            target="rheostat.models.environments.mcp_tools:McpTools",
            options={"server": server, "only": list(self.tools)},
        )

    @model_validator(mode="after")
    def _require_one_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            state = "both are" if self.command else "neither is"
            raise ValueError(
                f"exactly one of command (a local program) and url (a running server) must be set, but {state} set"
            )
        if (self.header_variables and self.command) or (self.variables and self.url):
            raise ValueError(
                "variables can only be set together with command, and header_variables only together with url. Remove "
                "the other one"
            )
        if self.url is not None:
            _check_url(self.url)
        return self


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:  # the URL is not shown: it holds a secret
        raise ValueError("url must not contain a user name or password. Put them into header_variables")
    if parts.scheme != "https" and (parts.scheme != "http" or parts.hostname not in LOOPBACK):
        raise ValueError(
            f"url is {url!r}, but it must start with https://, or with http:// for a server on this machine"
        )


class DialogueEnvironment(EpisodeSettings):
    """Dialogue with a simulated user: a model that plays the user and replies to the policy's turns."""

    responder = "rheostat.models.environments.dialogues:Dialogues"

    kind: Literal["dialogue"] = "dialogue"
    model: UserModelConfig
    """Model that plays the user."""
    instructions: str
    """System message of the simulated user. `{prompt}`, `{answer}` and the names of the problem's columns, such as
    `{size}`, are replaced by their values."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=256)
    """Sampling settings for the simulated user's replies. If a reply reaches the token limit, the episode has
    failed."""
    endings: dict[Annotated[str, Field(min_length=1)], float] = {}
    """Texts by which the simulated user ends the dialogue, each with the reward for the episode. The policy does not
    see the reply that contains such a text."""
    final_turn_pattern: Annotated[str | None, RenamedFrom("final")] = None
    """Regular expression for the policy's final turn. When a turn matches it, the episode ends without a reply of the
    simulated user."""
    parser: str = "none"
    """Parser of tool calls in the policy's turns. The default is `none`, because this environment runs no tools."""

    @field_validator("final_turn_pattern")
    @classmethod
    def _require_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which imports no user code. Its replies have the chat role "user"."""
        return RunEnvironment("rollout.environment kind 'dialogue'", role="user")

    @property
    def dialogue(self) -> "DialogueEnvironment":
        """This object itself, because a simulated user replies to the policy's turns."""
        return self

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which a dialogue cannot be combined. An example is partial
        rollout, because a later iteration does not have the messages of the simulated user."""
        yield from super().find_conflicts(job)
        if job.rollout.partial is not None:
            yield (
                "rollout.environment.kind = 'dialogue' cannot be combined with rollout.partial, because a later "
                "iteration does not have the messages of the simulated user. Remove rollout.partial"
            )
        for reason in self.model.find_conflicts(self.sampling):
            yield f"rollout.environment.sampling: {reason}"


EnvironmentConfig = Annotated[
    TargetEnvironment | ToolsEnvironment | PythonEnvironment | SearchEnvironment | McpEnvironment | DialogueEnvironment,
    Field(discriminator="kind"),
]
