"""Guards of HTTP servers on this machine: requests of other web pages, and bodies that are too large or too slow."""

import asyncio
from collections.abc import Sequence
from typing import Final, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
MAX_WAITING: Final = 512
"""Maximum number of connections that wait for a request."""


def restrict_hosts(app: ASGIApp, origins: Sequence[str], *, remedy: str = "") -> ASGIApp:
    """Wrap an app so that it responds only to requests whose Host header names this machine or the host of one of the
    `origins`. Requests from web pages of other origins get status 403, and a message that ends with `remedy`."""

    async def same_origin(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(raw=scope.get("headers", []))
        origin = headers.get("origin")
        if origin is None or {origin, "*"} & {*origins} or origin.partition("://")[2] == headers.get("host"):
            await app(scope, receive, send)
        else:
            refusal = f"Origin {origin} is not allowed. {remedy}".strip()
            await PlainTextResponse(refusal, status_code=403)(scope, receive, send)

    names = [name for origin in origins if (name := urlsplit(origin).hostname)]
    return TrustedHostMiddleware(same_origin, allowed_hosts=[*LOOPBACK, *names], www_redirect=False)


class LimitedConnection(H11Protocol):
    """HTTP connection of uvicorn. If more than `MAX_WAITING` connections wait for a request, the one that has waited
    longest is closed. Programs can therefore not use up the file descriptors of this process by connections on which
    they send nothing, or headers that never end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection."""
        super().connection_made(transport)
        self._limit_waiting()

    def data_received(self, data: bytes) -> None:
        """Handle the requests in received bytes."""
        super().data_received(data)
        self._limit_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request, or handle it if it is there."""
        super().on_response_complete()
        self._limit_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._waiting.pop(self, None)

    @property
    def _waiting(self) -> "dict[LimitedConnection, None]":
        """Connections of this server that wait for a request, in the order in which they began to wait."""
        waiting: dict[LimitedConnection, None] = self.app_state.setdefault("waiting", {})
        return waiting

    def _limit_waiting(self) -> None:
        """Note whether this connection waits, and close the one that has waited longest if there are too many."""
        waiting, cycle = self._waiting, cast(RequestResponseCycle | None, self.cycle)
        if cycle is None or cycle.response_complete:
            waiting.setdefault(self)
        else:
            waiting.pop(self, None)
        if len(waiting) > MAX_WAITING:
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.transport.abort()


class BodyRefused(Exception):
    """Raised when the body of a request is too large, arrives too slowly, or ends early because the client has closed
    the connection."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer: 413 for a large body, 408 for a slow one, 400 for one that ends early."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, seconds: float, total_seconds: float) -> bytes:
    """Read the body of a request. Raises BodyRefused if it has more than `max_bytes` bytes, if no byte arrives within
    `seconds`, or if it has not arrived after `total_seconds`.

    A body whose Content-Length is too large is refused before it is read.
    """
    length = Headers(raw=scope["headers"]).get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(total_seconds):
            while True:
                message: Message = await asyncio.wait_for(receive(), seconds)
                if message["type"] != "http.request":
                    raise BodyRefused("the connection was closed before the end of the body", status=400)
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        limit = f"{seconds:g} s without a byte, or {total_seconds:g} s in all"
        raise BodyRefused(f"the body arrived too slowly. It may take {limit}", status=408) from None


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(f"the body may have at most {max_bytes} bytes", status=413)
