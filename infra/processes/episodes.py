"""Environments in processes of their own: each answers episodes turn by turn, and may be lost without harm to them."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from infra.processes.child import Child, Interpreter, checked, meddled


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What a process of environments imports."""

    where: str
    """How messages about it begin."""
    target: str = ""
    """`pkg.mod:Class`, made once for each episode; empty where there are tools alone."""
    tools: tuple[str, ...] = ()
    """`pkg.mod:function` each."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments of the class."""
    role: str = "tool"
    """Of what is said without naming one."""
    describes: bool = False
    """Whether the process is asked for the schemas of the tools, which takes seconds."""

    @property
    def brought(self) -> tuple[str, ...]:
        """All that is imported."""
        return (self.target, *self.tools) if self.target else self.tools

    def describing(self) -> "RunEnvironment":
        """The same, with the schemas of its tools."""
        return replace(self, describes=True)


@dataclass(frozen=True, slots=True)
class Said:
    """A message of an environment."""

    role: str
    content: str
    name: str = ""
    """Of the tool."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """What an environment says to a turn."""

    messages: tuple[Said, ...]
    done: bool
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """An episode as far as it has come; without a turn it begins."""

    episode: str
    """Names it among those that share a process."""
    problem: Mapping[str, JsonValue]
    seed: int
    turns: tuple[Mapping[str, JsonValue], ...] = ()
    """Of each its `text`, and `calls` of tools: name, arguments, error."""


_STEP = TypeAdapter(EnvironmentStep)


class EpisodeProcess:
    """A running process with its environments."""

    def __init__(self, environment: RunEnvironment, interpreter: Interpreter, *, seconds: float) -> None:
        """Start the process, of which a step may take so long; `ready` waits for it."""
        order: dict[str, Any] = {"environment": asdict(environment)}
        self._child = Child(order, interpreter, what=environment.where, seconds=seconds)
        self._seconds = seconds
        self._seen: dict[str, int] = {}  # turns of the episodes that live in the process
        self.schemas: list[object] = []
        """Of the tools, as chat templates show them; known once the process is ready."""

    def ready(self) -> None:
        """Wait until all is imported. Raises BadInput if it cannot be used, else ProcessEnded."""
        self.schemas = self._child.ready()

    def kill(self) -> None:
        """Kill the process with its group and its descendants."""
        self._child.kill()

    def step(self, asked: Asked) -> tuple[EnvironmentStep | None, str | None]:
        """Have an episode's last turn answered, or none and the reason.

        Raises ProcessEnded if the process is gone, or was too slow; it is of no use then.
        """
        turns = len(asked.turns) - self._seen.get(asked.episode, 0)  # those that a new object is told again, too
        self._seen[asked.episode] = len(asked.turns)
        step, reason = self._asked(asdict(asked), closed=[], seconds=self._seconds * max(1, turns))
        if step is None:
            return None, reason
        try:
            return _STEP.validate_python(step), None
        except ValidationError:
            raise meddled() from None

    def end(self, closed: Sequence[str]) -> None:
        """Close episodes that are over."""
        for name in closed:
            self._seen.pop(name, None)
        self._asked({"episode": ""}, closed=closed, seconds=self._seconds)

    def _asked(self, request: Mapping[str, Any], *, closed: Sequence[str], seconds: float) -> tuple[object, str | None]:
        token = secrets.token_hex(8)
        answer, _ = self._child.exchange({**request, "closed": list(closed), "token": token}, seconds)
        return checked(answer, token)
