"""What callers ask of the server, checked once at the door, and how they are refused."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Refused(Exception):
    """A request that is answered with an error; `digest` is what is served where another was asked for."""

    def __init__(self, error: str, *, status: int = 400, digest: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.answer = {"error": error} | ({} if digest is None else {"digest": digest})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every completion of a piece of work is drawn."""

    temperature: float
    top_p: float
    top_k: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    banned: list[int]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: bytes of a file."""

    digest: str
    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy reads."""

    tokens: list[int]
    """All of them, those of images written out."""
    collapsed: list[int]
    """The same with one token in the place of each image; empty where there is none."""
    images: list[Picture]
    settings: dict[str, object]
    """What the model's own processor is told beside the settings in the directory."""

    def continued(self, tokens: list[int]) -> "Prompt":
        """Append tokens."""
        return replace(self, tokens=self.tokens + tokens, collapsed=self.collapsed + tokens)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One completion."""

    name: int
    prompt: Prompt
    seed: int
    max_tokens: int
    experts: bool
    """Whether to tell what routers choose."""


@dataclass(frozen=True, slots=True)
class Work:
    """Completions that are wanted of one policy."""

    digest: str
    sampling: Sampling
    wanted: list[Wanted]


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts, and the continuations of each whose log-probs are wanted of one policy."""

    digest: str
    prompts: list[Prompt]
    continuations: list[list[int]]
    banned: list[int]


def read_load(body: bytes) -> tuple[Path, Path | None, bool]:
    """Read which weights are to be loaded, which adapter with them, and whether requests are answered first."""
    fields = _fields(body)
    adapter = fields.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise Refused(f"adapter: expected a directory or null, found {adapter!r}")
    drain = fields.get("drain", False) is True
    return Path(_field(fields, "directory", str)), None if adapter is None else Path(adapter), drain


def read_work(body: bytes) -> Work:
    """Read a piece of work; what the tokens must be is vLLM's to say."""
    fields = _fields(body)
    how = _field(fields, "sampling", dict)
    sampling = Sampling(
        temperature=_number(how, "temperature"),
        top_p=_number(how, "top_p"),
        top_k=_field(how, "top_k", int),
        stop=_field(how, "stop", list),
        stop_token_ids=_field(how, "stop_token_ids", list),
        ignore_eos=_field(how, "ignore_eos", bool),
        banned=_field(how, "banned", list),
    )
    wanted = [
        Wanted(
            name=_field(one, "id", int),
            prompt=_prompt(one),
            seed=_field(one, "seed", int),
            max_tokens=_field(one, "max_tokens", int),
            experts=one.get("experts", False) is True,
        )
        for one in _field(fields, "requests", list)
    ]
    if len({one.name for one in wanted}) < len(wanted):
        raise Refused("requests: expected ids that differ")
    return Work(digest=_field(fields, "digest", str), sampling=sampling, wanted=wanted)


def read_questions(body: bytes) -> Questions:
    """Read what is to be scored."""
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
            raise Refused(f"{name}: expected lists of at least one token each")
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
        raise Refused(f"expected a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f"expected a JSON object, found {type(fields).__name__}")
    return fields


def _number(fields: dict[str, object], name: str) -> float:
    return float(_field(fields, name, (int if isinstance(fields.get(name), int) else float)))


def _field(fields: dict[str, object], name: str, kind: type[T]) -> T:
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, kind):
        raise Refused(f"{name}: expected {kind.__name__}, found {value!r:.100}")
    return value
