"""Asking one vLLM server over HTTP, by the routes that `plugin/` adds to it, and the records that go between them.

Both ends stand in this repository and change together. Everything that a server may do wrong has one of five names:
EndpointDown (no answer, or no whole one; asking again may help), Stale (it serves other weights than the work wants),
WorkerFailed (it refuses the work), Quarantined (it makes other tokens of images than the work has), BadInput (the key).
"""

import contextlib
import functools
import ssl
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from infra.errors import BadInput, EndpointDown, Quarantined, RheostatError, WorkerFailed
from infra.untrusted_text import redact
from models.config.engines import SamplingConfig
from models.records.model_input import ModelInput


class Spelling(Protocol):
    """How inputs are put to servers of a policy: `models.engines.vllm.images.ServedSight`."""

    @property
    def banned(self) -> list[JsonValue]:
        """Tokens whose probability is 0."""

    def spell(self, given: ModelInput) -> dict[str, JsonValue]:
        """Spell an input in JSON."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion that is wanted of a server."""

    id: int
    input: ModelInput
    seed: int
    max_tokens: int
    experts: bool = False
    """Whether to tell what routers choose."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion beside its length."""

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    ignore_eos: bool = False


class CompletionLine(BaseModel):
    """A JSON object that a server answers."""

    model_config = ConfigDict(frozen=True)


class About(CompletionLine):
    """What a server is; none of it changes while it runs."""

    vllm: str
    torch: str
    transformers: str
    python: str
    platform: Literal["cpu", "cuda"]
    device: str
    dtype: str
    logprobs: Literal["processed", "raw"]
    max_model_len: int
    tensor_parallel: int
    lora_rank: int
    sleeps: bool
    tells_experts: bool
    """Whether it can tell what the routers of its model choose."""


class Loaded(CompletionLine):
    """What a load came to."""

    digest: str
    bytes: int
    seconds: float


class RoutedRows(CompletionLine):
    """What routers chose for each token of prompt and completion but the last, token after token."""

    rows: Base64Bytes
    width: Annotated[int, Field(gt=0)]
    """Experts of a token in all layers."""
    dtype: Literal["<u1", "<u2"]


class Chunk(CompletionLine):
    """The next tokens of a completion, and after the last why it ended."""

    id: int
    tokens: Base64Bytes
    logprobs: Base64Bytes
    finish: Literal["stop", "length", "abort"] | None
    experts: RoutedRows | None = None
    """In the last, where they were asked for and a token came."""


class RequestRefused(CompletionLine):
    """What went wrong in the middle: with a digest, the server does not vouch for a completion."""

    error: str
    digest: str | None = None


class RequestDone(CompletionLine):
    """The end of an answer: sums over the decoding steps of the server since it started."""

    done: Literal[True]
    steps: int
    sequences: float
    sequences_squared: float
    seconds: float
    sequence_seconds: float


class Proof(CompletionLine):
    """What is served, empty where it is nothing or cannot be proven."""

    digest: str


class Slept(CompletionLine):
    """Whether memory was given back."""

    slept: bool


class Likelihoods(RequestDone):
    """Summed log-probs, prompts x continuations, row by row, and the same counts."""

    logprobs: Base64Bytes


class Error(CompletionLine):
    """Why a request was refused, and what is served where another digest was asked for."""

    error: str = ""
    digest: str = ""


LINES: Final = TypeAdapter(Annotated[Chunk | RequestDone | RequestRefused, Field(union_mode="left_to_right")])

CONNECT_SECONDS: Final = 10.0

READY_SECONDS: Final = 2.0

EXCERPT: Final = 300
"""Characters of a refusal that its message repeats."""
MAX_QUOTED: Final = 1 << 14
"""Characters of a refusal that are searched for the key before its message repeats some."""


class Stale(RheostatError):
    """A server serves other weights than the work wants, or cannot prove what it serves."""


A = TypeVar("A", bound=CompletionLine)


@dataclass(frozen=True, slots=True)
class ServerClient:
    """Asks one server. Every call has a connection of its own; closing it ends what the server does for the call.

    Nothing but connecting has a time limit: whoever watches the worker's progress decides how long is too long.
    """

    url: str
    key: str

    def __str__(self) -> str:
        return f"vLLM server {self.url}"

    def healthy(self) -> bool:
        """Whether the server answers, and says that its engine lives."""
        try:
            with self._ask("GET", "/health") as response:
                return response.status_code == HTTPStatus.OK
        except EndpointDown:
            return False

    def ready(self) -> bool:
        """Whether the server answers at once and knows the key, as no other at its address does."""
        try:
            with self._ask("GET", "/rheostat/about", within=READY_SECONDS) as response:
                return response.status_code == HTTPStatus.OK
        except EndpointDown:
            return False

    def about(self) -> About:
        return self._read("GET", "/rheostat/about", About)

    def load(self, directory: Path, adapter: Path | None, *, drain: bool = False) -> Loaded:
        """Let it take the bundle in `directory`; at once where it already serves it.

        With `drain` it answers first what it was asked before, instead of breaking it off.
        """
        paths: dict[str, JsonValue] = {"directory": str(directory.absolute()), "adapter": None, "drain": drain}
        if adapter is not None:
            paths["adapter"] = str(adapter.absolute())
        return self._read("POST", "/rheostat/load", Loaded, body=paths)

    def proof(self) -> str:
        """Return the digest of what it serves, empty where it cannot prove it."""
        return self._read("GET", "/rheostat/proof", Proof).digest

    def sleep(self) -> bool:
        """Let it give its memory back, where it can."""
        return self._read("POST", "/rheostat/sleep", Slept, body={}).slept

    def likelihoods(
        self,
        digest: str,
        prompts: Sequence[ModelInput],
        continuations: Sequence[Sequence[int]],
        *,
        sight: Spelling,
    ) -> tuple[NDArray[np.float64], RequestDone]:
        """Return summed log-probs, prompts x continuations, and the server's counts."""
        body: dict[str, JsonValue] = {
            "digest": digest,
            "banned": sight.banned,
            "prompts": [sight.spell(prompt) for prompt in prompts],
            "continuations": [list(tokens) for tokens in continuations],
        }
        answer = self._read("POST", "/rheostat/likelihoods", Likelihoods, body=body)
        found = np.frombuffer(answer.logprobs, "<f8")
        if found.size != len(prompts) * len(continuations):
            raise WorkerFailed(
                f"{self}: expected {len(prompts)} x {len(continuations)} log-probabilities, found {found.size}"
            )
        return found.reshape(len(prompts), len(continuations)), answer

    def generate(
        self, digest: str, asks: Sequence[Ask], sampling: SamplingConfig, *, stops: Stops, sight: Spelling
    ) -> Generator[Chunk | RequestDone, None, None]:
        """Yield the answer piece by piece as it comes; it is whole when `RequestDone` came."""
        body: dict[str, JsonValue] = {
            "digest": digest,
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop": list(stops.texts),
                "stop_token_ids": list(stops.tokens),
                "ignore_eos": stops.ignore_eos,
                "banned": sight.banned,
            },
            "requests": [
                {
                    "id": ask.id,
                    **sight.spell(ask.input),
                    "seed": ask.seed,
                    "max_tokens": ask.max_tokens,
                    "experts": ask.experts,
                }
                for ask in asks
            ],
        }
        with self._ask("POST", "/rheostat/generate", body) as response:
            self._check(response)
            for line in response.iter_lines():
                answer = self._parsed(line)
                if isinstance(answer, RequestRefused):
                    raise self._refusal(answer, digest)
                yield answer
                if isinstance(answer, RequestDone):
                    return
        raise EndpointDown(f"{self}: its answer ended before it was done")

    def _refusal(self, refused: RequestRefused, wanted: str) -> RheostatError:
        if refused.digest is not None:
            return Stale(
                f"{self}: {self._quoted(refused.error)} (it serves {refused.digest!r}, the work wants {wanted!r})"
            )
        return self._failure(f"{self} failed in the middle of its answer: {self._quoted(refused.error)}")

    def _failure(self, told: str) -> RheostatError:
        """Judge a failure by the server's health: another may do the work, or the work is at fault."""
        return WorkerFailed(told) if self.healthy() else EndpointDown(f"{told}; its engine is dead")

    def _parsed(self, line: str) -> Chunk | RequestDone | RequestRefused:
        try:
            return LINES.validate_json(line)
        except ValidationError:
            raise EndpointDown(f"{self}: a line of its answer is torn: {self._quoted(line)!r}") from None

    def _read(self, method: str, path: str, answer: type[A], *, body: dict[str, JsonValue] | None = None) -> A:
        with self._ask(method, path, body) as response:
            self._check(response)
            data = response.read()
        try:
            return answer.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise WorkerFailed(f"{self}{path}: {where}: {first['msg']}, found {self._excerpt(data)!r}") from error

    def _check(self, response: httpx.Response) -> None:
        """Raise what a refusal means."""
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        if status == HTTPStatus.UNAUTHORIZED:
            raise BadInput(f"{self} refuses the key: expected the one it was started with, in engine.api_key_variable")
        data = response.read()
        try:
            told = Error.model_validate_json(data)
        except ValidationError:
            told = Error(error=self._excerpt(data))
        told = Error(error=self._quoted(told.error), digest=told.digest)
        if status == HTTPStatus.CONFLICT:
            raise Stale(f"{self}: {told.error} (it serves {told.digest!r})")
        if status == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise Quarantined(f"{self}: {told.error}")
        refusal = f"{self} answers {status}: {told.error}"
        raise self._failure(refusal) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else WorkerFailed(refusal)

    @contextlib.contextmanager
    def _ask(
        self, method: str, path: str, body: dict[str, JsonValue] | None = None, *, within: float | None = None
    ) -> Iterator[httpx.Response]:
        """Send a request and hand out the response before its body was read."""
        lost = " does not answer"
        try:
            with _http().stream(
                method,
                f"{self.url.rstrip('/')}{path}",
                json=body,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
                timeout=httpx.Timeout(within, connect=within or CONNECT_SECONDS),
            ) as response:
                lost = ": its answer broke off"
                yield response
        except httpx.TransportError as error:
            reason = self._quoted(f"{type(error).__name__}: {error}".rstrip(": "))
            raise EndpointDown(f"{self}{lost}: {reason}") from None

    def _excerpt(self, data: bytes) -> str:
        return self._quoted(" ".join(data[:MAX_QUOTED].decode(errors="replace").split()))

    def _quoted(self, text: str) -> str:
        """Return the beginning of a text of the server, without the key."""
        return redact(text[:MAX_QUOTED], self.key)[:EXCERPT]


@functools.cache
def _http() -> httpx.Client:
    """Return what asks all servers: straight, past any proxy, and by a new connection each time."""
    return httpx.Client(
        transport=httpx.HTTPTransport(
            verify=ssl.create_default_context(), limits=httpx.Limits(max_keepalive_connections=0)
        ),
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
    )
