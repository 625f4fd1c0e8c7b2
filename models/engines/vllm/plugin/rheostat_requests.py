"""Requests that callers send to the server, checked once on arrival, and the error that refuses them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")
Tokens = Annotated[list[int], Field(min_length=1)]


class Refused(Exception):
    """Raised when a request to the server must be answered with an error. `digest` is the digest of the served policy,
    and is set if the request named another policy."""

    def __init__(self, error: str, *, status: int = 400, digest: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.answer = {"error": error} | ({} if digest is None else {"digest": digest})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters that apply to all completions of one request to the server."""

    temperature: float
    top_p: float
    top_k: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    banned: list[int]


@dataclass(frozen=True, slots=True)
class Picture:
    """Image stored as a range of bytes in a file."""

    digest: str
    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token IDs and images that are the input of the policy."""

    tokens: Tokens
    """All token IDs of the input. Each image is represented by its placeholder tokens."""
    collapsed: list[int] = field(default_factory=list)
    """Token IDs of the input with a single placeholder token per image, or an empty list if there is no image."""
    images: list[Picture] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    """Settings of the model's image processor with which the prompt was encoded, as far as they differ from those in
    the model's directory."""

    def append_completion(self, tokens: list[int]) -> "Prompt":
        """Return a copy of the prompt with the token IDs of a completion appended."""
        return replace(self, tokens=self.tokens + tokens, collapsed=self.collapsed + tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Prompt):
    """One completion to generate for a prompt, as part of a request to the server."""

    id: int
    seed: int
    max_tokens: int
    experts: bool = False
    """Whether the response reports the experts that the routers chose for each token."""


@dataclass(frozen=True, slots=True)
class Work:
    """Request to the server to generate completions. The request is refused unless the server serves the policy
    `digest`."""

    digest: str
    sampling: Sampling
    requests: list[CompletionRequest]


@dataclass(frozen=True, slots=True)
class Questions:
    """Request to the server for the log-prob of every continuation after every prompt. The request is refused unless
    the server serves the policy `digest`."""

    digest: str
    prompts: list[Prompt]
    continuations: list[Tokens]
    banned: list[int]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Request to the server for the log-probs of the tokens of a sequence, and for the `top` most probable tokens at
    each place. The request is refused unless the server serves the policy `digest`."""

    digest: str
    tokens: Tokens
    top: Annotated[int, Field(ge=0)]
    banned: list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Request to the server to load the weights in `directory` and the adapter, if there is one."""

    directory: Path
    adapter: Path | None = None
    drain: bool = False
    """Whether open requests are finished first. Otherwise they are aborted."""


def read_request(kind: type[T], body: bytes) -> T:
    """Parse the body of a request as JSON. `kind` is one of the classes of this file. Raises Refused if the body is not
    valid, or if two completions have the same ID. vLLM checks whether the token IDs are in the vocabulary."""
    try:
        request = TypeAdapter(kind).validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refused(": ".join([*filter(None, [".".join(map(str, first["loc"]))]), first["msg"]])) from error
    if isinstance(request, Work) and len({one.id for one in request.requests}) < len(request.requests):
        raise Refused("`requests` contains an id twice, but the ids of a request must be unique")
    return request
