"""Configuration of environments, which reply to the policy's turns. Torch-free."""

from abc import ABC
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, model_validator

from rheostat.infra.plugins import present_target
from rheostat.infra.processes.episodes import RunEnvironment
from rheostat.infra.store.inputs import DataLocation, ModelLocation, Program
from rheostat.infra.variants import ImportString
from rheostat.models.config.agents import AgentEnvironment, InspectEnvironment, LmEvalEnvironment, VerifiersEnvironment
from rheostat.models.config.episodes import DialogueEnvironment, EnvironmentSettings
from rheostat.models.config.file_rules import FileRules

CONNECT_SECONDS: Final = 30.0
"""Time limit in seconds for starting or connecting to a tool server, in addition to the time limit for a turn."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


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


EnvironmentConfig = Annotated[
    TargetEnvironment
    | ToolsEnvironment
    | PythonEnvironment
    | SearchEnvironment
    | McpEnvironment
    | DialogueEnvironment
    | AgentEnvironment
    | VerifiersEnvironment
    | LmEvalEnvironment
    | InspectEnvironment,
    Field(discriminator="kind"),
]
