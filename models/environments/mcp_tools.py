"""Tools of an MCP server, in the process in which environments run: an environment like a user's, and nothing of ours.

An error that a tool tells is for the policy to read. What the server itself does wrong (it dies, it answers what is no
answer) is raised, and fails the episode; the next call starts it, or connects to it, again. One that hangs is ended
with this process.
"""

from __future__ import annotations

import difflib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import httpx2
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS, CallToolResult, TextContent, Tool

from infra.untrusted_text import redact

MAX_MESSAGE = 1 << 14
"""Characters of a server's error that are kept."""
MIN_SECRET = 6
"""Characters of a variable's value below which it is taken for a setting and no secret."""
MOST_PAGES = 100
"""Of a list of tools; a server that goes on telling is none."""


class ServerFailed(Exception):
    """The server did what no server does."""


class ToolServer:
    """A connection to a server, kept by a thread of its own."""

    def __init__(self, command: Sequence[str], url: str, variables: Mapping[str, str], seconds: float) -> None:
        """Start the server, or connect to it: `variables` name those of its environment, or the headers' by header.

        Nothing is waited for longer than so many seconds.
        """
        told = {name: os.environ[variable] for name, variable in variables.items()}
        self._stack = ExitStack()
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            if command:
                server: Any = StdioServerParameters(command=command[0], args=[*command[1:]], env=told)
            else:
                http = httpx2.AsyncClient(headers=told, timeout=seconds, trust_env=False)
                self._stack.enter_context(self._portal.wrap_async_context_manager(http))
                server = streamable_http_client(url, http_client=http)
            client = Client(server, read_timeout_seconds=seconds, cache=None)
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(client))
            self.tools = {tool.name: tool for tool in self._listed()}
        except BaseException:
            self.leave()
            raise

    def _listed(self) -> list[Tool]:
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = self._portal.call(self._page, cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ServerFailed(f"its list of tools has more than {MOST_PAGES} pages")

    async def _page(self, cursor: str | None) -> Any:  # noqa: ANN401 -- mcp's
        return await self._client.list_tools(cursor=cursor)

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool. Raises MCPError."""
        return self._portal.call(self._client.call_tool, name, dict(arguments))

    def leave(self) -> None:
        """End the connection, and a server that was started for it; nobody waits for one that does not end."""
        threading.Thread(target=self._stack.close, daemon=True).start()


class McpTools:
    """Answers the calls of a turn by the tools of a server, which all episodes of this process share."""

    _server: ClassVar[ToolServer | None] = None

    def __init__(self, server: Mapping[str, Any], only: Sequence[str]) -> None:
        self._given, self._only = server, only

    @classmethod
    def tools(cls, server: Mapping[str, Any], only: Sequence[str]) -> list[dict[str, Any]]:
        """Describe the tools as chat templates show them. Raises ValueError where there is no such server or tool."""
        try:
            offered = cls(server, only)._connected().tools
        except Exception as error:
            named = " ".join(server["command"]) or server["url"]
            message = _without_secrets(_told(error), server)
            raise ValueError(f"rollout.environment: the MCP server {named!r}: {message}") from None
        for name in only:
            if name not in offered:
                near = difflib.get_close_matches(name, offered, n=1)
                hint = f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(offered)}"
                raise ValueError(f"rollout.environment.tools: the MCP server has no tool {name!r}{hint}")
        chosen = [tool for name, tool in offered.items() if not only or name in only]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in chosen
        ]

    def step(self, turn: Any) -> dict[str, Any] | None:  # noqa: ANN401 -- of infra/episode_runner.py
        """Answer the calls of a turn, in order; a turn without one is the last. Raises what the server does wrong."""
        if not turn.calls:
            return None
        return {
            "messages": [
                {
                    "role": "tool",
                    "name": call.name,
                    "content": f"Error: {call.error}" if call.error else self._answer(call),
                }
                for call in turn.calls
            ]
        }

    def _answer(self, call: Any) -> str:  # noqa: ANN401
        try:
            server = self._connected()
            known = [name for name in server.tools if not self._only or name in self._only]
            if call.name not in known:
                return f"Error: no tool {call.name!r}; the tools are {', '.join(known)}"
            return _observation(server.call(call.name, call.arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return f"Error: {_without_secrets(error.message, self._given)}"
            self._leave()
            raise ServerFailed(_without_secrets(error.message, self._given)) from None
        except Exception as error:
            self._leave()
            raise ServerFailed(_without_secrets(_told(error), self._given)) from None

    def _connected(self) -> ToolServer:
        if McpTools._server is None:
            McpTools._server = ToolServer(**self._given)
        return McpTools._server

    def _leave(self) -> None:
        server, McpTools._server = McpTools._server, None
        if server is not None:
            server.leave()


def _observation(result: CallToolResult) -> str:
    """Say what the policy reads: texts, and the kinds of what is no text; else what is structured."""
    parts = [each.text if isinstance(each, TextContent) else f"[{each.type}]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    said = "\n".join(parts)
    return f"Error: {said}" if result.is_error else said


def _without_secrets(message: str, server: Mapping[str, Any]) -> str:
    """Return a message of the server without the values of the variables that it is given."""
    values = [os.environ.get(variable, "") for variable in server["variables"].values()]
    words = {*values, *(word for value in values for word in value.split())}
    return redact(message[:MAX_MESSAGE], *(word for word in words if len(word) >= MIN_SECRET))


def _told(error: BaseException) -> str:
    """Say what went wrong inside of a group of tasks."""
    while isinstance(getattr(error, "exceptions", None), tuple):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}"
