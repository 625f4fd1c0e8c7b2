"""Configuration of environments, which reply to the policy's turns, and of the length of episodes. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from infra.config import Positive, Since
from infra.processes.episodes import RunEnvironment
from infra.renamed import RenamedFrom
from infra.store.inputs import DataLocation, ModelLocation, Program
from infra.variants import Variant
from models.config.engines import SamplingConfig
from models.config.file_rules import FileRules
from models.config.users import UserModelConfig

if TYPE_CHECKING:
    from models.config.job import Job

ImportString = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


CONNECT_SECONDS: Final = 30.0
"""Time in seconds allowed for the start of a tool server, in addition to the time limit for a turn."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class EpisodeSettings(Variant, ABC):
    """Fields common to all environments: the format and the length of an episode."""

    responder: ClassVar[str] = "models.environments.pool:EnvironmentPool"
    """`pkg.mod:name` of the class that computes the replies for all episodes of a worker, a
    `models.environments.responders.ResponderFactory`."""

    parser: str = "auto"
    """Parser of tool calls in the policy's turns: `hermes`, `llama3_json`, `none`, a function `pkg.mod:function`, or
    `auto`, which selects the parser that fits the tokenizer."""
    arguments: Annotated[Literal["checked", "unchecked"], Since("0.2.0", before="unchecked")] = "checked"
    """Handling of the arguments of tool calls. `checked` compares them with the schema of the tool; if an argument is
    missing, unknown or of a wrong type, the policy reads a message that names it. Arguments that are a JSON text are
    decoded. `unchecked` passes all arguments to the tool, and an error in the tool fails the episode."""
    max_turns: Positive = 4
    """Maximum number of turns of the policy, after which an episode ends."""
    turn_tokens: Positive = 256
    """Maximum tokens of one turn. `rollout.sampling.max_new_tokens` limits all turns and observations of an episode
    together. With history "per_turn" this limit applies to each turn separately: to the turn plus the tokens by which
    its prompt is longer than the first prompt."""
    observation_tokens: Annotated[int, Field(ge=16)] = 512
    """Maximum tokens of one observation. The middle of a longer observation is removed and marked."""
    batches: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of batches into which the groups of a shard are divided, so that the policy can generate turns for one
    batch while environments reply to another."""
    history: Literal["template", "append", "per_turn"] = "template"
    """Handling of chat templates that change earlier turns when messages follow, such as templates that remove
    reasoning. `template` refuses such templates. `append` keeps the sampled tokens, although the template would write
    them differently. `per_turn` renders the whole chat again before each turn and trains each turn with its own
    prompt."""
    prompts: Literal["chat", "text"] = "chat"
    """Format of prompts: "chat" lets the tokenizer's chat template format prompts and observations, "text" appends
    observations to plain text unchanged."""

    @property
    @abstractmethod
    def run(self) -> RunEnvironment:
        """Description of the environment: code to import, if any, the name of the environment in messages, and the chat
        role of observations."""

    @property
    def process(self) -> "EnvironmentSettings | None":
        """This configuration if the environment runs in separate processes, else None."""
        return None

    @property
    def dialogue(self) -> "DialogueEnvironment | None":
        """This configuration if a simulated user replies to the policy's turns, else None."""
        return None

    @property
    def has_turn_prompts(self) -> bool:
        """Whether each turn has a separately rendered prompt."""
        return self.history == "per_turn"

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield one line per conflict of the environment with other settings of the job."""
        if self.has_turn_prompts:
            yield from _find_per_turn_conflicts(self, job)
        if self.turn_tokens > job.rollout.sampling.max_new_tokens:
            yield (
                f"rollout.environment.turn_tokens is {self.turn_tokens}, but rollout.sampling.max_new_tokens, which "
                f"limits the whole episode, is {job.rollout.sampling.max_new_tokens}. Lower turn_tokens"
            )


def _find_per_turn_conflicts(environment: EpisodeSettings, job: "Job") -> Iterator[str]:
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
    they hang.

    `implementation` names a `models.environments.pool.ProcessStarter`.
    """

    implementation = "models.environments.pool:user_process"

    step_seconds: Annotated[float, Field(gt=0)] = 20
    """Time limit in seconds for the reply to a turn. If it is exceeded, the episode has failed and its score is
    missing."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of environment processes per worker, which is the number of episodes that receive replies at the same
    time."""

    @property
    def process(self) -> "EnvironmentSettings":
        """This configuration itself, because the environment runs in separate processes."""
        return self

    @property
    def sandboxed_by(self) -> str:
        """Configuration key or kind that makes a sandbox necessary, or an empty string if none does."""
        return ""


class UsersEnvironment(EnvironmentSettings, ABC):
    """Fields common to environments that run user code."""

    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of the environment: `bubblewrap` runs it without network access, without write access to your files,
    and unable to see other processes."""

    @property
    def sandboxed_by(self) -> str:
        """Configuration key that makes a sandbox necessary, or an empty string if none does."""
        return "rollout.environment.sandbox" if self.sandbox == "bubblewrap" else ""


class TargetEnvironment(UsersEnvironment):
    """User-defined class with `step(turn)` and optionally `reset(problem, seed)`, `close()` and `tools`."""

    kind: Literal["target"] = "target"
    target: ImportString
    """Class, as `pkg.mod:Class`. One instance is created for each episode."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments passed to the class."""

    @property
    def run(self) -> RunEnvironment:
        """Reference to the class that `target` names, with its options."""
        where = f"rollout.environment target {self.target!r}"
        return RunEnvironment(where, target=self.target, options=self.options, role="user")


class ToolsEnvironment(UsersEnvironment):
    """Python functions that the policy may call as tools. A turn without a tool call ends the episode."""

    kind: Literal["tools"] = "tools"
    tools: Annotated[tuple[ImportString, ...], Field(min_length=1)]
    """Functions, as `pkg.mod:function`. Their parameter types and docstrings are shown to the policy."""

    @property
    def run(self) -> RunEnvironment:
        """References to the Python functions that the policy may call as tools."""
        return RunEnvironment("rollout.environment.tools", tools=self.tools)


class PythonEnvironment(EnvironmentSettings):
    """A Python interpreter in a sandbox as the policy's tool `python(code)`. A turn without a tool call ends the
    episode.

    Each call runs a new program. Errors of a program are returned to the policy.
    """

    implementation = "models.environments.python:PythonTool"

    kind: Literal["python"] = "python"
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the code, with its installed packages. The default is the interpreter
    that runs Rheostat."""
    step_seconds: Annotated[float, Field(gt=0)] = 10
    """Time limit in seconds for all tool calls of a turn together. Calls that exceed it are killed, and the policy
    receives an error message."""
    memory_mib: Annotated[int, Field(ge=128)] = 2048
    """Memory limit in MiB of a call. It also limits the address space of each of the call's processes."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which has no user code to import."""
        return RunEnvironment("rollout.environment kind 'python'")

    @property
    def sandboxed_by(self) -> str:
        """Kind of this environment, because it always needs a sandbox."""
        return self.run.where


class SearchEnvironment(FileRules, EnvironmentSettings):
    """The policy's tool `search(query)`, which searches a file of passages with a retriever. A turn without a tool call
    ends the episode."""

    implementation = "models.environments.search:SearchTool"

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
    """Number of passages returned for a query, the most similar first."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of episodes that receive replies at the same time. All use one model in the process of the rollout
    worker."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which has no user code to import."""
        return RunEnvironment("rollout.environment kind 'search'")


class McpEnvironment(EnvironmentSettings):
    """Tools of an MCP server (`pip install 'mcp>=2.3,<3'`). A turn without a tool call ends the episode.

    All episodes of an environment process share one local server, or one connection to a remote server.
    """

    implementation = "models.environments.pool:server_process"

    kind: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program and arguments that start a local MCP server on stdio. Set either this or `url`."""
    url: str | None = None
    """Address of an MCP server on streamable HTTP, which must be https unless the server is on this machine. Set either
    this or `command`."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that are passed to `command`, in addition to `PATH`, `HOME` and similar ones."""
    header_variables: dict[str, str] = {}
    """Headers sent to `url`, each with the name of the environment variable that contains its value, such as `Bearer
    …`."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call. If empty, the policy may call all tools of the server."""

    @property
    def secrets(self) -> dict[str, str]:
        """Names of the environment variables to read, keyed by the variable or header in which the server receives the
        value."""
        return {**{name: name for name in self.variables}, **self.header_variables}

    @property
    def run(self) -> RunEnvironment:
        """Reference to the client class for the MCP server, with its options."""
        server: dict[str, JsonValue] = {
            "command": list(self.command),
            "url": self.url or "",
            "variables": dict(self.secrets),
            "seconds": self.step_seconds + CONNECT_SECONDS,
        }
        return RunEnvironment(
            "rollout.environment kind 'mcp'",
            target="models.environments.mcp_tools:McpTools",
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
    """A model that plays the user and replies to the policy's turns (a simulated user)."""

    responder = "models.environments.dialogues:Dialogues"

    kind: Literal["dialogue"] = "dialogue"
    model: UserModelConfig
    """Model that plays the user."""
    instructions: str
    """System message of the simulated user. `{prompt}`, `{answer}` and the names of the problem's columns, such as
    `{size}`, are replaced by their values."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=256)
    """Sampling of the simulated user's replies. If a reply reaches the token limit, the episode has failed."""
    endings: dict[Annotated[str, Field(min_length=1)], float] = {}
    """Texts by which the simulated user ends the dialogue, each with the reward that the environment then returns. The
    policy does not see this last reply."""
    final_turn_pattern: Annotated[str | None, RenamedFrom("final")] = None
    """Regular expression for the policy's final turn. After a turn that matches it, the episode ends without a reply of
    the simulated user."""
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
        """Description of the environment, which has no code to import. Observations have the chat role "user"."""
        return RunEnvironment("rollout.environment kind 'dialogue'", role="user")

    @property
    def dialogue(self) -> "DialogueEnvironment":
        """This configuration itself, because a simulated user replies to the policy's turns."""
        return self

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield one line per conflict with other settings, such as partial rollout, which would need the dialogue in a
        later iteration although it is kept only in memory."""
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
