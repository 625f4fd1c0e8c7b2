"""Door of a rollout worker: an HTTP server on the loopback interface through which programs use the policy.

Each episode has its own key, with which a program sees nothing of other episodes. The routes are those of OpenAI
(`/v1/chat/completions`, `/v1/completions`, `/v1/models`) and vLLM (`/inference/v1/generate`). Answers arrive in one
piece. While a turn is sampled, event streams contain comments, so that no client ends the connection. This module does
not import torch.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, Final

import uvicorn
from blake3 import blake3
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.http_guard import BodyRefused, read_body, restrict_hosts
from rheostat.models.agents.replies import WAIT_EVENT, DoorReply, encode_events
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode
from rheostat.models.agents.wire import ChatRequest, RefusedRequest, TextRequest, TokenRequest, read_request

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 8 << 20
BODY_SECONDS, BODY_TOTAL_SECONDS = 10.0, 60.0
"""Time limits of a body: seconds without a byte, and seconds in all."""
MAX_HEADER_BYTES: Final = 16 << 10
WAIT_SECONDS: Final = 15.0
"""Interval between the comments of an event stream while a turn is sampled."""
START_SECONDS, END_SECONDS = 10.0, 10.0
"""Time limits for the start and the end of the server."""
_CHAT_REMEDY: Final = (
    "Use /v1/chat/completions. With openai-agents, call set_default_openai_api('chat_completions'). With other "
    "programs, choose the chat completions API"
)
_REMEDIES: Final = {"/v1/responses": _CHAT_REMEDY, "/v1/messages": _CHAT_REMEDY}
"""Hints for paths of other APIs, which the door does not serve."""


@dataclass(slots=True, eq=False)
class _Answer:
    """Answer to a request. A repeated request may wait for it or receive it again. Used only in the server's thread."""

    result: asyncio.Future[DoorReply]
    num_waiting: int = 0
    """Number of connections that wait for the answer."""
    is_abandoned: bool = False
    """Whether every connection was closed before the answer was sent."""

    def settle(self, done: "Future[DoorReply]") -> None:
        """Set the result or the error of the finished work. Errors other than RefusedRequest are logged, and the client
        receives status 500."""
        error = done.exception(timeout=0)
        if error is not None and not isinstance(error, RefusedRequest):
            logger.error("A turn of an agent could not be sampled", exc_info=error)
            error = RefusedRequest("the turn could not be sampled", status=500, code="engine_failed")
        if error is not None:
            self.refuse(error)
        elif not self.result.done():
            self.result.set_result(done.result(timeout=0))

    def refuse(self, refusal: RefusedRequest) -> None:
        """End the wait for an unfinished answer with an error."""
        if not self.result.done():
            self.result.set_exception(refusal)

    @property
    def has_failed(self) -> bool:
        """Whether the request was answered with an error."""
        return self.result.done() and self.result.exception() is not None


@dataclass(slots=True, eq=False)
class _Guest:
    """Episode that the door has admitted, with its key and its answers. The answers are used only in the server's
    thread."""

    episode: OpenEpisode
    key: str
    num_open: int = 0
    """Number of open connections with this key."""
    is_dismissed: bool = False
    answers: dict[str, list[_Answer]] = field(default_factory=dict)
    """Answers in the order of their requests, by a digest of path and body."""

    def end(self) -> None:
        """End all unfinished answers with status 409."""
        for answer in [each for equal in self.answers.values() for each in equal]:
            answer.refuse(_ended())


class Door:
    """HTTP server for the programs of episodes, in a separate thread. The server accepts requests from its construction
    until it is closed."""

    def __init__(self, routes: AgentRoutes, *, port: int = 0, max_open: int = 256) -> None:
        """Start the server on a port of the loopback interface (0: any free port). `max_open` is the number of requests
        that are answered at the same time. Raises BadInput if the port is in use, and WorkerFailed if the server does
        not start."""
        self._routes = routes
        self._guests: dict[str, _Guest] = {}
        self._threads = ThreadPoolExecutor(max_open, thread_name_prefix="door")
        try:
            listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise BadInput(f"port {port} cannot be used: {error.strerror}. Choose another port") from error
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(_configure_server(restrict_hosts(self._answer, ())))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, args=(listener,), name="door", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise WorkerFailed(f"the door of the worker did not start within {START_SECONDS:g} s")
            time.sleep(0.005)

    @property
    def url(self) -> str:
        """Base URL of the server for OpenAI clients, such as `http://127.0.0.1:8000/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def admit(self, episode: OpenEpisode, *, key: str | None = None) -> str:
        """Accept requests of an episode from now on, and return its key of 256 random bits.

        A known `key` can be passed instead. If it belongs to another episode, new requests use this episode, and open
        requests are still answered.
        """
        key = key or secrets.token_urlsafe(32)
        self._guests[_digest(key.encode())] = _Guest(episode, key)
        return key

    def dismiss(self, key: str) -> None:
        """Accept no more requests with a key. Its open requests end with status 409."""
        guest = self._guests.pop(_digest(key.encode()), None)
        if guest is not None:
            guest.is_dismissed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(guest.end)

    def close(self) -> None:
        """End all open requests and stop the server."""
        for guest in [*self._guests.values()]:
            self.dismiss(guest.key)
        self._server.should_exit = True
        self._thread.join(timeout=END_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, listener: socket.socket) -> None:
        """Serve until `close` is called. This is the main function of the server's thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[listener]))
        finally:
            self._loop.close()

    # ---- requests
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        try:
            await self._handle(scope, receive, send)
        except RefusedRequest as refused:
            headers = {"retry-after": "1"} if refused.status == 429 else {}
            await JSONResponse(refused.body(), refused.status, headers)(scope, receive, send)
        except BodyRefused as refused:
            body = RefusedRequest(str(refused), status=refused.status).body()
            await JSONResponse(body, refused.status, {"connection": "close"})(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(raw=scope["headers"])
        guest, (method, path) = self._find_guest(headers), (scope["method"], scope["path"])
        if (method, path) == ("GET", "/v1/models"):
            await JSONResponse(self._routes.list_models(guest.episode))(scope, receive, send)
            return
        if method != "POST" or path not in _ROUTES:
            remedy = _REMEDIES.get(path, f"The routes are POST {', '.join(_ROUTES)}, and GET /v1/models")
            raise RefusedRequest(f"{method} {path:.80} is not served. {remedy}", status=404, code="not_found")
        if guest.num_open >= guest.episode.limits.concurrent:
            raise RefusedRequest(
                f"the episode may have {guest.episode.limits.concurrent} open requests. Repeat this one later",
                status=429,
                code="rate_limit_exceeded",
            )
        guest.num_open += 1
        try:
            body = await read_body(
                scope, receive, max_bytes=MAX_BODY_BYTES, seconds=BODY_SECONDS, total_seconds=BODY_TOTAL_SECONDS
            )
            answer, streams = self._find_answer(guest, path, body, headers)
            await _deliver(answer, receive, send, streams=streams)
        finally:
            guest.num_open -= 1

    def _find_guest(self, headers: Mapping[str, str]) -> _Guest:
        """Return the episode to which the key of a request belongs. Raises RefusedRequest with status 401 if there is
        none."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        guest = self._guests.get(_digest(key.strip().encode()))
        if (
            scheme.lower() != "bearer"
            or guest is None
            or not hmac.compare_digest(guest.key.encode(), key.strip().encode())
        ):
            raise RefusedRequest(
                "the header 'Authorization: Bearer KEY' must contain the key of an open episode",
                status=401,
                code="invalid_api_key",
            )
        return guest

    def _find_answer(self, guest: _Guest, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[_Answer, bool]:
        """Return the answer to a request, and whether it is sent as an event stream. The answer is that of an equal
        earlier request if this request repeats it."""
        if guest.is_dismissed:
            raise _ended()
        kind, answer_request = _ROUTES[path]
        request = read_request(body, kind)
        digest = _digest(b"\0".join([path.encode(), headers.get("idempotency-key", "").encode(), body]))
        equal = guest.answers.setdefault(digest, [])
        is_marked = "idempotency-key" in headers or headers.get("x-stainless-retry-count", "0").strip() != "0"
        usable = [each for each in equal if not each.has_failed]
        abandoned = [each for each in usable if each.is_abandoned]
        if repeated := abandoned[:1] or (usable[-1:] if is_marked else []):
            repeated[0].is_abandoned = False
            return repeated[0], bool(request.stream)
        answer = _Answer(self._loop.create_future())
        answer.result.add_done_callback(lambda result: result.cancelled() or result.exception())  # marks it as read
        equal.append(answer)
        work = self._threads.submit(self._work, guest, partial(answer_request, self._routes, guest.episode, request))
        work.add_done_callback(partial(self._pass_on, answer))
        return answer, bool(request.stream)

    def _work(self, guest: _Guest, answer: Callable[[], DoorReply]) -> DoorReply:
        """Sample the answer to a request in a thread, unless the episode has ended before the thread was free."""
        if guest.is_dismissed:
            raise _ended()
        return answer()

    def _pass_on(self, answer: _Answer, done: "Future[DoorReply]") -> None:
        """Set the result of finished work in the server's thread. Do nothing if the server has ended."""
        if not done.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(answer.settle, done)


def _configure_server(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of the HTTP server."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",  # a warning for every malformed request would fill the log
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=2,
    )


async def _deliver(answer: _Answer, receive: Receive, send: Send, *, streams: bool) -> None:
    """Send an answer when it is ready. Mark it as abandoned if the client closes the connection before. Raises
    RefusedRequest if the request was refused and nothing was sent yet."""
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    answer.num_waiting += 1
    has_started = False
    try:
        while not answer.result.done() and not gone.done():
            waiting: set[asyncio.Future[Any]] = {answer.result, gone}
            await asyncio.wait(waiting, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if streams and not answer.result.done() and not gone.done():
                await _send_event(send, WAIT_EVENT, starts=not has_started)
                has_started = True
        if gone.done():
            answer.is_abandoned = answer.num_waiting == 1
        elif streams:
            await _send_stream(answer, send, has_started=has_started)
        else:
            await JSONResponse(answer.result.result().body)({"type": "http"}, receive, send)
    finally:
        answer.num_waiting -= 1
        gone.cancel()


async def _send_stream(answer: _Answer, send: Send, *, has_started: bool) -> None:
    """Send the rest of an event stream. An error is an event if the stream has started."""
    try:
        events = encode_events(answer.result.result().events)
    except RefusedRequest as refused:
        if not has_started:
            raise
        events = encode_events([refused.body()])
    await _send_event(send, events, starts=not has_started)
    await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, event: bytes, *, starts: bool) -> None:
    """Send a part of an event stream, after the status if the part `starts` the stream."""
    if starts:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _ended() -> RefusedRequest:
    """Return the error of a request whose episode has ended."""
    return RefusedRequest("the episode has ended", status=409, code="episode_ended")


def _digest(value: bytes) -> str:
    return blake3(value).hexdigest()


# The functions take the routes, the episode and a request of the class next to them.
_ROUTES: Final[Mapping[str, tuple[type[Any], Callable[..., DoorReply]]]] = {
    "/v1/chat/completions": (ChatRequest, AgentRoutes.answer_chat),
    "/v1/completions": (TextRequest, AgentRoutes.answer_texts),
    "/inference/v1/generate": (TokenRequest, AgentRoutes.answer_tokens),
}
