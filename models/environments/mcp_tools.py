"""Environment that gives the policy the tools of an MCP server. This module runs in a separate environment process.

Errors that a tool reports are shown to the policy. Errors of the server itself, such as a crash or an invalid response,
are raised and fail the episode. The next call then starts the server, or connects to it, again. If the server hangs, it
is ended together with this process. This module imports no other code of Rheostat's models.
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

from rheostat.infra.untrusted_text import redact

MAX_ERROR_CHARACTERS = 1 << 14
"""Maximum length, in characters, of a server's error message. The rest of the message is dropped."""
MIN_SECRET_CHARACTERS = 6
"""Minimum length, in characters, of variable values that are treated as secrets and redacted in messages."""
MAX_PAGES = 100
"""Maximum number of pages of a server's tool list. A server that returns more pages is treated as failed."""


class ServerFailed(Exception):
    """Raised when an MCP server crashes, sends an invalid response, or never ends its list of tools."""


class ToolServer:
    """Connection to an MCP server. A separate thread keeps the connection open."""

    def __init__(self, command: Sequence[str], url: str, variables: Mapping[str, str], seconds: float) -> None:
        """Start the server with `command`, or connect to `url`.

        `variables` maps the names of the server's environment variables, or of HTTP headers, to the names of this
        process's environment variables that contain the values. `seconds` is the timeout of each request.
        """
        environment = {name: os.environ[variable] for name, variable in variables.items()}
        self._stack = ExitStack()
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            if command:
                server: Any = StdioServerParameters(command=command[0], args=[*command[1:]], env=environment)
            else:
                http = httpx2.AsyncClient(headers=environment, timeout=seconds, trust_env=False)
                self._stack.enter_context(self._portal.wrap_async_context_manager(http))
                server = streamable_http_client(url, http_client=http)
            client = Client(server, read_timeout_seconds=seconds, cache=None)
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(client))
            self.tools = {tool.name: tool for tool in self._list_tools()}
        except BaseException:
            self.disconnect()
            raise

    def _list_tools(self) -> list[Tool]:
        """List all tools of the server. Raises ServerFailed if the list has more than `MAX_PAGES` pages."""
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = self._portal.call(self._request_page, cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ServerFailed(
            f"the list of tools that the MCP server returns has more than {MAX_PAGES} pages. Select tools with "
            "rollout.environment.tools, or use a server with fewer tools"
        )

    async def _request_page(self, cursor: str | None) -> Any:  # noqa: ANN401 -- a type of mcp
        """Request one page of the server's tool list: the page at `cursor`, or the first page if it is None."""
        return await self._client.list_tools(cursor=cursor)

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool of the server and return its result. Raises MCPError if the server reports an error."""
        return self._portal.call(self._client.call_tool, name, dict(arguments))

    def disconnect(self) -> None:
        """Request that the connection is closed and the server process, if one was started, is ended. Does not wait for
        either."""
        threading.Thread(target=self._stack.close, daemon=True).start()


class McpTools:
    """Environment that answers tool calls through one MCP server, which all episodes of this process share."""

    _server: ClassVar[ToolServer | None] = None

    def __init__(self, server: Mapping[str, Any], only: Sequence[str]) -> None:
        self._given, self._only = server, only

    @classmethod
    def tools(cls, server: Mapping[str, Any], only: Sequence[str]) -> list[dict[str, Any]]:
        """Return the schemas of the server's tools in the format of chat templates. `only` are the names of the tools
        to include.

        Raises ValueError if the server cannot be reached or does not have a tool named in `only`.
        """
        try:
            offered = cls(server, only)._ensure_connected().tools
        except Exception as error:
            named = " ".join(server["command"]) or server["url"]
            message = _remove_secrets(_describe_error(error), server)
            raise ValueError(f"rollout.environment: the MCP server {named!r} failed: {message}") from None
        for name in only:
            if name not in offered:
                near = difflib.get_close_matches(name, offered, n=1)
                hint = f", did you mean {near[0]!r}?" if near else f". Its tools are {', '.join(offered)}."
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

    def step(self, turn: Any) -> dict[str, Any] | None:  # noqa: ANN401 -- a turn of infra/episode_runner.py
        """Answer the tool calls of a turn, in order. Returns None, which ends the episode, for a turn without a call.

        Raises ServerFailed if the server fails.
        """
        if not turn.calls:
            return None
        return {
            "messages": [
                {
                    "role": "tool",
                    "name": call.name,
                    "content": f"Error: {call.error}" if call.error else self._answer_call(call),
                }
                for call in turn.calls
            ]
        }

    def _answer_call(self, call: Any) -> str:  # noqa: ANN401
        """Call a tool and return its result as the text that the policy reads. Raises ServerFailed if the server
        fails."""
        try:
            server = self._ensure_connected()
            tool_names = [name for name in server.tools if not self._only or name in self._only]
            if call.name not in tool_names:
                return f"Error: no tool {call.name!r}; the tools are {', '.join(tool_names)}"
            return _format_result(server.call(call.name, call.arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return f"Error: {_remove_secrets(error.message, self._given)}"
            self._leave()
            raise ServerFailed(_remove_secrets(error.message, self._given)) from None
        except Exception as error:
            self._leave()
            raise ServerFailed(_remove_secrets(_describe_error(error), self._given)) from None

    def _ensure_connected(self) -> ToolServer:
        """Return the shared connection to the server, and open the connection if necessary."""
        if McpTools._server is None:
            McpTools._server = ToolServer(**self._given)
        return McpTools._server

    def _leave(self) -> None:
        """Close the shared connection, so that the next tool call opens a new one."""
        server, McpTools._server = McpTools._server, None
        if server is not None:
            server.disconnect()


def _format_result(result: CallToolResult) -> str:
    """Return the result of a tool call as the text that the policy reads: its texts, with `[type]` for content of other
    types.

    A result without such content is returned as the JSON of its structured content.
    """
    parts = [each.text if isinstance(each, TextContent) else f"[{each.type}]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return f"Error: {text}" if result.is_error else text


def _remove_secrets(message: str, server: Mapping[str, Any]) -> str:
    """Return a server's message, shortened, in which the values of the server's secret variables are redacted."""
    values = [os.environ.get(variable, "") for variable in server["variables"].values()]
    words = {*values, *(word for value in values for word in value.split())}
    secrets = (word for word in words if len(word) >= MIN_SECRET_CHARACTERS)
    # The rest is cut off last, because a secret that a cut divides would not be found.
    return redact(message[: 2 * MAX_ERROR_CHARACTERS], *secrets)[:MAX_ERROR_CHARACTERS]


def _describe_error(error: BaseException) -> str:
    """Return a description of an exception. For an exception group, the description is that of its first inner
    exception."""
    while isinstance(getattr(error, "exceptions", None), tuple):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}"
