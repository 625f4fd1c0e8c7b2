"""Requests that callers send to the server, checked once on arrival, and the error that refuses them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


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

    tokens: list[int]
    """All token IDs of the input. Each image is represented by its placeholder tokens."""
    collapsed: list[int]
    """Token IDs of the input with a single placeholder token per image, or an empty list if there is no image."""
    images: list[Picture]
    settings: dict[str, object]
    """Settings of the model's image processor with which the prompt was encoded, as far as they differ from those in
    the model's directory."""

    def append_completion(self, tokens: list[int]) -> "Prompt":
        """Return a copy of the prompt with the token IDs of a completion appended."""
        return replace(self, tokens=self.tokens + tokens, collapsed=self.collapsed + tokens)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion to generate, as part of a request to the server."""

    name: int
    prompt: Prompt
    seed: int
    max_tokens: int
    experts: bool
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
    continuations: list[list[int]]
    banned: list[int]


def read_load(body: bytes) -> tuple[Path, Path | None, bool]:
    """Parse a request to load a policy. Returns the directory of the weights, the directory of the adapter (or None),
    and whether open requests are finished first. Raises Refused if a field has the wrong type."""
    fields = _fields(body)
    adapter = fields.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise Refused(f"`adapter` must be the path of a directory or null, found {adapter!r}")
    drain = fields.get("drain", False) is True
    return Path(_field(fields, "directory", str)), None if adapter is None else Path(adapter), drain


def read_work(body: bytes) -> Work:
    """Parse the body of a request for completions. Raises Refused if a field is missing or has the wrong type, or if
    two completions have the same ID. The token IDs are left for vLLM to check."""
    fields = _fields(body)
    sampling_fields = _field(fields, "sampling", dict)
    sampling = Sampling(
        temperature=_number(sampling_fields, "temperature"),
        top_p=_number(sampling_fields, "top_p"),
        top_k=_field(sampling_fields, "top_k", int),
        stop=_field(sampling_fields, "stop", list),
        stop_token_ids=_field(sampling_fields, "stop_token_ids", list),
        ignore_eos=_field(sampling_fields, "ignore_eos", bool),
        banned=_field(sampling_fields, "banned", list),
    )
    requests = [
        CompletionRequest(
            name=_field(one, "id", int),
            prompt=_prompt(one),
            seed=_field(one, "seed", int),
            max_tokens=_field(one, "max_tokens", int),
            experts=one.get("experts", False) is True,
        )
        for one in _field(fields, "requests", list)
    ]
    if len({one.name for one in requests}) < len(requests):
        raise Refused("`requests` contains an id twice, but the ids of a request must be unique")
    return Work(digest=_field(fields, "digest", str), sampling=sampling, requests=requests)


def read_questions(body: bytes) -> Questions:
    """Parse a request for log-probs of continuations.

    Raises Refused if a field is missing or has the wrong type, or if a prompt or continuation has no tokens.
    """
    fields = _fields(body)
    questions = Questions(
        digest=_field(fields, "digest", str),
        prompts=[_prompt(one) for one in _field(fields, "prompts", list)],
        continuations=_field(fields, "continuations", list),
        banned=_field(fields, "banned", list),
    )
    rows = {"prompts": [prompt.tokens for prompt in questions.prompts], "continuations": questions.continuations}
    for name, tokens in rows.items():
        if not all(isinstance(row, list) and row for row in tokens):
            raise Refused(f"`{name}` must contain only lists of at least one token")
    return questions


def _prompt(one: dict[str, object]) -> Prompt:
    tokens = _field(one, "tokens", list)
    if "images" not in one:
        return Prompt(tokens, [], [], {})
    pictures = [
        Picture(
            digest=_field(each, "digest", str),
            path=_field(each, "path", str),
            offset=_field(each, "offset", int),
            length=_field(each, "length", int),
        )
        for each in _field(one, "images", list)
    ]
    return Prompt(tokens, _field(one, "collapsed", list), pictures, _field(one, "settings", dict))


def _fields(body: bytes) -> dict[str, object]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise Refused(f"the body of the request is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f"the body of the request must be a JSON object, found {type(fields).__name__}")
    return fields


def _number(fields: dict[str, object], name: str) -> float:
    return float(_field(fields, name, (int if isinstance(fields.get(name), int) else float)))


def _field(fields: dict[str, object], name: str, kind: type[T]) -> T:
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, kind):
        raise Refused(f"{name}: expected {kind.__name__}, found {value!r:.100}")
    return value
