"""Environments in child processes, which respond to the turns of episodes. If an environment crashes, the caller
continues."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter, ValidationError

from rheostat.infra.processes.child import Child, Interpreter, check_answer, invalid_answer

DescribedTools = Literal["none", "known", "all"]
"""Tools for which the child process returns JSON schemas: none, those whose type hints are sufficient ("known"), or
all. With "all", the process reports an error if a tool cannot be described. Creating schemas takes seconds."""


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """Description of an environment that a child process loads: its class or its tools."""

    where: str
    """Start of error messages about the environment, such as the name of a setting."""
    target: str = ""
    """Import string `pkg.mod:Class` of the environment class. One object of this class is created per episode. Empty if
    the environment consists only of tools."""
    tools: tuple[str, ...] = ()
    """Import strings `pkg.mod:function` of the tools."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments with which the environment class is instantiated."""
    role: str = "tool"
    """Chat role of messages for which the environment specifies no role."""
    describes: DescribedTools = "none"
    """Tools for which the child process returns JSON schemas."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Import strings of the environment class and of all tools."""
        return (self.target, *self.tools) if self.target else self.tools

    def with_schemas(self, describes: DescribedTools = "all") -> "RunEnvironment":
        """Return a copy of this description that also requests JSON schemas of these tools."""
        return replace(self, describes=describes)


@dataclass(frozen=True, slots=True)
class EnvironmentMessage:
    """Message from an environment to the policy."""

    role: str
    content: str
    name: str = ""
    """Name of the tool whose result this message is. Empty for other messages."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """Response of an environment to one turn of an episode: messages to the policy, whether the episode ends, and a
    reward."""

    messages: tuple[EnvironmentMessage, ...]
    done: bool
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Request to the environment of an episode to process the episode's last turn. A request without turns starts the
    episode."""

    episode: str
    """Name of the episode. It must be unique among the episodes in the same process."""
    problem: Mapping[str, JsonValue]
    seed: int
    turns: tuple[Mapping[str, JsonValue], ...] = ()
    """All turns of the episode so far. Each turn has the output of the policy (`text`) and the tool calls that were
    parsed from it (`calls` with name, arguments and error)."""


_STEP = TypeAdapter(EnvironmentStep)


class EpisodeProcess:
    """Child process that runs the environments of several episodes."""

    def __init__(self, environment: RunEnvironment, interpreter: Interpreter, *, seconds: float) -> None:
        """Start the process without waiting for its imports. `seconds` is the time limit of a step."""
        order: dict[str, Any] = {"environment": asdict(environment)}
        self._child = Child(order, interpreter, what=environment.where, seconds=seconds)
        self._seconds = seconds
        self._seen: dict[str, int] = {}  # number of turns of each episode in the process
        self.schemas: list[object] = []
        """JSON schemas of the tools in the format of chat templates. Set when the process is ready."""

    def ready(self) -> None:
        """Wait until the process has imported the environment. Raises BadInput if the environment cannot be used, and
        ProcessEnded if the process ends."""
        self.schemas = self._child.ready()

    def kill(self) -> None:
        """Kill the process, its process group and its descendants."""
        self._child.kill()

    def step(self, asked: EpisodeRequest) -> tuple[EnvironmentStep | None, str | None]:
        """Send the last turn of an episode to its environment. Return (response, None), or (None, reason) if the
        environment fails.

        Raises ProcessEnded if the process ended or was too slow. After that, the process cannot be used.
        """
        turns = len(asked.turns) - self._seen.get(asked.episode, 0)  # includes turns that must be replayed
        self._seen[asked.episode] = len(asked.turns)
        step, reason = self._request(asdict(asked), closed=[], seconds=self._seconds * max(1, turns))
        if step is None:
            return None, reason
        try:
            return _STEP.validate_python(step), None
        except ValidationError:
            raise invalid_answer() from None

    def end(self, closed: Sequence[str]) -> None:
        """Close the environment objects of finished episodes, whose names are given."""
        for name in closed:
            self._seen.pop(name, None)
        self._request({"episode": ""}, closed=closed, seconds=self._seconds)

    def _request(
        self, request: Mapping[str, Any], *, closed: Sequence[str], seconds: float
    ) -> tuple[object, str | None]:
        token = secrets.token_hex(8)
        answer, _ = self._child.exchange({**request, "closed": list(closed), "token": token}, seconds)
        return check_answer(answer, token)
