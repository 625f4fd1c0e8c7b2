"""HTTP client of one vLLM server, for the routes that `plugin/` adds to vLLM, and the JSON objects of these routes.

Client and plugin are both part of this repository and change together. Every failure of a server is raised as one of
five errors: EndpointDown (no answer or an incomplete one, so another attempt may help), StaleWeights (the server's
weights are not the weights that the work requires), WorkerFailed (the server refuses the work), Quarantined (the server
expands images to tokens that differ from the tokens in the work), BadInput (the key is wrong).
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

from rheostat.infra.errors import BadInput, EndpointDown, Quarantined, RheostatError, WorkerFailed
from rheostat.infra.untrusted_text import redact
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.records.model_input import ModelInput


class InputEncoder(Protocol):
    """Encoder that converts model inputs to JSON for vLLM servers. `VisionInputEncoder` implements it, and
    `ServerClient` calls it."""

    @property
    def banned(self) -> list[JsonValue]:
        """IDs of the tokens that have probability 0, such as placeholders of images."""

    def encode(self, model_input: ModelInput) -> dict[str, JsonValue]:
        """Encode a model input as the JSON fields that a request to a server contains."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Request to a vLLM server for one completion: input (with existing tokens), seed below 2**63 and token limit."""

    id: int
    input: ModelInput
    seed: int
    max_tokens: int
    experts: bool = False
    """Whether the server must report the experts that a mixture of experts chose for each token."""


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop texts and stop tokens. They end a completion before its maximum length."""

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    ignore_eos: bool = False


class CompletionLine(BaseModel):
    """Base class of the JSON objects that a vLLM server returns. They are validated on arrival."""

    model_config = ConfigDict(frozen=True)


class ServerInfo(CompletionLine):
    """Properties of a vLLM server that stay the same while it runs."""

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
    """Whether the server can report the experts that a mixture of experts chooses for each token."""


class Loaded(CompletionLine):
    """Response to a request to load weights: the digest of the policy now served, the size of the weights in bytes and
    the seconds that loading took."""

    digest: str
    bytes: int
    seconds: float


class RoutedRows(CompletionLine):
    """Experts that a mixture of experts chose for each token of prompt and completion except the last, in token
    order."""

    rows: Base64Bytes
    width: Annotated[int, Field(gt=0)]
    """Number of experts chosen for one token in all layers together."""
    dtype: Literal["<u1", "<u2"]


class Chunk(CompletionLine):
    """Next tokens of a completion. The last chunk also contains the reason why the completion ended."""

    id: int
    tokens: Base64Bytes
    logprobs: Base64Bytes
    finish: Literal["stop", "length", "abort"] | None
    experts: RoutedRows | None = None
    """Experts chosen for each token, in the last chunk only, if requested and if at least one token was generated."""


class RequestRefused(CompletionLine):
    """Error that the server sends in the middle of a streamed response. If `digest` is set, the server no longer serves
    the weights that the completion needs."""

    error: str
    digest: str | None = None


class RequestDone(CompletionLine):
    """Last line of a server's streamed response, which shows that the response is complete. It contains sums over all
    decoding steps of the server."""

    done: Literal[True]
    steps: int
    sequences: float
    sequences_squared: float
    seconds: float
    sequence_seconds: float


class Proof(CompletionLine):
    """Response to a request to verify the served policy: its digest, or "" if no policy is served or the weights cannot
    be verified."""

    digest: str


class Slept(CompletionLine):
    """Response to a request to release the server's memory: whether it was released."""

    slept: bool


class Likelihoods(RequestDone):
    """Response with the summed log-probs of continuations, as float64 of shape (prompts, continuations), and the sums
    over decoding steps."""

    logprobs: Base64Bytes


class PromptScores(RequestDone):
    """Response with the log-probs of the tokens of a sequence after the first one, the most probable tokens in the
    place of each, and the sums over decoding steps."""

    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...]


class Error(CompletionLine):
    """Response to a refused request: the reason and, if the request named another policy, the digest of the served
    policy."""

    error: str = ""
    digest: str = ""


LINES: Final = TypeAdapter(Annotated[Chunk | RequestDone | RequestRefused, Field(union_mode="left_to_right")])

CONNECT_SECONDS: Final = 10.0

READY_SECONDS: Final = 2.0

EXCERPT: Final = 300
"""Maximum number of characters of a server's error text that an error message quotes."""
MAX_QUOTED: Final = 1 << 14
"""Maximum number of characters of a server's error text that are searched for the API key, which is removed before the
text is quoted."""


class StaleWeights(RheostatError):
    """Raised when a server does not serve the weights that the work requires, or cannot verify its weights."""


A = TypeVar("A", bound=CompletionLine)


@dataclass(frozen=True, slots=True)
class ServerClient:
    """HTTP client of one vLLM server: loads policies, generates completions and computes log-probs. Every call opens a
    separate connection. If the connection is closed, the server stops working on the call. Except in `is_ready`, only
    the connection attempt has a timeout, because a stalled worker is detected by its progress count."""

    url: str
    key: str

    def __str__(self) -> str:
        return f"vLLM server {self.url}"

    def is_healthy(self) -> bool:
        """Return whether the server answers and reports that its engine is alive."""
        try:
            with self._request("GET", "/health") as response:
                return response.status_code == HTTPStatus.OK
        except EndpointDown:
            return False

    def is_ready(self) -> bool:
        """Return whether the server answers within `READY_SECONDS` and accepts the API key. A different server at the
        same address would refuse the key."""
        try:
            with self._request("GET", "/rheostat/about", within=READY_SECONDS) as response:
                return response.status_code == HTTPStatus.OK
        except EndpointDown:
            return False

    def fetch_info(self) -> ServerInfo:
        return self._read("GET", "/rheostat/about", ServerInfo)

    def load(self, directory: Path, adapter: Path | None, *, drain: bool = False) -> Loaded:
        """Load the policy in `directory`, with the adapter in `adapter` if it is given. Returns at once if the server
        already serves this policy. With `drain`, the server first finishes its open requests instead of aborting them.
        """
        paths: dict[str, JsonValue] = {"directory": str(directory.absolute()), "adapter": None, "drain": drain}
        if adapter is not None:
            paths["adapter"] = str(adapter.absolute())
        return self._read("POST", "/rheostat/load", Loaded, body=paths)

    def fetch_digest(self) -> str:
        """Return the digest of the policy that the server serves, or an empty string if the server cannot verify it."""
        return self._read("GET", "/rheostat/proof", Proof).digest

    def sleep(self) -> bool:
        """Release the server's memory if its platform supports this. Returns whether the memory was released."""
        return self._read("POST", "/rheostat/sleep", Slept, body={}).slept

    def score_continuations(
        self,
        digest: str,
        prompts: Sequence[ModelInput],
        continuations: Sequence[Sequence[int]],
        *,
        vision: InputEncoder,
    ) -> tuple[NDArray[np.float64], RequestDone]:
        """Return the summed log-prob of each continuation after each prompt, of shape (prompts, continuations), and the
        server's sums over decoding steps. Raises StaleWeights if the server does not serve the policy `digest`."""
        body: dict[str, JsonValue] = {
            "digest": digest,
            "banned": vision.banned,
            "prompts": [vision.encode(prompt) for prompt in prompts],
            "continuations": [list(tokens) for tokens in continuations],
        }
        answer = self._read("POST", "/rheostat/likelihoods", Likelihoods, body=body)
        logprobs = np.frombuffer(answer.logprobs, "<f8")
        if logprobs.size != len(prompts) * len(continuations):
            raise WorkerFailed(
                f"{self} returned {logprobs.size} log-probs, but {len(prompts)} x {len(continuations)} were requested"
            )
        return logprobs.reshape(len(prompts), len(continuations)), answer

    def score_tokens(self, digest: str, tokens: Sequence[int], top: int, *, banned: list[JsonValue]) -> PromptScores:
        """Return the log-probs of the tokens of a sequence, and the `top` most probable tokens at each position. Tokens
        in `banned` have probability 0. Raises StaleWeights if the server does not serve the policy `digest`."""
        body: dict[str, JsonValue] = {"digest": digest, "tokens": [*tokens], "top": top, "banned": banned}
        scores = self._read("POST", "/rheostat/score", PromptScores, body=body)
        if (len(scores.logprobs), len(scores.best)) != (len(tokens) - 1,) * 2:
            raise WorkerFailed(f"{self} returned {len(scores.logprobs)} log-probs for {len(tokens)} tokens")
        return scores

    def generate(
        self,
        digest: str,
        requests: Sequence[CompletionRequest],
        sampling: SamplingConfig,
        *,
        stops: Stops,
        vision: InputEncoder,
    ) -> Generator[Chunk | RequestDone, None, None]:
        """Generate completions and yield the chunks of the response as they arrive. The response is complete when
        `RequestDone` arrives. Raises StaleWeights if the server serves another policy than `digest`, and EndpointDown
        if the response ends early."""
        body: dict[str, JsonValue] = {
            "digest": digest,
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop": list(stops.texts),
                "stop_token_ids": list(stops.tokens),
                "ignore_eos": stops.ignore_eos,
                "banned": vision.banned,
            },
            "requests": [
                {
                    "id": request.id,
                    **vision.encode(request.input),
                    "seed": request.seed,
                    "max_tokens": request.max_tokens,
                    "experts": request.experts,
                }
                for request in requests
            ],
        }
        with self._request("POST", "/rheostat/generate", body) as response:
            self._check(response)
            for line in response.iter_lines():
                answer = self._parse_line(line)
                if isinstance(answer, RequestRefused):
                    raise self._build_refusal(answer, digest)
                yield answer
                if isinstance(answer, RequestDone):
                    return
        raise EndpointDown(f"{self} closed the connection before its response was complete")

    def _build_refusal(self, refused: RequestRefused, digest: str) -> RheostatError:
        if refused.digest is not None:
            return StaleWeights(
                f"{self}: {self._quoted(refused.error)} (it serves policy {refused.digest!r}, but this request needs "
                f"policy {digest!r})"
            )
        return self._build_failure(f"{self} reported an error in its response: {self._quoted(refused.error)}")

    def _build_failure(self, message: str) -> RheostatError:
        """Return the error for a failed request: WorkerFailed if the server is healthy, because then the request is at
        fault, else EndpointDown."""
        return (
            WorkerFailed(message)
            if self.is_healthy()
            else EndpointDown(f"{message}. The server's engine has failed, so the server must be restarted")
        )

    def _parse_line(self, line: str) -> Chunk | RequestDone | RequestRefused:
        try:
            return LINES.validate_json(line)
        except ValidationError:
            raise EndpointDown(f"{self} sent an incomplete JSON line: {self._quoted(line)!r}") from None

    def _read(self, method: str, path: str, answer: type[A], *, body: dict[str, JsonValue] | None = None) -> A:
        with self._request(method, path, body) as response:
            self._check(response)
            data = response.read()
        try:
            return answer.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise WorkerFailed(
                f"{self}{path} returned an invalid response: {where}: {first['msg']}: {self._excerpt(data)!r}"
            ) from error

    def _check(self, response: httpx.Response) -> None:
        """Raise the error that corresponds to the status of a response. Do nothing for status 200."""
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        if status == HTTPStatus.UNAUTHORIZED:
            raise BadInput(f"{self} rejects the API key in engine.api_key_variable. Set it to the key of the server")
        data = response.read()
        try:
            error = Error.model_validate_json(data)
        except ValidationError:
            error = Error(error=self._excerpt(data))
        error = Error(error=self._quoted(error.error), digest=error.digest)
        if status == HTTPStatus.CONFLICT:
            raise StaleWeights(f"{self}: {error.error} (it serves policy {error.digest!r})")
        if status == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise Quarantined(f"{self}: {error.error}")
        refusal = f"{self} responded with status {status}: {error.error}"
        raise self._build_failure(refusal) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else WorkerFailed(refusal)

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, JsonValue] | None = None, *, within: float | None = None
    ) -> Iterator[httpx.Response]:
        """Send a request and yield the response before its body is read.
        Raises EndpointDown if the connection fails.
        """
        problem = " does not respond"
        try:
            with _http().stream(
                method,
                f"{self.url.rstrip('/')}{path}",
                json=body,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
                timeout=httpx.Timeout(within, connect=within or CONNECT_SECONDS),
            ) as response:
                problem = " broke off its response"
                yield response
        except httpx.TransportError as error:
            reason = self._quoted(f"{type(error).__name__}: {error}".rstrip(": "))
            raise EndpointDown(f"{self}{problem}: {reason}") from None

    def _excerpt(self, data: bytes) -> str:
        return self._quoted(" ".join(data[:MAX_QUOTED].decode(errors="replace").split()))

    def _quoted(self, text: str) -> str:
        """Return the beginning of a server's error text, with the API key removed."""
        return redact(text[:MAX_QUOTED], self.key)[:EXCERPT]


@functools.cache
def _http() -> httpx.Client:
    """Return the HTTP client that all server clients share.
    The client ignores proxies and opens a new connection for each request.
    """
    return httpx.Client(
        transport=httpx.HTTPTransport(
            verify=ssl.create_default_context(), limits=httpx.Limits(max_keepalive_connections=0)
        ),
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
    )
