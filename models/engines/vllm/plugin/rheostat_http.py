"""Helpers for ASGI: reply with JSON, report errors, and stream lines until the end or a disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping

from rheostat_requests import Refused
from starlette.requests import ClientDisconnect

Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = [(b"content-type", b"application/json")]
LINES = [(b"content-type", b"application/x-ndjson")]


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
    """Run `answer` and report its errors to the caller over HTTP. The response contains one line, with the
    status of a Refused or else 500. If the response has started, the line is appended to it. Errors of other classes
    than Refused are then raised again."""
    started = False

    async def send_and_note(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    async def send_error(answered: Mapping[str, object], status: int) -> None:
        if started:
            await send({"type": "http.response.body", "body": json.dumps(answered).encode() + b"\n"})
        else:
            await reply(send, status, answered)

    try:
        await answer(send_and_note)
    except Refused as refused:
        await send_error(refused.answer, refused.status)
    except ClientDisconnect:
        return
    except Exception as error:
        await send_error({"error": " ".join(f"{type(error).__name__}: {error}".split())}, 500)
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
