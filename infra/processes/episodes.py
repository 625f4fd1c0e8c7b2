"""Environments in child processes. A process responds to the turns of episodes. If it crashes, the caller continues."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter, ValidationError

from infra.processes.child import Child, Interpreter, check_answer, invalid_answer

DescribedTools = Literal["none", "known", "all"]
"""Tools for which a process returns schemas: no tools, the tools whose type hints are sufficient, or all tools. Schemas
take seconds. The process is refused if it cannot describe `all` tools."""


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """Environment class and tools that a child process imports."""

    where: str
    """Text with which error messages about the environment start."""
    target: str = ""
    """Import string `pkg.mod:Class` of the environment. One object is created per episode. Empty if there are only
    tools."""
    tools: tuple[str, ...] = ()
    """Import strings `pkg.mod:function` of the tools."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments of the class."""
    role: str = "tool"
    """Chat role of messages for which the environment returns no role."""
    describes: DescribedTools = "none"
    """Tools that the process describes with schemas."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Import strings of the class and all tools."""
        return (self.target, *self.tools) if self.target else self.tools

    def with_schemas(self, describes: DescribedTools = "all") -> "RunEnvironment":
        """Return a copy that also requests the schemas of these tools."""
        return replace(self, describes=describes)


@dataclass(frozen=True, slots=True)
class EnvironmentMessage:
    """Message that an environment returns to the policy."""

    role: str
    content: str
    name: str = ""
    """Name of the tool."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """Response of an environment to one turn."""

    messages: tuple[EnvironmentMessage, ...]
    done: bool
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Request to answer the last turn of an episode. Without turns, the episode begins."""

    episode: str
    """Name of the episode, unique among the episodes that share a process."""
    problem: Mapping[str, JsonValue]
    seed: int
    turns: tuple[Mapping[str, JsonValue], ...] = ()
    """Turns of the episode so far. Each turn has a `text` and tool `calls` (name, arguments, error)."""


_STEP = TypeAdapter(EnvironmentStep)


class EpisodeProcess:
    """Running child process with its environments."""

    def __init__(self, environment: RunEnvironment, interpreter: Interpreter, *, seconds: float) -> None:
        """Start the process. `seconds` is the maximum time of a step. Call `ready` to wait for the process."""
        order: dict[str, Any] = {"environment": asdict(environment)}
        self._child = Child(order, interpreter, what=environment.where, seconds=seconds)
        self._seconds = seconds
        self._seen: dict[str, int] = {}  # number of turns of each episode in the process
        self.schemas: list[object] = []
        """Schemas of the tools in the format of chat templates. Only set once the process is ready."""

    def ready(self) -> None:
        """Wait until the environment is imported. Raises BadInput if it cannot be used, and ProcessEnded if the process
        ends."""
        self.schemas = self._child.ready()

    def kill(self) -> None:
        """Kill the process with its process group and descendants."""
        self._child.kill()

    def step(self, asked: EpisodeRequest) -> tuple[EnvironmentStep | None, str | None]:
        """Return the environment's response to an episode's last turn and None, or None and the reason of a failure.

        Raises ProcessEnded if the process ended or was too slow. The process cannot be used afterwards.
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
        """Close finished episodes."""
        for name in closed:
            self._seen.pop(name, None)
        self._request({"episode": ""}, closed=closed, seconds=self._seconds)

    def _request(
        self, request: Mapping[str, Any], *, closed: Sequence[str], seconds: float
    ) -> tuple[object, str | None]:
        token = secrets.token_hex(8)
        answer, _ = self._child.exchange({**request, "closed": list(closed), "token": token}, seconds)
        return check_answer(answer, token)
