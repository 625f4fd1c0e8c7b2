"""Helpers for plain ASGI: read a body, reply with JSON, and stream lines until the end or a disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping

from rheostat_requests import Refused

Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = [(b"content-type", b"application/json")]
LINES = [(b"content-type", b"application/x-ndjson")]


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of an HTTP request. Raises ConnectionResetError if the caller disconnects before the body
    is complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client disconnected before its request was complete")
        parts.append(message.get("body", b""))  # type: ignore[arg-type]
        if not message.get("more_body"):
            return b"".join(parts)


async def reply(send: Send, status: int, answer: Mapping[str, object]) -> None:
    """Send an HTTP response whose body is one JSON object."""
    await send({"type": "http.response.start", "status": status, "headers": JSON})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def refuse_stranger(kind: object, send: Send) -> None:
    """Refuse a request without the API key: with status 401, or by closing a websocket. `kind` is the ASGI connection
    type."""
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await reply(
            send,
            401,
            {"error": "the request needs the header 'Authorization: Bearer KEY' with the API key of this server"},
        )


async def answer_errors(answer: Callable[[Send], Awaitable[None]], send: Send) -> None:
    """Run `answer` and report its errors to the caller over HTTP. An error of class Refused becomes a response with its
    own status. Any other error is sent as one line, with status 500 or at the end of a response that has started, and
    then raised again."""
    started = False

    async def send_and_note(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await answer(send_and_note)
    except Refused as refused:
        await reply(send, refused.status, refused.answer)
    except ConnectionResetError:
        return  # the caller has disconnected
    except Exception as error:
        answered = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        if started:
            await send({"type": "http.response.body", "body": json.dumps(answered).encode() + b"\n"})
        else:
            await reply(send, 500, answered)
        raise  # vLLM's server writes the traceback to its log


async def stream(chunks: AsyncGenerator[bytes], receive: Receive, *, send: Send) -> None:
    """Send chunks as they arrive, and close their generator if the caller disconnects. The first chunk is awaited
    before the status is sent, so that an early error still gets its own status."""
    first = await anext(chunks)
    sending = asyncio.ensure_future(_send_all(first, chunks, send=send))
    leaving = asyncio.ensure_future(_wait_for_end(receive))
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
    finally:
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        await chunks.aclose()


async def _send_all(first: bytes, chunks: AsyncGenerator[bytes], *, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": LINES})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    async for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
