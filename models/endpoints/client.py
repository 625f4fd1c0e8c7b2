"""Asking a model over HTTP, patiently. Completions leave the machine here, and only to allowed addresses."""

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

from infra.errors import BadInput, EndpointDown, WorkerFailed
from infra.untrusted_text import redact
from models.config.endpoints import MAX_BACKOFF_SECONDS, MAX_RETRY_AFTER_SECONDS, Endpoint
from models.endpoints.addresses import PinnedTransport, parse_endpoint

R = TypeVar("R")

EXCERPT = 200
"""Characters of a refusal's body that its message repeats."""
MAX_QUOTED = 1 << 14
"""Bytes of a body that are searched for the key before an excerpt is quoted."""
AGAIN = {408, 409, 429}
"""Refusals that pass, beside 5xx."""
ITS_OWN = {400, 413}
"""Refusals that may be one request's fault: too long for the model, most often."""


@dataclass(frozen=True, slots=True)
class EndpointRequest(Generic[R]):
    """What is sent, and what becomes of the response; either reader may raise, which ends all requests."""

    body: Callable[[], dict[str, JsonValue]]
    """Makes what is sent as JSON, at each attempt: what waits for its turn takes no memory for it."""
    answer: Callable[[bytes], R]
    """Reads the body of an answer."""
    refusal: Callable[[str], R]
    """Takes the reason, in one line, why this request alone has no answer."""
    outage: Callable[[str], R] | None = None
    """Takes the reason why an endpoint that is down has no answer to it; without it that ends all requests."""


class _Unanswered(Exception):
    """One attempt failed in a way that passes."""

    def __init__(self, reason: str, *, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


class EndpointClient:
    """Posts requests to one path of an endpoint, several at once; answers come in the order of the requests.

    An endpoint that does not answer after all attempts raises EndpointDown, unless the request says what becomes of it;
    one that refuses raises WorkerFailed. Neither ever becomes an answer of the model's.
    """

    def __init__(self, config: Endpoint, path: str, *, max_bytes: int, on_progress: Callable[[], None]) -> None:
        """Check what can be checked without the network. Raises BadInput.

        Bodies beyond `max_bytes` are refused; `on_progress` is called after every attempt.
        """
        self._config, self._max_bytes, self._on_progress = config, max_bytes, on_progress
        base = parse_endpoint(config.base_url, config.allowed_hosts, allow_private=config.allow_private)
        self._endpoint = replace(base, path=f"{base.path}{path}")
        self._key = _key(config.api_key_variable)
        self._answered = 0

    def __str__(self) -> str:
        return f"endpoint {self._endpoint}"

    def ask(self, requests: Sequence[EndpointRequest[R]]) -> list[R]:
        """Return one answer per request, in order."""
        return asyncio.run(self._ask(requests)) if requests else []

    async def _ask(self, requests: Sequence[EndpointRequest[R]]) -> list[R]:
        places = asyncio.Semaphore(self._config.concurrency)  # a pause keeps its place: a busy server is asked less
        async with self._client() as client:

            async def answer(request: EndpointRequest[R]) -> R:
                async with places:
                    return await self._answer(client, request)

            asked = [asyncio.create_task(answer(request)) for request in requests]
            try:
                return list(await asyncio.gather(*asked))
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # No proxy and no .netrc of the environment: a proxy would resolve the name again, and see what is sent.
        # The limit on one request as a whole stands in `_post`; httpx limits only each of its steps.
        return httpx.AsyncClient(
            transport=PinnedTransport(self._endpoint, connections=self._config.concurrency),
            headers=headers,
            trust_env=False,
            timeout=None,
            follow_redirects=False,
        )

    async def _answer(self, client: httpx.AsyncClient, request: EndpointRequest[R]) -> R:
        """Make attempts until one succeeds. Raises EndpointDown after the last."""
        before, attempts = self._answered, self._config.retries + 1
        backoff = wait_random_exponential(multiplier=self._config.backoff_seconds, max=MAX_BACKOFF_SECONDS)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Unanswered),
            stop=stop_after_attempt(attempts),
            wait=backoff + wait_exception(_asked_patience),
            sleep=asyncio.sleep,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await self._post(client, request, attempt=attempt.retry_state.attempt_number - 1)
        except _Unanswered as failure:
            # Servers have requests that they fall over: one that fails while others are answered is its own error.
            if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR and self._answered > before:
                return request.refusal("the endpoint answers 500 to this request, and answers others")
            down = f"{self} is down: {failure}, at attempt {attempts} of {attempts}"
            if request.outage is not None:
                return request.outage(down)
            raise EndpointDown(down) from failure
        self._answered += 1
        return answer

    async def _post(self, client: httpx.AsyncClient, request: EndpointRequest[R], *, attempt: int) -> R:
        seconds = self._config.timeout_seconds
        post = partial(client.stream, "POST", str(self._endpoint), extensions={"attempt": attempt})
        try:
            async with asyncio.timeout(seconds), post(json=request.body()) as response:
                data = await _read(response, max_bytes=self._max_bytes)
        except TimeoutError:
            raise _Unanswered(f"no answer within {seconds:g} s") from None
        except httpx.TransportError as error:
            raise _Unanswered(redact(f"{type(error).__name__}: {error}".rstrip(": "), self._key)) from None
        finally:
            self._on_progress()
        return self._judge(request, response, data)

    def _judge(self, request: EndpointRequest[R], response: httpx.Response, data: bytes) -> R:
        """Tell answers from failures that pass and from refusals that do not."""
        status = response.status_code
        if status in AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            pause = _retry_after(response.headers.get("Retry-After", ""))
            raise _Unanswered(f"it answers {_spell(status)}", status=status, retry_after=pause)
        if status in ITS_OWN:
            return request.refusal(f"the endpoint answers {_spell(status)}: {self._excerpt(data)}")
        if response.has_redirect_location:
            raise WorkerFailed(f"{self} answered {_spell(status)}: completions follow no redirect")
        if status != HTTPStatus.OK:
            raise WorkerFailed(f"{self} answered {_spell(status)}: {self._excerpt(data)}")
        if len(data) > self._max_bytes:
            return request.refusal(f"the response is longer than {self._max_bytes} bytes")
        return request.answer(data)

    def _excerpt(self, data: bytes) -> str:
        """Quote the beginning of a body in one line; some servers repeat the key that they refuse."""
        text = " ".join(data[:MAX_QUOTED].decode(errors="replace").split())
        return redact(text, self._key)[:EXCERPT]


async def _read(response: httpx.Response, *, max_bytes: int) -> bytes:
    """Read a body as it came, at most one piece longer than `max_bytes`."""
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            break
    return bytes(data)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        found = "something that is no key" if key else "nothing"
        raise BadInput(f"api_key_variable: expected a key in the environment variable {variable!r}, found {found}")
    return key


def _asked_patience(failure: BaseException) -> float:
    """Return what the server asked for, before the pause of our own."""
    return failure.retry_after if isinstance(failure, _Unanswered) else 0.0


def _retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, in either of its forms; 0 for none."""
    try:
        seconds = (
            float(header)
            if header[:1].isdigit()
            else email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        )
    except ValueError:
        return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _spell(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
