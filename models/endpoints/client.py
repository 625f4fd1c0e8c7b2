"""Client that queries a model over HTTP with retries. Completions leave the machine only here, to allowed addresses."""

import asyncio
import email.utils
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Generic, TypeVar

import httpx
from pydantic import JsonValue
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exception,
    wait_random_exponential,
)

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, EndpointDown, WorkerFailed
from rheostat.infra.untrusted_text import redact
from rheostat.models.config.endpoints import MAX_BACKOFF_SECONDS, MAX_RETRY_AFTER_SECONDS, Endpoint
from rheostat.models.endpoints.addresses import PinnedTransport, parse_endpoint

R = TypeVar("R")

EXCERPT = 200
"""Maximum number of characters of an error response that are quoted in a message."""
MAX_QUOTED = 1 << 14
"""Maximum number of bytes of a response that are searched for the API key before an excerpt is quoted."""
RETRIED_STATUSES = {408, 409, 429}
"""HTTP status codes below 500 after which a request is retried. Requests are also retried after all 5xx codes."""
SINGLE_REQUEST_STATUSES = {400, 413}
"""HTTP status codes that may concern only the request itself, most often because it is too long for the model."""


@dataclass(frozen=True, slots=True)
class EndpointRequest(Generic[R]):
    """Request to an endpoint, with functions that convert its response or its failure to a result. If such a function
    raises an error, all requests are aborted."""

    body: Callable[[], dict[str, JsonValue]]
    """Function that builds the JSON body, called for each attempt, so that waiting requests need no memory for their
    bodies."""
    answer: Callable[[bytes], R]
    """Function that converts the body of a successful response to a result."""
    refusal: Callable[[str], R]
    """Function that returns the result if the endpoint rejects this single request. Its argument is the reason in one
    line."""
    outage: Callable[[str], R] | None = None
    """Function that returns the result if the endpoint is down, given the reason. If None, an outage aborts all
    requests."""


class _Unanswered(Exception):
    """Raised when one attempt to send a request fails in a way that may be temporary."""

    def __init__(self, reason: str, *, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


class EndpointClient:
    """Client that posts requests to one path of an endpoint concurrently and returns the results in the order of the
    requests. Raises EndpointDown if the endpoint does not answer after all attempts and the request has no `outage`,
    and WorkerFailed if the endpoint rejects requests. Neither case is ever converted into an answer of the model."""

    def __init__(self, config: Endpoint, path: str, *, max_bytes: int, on_progress: Callable[[], None]) -> None:
        """Validate the settings without network access. Raises BadInput if the endpoint may not be used.

        Responses longer than `max_bytes` are rejected. `on_progress` is called after every attempt.
        """
        self._config, self._max_bytes, self._on_progress = config, max_bytes, on_progress
        base = parse_endpoint(config.base_url, config.allowed_hosts, allow_private=config.allow_private)
        self._endpoint = replace(base, path=f"{base.path}{path}")
        self._key = _read_api_key(config.api_key_variable)
        self._answered = 0

    def __str__(self) -> str:
        return f"endpoint {self._endpoint}"

    def post(self, requests: Sequence[EndpointRequest[R]]) -> list[R]:
        """Send all requests and return one result for each request, in order."""
        return asyncio.run(self._send_all(requests)) if requests else []

    async def _send_all(self, requests: Sequence[EndpointRequest[R]]) -> list[R]:
        """Send all requests, at most `concurrency` at a time, and return their results. If one of them raises an error,
        cancel the others."""
        # a retrying request keeps its place, so a busy server gets fewer requests
        places = asyncio.Semaphore(self._config.concurrency)
        async with self._build_client() as client:

            async def answer(request: EndpointRequest[R]) -> R:
                async with places:
                    return await self._send_with_retries(client, request)

            tasks = [asyncio.create_task(answer(request)) for request in requests]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _build_client(self) -> httpx.AsyncClient:
        """Create the HTTP client, which sends the API key, if there is one, with every request."""
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # No proxy and no .netrc of the environment: a proxy would resolve the name again and see the data. The limit on
        # a whole request is in `_send_once`, because httpx limits only single steps.
        return httpx.AsyncClient(
            transport=PinnedTransport(self._endpoint, connections=self._config.concurrency),
            headers=headers,
            trust_env=False,
            timeout=None,
            follow_redirects=False,
        )

    async def _send_with_retries(self, client: httpx.AsyncClient, request: EndpointRequest[R]) -> R:
        """Send a request until an attempt succeeds, and return its result. Raises EndpointDown after the last attempt
        fails."""
        before, attempts = self._answered, self._config.retries + 1
        backoff = wait_random_exponential(multiplier=self._config.backoff_seconds, max=MAX_BACKOFF_SECONDS)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Unanswered),
            stop=stop_after_attempt(attempts),
            wait=backoff + wait_exception(_find_requested_pause),
            sleep=asyncio.sleep,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await self._send_once(client, request, attempt=attempt.retry_state.attempt_number - 1)
        except _Unanswered as failure:
            # Some requests crash a server. A request that fails while others are answered is treated as its own error.
            if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR and self._answered > before:
                return request.refusal(
                    "the endpoint responds with status 500 to this request, although it answers other requests"
                )
            down = (
                f"{self} did not answer a request in {format_count(attempts, 'attempt')}. The last attempt failed: "
                f"{failure}. Check that the server runs and is reachable"
            )
            if request.outage is not None:
                return request.outage(down)
            raise EndpointDown(down) from failure
        self._answered += 1
        return answer

    async def _send_once(self, client: httpx.AsyncClient, request: EndpointRequest[R], *, attempt: int) -> R:
        """Make one attempt to send a request, and return its result. Raises _Unanswered if the attempt fails in a way
        that may be temporary."""
        seconds = self._config.timeout_seconds
        post = partial(client.stream, "POST", str(self._endpoint), extensions={"attempt": attempt})
        try:
            async with asyncio.timeout(seconds), post(json=request.body()) as response:
                data = await _read_body(response, max_bytes=self._max_bytes)
        except TimeoutError:
            raise _Unanswered(f"no response within {seconds:g} s (timeout_seconds)") from None
        except httpx.TransportError as error:
            raise _Unanswered(redact(f"{type(error).__name__}: {error}".rstrip(": "), self._key)) from None
        finally:
            self._on_progress()
        return self._convert_response(request, response, data)

    def _convert_response(self, request: EndpointRequest[R], response: httpx.Response, data: bytes) -> R:
        """Return the result for a response. Raises _Unanswered for a failure that may be temporary, and WorkerFailed if
        the endpoint rejects requests."""
        status = response.status_code
        if status in RETRIED_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            pause = _parse_retry_after(response.headers.get("Retry-After", ""))
            raise _Unanswered(f"the server responded with {_format_status(status)}", status=status, retry_after=pause)
        if status in SINGLE_REQUEST_STATUSES:
            return request.refusal(f"the endpoint responded with {_format_status(status)}: {self._excerpt(data)}")
        if response.has_redirect_location:
            raise WorkerFailed(
                f"{self} responded with {_format_status(status)}, but redirects are not followed. Set base_url to the "
                "final URL."
            )
        if status != HTTPStatus.OK:
            raise WorkerFailed(f"{self} rejected a request with {_format_status(status)}: {self._excerpt(data)}")
        if len(data) > self._max_bytes:
            return request.refusal(f"the response is longer than {self._max_bytes} bytes")
        return request.answer(data)

    def _excerpt(self, data: bytes) -> str:
        """Return the start of a response in one line, with the API key removed, because some servers repeat it."""
        text = " ".join(data[:MAX_QUOTED].decode(errors="replace").split())
        return redact(text, self._key)[:EXCERPT]


async def _read_body(response: httpx.Response, *, max_bytes: int) -> bytes:
    """Read the raw body of a response. Reading stops after the first chunk that exceeds `max_bytes`."""
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            break
    return bytes(data)


def _read_api_key(variable: str | None) -> str:
    """Return the API key that the environment variable `variable` contains. Raises BadInput if the key is missing or
    not plausible."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        value = "a text with spaces or special characters, which cannot be an API key" if key else "no text"
        raise BadInput(
            f"api_key_variable names the environment variable {variable!r}, but it contains {value}. Set the variable "
            "to an API key."
        )
    return key


def _find_requested_pause(failure: BaseException) -> float:
    """Return the seconds that the server asked the client to wait before the next attempt. They are added to the
    client's own backoff."""
    return failure.retry_after if isinstance(failure, _Unanswered) else 0.0


def _parse_retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, which contains seconds or a date, or 0 if the header is missing or
    invalid."""
    try:
        seconds = (
            float(header)
            if header[:1].isdigit()
            else email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        )
    except ValueError:
        return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _format_status(status: int) -> str:
    """Return an HTTP status code with its standard phrase, such as "404 Not Found"."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
