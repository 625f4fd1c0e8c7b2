"""Policy server of a rollout worker (`Door`): an HTTP server on the loopback interface through which programs use the
policy.

Each episode has a separate key, which gives no access to other episodes. The routes are those of OpenAI
(`/v1/chat/completions`, `/v1/completions`, `/v1/models`) and vLLM (`/inference/v1/generate`). A streamed
response contains the whole answer at once. Until the turn is sampled, the stream contains comments, so that no client
closes the connection. This module does not import torch.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, Final

import uvicorn
from blake3 import blake3
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rheostat.infra.errors import BadInput
from rheostat.infra.http_guard import BodyRefused, LimitedConnection, read_body, restrict_hosts
from rheostat.infra.processes.watch import start_apart
from rheostat.models.agents.replies import WAIT_EVENT, DoorReply, encode_events
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode
from rheostat.models.agents.wire import ChatRequest, RefusedRequest, TextRequest, TokenRequest, read_request

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 8 << 20
BODY_SECONDS, BODY_TOTAL_SECONDS = 10.0, 60.0
"""Maximum seconds between two parts of a request's body, and for the whole body."""
MAX_HEADER_BYTES: Final = 16 << 10
MAX_OPEN: Final = 256
"""Maximum number of open requests of an episode. Most of them wait until others are sampled."""
MAX_OPEN_BYTES: Final = 64 << 20
"""Maximum size of the bodies of the open requests of an episode."""
MAX_READING: Final = 4
"""Maximum number of requests of an episode whose bodies are read at the same time."""
WAIT_SECONDS: Final = 15.0
"""Interval between the comments of an event stream while a turn is sampled."""
END_SECONDS: Final = 10.0
"""Maximum seconds to wait until the server has stopped."""
_CHAT_REMEDY: Final = (
    "Use /v1/chat/completions. With openai-agents, call set_default_openai_api('chat_completions'). With other "
    "programs, choose the chat completions API"
)
_REMEDIES: Final = {"/v1/responses": _CHAT_REMEDY, "/v1/messages": _CHAT_REMEDY}
"""Hints for paths of other APIs, which the door does not serve."""


@dataclass(slots=True, eq=False)
class _Guest:
    """Admitted episode, and the state of its HTTP requests. The futures may be used only in the server's thread."""

    episode: OpenEpisode
    num_open: int = 0
    """Number of POST requests with this key that are in progress or wait."""
    num_refused: int = 0
    """Number of requests with this key that were refused."""
    listener: asyncio.Server | None = None
    """Server of the listener that accepts connections from the episode's sandbox, or None."""
    is_dismissed: bool = False
    num_bytes: int = 0
    """Size of the bodies of these requests."""
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_READING))
    """Places for requests whose body is being read."""
    sampling: asyncio.Semaphore = field(init=False)
    """Places for answers that are being sampled."""
    unfinished: set[asyncio.Future[DoorReply]] = field(default_factory=set)
    """Answers that are being sampled or wait for it."""
    abandoned: list[tuple[str, asyncio.Future[DoorReply]]] = field(default_factory=list)
    """Answers whose connection was closed before they were sent, each with the digest of its request. The next equal
    request receives the answer."""

    def __post_init__(self) -> None:
        self.sampling = asyncio.Semaphore(self.episode.limits.concurrent)

    def check_room(self, *, requests: int = 0, num_bytes: int = 0) -> None:
        """Raise RefusedRequest with status 429 if there are too many open requests together with this number of new
        ones, or if their bodies are too large together with `num_bytes` more bytes."""
        if self.num_open + requests > MAX_OPEN or self.num_bytes + num_bytes > MAX_OPEN_BYTES:
            raise RefusedRequest(
                f"the episode may have {MAX_OPEN} open requests, with {MAX_OPEN_BYTES >> 20} MiB together. Send this "
                "request again later",
                status=429,
                code="rate_limit_exceeded",
            )

    async def sample(self, sample: Callable[[], DoorReply]) -> DoorReply:
        """Return the answer that `sample` computes in a separate thread, when fewer answers are being sampled than the
        episode may sample at the same time. Answers whose connection was closed count too. Raises RefusedRequest if the
        request is refused or the episode has ended."""
        async with self.sampling:
            if self.is_dismissed:
                raise _ended()
            return await asyncio.wrap_future(start_apart(partial(_sample, self, sample)))

    def end(self) -> None:
        """End all unfinished answers, whose requests receive status 409, and close the listener of a sandbox."""
        if self.listener is not None:
            self.listener.close()
        for answer in [*self.unfinished]:
            answer.cancel()

    def take_over(self, digest: str) -> asyncio.Future[DoorReply] | None:
        """Remove the first kept answer to a request with this digest and return it, or return None. Failed answers are
        discarded."""
        self.abandoned = [each for each in self.abandoned if not _has_failed(each[1])]
        found = next((each for each in self.abandoned if each[0] == digest), None)
        if found is None:
            return None
        self.abandoned.remove(found)
        return found[1]


class Door:
    """HTTP server for the programs of episodes, in a separate thread. The server accepts requests from its construction
    until it is closed."""

    def __init__(self, routes: AgentRoutes, *, port: int = 0) -> None:
        """Start the server on a port of the loopback interface (0: any free port). Raises BadInput if the port is in
        use."""
        self._routes = routes
        self._guests: dict[str, _Guest] = {}  # by the digest of the key, so that a search takes equal time for all keys
        try:
            listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise BadInput(f"port {port} cannot be used: {error.strerror}. Choose another port") from error
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(_configure_server(restrict_hosts(self._answer, ())))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, args=(listener,), name="door", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL of the server for OpenAI clients, such as `http://127.0.0.1:8000/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def admit(self, episode: OpenEpisode, *, key: str | None = None) -> str:
        """Accept requests of an episode from now on, and return its key of 256 random bits.

        Pass `key` to use an existing key instead. If another episode has this key, new requests go to this episode, and
        requests in progress are still answered.
        """
        key = key or secrets.token_urlsafe(32)
        self._guests[_digest(key.encode())] = _Guest(episode)
        return key

    def listen(self, listener: socket.socket, key: str) -> None:
        """Also accept connections from a listener, such as one inside a sandbox, until the episode with this key is
        dismissed. The door then closes the listener."""
        guest = self._guests.get(_digest(key.encode()))
        if guest is None:
            listener.close()
            return
        serving = asyncio.run_coroutine_threadsafe(self._accept_from(listener), self._loop)
        guest.listener = serving.result(timeout=END_SECONDS)

    async def _accept_from(self, listener: socket.socket) -> asyncio.Server:
        config, state = self._server.config, self._server.server_state
        protocol = partial(LimitedConnection, config=config, server_state=state, app_state={})
        return await self._loop.create_server(protocol, sock=listener)

    def count_requests(self, key: str) -> tuple[int, int]:
        """Return the number of answers that are being sampled for a key, and the number of its refused requests."""
        guest = self._guests.get(_digest(key.encode()))
        return (0, 0) if guest is None else (len(guest.unfinished), guest.num_refused)

    def dismiss(self, key: str) -> None:
        """Accept no more requests with a key. Its open requests end with status 409."""
        self._end(_digest(key.encode()))

    def close(self) -> None:
        """End all open requests and stop the server."""
        for digest in [*self._guests]:
            self._end(digest)
        self._server.should_exit = True
        self._thread.join(timeout=END_SECONDS)

    def _end(self, digest: str) -> None:
        guest = self._guests.pop(digest, None)
        if guest is not None:
            guest.is_dismissed = True
            guest.episode.abandoned.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(guest.end)

    def _run(self, listener: socket.socket) -> None:
        """Serve until `close` is called. This is the main function of the server's thread."""
        asyncio.set_event_loop(self._loop)
        with listener, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._server.serve(sockets=[listener]))

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
        guest = self._find_guest(headers)
        try:
            await self._serve(guest, headers, scope, receive, send)
        except (RefusedRequest, BodyRefused):
            guest.num_refused += 1
            raise

    async def _serve(self, guest: _Guest, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with a valid key."""
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/v1/models"):
            await JSONResponse(self._routes.list_models(guest.episode))(scope, receive, send)
            return
        if method != "POST" or path not in _ROUTES:
            remedy = _REMEDIES.get(path, f"The routes are POST {', '.join(_ROUTES)}, and GET /v1/models")
            raise RefusedRequest(f"{method} {path:.80} is not served. {remedy}", status=404, code="not_found")
        kind, answer_request = _ROUTES[path]
        guest.check_room(requests=1)
        guest.num_open += 1
        size = 0
        try:
            async with guest.reading:
                body = await read_body(
                    scope, receive, max_bytes=MAX_BODY_BYTES, seconds=BODY_SECONDS, total_seconds=BODY_TOTAL_SECONDS
                )
            guest.check_room(num_bytes=len(body))
            size = len(body)
            guest.num_bytes += size
            request, digest = read_request(body, kind), _digest(path.encode() + b"\0" + body)
            del body
            answer = guest.take_over(digest) or self._start(
                guest, partial(answer_request, self._routes, guest.episode, request)
            )
            if not await _deliver(answer, receive, send, streams=bool(request.stream)):
                guest.abandoned.append((digest, answer))
        finally:
            guest.num_open -= 1
            guest.num_bytes -= size

    def _find_guest(self, headers: Mapping[str, str]) -> _Guest:
        """Return the episode to which the key of a request belongs. Raises RefusedRequest with status 401 if there is
        none."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        guest = self._guests.get(_digest(key.strip().encode()))
        if scheme.lower() != "bearer" or guest is None:
            raise RefusedRequest(
                "the header 'Authorization: Bearer KEY' must contain the key of an open episode",
                status=401,
                code="invalid_api_key",
            )
        return guest

    def _start(self, guest: _Guest, sample: Callable[[], DoorReply]) -> asyncio.Future[DoorReply]:
        """Start to compute an answer. Raises RefusedRequest if the episode has ended."""
        if guest.is_dismissed:
            raise _ended()
        answer = asyncio.ensure_future(guest.sample(sample))
        guest.unfinished.add(answer)
        answer.add_done_callback(guest.unfinished.discard)
        answer.add_done_callback(_has_failed)  # marks an error as read
        return answer


def _sample(guest: _Guest, sample: Callable[[], DoorReply]) -> DoorReply:
    """Return the answer to a request. Errors other than RefusedRequest are logged, unless the episode has ended, and
    the client receives status 500."""
    try:
        return sample()
    except RefusedRequest:
        raise
    except Exception:
        if guest.is_dismissed:
            raise _ended() from None
        logger.exception("A turn of an agent could not be sampled")
        raise RefusedRequest(
            "the turn could not be sampled. The log of the worker contains the error", status=500, code="engine_failed"
        ) from None


def _has_failed(answer: asyncio.Future[DoorReply]) -> bool:
    """Return whether an answer has ended with an error or was canceled."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _configure_server(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of the HTTP server."""
    return uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",  # a warning for every malformed request would fill the log
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=128,  # asyncio accepts this many connections before the surplus is closed
        timeout_graceful_shutdown=2,
    )


async def _deliver(answer: asyncio.Future[DoorReply], receive: Receive, send: Send, *, streams: bool) -> bool:
    """Send an answer when it is ready, and return True. Return False if the client disconnects first. Raises
    RefusedRequest if the request was refused and nothing was sent yet."""
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    has_started = False
    try:
        while not answer.done() and not gone.done():
            waiting: set[asyncio.Future[Any]] = {answer, gone}
            await asyncio.wait(waiting, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if streams and not answer.done() and not gone.done():
                await _send_event(send, WAIT_EVENT, starts=not has_started)
                has_started = True
    finally:
        gone.cancel()
    if gone.done():
        return False
    if streams:
        await _send_stream(answer, send, has_started=has_started)
    else:
        await JSONResponse(_result_of(answer).body)({"type": "http"}, receive, send)
    return True


def _result_of(answer: asyncio.Future[DoorReply]) -> DoorReply:
    """Return an answer that is done. Raises RefusedRequest if the request was refused or the episode has ended."""
    if answer.cancelled():
        raise _ended()
    return answer.result()


async def _send_stream(answer: asyncio.Future[DoorReply], send: Send, *, has_started: bool) -> None:
    """Send the rest of an event stream. If the stream has started, an error is sent as an event."""
    try:
        events = encode_events(_result_of(answer).events)
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


# Class of the requests of each path, and function that answers them.
_ROUTES: Final[Mapping[str, tuple[type[Any], Callable[..., DoorReply]]]] = {
    "/v1/chat/completions": (ChatRequest, AgentRoutes.answer_chat),
    "/v1/completions": (TextRequest, AgentRoutes.answer_texts),
    "/inference/v1/generate": (TokenRequest, AgentRoutes.answer_tokens),
}
