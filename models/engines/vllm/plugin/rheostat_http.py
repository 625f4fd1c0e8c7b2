"""Plain ASGI: read a body, answer JSON, stream lines until they end or the caller is gone."""

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
    """Collect the parts of a request's body."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the caller left before its request was complete")
        parts.append(message.get("body", b""))  # type: ignore[arg-type]
        if not message.get("more_body"):
            return b"".join(parts)


async def reply(send: Send, status: int, answer: Mapping[str, object]) -> None:
    """Answer with one JSON object."""
    await send({"type": "http.response.start", "status": status, "headers": JSON})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def refuse_stranger(kind: object, send: Send) -> None:
    """Answer who does not know the key: 401, or a closed socket."""
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await reply(send, 401, {"error": "expected the header 'Authorization: Bearer KEY' with this server's key"})


async def answer_errors(answer: Callable[[Send], Awaitable[None]], send: Send) -> None:
    """Turn what was refused into its status, and any other failure into one line: with status 500, or at the end."""
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
        return  # nobody is there to be answered
    except Exception as error:
        answered = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        if started:
            await send({"type": "http.response.body", "body": json.dumps(answered).encode() + b"\n"})
        else:
            await reply(send, 500, answered)
        raise  # vLLM's server writes the traceback to its log


async def stream(chunks: AsyncGenerator[bytes], receive: Receive, *, send: Send) -> None:
    """Send chunks as they come; a caller that leaves ends their generator. The first comes before the status."""
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
