"""Processes in which agents run. An agent is a function or a program of the user that uses the policy through OpenAI's
API, in one process per episode (infra/agent_runner.py).

Without isolation, one process imports the function, and the agents are forked from it. Otherwise every agent has a
separate sandbox or container, so that agents cannot reach each other. From inside a sandbox, or a container without a
network, only the policy can be reached.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil
from pydantic import JsonValue, TypeAdapter, ValidationError

from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.processes import guard
from rheostat.infra.processes.child import START_SECONDS, Child, Interpreter, ProcessEnded, invalid_answer
from rheostat.infra.processes.containers import CHANNEL, SOCKET, SocketDirectory

PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "SSL_CERT_FILE", "LD_LIBRARY_PATH")
"""Names of the environment variables of this process that agents without a sandbox receive."""
_CHANNEL_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunAgent:
    """Description of the agent that a host process runs."""

    where: str
    """Start of error messages about the agent, such as the name of a setting."""
    target: str = ""
    """Import string `pkg.mod:function` of the agent's function, or an empty string if a command is run."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments of the function."""
    command: tuple[str, ...] = ()
    """Program and its arguments, if there is no function."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the agent, in addition to those of its process."""
    memory_bytes: int = 1 << 31
    """Maximum memory of all processes of an agent together."""


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """Order to run the agent in one episode."""

    episode: str
    """Name of the episode. It must be unique among the running episodes."""
    problem: Mapping[str, JsonValue]
    seed: int
    url: str
    """Base URL of the policy for OpenAI clients."""
    key: str
    """API key with which the agent's requests are recognized."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """End of the agent of one episode."""

    episode: str
    result: JsonValue = None
    """Value that the agent returned, or None."""
    error: str = ""
    """Reason why the agent failed, or an empty string."""
    is_lost: bool = False
    """Whether the host process ended first, so that the agent may not be the cause."""


_END: Final = TypeAdapter(AgentEnd)
Listen = Callable[[str, socket.socket], None]
"""Function that makes the server of the policy accept connections from the listener in the sandbox of an episode. The
server then owns the listener. The name of the episode is empty if the agent is only checked."""


class _Host:
    """Process that starts agents."""

    def __init__(self, agent: RunAgent, interpreter: Interpreter, home: Path) -> None:
        """Start the process. `home` is the directory for the agents' files."""
        self._sockets = contextlib.ExitStack()
        self._channel: Callable[[], socket.socket] | None = None
        """Function that returns the socket through which the process sends its listener, if agents are isolated."""
        channel: int | str | None = None
        directory: Path | None = None
        if interpreter.container is not None:
            shared = self._sockets.enter_context(contextlib.closing(SocketDirectory(home)))
            self._channel, channel, directory = shared.accept, f"{CHANNEL}/{SOCKET}", shared.path
        elif interpreter.sandboxed:
            ours, theirs = map(self._sockets.enter_context, socket.socketpair())
            self._channel, channel = lambda: ours, theirs.fileno()
        order = asdict(agent) | {"home": "/tmp" if interpreter.is_isolated else str(home), "channel": channel}
        own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.child = Child(
            {"agent": order},
            interpreter,
            what=agent.where,
            seconds=_CHANNEL_SECONDS,
            variables={**own, guard.SERVER: str(home)},
            descriptors=[channel] if isinstance(channel, int) else (),
            channel=directory,
        )
        if interpreter.sandboxed:
            theirs.close()
        self.orders: dict[str, AgentOrder] = {}
        """Orders of the episodes that have not ended."""
        self.is_ready = False
        """Whether the process has imported the agent."""
        self._port: int | None = None
        self._what, self._began = agent.where, time.monotonic()
        self.child.start()

    def start(self, order: AgentOrder) -> None:
        """Start the agent of an episode, as soon as the process has imported the agent."""
        self.orders[order.episode] = order
        if self.is_ready:
            self._send(order)

    def _send(self, order: AgentOrder) -> None:
        content = asdict(order)
        if self._port is not None:
            content["url"] = f"http://127.0.0.1:{self._port}/v1"
        self.child.send({"start": content})

    def receive(self, listen: Listen) -> Iterator[AgentEnd]:
        """Yield the ends of agents that the process has reported. Raises BadInput if the agent cannot be imported,
        WorkerFailed if its import takes too long, and ProcessEnded if the process has ended."""
        while (message := self.child.receive(0)) is not None:
            if self.is_ready:
                yield self._read_end(message[0])
            else:
                self._become_ready(message[0], listen)
        if not self.is_ready and time.monotonic() - self._began > START_SECONDS:
            raise WorkerFailed(f"{self._what}: its import took over {START_SECONDS:g} s. Make it faster")

    def _become_ready(self, description: object, listen: Listen) -> None:
        """Read the first message of the process, which has imported the agent: an error text, or a list with the port
        of the listener in the sandbox. Then start the agents that wait for it."""
        if isinstance(description, str):
            raise BadInput(description)
        if not isinstance(description, list) or len(description) != 1:
            raise invalid_answer()
        if self._channel is not None:
            channel = self._sockets.enter_context(self._channel())
            channel.settimeout(_CHANNEL_SECONDS)
            _, descriptors, _, _ = socket.recv_fds(channel, 64, 1)
            if not descriptors or not isinstance(description[0], int):
                raise invalid_answer()
            self._port = description[0]
            listen(next(iter(self.orders), ""), socket.socket(fileno=descriptors[0]))
        self.is_ready = True
        for order in self.orders.values():
            self._send(order)

    def _read_end(self, message: object) -> AgentEnd:
        """Return the end of an agent. A result that is not a JSON value costs only the episode of this agent."""
        episode = message.get("episode") if isinstance(message, dict) else None
        if not isinstance(episode, str) or self.orders.pop(episode, None) is None:
            raise invalid_answer()
        try:
            return _END.validate_python(message)
        except ValidationError:
            return AgentEnd(episode, error="its result is not a JSON value, or it is nested too deeply")

    def stop(self, episode: str) -> None:
        """Kill the agent of an episode, or do not start it if the process has not imported the agent yet."""
        if self.is_ready:
            self.child.send({"stop": episode})
        else:
            self.orders.pop(episode, None)

    def close(self) -> None:
        """Kill the process and all its agents."""
        self._sockets.close()
        self.child.kill()


class AgentHosts:
    """Processes that run the agents of a worker. The class is not safe for use by several threads."""

    def __init__(self, agent: RunAgent, interpreter: Interpreter, home: Path) -> None:
        self._agent, self._interpreter, self._home = agent, interpreter, home
        self._hosts: dict[str, _Host] = {}
        """Host processes: one for each episode if agents are isolated, else a single one with an empty name."""

    @property
    def is_isolated(self) -> bool:
        """Whether each agent has its own process that starts it, in a sandbox or container."""
        return self._interpreter.is_isolated

    def start(self, order: AgentOrder) -> None:
        """Start the agent of an episode."""
        name = order.episode if self._interpreter.is_isolated else ""
        if name not in self._hosts:
            self._hosts[name] = _Host(self._agent, self._interpreter, self._home)
        with contextlib.suppress(ProcessEnded):  # `wait` reports it
            self._hosts[name].start(order)

    def check(self) -> None:
        """Import the agent, isolated if agents are isolated. Raises BadInput if the agent cannot be used."""
        self._hosts[""] = host = _Host(self._agent, self._interpreter, self._home)
        while not host.is_ready:
            _wait_for([host], POLL_SECONDS)
            try:
                list(host.receive(lambda _, listener: listener.close()))
            except ProcessEnded as end:
                raise BadInput(f"{self._agent.where}: importing the agent failed: {end}. Correct the module") from None

    def has_started(self, episode: str) -> bool:
        """Return whether the agent of an episode has been started, after its import."""
        host = self._hosts.get(episode if self._interpreter.is_isolated else "")
        return host is not None and host.is_ready

    def stop(self, episode: str) -> None:
        """Kill the agent of an episode. `wait` still returns its end, except if agents are isolated."""
        if self._interpreter.is_isolated:
            if (host := self._hosts.pop(episode, None)) is not None:
                host.close()
        elif "" in self._hosts:
            with contextlib.suppress(ProcessEnded):
                self._hosts[""].stop(episode)

    def wait(self, seconds: float, listen: Listen) -> list[AgentEnd]:
        """Wait for at most `seconds`, and return the ends of agents. Raises BadInput if the agent cannot be imported,
        and WorkerFailed if its import takes too long."""
        _wait_for(self._hosts.values(), seconds)
        return [end for name in [*self._hosts] for end in self._receive(name, listen)]

    def _receive(self, name: str, listen: Listen) -> list[AgentEnd]:
        """Return the ends of agents of one process. If the process has ended, its other agents are lost."""
        host, ends = self._hosts[name], list[AgentEnd]()
        try:
            for end in host.receive(listen):
                ends.append(end)
        except (ProcessEnded, OSError) as error:
            self._hosts.pop(name).close()
            self._kill_orphans()
            return [*ends, *(AgentEnd(episode, error=f"{error}", is_lost=True) for episode in host.orders)]
        if name and ends:
            self._hosts.pop(name).close()
        return ends

    def _kill_orphans(self) -> None:
        """Kill the processes that agents of a lost host process have started. In a sandbox or container, they have
        ended with it."""
        if not self._interpreter.is_isolated:
            for process in guard.processes_of(self._home):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def close(self) -> None:
        """Kill all agents and their host processes."""
        while self._hosts:
            self._hosts.popitem()[1].close()


def _wait_for(hosts: Iterable[_Host], seconds: float) -> None:
    """Wait for at most `seconds` until one of the processes has sent a message or has ended."""
    polled = select.poll()
    for host in hosts:
        polled.register(host.child.output, select.POLLIN)
    polled.poll(1000 * seconds)
