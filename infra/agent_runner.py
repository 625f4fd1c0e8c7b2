"""Execution of agents in the process that runs users' code (infra/runner.py). An agent is a function or a program that
uses the policy through OpenAI's API. Each episode runs in a separate process, in an empty directory.

This file only imports files in the same folder. The parent process sends `{"start": …}` and `{"stop": episode}`, and
receives `{"episode", "result", "error"}` when an agent has ended. All processes of an agent end with it. Their output
is not shown, except its last line if the agent fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MAX_RESULT_BYTES = 1 << 20
"""Maximum size of an agent's result, as JSON."""
TAIL_BYTES = 4096
"""Number of bytes from the end of an agent's output that are kept."""
WATCH_SECONDS = 0.5
"""Interval between two measurements of the agents' memory."""
MAX_PROCESSES = 256
"""Maximum number of processes that an agent may have at the same time."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _import_sibling(name: str) -> ModuleType:
    """Import a Python file from the folder that contains this file."""
    spec = importlib.util.spec_from_file_location(f"rheostat_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "the file exists"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner: Any = _import_sibling("runner")
sandbox_runner: Any = _import_sibling("sandbox_runner")


def serve_agents(order: Mapping[str, Any], calls: int, answers: int) -> None:
    """Load the agent that `order` describes, then start agents until the pipe `calls` is closed. Messages are written
    to the pipe `answers`.

    With `order["channel"]`, an inherited socket or the path of a Unix socket, a listener on the loopback interface is
    sent through this socket first. Raises ValueError if the agent cannot be used.
    """
    channel = None if order["channel"] is None else _open_channel(order["channel"])
    function = _load(order) if order["target"] else None
    runner.send(answers, [None if channel is None else _send_listener(channel)])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    host = _Host(order, function, calls, answers)
    try:
        host.run()
    finally:
        host.close()


def _load(order: Mapping[str, Any]) -> Callable[..., object]:
    """Import the agent's function, or create an object of its class. Raises InvalidTarget, which is a ValueError, if it
    cannot be called."""
    where, target, options = order["where"], order["target"], order["options"]
    runner.forget(target.partition(":")[0].partition(".")[0])
    found = runner.import_target(target, where)
    if not callable(found):
        what = runner.plain_values.describe_value(found)
        raise runner.InvalidTarget(f"{where} must be a function(problem, base_url, api_key), found {what}")
    if isinstance(found, type):
        runner.check_call(found, where=where, named=options)
        try:
            function: Callable[..., object] = found(**options)
        except ValueError:
            raise
        except Exception as error:  # any error of a user's class means that it cannot be used
            reason = f"{type(error).__name__}: {runner.message_of(error)}"
            raise runner.InvalidTarget(f"{where}: the object could not be created: {reason}") from error
        runner.check_call(function, "problem", "base_url", "api_key", where=where)
        return function
    runner.check_call(found, "problem", "base_url", "api_key", where=where, named=options)
    return functools.partial(found, **options)


def _open_channel(channel: int | str) -> socket.socket:
    """Return a socket of an inherited file, or a socket that is connected to a Unix socket."""
    if isinstance(channel, int):
        return socket.socket(fileno=channel)
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(channel)
    return connected


def _send_listener(channel: socket.socket) -> int:
    """Create a listener on the loopback interface of this sandbox or container, send it through the socket `channel`,
    and return its port."""
    with channel, socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(channel, [b"listener"], [listener.fileno()])
        return int(listener.getsockname()[1])


class _Agent:
    """Running agent of one episode."""

    def __init__(self, episode: str, pid: int, directory: Path, *, output: int, result: int) -> None:
        self.episode, self.pid, self.directory = episode, pid, directory
        self.pipes = {output: bytearray(), result: bytearray()}
        """Bytes that were read from the open pipes of the agent: the end of its output, and its result."""
        self.output, self.result = self.pipes[output], self.pipes[result]
        self.reason = ""
        """Reason why the agent was stopped, or an empty string."""

    def read(self, pipe: int) -> bool:
        """Read what a pipe contains. Returns False at the end of the pipe."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, 1 << 16):
                self.pipes[pipe] += data
                if self.pipes[pipe] is self.output:
                    del self.output[:-TAIL_BYTES]
                elif len(self.result) > MAX_RESULT_BYTES:
                    self.reason = self.reason or f"its result is larger than {MAX_RESULT_BYTES} bytes"
                    del self.result[MAX_RESULT_BYTES:]
                    return True
            return False
        return True

    @property
    def last_line(self) -> str:
        """Last line of the output that is not empty, or an empty string."""
        lines = self.output.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class _Host:
    """Event loop of the process that starts agents. It forks one process for each agent, enforces the limits of agents,
    and reports their results."""

    def __init__(
        self, order: Mapping[str, Any], function: Callable[..., object] | None, calls: int, answers: int
    ) -> None:
        self._order, self._function, self._calls, self._answers = order, function, calls, answers
        self._agents: dict[int, _Agent] = {}
        """Agents by process id."""
        self._own = {pid for pid, (parent, _, _) in _list_processes().items() if parent == os.getpid()}
        """Processes that the import of the agent has started, which all agents use."""
        self._unread = b""
        self._looked = time.monotonic()
        self._wake, wake = os.pipe()
        for pipe in (self._wake, wake, calls):
            os.set_blocking(pipe, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Start, watch and stop agents until the parent process closes its pipe."""
        while self._read_pipes(self._wait()):
            self._collect()
            if self._agents and time.monotonic() - self._looked > WATCH_SECONDS:
                self._looked = time.monotonic()
                self._check_limits()

    def close(self) -> None:
        """End all agents."""
        for agent in [*self._agents.values()]:
            self._kill(agent)

    def _wait(self) -> list[int]:
        """Wait until pipes can be read, for at most `WATCH_SECONDS` while agents run, and return these pipes."""
        polled = select.poll()
        for pipe in (self._calls, self._wake, *(pipe for agent in self._agents.values() for pipe in agent.pipes)):
            polled.register(pipe, select.POLLIN)
        return [pipe for pipe, _ in polled.poll(1000 * WATCH_SECONDS if self._agents else None)]

    def _read_pipes(self, ready: list[int]) -> bool:
        """Read pipes. Returns False if the parent process has closed its pipe."""
        for agent in [*self._agents.values()]:
            for pipe in {*agent.pipes} & {*ready}:
                if not agent.read(pipe):
                    del agent.pipes[pipe]
                    os.close(pipe)
                if agent.reason:
                    self._kill(agent)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 1 << 12)
        return self._calls not in ready or self._read_calls()

    def _read_calls(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._calls, 1 << 16)
            if not data:
                return False
            self._unread += data
        while (whole := self._frame_bytes()) and len(self._unread) >= whole:
            call, self._unread = json.loads(self._unread[runner.LENGTH_BYTES : whole]), self._unread[whole:]
            if "start" in call:
                self._start(call["start"])
            for agent in [each for each in self._agents.values() if each.episode == call.get("stop")]:
                agent.reason = "it was stopped"
                self._kill(agent)
        return True

    def _frame_bytes(self) -> int:
        """Return the size of the first unread message, or 0 if its length is not complete."""
        head = self._unread[: runner.LENGTH_BYTES]
        return runner.LENGTH_BYTES + int.from_bytes(head, "big") if len(head) == runner.LENGTH_BYTES else 0

    # ---- starting
    def _start(self, call: Mapping[str, Any]) -> None:
        """Start the agent of an episode, or report why it cannot be started."""
        try:
            directory = Path(tempfile.mkdtemp(prefix="episode-", dir=self._order["home"]))
            (directory / "problem.json").write_text(json.dumps(call["problem"]), encoding="utf-8")
            (read_output, write_output), (read_result, write_result) = os.pipe(), os.pipe()
            host, pid = os.getpid(), os.fork()
        except OSError as error:
            self._report(call["episode"], None, f"its process could not be started: {error}")
            return
        if pid == 0:
            _run_agent(self._order, self._function, call, directory, host=host, pipes=(write_output, write_result))
        for pipe in (write_output, write_result):
            os.close(pipe)
        for pipe in (read_output, read_result):
            os.set_blocking(pipe, False)
        self._agents[pid] = _Agent(call["episode"], pid, directory, output=read_output, result=read_result)

    # ---- ending
    def _collect(self) -> None:
        """Report the agents that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                agent = self._agents.pop(ended[0], None)
                if agent is not None:
                    self._end(agent, ended[1])

    def _end(self, agent: _Agent, status: int) -> None:
        """End the remaining processes of an agent, report its result, and delete its files."""
        self._kill(agent)
        for _ in range(100):  # the end of a process may make its children children of this process
            if not self._kill_strays(_list_processes()):
                break
            time.sleep(0.01)
        for pipe in [*agent.pipes]:
            agent.read(pipe)
            os.close(pipe)
        result, error = self._find_result(agent, status)
        shutil.rmtree(agent.directory, ignore_errors=True)
        self._report(agent.episode, result, error)

    def _find_result(self, agent: _Agent, status: int) -> tuple[object, str]:
        """Return the result of an agent that has ended, and the reason for its failure or an empty string."""
        if agent.reason:
            return None, agent.reason
        if status != 0:
            line = f": {agent.last_line}" if agent.last_line else ""
            return None, f"{sandbox_runner.describe_end(status)}{line}"
        try:
            if self._function is None:
                return _read_result_file(agent.directory / "result.json"), ""
            answer = json.loads(agent.result)
            return answer["result"], answer["error"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return None, f"its result is not valid JSON: {error}"

    def _report(self, episode: str, result: object, error: str) -> None:
        runner.send(self._answers, {"episode": episode, "result": result, "error": runner.one_line(error)})

    # ---- processes
    def _check_limits(self) -> None:
        """Kill agents that exceed their memory or number of processes."""
        processes = _list_processes()
        for agent in [*self._agents.values()]:
            members = _members(agent.pid, processes)
            held = sum(processes[pid][2] for pid in members)
            if held > self._order["memory_bytes"]:
                agent.reason = f"its processes took more than {self._order['memory_bytes'] >> 20} MiB of memory"
            elif len(members) > MAX_PROCESSES:
                agent.reason = f"it started more than {MAX_PROCESSES} processes"
            if agent.reason:
                self._kill(agent)
        self._kill_strays(processes)

    def _kill_strays(self, processes: Mapping[int, tuple[int, int, int]]) -> bool:
        """Kill processes that have left the session of their agent, and whose parents have ended. Return whether there
        were any."""
        strays = [
            pid
            for pid, (parent, session, _) in processes.items()
            if parent == os.getpid() and session not in self._agents and pid not in self._own | self._agents.keys()
        ]
        for pid in strays:
            _signal(pid)
        return bool(strays)

    def _kill(self, agent: _Agent) -> None:
        """Kill all processes of an agent."""
        for _ in range(100):
            members = _members(agent.pid, _list_processes())
            if not members:
                return
            for pid in members:
                _signal(pid)
            time.sleep(0.01)


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _list_processes() -> dict[int, tuple[int, int, int]]:
    """Return the parent, the session and the memory in bytes of each running process, by process id. Empty if the
    system does not list processes in /proc."""
    return dict(_read_processes()) if os.path.isdir("/proc/self") else {}  # noqa: PTH112 -- called often


def _read_processes() -> Iterator[tuple[int, tuple[int, int, int]]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 -- called often
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 -- called often
                    state, *fields = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    yield int(name), (int(fields[0]), int(fields[2]), int(fields[20]) * _PAGE_BYTES)


def _members(leader: int, processes: Mapping[int, tuple[int, int, int]]) -> set[int]:
    """Return the running processes of an agent: those in the session that `leader` began, and all their
    descendants."""
    members = {pid for pid, (_, session, _) in processes.items() if session == leader}
    while more := {pid for pid, (parent, _, _) in processes.items() if parent in members} - members:
        members |= more
    return members


def _read_result_file(path: Path) -> object:
    """Read the result that a program has written, or return None if there is none. Raises ValueError for anything other
    than a small regular file with JSON."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        content = os.read(descriptor, MAX_RESULT_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_RESULT_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_RESULT_BYTES} bytes")
    result: object = json.loads(content)
    return result


# ---- in the process of an agent
def _run_agent(
    order: Mapping[str, Any],
    function: Callable[..., object] | None,
    call: Mapping[str, Any],
    directory: Path,
    *,
    host: int,
    pipes: tuple[int, int],
) -> NoReturn:
    """Run the agent of an episode in the forked process, and end the process. `pipes` are the write ends of the pipes
    for its output and its result."""
    output, result = pipes
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        runner.die_with_parent(host)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        kept = os.dup2(result, 3)
        os.closerange(4, 1 << 16)
        os.chdir(directory)
        os.environ.update(_variables(order, call, directory))
        if function is None:
            os.set_inheritable(kept, False)
            command = order["command"]
            os.execvp(command[0], command)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        answer = _call(function, call)
        runner.write(kept, json.dumps(answer).encode())
        sys.stdout.flush()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def _variables(order: Mapping[str, Any], call: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Return the environment variables of an agent, in addition to those of its host."""
    return {
        **order["variables"],
        "OPENAI_BASE_URL": call["url"],
        "OPENAI_API_KEY": call["key"],
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # otherwise that library sends the episode to OpenAI
        "RHEOSTAT_PROBLEM": str(directory / "problem.json"),
        "RHEOSTAT_RESULT": str(directory / "result.json"),
        "RHEOSTAT_SEED": str(call["seed"]),
    }


def _call(function: Callable[..., object], call: Mapping[str, Any]) -> dict[str, object]:
    """Call the agent's function, and return its result, or its error as text."""
    try:
        result = function(call["problem"], call["url"], call["key"])
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        plain = runner.plain_values.to_json_value(result)
        json.dumps(plain)  # the error names what cannot be encoded
        return {"result": plain, "error": ""}
    except BaseException as error:  # any error of the agent ends its episode alone
        return {"result": None, "error": f"{type(error).__name__}: {runner.message_of(error)}"}
