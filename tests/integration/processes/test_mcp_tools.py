"""Tools of real MCP servers, over stdio and HTTP. The policy reads tool errors; a failed server fails the episode."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
from pydantic import ValidationError

from rheostat.infra.errors import BadInput
from rheostat.models.config.environments import McpEnvironment
from rheostat.models.environments.mcp_tools import MAX_ERROR_CHARACTERS, _remove_secrets
from rheostat.models.environments.pool import EnvironmentPool, TurnAnswer
from rheostat.models.environments.runtime import tool_schemas
from rheostat.models.text.calls import Call
from tests.support.environments import episode_with_calls
from tests.support.jobs import kill, wait_for

SERVER = (sys.executable, "-m", "tests.support.mcp_server")


@contextmanager
def bound_socket() -> Iterator[tuple[socket.socket, str]]:
    """Yield a socket that refuses connections until a server listens on it, and the address of such a server."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound, f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"


@contextmanager
def serving(bound: socket.socket) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a server on a socket, which is then closed in this process. The server is killed afterwards."""
    keyless = {name: value for name, value in os.environ.items() if not name.endswith("_KEY")}
    command, descriptor = [*SERVER, str(bound.fileno())], bound.fileno()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=keyless, pass_fds=[descriptor])
    bound.close()
    try:
        yield process
    finally:
        kill(process)


@pytest.fixture(scope="module")
def http() -> Iterator[str]:
    """Address of a server over HTTP."""
    with bound_socket() as (bound, url), serving(bound):

        def answers() -> bool:
            try:
                return httpx.get(url, trust_env=False).status_code > 0
            except httpx.TransportError:
                return False

        assert wait_for(answers)
        yield url


@pytest.fixture(scope="module", params=["stdio", "http"])
def settings(request) -> McpEnvironment:
    more = {"processes": 1, "step_seconds": 20}
    if request.param == "stdio":
        return McpEnvironment(command=SERVER, variables=("SHOP_KEY",), **more)
    url = request.getfixturevalue("http")
    return McpEnvironment(url=url, header_variables={"X-Shop-Key": "SHOP_KEY"}, **more)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "a secret")
    monkeypatch.setenv("OTHER_KEY", "another")


def call_tools(pool: EnvironmentPool, *calls: Call) -> TurnAnswer:
    [found] = pool.answer([episode_with_calls(*calls)], [0])
    pool.end(["0"], [0])
    return found


def read_messages(pool: EnvironmentPool, *calls: Call) -> list[tuple[str, str, str]]:
    found = call_tools(pool, *calls)
    assert found.step is not None, found.failure
    return [(message.role, message.name, message.content) for message in found.step.messages]


@pytest.fixture(scope="module")
def pool(settings) -> Iterator[EnvironmentPool]:
    running = EnvironmentPool(settings)
    yield running
    running.close()


@pytest.mark.thorough_after(1)
def test_calls_are_answered_and_the_policy_reads_errors_of_a_tool(pool):
    calls = Call("price", {"item": "bread"}), Call("price", {"item": "ale", "count": 3})
    assert read_messages(pool, *calls) == [("tool", "price", "5 crowns"), ("tool", "price", "9 crowns")]
    for call, error in (
        (Call("price", {"item": "stone"}), "nobody sells a stone"),
        (Call("price", {"item": 5}), "valid string"),
        (Call("prize", {}), "no tool 'prize'; the tools are price, secret, misbehave"),
    ):
        [(*_, message)] = read_messages(pool, call)
        assert message.startswith("Error: ") and error in message
    assert call_tools(pool).step.done


@pytest.mark.thorough_after(1)
def test_a_server_receives_only_the_named_variables(pool):
    assert read_messages(pool, Call("secret", {})) == [("tool", "secret", "a secret")]


@pytest.mark.thorough_after(1)
def test_only_allowed_tools_of_a_server_are_shown_and_called(settings):
    one = settings.model_copy(update={"tools": ("price",)})
    [schema] = tool_schemas(one)
    assert schema["function"]["name"] == "price"
    assert schema["function"]["description"] == "Look up what items cost."
    assert schema["function"]["parameters"]["required"] == ["item"]
    pool = EnvironmentPool(one)
    try:
        assert read_messages(pool, Call("secret", {}))[0][2] == "Error: no tool 'secret'; the tools are price"
    finally:
        pool.close()
    with pytest.raises(BadInput, match="the MCP server has no tool 'prize', did you mean 'price'"):
        tool_schemas(settings.model_copy(update={"tools": ("prize",)}))


@pytest.mark.system
@pytest.mark.parametrize(
    ("how", "seconds", "reason"),
    [
        ("die", 20, "ServerFailed: Connection closed"),
        ("hang", 10, "the environment did not respond within 10 s"),
        ("garbage", 10, "the environment did not respond within 10 s"),
    ],
)
def test_a_broken_server_fails_its_episode_and_is_restarted(how, seconds, reason):
    pool = EnvironmentPool(McpEnvironment(command=SERVER, processes=1, step_seconds=seconds))
    before = set(psutil.Process().children(recursive=True))
    try:
        assert read_messages(pool, Call("price", {"item": "ale"}))[0][2] == "3 crowns"
        lost = call_tools(pool, Call("misbehave", {"how": how}))
        assert lost.step is None
        assert lost.failure.startswith(reason)
        assert read_messages(pool, Call("price", {"item": "ale"}))[0][2] == "3 crowns"
    finally:
        pool.close()
    assert wait_for(lambda: set(psutil.Process().children(recursive=True)) <= before)


@pytest.mark.system
def test_episodes_fail_while_a_server_on_http_is_down_and_are_answered_when_it_is_up():
    with bound_socket() as (bound, url):
        pool = EnvironmentPool(McpEnvironment(url=url, processes=1, step_seconds=20))
        try:
            lost = call_tools(pool, Call("price", {"item": "ale"}))
            assert lost.failure.startswith("ServerFailed: ConnectError")
            with serving(bound):
                assert wait_for(lambda: call_tools(pool, Call("price", {"item": "ale"})).step is not None)
            assert call_tools(pool, Call("price", {"item": "ale"})).step is None
        finally:
            pool.close()


def test_a_password_in_an_address_is_not_repeated_in_the_message():
    with pytest.raises(ValidationError, match="user name or password") as refused:
        McpEnvironment(url="https://me:secret@tools.example.com/mcp")
    assert "secret@" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize("before", range(MAX_ERROR_CHARACTERS - 12, MAX_ERROR_CHARACTERS + 2))
def test_no_part_of_a_secret_remains_where_a_long_message_is_cut(before, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "k3y-0f-the-sh0p")
    message = _remove_secrets("x" * before + "k3y-0f-the-sh0p" + "y" * 99, {"variables": {"KEY": "SHOP_KEY"}})
    assert len(message) <= MAX_ERROR_CHARACTERS
    assert "k3" not in message


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"command": ("no-such-server",)}, "the MCP server 'no-such-server' failed: FileNotFoundError"),
        ({"command": ("echo", "garbage")}, "the MCP server 'echo garbage' failed: MCPError: Connection closed"),
        ({"command": SERVER, "variables": ("NO_SUCH_KEY",)}, "environment variable 'NO_SUCH_KEY', .* is not set"),
    ],
)
def test_a_server_that_cannot_start_is_refused_in_one_line(more, message: str):
    with pytest.raises(BadInput, match=message) as refused:
        tool_schemas(McpEnvironment(**more))
    assert "\n" not in str(refused.value)


def test_without_the_mcp_package_the_command_that_installs_it_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "mcp" else found(name, *more))
    with pytest.raises(BadInput, match=r"mcp is not installed.*pip install 'mcp>=2.3,<3'"):
        tool_schemas(McpEnvironment(command=SERVER))
