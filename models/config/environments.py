"""Configuration of environments: what answers the policy's turns, and how long episodes may be. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from infra.config import Positive
from infra.processes.episodes import RunEnvironment
from infra.store.inputs import Location, Program
from infra.variants import Variant
from models.config.engines import SamplingConfig
from models.config.users import UserModelConfig

if TYPE_CHECKING:
    from models.config.job import Job

ImportString = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


CONNECT_SECONDS: Final = 30.0
"""How much longer than a turn the start of a server of tools may take."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class EpisodeSettings(Variant, ABC):
    """What all environments share: how episodes go."""

    answering: ClassVar[str] = "models.environments.pool:EnvironmentPool"
    """`pkg.mod:name` of what answers a worker's episodes, a `models.environments.answers.MakesAnswering`."""

    parser: str = "auto"
    """How calls of tools are read from a turn: `hermes`, `llama3_json`, `none`, a function `pkg.mod:function`,
    or `auto`, which asks the tokenizer."""
    max_turns: Positive = 4
    """Turns of the policy after which an episode ends."""
    turn_tokens: Positive = 256
    """Longest turn; `rollout.sampling.max_new_tokens` bounds all turns and observations together, or what a turn's own
    prompt has more than the first, with the turn."""
    observation_tokens: Annotated[int, Field(ge=16)] = 512
    """Longest observation; a longer one loses its middle, which is marked."""
    batches: Annotated[int, Field(ge=1, le=64)] = 1
    """Groups of a shard are dealt to so many batches: while environments answer one, the policy writes the next."""
    history: Literal["template", "append", "per_turn"] = "template"
    """What of a chat template that changes earlier turns when messages follow, as those do that leave out thoughts:
    `template` refuses it, `append` leaves what was sampled as it is, although the template would spell it otherwise,
    `per_turn` has it write the whole chat anew before each turn, and trains each turn after the prompt that it had."""
    prompts: Literal["chat", "text"] = "chat"
    """What prompts are: chats, in which the tokenizer's template writes observations, or plain text, followed by what
    the environment says as it is."""

    @property
    @abstractmethod
    def run(self) -> RunEnvironment:
        """What is imported, if anything; how messages begin, and the role of what is said."""

    @property
    def process(self) -> "EnvironmentSettings | None":
        """The same, where processes answer."""
        return None

    @property
    def dialogue(self) -> "DialogueEnvironment | None":
        """The same, where a model answers."""
        return None

    @property
    def renders_turns(self) -> bool:
        """Whether each turn has a prompt of its own."""
        return self.history == "per_turn"

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield one line per combination that cannot work."""
        if self.renders_turns:
            yield from _against_own_prompts(self, job)
        if self.turn_tokens > job.rollout.sampling.max_new_tokens:
            yield (
                f"rollout.environment.turn_tokens {self.turn_tokens}: expected at most "
                f"rollout.sampling.max_new_tokens {job.rollout.sampling.max_new_tokens}, which bounds the whole episode"
            )


def _against_own_prompts(environment: EpisodeSettings, job: "Job") -> Iterator[str]:
    where = "rollout.environment.history 'per_turn'"
    if job.rollout.partial is not None:
        yield f"{where} with rollout.partial: no later iteration has what its template wrote; leave one of them out"
    if environment.prompts == "text":
        yield f"{where} with prompts 'text': no template writes what comes before a turn; leave history out"
    if job.algorithm.overlong is not None:
        yield (
            f"{where} with algorithm.overlong: max_new_tokens does not bound what all turns write together; leave one "
            "of them out"
        )
    for term, reward in zip(job.scoring.terms, job.scoring.rewards, strict=True):
        if reward.valued in ("step", "token"):
            yield f"{where} with reward {term!r}: it values {reward.valued}s of one sequence; value turns or episodes"


class EnvironmentSettings(EpisodeSettings, ABC):
    """Where a turn is answered in a process of its own, which is killed where it hangs.

    `implementation` is a `models.environments.pool.Starts`.
    """

    implementation = "models.environments.pool:user_process"

    step_seconds: Annotated[float, Field(gt=0)] = 20
    """Longest time of an environment for a turn, in seconds; then the episode has failed, and its score is missing."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """Processes of a worker's environments: so many of them answer at the same time."""

    @property
    def process(self) -> "EnvironmentSettings":
        """Here."""
        return self

    @property
    def sandboxed_by(self) -> str:
        """The setting that asks for a sandbox; empty where none does."""
        return ""


class UsersEnvironment(EnvironmentSettings, ABC):
    """Code of a user's own."""

    sandbox: Literal["none", "bubblewrap"] = "none"
    """Where it runs: `bubblewrap` gives it no network, nothing of yours to write and nobody's processes to see."""

    @property
    def sandboxed_by(self) -> str:
        """The setting that asks for a sandbox; empty where none does."""
        return "rollout.environment.sandbox" if self.sandbox == "bubblewrap" else ""


class TargetEnvironment(UsersEnvironment):
    """A class of your own with `step(turn)`, and perhaps `reset(problem, seed)`, `close()` and `tools`."""

    kind: Literal["target"] = "target"
    target: ImportString
    """`pkg.mod:Class`, made once for each episode."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""

    @property
    def run(self) -> RunEnvironment:
        """The class that is named."""
        where = f"rollout.environment target {self.target!r}"
        return RunEnvironment(where, target=self.target, options=self.options, role="user")


class ToolsEnvironment(UsersEnvironment):
    """Functions that the policy may call; a turn without a call ends the episode."""

    kind: Literal["tools"] = "tools"
    tools: Annotated[tuple[ImportString, ...], Field(min_length=1)]
    """`pkg.mod:function` each, with types and a docstring, which the policy is shown."""

    @property
    def run(self) -> RunEnvironment:
        """The functions that are named."""
        return RunEnvironment("rollout.environment.tools", tools=self.tools)


class PythonEnvironment(EnvironmentSettings):
    """A Python interpreter in a sandbox, the policy's tool `python(code)`; a turn without a call ends the episode.

    Each call is a program of its own. What a program does wrong, the policy is told.
    """

    implementation = "models.environments.python:PythonTool"

    kind: Literal["python"] = "python"
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the code, with what is installed there; none is ours."""
    step_seconds: Annotated[float, Field(gt=0)] = 10
    """Longest time of a turn's calls together, in seconds; what takes longer is ended, and the policy is told."""
    memory_mib: Annotated[int, Field(ge=128)] = 2048
    """Memory of a call, and address space of each of its processes, in MiB."""

    @property
    def run(self) -> RunEnvironment:
        """Nothing is imported."""
        return RunEnvironment("rollout.environment kind 'python'")

    @property
    def sandboxed_by(self) -> str:
        """Setting that requires a sandbox: this kind of environment itself."""
        return self.run.where


class SearchEnvironment(EnvironmentSettings):
    """The policy's tool `search(query)`: passages of a file by a retriever; a turn without a call ends the episode."""

    implementation = "models.environments.search:SearchTool"

    kind: Literal["search"] = "search"
    retriever: Location
    """Directory of sentence-transformers, of this machine or at s3://bucket/name (docs/retrieval.md)."""
    corpus: Location
    """The passages: .jsonl, .json with an array, .csv, each of them also .gz, .parquet or .arrow."""
    text_column: str = "text"
    """Column with a passage."""
    passages: Annotated[int, Field(ge=1, le=100)] = 3
    """So many are shown for a query, the most similar first."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many episodes are answered at the same time, by one model in the rollout worker's own process."""

    @property
    def run(self) -> RunEnvironment:
        """Nothing is imported."""
        return RunEnvironment("rollout.environment kind 'search'")


class McpEnvironment(EnvironmentSettings):
    """Tools of an MCP server (`pip install 'mcp>=2.3,<3'`); a turn without a call ends the episode.

    All episodes of a process share a server, or a connection to one.
    """

    implementation = "models.environments.pool:server_process"

    kind: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program and arguments that start a server on stdio; or set `url`."""
    url: str | None = None
    """Address of a server on streamable HTTP, https unless it is on this machine; or set `command`."""
    variables: tuple[str, ...] = ()
    """Environment variables that are handed to the `command`, which gets no others than `PATH`, `HOME` and the like."""
    header_variables: dict[str, str] = {}
    """Headers sent to the `url`, each with the environment variable that holds its value, such as `Bearer …`."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call; all where none is named."""

    @property
    def secrets(self) -> dict[str, str]:
        """Environment variables that are read, by what they become."""
        return {**{name: name for name in self.variables}, **self.header_variables}

    @property
    def run(self) -> RunEnvironment:
        """What asks the server."""
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
    def _has_one_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("expected either command or url, found " + ("both" if self.command else "neither"))
        if (self.header_variables and self.command) or (self.variables and self.url):
            raise ValueError("expected variables with command, header_variables with url, found them the other way")
        if self.url is not None:
            _check_url(self.url)
        return self


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:  # the URL is not shown: it holds a secret
        raise ValueError("url: expected no user name or password in it; put them into header_variables")
    if parts.scheme != "https" and (parts.scheme != "http" or parts.hostname not in LOOPBACK):
        raise ValueError(f"url: expected https, or http on this machine, found {url!r}")


class DialogueEnvironment(EpisodeSettings):
    """A model plays the user and answers the policy's turns."""

    answering = "models.environments.dialogues:Dialogues"

    kind: Literal["dialogue"] = "dialogue"
    model: UserModelConfig
    """Which model plays the user."""
    instructions: str
    """What it is told first: its system message. `{prompt}`, `{answer}` and the problem's columns by name, such as
    `{size}`, are filled in."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=256)
    """How its replies are drawn. Of a reply that has not ended by then the episode has failed."""
    endings: dict[Annotated[str, Field(min_length=1)], float] = {}
    """Texts by which the user ends the dialogue, and the reward of the environment that each gives; the policy does not
    read the reply."""
    final: str | None = None
    """Regular expression; a turn of the policy in which it is found is the last, and the user is not asked."""
    parser: str = "none"
    """How calls of tools are read from a turn; none are answered here."""

    @field_validator("final")
    @classmethod
    def _is_a_pattern(cls, final: str | None) -> str | None:
        try:
            re.compile(final or "")
        except re.error as error:
            raise ValueError(f"{final!r} is not a regular expression: {error}") from error
        return final

    @property
    def run(self) -> RunEnvironment:
        """Nothing is imported."""
        return RunEnvironment("rollout.environment kind 'dialogue'", role="user")

    @property
    def dialogue(self) -> "DialogueEnvironment":
        """Here."""
        return self

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """The model may not take the sampling, and what it said is kept in memory alone."""
        yield from super().reasons_against(job)
        if job.rollout.partial is not None:
            yield (
                "rollout.environment.kind 'dialogue' with rollout.partial: no later iteration has what the user was "
                "told; leave one of them out"
            )
        for reason in self.model.reasons_against(self.sampling):
            yield f"rollout.environment.sampling: {reason}"


EnvironmentConfig = Annotated[
    TargetEnvironment | ToolsEnvironment | PythonEnvironment | SearchEnvironment | McpEnvironment | DialogueEnvironment,
    Field(discriminator="kind"),
]
